"""Tokens of a client: given, from the environment or from a file, and with each of its calls."""

import asyncio

import pytest

import pagewire
from pagewire import AsyncClient, AuthenticationError, Client, InvalidRequestError
from tests.http_gateway.parrot import parrot, write_folder
from tests.http_gateway.serving import real_router
from tests.pagewire.scripted_service import serving_in_thread, tell
from tests.router.tenants.known import CLUSTER_TOKEN, tenants
from tests.support.command_line import run_main
from tests.support.disk import files_limited


@pytest.fixture(autouse=True)
def no_token(monkeypatch):
    monkeypatch.delenv("PAGEWIRE_TOKEN", raising=False)


def test_a_token_that_is_given_counts_before_the_environment(monkeypatch):
    def told(**options):
        with Client(address, **options) as client:
            return client.generate("x").text

    with serving_in_thread(tell) as (address, _):
        assert told() == "nobody"
        assert told(token="given") == "Bearer given"
        monkeypatch.setenv("PAGEWIRE_TOKEN", "of-the-environment\n")
        assert told() == "Bearer of-the-environment"
        assert told(token="given") == "Bearer given"
        assert told(token="") == "nobody"


@pytest.mark.parametrize("token", ["a b", "ä", "a\n", "x" * 4001, 5, b"x"])
def test_what_is_no_token_is_refused_and_not_shown(token):
    with pytest.raises(InvalidRequestError) as caught:
        Client(token=token)

    [violation] = caught.value.violations
    assert violation.field == "token"
    if isinstance(token, str):
        assert token not in str(caught.value)


def test_what_is_wrong_in_the_environment_is_named(monkeypatch):
    monkeypatch.setenv("PAGEWIRE_TOKEN", "a b")

    with pytest.raises(InvalidRequestError, match="PAGEWIRE_TOKEN: found 3 characters"):
        AsyncClient()


def test_every_method_brings_the_token_and_none_is_served_without(tmp_path):
    folder = write_folder(tmp_path / "model")

    async def make_calls(client):
        calls = (
            client.generate("hello", max_tokens=2),
            client.chat([{"role": "user", "content": "hello"}], max_tokens=2),
            client.tokenize("hello"),
            client.tokenize_chat([{"role": "user", "content": "hello"}]),
            client.detokenize([1, 2]),
            client.list_models(),
            client.status(),
        )
        return await asyncio.gather(*calls, return_exceptions=True)

    async def main():
        async with real_router(parrot(folder), folder, tenants=tenants()) as (address, _):
            async with AsyncClient(address, token="acme") as client:
                assert not [e for e in await make_calls(client) if isinstance(e, Exception)]
                status = await client.status()
                assert status.is_partial
                assert [each.name for each in status.tenants] == ["acme"]
                assert status.tenants[0].requests == 4  # tokenizing counts, too
            async with AsyncClient(address, token=CLUSTER_TOKEN) as client:
                assert [each.worker_id for each in (await client.status()).workers]
            for token in ("", "unknown"):
                async with AsyncClient(address, token=token) as client:
                    for error in await make_calls(client):
                        assert isinstance(error, AuthenticationError)
                        assert error.code == "UNAUTHENTICATED"

    asyncio.run(main())


def test_a_token_is_in_no_repr():
    client = AsyncClient(token="very-secret")

    assert "very-secret" not in repr(client) + repr(vars(client))


def test_commands_read_a_token_from_a_file_or_the_environment(tmp_path, monkeypatch, caplog):
    file = tmp_path / "token"
    file.write_text("of-the-file\n")
    file.chmod(0o644)
    with serving_in_thread(tell) as (address, _):
        ask = ("generate", "x", "--address", address)
        assert run_main(*ask).stdout == "nobody\n"
        public = run_main(*ask, "--token-file", str(file))
        file.chmod(0o600)
        monkeypatch.setenv("PAGEWIRE_TOKEN", "of-the-environment")
        assert run_main(*ask).stdout == "Bearer of-the-environment\n"
        private = run_main(*ask, "--token-file", str(file))

    assert public.stdout == private.stdout == "Bearer of-the-file\n"
    told = f"{file} has mode 0644: all users of this host may read it; use 0640"
    ours = [each for each in caplog.records if not each.name.startswith("grpc")]
    assert [each.message for each in ours] == [told]  # gRPC may tell of calls that a stop ended


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "No such file"),
        (b"", "nothing in"),
        (b"two words", "found 9 characters, some of which a token cannot have"),
        (b"\xff\xfe", "found 2 characters"),
    ],
)
def test_a_token_file_that_holds_no_token_is_one_clear_error(tmp_path, content, told):
    file = tmp_path / "token"
    if content is not None:
        file.write_bytes(content)
        file.chmod(0o600)
    result = run_main("generate", "x", "--token-file", str(file))

    assert result.returncode == 2
    assert result.stderr.startswith("error: --token-file: found ")
    assert told in result.stderr
    assert pagewire.InvalidRequestError.__name__ not in result.stderr


def test_tokens_new_prints_a_token_once_and_its_hash(tmp_path):
    from router.tenants.file import read_tenants, token_hash

    result = run_main("tokens", "new", "acme")

    token = result.stdout.strip()
    assert result.returncode == 0
    assert token not in result.stderr
    assert token_hash(token) in result.stderr
    file = tmp_path / "tenants.yaml"
    file.write_text(result.stderr.partition("\n")[2])
    assert [each.name for each in read_tenants(file).rules] == ["acme"]
    assert run_main("tokens", "new", "a b").returncode == 2


def test_tokens_new_writes_a_file_that_only_its_owner_reads(tmp_path):
    from router.tenants.file import token_hash

    file = tmp_path / "acme.token"

    result = run_main("tokens", "new", "acme", "--out", str(file))

    assert (result.returncode, result.stdout) == (0, "")
    token = file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600
    assert token_hash(token.strip()) in result.stderr
    again = run_main("tokens", "new", "acme", "--out", str(file))
    assert (again.returncode, file.read_text()) == (2, token)
    assert f"--out: found '{file}': File exists; allowed: a file to create" in again.stderr


def test_tokens_new_leaves_no_part_of_a_token_on_a_full_disk(tmp_path):
    file = tmp_path / "acme.token"

    with files_limited(16):
        result = run_main("tokens", "new", "acme", "--out", str(file))

    assert result.returncode == 2
    assert f"--out: found '{file}': File too large; allowed: a file to create" in result.stderr
    assert not file.exists(), "so that the command can be repeated"
