import subprocess
import sys

import pytest

from observability.open_files import FILES_BESIDE

PROGRAM = """
import resource
from observability.logs import configure_logging
from observability.open_files import raise_file_limit

resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
configure_logging("warning", "text")
raise_file_limit({max_connections})
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize("soft", [64, 500])
@pytest.mark.parametrize("lacking", [0, 1])
def test_the_soft_limit_becomes_the_hard_one_and_too_few_are_told(soft: int, lacking: int) -> None:
    max_connections = 500 - FILES_BESIDE + lacking
    program = PROGRAM.format(soft=soft, hard=500, max_connections=max_connections)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True
    )

    assert done.stdout.split() == ["500", "500"]
    told = (
        f"open files (ulimit -n): found 500; allowed: at least {500 + lacking}, for "
        f"{max_connections} connections"
    )
    assert done.stderr.count("few_open_files") == lacking
    assert (told in done.stderr) == bool(lacking)
