"""Which sentences are quoted, with an index that only counts and no vectors."""

from types import SimpleNamespace

from app.rag.quote import quotes
from ingest import Passage

INDEX = SimpleNamespace(passage_count=4, document_frequency=lambda terms: {})
LATIN_ONLY = SimpleNamespace(model=SimpleNamespace(scripts=frozenset({"latin"})))
TEXT = "停車資訊說明文\n本店提供停車折抵服務。門市每天營業到九點。"
GUIDE = Passage("p", "guide.pdf", 0, 2, "門市 > 停車", TEXT, 0, len(TEXT), 9)


def test_the_sentence_with_the_questions_words_is_quoted_with_its_place():
    quoted = quotes("停車折抵", [GUIDE], INDEX, LATIN_ONLY)
    assert [(q.n, q.sentence, q.file, q.page) for q in quoted] == [
        (1, "本店提供停車折抵服務。", "guide.pdf", 2)
    ]


def test_nothing_is_quoted_where_no_sentence_shares_anything():
    assert quotes("那呢？", [GUIDE], INDEX, LATIN_ONLY) == []
    assert quotes("停車折抵", [], INDEX, LATIN_ONLY) == []


def test_the_same_sentence_is_quoted_once():
    assert len(quotes("停車折抵", [GUIDE, GUIDE], INDEX, LATIN_ONLY)) == 1


def test_a_title_is_no_answer():
    titled = Passage("p", "g.pdf", 0, 1, "停車折抵的服務辦法", "停車折抵的服務辦法", 0, 0, 9)
    assert quotes("停車折抵", [titled], INDEX, LATIN_ONLY) == []
