"""The HTTP server: which routes there are, and how errors are told."""

import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio.to_thread
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dflash_engine import EngineError
from dflash_engine.errors import EngineBusyError, EngineClosedError, PromptTooLongError
from ingest import Home, IngestError

from . import __version__
from .api import ask, documents, health, page
from .errors import AppError
from .rag.answer import MAX_QUESTION
from .service import Service
from .settings import Settings

WEB = Path(__file__).parent / "web"
MAX_BODY = 1_000_000  # bytes; a question is far smaller, and a long list of paths still fits


def create_app(settings: Settings, url: str | None = None, home: Home | None = None) -> FastAPI:
    """The application. It owns the home while it runs, and loads the models in the background.

    ``url`` is where it is reached, told to other processes of this machine so that
    ``dflash-rag ingest`` can hand its work over. ``home`` is given when its lock is held already.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service = Service(settings, home or Home(settings.home))
        app.state.service = service
        app.state.token = secrets.token_urlsafe(32)
        if url:
            service.home.announce(url, app.state.token)
        yield
        await anyio.to_thread.run_sync(service.close)

    app = FastAPI(
        title="dflash-rag", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None
    )
    for router in (ask.router, documents.router, health.router, page.router):
        app.include_router(router)
    app.mount("/static", StaticFiles(directory=WEB))
    app.add_middleware(_BodyLimit)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        return _error(422, "; ".join(_plainly(issue) for issue in error.errors()))

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> JSONResponse:
        return _error(error.status_code, str(error.detail), dict(error.headers or {}))

    @app.exception_handler(AppError)
    async def failed(request: Request, error: AppError) -> JSONResponse:
        headers = {"Retry-After": "2"} if error.status == 503 else {}
        return _error(error.status, str(error), headers)

    @app.exception_handler(EngineError)
    @app.exception_handler(IngestError)
    async def broken(request: Request, error: EngineError | IngestError) -> JSONResponse:
        if isinstance(error, (EngineBusyError, EngineClosedError)):
            return _error(503, str(error), {"Retry-After": "5"})
        return _error(422 if isinstance(error, PromptTooLongError) else 500, str(error))

    @app.exception_handler(Exception)
    async def unforeseen(request: Request, error: Exception) -> JSONResponse:
        return _error(500, "the server had a fault: its log says which")

    return app


class _BodyLimit:
    """Refuses a body larger than MAX_BODY with 413, before it is in memory."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        size = 0

        async def limited() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > MAX_BODY:
                raise HTTPException(413, f"the body is larger than {MAX_BODY // 1000} kB")
            return message

        await self._app(scope, limited, send)


def _error(status: int, message: str, headers: dict[str, str] | None = None) -> JSONResponse:
    return JSONResponse({"error": {"message": message}}, status, headers)


def _plainly(issue: dict[str, object]) -> str:
    # Pydantic's words, for people who did not write the schema.
    location = issue.get("loc")
    parts = (
        [str(part) for part in location if part != "body"] if isinstance(location, tuple) else []
    )
    field = ".".join(parts)
    match issue.get("type"):
        case "missing" if field:
            return f"'{field}' is missing"
        case "missing" | "model_attributes_type" | "dict_type":
            return 'send a JSON object such as {"question": "When do you open?"}'
        case "json_invalid":
            return "the body is not valid JSON"
        case "string_too_short":
            return f"'{field}' is empty"
        case "string_too_long" if field == "question":
            return f"the question is longer than {MAX_QUESTION} characters: shorten it"
        case _:
            message = str(issue.get("msg", "is not valid"))
            return f"'{field}': {message[:1].lower()}{message[1:]}" if field else message
