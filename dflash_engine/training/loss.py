"""What training makes small: the cross entropy of each slot of a block, weighted by its worth.

It is taken with the token that followed, and with all that the target held likely in its place.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ..targets import Target, head_over
from .features import Seen

NONE = -1  # the label of a slot that has none


def labels(tokens: Sequence[int], anchors: Sequence[int], size: int) -> NDArray[np.int32]:
    """The tokens [A, size - 1] that blocks of ``size`` are for: slot k's is k places after the
    anchor; NONE past the end.
    """
    padded = np.array([*tokens, *[NONE] * size], dtype=np.int32)
    return padded[np.asarray(anchors)[:, None] + np.arange(1, size)]


def expectations(
    seen: Seen, anchors: Sequence[int], size: int
) -> tuple[NDArray[np.int32], mx.array]:
    """What the target holds likely [A, size - 1, K], ids and probabilities, at the places that
    :func:`labels` has; NONE past the end. ``anchors`` are indices of the answer's tokens.
    """
    ids, shares = np.asarray(seen.expected), np.asarray(seen.probabilities)
    ids = np.concatenate([ids, np.full((size, ids.shape[1]), NONE, np.int32)])
    shares = np.concatenate([shares, np.zeros((size, shares.shape[1]), shares.dtype)])
    places = np.asarray(anchors)[:, None] + np.arange(1, size)
    return ids[places], mx.array(shares[places]).astype(mx.float32)


def decay(slots: int, gamma: float) -> mx.array:
    """Weights [slots] that fall by the distance k from the anchor: exp(-(k - 1) / gamma)."""
    return mx.exp(-mx.arange(slots) / gamma)


def dpace(probabilities: mx.array, known: mx.array, alpha: float) -> mx.array:
    """D-PACE: a slot weighs what it adds to the expected number of tokens kept (arXiv 2605.18810).

    ``probabilities`` [A, slots] are those the draft gives the labels, ``known`` [A, slots] is 1
    where there is one. They are smoothed to (1 - alpha) p + alpha; a weight is the sum, over its
    slot and all later ones, of the products of all up to there.
    """
    smoothed = (1 - alpha) * mx.stop_gradient(probabilities) + alpha
    return mx.cumsum(mx.cumprod(smoothed, axis=1) * known, axis=1, reverse=True) * known


@dataclass(frozen=True)
class Loss:
    """``decay`` weighs slots by ``gamma``, divided by the sum of weights; ``dpace`` by ``alpha``,
    divided by the number of blocks. The share ``soft`` of a slot's loss is the cross entropy with
    what the target held likely there, the rest is that with the token that followed.
    """

    kind: Literal["decay", "dpace"] = "decay"
    gamma: float = 4.0
    alpha: float = 0.5
    soft: float = 0.5

    def __call__(
        self, logits: mx.array, labels: mx.array, expected: mx.array, probabilities: mx.array
    ) -> tuple[mx.array, mx.array]:
        """The weighted sum over ``logits`` [A, slots, vocab] and ``labels`` [A, slots], and what to
        divide it by, so that both can be added up over a batch. ``expected`` [A, slots, K] are
        tokens, NONE where there is none, and ``probabilities`` [A, slots, K] what the target gives
        them.
        """
        known = (labels >= 0).astype(mx.float32)
        whole_of = mx.logsumexp(logits, axis=-1, keepdims=True)
        entropy = (whole_of - _at(logits, labels[..., None]))[..., 0]
        shares = probabilities * (expected >= 0)
        likely = (shares * (whole_of - _at(logits, expected))).sum(axis=-1)
        if self.kind == "dpace":
            weights = dpace(mx.exp(-entropy) * known, known, self.alpha)
            whole = known.max(axis=1).sum()
        else:
            weights = decay(labels.shape[1], self.gamma) * known
            whole = weights.sum()
        mixed = (1 - self.soft) * entropy + self.soft * likely
        return (mixed * weights).sum(), whole


def _at(logits: mx.array, ids: mx.array) -> mx.array:
    return mx.take_along_axis(logits, mx.maximum(ids, 0), axis=-1)


class Head:
    """The target's head, over ``vocabulary`` or all tokens: hidden states to fp32 logits.

    A part of the vocabulary, such as the tokens that occur, costs a part of the time.
    """

    def __init__(self, target: Target, vocabulary: Sequence[int] | None = None) -> None:
        self._dtype = target.embedding(mx.array([[0]])).dtype
        self._index: NDArray[np.int32] | None = None
        self._head: Callable[[mx.array], mx.array] = target.head
        if vocabulary is None:
            return
        ids = np.unique(np.asarray(vocabulary, dtype=np.int32))
        self._index = np.full(target.vocab_size + 1, NONE, dtype=np.int32)  # the last is NONE's
        self._index[ids] = np.arange(len(ids))
        self._head = head_over(target, ids)

    def __call__(self, hidden: mx.array) -> mx.array:
        return self._head(hidden.astype(self._dtype)).astype(mx.float32)

    def own(self, labels: NDArray[np.int32]) -> mx.array:
        """Token ids as places among its logits; NONE where it has no such token."""
        return mx.array(labels if self._index is None else self._index[labels])
