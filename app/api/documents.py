"""Ingest by the server: it owns the index, so ``dflash-rag ingest`` hands its work over here."""

import asyncio
import threading
from collections.abc import AsyncIterator

from fastapi import APIRouter
from fastapi.sse import EventSourceResponse, ServerSentEvent
from pydantic import BaseModel, Field

from ingest import IngestError, IngestEvent, IngestSummary

from ..errors import AppError
from .deps import CurrentService, OwnerOnly

router = APIRouter()


class IngestRequest(BaseModel):
    """Absolute paths of files and folders on the server's machine."""

    paths: list[str] = Field(min_length=1)
    rebuild: bool = False


@router.post("/documents/ingest", response_class=EventSourceResponse, dependencies=[OwnerOnly])
async def ingest(asked: IngestRequest, service: CurrentService) -> AsyncIterator[ServerSentEvent]:
    """Server-sent events: ``progress`` for each step, then ``summary`` or ``error``.

    Needs the token of the home's ``owner.json``. A client that goes away stops the ingest after
    the file it is at; what is done stays.
    """
    loop = asyncio.get_running_loop()
    events: asyncio.Queue[IngestEvent | IngestSummary | Exception] = asyncio.Queue()
    left = threading.Event()

    def tell(event: IngestEvent | IngestSummary | Exception) -> None:
        if not left.is_set():
            loop.call_soon_threadsafe(events.put_nowait, event)

    def work() -> None:
        try:
            tell(service.ingest(asked.paths, tell, asked.rebuild, left.is_set))
        except Exception as error:  # noqa: BLE001 - told to the one who asked
            tell(error)

    thread = threading.Thread(target=work, name="ingest", daemon=True)
    thread.start()
    try:
        while True:
            event = await events.get()
            match event:
                case IngestEvent():
                    yield ServerSentEvent(event="progress", data=event.to_dict())
                case IngestSummary():
                    yield ServerSentEvent(event="summary", data=event.to_dict())
                    return
                case _:
                    known = isinstance(event, (IngestError, AppError))
                    message = str(event) if known else f"{type(event).__name__}: {event}"
                    yield ServerSentEvent(event="error", data={"message": message})
                    return
    finally:
        left.set()
