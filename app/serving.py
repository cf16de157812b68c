"""``dflash-rag serve``: the server in this process, until it is told to stop."""

import socket

import uvicorn

from ingest import Home

from .errors import ServerFailedError
from .server import create_app
from .settings import Settings

GRACE = 5  # seconds that answers under way get when the server is told to stop


def run(settings: Settings, *, log_level: str = "info") -> int:
    """Serve until SIGINT or SIGTERM. Raises HomeLocked or ServerFailedError before listening."""
    home = Home(settings.home)
    with home.lock(), listen(settings.host, settings.port) as listening:
        url = _url(listening)
        server = uvicorn.Server(
            uvicorn.Config(
                create_app(settings, url, home),
                log_level=log_level,
                timeout_graceful_shutdown=GRACE,
                server_header=False,
            )
        )
        print(f"serving on {url}", flush=True)
        server.run(sockets=[listening])
    return 0 if server.started else 3


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
