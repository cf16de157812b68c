"""How good a draft is: decoding simulated along answers it has not seen."""

from collections.abc import Iterable
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from .features import Features
from .forward import Blocks
from .loss import labels
from .sequences import Sequence

AT_ONCE = 64  # blocks in one forward


@dataclass(frozen=True)
class HeldOut:
    """What greedy decoding of the answers would have given, over ``rounds`` rounds.

    ``tokens_per_round`` counts the target's own token, so it is 1 for a draft that is never right.
    ``by_position``: the share of rounds in which the first, the first two, ... drafted tokens were
    kept, among those with so many tokens to come.
    """

    tokens_per_round: float
    by_position: tuple[float, ...]
    rounds: int


def evaluate(blocks: Blocks, sequences: Iterable[Sequence], features: Features) -> HeldOut:
    """Draft at every place of each answer, then walk along it as the decode loop would.

    It is the target's whole head that chooses, as when the draft is used.
    """
    slots = blocks.config.slots
    kept, could = np.zeros(slots), np.zeros(slots)
    tokens = rounds = 0
    for sequence in sequences:
        end = len(sequence.tokens) - 1
        if not sequence.anchors:
            continue
        agreed = _agreed(blocks, sequence, features.of(sequence).features)
        anchor = sequence.answer
        tokens += end - anchor
        while anchor < end:
            count = int(agreed[anchor - sequence.answer])
            kept[:count] += 1
            could[: end - anchor] += 1
            rounds += 1
            anchor += count + 1
    shares = kept / np.maximum(could, 1)
    return HeldOut(tokens / max(rounds, 1), tuple(round(float(s), 4) for s in shares), rounds)


def _agreed(blocks: Blocks, sequence: Sequence, features: mx.array) -> NDArray[np.int64]:
    # How many drafted tokens would be kept at each anchor. A slot is looked at only where all
    # before it were right: the head is the dear part.
    target = blocks.target
    dtype = target.embedding(mx.array([[0]])).dtype
    counts = []
    for start in range(0, len(sequence.anchors), AT_ONCE):
        anchors = sequence.anchors[start : start + AT_ONCE]
        right = labels(sequence.tokens, anchors, blocks.config.block_size)
        hidden = blocks.hidden(sequence.tokens, anchors, features).astype(dtype)
        mx.eval(hidden)
        count = np.zeros(len(anchors), dtype=np.int64)
        alive = np.arange(len(anchors))
        for slot in range(right.shape[1]):
            alive = alive[right[alive, slot] >= 0]
            if not alive.size:
                break
            chosen = mx.argmax(target.head(hidden[mx.array(alive), slot][None])[0], axis=-1)
            alive = alive[np.asarray(chosen) == right[alive, slot]]
            count[alive] += 1
        counts.append(count)
    return np.concatenate(counts)
