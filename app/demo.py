"""``dflash-rag demo``: the whole product on its own samples, as a customer would meet it.

A server is started as a process of its own, the samples are ingested through it, and the sample
questions are asked over HTTP.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from dflash_engine import hub
from ingest import Home

from . import ingesting
from .errors import ServerFailedError
from .settings import Settings

SAMPLES = Path(__file__).parent.parent / "data" / "samples"
QUESTIONS = SAMPLES / "questions.json"
START_SECONDS = 120  # for the server to be ready


def run(settings: Settings, *, as_json: bool) -> int:
    """Show the demo and return the exit status: 0 only if every expected page came first."""
    if not QUESTIONS.is_file():
        raise ServerFailedError(
            f"the sample documents are not at {SAMPLES}: run the demo from a clone of the project"
        )
    console = Console(stderr=as_json)
    settings = settings.model_copy(update={"data": SAMPLES.parent})
    for model in settings.model_names:
        hub.pull(model, settings.models_folder, console.print)
    if not as_json:
        result = _show(settings, console)
    else:
        with tempfile.TemporaryDirectory(prefix="dflash-rag-") as home:
            own = {"home": Path(home), "models": settings.models_folder.absolute()}
            result = _show(settings.model_copy(update=own), console)
        sys.stdout.write(json.dumps(result, ensure_ascii=False, indent=2) + "\n")
    return 0 if all(question["expected_page_first"] for question in result["questions"]) else 1


def _show(settings: Settings, console: Console) -> dict[str, Any]:
    start = time.perf_counter()
    with _server(settings) as url:
        console.rule("ingest")
        with ingesting.Bar(console) as bar:
            summary = ingesting.ingest(settings, [SAMPLES], on_event=bar.show)
        ingesting.print_summary(console, summary)
        with httpx.Client(base_url=url, trust_env=False, timeout=START_SECONDS) as client:
            _wait_until_ready(client)
            console.rule(f"questions to {url}/ask, {time.perf_counter() - start:.0f} s after start")
            questions = [
                _ask(client, expected, console) for expected in json.loads(QUESTIONS.read_text())
            ]
            health = client.get("/health").json()
    if health["stand_in"]:
        console.print(
            f"The quotes are the documents' own words. The lines under them were written by "
            f"{health['target']}, a small stand-in for the models that a Mac runs: expect little."
        )
    asked = [question for question in questions if question["engine"]]
    tokens = sum(question["engine"]["tokens"] - 1 for question in asked)
    seconds = sum(question["timings"]["decode_ms"] for question in asked) / 1000
    rounds = sum(question["engine"]["rounds"] for question in asked)
    engine = {
        "target": health["target"],
        "tokens_per_second": round(tokens / seconds, 2) if seconds else 0.0,
        "tokens_per_round": round(tokens / rounds, 3) if rounds else 0.0,
    }
    right = sum(question["expected_page_first"] for question in questions)
    console.rule(
        f"{right} of {len(questions)} found as expected; {engine['tokens_per_second']} tokens/s, "
        f"{engine['tokens_per_round']} tokens a round; {time.perf_counter() - start:.0f} s in all"
    )
    return {
        "questions": questions,
        "ingest": {
            "files": health["documents"],
            "passages": health["passages"],
            "seconds": round(summary["seconds"], 2),
            "failed": summary["failed"],
        },
        "engine": engine,
    }


def _ask(client: httpx.Client, expected: dict[str, Any], console: Console) -> dict[str, Any]:
    response = client.post("/ask", json={"question": expected["question"], "max_tokens": 48})
    if response.status_code != 200:
        raise ServerFailedError(f"POST /ask: {response.status_code} {response.text}")
    answer: dict[str, Any] = response.json()
    first = next(iter(answer["citations"]), {"file": None, "page": None})
    found = (first["file"], first["page"]) == (expected["file"], expected.get("page"))
    _print(console, expected["question"], answer, found)
    return {"question": expected["question"], "expected_page_first": found} | answer


def _print(console: Console, question: str, answer: dict[str, Any], found: bool) -> None:
    text = Text()
    for quote in answer["quotes"]:
        text.append(f"“{quote['sentence']}”\n", style="bold")
        text.append(f"  {_place(quote)}\n", style="cyan")
    text.append(answer["answer"] + "\n")
    for citation in answer["citations"]:
        text.append(f"[{citation['n']}] {_place(citation)}  ", style="cyan")
    timings, engine = answer["timings"], answer["engine"]
    facts = f"\nfound in {timings['retrieve_ms']:.0f} ms"
    if engine:
        facts += (
            f", read in {timings['prefill_ms']:.0f} ms, written in {timings['decode_ms']:.0f} ms: "
            f"{engine['tokens']} tokens by {engine['target']} with {engine['drafter']}, "
            f"{engine['tokens_per_second']:.1f} tokens/s, {engine['tokens_per_round']:.2f} a round"
        )
    else:
        facts += "; no model was asked"
    text.append(facts, style="dim")
    style = "green" if found else "red"
    console.print(Panel(text, title=Text(question), title_align="left", border_style=style))


def _place(source: dict[str, Any]) -> str:
    return str(source["file"]) + (f" p. {source['page']}" if source["page"] else "")


@contextmanager
def _server(settings: Settings) -> Iterator[str]:
    """A server process on a free port, stopped at the end; its log is shown if it fails."""
    home = Home(settings.home)
    settings.home.mkdir(parents=True, exist_ok=True)
    log_path = settings.home / "demo-server.log"
    command = [sys.executable, "-m", "app.cli", "serve", "--home", str(settings.home)]
    command += ["--host", "127.0.0.1", "--port", "0"]
    environment = _environment(settings)
    with (
        log_path.open("wb") as log,
        subprocess.Popen(command, stdout=log, stderr=log, env=environment) as process,
    ):
        try:
            end = time.monotonic() + START_SECONDS
            while not (url := _url_of(home, process)):
                if process.poll() is not None or time.monotonic() > end:
                    raise ServerFailedError(f"the server did not start: {log_path.read_text()}")
                time.sleep(0.1)
            yield url
        except httpx.TransportError as error:
            raise ServerFailedError(f"the server stopped: {log_path.read_text()}") from error
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


def _url_of(home: Home, process: subprocess.Popen[bytes]) -> str | None:
    owner = home.owner()
    return owner.url if owner is not None and owner.pid == process.pid else None


def _environment(settings: Settings) -> dict[str, str]:
    given = settings.model_dump(mode="json", exclude_none=True)
    return os.environ | {f"DFLASH_RAG_{name.upper()}": str(value) for name, value in given.items()}


def _wait_until_ready(client: httpx.Client) -> None:
    end = time.monotonic() + START_SECONDS
    while client.get("/health").status_code != 200:
        if time.monotonic() > end:
            raise ServerFailedError(f"the server is not ready after {START_SECONDS} seconds")
        time.sleep(0.2)
