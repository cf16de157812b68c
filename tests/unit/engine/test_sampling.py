import math
from collections import Counter

import mlx.core as mx
import numpy as np
import pytest
from scipy import stats

from dflash_engine.sampling import Distribution, Draft, Sampler, Sampling, first_choices

DRAWS = 20_000
RARE = 1e-4  # the seeds are fixed: right code passes always, not 9,999 times in 10,000


def shares(logits: list[float], **options: object) -> list[float]:
    """The probability of each token, rounded to 4 places."""
    own = Sampling(**({"temperature": 1.0} | options)).distribution(  # type: ignore[arg-type]
        np.array(logits, np.float64)
    )
    return own.of(np.arange(len(logits))).round(4).tolist()  # type: ignore[no-any-return]


def even(*tokens: int) -> Distribution:
    return Distribution(np.array(tokens), np.full(len(tokens), 1 / len(tokens)))


def drawn_as_told(counts: Counter[int], expected: list[float]) -> bool:
    seen = [counts[token] for token in range(len(expected))]
    assert all(p > 0 or not n for n, p in zip(seen, expected, strict=True)), "one that was cut"
    likely = [(n, p * sum(seen)) for n, p in zip(seen, expected, strict=True) if p > 0]
    return bool(stats.chisquare(*zip(*likely, strict=True), sum_check=False).pvalue > RARE)


# ---- greedy


def test_greedy_keeps_what_the_target_would_have_chosen() -> None:
    logits = mx.array(np.eye(5, dtype=np.float32)[[1, 2, 3, 4]])
    sampler = Sampler(Sampling())
    assert sampler.verify(Draft([1, 2, 3]), logits) == (3, 4)
    assert sampler.verify(Draft([1, 0, 3]), logits) == (1, 2)
    assert sampler.verify(Draft([0, 2, 3]), logits) == (0, 1)
    assert sampler.verify(Draft(), logits[:1]) == (0, 1)


def test_greedy_ties_go_to_the_first_token() -> None:
    assert Sampler(Sampling()).choose(mx.array([0.0, 2.0, 2.0])) == 1
    assert Sampler(Sampling(logit_bias={0: 0.0})).choose(mx.array([0.0, 2.0, 2.0])) == 1
    assert first_choices(mx.array([[1.0, 1.0], [0.0, 1.0]])).tolist() == [0, 1]


def test_a_draft_that_says_how_it_was_drawn_is_judged_by_its_tokens_when_greedy() -> None:
    logits = mx.array([[0.0, 9.0, 1.0], [0.0, 1.0, 9.0]])
    draft = Draft([1], [Distribution(np.array([1, 2]), np.array([1e-9, 1 - 1e-9]))])
    assert Sampler(Sampling()).verify(draft, logits) == (1, 2)


# ---- what is drawn from


def test_min_p_then_top_k_then_top_p_cut_the_tail() -> None:
    logits = np.log([0.4, 0.3, 0.2, 0.1]).tolist()
    assert shares(logits) == [0.4, 0.3, 0.2, 0.1]
    assert shares(logits, top_k=2) == [0.5714, 0.4286, 0, 0]
    assert shares(logits, top_k=9) == shares(logits)
    assert shares(logits, top_p=0.35) == [1, 0, 0, 0]
    assert shares(logits, top_p=0.45) == [0.5714, 0.4286, 0, 0], "the token that crosses it stays"
    assert shares(logits, top_p=1e-9) == [1, 0, 0, 0]
    assert shares(logits, top_k=3, top_p=0.7) == [0.5714, 0.4286, 0, 0], "of what top_k left"
    assert shares(logits, min_p=0.5) == [0.4444, 0.3333, 0.2222, 0], "half of the likeliest's"
    assert shares(logits, min_p=1.0) == [1, 0, 0, 0]
    assert shares(logits, min_p=0.3, top_p=0.75) == [0.5714, 0.4286, 0, 0], "of what min_p left"


def test_the_likeliest_may_be_anywhere() -> None:
    assert shares(np.log([0.1, 0.4, 0.2, 0.3]).tolist(), top_p=0.6) == [0, 0.5714, 0, 0.4286]


def test_equal_tokens_at_the_edge_of_top_p_are_taken_in_order() -> None:
    assert shares([0.0, 0.0, 0.0, 0.0], top_p=0.5) == [0.5, 0.5, 0, 0]


@pytest.mark.parametrize("spread", [0.01, 1.0, 6.0])
def test_top_p_of_a_large_vocabulary_is_that_of_sorting_all_of_it(spread: float) -> None:
    logits = np.random.default_rng(2).normal(size=5000, scale=spread)
    weights = np.exp(logits - logits.max())
    weights /= weights.sum()
    for top_p in (0.2, 0.9, 0.999):
        order = np.argsort(-weights, kind="stable")
        count = int(np.searchsorted(np.cumsum(weights[order]), top_p)) + 1
        own = Sampling(1.0, top_p=top_p).distribution(logits)
        assert own.tokens.tolist() == sorted(order[:count].tolist())
        assert own.probabilities.sum() == pytest.approx(1)


def test_temperature_divides_the_logits() -> None:
    expected = np.exp([0, 2, 4]) / np.exp([0, 2, 4]).sum()
    assert shares([0.0, 1.0, 2.0], temperature=0.5) == expected.round(4).tolist()


def test_min_p_counts_after_the_temperature() -> None:
    assert shares([2.0, 0.0], min_p=0.2) == [1, 0], "e^-2 is less"
    assert shares([2.0, 0.0], min_p=0.2, temperature=2.0) == [0.7311, 0.2689], "e^-1 is more"


def test_the_smallest_temperature_is_the_first_choice() -> None:
    assert shares([-3e4, 2.5e4, 3e4], temperature=1e-300) == [0, 0, 1]


def test_half_precision_logits_are_sampled_in_full() -> None:
    sampler = Sampler(Sampling(1.0), 0)
    counts = Counter(sampler.choose(mx.array([1.0, 2.0], dtype=mx.bfloat16)) for _ in range(DRAWS))
    assert drawn_as_told(counts, [1 / (1 + math.e), math.e / (1 + math.e)])


def test_a_distribution_knows_what_it_does_not_name() -> None:
    own = Distribution(np.array([2, 5]), np.array([0.25, 0.75]))
    assert own.of(np.array([0, 2, 3, 5, 9])).tolist() == [0, 0.25, 0, 0.75, 0]


def test_what_is_left_of_a_distribution_without_another() -> None:
    p = Distribution(np.array([1, 2, 3]), np.array([0.5, 0.3, 0.2]))
    rest = p.without(Distribution(np.array([0, 1, 2]), np.array([0.5, 0.4, 0.1])))
    assert rest.of(np.arange(4)).round(4).tolist() == [0, 0.2, 0.4, 0.4]
    assert p.without(p) is p, "nothing but rounding is left"


# ---- penalties and bias, by hand


def greedy_choices(rows: list[list[float]], prompt: tuple[int, ...] = (), **options: object) -> str:
    """The choices of one request whose positions have these logits, one at a time, as digits."""
    sampler = Sampler(Sampling(**options), prompt=prompt)  # type: ignore[arg-type]
    return "".join(str(sampler.choose(mx.array(row))) for row in rows)


def test_a_bias_is_added_to_its_token() -> None:
    assert greedy_choices([[1.0, 2.0, 0.0]], logit_bias={2: 2.1}) == "2"
    assert greedy_choices([[1.0, 2.0, 0.0]], logit_bias={2: 1.9}) == "1"
    assert greedy_choices([[1.0, 2.0, 0.0]], logit_bias={1: -1.1}) == "0"
    assert greedy_choices([[1.0, 2.0, 0.0]] * 2, logit_bias={1: -100, 0: -100}) == "22"


def test_a_repetition_penalty_divides_what_is_positive_and_multiplies_what_is_not() -> None:
    # In the prompt: 3 / 1.5 = 2 < 2.1, and -1 * 1.5 = -1.5 < -1.4.
    assert greedy_choices([[3.0, 2.1]], (0,), repetition_penalty=1.5) == "1"
    assert greedy_choices([[3.0, 1.9]], (0,), repetition_penalty=1.5) == "0"
    assert greedy_choices([[-1.0, -1.4]], (0,), repetition_penalty=1.5) == "1"
    assert greedy_choices([[-1.0, -1.6]], (0,), repetition_penalty=1.5) == "0"
    # In the answer; and however often, it counts once.
    assert greedy_choices([[3.0, 2.1]] * 3, repetition_penalty=1.5) == "010"
    assert greedy_choices([[3.0, 1.9, 1.0]] * 3, (0, 0, 1), repetition_penalty=1.5) == "000"
    # Below 1 it is a reward.
    assert greedy_choices([[3.0, 2.0]], (1,), repetition_penalty=0.5) == "1"


def test_a_presence_penalty_is_taken_off_once_and_for_the_answer_alone() -> None:
    assert greedy_choices([[3.0, 2.5, 0.0]] * 4, (0, 1), presence_penalty=1.0) == "0100"
    assert greedy_choices([[3.0, 2.5, 2.2]] * 4, presence_penalty=1.0) == "0120"
    assert greedy_choices([[3.0, 2.9]] * 3, presence_penalty=-1.0) == "000"


def test_a_frequency_penalty_is_taken_off_each_time() -> None:
    # 3.0, 2.4, 1.8 against 2.0: the third time it is less.
    assert greedy_choices([[3.0, 2.0]] * 4, (0,), frequency_penalty=0.6) == "0010"


def test_penalties_add_up_after_bias_and_repetition() -> None:
    # Token 0: (2 + 2) / 2 - 0.5 - 0.25 = 1.25 after one time; 1.0 after two.
    options = {
        "logit_bias": {0: 2.0},
        "repetition_penalty": 2.0,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
    }
    assert greedy_choices([[2.0, 1.3]] * 2, **options) == "01"
    assert greedy_choices([[2.0, 1.2]] * 2, **options) == "00"
    # The third time token 0 has 1.0; what has 1.1 and was never seen is ahead.
    assert greedy_choices([[2.0, 1.1]] * 3, **options) == "001"


def test_penalties_reach_into_a_draft_row_by_row() -> None:
    rows = mx.array([[3.0, 2.0]] * 4)
    for drafted in ([], [0], [0, 0], [0, 0, 1], [0, 1], [1]):
        sampler = Sampler(Sampling(frequency_penalty=0.6))
        answer: list[int] = []
        while len(answer) < 4:
            own = drafted[len(answer) :]
            kept, following = sampler.verify(Draft(own), rows[: len(own) + 1])
            assert following is not None
            answer += [*own[:kept], following]
        assert answer == [0, 0, 1, 0]


def test_refused_drafts_are_not_counted() -> None:
    sampler = Sampler(Sampling(presence_penalty=1.0))
    # 1 is refused, 0 comes in its place; the second draft token is never looked at.
    assert sampler.verify(Draft([1, 1]), mx.array([[3.0, 2.5]] * 3)) == (0, 0)
    assert sampler.choose(mx.array([2.0, 2.4])) == 1, "1 was not written: nothing is taken off"
    assert sampler.choose(mx.array([2.4, 2.3])) == 0, "both were"


def test_requests_do_not_share_their_counts() -> None:
    for _ in range(2):
        assert greedy_choices([[3.0, 2.5]] * 2, presence_penalty=1.0) == "01"


# ---- draws

LOGITS = [1.2, 0.4, -0.3, 0.9, -1.1]
SAMPLINGS: dict[str, dict[str, object]] = {
    "temperature": {"temperature": 0.7},
    "top-p": {"top_p": 0.8},
    "top-k": {"top_k": 3},
    "min-p": {"min_p": 0.3},
    "bias": {"logit_bias": {4: 2.5, 0: -1.0}},
    "repetition": {"repetition_penalty": 1.8},
    "presence": {"presence_penalty": 1.4},
    "frequency": {"frequency_penalty": 0.6},
    "all": {
        "temperature": 1.6,
        "top_p": 0.95,
        "top_k": 4,
        "min_p": 0.05,
        "logit_bias": {4: 2.5},
        "repetition_penalty": 1.3,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
    },
}
# The probabilities of LOGITS after the prompt [0, 2] and the answer [3, 3], worked out apart from
# the code: exp(score / temperature), over the sum of those kept.
SCORES = {
    "bias": [0.2, 0.4, -0.3, 0.9, 1.4],
    "repetition": [1.2 / 1.8, 0.4, -0.3 * 1.8, 0.9 / 1.8, -1.1],
    "presence": [1.2, 0.4, -0.3, 0.9 - 1.4, -1.1],
    "frequency": [1.2, 0.4, -0.3, 0.9 - 2 * 0.6, -1.1],
    "all": [1.2 / 1.3, 0.4, -0.3 * 1.3, 0.9 / 1.3 - 0.3 - 0.4, -1.1 + 2.5],
}
KEPT = {
    "top-p": [0, 1, 3],  # 0.401, 0.297, 0.180: the third crosses 0.8
    "top-k": [0, 1, 3],
    "min-p": [0, 1, 3],  # 0.3 of the likeliest: those within 1.204
    "all": [0, 1, 3, 4],  # top_k takes off 2; the rest reach 0.95 with the last
}
PROMPT, ANSWER = (0, 2), (3, 3)


def expected_of(name: str) -> list[float]:
    temperature = float(SAMPLINGS[name].get("temperature", 1.0))  # type: ignore[arg-type]
    scores = SCORES.get(name, LOGITS)
    weights = [
        math.exp(score / temperature) if token in KEPT.get(name, range(5)) else 0.0
        for token, score in enumerate(scores)
    ]
    return [weight / sum(weights) for weight in weights]


@pytest.mark.parametrize("name", SAMPLINGS)
def test_tokens_are_drawn_as_told(name: str) -> None:
    sampling = Sampling(**({"temperature": 1.0} | SAMPLINGS[name]))  # type: ignore[arg-type]
    forced = [[1e4 if token == other else -1e4 for other in range(5)] for token in ANSWER]
    rows = mx.array([*forced, LOGITS])
    sampler = Sampler(sampling, 5)
    counts: Counter[int] = Counter()
    for seed in range(DRAWS):
        if sampling.penalises:
            # The answer before is drafted, and sure to be kept.
            kept, following = Sampler(sampling, seed, PROMPT).verify(Draft(list(ANSWER)), rows)
            assert kept == len(ANSWER)
            counts[following or 0] += 1
        else:
            counts[sampler.choose(rows[-1])] += 1
    assert drawn_as_told(counts, expected_of(name))


QS = {
    "dense": Distribution(np.arange(5), np.array([0.1, 0.3, 0.1, 0.3, 0.2])),
    "sparse": Distribution(np.array([1, 4]), np.array([0.7, 0.3])),
    "certain": None,
}


@pytest.mark.parametrize("q", QS)
def test_tokens_are_drawn_as_told_whatever_was_drafted(q: str) -> None:
    sampler = Sampler(Sampling(1.6, top_k=4, logit_bias={4: 2.5, 3: -100}), 7)
    scores = [1.2, 0.4, -0.3, -99.1, 1.4]
    expected = [math.exp(score / 1.6) if score > -1 else 0.0 for score in scores]
    own, random, rows = QS[q], np.random.default_rng(3), mx.array([LOGITS, LOGITS])
    counts: Counter[int] = Counter()
    kept = 0
    for _ in range(DRAWS):
        token = own.draw(random) if own else 1
        accepted, following = sampler.verify(Draft([token], [own] if own else None), rows)
        kept += accepted
        counts[token if accepted else following or 0] += 1
    assert drawn_as_told(counts, [share / sum(expected) for share in expected])
    assert 0.1 < kept / DRAWS < 0.9, "some are kept, some refused"


def test_the_measure_sees_a_wrong_rule() -> None:
    # Keeping every drafted token gives the draft's distribution: the test above must notice.
    random = np.random.default_rng(3)
    counts = Counter(QS["dense"].draw(random) for _ in range(DRAWS // 20))  # type: ignore[union-attr]
    assert not drawn_as_told(counts, expected_of("temperature"))


def test_the_token_after_a_whole_draft_is_drawn_from_the_last_row() -> None:
    sampling = Sampling(1.0)
    rows = mx.array([[0.0, 9e3, 0.0], [math.log(0.5), math.log(0.2), math.log(0.3)]])
    sampler = Sampler(sampling, 2)
    counts: Counter[int] = Counter()
    for _ in range(DRAWS):
        kept, following = sampler.verify(Draft([1], [even(0, 1)]), rows)
        assert kept == 1
        assert following is not None
        counts[following] += 1
    assert drawn_as_told(counts, [0.5, 0.2, 0.3])


def test_a_draft_equal_to_the_target_but_for_rounding_gives_a_token() -> None:
    logits = mx.array([[0.0, 0.0], [0.0, 0.0]])
    sampler = Sampler(Sampling(1.0), seed=0)
    more = Distribution(np.array([0, 1]), np.array([0.75, 0.75]))
    for _ in range(50):
        # Draws that refuse although max(p - q, 0) is 0 everywhere.
        _, token = sampler.verify(Draft([0], [more]), logits)
        assert token in (0, 1)


def test_a_drafted_token_that_the_target_cuts_is_never_kept() -> None:
    rows = mx.array([[5.0, 4.0, 1.0]] * 2)
    sampler = Sampler(Sampling(1.0, top_k=2), 3)
    for draft in (Draft([2]), Draft([2], [even(0, 1, 2)]), Draft([2], [even(2)])):
        for _ in range(100):
            kept, following = sampler.verify(draft, rows)
            assert kept == 0
            assert following in (0, 1)


def test_a_seed_repeats_and_another_differs() -> None:
    logits = mx.zeros((64,))

    def draws(seed: int) -> list[int]:
        sampler = Sampler(Sampling(1.0), seed)
        return [sampler.choose(logits) for _ in range(20)]

    assert draws(3) == draws(3)
    assert draws(3) != draws(4)


def test_tokens_without_probability_are_never_drawn() -> None:
    own = Distribution(np.arange(5), np.array([0.0, 0.5, 0.0, 0.5, 0.0]))
    random = np.random.default_rng(0)
    assert {own.draw(random) for _ in range(300)} == {1, 3}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 11}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"top_p": float("nan")}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"min_p": -0.1}, "min_p"),
        ({"min_p": 1.1}, "min_p"),
        ({"min_p": float("nan")}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty"),
        ({"repetition_penalty": float("nan")}, "repetition_penalty"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"presence_penalty": float("nan")}, "presence_penalty"),
        ({"frequency_penalty": -2.1}, "frequency_penalty"),
        ({"logit_bias": {3: 101}}, "logit_bias"),
        ({"logit_bias": {"3": 1.0}}, "token id"),
        ({"logit_bias": {3: float("nan")}}, "logit_bias"),
    ],
)
def test_values_out_of_range_are_refused(options: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Sampling(**options)  # type: ignore[arg-type]
