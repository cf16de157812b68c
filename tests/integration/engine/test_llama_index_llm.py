import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tiny
from llama_index.core import Document, Settings, VectorStoreIndex
from llama_index.core.base.llms.base import BaseLLM
from llama_index.core.chat_engine import SimpleChatEngine
from llama_index.core.embeddings import MockEmbedding
from llama_index.core.llms import ChatMessage, MessageRole
from llama_index.core.memory import ChatMemoryBuffer
from ticking import ticking

from dflash_engine import DFlash
from dflash_engine.integrations.llama_index import DFlashLLM

MESSAGES = [
    ChatMessage(role=MessageRole.SYSTEM, content="Be brief."),
    ChatMessage(role=MessageRole.USER, content="Hi"),
]
PROMPT = "hello world"


@pytest.fixture(scope="module")
def engine() -> Iterator[DFlash]:
    with DFlash(str(tiny.llama(end_weight=0.0)), prefill_step=8) as engine:
        yield engine


@pytest.fixture
def llm(engine: DFlash) -> DFlashLLM:
    return DFlashLLM(engine, max_tokens=30)


@pytest.fixture(scope="module")
def texts(engine: DFlash) -> tuple[str, str]:
    """What the engine itself writes: completion, and chat."""
    turns = [{"role": m.role.value, "content": str(m.content)} for m in MESSAGES]
    return (
        engine.generate(PROMPT, max_tokens=30).text,
        engine.chat(turns, max_tokens=30).text,
    )


async def test_all_eight_methods_write_what_the_engine_writes(
    llm: DFlashLLM, texts: tuple[str, str]
) -> None:
    completion, chat = texts
    assert completion != chat
    assert llm.complete(PROMPT).text == completion
    assert (await llm.acomplete(PROMPT)).text == completion
    assert llm.chat(MESSAGES).message.content == chat
    assert (await llm.achat(MESSAGES)).message.content == chat

    streams: list[tuple[list[Any], str, Callable[[Any], str]]] = [
        (list(llm.stream_complete(PROMPT)), completion, lambda r: r.text),
        ([r async for r in await llm.astream_complete(PROMPT)], completion, lambda r: r.text),
        (list(llm.stream_chat(MESSAGES)), chat, lambda r: r.message.content),
        ([r async for r in await llm.astream_chat(MESSAGES)], chat, lambda r: r.message.content),
    ]
    for responses, text, text_of in streams:
        assert len(responses) > 5
        assert "".join(r.delta or "" for r in responses) == text
        assert text_of(responses[-1]) == text
        for response in responses:
            assert text.startswith(text_of(response)), "each carries the text so far"


async def test_responses_say_what_ran(llm: DFlashLLM) -> None:
    whole = [llm.complete(PROMPT), llm.chat(MESSAGES), await llm.acomplete(PROMPT)]
    last = [list(llm.stream_chat(MESSAGES))[-1]]
    for response in [*whole, *last]:
        assert response.raw["drafter"] == "composed"  # type: ignore[index, call-overload]
        assert response.raw["tokens"] == 30  # type: ignore[index, call-overload]
        assert response.raw["finish_reason"] == "length"  # type: ignore[index, call-overload]
        facts = response.additional_kwargs
        assert facts["completion_tokens"] == 30
        assert facts["total_tokens"] == facts["prompt_tokens"] + 30


def test_options_of_a_call_win_over_the_fields(llm: DFlashLLM, texts: tuple[str, str]) -> None:
    assert llm.complete(PROMPT, max_tokens=3).additional_kwargs["completion_tokens"] == 3
    stop = texts[0][10:12]
    expected = texts[0][: texts[0].index(stop)]
    for given in (stop, [stop]):
        response = llm.complete(PROMPT, stop=given)
        assert response.text == expected
        assert response.raw["finish_reason"] == "stop"  # type: ignore[index]
    hot = {"temperature": 2.0, "seed": 4}
    assert llm.complete(PROMPT, **hot).text == llm.complete(PROMPT, **hot).text != texts[0]
    assert llm.complete(PROMPT, unknown=1, stop=None).text == texts[0]


async def test_async_calls_leave_the_event_loop_free(llm: DFlashLLM) -> None:
    async with ticking(0.002) as ticks:
        first, second = await asyncio.gather(
            llm.achat(MESSAGES, max_tokens=120), llm.acomplete(PROMPT, max_tokens=120)
        )
    assert ticks.count > 20
    assert first.raw["tokens"] == second.raw["tokens"] == 120  # type: ignore[index, call-overload]


@pytest.mark.parametrize("method", ["stream_complete", "stream_chat"])
def test_leaving_a_stream_stops_the_generation(llm: DFlashLLM, engine: DFlash, method: str) -> None:
    given: Any = PROMPT if method == "stream_complete" else MESSAGES
    for read in (1, 0):
        stream = getattr(llm, method)(given, max_tokens=900)
        for _ in range(read):
            next(stream)
        del stream
        assert engine.generate("a", max_tokens=1).stats.queue_seconds < 0.3


@pytest.mark.parametrize("method", ["astream_complete", "astream_chat"])
async def test_leaving_an_async_stream_stops_the_generation(
    llm: DFlashLLM, engine: DFlash, method: str
) -> None:
    given: Any = PROMPT if method == "astream_complete" else MESSAGES
    async for _ in await getattr(llm, method)(given, max_tokens=900):
        break
    await asyncio.sleep(0.05)
    answer = await asyncio.to_thread(engine.generate, "a", max_tokens=1)
    assert answer.stats.queue_seconds < 0.3


def test_metadata_is_the_models(llm: DFlashLLM, engine: DFlash) -> None:
    assert isinstance(llm, BaseLLM)
    assert llm.class_name() == "DFlashLLM"
    metadata = llm.metadata
    assert metadata.context_window == tiny.CONTEXT
    assert metadata.num_output == 30
    assert metadata.is_chat_model
    assert metadata.model_name == engine.target_name


def test_fields_describe_the_engine_and_load_one_when_none_is_given() -> None:
    llm = DFlashLLM(target_model=str(tiny.llama()), draft_model=str(tiny.draft()), max_tokens=4)
    try:
        assert llm.complete("a").raw["drafter"] == "composed"  # type: ignore[index]
        again = DFlashLLM(llm._engine)
        assert (again.draft_model, again.drafter) == ("draft", "composed")
    finally:
        llm._engine.close()


def test_a_chat_engine_runs_on_it(llm: DFlashLLM) -> None:
    memory = ChatMemoryBuffer.from_defaults()  # the default one leaves a database open
    chat = SimpleChatEngine.from_defaults(llm=llm, memory=memory, system_prompt="Be brief.")
    first = chat.chat("Hi")
    assert len(first.response) > 0
    assert "".join(chat.stream_chat("And then?").response_gen)
    assert len(chat.chat_history) == 4


def test_a_query_engine_runs_on_it(llm: DFlashLLM) -> None:
    documents = [Document(text="We open at nine."), Document(text="We close at six.")]
    index = VectorStoreIndex.from_documents(documents, embed_model=MockEmbedding(embed_dim=4))
    answer = index.as_query_engine(llm=llm, similarity_top_k=2).query("When do you open?")
    assert len(answer.source_nodes) == 2
    assert str(answer)
    assert Settings._llm is None, "nothing global was set"
