"""Hidden states out of a model's own forward pass.

A draft reads the outputs of some of the target's layers. The model's code is not re-written for
that: the tapped layers also note what they return, so masks, caches and layer order stay the
model's own.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .hook import Around, hook


class Taps:
    """Records the outputs of ``layers[i]`` for ``i`` in ``indices`` while :meth:`recording`."""

    def __init__(self, layers: Sequence[nn.Module], indices: Sequence[int]) -> None:
        self._seen: dict[int, mx.array] | None = None
        self._indices = tuple(indices)
        self._hooks = [hook(layers[index], self._note(index)) for index in sorted(set(indices))]

    def _note(self, index: int) -> Around:
        def note(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            output = call(*args, **kwargs)
            if self._seen is not None:
                self._seen[index] = output[0] if isinstance(output, tuple) else output
            return output

        return note

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Note what the tapped layers return; one forward pass at a time."""
        self._seen = {}
        try:
            yield
        finally:
            self._seen = None

    def features(self) -> mx.array:
        """What was recorded, side by side in the order of ``indices``: [B, M, taps x hidden]."""
        assert self._seen is not None
        return mx.concatenate([self._seen[index] for index in self._indices], axis=-1)

    def remove(self) -> None:
        """Take the hooks off the layers."""
        for unhook in reversed(self._hooks):
            unhook()
