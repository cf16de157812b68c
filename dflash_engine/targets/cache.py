"""What a target remembers of one request, and how it forgets the rows of refused tokens."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import CacheList, KVCache, QuantizedKVCache, make_prompt_cache

from ..errors import UnsupportedTargetError
from . import dense, hybrid, rotating


class Cache:
    """The caches of a model's ``layers``, as mlx-lm makes them.

    ``recorder`` is needed where there are recurrent ones.
    """

    def __init__(self, layers: list[Any], recorder: hybrid.Recorder | None = None) -> None:
        self.layers = layers
        self._leaves = leaves(layers)
        self._recurrent = [leaf for leaf in self._leaves if hybrid.handles(leaf)]
        self._recorder = recorder
        self._undo: hybrid.Undo | None = None
        self._rows = 0

    @property
    def state(self) -> list[Any]:
        """All arrays, for ``mx.eval``."""
        return [layer.state for layer in self.layers]

    @contextmanager
    def reading(self, rows: int, *, undoable: bool) -> Iterator[None]:
        """Within it the model reads ``rows`` positions, which :meth:`roll_back` may forget."""
        self._rows, self._undo = rows, None
        if undoable and self._recorder and self._recurrent:
            with self._recorder.recording(self._recurrent) as self._undo:
                yield
        else:
            yield

    def roll_back(self, rows: int) -> None:
        """Forget the last ``rows`` positions of the last forward, which was ``undoable``."""
        if not rows:
            return
        for leaf in self._leaves:
            if dense.handles(leaf):
                dense.roll_back(leaf, rows)
            elif rotating.handles(leaf):
                rotating.roll_back(leaf, rows)
        if self._recorder and self._undo:
            self._recorder.keep(self._undo, self._rows - rows)
            self._undo = None


def leaves(layers: Sequence[Any]) -> list[Any]:
    """The caches proper: mlx-lm keeps some in lists, for layers with two."""
    found: list[Any] = []
    for layer in layers:
        found += leaves(layer.caches) if isinstance(layer, CacheList) else [layer]
    return found


def quantised(model: nn.Module, name: str, bits: int) -> list[Any]:
    """A new cache whose growing layers keep keys and values in ``bits`` bits, as mlx-lm's do.

    Raises UnsupportedTargetError where the sizes of the heads do not allow it.
    """
    layers = make_prompt_cache(model)
    model(mx.array([[0]]), cache=layers)  # to see the heads; never computed
    fresh = make_prompt_cache(model)
    return _quantise(fresh, layers, name, bits)


def _quantise(fresh: list[Any], used: Sequence[Any], name: str, bits: int) -> list[Any]:
    for i, (new, old) in enumerate(zip(fresh, used, strict=True)):
        if isinstance(new, CacheList):
            new.caches = tuple(_quantise(list(new.caches), old.caches, name, bits))
        elif type(new) is KVCache:
            sizes = (old.keys.shape[-1], old.values.shape[-1])
            group = next((g for g in (64, 32) if not any(size % g for size in sizes)), None)
            if group is None:
                raise UnsupportedTargetError(
                    f"{name} has heads of {sizes[0]}, which cannot be kept in {bits} bits "
                    "(32 must divide it): leave kv_bits unset"
                )
            fresh[i] = QuantizedKVCache(group_size=group, bits=bits)
    return fresh
