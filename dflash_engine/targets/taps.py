"""Hidden states out of a model's own forward pass.

A draft reads the outputs of some of the target's layers. The model's code is not re-written for
that: the tapped layer *objects* get a subclass of their own class that also notes what it returns,
so masks, caches and layer order stay the model's own, and no class is patched.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn


class Taps:
    """Records the outputs of ``layers[i]`` for ``i`` in ``indices`` while :meth:`recording`."""

    def __init__(self, layers: Sequence[nn.Module], indices: Sequence[int]) -> None:
        self._seen: dict[int, mx.array] | None = None
        self._indices = tuple(indices)
        for index in sorted(set(indices)):
            self._tap(layers[index], index)

    def _tap(self, layer: nn.Module, index: int) -> None:
        own = type(layer)
        taps = self

        def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            output = own.__call__(self, *args, **kwargs)
            if taps._seen is not None:
                taps._seen[index] = output[0] if isinstance(output, tuple) else output
            return output

        layer.__class__ = type(f"Tapped{own.__name__}", (own,), {"__call__": call})

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
