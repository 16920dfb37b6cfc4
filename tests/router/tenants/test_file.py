"""The tenants file: what it may hold, and one clear error for whatever else it does."""

import asyncio
import logging
import os
import re
from pathlib import Path

import pytest

from options.option import options_of
from router.errors import TenantsFileError
from router.tenants import file, watch
from router.tenants.file import (
    MAX_BYTES,
    digest_of,
    new_token,
    read_tenants,
    token_hash,
)
from router.tenants.registry import Tenants
from router.tenants.tenant import TenantRules
from router.tenants.watch import TenantsWatch
from tests.support.log_records import records_of

A, B = token_hash("a"), token_hash("b")


def written(folder: Path, text: str, mode: int = 0o640) -> Path:
    path = folder / "tenants.yaml"
    path.write_text(text)
    path.chmod(mode)
    return path


def test_a_file_names_tenants_their_tokens_and_their_limits(tmp_path: Path) -> None:
    text = f"""
acme:
  token_hashes: [{A}, {B.upper().replace("SHA256", "sha256")}]
  requests_per_s: 0.5
  burst: 3
  tokens_per_minute: 60000
  max_active_requests: 8
  weight: 2
  cache: family
  cache_share: 0.25
  operator: true
globex:
  token_hashes:
    - {token_hash("c")}
"""
    read = read_tenants(written(tmp_path, text))

    acme, globex = read.rules
    assert acme.token_digests == {digest_of(b"a"), digest_of(b"b")}
    assert (acme.requests_per_s, acme.burst_requests, acme.tokens_per_minute) == (0.5, 3, 60000)
    assert (acme.max_active_requests, acme.weight, acme.cache, acme.operator) == (
        *(8, 2, "family"),
        True,
    )
    assert (acme.cache_share, globex.cache_share) == (0.25, 1)
    assert (globex.name, globex.requests_per_s, globex.operator) == ("globex", 0, False)
    assert not read.warning


BAD = [
    ("", ["found no tenant; allowed: one or more"]),
    ("{}", ["found no tenant"]),
    ("- acme", ["found a list at the top level; allowed: a mapping of tenants"]),
    ("acme: {", ["line 1", "is not plain YAML"]),
    (
        f"acme:\n  token_hashes: [{A}]\n  cache: 2026-02-30",
        ["line 3, column 10: is not plain YAML: found a value that cannot be read: day is out of"],
    ),
    (
        f"acme: {{token_hashes: [{A}], burst: {'9' * 5000}}}",
        ["line 1", "is not plain YAML: found a value that cannot be read"],
    ),
    ("acme:", ["line 1: acme: found nothing; allowed: a mapping with token_hashes"]),
    ("a b: {}", ["line 1: name of a tenant: found 'a b'; allowed: 1 to 64 letters"]),
    ("acme: {weight: 2}", ["line 1: acme.token_hashes: found nothing; allowed: a list of one or"]),
    ("acme: {token_hashes: []}", ["acme.token_hashes: found an empty list; allowed: a list"]),
    (
        f"acme: {{token_hashes: {A}}}",
        ["acme.token_hashes: found a value of type str; allowed: a list"],
    ),
    (
        "acme:\n  token_hashes: [sha256:00ff]",
        ["line 2: acme.token_hashes[0]: found a text of length 11; allowed: sha256: and 64"],
    ),
    (
        f"acme: {{token_hashes: [{A}, 5]}}",
        ["acme.token_hashes[1]: found a value of type int; allowed: sha256:"],
    ),
    (
        f"acme: {{token_hashes: [{A}]}}\nglobex:\n  token_hashes: [{B}, {A}]",
        ["line 3: globex.token_hashes[1]: found the hash of acme.token_hashes[0]; allowed"],
    ),
    (f"acme: {{token_hashes: [{A}, {A}]}}", ["acme.token_hashes[1]: found the hash of acme.t"]),
    (
        f"acme:\n  token_hashes: [{A}]\n  quota: 5",
        ["line 3: acme.quota: found an unknown option; allowed: token_hashes, requests_per_s, "],
    ),
    (
        f"acme: {{token_hashes: [{A}], brst: 5}}",
        ["found an unknown option (did you mean 'acme.burst'?); allowed: "],
    ),
    (
        f"acme:\n  token_hashes: [{A}]\n  requests_per_s: -1",
        ["line 3: acme.requests_per_s: found -1; allowed: a finite number, 0 to 1000000"],
    ),
    (f"acme: {{token_hashes: [{A}], burst: 1.5}}", ["burst: found 1.5; allowed: an integer, 0 to"]),
    (f"acme: {{token_hashes: [{A}], weight: 0}}", ["weight: found 0; allowed: a finite number a"]),
    (
        f"acme: {{token_hashes: [{A}], cache_share: 0}}",
        ["cache_share: found 0; allowed: a finite nu"],
    ),
    (
        f"acme: {{token_hashes: [{A}], cache_share: 1.5}}",
        ["cache_share: found 1.5; allowed: a fini"],
    ),
    (
        f"acme: {{token_hashes: [{A}], cache: family}}\n"
        f"globex:\n  token_hashes: [{B}]\n  cache: family\n  cache_share: 0.5",
        [
            "line 5: globex.cache_share: found 0.5; allowed: 1, the share of acme, because "
            "tenants of one cache have the same sh"
        ],
    ),
    (f"acme: {{token_hashes: [{A}], operator: 1}}", ["operator: found 1; allowed: true or false"]),
    (f"acme: {{token_hashes: [{A}], cache: a b}}", ["cache: found 'a b'; allowed: empty, or 1 to"]),
    (f"acme: {{token_hashes: [{A}], weight: .nan}}", ["weight: found nan; allowed: a finite"]),
    (
        f"acme: {{token_hashes: [{A}]}}\nacme: {{token_hashes: [{B}]}}",
        ["line 2: acme is given twice, in lines 1 and 2; give it once"],
    ),
    (
        f"acme:\n  token_hashes: [{A}]\n  burst: -1\n  weight: x",
        ["line 3: acme.burst: found -1", "line 4: acme.weight: found 'x'"],
    ),
    ("#" + "x" * MAX_BYTES, [f"found more than {MAX_BYTES} bytes"]),
]


@pytest.mark.parametrize(("text", "told"), BAD, ids=[told[0] for _, told in BAD])
def test_what_is_wrong_is_named_with_its_place_and_what_is_allowed(
    tmp_path: Path, text: str, told: list[str]
) -> None:
    path = written(tmp_path, text)

    with pytest.raises(TenantsFileError) as caught:
        read_tenants(path)

    lines = str(caught.value).splitlines()
    assert all(line.startswith(str(path)) for line in lines)
    for each in told:
        assert any(each in line for line in lines), lines


def test_a_token_that_stands_where_its_hash_belongs_is_not_shown(tmp_path: Path) -> None:
    token = new_token()

    with pytest.raises(TenantsFileError) as caught:
        read_tenants(written(tmp_path, f"acme: {{token_hashes: [{token}]}}"))

    assert token not in str(caught.value)


@pytest.mark.parametrize("kind", ["missing", "folder", "binary"])
def test_a_file_that_cannot_be_read_says_why(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "tenants.yaml"
    if kind == "folder":
        path.mkdir()
    elif kind == "binary":
        path.write_bytes(b"\xff\xfe")

    with pytest.raises(
        TenantsFileError,
        match=r"^router.tenants_file: found '.*tenants.yaml', .*: (No such file|it is not a file)"
        r"|is not UTF-8; allowed: YAML in UTF-8$",
    ):
        read_tenants(path)


def test_a_file_that_other_users_may_read_is_warned_of(tmp_path: Path) -> None:
    text = f"acme: {{token_hashes: [{A}]}}"

    assert "mode 0644: all users" in read_tenants(written(tmp_path, text, 0o644)).warning
    assert not read_tenants(written(tmp_path, text, 0o440)).warning


def test_tokens_are_random_and_only_their_hash_is_in_the_file() -> None:
    first, second = new_token(), new_token()

    assert first != second
    assert len(first) >= 43
    assert first not in token_hash(first)


def test_a_changed_file_counts_and_a_broken_one_changes_nothing_and_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = written(tmp_path, f"acme: {{token_hashes: [{A}]}}")
    read = read_tenants(path)
    tenants = Tenants(read.rules)
    following = TenantsWatch(path, tenants, read)

    def replace_file(text: str) -> None:
        other = path.with_suffix(".new")
        other.write_text(text)
        other.chmod(0o640)
        os.replace(other, path)

    async def main() -> None:
        acme = tenants.of(digest_of(b"a"))
        assert acme is not None
        acme.counts.requests = 7

        replace_file(f"acme: {{token_hashes: [{B}], weight: 3}}\nnew: {{token_hashes: [{A}]}}")
        await following.look()
        assert tenants.of(digest_of(b"b")) is acme, "another token of the same tenant"
        assert (acme.rules.weight, acme.counts.requests) == (3, 7)
        other = tenants.of(digest_of(b"a"))
        assert other is not None
        assert other.name == "new"

        caplog.clear()
        for broken in (f"acme:\n  token_hashes: [{B}]\n  weight: -3", "acme: {"):
            replace_file(broken)
            await following.look()
            await following.look()
        assert tenants.of(digest_of(b"b")) is acme
        assert acme.rules.weight == 3
        path.unlink()
        await following.look()
        await following.look()
        assert tenants.of(digest_of(b"b")) is acme

    with caplog.at_level(logging.WARNING):
        asyncio.run(main())
    told = [record.fields["reason"] for record in records_of(caplog)]  # type: ignore[attr-defined]
    assert len(told) == 3
    assert "line 3: acme.weight: found -3; allowed:" in told[0]
    assert "is not plain YAML" in told[1]
    assert "cannot be read: No such file" in told[2]


@pytest.mark.parametrize("num_bugs", [0, 1])
def test_a_file_is_followed_while_the_router_runs_even_after_a_bug(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_bugs: int
) -> None:
    def version_of(path: Path) -> tuple[int, ...]:
        nonlocal num_bugs
        num_bugs -= 1
        if num_bugs >= 0:
            raise ZeroDivisionError
        return file.version_of(path)

    monkeypatch.setattr(watch, "PERIOD_S", 0.001)
    monkeypatch.setattr(watch, "version_of", version_of)
    path = written(tmp_path, f"acme: {{token_hashes: [{A}]}}")
    read = read_tenants(path)
    tenants = Tenants(read.rules)

    async def main() -> None:
        following = asyncio.create_task(TenantsWatch(path, tenants, read).run())
        written(tmp_path, f"acme: {{token_hashes: [{A}, {B}]}}")
        async with asyncio.timeout(10):
            while tenants.of(digest_of(b"b")) is None:
                await asyncio.sleep(0.001)
        following.cancel()

    asyncio.run(main())


def test_a_file_in_a_mounted_secret_is_followed_when_kubernetes_leads_its_folder_elsewhere(
    tmp_path: Path,
) -> None:
    def lead_to(name: str, text: str) -> None:
        (tmp_path / name).mkdir()
        written(tmp_path / name, text)
        (tmp_path / "new").symlink_to(name)
        os.replace(tmp_path / "new", tmp_path / "..data")

    lead_to("..1", f"acme: {{token_hashes: [{A}]}}")
    path = tmp_path / "tenants.yaml"
    path.symlink_to("..data/tenants.yaml")
    read = read_tenants(path)
    tenants = Tenants(read.rules)

    lead_to("..2", f"acme: {{token_hashes: [{B}]}}")
    asyncio.run(TenantsWatch(path, tenants, read).look())

    assert tenants.of(digest_of(b"a")) is None
    assert tenants.of(digest_of(b"b")) is not None


def test_the_page_on_tenants_has_all_fields_with_their_defaults() -> None:
    page = (Path(__file__).parents[3] / "docs" / "tenants.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (.*?) ?\| .+ \|$", page, re.MULTILINE)
    options = options_of(TenantRules)

    assert [name for name, _ in rows] == ["token_hashes", *options]
    shown = {"": "empty", False: "false"}
    for name, default in rows[1:]:
        found = options[name].default
        assert default == (shown[found] if isinstance(found, str | bool) else f"{found:g}")
    [example] = re.findall(r"```yaml\n# tenants.yaml\n(.*?)```", page, re.DOTALL)
    assert example.count("sha256:") == 2
