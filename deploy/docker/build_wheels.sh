#!/bin/sh
# Builds what the images install: deploy/docker/build_wheels.sh [FOLDER], by default wheels/ beside this file.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
wheels=${1:-$root/deploy/docker/wheels}
python=${PYTHON:-python3}
tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT

# The same tree makes the same bytes, so an unchanged layer of an image is not built, pushed and pulled again: all files of
# the wheels bear the first date that a zip archive can.
export SOURCE_DATE_EPOCH="${SOURCE_DATE_EPOCH:-315532800}"
umask 022

# From a copy: setuptools also takes what an earlier build has left in a tree.
packages=$("$python" - "$root/pyproject.toml" "$root/server/pyproject.toml" <<'END'
import sys, tomllib

files = [tomllib.load(open(each, "rb")) for each in sys.argv[1:]]
names = [name for each in files for name in each["tool"]["setuptools"]["packages"]]
print(*sorted({name.partition(".")[0] for name in names}))
END
)
# shellcheck disable=SC2086 # a list of words
tar -C "$root" --exclude=__pycache__ --exclude=build --exclude=results --exclude='*.egg-info' -cf - \
    --mode=u=rwX,go=rX pyproject.toml README.md LICENSE server $packages | tar -C "$tree" -xf -

mkdir -p "$wheels"
rm -f "$wheels"/pagewire*.whl
"$python" -m pip wheel --quiet --no-deps --wheel-dir "$wheels" "$tree" "$tree/server"
install -m 644 "$root/constraints.txt" "$wheels"
