"""Choosing the next token, and which drafted tokens to keep.

At temperature 0 a drafted token is kept when it is the target's own first choice. Above 0 the
rejection rule of speculative sampling keeps the target's distribution exactly (Leviathan et al.,
arXiv 2211.17192, algorithm 1): a drafted token d is kept with probability min(1, p(d)/q(d)); the
first one refused is replaced by a draw from max(p - q, 0), normalised.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from .constrain import Constraint, Scores, forced, masked, permitted


@dataclass(frozen=True)
class Distribution:
    """What a token is drawn from: ``tokens`` [k], ascending, and their ``probabilities`` [k], which
    sum to 1. All other tokens have none.
    """

    tokens: NDArray[np.int64]
    probabilities: NDArray[np.float64]

    def of(self, tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        """The probabilities of ``tokens`` [n]."""
        places = np.minimum(np.searchsorted(self.tokens, tokens), len(self.tokens) - 1)
        return np.where(self.tokens[places] == tokens, self.probabilities[places], 0.0)

    @classmethod
    def certain(cls, token: int) -> "Distribution":
        """All mass on one token."""
        return cls(np.array([token]), np.array([1.0]))

    def draw(self, random: np.random.Generator) -> int:
        """One token."""
        return self.at(random.random())

    def at(self, share: float) -> int:
        """The token up to which the probabilities add up to ``share``, of 0 to 1."""
        cumulative = np.cumsum(self.probabilities)
        place = np.searchsorted(cumulative, share * cumulative[-1], side="right")
        return int(self.tokens[place])

    def without(self, other: "Distribution") -> "Distribution":
        """max(self - other, 0), normalised; itself where that is nothing but rounding."""
        rest = np.maximum(self.probabilities - other.of(self.tokens), 0.0)
        total = rest.sum()
        return Distribution(self.tokens, rest / total) if total > 0 else self


@dataclass(frozen=True)
class Draft:
    """Tokens proposed after the anchor.

    ``distributions`` [n] are those each token was drawn from; None where the drafter was certain
    (all mass on its token). ``origins`` [n] name where each came from, if the drafter tells.
    """

    tokens: list[int] = field(default_factory=list)
    distributions: Sequence[Distribution] | None = None
    origins: tuple[str, ...] = ()

    def cut(self, count: int) -> "Draft":
        """The first ``count`` tokens of it."""
        distributions = self.distributions and self.distributions[:count]
        return Draft(self.tokens[:count], distributions or None, self.origins[:count])

    def behind(self, tokens: list[int], origin: str) -> "Draft":
        """The same after ``tokens``, which are certain."""
        if not tokens:
            return self
        distributions = self.distributions
        if distributions is not None:
            distributions = [*map(Distribution.certain, tokens), *distributions]
        return Draft([*tokens, *self.tokens], distributions, (origin,) * len(tokens) + self.origins)


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. Raises ValueError for values out of range.

    First ``logit_bias`` is added to the logits of its tokens; then ``repetition_penalty`` divides
    positive logits of tokens in prompt or answer (and multiplies negative ones),
    ``frequency_penalty`` is taken off for each time a token is in the answer, and
    ``presence_penalty`` once if it is. ``temperature`` 0 takes the first choice of that. Above 0
    it divides the logits, and what is far down the ranking is cut: below ``min_p`` times the
    likeliest, beyond the ``top_k`` likeliest (0: none), beyond those that make up ``top_p``.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    def __post_init__(self) -> None:
        for name, least, most in (
            ("temperature", 0, 10),
            ("min_p", 0, 1),
            ("presence_penalty", -2, 2),
            ("frequency_penalty", -2, 2),
        ):
            value = getattr(self, name)
            if not least <= value <= most:
                raise ValueError(f"{name} must be between {least} and {most}, not {value}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, not {self.top_p}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (all) or more, not {self.top_k}")
        if not 0 < self.repetition_penalty <= 10:
            raise ValueError(
                f"repetition_penalty must be above 0 and at most 10, not {self.repetition_penalty}"
            )
        named = [token for token in self.logit_bias if not isinstance(token, int)]
        if named:
            raise ValueError(f"logit_bias is by token id, a number, not {named[0]!r}")
        wrong = [bias for bias in self.logit_bias.values() if not -100 <= bias <= 100]
        if wrong:
            raise ValueError(f"logit_bias must be between -100 and 100, not {wrong[0]}")

    @property
    def greedy(self) -> bool:
        """Whether the first choice is always taken."""
        return self.temperature == 0

    @property
    def penalises(self) -> bool:
        """Whether the logits are changed by what was written before."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    @property
    def plain(self) -> bool:
        """Whether the logits are taken as they are."""
        return not self.logit_bias and not self.penalises

    def distribution(self, scores: Scores) -> Distribution:
        """What a token with these logits [vocab] is drawn from, bias and penalties applied."""
        scores = scores - scores.max()  # first, or a tiny temperature overflows
        tokens = np.arange(len(scores))
        if self.min_p > 0:
            tokens = tokens[scores >= self.temperature * math.log(self.min_p)]
        if 0 < self.top_k < len(tokens):
            own = scores[tokens]
            tokens = tokens[own >= np.partition(own, -self.top_k)[-self.top_k]]
        weights = np.exp(scores[tokens] / self.temperature)
        weights /= weights.sum()
        if self.top_p < 1:
            chosen = _likeliest(weights, self.top_p)
            tokens, weights = tokens[chosen], weights[chosen]
            weights /= weights.sum()
        return Distribution(tokens, weights)


def _likeliest(weights: NDArray[np.float64], share: float) -> NDArray[np.int64]:
    # The fewest places, ascending, whose weights make up the share. A few hundred mostly do, and
    # finding them is much faster than sorting a vocabulary.
    few = 256
    places = np.arange(len(weights))
    if few < len(weights):
        some = np.argpartition(weights, -few)[-few:]
        if weights[some].sum() >= share:
            places = np.sort(some)
    ranked = places[np.argsort(-weights[places], kind="stable")]
    before = np.cumsum(weights[ranked]) - weights[ranked]
    return np.sort(ranked[before < share])


def first_choices(logits: mx.array) -> mx.array:
    """The greedy tokens of logits [..., vocab], ties broken as mlx-lm breaks them.

    mlx-lm compares log probabilities. In 16 bits, logits that differ may have equal ones.
    """
    if logits.dtype != mx.float32:
        logits = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    return mx.argmax(logits, axis=-1)


class Sampler:
    """One request's choices after ``prompt``; ``seed`` makes them repeatable, and a ``constraint``
    says what may follow. Drafts that are certain of their tokens, and how many come at a time,
    change nothing about what a seed gives.

    It tells the constraint what it chose, and counts it for the penalties: give each position once,
    in order.
    """

    def __init__(
        self,
        sampling: Sampling,
        seed: int | None = None,
        prompt: Iterable[int] = (),
        constraint: Constraint | None = None,
    ) -> None:
        self.sampling = sampling
        self.constraint = constraint
        self._random = np.random.default_rng(seed)  # one number for each position of the answer
        self._refusals = np.random.default_rng(None if seed is None else [seed, 2])
        self._shares: list[float] = []
        self._prompt = frozenset(prompt) if sampling.penalises else frozenset()
        self._answer: Counter[int] = Counter()

    @property
    def plain(self) -> bool:
        """Whether the first choice of the logits as they are is always taken."""
        return self.sampling.greedy and self.sampling.plain and self.constraint is None

    def forced(self, most: int) -> list[int]:
        """The tokens that must follow, at most ``most``; none without a constraint."""
        return forced(self.constraint, most) if self.constraint else []

    def permitted(self, draft: Draft) -> Draft:
        """What of ``draft`` may follow."""
        if self.constraint is None:
            return draft
        return draft.cut(permitted(self.constraint, draft.tokens))

    def choose(self, logits: mx.array) -> int:
        """The next token from logits [vocab]."""
        token = self.verify(Draft(), logits[None])[1]
        assert token is not None
        return token

    def verify(
        self, draft: Draft, logits: mx.array, margin: float | None = None
    ) -> tuple[int, int | None]:
        """How many drafted tokens to keep, and the target's token after them.

        ``logits`` [n + 1, vocab]: row i is the target's view after the anchor and i drafted tokens.
        With a ``margin``, a greedy choice among several rows stops at the first row whose two best
        logits lie no further apart: what follows the tokens kept is then None.
        """
        if not draft.tokens:
            margin = None
        if self.plain:
            return self._first_choices(draft, logits, margin)
        rows = np.asarray(logits.astype(mx.float32))
        for row, token in enumerate(draft.tokens):
            scores = self._scores(rows[row])
            if self._is_close(scores, margin):
                return row, None
            accepted, instead = self._judge(token, draft, row, scores)
            self._chosen(token if accepted else instead)
            if not accepted:
                return row, instead
        scores = self._scores(rows[-1])
        if self._is_close(scores, margin):
            return len(draft.tokens), None
        following = self._pick(scores)
        self._chosen(following)
        return len(draft.tokens), following

    def take(self, tokens: Iterable[int]) -> None:
        """``tokens`` come next, without a choice."""
        for token in tokens:
            self._chosen(token)

    def _chosen(self, token: int) -> None:
        self._answer[token] += 1
        if self.constraint is not None:
            self.constraint.advance(token)

    def _first_choices(
        self, draft: Draft, logits: mx.array, margin: float | None
    ) -> tuple[int, int | None]:
        choices = first_choices(logits).astype(mx.int32)
        close = mx.zeros_like(choices)
        if margin is not None:
            close = (logits >= logits.max(axis=-1, keepdims=True) - margin).sum(axis=-1) > 1
        first, near = cast(list[list[int]], mx.stack([choices, close.astype(mx.int32)]).tolist())
        for row, token in enumerate(draft.tokens):
            if near[row]:
                return row, None
            if token != first[row]:
                return row, first[row]
        return len(draft.tokens), None if near[-1] else first[-1]

    def _is_close(self, scores: Scores, margin: float | None) -> bool:
        if margin is None or not self.sampling.greedy:
            return False
        second, best = np.partition(scores, -2)[-2:]
        return bool(best - second <= margin)

    def _judge(self, token: int, draft: Draft, row: int, scores: Scores) -> tuple[bool, int]:
        # Whether the drafted token stands, and what comes in its place if not.
        if self.sampling.greedy:
            choice = int(scores.argmax())
            return choice == token, choice
        p = self.sampling.distribution(scores)
        if draft.distributions is None:
            # The rule comes to this: whatever is drawn from p stands, the drafted token too.
            choice = p.at(self._share())
            return choice == token, choice
        q, drafted = draft.distributions[row], np.array([token])
        if self._refusals.random() * q.of(drafted)[0] < p.of(drafted)[0]:
            return True, token
        return False, p.without(q).draw(self._refusals)

    def _pick(self, scores: Scores) -> int:
        if self.sampling.greedy:
            return int(scores.argmax())
        return self.sampling.distribution(scores).at(self._share())

    def _share(self) -> float:
        position = self._answer.total()
        while len(self._shares) <= position:
            self._shares.append(self._random.random())
        return self._shares[position]

    def _scores(self, row: NDArray[np.float32]) -> Scores:
        # The logits of one position after bias and penalties.
        sampling = self.sampling
        scores = row.astype(np.float64)
        for token, bias in sampling.logit_bias.items():
            scores[token] += bias
        if sampling.penalises:
            answer = np.fromiter(self._answer.keys(), np.int64)
            seen = np.fromiter(self._prompt | self._answer.keys(), np.int64)
            own = scores[seen]
            repeated = sampling.repetition_penalty
            scores[seen] = np.where(own > 0, own / repeated, own * repeated)
            counts = np.fromiter(self._answer.values(), np.float64)
            scores[answer] -= sampling.frequency_penalty * counts + sampling.presence_penalty
        return scores if self.constraint is None else masked(scores, self.constraint)
