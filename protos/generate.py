"""Regenerates the protobuf modules in pagewire/protos; `--check` fails when they are out of date.

Clients carry them in their package. A process registers each .proto file once, under its name: the
module's path, which no other library uses.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent
MODULES = Path("pagewire/protos")  # below the root
# Makes protoc see this folder's files under the other folder, as their imports do.
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
