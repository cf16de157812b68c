"""``dflash-rag serve``: the server in this process, until it is told to stop."""

import asyncio
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI

from ingest import Home

from .errors import ServerFailedError
from .server import create_app
from .service import Service
from .settings import Settings

GRACE = 5  # seconds that connections get to end when the server is told to stop


def run(settings: Settings, *, log_level: str = "info") -> int:
    """Serve until SIGINT or SIGTERM.

    Raises HomeLocked or ServerFailedError before listening, and ServerFailedError when the models
    or the index cannot be loaded: a server that cannot answer would only keep the home from those
    who could mend it.
    """
    home = Home(settings.home)
    with _stopped_in_order(), home.lock(), listen(settings.host, settings.port) as listening:
        url = _url(listening)
        app = create_app(settings, url, home)
        server = _Server(app, log_level)
        print(f"serving on {url}", flush=True)
        server.run(sockets=[listening])
        if server.problem:
            raise ServerFailedError(server.problem)
    return 0 if server.started else 3


class _Server(uvicorn.Server):
    """Ends answers before connections, so that a stream ends with an event, and gives up when the
    models or the index cannot be loaded.
    """

    def __init__(self, app: FastAPI, log_level: str) -> None:
        super().__init__(
            uvicorn.Config(
                app, log_level=log_level, timeout_graceful_shutdown=GRACE, server_header=False
            )
        )
        self.problem = ""
        self._state = app.state

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            threading.Thread(target=self._watch, args=(self._state.service,), daemon=True).start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await asyncio.to_thread(self._state.service.stop_answering)
        await super().shutdown(sockets)

    def _watch(self, service: Service) -> None:
        service.wait()
        if service.state == "failed":
            self.problem = service.problem
            self.should_exit = True


@contextmanager
def _stopped_in_order() -> Iterator[None]:
    # uvicorn raises the signal that stopped it again when it is done; by default that would end
    # the process before the home is given back.
    signals = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda *_: sys.exit(0)) for number in signals]
    try:
        yield
    finally:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens there already. Raises ServerFailedError with the reason."""
    listening = None
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listening = socket.socket(family, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        # Now, not when uvicorn gets there: two sockets may be bound to one port, and whoever reads
        # where the owner serves may connect before the models are looked at.
        listening.listen(2048)
    except OSError as error:
        if listening is not None:
            listening.close()
        raise ServerFailedError(
            f"cannot listen on {host} port {port}: {error.strerror or error}. Choose another with "
            "--port, or 0 for a free one"
        ) from error
    return listening


def _url(listening: socket.socket) -> str:
    # Other processes of this machine reach a server on all addresses at the loopback.
    host, port = listening.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
