"""The chat page in a real browser, against a scripted server on loopback."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import FileResponse, JSONResponse, StreamingResponse
from playwright.sync_api import Browser, Page, expect, sync_playwright

WEB = Path(__file__).resolve().parents[2] / "app" / "web"
CSP = "default-src 'self'; frame-ancestors 'none'"
CHROMIUM_ARGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]

IMAGE = "<img src=x onerror=window.pwned=1>"
LINK = "[a](javascript:alert(1))"
SENTENCE = "On Friday the shop is open from 11:00 to 21:00."
QUOTES = [{"n": 1, "sentence": SENTENCE, "file": "samples/hours-and-returns.pdf", "page": 1}]
CITATIONS = [
    {
        "n": 1,
        "file": "samples/hours-and-returns.pdf",
        "page": 1,
        "heading": "When we are open",
        "passage": f"The shop is closed on Monday.\n{SENTENCE}",
        "score": 0.612,
    },
    {
        "n": 2,
        "file": "samples/price-list.pdf",
        "page": 2,
        "heading": "Delivery",
        "passage": "We do not ship abroad.",
        "score": 0.31,
    },
]
ENGINE = {
    "target": "smollm2-135m",
    "draft": None,
    "drafter": "lookup",
    "tokens": 9,
    "tokens_per_second": 14.23,
    "tokens_per_round": 1.38,
    "rounds": 7,
}
READY = {
    "status": "ready",
    "target": "smollm2-135m",
    "stand_in": True,
    "documents": 4,
    "name": "Lantern Finch",
}


def sources(found: bool = True, **changes: object) -> tuple[str, dict[str, object]]:
    quotes, citations = (QUOTES, CITATIONS) if found else ([], [])
    body = {"conversation_id": "c1", "found": found, "quotes": quotes, "citations": citations}
    return "sources", {**body, **changes}


def done(answer: str, found: bool = True, **changes: object) -> tuple[str, dict[str, object]]:
    body = {
        "answer": answer,
        "conversation_id": "c1",
        "found": found,
        "quotes": QUOTES if found else [],
        "citations": CITATIONS if found else [],
        "engine": ENGINE if found else None,
        "timings": {"retrieve_ms": 31.4, "prefill_ms": 200.0, "decode_ms": 600.0},
    }
    return "done", {**body, **changes}


def token(text: str) -> tuple[str, dict[str, object]]:
    return "token", {"text": text}


def wire(event: str, data: dict[str, object], end: str = "\n") -> bytes:
    text = json.dumps(data, ensure_ascii=False)
    return f"event: {event}{end}data: {text}{end}{end}".encode()


@dataclass
class Shop:
    """The scripted server: what it answers, and what it saw."""

    url: str = ""
    health: list[tuple[int, dict[str, object]]] = field(default_factory=list)
    script: Callable[[Shop], AsyncIterator[bytes]] | None = None
    refusal: tuple[int, dict[str, object]] | None = None
    asked: list[dict[str, object]] = field(default_factory=list)
    gate: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    disconnected: threading.Event = field(default_factory=threading.Event)

    def reset(self) -> None:
        self.health = [(200, READY)]
        self.script = None
        self.refusal = None
        self.asked = []
        self.gate = threading.Semaphore(0)
        self.disconnected = threading.Event()

    def answers(self, *steps: tuple[str, dict[str, object]] | None) -> None:
        """Stream these events; None waits until the test opens the gate."""

        async def script(shop: Shop) -> AsyncIterator[bytes]:
            for step in steps:
                if step is None:
                    await shop.at_gate()
                else:
                    yield wire(*step)

        self.script = script

    def sends(self, *chunks: bytes) -> None:
        """Stream these bytes, a chunk at a time."""

        async def script(_: Shop) -> AsyncIterator[bytes]:
            for chunk in chunks:
                yield chunk
                await asyncio.sleep(0.02)

        self.script = script

    async def at_gate(self) -> None:
        gate = self.gate
        while not gate.acquire(blocking=False):
            await asyncio.sleep(0.01)

    async def stream(self) -> AsyncIterator[bytes]:
        assert self.script is not None
        disconnected = self.disconnected
        whole = False
        try:
            async for chunk in self.script(self):
                yield chunk
            whole = True
        finally:
            if not whole:
                disconnected.set()


def make_app(shop: Shop) -> FastAPI:
    app = FastAPI()

    @app.middleware("http")
    async def policy(
        request: Request, call_next: Callable[[Request], Awaitable[Response]]
    ) -> Response:
        response = await call_next(request)
        response.headers["Content-Security-Policy"] = CSP
        return response

    @app.get("/")
    def chat() -> FileResponse:
        return FileResponse(WEB / "chat.html")

    @app.get("/static/{name}")
    def static(name: str) -> FileResponse:
        return FileResponse(WEB / name)

    @app.get("/favicon.ico", status_code=204)
    def favicon() -> Response:
        return Response(status_code=204)

    @app.get("/health")
    def health() -> JSONResponse:
        status, body = shop.health.pop(0) if len(shop.health) > 1 else shop.health[0]
        return JSONResponse(body, status)

    @app.post("/ask/stream")
    async def ask(request: Request) -> Response:
        shop.asked.append(await request.json())
        if shop.refusal:
            status, body = shop.refusal
            return JSONResponse(body, status)
        return StreamingResponse(shop.stream(), media_type="text/event-stream")

    return app


@pytest.fixture(scope="module")
def server() -> Iterator[Shop]:
    shop = Shop()
    config = uvicorn.Config(make_app(shop), host="127.0.0.1", port=0, log_level="warning")
    running = uvicorn.Server(config)
    thread = threading.Thread(target=running.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 20
    while not running.started:
        assert time.monotonic() < deadline, "the scripted server did not start"
        time.sleep(0.02)
    port = running.servers[0].sockets[0].getsockname()[1]
    shop.url = f"http://127.0.0.1:{port}"
    yield shop
    running.should_exit = True
    running.force_exit = True
    thread.join(timeout=10)


@pytest.fixture
def shop(server: Shop) -> Shop:
    server.reset()
    return server


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    candidates = ("chromium", "chromium-browser", "google-chrome")
    found = next((path for path in map(shutil.which, candidates) if path), None)
    if found is None:
        reason = "no chromium on PATH: apt-get install chromium"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=found, args=CHROMIUM_ARGS)
        yield chromium
        chromium.close()


Open = Callable[..., Page]


@pytest.fixture
def visit(browser: Browser, shop: Shop) -> Iterator[Open]:
    """Open the page; afterwards, no script failed and nothing was asked of another origin."""
    contexts = []
    complaints: list[str] = []
    elsewhere: list[str] = []

    def note(kind: str, text: str) -> None:
        # The browser logs each HTTP error itself; whether the page shows it is a test's business.
        if kind in {"error", "warning"} and "server responded with a status of" not in text:
            complaints.append(text)

    def open_page(**options: Any) -> Page:
        context = browser.new_context(**{"locale": "en-GB", **options})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(5000)
        page.on("console", lambda message: note(message.type, message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on(
            "request",
            lambda request: (
                None if request.url.startswith(shop.url + "/") else elsewhere.append(request.url)
            ),
        )
        page.goto(shop.url)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []
    assert elsewhere == []


def ask(page: Page, question: str) -> None:
    page.locator("#question").fill(question)
    expect(page.locator("#send")).to_be_enabled()
    page.locator("#question").press("Enter")


def test_answer_streams_in_quotes_first_then_words_then_sources(shop: Shop, visit: Open) -> None:
    shop.answers(
        sources(),
        None,
        token("On Friday "),
        None,
        token("until nine."),
        None,
        done("On Friday until nine."),
    )
    page = visit()
    ask(page, "How late on Friday?")

    expect(page.locator(".quote blockquote")).to_have_text(SENTENCE)
    expect(page.locator(".quote figcaption")).to_have_text("hours-and-returns.pdf · p. 1")
    expect(page.locator(".words")).to_have_count(0)
    shop.gate.release()
    expect(page.locator(".words")).to_have_text("On Friday ")
    expect(page.locator(".sources")).to_have_count(0)
    shop.gate.release()
    expect(page.locator(".words")).to_have_text("On Friday until nine.")
    expect(page.locator("#stop")).to_be_visible()
    shop.gate.release()
    expect(page.locator(".sources")).to_be_visible()
    expect(page.locator("#send")).to_be_visible()

    order = page.locator(".reply > *").evaluate_all("all => all.map(e => e.className)")
    assert order == ["quotes", "written", "sources", "facts"]
    expect(page.locator(".written .kicker")).to_contain_text("Written by the model")
    expect(page.locator("#status")).to_have_text("Answer: On Friday until nine.")
    facts = page.locator(".facts").inner_text()
    assert facts.startswith(
        "SmolLM2-135M · lookup · 14.2 tok/s · 1.4 tokens/round · retrieval 31 ms · first token "
    )


def test_the_whole_answer_replaces_what_was_streamed(shop: Shop, visit: Open) -> None:
    shop.answers(sources(), token("half an ans"), done("The answer."))
    page = visit()
    ask(page, "?")
    expect(page.locator(".words")).to_have_text("The answer.")


def test_citations_expand_by_keyboard_to_their_passage(shop: Shop, visit: Open) -> None:
    shop.answers(sources(), done("Until nine."))
    page = visit()
    ask(page, "How late on Friday?")
    chips = page.locator(".chip summary")
    expect(chips).to_have_text(["1hours-and-returns.pdf · p. 1", "2price-list.pdf · p. 2"])
    passage = page.locator(".passage").first
    expect(passage).to_be_hidden()
    chips.first.focus()
    page.keyboard.press("Enter")
    expect(passage).to_be_visible()
    expect(passage).to_contain_text("When we are open")
    expect(passage).to_contain_text("The shop is closed on Monday.")
    page.keyboard.press("Enter")
    expect(passage).to_be_hidden()


def test_the_next_question_carries_the_conversation_until_a_new_one(
    shop: Shop, visit: Open
) -> None:
    shop.answers(sources(), done("One."))
    page = visit()
    ask(page, "first")
    expect(page.locator(".facts")).to_have_count(1)
    ask(page, "second")
    expect(page.locator(".facts")).to_have_count(2)
    page.get_by_role("button", name="New conversation").click()
    expect(page.locator(".turn")).to_have_count(0)
    expect(page.locator("#welcome")).to_be_visible()
    ask(page, "third")
    expect(page.locator(".facts")).to_have_count(1)
    assert shop.asked == [
        {"question": "first"},
        {"question": "second", "conversation_id": "c1"},
        {"question": "third"},
    ]


def test_hostile_strings_are_inert_text(shop: Shop, visit: Open) -> None:
    hostile = f"{IMAGE} {LINK}"
    quotes = [{"n": 1, "sentence": hostile, "file": f"samples/{IMAGE}.pdf", "page": 1}]
    citations = [{**CITATIONS[0], "file": f"a{IMAGE}", "heading": hostile, "passage": hostile}]
    shop.health = [(200, {**READY, "name": hostile, "target": IMAGE})]
    shop.answers(
        sources(quotes=quotes, citations=citations),
        token(hostile),
        done(hostile, quotes=quotes, citations=citations, engine={**ENGINE, "drafter": hostile}),
    )
    page = visit()
    ask(page, hostile)
    expect(page.locator(".facts")).to_contain_text(IMAGE)
    page.locator(".chip summary").click()
    for place in (".asked", ".quote blockquote", ".words", ".passage h4", ".passage p >> nth=0"):
        expect(page.locator(place)).to_contain_text(hostile)
    expect(page.locator("#name")).to_have_text(hostile)
    assert page.locator("main img, main a, main script").count() == 0
    assert page.evaluate("window.pwned") is None


def test_question_not_in_the_documents_is_answered_plainly(shop: Shop, visit: Open) -> None:
    plain = "I could not find this in the documents."
    shop.answers(
        sources(found=False, citations=CITATIONS),
        token(plain),
        done(plain, found=False, citations=CITATIONS),
    )
    page = visit()
    ask(page, "Who won the cup?")
    expect(page.locator(".words")).to_have_text(plain)
    expect(page.locator("#send")).to_be_visible()
    expect(page.locator(".quote, .sources, .kicker, .facts")).to_have_count(0)


def test_answer_that_came_whole_has_no_caret(shop: Shop, visit: Open) -> None:
    shop.answers(sources(), done("Until nine."))
    page = visit()
    ask(page, "How late?")
    expect(page.locator(".facts")).to_be_visible()
    expect(page.locator(".streaming, .waiting, [aria-busy]")).to_have_count(0)


def test_long_answer_leaves_the_question_and_its_quotes_in_view(shop: Shop, visit: Open) -> None:
    words = [token("word " * 40) for _ in range(12)]
    shop.answers(sources(), *words, done("word " * 480))
    page = visit(viewport={"width": 375, "height": 667})
    ask(page, "first")
    expect(page.locator(".facts")).to_have_count(1)
    ask(page, "second")
    expect(page.locator(".facts")).to_have_count(2)
    for part in (".asked", ".quote"):
        expect(page.locator(part).nth(1)).to_be_in_viewport(ratio=1)


def test_error_event_shows_its_message_and_retry_asks_again(shop: Shop, visit: Open) -> None:
    shop.answers(sources(), token("Half"), ("error", {"message": "The model ran out of memory."}))
    page = visit()
    ask(page, "How late?")
    expect(page.get_by_role("alert")).to_contain_text("The model ran out of memory.")
    shop.answers(sources(), done("Until nine."))
    page.get_by_role("button", name="Retry").click()
    expect(page.locator(".words")).to_have_text("Until nine.")
    expect(page.get_by_role("alert")).to_have_count(0)
    assert [each["question"] for each in shop.asked] == ["How late?", "How late?"]


@pytest.mark.parametrize("status", [422, 429, 500])
def test_refusal_shows_the_servers_message(shop: Shop, visit: Open, status: int) -> None:
    shop.refusal = (status, {"error": {"message": f"Not now ({IMAGE})."}})
    page = visit()
    ask(page, "How late?")
    expect(page.get_by_role("alert")).to_contain_text(f"Not now ({IMAGE}).")


def test_stream_cut_short_is_an_error_and_keeps_what_came(shop: Shop, visit: Open) -> None:
    shop.answers(sources(), token("Until n"))
    page = visit()
    ask(page, "How late?")
    expect(page.get_by_role("alert")).to_contain_text("ended before the answer was complete")
    expect(page.locator(".words")).to_have_text("Until n")


def test_stop_ends_the_request_on_the_server(shop: Shop, visit: Open) -> None:
    shop.answers(sources(), token("Until"), None, token(" nine"), done("Until nine"))
    page = visit()
    ask(page, "How late?")
    expect(page.locator(".words")).to_have_text("Until")
    page.get_by_role("button", name="Stop").click()
    expect(page.locator(".note")).to_have_text("Stopped.")
    expect(page.locator("#send")).to_be_visible()
    expect(page.locator("#question")).to_be_focused()
    assert shop.disconnected.wait(timeout=5), "the server was not told"


def test_new_conversation_ends_the_request_under_way(shop: Shop, visit: Open) -> None:
    shop.answers(sources(), None, done("Until nine"))
    page = visit()
    ask(page, "How late?")
    expect(page.locator(".quote")).to_be_visible()
    page.get_by_role("button", name="New conversation").click()
    assert shop.disconnected.wait(timeout=5), "the server was not told"
    expect(page.locator(".turn, .error")).to_have_count(0)


def test_event_stream_is_read_whatever_its_line_ends_and_chunks(shop: Shop, visit: Open) -> None:
    text = "門市旁有 24 個車位 🅿️"
    stream = (
        b": keep-alive\r\n\r\n"
        + wire(*sources(), end="\r\n")
        + b": keep-alive\n\n"
        + wire(*token(text), end="\r\n")
        + b'event: token\ndata: {"text":\ndata: "\xe3\x80\x82"}\n\n'
        + b"event: surprise\ndata: {}\n\nid: 7\nretry: 10\n\n"
    )
    cut = [stream[start : start + 7] for start in range(0, len(stream), 7)]
    shop.sends(*cut, wire(*done(text + "。"), end="\r"))
    page = visit()
    ask(page, "停車")
    expect(page.locator(".facts")).to_be_visible(timeout=15000)
    expect(page.locator(".words")).to_have_text(text + "。")


def test_streamed_text_is_whole_when_a_character_is_split_between_chunks(
    shop: Shop, visit: Open
) -> None:
    async def script(shop: Shop) -> AsyncIterator[bytes]:
        for byte in wire(*sources()) + wire(*token("咖啡"), end="\r\n"):
            yield bytes([byte])
        await shop.at_gate()
        yield wire(*done("咖啡"))

    shop.script = script
    page = visit()
    ask(page, "?")
    expect(page.locator(".words")).to_have_text("咖啡")
    shop.gate.release()
    expect(page.locator(".facts")).to_be_visible()


def test_phone_wide_page_does_not_scroll_sideways(shop: Shop, visit: Open) -> None:
    long = "x" * 300
    quotes = [{"n": 1, "sentence": long, "file": f"samples/{long}.pdf", "page": 1}]
    citations = [{**CITATIONS[0], "file": f"samples/{long}.pdf", "passage": long}]
    changed: dict[str, Any] = {"quotes": quotes, "citations": citations}
    shop.health = [(200, {**READY, "name": long, "documents": 0})]
    shop.answers(sources(**changed), done(long, **changed))
    page = visit(viewport={"width": 375, "height": 667}, has_touch=True, is_mobile=True)
    ask(page, long)
    page.locator(".chip summary").click()
    expect(page.locator(".passage")).to_be_visible()
    wide = page.evaluate(
        "[...document.querySelectorAll('body *:not(.unseen):not(.unseen *)')]"
        ".filter(e => e.getBoundingClientRect().right > 376).map(e => e.className || e.tagName)"
    )
    assert [name for name in wide if name != "H1"] == []
    assert page.evaluate("document.documentElement.scrollWidth") == 375


def test_taiwan_reader_gets_chinese_words(shop: Shop, visit: Open) -> None:
    shop.answers(sources(), done("到九點。"))
    page = visit(locale="zh-TW")
    expect(page.locator("html")).to_have_attribute("lang", "zh-Hant")
    expect(page.locator("#question")).to_have_attribute("placeholder", "詢問文件內容")
    expect(page.locator("#state")).to_have_text("4 份文件")
    ask(page, "星期五開到幾點")
    expect(page.locator(".written .kicker")).to_contain_text("由模型撰寫")
    expect(page.get_by_role("button", name="新的對話")).to_be_visible()
    visible = page.locator("body").inner_text()
    assert not re.search(r"Written|Sources|Enter sends|documents\b|tok/s", visible)


def test_enter_that_confirms_a_composition_does_not_send(shop: Shop, visit: Open) -> None:
    shop.answers(sources(), done("好。"))
    page = visit(locale="zh-TW")
    field = page.locator("#question")
    field.focus()
    expect(page.locator("#state")).to_have_text("4 份文件")
    session = page.context.new_cdp_session(page)
    session.send(
        "Input.imeSetComposition", {"text": "停車", "selectionStart": 2, "selectionEnd": 2}
    )
    page.evaluate(
        "document.addEventListener('keydown', e => { window.composing = e.isComposing }, true)"
    )
    page.keyboard.press("Enter")
    assert page.evaluate("window.composing") is True
    expect(page.locator(".turn")).to_have_count(0)
    # Safari: the composition is over, the key is still the input method's.
    field.fill("停車")
    field.evaluate(
        "e => e.dispatchEvent(new KeyboardEvent('keydown',"
        " {key: 'Enter', keyCode: 229, bubbles: true, cancelable: true}))"
    )
    expect(page.locator(".turn")).to_have_count(0)
    assert shop.asked == []
    page.keyboard.press("Enter")
    expect(page.locator(".words")).to_have_text("好。")
    assert shop.asked == [{"question": "停車"}]


def test_shift_enter_starts_a_line_and_a_question_of_nothing_is_not_sent(
    shop: Shop, visit: Open
) -> None:
    page = visit()
    field = page.locator("#question")
    expect(page.locator("#state")).to_have_text("4 documents")
    field.focus()
    page.keyboard.type("  ")
    page.keyboard.press("Enter")
    page.keyboard.press("Shift+Enter")
    expect(field).to_have_value("  \n")
    assert shop.asked == []


def test_question_over_the_limit_is_told_so_and_not_sent(shop: Shop, visit: Open) -> None:
    shop.answers(sources(), done("Ok."))
    page = visit()
    ask_field = page.locator("#question")
    ask_field.fill("咖" * 1999 + "🅰🅱")
    expect(page.locator("#count")).to_contain_text("Too long by 1 character.")
    expect(page.locator("#send")).to_be_disabled()
    ask_field.press("Enter")
    assert shop.asked == []
    ask_field.fill("咖" * 1999 + "🅰")
    expect(page.locator("#count")).to_have_text("0 characters left")
    ask_field.press("Enter")
    expect(page.locator(".turn")).to_have_count(1)


def test_page_waits_for_the_model_then_says_who_writes(shop: Shop, visit: Open) -> None:
    loading = (503, {**READY, "status": "loading"})
    shop.health = [loading, loading, (200, READY)]
    page = visit()
    expect(page.locator("#state")).to_have_text("Loading the model…")
    page.locator("#question").fill("Early")
    expect(page.locator("#send")).to_be_disabled()
    expect(page.locator("#state")).to_have_text("4 documents")
    expect(page.locator("#send")).to_be_enabled()
    expect(page.locator(".notice")).to_contain_text("small stand-in model (SmolLM2-135M)")
    expect(page.locator("#name")).to_have_text("Lantern Finch")
    expect(page.locator("#question")).to_have_value("Early")


def test_full_model_has_no_stand_in_notice(shop: Shop, visit: Open) -> None:
    shop.health = [(200, {**READY, "stand_in": False, "target": "mlx-community/Qwen3-4B-4bit"})]
    engine = {**ENGINE, "target": "mlx-community/Qwen3-4B-4bit"}
    shop.answers(sources(), done("Until nine.", engine=engine))
    page = visit()
    ask(page, "How late?")
    expect(page.locator(".kicker").nth(1)).to_have_text("Written by the model (Qwen3-4B-4bit)")
    expect(page.locator(".notice")).to_have_count(0)


def test_empty_library_says_how_to_fill_it(shop: Shop, visit: Open) -> None:
    shop.health = [(200, {**READY, "stand_in": False, "documents": 0})]
    page = visit()
    expect(page.locator(".notice")).to_have_text(
        "There are no documents yet. Add PDFs to data/ and run dflash-rag ingest."
    )
