"""The page in a headless Chromium, before a router that knows a busy cluster: make test-page.

`make test-page PAGE_IMAGE=docs/images/page.png` makes the picture that the documentation shows.
"""

import json
import logging
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from credentials.door import front_door
from tests.docs.pages import page_digest
from tests.http_gateway.lively_cluster import LivelyCluster
from tests.http_gateway.parrot import parrot, write_folder
from tests.http_gateway.serving import gateway, real_router, scripted
from tests.pagewire.scripted_service import one_worker
from tests.router.tenants.known import rules, tenants
from tests.support.certificates import Authority
from tests.support.waiting import wait_until
from tests.support.wall_clock import assert_within, on_this_host

pytestmark = pytest.mark.browser

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
WIDE, PHONE = {"width": 1440, "height": 900}, {"width": 360, "height": 740}
ANSWERS = {  # of the picture for the documentation
    "What is a page of a KV cache?": (
        "A page holds the keys and values of a fixed number of tokens, for all layers of the model."
        " Prompts that begin alike have the same pages at their beginning."
    ),
    "And what moves between the two pools?": (
        "Pages. A prefill worker computes those that nobody has yet, and sends them to the decode"
        " worker that writes the answer. What that worker holds already stays where it is."
    ),
    "So what does a second question about one document cost?": (
        "Its own tokens, and no more: the document's pages are found where they are."
    ),
}
SECRET = "sk-8Qw3nR7tZk"  # the token of a tenant, like nothing else that is said
HOSTILE = (
    "<img src=x onerror=window.hit=1><script>window.hit=1</script><svg/onload=window.hit=1>"
    '<a href="javascript:window.hit=1">x</a><iframe srcdoc="<script>parent.hit=1</script>">'
    "</div></article><b>bold</b> &lt;i&gt; ${window.hit=1} {{hit}}"
)


@pytest.fixture(scope="module")
def launch():
    """Starts browsers, with the variables of their environment that differ."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="make test-page installs it")
    path = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.fail("no Chromium: apt-get install chromium-headless-shell, or set CHROMIUM=PATH")
    with sync_api.sync_playwright() as playwright, ExitStack() as running:

        def start(**environment):
            # A sandbox within a container needs rights that few give.
            launched = playwright.chromium.launch(
                executable_path=path, args=["--no-sandbox"], env={**os.environ, **environment}
            )
            running.callback(launched.close)
            return launched

        yield start


@pytest.fixture(scope="module")
def chromium(launch):
    return launch()


@contextmanager
def serving(lively: LivelyCluster, **model) -> Iterator:
    @asynccontextmanager
    async def backend():
        async with scripted(lively.answer, max_context_tokens=8192, **model) as (address, service):
            service.cluster = lively.status
            yield address, service

    with gateway(backend) as served:
        yield served


@pytest.fixture(scope="module")
def served():
    with serving(LivelyCluster()) as running:
        yield running


@pytest.fixture
def serve():
    """Starts gateways, which end after the pages that ask them."""
    with ExitStack() as running:
        yield lambda lively, **model: running.enter_context(serving(lively, **model))


@pytest.fixture
def visit(chromium, serve):
    """Opens pages; at the end nothing may have gone wrong in any of them."""
    contexts, wrong = [], []

    def open_page(served, path="/", *, expected=(), browser=chromium, **options):
        """`expected` are parts of console messages that are no fault of the page."""
        options.setdefault("viewport", WIDE)
        context = browser.new_context(**options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(10_000)

        def note(message):
            if not any(each in message for each in expected):
                wrong.append(message)

        page.on(
            "console", lambda each: note(f"{each.type}: {each.text} {each.location.get('url', '')}")
        )
        page.on("pageerror", lambda error: note(f"error: {error}"))
        page.on("dialog", lambda dialog: wrong.append(f"dialog: {dialog.message}"))
        page.on(
            "request",
            lambda each: each.url.startswith(served.url) or wrong.append(f"elsewhere: {each.url}"),
        )
        page.goto(served.url + path)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not wrong, wrong


def ask(page, text):
    """Ask, and wait until the answer has ended."""
    count = page.locator(".answer").count()
    page.locator("#question").fill(text)
    page.keyboard.press("Enter")
    page.locator(".answer").nth(count).wait_for()
    page.wait_for_selector(".answer[aria-busy]", state="detached")
    return page.locator(".answer").nth(count)


def is_live(page):
    page.wait_for_selector("#live[data-state=live]")


# How it comes up


def test_the_first_paint_comes_within_a_second(served, visit):
    page = visit(served)
    is_live(page)

    script = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
    assert_within(page.evaluate(script) / 1000, on_this_host(1.0))


def test_a_second_visit_transfers_no_file_again(served, visit):
    page = visit(served)
    is_live(page)
    page.reload()
    is_live(page)

    script = "performance.getEntriesByType('resource').map(each => [each.name, each.transferSize])"
    files = [each for each in page.evaluate(script) if "/page/" in each[0]]
    assert len(files) >= 10
    assert all(transferred < 1000 for _, transferred in files), "the heads of 304s only"


def test_it_makes_a_picture_for_the_documentation(serve, visit, tmp_path):
    served = serve(LivelyCluster(wave=0.4, answers=ANSWERS), name="example-8b-instruct")
    page = visit(served, viewport={"width": 1360, "height": 1330})
    for question in ANSWERS:
        ask(page, question)
    path = tmp_path / "page.png"
    if wanted := os.environ.get("PAGE_IMAGE"):
        path = Path(wanted)
        page.wait_for_timeout(60_000)  # for whole lines of the last minute
        path.with_suffix(".sha256").write_text(f"{page_digest()}\n")
    last = page.locator("#prefixes-note").bounding_box()
    assert last["y"] + last["height"] <= 1330, "nothing is cut off"
    page.screenshot(path=path)

    assert path.stat().st_size > 10_000


# The chat


def test_an_answer_streams_in_with_its_account(served, visit):
    page = visit(served)
    first = ask(page, "one two three")
    second = ask(page, "four")

    assert first.locator(".text").inner_text() == "one two three"
    account = first.locator(".account").inner_text()
    tokens, generated, waited, speed = account.split(" · ")
    assert (tokens, generated) == ("0 of 23 prompt tokens cached (0%)", "4 generated")
    assert re.fullmatch(r"first after \d+ ms", waited)
    assert re.fullmatch(r"[\d,.]+ tokens/s", speed)
    account = second.locator(".account").inner_text()
    assert account.startswith("64 of 87 prompt tokens cached (74%) · 2 generated")
    sent = served.backend.requests[-1].chat.messages
    assert [(each.role, each.content) for each in sent] == [
        ("user", "one two three"),
        ("assistant", "one two three"),
        ("user", "four"),
    ]
    assert page.locator("#announcer").inner_text() == "four"


def test_it_can_be_used_with_the_keyboard_alone(served, visit):
    page = visit(served)
    is_live(page)
    focused = "document.activeElement.id || document.activeElement.tagName"
    assert page.evaluate(focused) == "question"

    page.keyboard.type("a question")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("of two lines")
    assert page.locator(".turn").count() == 0
    page.keyboard.press("Enter")
    page.locator(".account").wait_for()
    assert page.locator(".question .text").inner_text() == "a question\nof two lines"
    assert page.evaluate(focused) == "question"

    order = []
    for _ in range(5):
        page.keyboard.press("Shift+Tab")
        order.append(page.evaluate(focused))
    assert order == ["SUMMARY", "transcript", "new-chat", "theme", "skip"]
    assert page.locator("#skip").bounding_box()["x"] > 0, "shown while it has the focus"
    page.keyboard.press("Enter")
    assert page.evaluate(focused) == "question"
    page.keyboard.press("Tab")
    assert page.evaluate(focused) == "send"
    outline = "getComputedStyle(document.activeElement).outlineStyle"
    assert page.evaluate(outline) == "solid", "one sees where the focus is"
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    page.keyboard.type("0.5")
    assert page.locator("input[name=temperature]").input_value() == "0.5"


@pytest.mark.parametrize("way", ["Escape", "button"])
def test_an_answer_can_be_stopped(serve, visit, way):
    served = serve(LivelyCluster(token_s=0.05))
    page = visit(served)
    page.locator("#question").fill("word " * 1000)
    page.keyboard.press("Enter")
    page.locator(".answer .text").filter(has_text="word word word").wait_for()
    assert page.locator("#send").inner_text() == "Stop"
    if way == "Escape":
        page.keyboard.press("Escape")
    else:
        page.locator("#send").click()

    page.get_by_text("stopped").wait_for()
    wait_until(served.backend.cancelled.is_set)
    assert page.locator("#send").inner_text() == "Send"
    shown = page.locator(".answer .text").inner_text()
    ask(page, "next")
    said = [each.content for each in served.backend.requests[-1].chat.messages]
    assert said[1].split() == shown.split(), "what was told is part of the chat"
    assert said[2] == "next"


def test_markup_of_a_model_is_text(served, visit):
    page = visit(served, expected=["TrustedHTML"])  # of the last line
    answer = ask(page, HOSTILE)

    assert answer.locator(".text").text_content() == HOSTILE
    inside = page.locator("#transcript").evaluate(
        "node => [...node.querySelectorAll('*')].map(each => each.tagName)"
    )
    assert set(inside) == {"ARTICLE", "H3", "DIV", "P", "SPAN"}
    page.wait_for_timeout(200)
    assert page.evaluate("window.hit") is None
    with pytest.raises(Exception, match="TrustedHTML"):
        page.evaluate("document.body.innerHTML = '<b>x</b>'")


def test_settings_reach_the_model(served, visit):
    page = visit(served)
    page.locator("#settings summary").click()
    settings = {"temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.05}
    settings |= {"repetition_penalty": 1.1, "max_tokens": 77, "seed": 5}
    for name, value in settings.items():
        page.locator(f"[name={name}]").fill(str(value))
    page.locator("[name=system]").fill("Be brief.")
    ask(page, "x")

    request = served.backend.requests[-1]
    for name, value in settings.items():
        assert getattr(request.sampling, name) == pytest.approx(value), name
    roles = [(each.role, each.content) for each in request.chat.messages]
    assert roles == [("system", "Be brief."), ("user", "x")]
    assert "temperature 0.5" in page.locator("#changed").inner_text()


def test_an_error_is_shown_in_words_and_the_question_is_kept(served, visit):
    page = visit(served, expected=["status of 400"])
    page.locator("#settings summary").click()
    page.locator("[name=temperature]").fill("-1")
    answer = ask(page, "a question that fails")

    words = answer.locator("[role=alert]").inner_text()
    assert "temperature" in words
    assert "-1" in words
    assert page.locator("#question").input_value() == "a question that fails"
    page.locator("[name=temperature]").fill("")
    ask(page, "another one")
    assert [each.content for each in served.backend.requests[-1].chat.messages] == ["another one"]


def test_an_error_in_the_middle_of_an_answer_is_shown_too(served, visit):
    page = visit(served)
    events = [
        {"choices": [{"index": 0, "delta": {"content": "half"}, "finish_reason": None}]},
        {"error": {"message": "the worker <b>died</b>"}},
    ]
    body = "".join(f"data: {json.dumps(each)}\n\n" for each in events)
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=body))
    answer = ask(page, "x")
    assert answer.locator(".text").inner_text() == "half"
    assert answer.locator("[role=alert]").inner_text() == "the worker <b>died</b>"

    page.unroute("**/v1/chat/completions")
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=body.split("\n\n")[0]))
    assert "broke off" in ask(page, "x").locator("[role=alert]").inner_text()


def test_reasoning_is_set_apart(served, visit):
    page = visit(served)
    deltas = [{"reasoning_content": "hm, "}, {"reasoning_content": "well"}, {"content": "yes"}]
    events = [{"choices": [{"index": 0, "delta": each, "finish_reason": None}]} for each in deltas]
    body = "".join(f"data: {json.dumps(each)}\n\n" for each in events) + "data: [DONE]\n\n"
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=body))
    answer = ask(page, "x")

    assert answer.locator(":scope > .text").inner_text() == "yes"
    assert answer.locator(".reasoning .text").text_content() == "hm, well"


def test_a_new_chat_begins_without_the_old_one(served, visit):
    page = visit(served)
    ask(page, "old")
    page.locator("#new-chat").click()
    assert page.locator(".turn").count() == 0
    assert page.locator("#no-turns").is_visible()
    ask(page, "new")

    assert [each.content for each in served.backend.requests[-1].chat.messages] == ["new"]


# The key


def test_a_key_is_asked_for_and_kept_in_the_session_alone(served, visit):
    # A file that is no page: a Chromium asks for an icon of it.
    page = visit(served, "/page/icon.svg", expected=["status of 401", "/favicon.ico"])
    seen = []

    def guard(route):
        given = route.request.headers.get("authorization")
        seen.append(given)
        if given == "Bearer sk-right":
            route.continue_()
        else:
            error = {"error": {"message": "who <b>calls</b>?"}}
            route.fulfill(status=401, body=json.dumps(error))

    for path in ("**/v1/**", "**/cluster"):
        page.route(path, guard)
    page.goto(served.url)
    page.locator("#key-dialog").wait_for()
    assert "who <b>calls</b>?" in page.locator("#key-why").inner_text()
    page.keyboard.type("with blanks")
    page.keyboard.press("Enter")
    assert "no spaces" in page.locator("#key-wrong").inner_text()
    page.keyboard.press("Escape")
    page.get_by_text("requires an API key").wait_for()
    asked = len(seen)
    page.wait_for_timeout(2500)
    assert not page.locator("#key-dialog").is_visible(), "nobody is asked again and again"
    assert len(seen) > asked
    page.locator("#give-key").click()
    page.keyboard.type("sk-right")
    page.keyboard.press("Enter")
    is_live(page)
    assert ask(page, "let me in").locator(".text").inner_text() == "let me in"

    stored = "[Object.values(sessionStorage), Object.values(localStorage), document.cookie]"
    assert page.evaluate(stored) == [["sk-right"], [], ""]
    assert page.evaluate("location.href").rstrip("/") == served.url
    assert "sk-right" not in page.content()


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("keys"))


@pytest.fixture(scope="module")
def encrypted(tmp_path_factory, authority):
    """A real router with tenants, behind a gateway with TLS."""
    folder = write_folder(tmp_path_factory.mktemp("model"))
    known = tenants(
        rules("acme"),
        replace(rules(SECRET), name="quiet"),  # as its token shall not be found
        rules("slow", requests_per_s=0.01, burst=1),
        rules("ops", operator=True),
    )
    door = front_door(authority.settings())
    with gateway(lambda: real_router(parrot(folder), folder, tenants=known), door=door) as running:
        yield running


@pytest.fixture(scope="module")
def trusting(launch, authority, tmp_path_factory):
    """A browser of somebody who trusts the authority, as an organization's own is trusted."""
    certutil = shutil.which("certutil")
    if certutil is None:
        pytest.fail("no certutil: apt-get install libnss3-tools")
    home = tmp_path_factory.mktemp("home")
    database = home / ".pki" / "nssdb"
    database.mkdir(parents=True)
    command = [certutil, "-d", f"sql:{database}"]
    subprocess.run([*command, "-N", "--empty-password"], check=True)
    subprocess.run([*command, "-A", "-t", "C,,", "-n", "test", "-i", authority.file], check=True)
    return launch(HOME=str(home))


def test_only_who_trusts_the_authority_opens_the_page(encrypted, visit, chromium, trusting):
    page = chromium.new_page()
    with pytest.raises(Exception, match="ERR_CERT_AUTHORITY_INVALID"):
        page.goto(encrypted.url)
    page.close()

    page = visit(encrypted, browser=trusting, expected=["status of 401"])

    page.locator("#key-dialog").wait_for()
    assert page.evaluate("isSecureContext")
    script = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
    assert_within(page.evaluate(script) / 1000, on_this_host(1.0))


def test_a_token_is_asked_for_refused_taken_and_told_to_nobody(encrypted, visit, trusting, caplog):
    expected = ["status of 401", "status of 403"]
    with caplog.at_level(logging.DEBUG):
        page = visit(encrypted, browser=trusting, expected=expected)
        sent = []
        page.on("request", lambda each: sent.append(each))
        give_key(page, f"{SECRET}-not")
        page.locator("#key-why").filter(has_text="token").wait_for()
        assert page.locator("#key").input_value() == "", "what was refused is not kept on show"
        assert not page.locator("#figures").is_visible()
        give_key(page, SECRET)
        page.get_by_text("Only operators see the cluster").wait_for()
        assert ask(page, "hello").locator(".text").inner_text() == "hello"

    told = [each for each in sent if "authorization" in each.all_headers()]
    assert {each.all_headers()["authorization"] for each in told} >= {f"Bearer {SECRET}"}
    assert all(each.url.startswith(encrypted.url) for each in told)
    assert not [each.url for each in sent if SECRET in each.url + (each.post_data or "")]
    assert not [each for each in sent if SECRET in each.all_headers().get("referer", "")]
    assert SECRET not in page.content() + page.url
    assert page.evaluate("[localStorage.length, document.cookie]") == [0, ""]
    lines = [f"{each.getMessage()} {vars(each)}" for each in caplog.records]
    assert any("http_request" in each for each in lines)
    assert not [each for each in lines if SECRET in each]


def give_key(page, key):
    page.locator("#key-dialog").wait_for()
    page.locator("#key").fill(key)
    page.keyboard.press("Enter")


def test_an_operator_chats_and_sees_the_cluster_over_tls(encrypted, visit):
    page = visit(encrypted, expected=["status of 401"], ignore_https_errors=True)
    give_key(page, "nobody")
    page.locator("#key-why").filter(has_text="token").wait_for()
    give_key(page, "ops")
    is_live(page)

    assert page.evaluate("isSecureContext")
    assert ask(page, "hello").locator(".text").inner_text() == "hello"
    assert page.locator(".worker .name").all_inner_texts() == ["decode-0"]


def test_a_tenant_chats_and_is_told_that_the_cluster_is_for_operators(encrypted, visit):
    page = visit(encrypted, expected=["status of 401", "status of 403"], ignore_https_errors=True)
    asked = []
    page.on("request", lambda each: asked.append(each.url))
    give_key(page, "acme")
    page.get_by_text("Only operators see the cluster").wait_for()
    assert ask(page, "hello").locator(".text").inner_text() == "hello"
    assert "of context" in page.locator("#model").inner_text()
    assert not page.locator("#figures").is_visible()

    asked.clear()
    page.wait_for_timeout(2500)
    assert not asked, "a refusal stays one until there is another key"
    page.locator("#give-key").click()
    give_key(page, "ops")
    is_live(page)
    assert not page.locator("#trouble").is_visible()


def test_a_limit_is_shown_with_the_time_to_come_again(encrypted, visit):
    page = visit(encrypted, expected=["status of 40", "status of 429"], ignore_https_errors=True)
    give_key(page, "slow")
    page.get_by_text("Only operators see the cluster").wait_for()
    ask(page, "first")

    words = ask(page, "second").locator("[role=alert]").inner_text()
    assert re.search(r"Try again in (9\d|100) s", words), words
    assert page.locator("#question").input_value() == "second"


# The cluster


def test_the_cluster_is_shown_with_rates_and_units(served, visit):
    page = visit(served)
    is_live(page)
    page.locator("#flow .sum").filter(has_text="38").wait_for()

    def number(selector):
        return int(re.sub(r"\D", "", page.locator(f"{selector} b").inner_text()))

    assert number("#generated") == pytest.approx(1432, rel=0.1)
    assert number("#found") == pytest.approx(78, abs=2)
    assert page.locator("#running-more").inner_text() == "30 running, 2 waiting"
    assert re.fullmatch(r"3[5-9](\.\d)? MiB/s", page.locator("#flow .sum").text_content())
    nodes = page.locator("#flow .nodes .name").all_text_contents()
    assert nodes == ["prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2"]
    assert "38" in page.locator("#flow").get_attribute("aria-label")
    rows = page.locator(".worker").all_inner_texts()
    assert len(rows) == 6
    assert "ready" in rows[2]
    assert "1,332 of 1,536 pages · 78% hits" in rows[2]
    assert "2 failed transfers" in rows[2]
    assert "dead" in rows[5]
    assert "Last heartbeat 12 s ago" in rows[5]
    bar = page.locator(".worker .uses").nth(2).get_attribute("aria-label")
    assert bar == "1,536 pages: 728 live, 560 cached, 42 incoming, 2 quarantine, 204 free"
    assert "secret-host" not in page.content()
    prefixes = page.locator("#prefix-rows tr").all_inner_texts()
    assert [" ".join(each.split()) for each in prefixes] == [
        "9f24c1d0 2,048 tokens 812 decode-0, decode-1, decode-2, prefill-0",
        "03be77a9 512 tokens 240 decode-0, prefill-1",
        "c4118e5f 96 tokens 31 no worker",
    ]
    assert not page.locator("#no-prefixes").is_visible()


def test_names_of_workers_are_text(serve, visit):
    lively = LivelyCluster()
    status = lively.status()
    status.workers[0].worker.worker_id = HOSTILE
    served = serve(lively)
    served.backend.cluster = lambda: status
    page = visit(served)
    is_live(page)
    assert page.locator(".worker .name").first.text_content() == HOSTILE
    page.wait_for_timeout(200)

    assert page.evaluate("window.hit") is None


def test_nobody_is_asked_while_the_page_is_hidden(serve, visit):
    hide = """isHidden => {
        Object.defineProperty(document, "hidden", { get: () => isHidden, configurable: true });
        document.dispatchEvent(new Event("visibilitychange"));
    }"""
    served = serve(LivelyCluster())
    page = visit(served)
    is_live(page)
    page.evaluate(hide, True)
    page.wait_for_selector("#live[data-state=paused]")
    page.wait_for_timeout(300)  # what was under way
    before = served.backend.num_statuses
    page.wait_for_timeout(2500)
    assert served.backend.num_statuses == before
    page.evaluate(hide, False)
    is_live(page)
    page.wait_for_timeout(2500)
    assert 2 <= served.backend.num_statuses - before <= 5


def test_a_router_that_is_away_is_told_and_comes_back(serve, visit):
    served = serve(LivelyCluster())
    page = visit(served, expected=["status of 503"])
    is_live(page)
    served.backend.is_away = True
    page.wait_for_selector("#live[data-state='no answer']")
    assert "away" in page.locator("#trouble").inner_text()
    served.backend.is_away = False
    is_live(page)

    assert not page.locator("#trouble").is_visible()


def test_what_is_not_there_says_what_to_do(serve, visit):
    lively = LivelyCluster()
    everyone = {f"prefill-{i}" for i in range(2)} | {f"decode-{i}" for i in range(4)}
    served = serve(lively)
    lively.hides = everyone
    page = visit(served)
    page.get_by_text("No worker has joined").wait_for()
    served.backend.cluster = one_worker
    page.get_by_text("No two prompts have shared a prefix").wait_for()
    served.backend.cluster = lively.status
    lively.hides = {"prefill-0", "prefill-1"}
    page.get_by_text("pagewire scale --prefill 1").wait_for()
    assert page.locator("#no-turns").is_visible()

    frozen = LivelyCluster().status()
    served.backend.cluster = lambda: frozen
    page.get_by_text("Nothing is moving").wait_for()


# How it looks


def luminance(rgb):
    parts = [int(each) / 255 for each in re.findall(r"\d+", rgb)[:3]]
    linear = [(c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4) for c in parts]
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(page, selector, background):
    color = f"getComputedStyle(document.querySelector({json.dumps(selector)})).color"
    behind = f"getComputedStyle(document.querySelector({json.dumps(background)})).backgroundColor"
    low, high = sorted(luminance(page.evaluate(each)) for each in (color, behind))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_as_light_or_dark_as_the_system_and_legible(served, visit, scheme):
    page = visit(served, color_scheme=scheme)
    is_live(page)
    ask(page, "x")

    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (luminance(background) < 0.2) == (scheme == "dark")
    for text, behind in {
        "body": "body",
        ".soft": "body",
        ".worker.prefill .name": "body",
        ".worker.decode .name": "body",
        ".worker .wrong:not(:empty)": "body",
        ".question .text": ".question .text",
        ".tiles dt": ".tiles > div",
        "#send": "#send",
    }.items():
        assert contrast(page, text, behind) >= 4.5, text


def test_a_choice_of_light_or_dark_stays(served, visit):
    page = visit(served, color_scheme="light")
    toggle = page.locator("#theme")
    assert toggle.get_attribute("aria-pressed") == "false"
    toggle.click()
    assert toggle.get_attribute("aria-pressed") == "true"
    page.reload()

    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert luminance(background) < 0.2
    assert toggle.get_attribute("aria-pressed") == "true"
    toggle.click()
    page.emulate_media(color_scheme="dark")
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert luminance(background) > 0.8, "also against the system's"


def test_it_fits_on_a_phone(served, visit):
    page = visit(served, viewport=PHONE, has_touch=True, is_mobile=True)
    is_live(page)
    script = """[...document.querySelectorAll("html, main > section, #transcript")]
        .every(each => each.scrollWidth <= each.clientWidth)"""
    ask(page, "x" * 600)
    page.locator("#settings summary").click()
    assert page.evaluate(script)
    for target in ("#send", "#question", "#theme"):
        box = page.locator(target).bounding_box()
        assert box["x"] >= 0, target
        assert box["x"] + box["width"] <= PHONE["width"], target
        assert box["y"] + box["height"] <= PHONE["height"], target
    assert not page.locator("#cluster").is_visible()

    page.locator("nav.views [data-view=cluster]").tap()
    page.locator("#flow .nodes .name").first.wait_for()
    assert page.locator("#cluster").is_visible()
    assert not page.locator("#chat").is_visible()
    assert page.evaluate(script)
    assert page.evaluate("innerWidth") == PHONE["width"], "nothing made it zoom out"


def test_who_wants_less_motion_gets_none(served, visit):
    page = visit(served, reduced_motion="reduce")
    is_live(page)
    page.wait_for_selector("#flow .busy")

    assert page.evaluate("document.getAnimations().length") == 0
