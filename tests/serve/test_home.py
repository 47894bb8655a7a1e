# SPDX-License-Identifier: Apache-2.0
"""The page at `/` in a browser: a conversation, its end, numbers of the server. Run by `make test-browser`; CHROMIUM names the browser."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from patience import HANGS_SECONDS
from serving import Client, served

from nnfront.serve.engine import Engine

pytestmark = pytest.mark.browser
CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield found
        found.close()


@pytest.fixture
def url(client: Client) -> Iterator[str]:
    with served(client) as url:
        yield url


@pytest.fixture
def page(browser: Any, url: str) -> Iterator[Any]:
    yield from opened(browser, url)


def opened(browser: Any, url: str) -> Iterator[Any]:
    """Yield the page, and hold afterwards that it asked for nothing elsewhere and that its script made no mistake."""
    page = browser.new_page()
    page.set_default_timeout(1e3 * HANGS_SECONDS)
    faults: list[str] = []
    asked: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(url)
    yield page
    assert not faults
    assert all(each.startswith(url) for each in asked)
    page.close()


def shown(page: Any, name: str, what: str) -> None:
    """Wait until a number of the page's head is like this expression."""
    page.locator(f"#{name}", has_text=re.compile(what)).wait_for()


def test_a_message_is_answered_as_the_api_does(page: Any, url: str) -> None:
    said = "def <b>main</b>():"
    page.locator("#text").fill(said)
    page.locator("#text").press("Enter")
    page.locator("#stop").wait_for(state="hidden")
    page.locator("p.assistant").wait_for()
    messages = [{"role": "user", "content": said}]
    reply = httpx2.post(
        f"{url}v1/chat/completions", json={"messages": messages}, timeout=HANGS_SECONDS
    ).json()
    assert page.locator("p.user").text_content() == said
    assert page.locator("p.assistant").text_content() == reply["choices"][0]["message"]["content"]
    assert page.locator("main b").count() == 0  # what comes is a text and no markup
    page.locator("#text").fill("and then")
    page.locator("#send").click()
    page.locator(
        "p.wrong, p.assistant >> nth=1"
    ).first.wait_for()  # the whole conversation was sent, and may not fit


def test_it_shows_how_busy_the_server_is(page: Any, engine: Engine) -> None:
    shown(page, "speed", r"\d")
    assert page.locator("#running").text_content() == "0"
    page.locator("#text").fill("import os")
    page.locator("#send").click()
    shown(page, "speed", "[1-9]")
    page.locator("#stop").wait_for(state="hidden")
    shown(page, "running", "^0$")
    share = 100 * engine.counts()["pages_used"] / engine.counts()["pages"]
    shown(page, "pages", f"^{share:.1f} %$")


def test_an_answer_can_be_stopped(page: Any, engine: Engine) -> None:
    page.evaluate("by('text').value = 'import os'")
    page.locator("#send").click()
    page.locator("p.assistant").wait_for()
    page.evaluate("by('stop').click()")  # whether or not the answer has ended meanwhile
    page.locator("#send").wait_for()
    page.locator("#clear").click()
    assert page.locator("main p").count() == 0
    shown(page, "running", "^0$")
    assert engine.counts()["running"] == 0


def test_a_key_is_typed_in_and_errors_are_shown(browser: Any, engine: Engine) -> None:
    with served(Client(engine, keys=["right"])) as url:
        for page in opened(browser, url):
            page.locator("#text").fill("import os")
            page.locator("#text").press("Enter")
            assert re.match("the key is missing or wrong", page.locator("p.wrong").text_content())
            page.locator("#key").fill("right")
            page.locator("#text").fill("import os")
            page.locator("#text").press("Enter")
            page.locator("p.assistant").wait_for()
