"""Regenerates the protobuf modules in pagewire/protos; `--check` fails when they are out of date.

A client carries them in its package, and a process registers each .proto file once, by its name: so
that is where its module lies, which no other library has.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent
MODULES = Path("pagewire/protos")  # below the root
# Takes the files of this folder for those of the other one, as their imports of each other do.
SEEN_AS = f"-I{MODULES}={FOLDER}"


def generate(out: Path) -> None:
    """Write all generated modules below `out`, as `pagewire/protos/*_pb2*`."""
    sources = sorted(map(str, FOLDER.glob("*.proto")))
    outputs = [f"--{kind}_out={out}" for kind in ("python", "pyi", "grpc_python")]
    command = [sys.executable, "-m", "grpc_tools.protoc", SEEN_AS, *outputs, *sources]
    subprocess.run(command, cwd=ROOT, check=True)  # noqa: S603 - fixed arguments


def stale_modules() -> list[str]:
    """Return the names of generated modules that are missing, different or left over."""
    with tempfile.TemporaryDirectory() as scratch:
        generate(Path(scratch))
        fresh = {p.name: p.read_bytes() for p in (Path(scratch) / MODULES).glob("*_pb2*")}
    committed = {p.name: p.read_bytes() for p in (ROOT / MODULES).glob("*_pb2*")}
    names = fresh.keys() | committed.keys()
    return sorted(name for name in names if fresh.get(name) != committed.get(name))


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    if parser.parse_args().check:
        stale = stale_modules()
        if stale:
            sys.stderr.write(f"stale: {', '.join(stale)}; run `make protos`\n")
        return 1 if stale else 0
    generate(ROOT)
    return 0


if __name__ == "__main__":
    sys.exit(main())
