"""What a block draft keeps of the target's hidden states: keys and values of each of its layers."""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from ..prefix_snapshot import storable

ROOM = 256  # rows allocated ahead, as mlx-lm's caches do


class Context:
    """One layer's keys and values of the positions so far, in order of time.

    ``reach`` bounds how many are kept; None keeps all. ``offset`` counts all there were. The
    block's own keys and values are written behind them and overwritten by what comes next.
    """

    def __init__(self, reach: int | None) -> None:
        self.reach = reach
        self.offset = 0
        self.arrays: list[mx.array] = []  # keys, values: [1, kv heads, rows, head dim]
        self._end = 0

    def __len__(self) -> int:
        """How many positions are kept."""
        return self._end if self.reach is None else min(self._end, self.reach)

    def append(self, keys: mx.array, values: mx.array, positions: int) -> None:
        """Take ``positions`` more; keys and values are of those of them that are in reach."""
        self._write(keys, values)
        self._end += keys.shape[2]
        self.offset += positions

    def with_block(self, keys: mx.array, values: mx.array) -> list[mx.array]:
        """Keys and values of the positions kept and then of the block's."""
        self._write(keys, values)
        start, end = self._end - len(self), self._end + keys.shape[2]
        return [array[:, :, start:end] for array in self.arrays]

    def _write(self, *new: mx.array) -> None:
        # Behind what is there; if there is no room, in a new buffer with what is kept of it.
        rows = new[0].shape[2]
        if not self.arrays:
            self.arrays = [array[:, :, :0] for array in new]
        if self._end + rows > self.arrays[0].shape[2]:
            start = self._end - len(self)
            for i, array in enumerate(self.arrays):
                b, heads, _, dim = array.shape
                room = mx.zeros((b, heads, rows + ROOM, dim), dtype=array.dtype)
                self.arrays[i] = mx.concatenate([array[:, :, start : self._end], room], axis=2)
            self._end -= start
        for array, part in zip(self.arrays, new, strict=True):
            array[:, :, self._end : self._end + rows] = part


@storable
@dataclass(frozen=True)
class ContextSnapshot:
    """The contexts of a draft's layers after ``offset`` positions, as a value.

    ``arrays`` are keys and values [1, kv heads, rows, head dim] of each layer, of the last rows.
    """

    offset: int
    reaches: list[int | None]
    arrays: list[list[mx.array]]

    @classmethod
    def of(cls, contexts: Sequence[Context]) -> "ContextSnapshot":
        """Of contexts that saw the same positions."""
        kept = [[array[:, :, c._end - len(c) : c._end] for array in c.arrays] for c in contexts]
        return cls(contexts[0].offset, [context.reach for context in contexts], kept)

    @property
    def shortest(self) -> int:
        """The least number of positions that it can be cut to."""
        forgot = any(reach is not None and self.offset > reach for reach in self.reaches)
        return self.offset if forgot else 0

    def trimmed(self, length: int) -> "ContextSnapshot":
        """The contexts after the first ``length`` positions."""
        kept = [[array[:, :, :length] for array in layer] for layer in self.arrays]
        return self if length == self.offset else ContextSnapshot(length, self.reaches, kept)

    def contexts(self) -> list[Context]:
        """Contexts to go on with, which do not change this."""
        made = []
        for reach, layer in zip(self.reaches, self.arrays, strict=True):
            context = Context(reach)
            context.offset = self.offset
            context.arrays = [array[...] for array in layer]
            context._end = layer[0].shape[2] if layer else 0
            made.append(context)
        return made
