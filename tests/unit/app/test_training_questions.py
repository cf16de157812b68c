"""Training prompts: from the sample documents, in the product's own shape."""

import shutil
from pathlib import Path

import pytest
import tiny

from app import training
from app.rag import prompt, quote
from app.rag.questions import Question, from_target, from_templates, parse
from app.rag.retrieve import Threshold, retrieve
from dflash_engine import DFlash, hub
from dflash_engine.targets import load
from dflash_engine.training.generate import prompt_id
from ingest import Embedder, EmbeddingModel, Home, Index, Passage

SAMPLES = Path(__file__).parents[3] / "data" / "samples"
ZH = "shop-guide-zh.pdf"


@pytest.fixture(scope="module")
def embedder(minilm_folder):
    return Embedder(EmbeddingModel.named("all-MiniLM-L6-v2"), minilm_folder)


@pytest.fixture(scope="module")
def index(embedder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("training")
    data = folder / "data"
    shutil.copytree(SAMPLES, data)
    with Home(folder / "home").lock() as home, Index.open(home, embedder, data) as index:
        index.ingest([data])
        yield index


@pytest.fixture(scope="module")
def questions(index):
    return list(from_templates(index.every_passage(), index, each=4))


@pytest.fixture(scope="module")
def engine():
    with DFlash(str(tiny.llama()), drafter="none") as engine:
        yield engine


def characters(messages):
    """A conversation as tokens, so that tests can read it back."""
    return [ord(c) for m in messages for c in f"{m['role']}: {m['content']}\n"]


def text(made):
    return "".join(map(chr, made.tokens))


def test_every_passage_is_there_in_the_order_of_the_documents(index):
    passages = index.every_passage()
    assert len(passages) == index.passage_count > 10
    places = [(passage.file, passage.ordinal) for passage in passages]
    assert places == sorted(set(places))
    assert {file for file, _ in places} == {path.name for path in SAMPLES.glob("*.pdf")}


def test_templates_ask_about_every_passage_in_its_own_language(index, questions):
    asked = {q.passage.id for q in questions}
    by_passage = [[q.text for q in questions if q.passage == p] for p in index.every_passage()]
    assert len(asked) > 0.9 * len(by_passage)
    assert all(len(texts) == len(set(texts)) <= 4 for texts in by_passage)
    han = [q for q in questions if any("\u4e00" <= c <= "\u9fff" for c in q.text)]
    assert {q.passage.file for q in han} == {ZH}
    assert len(han) > 0.9 * sum(q.passage.file == ZH for q in questions)
    assert all("{" not in q.text and "\n" not in q.text and len(q.text) < 200 for q in questions)


def test_templates_are_repeatable_and_vary_with_the_seed(index, questions):
    passages = index.every_passage()
    assert list(from_templates(passages, index, each=4)) == questions
    other = list(from_templates(passages, index, each=4, seed=1))
    assert len({q.text for q in other} & {q.text for q in questions}) < 0.7 * len(questions)
    assert list(from_templates(passages[:2], index, each=4)) == [
        q for q in questions if q.passage in passages[:2]
    ]


class Counted:
    """An index in which some words are rare."""

    def document_frequency(self, terms):
        return {term: 9 if term in ("shop", "order") else 1 for term in terms}


def passage(text, heading=""):
    return Passage("p", "a.txt", 0, None, heading, text, 0, len(text), 1)


def texts_of(passage):
    return {q.text for q in from_templates([passage], Counted(), each=99)}


def test_english_templates():
    found = texts_of(
        passage(
            "Cleaning the burrs\nThe burrs need cleaning once a month. Is it open?",
            "Care > 3.2 Cleaning the burrs",
        )
    )
    assert "How do I go about cleaning the burrs?" in found
    assert "What do the documents say about cleaning the burrs?" in found
    assert "Is it true that the burrs need cleaning once a month?" in found
    assert "burrs need cleaning" in found
    assert not any("open" in text or "3.2" in text or "Care" in text for text in found)


def test_chinese_templates():
    found = texts_of(
        passage("停車資訊\n消費滿 1,500 元可折抵一小時停車費。會員日九五折。", "停車資訊")
    )
    assert "關於停車資訊，文件裡怎麼說？" in found
    assert "請問消費滿 1,500 元可折抵一小時停車費嗎？" in found
    assert "會員日九五折" in found


def test_keywords_are_the_rare_words_in_the_sentences_order():
    found = texts_of(passage("The shop sends an order to Kinmen by ferry."))
    assert "sends Kinmen ferry" in found


@pytest.mark.parametrize("text", ["", "...", "表", "A B\n1 2 3"])
def test_passages_that_say_nothing_are_asked_nothing(text):
    assert texts_of(passage(text)) == set()


@pytest.mark.parametrize(
    ("line", "question"),
    [
        ("1. What are the opening hours?", "What are the opening hours?"),
        ("2) **How much is shipping?**", "How much is shipping?"),
        ('- "Can I return it?"', "Can I return it?"),
        ("Question 3: Is parking free?", "Is parking free?"),
        ("Q: Where is the shop?", "Where is the shop?"),
        ("3.5 kg of coffee costs how much?", "3.5 kg of coffee costs how much?"),
        ("Sure, here they are: Is it open?", "Sure, here they are: Is it open?"),
        ("1、停車費可以折抵嗎？", "停車費可以折抵嗎？"),
        ("2. 問題：營業時間是幾點？", "營業時間是幾點？"),
        ("「會員日是哪一天？」", "會員日是哪一天？"),
    ],
)
def test_a_question_is_found_without_what_is_around_it(line, question):
    assert parse(f"Here are some.\n{line}\nIt is.", 5) == [question]


def test_rambling_gives_no_question():
    assert parse("The passage says so. A: yes. Why? " + "word " * 60 + "? 嗎？", 5) == []
    assert parse("", 5) == []


def test_questions_are_counted_once_and_cut():
    written = "1. What is it for?\n2. what is it for ?\n3. Where is it made? Who made it then?"
    assert parse(written, 5) == ["What is it for?", "Where is it made?", "Who made it then?"]
    assert parse(written, 2) == ["What is it for?", "Where is it made?"]


def test_smollm2_writes_questions_of_its_own(index, models):
    folder = hub.resolve("smollm2-135m", models)
    target = load(folder, "smollm2-135m")

    def chat_prompt(messages):
        return target.tokenizer.apply_chat_template(list(messages), add_generation_prompt=True)

    passages = [p for p in index.every_passage() if p.file != ZH][1:3]
    found = list(from_target(passages, target, chat_prompt, each=1))
    assert {q.passage.id for q in found} <= {p.id for p in passages}
    assert 1 <= len(found) <= 2
    assert all(q.text.endswith("?") for q in found)


def test_prompts_are_the_products_own(index, embedder, questions, engine):
    some = questions[::4]
    made = training.prompts(some, index, embedder, engine.chat_prompt, "key")
    assert len(made) > 0.8 * len({q.text for q in some})
    for each in made[:5]:
        found = retrieve(
            each.question,
            index,
            embedder,
            top_k=3,
            threshold=Threshold(embedder.model.min_cosine),
        )
        assert found.found
        passages = [scored.passage for scored in found.passages]
        quoted = [q.sentence for q in quote.quotes(each.question, passages, index, embedder)]
        turns = prompt.messages(each.question, passages, quoted)
        messages = [{"role": t.role.value, "content": t.content} for t in turns]
        assert each.tokens == engine.chat_prompt(messages)
        assert each.id == prompt_id("key", each.tokens)
    assert [each.id for each in made] == sorted({each.id for each in made})
    assert not any(each.held_out for each in made)
    assert {each.file for each in made} == {path.name for path in SAMPLES.glob("*.pdf")}


def test_a_question_that_the_documents_do_not_answer_makes_no_prompt(index, embedder):
    foreign = Question("Which country won the football World Cup?", index.every_passage()[0])
    assert training.prompts([foreign], index, embedder, characters, "key") == []


def test_documents_held_out_are_in_no_other_prompt(index, embedder, questions):
    apart = training.hold_out([record.file for record in index.files()], 0.25)
    assert len(apart) == 1
    made = training.prompts(questions[::3], index, embedder, characters, "key", held_out=apart)
    assert {each.held_out for each in made} == {True, False}
    for each in made:
        assert each.held_out == (each.file in apart)
        for passage in index.every_passage():
            if len(passage.text) > 60 and passage.text in text(each):
                assert (passage.file in apart) == each.held_out


def test_the_share_held_out():
    files = [f"{n}.pdf" for n in range(20)]
    held = training.hold_out(files, 0.2)
    assert len(held) == 4
    assert held == training.hold_out(reversed(files), 0.2)
    assert held != training.hold_out(files, 0.2, seed=1)
    assert len(held & training.hold_out([*files, "new.pdf"], 0.2)) >= 3
    assert training.hold_out(files, 0) == frozenset()
    assert len(training.hold_out(files[:2], 0.01)) == 1
    assert len(training.hold_out(files[:2], 0.99)) == 1
    assert training.hold_out(files[:1], 0.5) == training.hold_out([], 0.5) == frozenset()
    for share in (-0.1, 1):
        with pytest.raises(ValueError, match="share"):
            training.hold_out(files, share)
