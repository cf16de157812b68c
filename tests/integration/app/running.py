"""A real server in a process of its own, on a home of its own, and the command line beside it."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from ingest import Home

START_SECONDS = 90
COMMAND = (sys.executable, "-m", "app.cli")


def environment(**settings: Any) -> dict[str, str]:
    """The environment with these settings, and none of the caller's own."""
    kept = {k: v for k, v in os.environ.items() if not k.upper().startswith("DFLASH_RAG_")}
    settings = {"port": 0} | settings
    return kept | {f"DFLASH_RAG_{name.upper()}": str(value) for name, value in settings.items()}


def command(
    *arguments: str | Path, env: Mapping[str, str], cwd: Path, timeout: float = 120
) -> subprocess.CompletedProcess[str]:
    """Run ``dflash-rag`` to its end."""
    return subprocess.run(
        [*COMMAND, *map(str, arguments)],
        env=env,
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )


class Server:
    """``dflash-rag serve`` as a process; killed at the end of the ``with`` block if it lives."""

    def __init__(self, home: Path, env: Mapping[str, str]) -> None:
        self.home, self.log = Home(home), home.with_name(f"{home.name}.log")
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*COMMAND, "serve", "--home", str(home)],
                env=env,
                cwd=home.parent,
                stdout=log,
                stderr=log,
            )
        self.url = self._wait_for_url()
        self.client = httpx.Client(base_url=self.url, trust_env=False, timeout=90)

    def _wait_for_url(self) -> str:
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end:
            assert self.process.poll() is None, self.log.read_text()
            owner = self.home.owner()
            if owner is not None and owner.pid == self.process.pid and owner.url:
                return owner.url
            time.sleep(0.05)
        raise AssertionError(f"no server after {START_SECONDS} s: {self.log.read_text()}")

    def wait_until_ready(self) -> None:
        """Return when questions can be answered."""
        end = time.monotonic() + START_SECONDS
        while (health := self.client.get("/health")).status_code != 200:
            assert time.monotonic() < end, health.text
            time.sleep(0.1)

    def ask(self, question: str, **options: Any) -> dict[str, Any]:
        """The answer to a question; by default a short one, from one passage, since time counts."""
        body = {"question": question, "top_k": 1, "max_tokens": 2} | options
        response = self.client.post("/ask", json=body)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def stop(self, how: signal.Signals = signal.SIGTERM, timeout: float = 30) -> float:
        """Send the signal; return the seconds it took the process to end."""
        start = time.monotonic()
        self.process.send_signal(how)
        self.process.wait(timeout)
        return time.monotonic() - start

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def events(response: httpx.Response) -> list[tuple[float, str, dict[str, Any]]]:
    """The server-sent events of a response: when each came (seconds), its name, its data."""
    from httpx_sse import EventSource

    return [
        (time.monotonic(), event.event, json.loads(event.data))
        for event in EventSource(response).iter_sse()
    ]
