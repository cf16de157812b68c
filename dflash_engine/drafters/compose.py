"""Drafters that work together: copies where there is something to copy, the draft model elsewhere.

Each round may verify a guess (what followed the same words before, in this text or in earlier
ones), what the draft model proposes, or a guess and behind it what the model makes of it. Taken is
what brings most tokens a second by :mod:`dflash_engine.width`, which may be nothing.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx

from ..sampling import Draft, Sampling
from ..width import Costs, Kept, Pace, best
from .protocol import Drafter, Guess, Proposer

LONGEST = 31  # tokens of a guess: as many rows as costs are measured for, less the anchor's
FIRST = 0.6  # what a draft model's tokens are expected to be kept, before any was
_LEAST = 0.02  # chance of a guess to be right as a whole, below which nothing is put behind it


class GuessProposer(Proposer, Protocol):
    """One request's guesses."""

    def guess(self, tokens: list[int], most: int) -> Guess | None:
        """What probably follows ``tokens``, at most ``most``; None where nothing is known."""
        ...


class Guesser(Protocol):
    """A drafter whose proposals cost no model."""

    @property
    def name(self) -> str:
        """What it is called in responses."""
        ...

    def begin(self, sampling: Sampling, seed: int | None) -> GuessProposer:
        """Start on a new request."""
        ...


@dataclass(frozen=True)
class _Plan:
    """A guess's first ``copied`` tokens, then ``modelled`` ones; expected ``rate`` in tokens a
    second.
    """

    rate: float
    origin: tuple[Any, ...] = ()
    guess: Guess | None = None
    copied: int = 0
    modelled: int = 0


class Compose:
    """``guessers`` and perhaps a ``model``, which proposes at most ``model.most`` tokens.

    ``width`` takes that many tokens each round, from the longest match or else the model, instead
    of what pays. ``clock`` tells the seconds that rounds take.
    """

    def __init__(
        self,
        guessers: Sequence[Guesser],
        model: Drafter | None,
        costs: Costs,
        *,
        name: str = "composed",
        width: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.guessers = tuple(guessers)
        self.model = model
        self.costs = costs
        self.name = name
        self.width = width
        self.clock = clock
        self.taps = model.taps if model else ()
        self.most = LONGEST
        self.kept = Kept()
        self.pace = Pace(costs)

    def begin(self, sampling: Sampling, seed: int | None) -> "ComposedProposer":
        """Start on a new request; what was kept in earlier ones is remembered."""
        return ComposedProposer(self, sampling, seed)


class ComposedProposer:
    """One request's proposers, and the plan of the round under way."""

    def __init__(self, drafter: Compose, sampling: Sampling, seed: int | None) -> None:
        self._drafter = drafter
        self._guessers = [(g.name, g.begin(sampling, seed)) for g in drafter.guessers]
        # With a seed the model's tokens are not drawn: how many come at a time depends on the
        # machine, and what is drawn would make the answer depend on it too.
        drawn = sampling if seed is None else Sampling()
        self._model = drafter.model.begin(drawn, seed) if drafter.model else None
        self._plan = _Plan(0.0)
        self._given, self._context, self._asked = 0, 0, 0.0

    def observe(self, features: mx.array) -> None:
        """For the draft model."""
        if self._model:
            self._model.observe(features)

    @property
    def state(self) -> list[mx.array]:
        """The draft model's."""
        return self._model.state if self._model else []

    def snapshot(self) -> Any:
        """The draft model's."""
        return self._model.snapshot() if self._model else None

    def restore(self, snapshot: Any) -> None:
        """The draft model's."""
        if self._model:
            self._model.restore(snapshot)

    def propose(self, tokens: list[int], most: int, given: int = 0) -> Draft:
        """What pays most after ``tokens``."""
        found = [(name, p.guess(tokens, min(most, LONGEST))) for name, p in self._guessers]
        guesses = [(name, guess) for name, guess in found if guess is not None and guess.tokens]
        self._drafter.kept.next_round()
        self._plan = plan = self._choose(guesses, most, len(tokens))
        draft = self._draft(plan, tokens, given)
        self._given, self._context, self._asked = given, len(tokens), self._drafter.clock()
        return draft

    def _draft(self, plan: _Plan, tokens: list[int], given: int) -> Draft:
        copied = plan.guess.tokens[: plan.copied] if plan.guess else []
        if not plan.modelled or self._model is None or self._drafter.model is None:
            return Draft(copied, origins=plan.origin[:1] * len(copied))
        draft = self._model.propose([*tokens, *copied], plan.modelled, given + len(copied))
        origins = (self._drafter.model.name,) * len(draft.tokens)
        named = Draft(draft.tokens, draft.distributions, origins)
        return named.behind(copied, str(plan.origin[0])) if copied else named

    def judge(self, kept: int, tried: int) -> None:
        """Learn how many of the tokens proposed last were kept, and what the round took."""
        seconds = self._drafter.clock() - self._asked
        self._drafter.pace.learn(1 + self._given + tried, self._context, seconds)
        plan, counts = self._plan, self._drafter.kept
        if copied := min(plan.copied, tried):
            counts.learn(plan.origin, copied, min(kept, copied))
        if self._drafter.model and kept >= plan.copied and tried > plan.copied:
            origin = (self._drafter.model.name, bool(plan.copied))
            counts.learn(origin, tried - plan.copied, kept - plan.copied)

    def _choose(self, guesses: list[tuple[str, Guess]], most: int, context: int) -> _Plan:
        room = min(most, self._drafter.model.most) if self._drafter.model else 0
        if self._drafter.width is not None:
            return self._fixed(guesses, min(most, self._drafter.width), room)
        costs, counts = self._drafter.costs, self._drafter.kept
        pace = self._drafter.pace
        if pace.wants_plain:
            return _Plan(0.0)
        forwards = [pace.forward(1 + n, context) for n in range(min(most, LONGEST) + 1)]
        plans = [_Plan(1 / forwards[0])]
        if room:
            width, rate = best(
                self._model_chances(room, behind=False),
                lambda n: forwards[n] + (costs.draft(n) if n else 0.0),
            )
            plans.append(_Plan(rate, modelled=width))
        for name, guess in guesses:
            origin = (name, min(guess.match, 8))
            chances = counts.expect(origin, guess.chances)
            width, rate = best(chances, lambda n: forwards[n])
            plans.append(_Plan(rate, origin, guess, width))
            if room:
                plans += self._behind(origin, guess, chances, forwards)
        return max(plans, key=lambda plan: plan.rate)

    def _behind(
        self, origin: tuple[Any, ...], guess: Guess, chances: list[float], forwards: list[float]
    ) -> list[_Plan]:
        # The whole guess, and the model behind it.
        assert self._drafter.model is not None
        copied = len(guess.tokens)
        room = min(len(forwards) - 1, self._drafter.model.most) - copied
        expected = right = 1.0
        for chance in chances:
            right *= chance
            expected += right
        if room < 1 or right < _LEAST:
            return []
        costs = self._drafter.costs
        plans = []
        for n, chance in enumerate(self._model_chances(room, behind=True), 1):
            right *= chance
            expected += right
            rate = expected / (forwards[copied + n] + costs.draft(copied + n))
            plans.append(_Plan(rate, origin, guess, copied, n))
        return plans

    def _model_chances(self, room: int, *, behind: bool) -> list[float]:
        assert self._drafter.model is not None
        return self._drafter.kept.expect((self._drafter.model.name, behind), [FIRST] * room)

    def _fixed(self, guesses: list[tuple[str, Guess]], width: int, room: int) -> _Plan:
        if guesses:
            name, guess = max(guesses, key=lambda pair: pair[1].match)
            copied = min(width, len(guess.tokens))
            return _Plan(0.0, (name, min(guess.match, 8)), guess, copied)
        return _Plan(0.0, modelled=min(width, room))
