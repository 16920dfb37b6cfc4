"""The files of the page and GET /cluster, as bytes; test_page_in_browser.py runs them."""

import asyncio
import json
import re
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from http_gateway import cluster_view
from http_gateway.page_files import FOLDER, POLICY
from pagewire import UnavailableError
from tests.http_gateway.lively_cluster import LivelyCluster
from tests.http_gateway.raw_http import exchange, request
from tests.http_gateway.serving import gateway, scripted
from tests.pagewire.scripted_service import two_words
from tests.support.distributions import SERVER
from tests.support.virtual_time import run_virtual

FILES = sorted(path.name for path in FOLDER.iterdir())
SCRIPTS = [name for name in FILES if name.endswith(".js")]
INDEX = (FOLDER / "index.html").read_text()


def get(served, path, **headers):
    return exchange(served.host_and_port, request(path, method="GET", **headers))


# Files


@pytest.mark.parametrize("name", FILES)
def test_each_file_comes_with_its_type_and_forbids_everything_that_is_not_its_own(served, name):
    answer = get(served, "/" if name == "index.html" else f"/page/{name}")

    kinds = {"css": "text/css", "html": "text/html", "js": "text/javascript", "svg": "image/svg"}
    assert (answer.status, answer.body) == (200, (FOLDER / name).read_bytes())
    assert answer.headers["content-type"].startswith(kinds[name.rpartition(".")[2]])
    assert answer.headers["content-security-policy"] == POLICY
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["cache-control"] == "no-cache"


def test_the_policy_allows_nothing_inline_and_nothing_from_elsewhere():
    assert "default-src 'self'" in POLICY
    assert "unsafe" not in POLICY
    assert "http" not in POLICY
    assert "*" not in POLICY


def test_what_a_browser_has_already_is_not_sent_again(served):
    etag = get(served, "/").headers["etag"]

    for given in (etag, f"W/{etag}", f'"other", {etag}'):
        again = get(served, "/", if_none_match=given)
        assert (again.status, again.body) == (304, b"")
        assert again.headers["etag"] == etag
        assert "content-security-policy" in again.headers
    assert get(served, "/", if_none_match='"other"').status == 200
    assert get(served, "/page/style.css", if_none_match=etag).status == 200


@pytest.mark.parametrize(
    "path",
    [
        "/page",
        "/page/index.html",
        "/page/x.js",
        "/page/../app.py",
        "/page/..%2fapp.py",
        "/page/%2fetc%2fhosts",
    ],
)
def test_only_files_of_the_page_are_served(served, path):
    assert get(served, path).status == 404


def test_the_page_needs_no_router():
    with gateway(lambda: scripted(two_words)) as served:
        served.backend.is_away = True

        assert get(served, "/").status == 200


def test_the_page_is_installed():
    patterns = SERVER["tool"]["setuptools"]["package-data"]["http_gateway"]

    assert sorted(found.name for each in patterns for found in FOLDER.parent.glob(each)) == FILES


def test_the_page_is_small():
    assert sum((FOLDER / name).stat().st_size for name in FILES) < 64 * 1024


# What stands in them


def test_the_page_names_files_that_are_there_and_no_other_host():
    named = re.findall(r'(?:src|href)="([^"#][^"]*)"', INDEX)

    assert {each.removeprefix("page/") for each in named} <= set(FILES)
    assert all(each.startswith("page/") for each in named), "relative, to work below any path"
    for name in FILES:
        text = (FOLDER / name).read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?:|//[a-z]+\.[a-z]", text), name


def test_all_modules_are_asked_for_at_once():
    preloaded = set(re.findall(r'modulepreload" href="page/([^"]+)"', INDEX))

    imported = set()
    for name in SCRIPTS:
        imported |= set(re.findall(r'from "\./([^"]+)"', (FOLDER / name).read_text()))
    assert preloaded == imported


def test_nothing_is_inline():
    assert not re.search(r"<style|\sstyle=|\son[a-z]+=|<script(?![^>]*\ssrc=)|javascript:", INDEX)


@pytest.mark.parametrize("name", SCRIPTS)
def test_text_never_becomes_markup_or_code(name):
    text = (FOLDER / name).read_text()
    ways = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|setHTML|\beval\b"

    assert not re.search(ways + r"|new Function|createContextualFragment|srcdoc", text)


# GET /cluster


def cluster_of(served):
    answer = get(served, "/cluster")
    return answer.status, json.loads(answer.body)


def test_the_cluster_is_told_in_sums_without_addresses():
    lively = LivelyCluster()
    with gateway(lambda: scripted(two_words)) as served:
        served.backend.cluster = lively.status
        answer = get(served, "/cluster")

    told = json.loads(answer.body)
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert (told["active_requests"], told["index_pages"]) == (32, 2310)
    assert [each["worker_id"] for each in told["workers"]][:2] == ["prefill-0", "prefill-1"]
    worker = told["workers"][0]
    assert (worker["pool"], worker["state"], worker["incarnation"]) == (
        "prefill",
        "ready",
        "0000000000000007",
    )
    assert worker["pages"]["leased"] == 44
    assert worker["bytes_moved"] >= 40_000 * 131_072
    assert told["time_s"] > 1.7e9
    assert told["hot_prefixes"][1] == {
        "prefix_id": "03be77a9",
        "num_tokens": 512,
        "num_hits": 240,
        "workers": ["decode-0", "prefill-1"],
    }
    assert "secret-host" not in answer.body.decode()


def test_however_many_look_the_router_is_asked_once(monkeypatch):
    monkeypatch.setattr(cluster_view, "FRESH_S", 60.0)
    with gateway(lambda: scripted(two_words)) as served:
        with ThreadPoolExecutor(8) as viewers:
            told = list(viewers.map(lambda _: cluster_of(served), range(24)))

        assert served.backend.num_statuses == 1
    assert told == [told[0]] * 24


def test_without_a_router_the_cluster_is_an_error_with_words(monkeypatch):
    monkeypatch.setattr(cluster_view, "FRESH_S", 0.0)
    with gateway(lambda: scripted(two_words)) as served:
        assert cluster_of(served)[0] == 200
        served.backend.is_away = True
        status, body = cluster_of(served)

    assert (status, body["error"]["code"]) == (503, "unavailable")
    assert "away" in body["error"]["message"]


def test_all_who_look_while_the_router_hangs_are_told_at_the_same_time():
    class HangingRouter:
        def key(self, authorization):
            return authorization

        async def status(self, authorization):
            await asyncio.sleep(10)
            raise UnavailableError("away", code="UNAVAILABLE")

    async def scenario():
        view = cluster_view.ClusterView(HangingRouter())
        viewers = (view.show(SimpleNamespace(authorization="key"), {}) for _ in range(9))
        told = await asyncio.gather(*viewers, return_exceptions=True)

        assert {type(each) for each in told} == {UnavailableError}
        assert asyncio.get_running_loop().time() == 10

    run_virtual(scenario())
