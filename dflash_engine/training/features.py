"""What is asked of the target about a text: hidden states at the tapped layers, which the draft
reads, and which tokens it expects, which the draft learns. Both are kept on disk.
"""

import hashlib
import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import mlx.core as mx

from ..targets import Target
from . import store
from .sequences import Sequence

STEP = 512  # tokens in one forward of the target
EXPECTED = 16  # tokens for each place: the likeliest
GROUP = 64  # tokens that are looked through together
_MOST = 65504.0  # in fp16


@dataclass(frozen=True)
class Seen:
    """``features`` [1, S, taps x hidden] of S tokens, fp16, or bf16 where that is too small, and
    for each of the A tokens of the answer the 16 that the target holds likeliest in its place:
    their ids ``expected`` [A, 16], and ``probabilities`` [A, 16] among these, fp16.
    """

    features: mx.array
    expected: mx.array
    probabilities: mx.array


class Features:
    """What a tapped ``target`` says about sequences, each one's in a file.

    ``key`` names the target, ``taps`` the layers: files of others are not looked at. Once the
    folder has ``budget`` bytes no more are kept, and what is missing is computed each time. One
    sequence is read at a time: a few hundred rows are as many as a forward needs to be worth it.
    For the prompt nothing above the last tapped layer is computed.
    """

    def __init__(
        self, target: Target, key: str, taps: tuple[int, ...], folder: Path, budget: int
    ) -> None:
        self._target, self._folder = target, folder
        self._key = json.dumps([key, taps, EXPECTED])
        store.clear(folder)
        self._room = budget - sum(file.stat().st_size for file in folder.glob("*.safetensors"))

    def of(self, sequence: Sequence) -> Seen:
        """What the target says about ``sequence``."""
        text = json.dumps([self._key, sequence.answer, sequence.tokens])
        path = self._folder / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.safetensors"
        with suppress(ValueError, TypeError):  # there is none, or it is damaged
            return Seen(**store.read(path)[0])
        seen = self._compute(sequence)
        arrays = dict(vars(seen))
        size = sum(array.nbytes for array in arrays.values())
        if size <= self._room:
            store.write(path, arrays)
            self._room -= path.stat().st_size
        return seen

    def _compute(self, sequence: Sequence) -> Seen:
        cache = self._target.make_cache()
        tokens, asked = sequence.tokens, sequence.answer - 1  # where the first one is expected
        parts: list[mx.array] = []
        expected: list[mx.array] = []
        probabilities: list[mx.array] = []
        ends = sorted({*range(STEP, len(tokens), STEP), asked, len(tokens)} - {0})
        for start, end in zip([0, *ends], ends, strict=False):
            logits, features = self._target.forward(tokens[start:end], cache, undoable=False)
            assert features is not None, "the target is not tapped"
            parts.append(features)
            if start >= asked:
                likely, shares = _likeliest(logits[0])
                expected.append(likely)
                probabilities.append(shares)
            mx.eval(features, expected, probabilities)
        whole = mx.concatenate(parts, axis=1)
        fits = whole.dtype != mx.bfloat16 and cast(float, mx.abs(whole).max().item()) < _MOST
        seen = Seen(
            whole.astype(mx.float16 if fits else mx.bfloat16),
            mx.concatenate(expected)[:-1],  # nothing stands where the last one is expected
            mx.concatenate(probabilities)[:-1],
        )
        mx.eval(*vars(seen).values())
        return seen


def _likeliest(logits: mx.array) -> tuple[mx.array, mx.array]:
    # Of logits [M, vocab], the tokens [M, EXPECTED] that are likeliest, and their shares. They are
    # in the groups of tokens that have the largest maxima: to look for these first is much sooner.
    rows, vocab = logits.shape
    ids = mx.broadcast_to(mx.arange(vocab), logits.shape)
    if vocab > GROUP * EXPECTED and vocab % GROUP == 0:
        groups = _largest(logits.reshape(rows, -1, GROUP).max(axis=-1))
        ids = (groups[..., None] * GROUP + mx.arange(GROUP)).reshape(rows, -1)
    found = mx.take_along_axis(logits, ids, axis=-1)
    best = _largest(found)
    ids = mx.take_along_axis(ids, best, axis=-1).astype(mx.int32)
    picked = mx.take_along_axis(found, best, axis=-1).astype(mx.float32)
    return ids, mx.softmax(picked, axis=-1).astype(mx.float16)


def _largest(values: mx.array) -> mx.array:
    # Places [M, EXPECTED] of the largest of ``values`` [M, n].
    return mx.argpartition(-values, min(EXPECTED, values.shape[-1]) - 1, axis=-1)[:, :EXPECTED]
