"""From a question to sources and prompt: real index and embeddings, and a model that is watched."""

import asyncio
import contextlib
import logging
import threading
import time
from itertools import pairwise

import pytest
from llama_index.core.base.llms.types import ChatMessage, ChatResponse, MessageRole

from app.errors import NotReadyError
from app.rag.answer import Answer, Answerer, Question, Sources, Token
from app.service import Service
from app.settings import Settings
from dflash_engine.errors import PromptTooLongError
from ingest import Embedder, EmbeddingModel, Home, Index

FACTS = {
    "target": "watched",
    "draft": None,
    "drafter": "none",
    "tokens": 3,
    "rounds": 2,
    "tokens_per_round": 1.0,
    "tokens_per_second": 10.0,
    "kept": {"lookup": 1},
    "reused": 0,
    "prefill_seconds": 0.1,
    "decode_seconds": 0.2,
}


class WatchedModel:
    """Stands for the engine: remembers what it was asked, and says the same each time."""

    def __init__(self, *pieces: str) -> None:
        self.pieces = pieces or ("From ", "11 to 21.")
        self.asked: list[list[ChatMessage]] = []
        self.options: list[dict] = []
        self.longest = 10**9  # characters it can read
        self.left = 0

    async def astream_chat(self, messages, **options):
        if sum(len(message.content) for message in messages) > self.longest:
            raise PromptTooLongError("too long: shorten it")
        self.asked.append(list(messages))
        self.options.append(options)
        return self._responses()

    async def _responses(self):
        text = ""
        try:
            for piece in self.pieces:
                text += piece
                message = ChatMessage(role=MessageRole.ASSISTANT, content=text)
                yield ChatResponse(message=message, delta=piece)
                await asyncio.sleep(0)
            yield ChatResponse(message=message, delta="", raw=FACTS)
        except GeneratorExit:
            self.left += 1
            raise


@pytest.fixture(scope="module")
def index_and_embedder(ingested, minilm_folder, tmp_path_factory):
    copy = ingested.copy(tmp_path_factory.mktemp("answering"))
    embedder = Embedder(EmbeddingModel.named("all-MiniLM-L6-v2"), minilm_folder)
    with Home(copy.home).lock() as home, Index.open(home, embedder, copy.data) as index:
        yield index, embedder


@pytest.fixture
def model():
    return WatchedModel()


@pytest.fixture
def answerer(index_and_embedder, model):
    return Answerer(*index_and_embedder, model, Settings())


async def parts_of(answerer, **asked):
    return [part async for part in answerer.stream(Question(**asked))]


async def test_each_sample_question_finds_its_page_first(answerer, questions):
    first = {}
    for asked in questions:
        answer = await answerer.answer(Question(question=asked["question"]))
        citation = answer.citations[0] if answer.citations else None
        first[asked["question"]] = citation and (citation.file, citation.page)
    expected = {q["question"]: q["file"] and (q["file"], q["page"]) for q in questions}
    assert first == expected
    assert {None} < set(expected.values())


async def test_the_quote_has_the_answer_for_most_sample_questions(answerer, questions):
    asked = [q for q in questions if q["file"]]
    right = 0
    for q in asked:
        quotes = (await answerer.answer(Question(question=q["question"]))).quotes
        assert 1 <= len(quotes) <= 2
        right += any(q["answer"] in quote.sentence for quote in quotes)
    assert right >= 0.8 * len(asked)


async def test_quotes_are_verbatim_from_the_passage_they_name(answerer, questions):
    quoted = 0
    for asked in questions:
        answer = await answerer.answer(Question(question=asked["question"], top_k=5))
        for quote in answer.quotes:
            citation = answer.citations[quote.n - 1]
            assert citation.n == quote.n
            assert quote.sentence in citation.passage
            assert (quote.file, quote.page) == (citation.file, citation.page)
            quoted += 1
    assert quoted >= 6


async def test_citations_are_numbered_and_were_all_in_the_prompt(answerer, model):
    asked = Question(question="How late can I come by on a Friday evening?", top_k=4)
    answer = await answerer.answer(asked)
    assert [citation.n for citation in answer.citations] == [1, 2, 3, 4]
    assert all(0 <= citation.score <= 1 for citation in answer.citations)
    prompt = model.asked[0][-1].content
    assert all(citation.passage in prompt for citation in answer.citations)


@pytest.mark.parametrize(
    "question",
    [
        "Which country won the football World Cup in 1998?",
        "誰贏得了1998年的世界盃足球賽？",
        "???",
        "🙂🙂",
        "\x00",
        "'; DROP TABLE passages; --",
        'NEAR("zebra" AND NOT OR *',
    ],
)
async def test_what_is_not_in_the_documents_is_said_without_asking_the_model(
    answerer, model, question
):
    sources, token, answer = await parts_of(answerer, question=question)
    assert isinstance(sources, Sources)
    assert not sources.found
    assert answer.citations == answer.quotes == []
    assert answer.engine is None
    assert token == Token(answer.answer)
    assert answer.answer
    assert model.asked == []


async def test_the_owners_own_not_found_answer_is_used(index_and_embedder, model):
    answerer = Answerer(*index_and_embedder, model, Settings(not_found="Ring 0000-0142."))
    answer = await answerer.answer(Question(question="Who won the World Cup in 1998?"))
    assert answer.answer == "Ring 0000-0142."


async def test_a_stream_is_sources_then_tokens_then_the_answer(answerer, model):
    model.pieces = ("  From", " 11", " to 21.\n")
    sources, *tokens, answer = await parts_of(answerer, question="When are you open on Friday?")
    assert isinstance(sources, Sources)
    assert sources.found
    assert tokens == [Token("  From"), Token(" 11"), Token(" to 21.\n")]
    assert isinstance(answer, Answer)
    assert answer.answer == "From 11 to 21."
    assert (answer.timings.prefill_ms, answer.timings.decode_ms) == (100.0, 200.0)
    assert answer.citations == sources.citations


async def test_options_left_out_are_the_settings_and_zero_counts_as_given(
    index_and_embedder, model
):
    settings = Settings(max_tokens=77, temperature=0.7, top_k=2)
    answerer = Answerer(*index_and_embedder, model, settings)
    question = "When are you open on Friday?"
    answer = await answerer.answer(Question(question=question))
    await answerer.answer(Question(question=question, temperature=0, max_tokens=1, top_k=1))
    given = [(options["max_tokens"], options["temperature"]) for options in model.options]
    assert given == [(77, 0.7), (1, 0)]
    assert len(answer.citations) == 2


async def test_leaving_a_stream_leaves_the_model(answerer, model):
    async with contextlib.aclosing(
        answerer.stream(Question(question="When are you open on Friday?"))
    ) as parts:
        async for part in parts:
            if isinstance(part, Token):
                break
    assert model.left == 1


async def test_a_follow_up_that_says_nothing_by_itself_is_read_with_the_question_before(
    answerer, model
):
    asked = Question(question="How much do you charge to send an order to Kinmen?")
    before = await answerer.answer(asked)
    follow = "And if it is heavy?"
    alone = await answerer.answer(Question(question=follow))
    assert not alone.found
    after = await answerer.answer(Question(question=follow, conversation_id=before.conversation_id))
    assert after.found
    assert after.conversation_id == before.conversation_id
    assert (after.citations[0].file, after.citations[0].page) == ("samples/price-list.pdf", 2)
    said = [message.content for message in model.asked[-1]]
    assert said[1:3] == [asked.question, before.answer]


async def test_answers_are_remembered_with_the_passages_they_rest_on_but_not_conversations(
    answerer, index_and_embedder, model
):
    before = await answerer.answer(Question(question="When are you open on Friday?", top_k=2))
    owners = model.options[-1]["owners"]
    passages = index_and_embedder[0].passages(sorted(owners))
    assert {passage.text for passage in passages} == {c.passage for c in before.citations}
    await answerer.answer(
        Question(question="And on Saturday?", conversation_id=before.conversation_id)
    )
    assert model.options[-1]["owners"] is None


async def test_and_on_saturday_finds_saturday(answerer):
    before = await answerer.answer(Question(question="How late can I come by on a Friday evening?"))
    after = await answerer.answer(
        Question(question="And on Saturday?", conversation_id=before.conversation_id)
    )
    assert "Saturday" in after.quotes[0].sentence


async def test_a_conversation_id_that_is_not_known_is_replaced(answerer, model):
    for _ in range(2):
        answer = await answerer.answer(
            Question(question="When are you open on Friday?", conversation_id="mine")
        )
        assert answer.conversation_id != "mine"
        assert len(model.asked[-1]) == 2


async def test_long_answers_before_do_not_make_a_short_question_too_long(answerer, model):
    question = "When are you open on Friday?"
    model.pieces = ("word " * 2000,)
    before = await answerer.answer(Question(question=question))
    model.longest = 9000
    after = await answerer.answer(
        Question(question=question, conversation_id=before.conversation_id)
    )
    assert after.found
    assert [m.role for m in model.asked[-1]] == [MessageRole.SYSTEM, MessageRole.USER]
    model.longest = 10
    with pytest.raises(PromptTooLongError):
        await answerer.answer(Question(question=question, conversation_id=before.conversation_id))


async def test_an_index_emptied_after_the_search_gives_the_not_found_answer(
    answerer, model, index_and_embedder, monkeypatch
):
    index, _ = index_and_embedder
    monkeypatch.setattr(index, "passages", lambda ids: [])
    answer = await answerer.answer(Question(question="When are you open on Friday?"))
    assert not answer.found
    assert model.asked == []


async def test_questions_do_not_wait_for_each_others_search_in_the_event_loop(answerer):
    ticks = []

    async def tick() -> None:
        while True:
            ticks.append(time.monotonic())
            await asyncio.sleep(0.005)

    ticking = asyncio.create_task(tick())
    await asyncio.gather(
        *(answerer.answer(Question(question="When are you open on Friday?")) for _ in range(3))
    )
    ticking.cancel()
    longest = max(later - sooner for sooner, later in pairwise(ticks))
    assert longest < 0.3 * (ticks[-1] - ticks[0])


class Closable:
    memory = None

    def close(self) -> None:
        pass


@pytest.fixture
def light_service(installation, monkeypatch):
    """A service on a real home whose target is not loaded: it opens at once."""
    settings = Settings(home=installation.home, data=installation.data, models=installation.models)
    monkeypatch.setattr("app.service.open_engine", lambda settings: Closable())
    monkeypatch.setattr("app.service.DFlashLLM", lambda engine: WatchedModel())
    return settings


def test_a_service_is_ready_only_when_the_embedding_model_is_loaded(light_service, monkeypatch):
    loaded = threading.Event()
    real = Embedder.embed_queries

    def watched(self, texts):
        vectors = real(self, texts)
        loaded.set()
        return vectors

    monkeypatch.setattr(Embedder, "embed_queries", watched)
    with Service(light_service, Home(light_service.home)) as service:
        service.wait()
        assert (service.state, service.problem) == ("ready", "")
        assert loaded.is_set()


def test_a_service_that_is_closed_while_it_loads_gives_the_home_back(light_service, monkeypatch):
    loading = threading.Event()

    def slowly(settings):
        loading.set()
        time.sleep(0.3)
        return Closable()

    monkeypatch.setattr("app.service.open_engine", slowly)
    with Service(light_service, Home(light_service.home)) as service:
        assert loading.wait(30)
        with pytest.raises(NotReadyError, match="being loaded"):
            _ = service.answerer
        assert Home(light_service.home).owner() is not None
    assert Home(light_service.home).owner() is None


def test_a_service_that_cannot_load_says_why_in_the_log_too(light_service, tmp_path, caplog):
    settings = light_service.model_copy(update={"models": tmp_path / "nothing"})
    with caplog.at_level(logging.ERROR), Service(settings, Home(settings.home)) as service:
        service.wait()
        assert service.state == "failed"
        assert "dflash-rag models pull" in service.problem
    assert service.problem in caplog.text
    assert Home(settings.home).owner() is None
