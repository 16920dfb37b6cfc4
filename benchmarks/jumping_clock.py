"""The wall clock of some processes, which jumps while they run.

Linux has namespaces for other clocks, but not for this one. So a library is compiled and preloaded
into the processes, which adds seconds to the kernel's time (jumping_clock.c). Debian's faketime
cannot do this: it breaks `time.sleep` of Python 3.11 and newer.
"""

import shutil
import struct
import subprocess
from collections.abc import Mapping
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".c")


def why_no_clocks() -> str:
    """Say why no clock can jump on this machine; empty: it can."""
    return "" if shutil.which("cc") else "cc is missing (Debian: gcc)"


class JumpingClock:
    """One wall clock.

    Args:
        folder: Takes the library, and the file that tells how far the clock is ahead.
        name: The name of the clock in this folder.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._file = folder / f"{name}.clock"
        self._library = folder / "jumping_clock.so"
        self.ahead_s = 0
        self._tell()
        if not self._library.exists():
            command = ["cc", "-O2", "-shared", "-fPIC", "-o", str(self._library), str(SOURCE)]
            subprocess.run([*command, "-ldl", "-pthread"], check=True)  # noqa: S603 - of this file

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables of the processes that have this clock, and of those that they start."""
        return {"LD_PRELOAD": str(self._library), "JUMPING_CLOCK": str(self._file)}

    def jump(self, seconds: int) -> None:
        """Let it jump at once in all its processes; negative: back."""
        self.ahead_s += seconds
        self._tell()

    def _tell(self) -> None:
        if not self._file.exists():
            self._file.write_bytes(bytes(8))
        with self._file.open("r+b") as file:  # in place: processes have it in their memory
            file.write(struct.pack("=q", self.ahead_s))
