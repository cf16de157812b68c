"""Choosing the next token, and which drafted tokens to keep.

At temperature 0 a drafted token is kept when it is the target's own first choice. Above 0 the
rejection rule of speculative sampling keeps the target's distribution exactly (Leviathan et al.,
arXiv 2211.17192, algorithm 1): a drafted token d is kept with probability min(1, p(d)/q(d)); the
first one refused is replaced by a draw from max(p - q, 0), normalised.
"""

from dataclasses import dataclass, field
from typing import cast

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

Probabilities = NDArray[np.float64]


@dataclass(frozen=True)
class Draft:
    """Tokens proposed after the anchor.

    ``probabilities`` [n, vocab] are those each token was drawn from; None where the drafter was
    certain (all mass on its token).
    """

    tokens: list[int] = field(default_factory=list)
    probabilities: Probabilities | None = None


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen: ``temperature`` 0 takes the first choice; above it, ``top_k`` (0: all)
    and then ``top_p`` cut the tail. Raises ValueError for values out of range.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature <= 10:
            raise ValueError(f"temperature must be between 0 and 10, not {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, not {self.top_p}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (all) or more, not {self.top_k}")

    @property
    def greedy(self) -> bool:
        """Whether the first choice is always taken."""
        return self.temperature == 0

    def probabilities(self, logits: mx.array) -> Probabilities:
        """Logits [n, vocab] to the distributions tokens are drawn from, [n, vocab]."""
        scores = np.array(logits.astype(mx.float32), dtype=np.float64)
        scores -= scores.max(axis=-1, keepdims=True)  # first, or a tiny temperature overflows
        weights: Probabilities = np.exp(scores / self.temperature)
        if 0 < self.top_k < weights.shape[-1]:
            least = np.partition(weights, -self.top_k, axis=-1)[:, -self.top_k, None]
            weights = np.where(weights >= least, weights, 0.0)
        weights /= weights.sum(axis=-1, keepdims=True)
        if self.top_p < 1:
            order = np.argsort(-weights, axis=-1, kind="stable")
            ranked = np.take_along_axis(weights, order, axis=-1)
            before = np.cumsum(ranked, axis=-1) - ranked
            ranked[before >= self.top_p] = 0.0
            np.put_along_axis(weights, order, ranked, axis=-1)
            weights /= weights.sum(axis=-1, keepdims=True)
        return weights


def first_choices(logits: mx.array) -> mx.array:
    """The greedy tokens of logits [..., vocab], ties broken as mlx-lm breaks them.

    mlx-lm compares log probabilities. In 16 bits, logits that differ may have equal ones.
    """
    if logits.dtype != mx.float32:
        logits = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    return mx.argmax(logits, axis=-1)


class Sampler:
    """One request's choices; ``seed`` makes them repeatable."""

    def __init__(self, sampling: Sampling, seed: int | None = None) -> None:
        self.sampling = sampling
        self._random = np.random.default_rng(seed)

    def draw(self, probabilities: Probabilities) -> int:
        """One token from a distribution [vocab]."""
        cumulative = np.cumsum(probabilities)
        point = self._random.random() * cumulative[-1]
        return int(np.searchsorted(cumulative, point, side="right"))

    def choose(self, logits: mx.array) -> int:
        """The next token from logits [vocab]."""
        if self.sampling.greedy:
            return int(cast(int, first_choices(logits).item()))
        return self.draw(self.sampling.probabilities(logits[None])[0])

    def verify(self, draft: Draft, logits: mx.array) -> tuple[int, int]:
        """How many drafted tokens to keep, and the target's token after them.

        ``logits`` [n + 1, vocab]: row i is the target's view after the anchor and i drafted tokens.
        """
        if self.sampling.greedy:
            choices: list[int] = first_choices(logits).tolist()  # type: ignore[assignment]
            kept = 0
            while kept < len(draft.tokens) and draft.tokens[kept] == choices[kept]:
                kept += 1
            return kept, choices[kept]
        target = self.sampling.probabilities(logits)
        for row, token in enumerate(draft.tokens):
            p = target[row]
            q = draft.probabilities[row] if draft.probabilities is not None else None
            if self._random.random() * (1.0 if q is None else q[token]) < p[token]:
                continue
            if q is None:
                rest = p.copy()
                rest[token] = 0.0
            else:
                rest = np.maximum(p - q, 0.0)
                if not rest.any():  # p and q are equal but for rounding
                    rest = p
            return row, self.draw(rest)
        return len(draft.tokens), self.draw(target[-1])
