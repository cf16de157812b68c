"""The real server's page in a real browser: from a question to its quote, answer and sources."""

import os
import re
import shutil
from pathlib import Path

import pytest
from integration.app.running import Server, command, environment
from playwright.sync_api import expect, sync_playwright

SAMPLES = Path(__file__).parents[2] / "data" / "samples"
QUESTION = "How late can I come by on a Friday evening?"
SENTENCE = "On Friday the shop is open from 11:00 to 21:00."
SLOW = 60_000  # milliseconds, for what a model or an index has a part in
PICTURES = os.environ.get("DFLASH_RAG_TEST_PICTURES")  # a folder, to look at what a test saw


@pytest.fixture(scope="module")
def server(models, tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    (folder / "data").mkdir()
    shutil.copy(SAMPLES / "hours-and-returns.pdf", folder / "data")
    env = environment(models=models, data=folder / "data", home=folder / "home", drafter="none")
    with Server(folder / "home", env) as server:
        done = command("ingest", env=env, cwd=folder)
        assert done.returncode == 0, done.stderr
        server.wait_until_ready()
        yield server


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
        )
        yield browser
        browser.close()


@pytest.fixture(params=[(1280, 800), (360, 640)], ids=["desk", "phone"])
def page(server, browser, request):
    width, height = request.param
    context = browser.new_context(
        viewport={"width": width, "height": height}, locale="en-US", base_url=server.url
    )
    page = context.new_page()
    troubles: list[str] = []
    page.on("console", lambda m: troubles.append(m.text) if m.type in ("error", "warning") else 0)
    page.on("pageerror", lambda error: troubles.append(str(error)))
    foreign: list[str] = []
    page.on("request", lambda r: None if r.url.startswith(server.url) else foreign.append(r.url))
    page.goto("/")
    yield page
    if PICTURES:
        page.screenshot(path=f"{PICTURES}/{request.node.name}.png", full_page=True)
    context.close()
    assert troubles == []
    assert foreign == []


def test_a_question_is_answered_with_the_quote_first_and_its_sources(page):
    expect(page.locator("#state")).to_have_text("1 document")
    expect(page.locator("#notices")).to_contain_text("stand-in")
    # Each state of the answer's text, to see afterwards that it grew.
    page.evaluate(
        """() => {
            window.states = new Set();
            new MutationObserver(() => {
                const words = document.querySelector(".words");
                const quote = document.querySelector(".quote");
                if (words) window.states.add(words.textContent);
                if (words && !quote) window.early = true;
            }).observe(document.body, {childList: true, subtree: true, characterData: true});
        }"""
    )
    page.locator("#question").fill(QUESTION)
    page.keyboard.press("Enter")
    expect(page.locator(".quote blockquote").first).to_have_text(SENTENCE, timeout=SLOW)
    expect(page.locator(".quote figcaption").first).to_have_text("hours-and-returns.pdf · p. 1")
    expect(page.locator(".facts")).to_contain_text("tok/s", timeout=SLOW)
    assert page.evaluate("window.states.size") >= 3
    assert page.evaluate("window.early") is None
    reply = page.locator(".reply")
    assert re.match(
        r"(?s).*From the documents.*Written by the model.*Sources", reply.inner_text(), re.I
    )

    chip = page.locator("details.chip").filter(has_text=SENTENCE)
    expect(chip.locator("summary")).to_contain_text("p. 1")
    expect(chip.locator(".passage")).to_be_hidden()
    chip.locator("summary").click()
    expect(chip.locator(".passage")).to_be_visible()
    expect(chip.locator(".passage")).to_contain_text(SENTENCE)

    page.locator("#question").fill("Which country won the football World Cup in 1998?")
    page.keyboard.press("Enter")
    second = page.locator(".turn").nth(1)
    expect(second).to_contain_text("could not find that", timeout=SLOW)
    expect(second.locator(".chip")).to_have_count(0)
    width = page.evaluate("document.documentElement.clientWidth")
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_stop_ends_the_answer_and_the_next_question_is_answered(page):
    page.locator("#question").fill(QUESTION)
    page.keyboard.press("Enter")
    page.locator("#stop").click()
    expect(page.locator(".reply").first).to_contain_text("Stopped.")
    page.locator("#question").fill("Are dogs welcome in the shop?")
    page.keyboard.press("Enter")
    quotes = page.locator(".turn").nth(1).locator(".quote blockquote")
    expect(quotes.first).to_have_text("Dogs are welcome on a lead.", timeout=SLOW)
    expect(page.locator(".facts")).to_contain_text("tok/s", timeout=SLOW)
