"""Files with keys that other users of a host may read are used, with a warning."""

from collections.abc import Callable
from pathlib import Path

import pytest

from credentials.key_file import read_router_keys, read_secret, write_router_keys
from pagewire.protos.pem import PemFile, PemFiles, read_pem
from tests.support.certificates import Authority


def secret(folder: Path) -> tuple[Path, Callable[[], object]]:
    path = folder / "secret"
    path.write_bytes(bytes(range(32)))
    return path, lambda: read_secret(path)


def router_keys(folder: Path) -> tuple[Path, Callable[[], object]]:
    path = folder / "router.keys"
    (folder / "secret").write_bytes(bytes(range(32)))
    write_router_keys(path, read_secret(folder / "secret").router_keys("router-0"))
    return path, lambda: read_router_keys(path)


def tls_key(folder: Path) -> tuple[Path, Callable[[], object]]:
    pair = Authority(folder).pair("worker")
    files = PemFiles(
        certificate=PemFile(option="tls.certificate_file", path=pair.certificate_file),
        key=PemFile(option="tls.key_file", path=pair.key_file),
    )
    return Path(pair.key_file), lambda: read_pem(files)


@pytest.mark.parametrize("make", [secret, router_keys, tls_key])
@pytest.mark.parametrize(
    ("mode", "may"), [(0o600, ""), (0o640, ""), (0o644, "read"), (0o646, "read and change")]
)
def test_a_file_that_others_may_read_is_told_of(
    make: Callable[[Path], tuple[Path, Callable[[], object]]],
    mode: int,
    may: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path, read = make(tmp_path)
    caplog.clear()
    path.chmod(mode)

    assert read()

    told = f"{path} has mode {mode:04o}: all users of this host may {may} it; use 0640"
    assert caplog.messages == ([told] if may else [])
