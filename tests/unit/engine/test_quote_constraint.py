import functools
import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from dflash_engine import hub
from dflash_engine.constrain import forced, masked, permitted
from dflash_engine.quote import Quote, Sentence, joined, separator

LATIN = st.lists(
    st.sampled_from(
        ["The", "the", "It", "rains", "Mr.", "J.", "3.5%", "café", "“so”", "<end>", "x"]
    ),
    min_size=1,
    max_size=6,
).map(" ".join)
CHINESE = st.text("电池需要充满，的了。「」《》！？３…好的", min_size=1, max_size=12)
SENTENCE = st.one_of(
    st.builds(str.__add__, LATIN, st.sampled_from([".", "?", '."', "", "\n", "…"])),
    st.builds(str.__add__, CHINESE, st.sampled_from(["。", "！", "。”", "", " "])),
    st.text(max_size=8),  # anything that Unicode has
)
PASSAGES = st.lists(st.lists(SENTENCE, max_size=5), min_size=1, max_size=4)
SENTENCES = st.builds(
    lambda passages, draw: [
        Sentence(text, f"{n}", draw.uniform(-9, 0))
        for n, passage in enumerate([["It rains."], *passages])
        for text in passage
    ],
    PASSAGES,
    st.randoms(use_true_random=False),
)
SEEDS = st.integers(0, 2**32)
many = settings(
    deadline=None,
    derandomize=True,
    max_examples=500,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@dataclass(frozen=True)
class Tokens:
    """A tokenizer's two ways, remembered, and what ends an answer."""

    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    stops: frozenset[int]
    special: tuple[str, ...]

    def quote(self, *sentences: Sentence | str, most: int = 3) -> Quote:
        return Quote(
            [Sentence(s, "a") if isinstance(s, str) else s for s in sentences],
            self.encode,
            self.decode,
            self.stops,
            most_sentences=most,
            special=self.special,
        )

    def write(self, quote: Quote, text: str) -> None:
        """Advance over ``text``, token by token as the tokenizer has it."""
        for token in self.encode(text):
            quote.advance(token)


@functools.cache
def tokens_of(name: str, folder: Path) -> Tokens:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    decode = functools.cache(lambda ids: tokenizer.decode(ids, skip_special_tokens=False))
    return Tokens(
        functools.cache(lambda text: tokenizer.encode(text, add_special_tokens=False).ids),
        lambda ids: decode(tuple(ids)),
        frozenset({tiny.END, tiny.TURN} if name == "tiny" else {0, 2}),
        tuple(token.content for token in tokenizer.get_added_tokens_decoder().values()),
    )


@pytest.fixture(scope="module")
def letters() -> Tokens:
    """A token a byte."""
    return tokens_of("tiny", tiny.llama())


@pytest.fixture(scope="module", params=["tiny", "smollm2"])
def tokens(request: pytest.FixtureRequest, models: Path) -> Tokens:
    name = request.param
    return tokens_of(name, tiny.llama() if name == "tiny" else hub.resolve("smollm2-135m", models))


def state_of(quote: Quote) -> tuple[Any, ...]:
    allowed, weights = quote.allowed(), quote.weights()
    return (
        None if allowed is None else allowed.tolist(),
        None if weights is None else weights.tolist(),
        quote.chosen,
    )


def finish(quote: Quote, draw: random.Random) -> tuple[list[int], float]:
    """Write any answer; its tokens, the stop token left out, and the sum of their weights."""
    written, weight = [], 0.0
    while (allowed := quote.allowed()) is not None:
        weights = quote.weights()
        assert weights is not None
        assert len(allowed) == len(weights) > 0
        assert weights.max() == 0
        assert (np.diff(allowed) > 0).all()
        place = draw.randrange(len(allowed))
        weight += weights[place]
        written.append(int(allowed[place]))
        quote.advance(written[-1])
    return written[:-1], weight


def greedy(quote: Quote, scores: np.ndarray) -> None:
    """Write the answer of a model that sees the same ``scores`` everywhere."""
    while quote.allowed() is not None:
        quote.advance(int(masked(scores, quote).argmax()))


# any answer


@many
@given(sentences=SENTENCES, seed=SEEDS, most=st.integers(1, 4))
def test_any_answer_is_whole_sentences_of_the_passages_each_with_its_sources(
    tokens: Tokens, sentences: list[Sentence], seed: int, most: int
) -> None:
    draw = random.Random(seed)
    quote = tokens.quote(*sentences, most=most)
    # SmolLM2 has no token for some rare bytes.
    texts = dict.fromkeys(sentence.text.strip() for sentence in sentences)
    lost = [text for text in texts if tokens.decode(tokens.encode(text)) != text]
    assert [sentence.text for sentence in quote.left_out] == lost
    for _ in range(3):
        written, _ = finish(quote, draw)
        assert tokens.stops.isdisjoint(written)
        chosen = quote.chosen
        rest = tokens.decode(written)
        assert rest == joined([sentence.text for sentence in chosen])
        for sentence in chosen:
            assert rest.startswith(sentence.text)
            rest = rest[len(sentence.text) :].removeprefix(" ")
            found = [s.source for s in sentences if s.text.strip() == sentence.text]
            assert [sentence.source, *sentence.also] == list(dict.fromkeys(found))
        assert rest == ""
        assert 1 <= len({sentence.text for sentence in chosen}) == len(chosen) <= most
        quote.back(len(written) + 1)
        assert quote.chosen == []


@settings(many, max_examples=100)
@given(sentences=SENTENCES, seed=SEEDS)
def test_going_back_is_as_not_having_gone(
    tokens: Tokens, sentences: list[Sentence], seed: int
) -> None:
    draw = random.Random(seed)
    quote, written = tokens.quote(*sentences), []
    for _ in range(6):
        count = draw.randint(0, len(written))
        quote.back(count)
        del written[len(written) - count :]
        for _ in range(draw.randint(0, 12)):
            allowed = quote.allowed()
            written.append(1 if allowed is None else int(draw.choice(allowed)))
            quote.advance(written[-1])
        again = tokens.quote(*sentences)
        for token in written:
            again.advance(token)
        assert state_of(again) == state_of(quote)
        before = state_of(quote)
        forced(quote, 9)
        permitted(quote, written)
        assert state_of(quote) == before


@many
@given(
    texts=st.lists(st.text("ab. 好。", min_size=1, max_size=4), min_size=1, max_size=4),
    most=st.integers(1, 3),
    seed=SEEDS,
)
@example(texts=["。" * n for n in range(1, 6)], most=4, seed=22)  # 82 orders of 14 sets
def test_what_may_follow_and_its_weight_are_those_of_all_answers_written_out(
    letters: Tokens, texts: list[str], most: int, seed: int
) -> None:
    draw = random.Random(seed)
    priors = {text.strip(): draw.choice([0.0, -1.0, -2.5]) for text in texts if text.strip()}
    if not priors:
        return
    best = max(priors.values())
    answers: dict[tuple[int, ...], float] = {}
    for count in range(1, most + 1):
        for some in itertools.permutations(priors, count):
            answer = tuple(letters.encode(joined(some)))
            worth = sum(priors[text] - best for text in some)
            answers[answer] = max(worth, answers.get(answer, -math.inf))
    quote = letters.quote(
        *(Sentence(text, "a", prior) for text, prior in priors.items()), most=most
    )
    written: tuple[int, ...] = ()
    while (allowed := quote.allowed()) is not None:
        begun = {a: worth for a, worth in answers.items() if a[: len(written)] == written}
        expected: dict[int, float] = {}
        for answer, worth in begun.items():
            for token in answer[len(written) : len(written) + 1]:
                expected[token] = max(worth, expected.get(token, -math.inf))
        if written in begun:
            stops = letters.stops if expected else {min(letters.stops)}
            expected |= dict.fromkeys(stops, begun[written])
        assert allowed.tolist() == sorted(expected)
        costs = [expected[token] - max(begun.values()) for token in sorted(expected)]
        assert quote.weights() == pytest.approx(costs)
        more = [token for token in expected if token not in letters.stops]
        written += (draw.choice(more if more and draw.random() < 0.9 else sorted(expected)),)
        quote.advance(written[-1])
    worth = sum(sentence.prior - best for sentence in quote.chosen)
    assert worth == pytest.approx(answers[written[:-1]])


# sentences and their sources


def test_one_sentence_is_forced_from_its_first_token_to_the_end(tokens: Tokens) -> None:
    quote = tokens.quote("It rains.")
    text = tokens.encode("It rains.")
    assert forced(quote, 99) == [*text, min(tokens.stops)]


def test_a_run_reaches_the_end_of_the_sentence_under_way(tokens: Tokens) -> None:
    quote = tokens.quote("It rains hard in May.", "It snows.", "The rest is told below.")
    tokens.write(quote, "It rains")
    rest = tokens.encode(" hard in May.")
    assert forced(quote, 99) == rest
    assert forced(quote, 2) == rest[:2]
    assert quote.chosen == []
    for token in rest:
        quote.advance(token)
    assert [s.text for s in quote.chosen] == ["It rains hard in May."]
    assert tokens.stops < set(quote.allowed())


def test_a_draft_is_cut_at_the_first_token_that_no_sentence_has(tokens: Tokens) -> None:
    quote = tokens.quote("It rains hard.", "It snows.")
    right = tokens.encode("It snows. It rains hard.")
    assert permitted(quote, [*right, min(tokens.stops)]) == len(right) + 1
    wrong = tokens.encode("It snows. It rains a lot.")
    assert permitted(quote, wrong) == len(tokens.encode("It snows. It rains")) + (
        tokens.encode(" hard.")[0] == tokens.encode(" a")[0]  # the space alone, of one a byte
    )
    assert permitted(quote, [max(tokens.stops)]) == 0


def test_equal_sentences_become_one_with_all_their_sources(letters: Tokens) -> None:
    quote = letters.quote(
        Sentence("It rains.", "a", -2.0),
        Sentence(" It rains.\n", "b", -1.0),
        Sentence("It rains.", "a", -3.0),
        Sentence("It rains.", "d", -4.0, also=("c", "b")),
    )
    finish(quote, random.Random(0))
    assert quote.chosen == [Sentence("It rains.", "a", -1.0, ("b", "d", "c"))]


def test_no_sentence_comes_twice_and_no_more_than_asked_for(letters: Tokens) -> None:
    quote = letters.quote("A.", "B.", "C.", most=2)
    letters.write(quote, "A. ")
    assert quote.allowed().tolist() == sorted(letters.encode("BC"))
    letters.write(quote, "C.")
    assert quote.allowed().tolist() == [min(letters.stops)]


def test_a_sentence_that_begins_another_may_end_or_go_on(tokens: Tokens) -> None:
    quote = tokens.quote("It rains.", "It rains. It pours.", "It pours.")
    tokens.write(quote, "It rains.")
    assert [s.text for s in quote.chosen] == ["It rains."]
    assert tokens.stops < set(quote.allowed())
    tokens.write(quote, " It")
    assert [s.text for s in quote.chosen] == ["It rains."]
    tokens.write(quote, " pours.")
    # Two sentences or one: the fewest.
    assert [s.text for s in quote.chosen] == ["It rains. It pours."]
    # And two more may follow it as one, or none but it as two.
    tokens.write(quote, " It rains.")
    assert [s.text for s in quote.chosen] == ["It rains. It pours.", "It rains."]


def test_the_likelier_of_two_readings_is_the_one_told(letters: Tokens) -> None:
    sentences = [Sentence("A.", "x"), Sentence("B.", "y"), Sentence("A. B.", "z", -1.0)]
    quote = letters.quote(*sentences)
    letters.write(quote, "A. B.")
    assert [s.source for s in quote.chosen] == ["x", "y"]


@pytest.mark.parametrize(
    ("texts", "text"),
    [
        (["It rains.", "It pours."], "It rains. It pours."),
        (["下雨了。", "天黑了！", "走。"], "下雨了。天黑了！走。"),
        (["他说：“好。”", "走吧……", "（完）", "End"], "他说：“好。”走吧……（完）End"),
        (["The end.", "下雨了。", "The end!"], "The end. 下雨了。The end!"),
        (["标题", "第二行", "３．"], "标题 第二行 ３．"),
        (["비가 온다.", "“So.”", "…"], "비가 온다. “So.” …"),
        (["中文!", "“日本語.”", "x"], "中文!“日本語.”x"),
        (["Nice 🎉", "ok"], "Nice 🎉 ok"),
        ([], ""),
    ],
)
def test_sentences_are_put_together_as_their_script_is_written(texts: list[str], text: str) -> None:
    assert joined(texts) == text
    assert all(separator(part) in ("", " ") for part in texts)


def test_blank_sentences_are_dropped(letters: Tokens) -> None:
    assert forced(letters.quote("", " \n", "\u3000", "A."), 99)[:-1] == letters.encode("A.")


# priors


@settings(many, max_examples=100)
@given(priors=st.lists(st.floats(-30, 30), min_size=1, max_size=12), seed=SEEDS)
def test_weights_add_up_to_what_the_sentences_lie_below_the_best(
    letters: Tokens, priors: list[float], seed: int
) -> None:
    sentences = [Sentence(f"The {n:b} end.", "a", prior) for n, prior in enumerate(priors)]
    quote = letters.quote(*sentences)
    _, weight = finish(quote, random.Random(seed))
    assert weight == pytest.approx(sum(s.prior - max(priors) for s in quote.chosen), abs=1e-9)


def test_a_model_without_a_view_takes_the_sentence_of_the_best_prior_alone(tokens: Tokens) -> None:
    poor = [Sentence(f"The {n} poor ones.", "a", -1.0) for n in range(50)]
    quote = tokens.quote(*poor, Sentence("Good.", "b"))
    scores = np.zeros(50_000)
    scores[list(tokens.stops)] = -0.5
    greedy(quote, scores)
    assert [s.text for s in quote.chosen] == ["Good."]


def test_a_sentence_as_good_follows_where_the_model_would_go_on(tokens: Tokens) -> None:
    quote = tokens.quote(
        Sentence("One.", "a"), Sentence("Two.", "b"), Sentence("Three.", "c", -1.0)
    )
    scores = np.zeros(50_000)
    scores[list(tokens.stops)] = -0.5
    greedy(quote, scores)
    assert sorted(s.text for s in quote.chosen) == ["One.", "Two."]


def test_priors_that_are_alike_leave_the_choice_to_the_model(letters: Tokens) -> None:
    quote = letters.quote(Sentence("A.", "a", -5.0), Sentence("B.", "b", -5.0))
    while quote.allowed() is not None:
        assert not quote.weights().any()
        quote.advance(int(quote.allowed()[-1]))


# tokenizers


def test_a_special_token_s_name_is_written_as_plain_text(tokens: Tokens) -> None:
    for name in tokens.special:
        for text in (name, f"Ends {name}{name} not.", f"好{name[:-1]}{name}。"):
            quote = tokens.quote(text, "Before.")
            tokens.write(quote, "Before.")
            while len(quote.chosen) < 2:
                token = int(next(t for t in quote.allowed() if t not in tokens.stops))
                assert name not in tokens.decode([token])
                quote.advance(token)
            assert [s.text for s in quote.chosen] == ["Before.", text]


def test_a_sentence_that_would_stop_the_answer_is_left_out(letters: Tokens) -> None:
    sentences = [Sentence("A <end> of it.", "a"), Sentence("B.", "b")]
    quote = Quote(sentences, letters.encode, letters.decode, letters.stops)
    assert quote.left_out == sentences[:1]
    assert forced(quote, 99)[:-1] == letters.encode("B.")
    with pytest.raises(ValueError, match=r"none of the 1 sentences .* 'A <end> of it.'"):
        Quote(sentences[:1], letters.encode, letters.decode, letters.stops)


def made(
    *,
    merges: Sequence[tuple[str, str]] = (),
    words: bool = False,
    before: bool = False,
    behind: bool = False,
) -> Tokens:
    """A tokenizer of a few letters; ``words``: with a space before each text, as SentencePiece
    has it; ``before`` and ``behind``: with a special token there.
    """
    alphabet = [*"Taenst. ▁。「」好我"]
    vocab = {piece: n for n, piece in enumerate([*alphabet, *map("".join, merges), "<s>", "</s>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=list(merges)))
    if words:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
        tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    else:
        tokenizer.decoder = decoders.Fuse()
    if before or behind:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=" ".join(["<s>"] * before + ["$A"] + ["</s>"] * behind),
            special_tokens=[(name, vocab[name]) for name in ("<s>", "</s>")],
        )
    return Tokens(
        lambda text: tokenizer.encode(text).ids,
        lambda ids: tokenizer.decode(ids, skip_special_tokens=False),
        frozenset({vocab["</s>"]}),
        (),
    )


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("words", [False, True])
@pytest.mark.parametrize(
    "merges", [[], [(".", " "), (". ", "T"), ("。", "「"), ("。", "好"), ("。", "T"), ("▁", "T")]]
)
def test_tokens_that_a_tokenizer_adds_or_joins_do_not_change_the_text(
    merges, words: bool, before: bool, behind: bool
) -> None:
    merges = [(a.replace(" ", "▁"), b.replace(" ", "▁")) for a, b in merges] if words else merges
    tokens = made(merges=merges, words=words, before=before, behind=behind)
    texts = ["Ta. seas.", "Tan.", "好我。", "「好」。", "sat.", "。。"]
    quote = tokens.quote(*texts)
    assert quote.left_out == []
    seen = set()
    for seed in range(60):
        written, _ = finish(quote, random.Random(seed))
        chosen = [sentence.text for sentence in quote.chosen]
        assert tokens.decode(written) == joined(chosen)
        seen.update(itertools.pairwise(chosen))
        quote.back(len(written) + 1)
    assert {second for _, second in seen} == set(texts)  # each can follow
    assert ("好我。", "「好」。") in seen


def test_a_sentence_that_always_shares_a_token_with_the_one_before_comes_first_or_not() -> None:
    tokens = made(merges=[(".", " "), ("。", " ")])
    quote = tokens.quote("Ta.", "Tan.", "好。")
    seen = set()
    for seed in range(30):
        written, _ = finish(quote, random.Random(seed))
        seen.add(tuple(sentence.text for sentence in quote.chosen))
        assert tokens.decode(written) == joined([sentence.text for sentence in quote.chosen])
        quote.back(len(written) + 1)
    # Nothing comes between "好。" and the next, so that one may.
    assert {("Ta.",), ("Tan.",), ("好。", "Ta."), ("好。", "Tan.")} <= seen
    assert all(len(texts) == 1 or texts[0] == "好。" for texts in seen)


def test_what_a_tokenizer_cannot_give_back_is_left_out(letters: Tokens) -> None:
    quote = Quote(
        [Sentence("Fine.", "a"), Sentence("Ünfine.", "b")],
        lambda text: letters.encode(text.replace("Ü", "U")),
        letters.decode,
        letters.stops,
    )
    assert [s.text for s in quote.left_out] == ["Ünfine."]


# limits


def test_passages_made_to_be_read_in_many_ways_do_not_hold_up(letters: Tokens) -> None:
    texts = ["。" * n for n in range(1, 40)]
    quote = letters.quote(*texts, most=10)
    for _ in range(3 * 150):
        quote.advance(next(int(t) for t in quote.allowed() if t not in letters.stops))
    written, _ = finish(quote, random.Random(1))
    assert "".join(s.text for s in quote.chosen) == "。" * (150 + len(written) // 3)


def test_a_token_that_no_sentence_has_is_refused_and_changes_nothing(letters: Tokens) -> None:
    quote = letters.quote("A.")
    for token in (*letters.encode("."), min(letters.stops), -1, 1_000_000):
        with pytest.raises(ValueError, match=f"token {token} continues no sentence"):
            quote.advance(token)
    assert quote.allowed().tolist() == letters.encode("A")
    with pytest.raises(ValueError, match="take back 1 tokens: 0 were written"):
        quote.back(1)


@pytest.mark.parametrize(
    ("sentences", "options", "message"),
    [
        ([], {}, "no sentences to quote"),
        ([Sentence(" \n", "a")], {}, "no sentences to quote"),
        ([Sentence("A.", "a")], {"most_sentences": 0}, "most_sentences must be at least 1, not 0"),
        ([Sentence("A.", "a")], {"stop_tokens": ()}, "at least one stop token"),
        ([Sentence("A.", "a", -math.inf)], {}, "prior must be finite"),
        ([Sentence("A.", "a", math.nan)], {}, "prior must be finite"),
    ],
)
def test_what_cannot_be_quoted_is_refused(
    letters: Tokens, sentences: list[Sentence], options: dict[str, Any], message: str
) -> None:
    options = {"stop_tokens": letters.stops} | options
    with pytest.raises(ValueError, match=message):
        Quote(sentences, letters.encode, letters.decode, **options)
