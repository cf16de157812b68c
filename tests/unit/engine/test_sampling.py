import itertools
from collections import Counter

import mlx.core as mx
import numpy as np
import pytest
import tiny

from dflash_engine.decode import decode
from dflash_engine.drafters.block import Block
from dflash_engine.sampling import Draft, Sampler, Sampling, first_choices
from dflash_engine.targets import load

VOCAB = 4


def chi_square(counts: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> float:
    """How many standard deviations the statistic lies above its mean."""
    total = sum(counts.values())
    assert set(counts) <= {outcome for outcome, p in expected.items() if p > 0}
    likely = {outcome: p * total for outcome, p in expected.items() if p > 0}
    statistic = sum((counts[outcome] - n) ** 2 / n for outcome, n in likely.items())
    freedom = len(likely) - 1
    return float((statistic - freedom) / np.sqrt(2 * freedom))


class Chain:
    """A model whose next token depends on the last one only."""

    def __init__(self, seed: int, like: "Chain | None" = None) -> None:
        self.logits = np.random.default_rng(seed).normal(size=(VOCAB, VOCAB), scale=1.2)
        if like is not None:
            self.logits = 0.5 * self.logits + 0.6 * like.logits

    def rows(self, tokens: list[int]) -> mx.array:
        return mx.array(self.logits[tokens].astype(np.float32))

    def joint(self, sampling: Sampling, length: int) -> dict[tuple[int, ...], float]:
        table = sampling.probabilities(self.rows(list(range(VOCAB))))
        return {
            outcome: float(np.prod([table[a, b] for a, b in itertools.pairwise((0, *outcome))]))
            for outcome in itertools.product(range(VOCAB), repeat=length)
        }


def speculate(target: Chain, draft: Chain, sampling: Sampling, certain: bool, n: int) -> float:
    """The distance of three tokens' joint distribution from the target's, and some are accepted."""
    verifier, drafter = Sampler(sampling, seed=1), Sampler(sampling, seed=2)
    counts: Counter[tuple[int, ...]] = Counter()
    accepted = 0
    for _ in range(n):
        tokens = [0]
        while len(tokens) < 4:
            drafted: list[int] = []
            rows = []
            for _ in range(4 - len(tokens) - 1):
                logits = draft.rows([(tokens + drafted)[-1]])
                if certain:
                    drafted.append(int(mx.argmax(logits[0])))
                else:
                    rows.append(sampling.probabilities(logits)[0])
                    drafted.append(drafter.draw(rows[-1]))
            proposal = Draft(drafted, np.array(rows) if rows else None)
            kept, following = verifier.verify(proposal, target.rows([tokens[-1], *drafted]))
            accepted += kept
            tokens += [*drafted[:kept], following]
        counts[tuple(tokens[1:])] += 1
    assert 0.1 < accepted / n < 1.9, "some drafts are kept, some refused"
    return chi_square(counts, target.joint(sampling, 3))


@pytest.mark.parametrize("certain", [False, True], ids=["drawn", "certain"])
@pytest.mark.parametrize(
    "sampling",
    [Sampling(1.0), Sampling(2.0, top_p=0.85), Sampling(1.5, top_k=3)],
    ids=["plain", "top-p", "top-k"],
)
def test_drafts_leave_the_joint_distribution_as_it_is(sampling: Sampling, certain: bool) -> None:
    assert abs(speculate(Chain(3), Chain(8, Chain(3)), sampling, certain, 2500)) < 4


def test_the_measure_sees_a_wrong_rule() -> None:
    # Keeping every drafted token gives the draft's distribution: the test above must notice.
    sampling = Sampling(1.0)
    sampler = Sampler(sampling, seed=1)
    counts: Counter[tuple[int, ...]] = Counter()
    for _ in range(2500):
        tokens = [0]
        for _ in range(3):
            tokens.append(sampler.choose(Chain(8).rows([tokens[-1]])[0]))
        counts[tuple(tokens[1:])] += 1
    assert chi_square(counts, Chain(3).joint(sampling, 3)) > 20


def test_a_draft_model_leaves_a_targets_distribution_as_it_is() -> None:
    # Hot, so that the random draft and the target overlap and a good part is kept.
    target = load(tiny.llama(), "llama")
    block = Block(tiny.draft(), target)
    prompt = target.tokenizer.encode("!")
    sampling = Sampling(8.0, top_k=12)

    def buckets(drafter: Block | None, seeds: range) -> tuple[Counter[tuple[int, ...]], int]:
        counts: Counter[tuple[int, ...]] = Counter()
        rounds = 0
        for seed in seeds:
            steps = list(
                decode(
                    target,
                    drafter,
                    prompt,
                    max_tokens=3,
                    sampler=Sampler(sampling, seed),
                    seed=seed,
                )
            )
            tokens = [token for step in steps for token in step.tokens]
            rounds += len(steps)
            counts[tuple(token % 2 for token in tokens)] += 1
        return counts, rounds

    n = 150
    plain, plain_rounds = buckets(None, range(n))
    drafted, drafted_rounds = buckets(block, range(5000, 5000 + n))
    assert drafted_rounds < plain_rounds, "some drafts are kept"
    both = plain + drafted
    statistic = sum((plain[key] - drafted[key]) ** 2 / both[key] for key in both)
    freedom = len(both) - 1
    assert statistic < freedom + 4 * np.sqrt(2 * freedom)


def test_greedy_keeps_what_the_target_would_have_chosen() -> None:
    logits = mx.array(np.eye(5, dtype=np.float32)[[1, 2, 3, 4]])
    sampler = Sampler(Sampling())
    assert sampler.verify(Draft([1, 2, 3]), logits) == (3, 4)
    assert sampler.verify(Draft([1, 0, 3]), logits) == (1, 2)
    assert sampler.verify(Draft([0, 2, 3]), logits) == (0, 1)
    assert sampler.verify(Draft(), logits[:1]) == (0, 1)


def test_greedy_ties_go_to_the_first_token() -> None:
    assert Sampler(Sampling()).choose(mx.array([0.0, 2.0, 2.0])) == 1
    assert first_choices(mx.array([[1.0, 1.0], [0.0, 1.0]])).tolist() == [0, 1]


def test_top_k_then_top_p_cut_the_tail() -> None:
    logits = mx.log(mx.array([[0.4, 0.3, 0.2, 0.1]]))

    def shares(**options: float) -> list[float]:
        return Sampling(1.0, **options).probabilities(logits)[0].round(4).tolist()  # type: ignore[arg-type]

    assert shares() == [0.4, 0.3, 0.2, 0.1]
    assert shares(top_k=2) == [0.5714, 0.4286, 0, 0]
    assert shares(top_k=9) == shares()
    assert shares(top_p=0.35) == [1, 0, 0, 0]
    assert shares(top_p=0.45) == [0.5714, 0.4286, 0, 0], "the token that crosses it stays"
    assert shares(top_p=1e-9) == [1, 0, 0, 0]
    assert shares(top_k=3, top_p=0.7) == [0.5714, 0.4286, 0, 0], "top_p of what top_k left"


def test_temperature_divides_the_logits() -> None:
    logits = mx.array([[0.0, 1.0, 2.0]])
    expected = np.exp([0, 2, 4]) / np.exp([0, 2, 4]).sum()
    assert np.allclose(Sampling(0.5).probabilities(logits)[0], expected)


def test_the_smallest_temperature_is_the_first_choice() -> None:
    logits = mx.array([[-3e4, 2.5e4, 3e4]])
    assert Sampling(1e-300).probabilities(logits).tolist() == [[0, 0, 1]]


def test_half_precision_logits_are_sampled_in_full() -> None:
    logits = mx.array([[1.0, 2.0]], dtype=mx.bfloat16)
    assert np.allclose(Sampling(1.0).probabilities(logits).sum(), 1, atol=1e-12)


def test_a_draft_equal_to_the_target_but_for_rounding_gives_a_token() -> None:
    sampling = Sampling(1.0)
    logits = mx.array([[0.0, 0.0], [0.0, 0.0]])
    p = sampling.probabilities(logits)
    sampler = Sampler(sampling, seed=0)
    for _ in range(50):
        # Draws that refuse although max(p - q, 0) is 0 everywhere.
        _, token = sampler.verify(Draft([0], p[:1] * 1.5), logits)
        assert token in (0, 1)


def test_a_seed_repeats_and_another_differs() -> None:
    logits = mx.zeros((64,))

    def draws(seed: int) -> list[int]:
        sampler = Sampler(Sampling(1.0), seed)
        return [sampler.choose(logits) for _ in range(20)]

    assert draws(3) == draws(3)
    assert draws(3) != draws(4)


def test_tokens_without_probability_are_never_drawn() -> None:
    sampler = Sampler(Sampling(1.0), 0)
    assert {sampler.draw(np.array([0.0, 0.5, 0.0, 0.5, 0.0])) for _ in range(300)} == {1, 3}


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
    ],
)
def test_values_out_of_range_are_refused(options: dict[str, float], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Sampling(**options)  # type: ignore[arg-type]
