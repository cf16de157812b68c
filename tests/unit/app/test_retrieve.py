"""The parts of retrieval: fusing, weighing, judging."""

import math

import pytest

from app.rag.retrieve import RRF, Rarity, Scored, Threshold, fuse, retrieve, scripts
from ingest import Passage


def passage(id: str, text: str = "text", file: str = "a.txt", ordinal: int = 0) -> Passage:
    return Passage(id, file, ordinal, None, "", text, 0, len(text), 1)


class Counted:
    """An index that knows how many passages each term is in."""

    def __init__(self, count: int, **frequency: int) -> None:
        self.passage_count = count
        self.frequency = frequency

    def document_frequency(self, terms):
        return {term: self.frequency.get(term, 0) for term in terms}


def test_fusing_adds_the_reciprocal_ranks():
    fused = fuse([["a", "b"], ["b", "c"]])
    assert fused == pytest.approx(
        {"a": 1 / (RRF + 1), "b": 1 / (RRF + 2) + 1 / (RRF + 1), "c": 1 / (RRF + 2)}
    )
    assert max(fused, key=fused.__getitem__) == "b"


def test_fusing_nothing_gives_nothing():
    assert fuse([]) == fuse([[], []]) == {}


def test_a_rare_word_counts_for_more_than_a_common_one():
    rarity = Rarity.of("shop Kinmen", Counted(100, shop=80, kinmen=1))
    assert rarity.coverage("They send it to Kinmen.") > 0.8
    assert rarity.coverage("In the shop.") < 0.2
    assert rarity.coverage("The shop in Kinmen") == 1.0
    assert rarity.coverage("Nothing of it") == 0.0


def test_weights_are_the_logarithm_of_rarity_and_stop_words_have_none():
    rarity = Rarity.of("What is the price?", Counted(9, price=2))
    assert rarity.weights == {"price": math.log(1 + 9 / 3)}


def test_chinese_is_covered_by_pairs_of_characters():
    rarity = Rarity.of("停車費可以折抵嗎？", Counted(10))
    assert rarity.coverage("消費滿 1,500 元可折抵一小時停車費。") == 1.0
    assert rarity.coverage("營業時間") == 0.0


@pytest.mark.parametrize("question", ["", "？！", "🙂", "\x00"])
def test_a_question_without_words_covers_nothing(question):
    assert Rarity.of(question, Counted(10)).coverage("any text") == 0.0


def test_an_empty_index_covers_nothing():
    assert Rarity.of("price", Counted(0)).coverage("the price") == 0.0


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("When?", {"latin"}),
        ("停車費", {"han"}),
        ("Tarsel 64 保固", {"latin", "han"}),
        ("", {"latin"}),
        ("123 !", {"latin"}),
        ("豈", {"han"}),  # a compatibility ideograph
    ],
)
def test_scripts_of_a_question(text, found):
    assert scripts(text) == found


@pytest.mark.parametrize(
    ("cosine", "coverage", "passed"),
    [
        (0.4, 0.3, True),  # near in meaning, and some of the words
        (0.4, 0.2, False),  # near in meaning alone
        (0.56, 0.0, True),  # very near
        (0.16, 0.6, True),  # the words, and some nearness
        (0.15, 0.6, False),  # the words alone, however many
        (0.0, 1.0, False),
        (0.3, 0.4, True),  # neither quite, but both nearly
        (-0.2, 0.6, False),
        (None, 0.6, True),  # the embedding model does not read the script
        (None, 0.59, False),
    ],
)
def test_the_threshold_adds_nearness_of_meaning_and_words(cosine, coverage, passed):
    assert Threshold(0.4, 0.6).passed(Scored(passage("p"), cosine, coverage), "when?") is passed


def test_chinese_questions_need_less_coverage_unless_it_is_set():
    scored = Scored(passage("p"), None, 0.4)
    assert Threshold(0.4).passed(scored, "停車費可以折抵嗎")
    assert not Threshold(0.4).passed(scored, "Parking?")
    assert not Threshold(0.4, 0.5).passed(scored, "停車費可以折抵嗎")


def test_a_threshold_of_zero_lets_every_cosine_pass():
    assert Threshold(0.0, 0.6).passed(Scored(passage("p"), 0.0, 0.0), "when?")


def test_a_score_is_the_better_measure():
    assert Scored(passage("p"), 0.2, 0.71234).score == 0.712
    assert Scored(passage("p"), 0.9, 0.1).score == 0.9
    assert Scored(passage("p"), None, 0.1).score == 0.1
    assert Scored(passage("p"), -0.2, 0.0).score == 0.0


class Emptied(Counted):
    """An index whose passages went between the search and the fetch."""

    def lexical(self, text, k):
        return [("gone", 3.0), ("also gone", 2.0)]

    def dense(self, vector, k):
        return [("gone", 0.9)]

    def passages(self, ids):
        assert ids
        return []


class AnyEmbedder:
    class model:  # noqa: N801 - stands for an attribute
        scripts = frozenset({"latin"})

    def embed_queries(self, texts):
        return [None for _ in texts]


def test_an_index_emptied_between_search_and_fetch_has_nothing():
    found = retrieve("price", Emptied(0), AnyEmbedder(), top_k=3, threshold=Threshold(0.3))
    assert found.passages == []
    assert found.found is False
