"""``POST /ask`` and ``POST /ask/stream``: a question in, a grounded answer out."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable
from contextlib import aclosing, suppress
from typing import TypeVar

from fastapi import APIRouter, Request, Response
from fastapi.sse import EventSourceResponse, ServerSentEvent

from dflash_engine import EngineError

from ..rag.answer import Answer, Question, Sources, Token
from .deps import CurrentAnswerer

T = TypeVar("T")
log = logging.getLogger(__name__)
router = APIRouter()


@router.post("/ask", response_model=Answer)
async def ask(asked: Question, answerer: CurrentAnswerer, request: Request) -> Answer | Response:
    """The whole answer, when it is done. A client that goes away stops the model."""
    answer = await _unless_gone(request, answerer.answer(asked))
    return answer or Response(status_code=499)  # nobody reads this: the usual code for it


@router.post("/ask/stream", response_class=EventSourceResponse)
async def ask_stream(asked: Question, answerer: CurrentAnswerer) -> AsyncIterator[ServerSentEvent]:
    """Server-sent events: ``sources``, then ``token`` as it is written, then ``done`` or ``error``.

    A client that goes away stops the model.
    """
    try:
        async with aclosing(answerer.stream(asked)) as parts:
            async for part in parts:
                match part:
                    case Token():
                        yield ServerSentEvent(event="token", data={"text": part.text})
                    case Answer():
                        yield ServerSentEvent(event="done", data=part)
                    case Sources():
                        yield ServerSentEvent(event="sources", data=part)
    except EngineError as error:
        yield ServerSentEvent(event="error", data={"message": str(error)})
    except Exception:
        log.exception("a stream broke off")
        yield ServerSentEvent(
            event="error", data={"message": "the server had a fault: its log says which"}
        )


async def _unless_gone(request: Request, work: Awaitable[T]) -> T | None:
    # The body has been read, so the next message can only be that the client has gone.
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        return await task if task.done() else None
    finally:
        for future in (task, gone):
            future.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await future
