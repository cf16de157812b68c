"""One question, answered: retrieve, quote, prompt, write, cite."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import asdict, dataclass
from typing import Annotated, Any, cast

from llama_index.core.base.llms.types import ChatResponse
from pydantic import BaseModel, Field, StringConstraints

from dflash_engine.errors import PromptTooLongError
from dflash_engine.integrations.llama_index import DFlashLLM
from ingest import Embedder, Index, Passage

from ..settings import Settings
from . import prompt, quote
from .conversation import Conversations, Turn
from .retrieve import Retrieval, Threshold, retrieve

MAX_QUESTION = 2000  # characters


class Question(BaseModel):
    """What a client asks. Options left out take the server's settings."""

    question: Annotated[
        str, StringConstraints(strip_whitespace=True, min_length=1, max_length=MAX_QUESTION)
    ]
    conversation_id: str | None = Field(None, max_length=64)
    top_k: int | None = Field(None, ge=1, le=10)
    max_tokens: int | None = Field(None, ge=1, le=4096)
    temperature: float | None = Field(None, ge=0, le=2)


class QuotedSentence(BaseModel):
    """A sentence of passage ``n``, verbatim; ``page`` is null in files without pages."""

    n: int
    sentence: str
    file: str
    page: int | None


class Citation(BaseModel):
    """A passage that was before the model, best first; ``score`` is between 0 and 1."""

    n: int
    file: str
    page: int | None
    heading: str
    passage: str
    score: float


class EngineFacts(BaseModel):
    """What wrote the answer, and how fast."""

    target: str
    draft: str | None
    drafter: str
    tokens: int
    tokens_per_second: float
    tokens_per_round: float
    rounds: int
    kept: dict[str, int] = Field(description="Tokens by the drafter that proposed them.")
    reused: int = Field(description="Prompt tokens that were known from earlier prompts.")


class Timings(BaseModel):
    """Milliseconds spent. Without a model call, the last two are 0."""

    retrieve_ms: float
    prefill_ms: float = 0.0
    decode_ms: float = 0.0


class Sources(BaseModel):
    """What was found, before anything is written."""

    conversation_id: str
    found: bool
    quotes: list[QuotedSentence]
    citations: list[Citation]


class Answer(Sources):
    """The whole answer. ``engine`` is null when no model was called: nothing was found."""

    answer: str
    engine: EngineFacts | None
    timings: Timings


@dataclass(frozen=True)
class Token:
    """A piece of the answer's text."""

    text: str


class Answerer:
    """Answers questions from an index with a model. ``stream`` may run many times at once."""

    def __init__(
        self, index: Index, embedder: Embedder, llm: DFlashLLM, settings: Settings
    ) -> None:
        self._index, self._embedder, self._llm, self._settings = index, embedder, llm, settings
        self._conversations = Conversations()
        cosine = settings.min_cosine
        self._threshold = Threshold(
            embedder.model.min_cosine if cosine is None else cosine, settings.min_coverage
        )

    async def answer(self, asked: Question) -> Answer:
        """The whole answer at once."""
        async with aclosing(self.stream(asked)) as parts:
            async for part in parts:
                if isinstance(part, Answer):
                    return part
        raise AssertionError("a stream ends with its answer")

    async def stream(self, asked: Question) -> AsyncGenerator[Sources | Token | Answer, None]:
        """The sources, the text as it is written, then the whole. Closing it stops the model."""
        conversation = self._conversations.open(asked.conversation_id)
        earlier = self._conversations.turns(conversation)
        start = time.perf_counter()
        # Vectors and databases take their time; other requests must not wait for that.
        sources, passages = await asyncio.to_thread(self._find, asked, conversation, earlier)
        timings = Timings(retrieve_ms=_ms(time.perf_counter() - start))
        yield sources

        if not sources.found:
            text = self._settings.not_found or prompt.not_found(asked.question)
            yield Token(text)
            yield Answer(**dict(sources), answer=text, engine=None, timings=timings)
            return

        try:
            responses = await self._write(asked, sources, passages, earlier)
        except PromptTooLongError:
            if not earlier:
                raise
            # Long answers before must not make a short question too long.
            responses = await self._write(asked, sources, passages, ())
        text = ""
        facts: dict[str, Any] = {}
        async with aclosing(responses):
            async for response in responses:
                text, facts = response.message.content or "", response.raw or facts
                if response.delta:
                    yield Token(response.delta)
        self._conversations.add(conversation, Turn(asked.question, text.strip()))
        timings.prefill_ms = _ms(facts["prefill_seconds"])
        timings.decode_ms = _ms(facts["decode_seconds"])
        yield Answer(
            **dict(sources), answer=text.strip(), engine=EngineFacts(**facts), timings=timings
        )

    async def _write(
        self,
        asked: Question,
        sources: Sources,
        passages: list[Passage],
        earlier: tuple[Turn, ...],
    ) -> AsyncGenerator[ChatResponse, None]:
        quoted = [quote.sentence for quote in sources.quotes]
        # What is said later in a conversation may be of one customer alone: it is not remembered.
        owners = None if earlier else {passage.id for passage in passages}
        temperature = asked.temperature
        responses = await self._llm.astream_chat(
            prompt.messages(asked.question, passages, quoted, earlier),
            max_tokens=asked.max_tokens or self._settings.max_tokens,
            temperature=self._settings.temperature if temperature is None else temperature,
            owners=owners,
        )
        return cast(AsyncGenerator[ChatResponse, None], responses)

    def _find(
        self, asked: Question, conversation: str, earlier: tuple[Turn, ...]
    ) -> tuple[Sources, list[Passage]]:
        retrieval = self._retrieve(asked.question, asked.top_k)
        if not retrieval.found and earlier:
            # "And on Sunday?" says nothing by itself: read it with the question before.
            retrieval = self._retrieve(f"{earlier[-1].question} {asked.question}", asked.top_k)
        if not retrieval.found:
            return Sources(conversation_id=conversation, found=False, quotes=[], citations=[]), []
        passages = [scored.passage for scored in retrieval.passages]
        quoted = quote.quotes(asked.question, passages, self._index, self._embedder)
        sources = Sources(
            conversation_id=conversation,
            found=True,
            quotes=[QuotedSentence(**asdict(q)) for q in quoted],
            citations=[
                Citation(
                    n=n,
                    file=scored.passage.file,
                    page=scored.passage.page,
                    heading=scored.passage.heading,
                    passage=scored.passage.text,
                    score=scored.score,
                )
                for n, scored in enumerate(retrieval.passages, start=1)
            ],
        )
        return sources, passages

    def _retrieve(self, question: str, top_k: int | None) -> Retrieval:
        return retrieve(
            question,
            self._index,
            self._embedder,
            top_k=top_k or self._settings.top_k,
            threshold=self._threshold,
        )


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 1)
