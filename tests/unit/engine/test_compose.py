from dataclasses import dataclass, field
from functools import partial

import mlx.core as mx
import numpy as np

from dflash_engine.drafters.compose import Compose
from dflash_engine.drafters.protocol import Guess
from dflash_engine.sampling import Distribution, Draft, Sampling
from dflash_engine.width import Costs

# No time passes: costs stay as they are given.
Timeless = partial(Compose, clock=lambda: 0.0)
CHEAP = Costs(rows=((1, 1.0), (32, 1.3)), drafts=((1, 0.2), (8, 0.2)))
DEAR = Costs(rows=((1, 1.0), (2, 2.5), (32, 40.0)), drafts=((1, 1.0), (8, 1.0)))


@dataclass
class Copies:
    """Guesses what it is told to."""

    name: str
    guesses: list[Guess | None] = field(default_factory=list)

    def begin(self, sampling: Sampling, seed: int | None) -> "Copies":
        return self

    def guess(self, tokens: list[int], most: int) -> Guess | None:
        found = self.guesses[0] if self.guesses else None
        return found and Guess(found.tokens[:most], found.chances[:most], found.match)


@dataclass
class Model:
    """Proposes 100, 101, ... and notes what stood behind the anchor."""

    name: str = "model"
    taps: tuple[int, ...] = (1,)
    most: int = 8
    drawn: bool = False
    given: list[int] = field(default_factory=list)
    observed: int = 0

    def begin(self, sampling: Sampling, seed: int | None) -> "Model":
        return self

    def observe(self, features: mx.array) -> None:
        self.observed += features.shape[1]

    def propose(self, tokens: list[int], most: int, given: int = 0) -> Draft:
        self.given.append(given)
        drafted = [100 + i for i in range(most)]
        spread = [Distribution(np.array([t, t + 50]), np.array([0.5, 0.5])) for t in drafted]
        return Draft(drafted, spread if self.drawn else None)

    def judge(self, kept: int, tried: int) -> None:
        raise AssertionError("it is judged by what composes")

    def snapshot(self) -> str:
        return "context"

    def restore(self, snapshot: str) -> None:
        self.observed = 9

    @property
    def state(self) -> list[mx.array]:
        return [mx.zeros(1)]


def begin(composed: Compose):
    return composed.begin(Sampling(), None)


def test_a_width_that_was_measured_too_cheap_is_found_out() -> None:
    # Two rows were measured to cost what one costs; they cost half as much again.
    now = [0.0]
    composed = Compose(
        [Copies("a", [Guess([1], [0.2], 3)])],
        None,
        Costs(rows=((1, 1.0), (2, 1.0))),
        clock=lambda: now[0],
    )
    proposer = begin(composed)
    drafted = 0
    for _ in range(300):
        width = len(proposer.propose([5], 9).tokens)
        drafted += width
        now[0] += 1.0 + 0.5 * width
        proposer.judge(0, width)
    assert drafted < 60


SURE = Guess([1, 2, 3, 4], [0.95] * 4, 5)
DOUBTFUL = Guess([7, 8], [0.05] * 2, 1)


def test_what_is_likely_is_drafted_and_what_is_not_is_left() -> None:
    assert begin(Timeless([Copies("a", [SURE])], None, CHEAP)).propose([5], 9).tokens == [
        1,
        2,
        3,
        4,
    ]
    assert begin(Timeless([Copies("a", [SURE])], None, CHEAP)).propose([5], 2).tokens == [1, 2]
    assert begin(Timeless([Copies("a", [DOUBTFUL])], None, DEAR)).propose([5], 9).tokens == []
    assert begin(Timeless([Copies("a", [SURE])], None, DEAR)).propose([5], 9).tokens == []
    assert begin(Timeless([Copies("a")], None, CHEAP)).propose([5], 9).tokens == []


def test_the_better_guess_is_taken_and_named() -> None:
    composed = Timeless([Copies("a", [DOUBTFUL]), Copies("b", [SURE])], None, CHEAP)
    draft = begin(composed).propose([5], 9)
    assert draft.tokens == SURE.tokens
    assert draft.origins == ("b",) * 4


def test_the_model_goes_on_behind_a_guess() -> None:
    model = Model()
    draft = begin(Timeless([Copies("a", [SURE])], model, CHEAP)).propose([5], 20)
    assert draft.tokens[:4] == SURE.tokens
    assert draft.tokens[4:6] == [100, 101]
    assert draft.origins[3:5] == ("a", "model")
    assert model.given == [4]
    assert len(draft.tokens) <= model.most


def test_certain_tokens_before_drawn_ones_are_drawn_with_certainty() -> None:
    draft = begin(Timeless([Copies("a", [SURE])], Model(drawn=True), CHEAP)).propose([5], 20)
    assert draft.distributions is not None
    assert len(draft.distributions) == len(draft.tokens)
    assert draft.distributions[0].of(np.array([1, 2])).tolist() == [1.0, 0.0]
    assert draft.distributions[4].of(np.array([100, 150])).tolist() == [0.5, 0.5]


def test_a_drafter_that_is_always_wrong_is_parked_and_tried_again() -> None:
    composed = Timeless([], Model(), CHEAP)
    proposer = begin(composed)
    widths = []
    for _ in range(500):
        draft = proposer.propose([5], 20)
        widths.append(len(draft.tokens))
        if draft.tokens:
            proposer.judge(0, len(draft.tokens))
    assert widths[0] > 0
    tries = [i for i, width in enumerate(widths) if width]
    assert len(tries) < 20, "mostly plain"
    assert tries[-1] > 100, "but tried now and then"
    again = begin(composed)  # what was learned is the drafter's, not the request's
    assert not any(again.propose([5], 20).tokens for _ in range(10))
    drafted = 0
    for _ in range(1500):  # when it is right again, that is found out
        draft = again.propose([5], 20)
        drafted += bool(draft.tokens)
        if draft.tokens:
            again.judge(len(draft.tokens), len(draft.tokens))
    assert drafted > 200


def test_a_miss_does_not_end_lookup() -> None:
    proposer = begin(Timeless([Copies("a", [SURE])], None, CHEAP))
    proposer.propose([5], 9)
    proposer.judge(0, 4)
    assert proposer.propose([5], 9).tokens


def test_a_fixed_width_is_kept() -> None:
    for width in (0, 1, 3):
        composed = Timeless([Copies("a", [SURE])], Model(), DEAR, width=width)
        assert begin(composed).propose([5], 9).tokens == SURE.tokens[:width]
        assert len(begin(Timeless([], Model(), DEAR, width=width)).propose([5], 9).tokens) == width


def test_the_models_context_is_passed_through() -> None:
    model = Model()
    proposer = begin(Timeless([], model, CHEAP))
    proposer.observe(mx.zeros((1, 3, 4)))
    assert model.observed == 3
    assert proposer.snapshot() == "context"
    proposer.restore("context")
    assert model.observed == 9
    assert len(proposer.state) == 1
    alone = begin(Timeless([Copies("a")], None, CHEAP))
    assert alone.snapshot() is None
    assert alone.state == []
