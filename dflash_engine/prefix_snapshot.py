"""What a target and its draft know after reading some tokens, as a value that nothing changes.

A slice assignment changes the array *object* it is made on, so a snapshot holds objects of its own,
and hands out new ones. The memory behind them may be shared: MLX writes into none that another
array sees.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from .targets import dense, rotating
from .targets.cache import leaves

T = TypeVar("T", bound=type)

# What each kind of object consists of. One that has more is of a version that is not known here.
_PARTS: dict[type, tuple[str, ...]] = {
    KVCache: ("keys", "values", "offset"),
    ConcatenateKVCache: ("keys", "values", "offset"),
    QuantizedKVCache: ("keys", "values", "offset", "group_size", "bits"),
    RotatingKVCache: ("keys", "values", "offset", "keep", "max_size", "_idx"),
    ArraysCache: ("cache", "left_padding", "lengths"),
    CacheList: ("caches",),
}
_CLASSES = {kind.__name__: kind for kind in _PARTS}


def storable(kind: T) -> T:
    """Decorate a dataclass whose objects may be part of a draft's snapshot.

    Its fields may be arrays, numbers, strings, None, other storable objects, mlx-lm caches, and
    lists, tuples and dicts (with strings as keys) of those. If it is the snapshot itself and can
    be cut back, it has ``shortest``, the least number of tokens, and ``trimmed(length)``, a
    snapshot of only so many; one without serves the tokens it was taken after and no fewer.
    """
    _PARTS[kind] = tuple(field.name for field in fields(kind))
    _CLASSES[kind.__name__] = kind
    return kind


class UnstorableError(TypeError):
    """Of a kind whose state is not known here."""


@dataclass(frozen=True)
class Snapshot:
    """The state after ``length`` tokens; also good for fewer, but no fewer than ``shortest``.

    ``form`` is JSON: the objects' parts, with arrays named by their place in ``arrays``.
    """

    length: int
    shortest: int
    form: Any
    arrays: list[mx.array]

    @classmethod
    def take(cls, length: int, layers: Sequence[Any], draft: Any) -> "Snapshot":
        """Of a target's cache ``layers`` and the ``draft`` snapshot that goes with them.

        The caches may have read more than ``length`` tokens if all can be cut back. ``arrays`` are
        not evaluated yet. Raises UnstorableError for objects of unknown kinds, ValueError for
        caches that do not hold those tokens.
        """
        layers = [_copy(layer) for layer in layers]
        read = max((getattr(leaf, "offset", 0) for leaf in leaves(layers)), default=0)
        shortest = max((_cut(layer, length) for layer in layers), default=0)
        if shortest and read > length:
            raise ValueError(f"caches that read {read} tokens cannot be cut to {length}")
        if draft is not None:
            shortest = max(shortest, getattr(draft, "shortest", length))
        arrays: list[mx.array] = []
        form = _pack([layers, draft], arrays)
        # Only what is used, without the room that caches allocate ahead.
        return cls(length, shortest, form, [mx.contiguous(array) for array in arrays])

    @property
    def nbytes(self) -> int:
        """The bytes of its arrays."""
        return sum(array.nbytes for array in self.arrays)

    def restore(self, length: int) -> tuple[list[Any], Any]:
        """Cache layers and draft snapshot after ``length`` tokens, which the caller may change."""
        if not self.shortest <= length <= self.length:
            raise ValueError(f"good for {self.shortest} to {self.length} tokens, not {length}")
        layers, draft = _unpack(self.form, self.arrays)
        for layer in layers:
            _cut(layer, length)
        if length < self.length and draft is not None:
            draft = draft.trimmed(length)
        return layers, draft


def _copy(layer: Any) -> Any:
    # Of the objects whose parts _cut replaces.
    own = copy.copy(layer)
    if type(layer) is CacheList:
        own.caches = tuple(_copy(cache) for cache in layer.caches)
    return own


def _cut(layer: Any, length: int) -> int:
    """Forget what ``layer`` read after ``length`` tokens; how few it could be cut to after that."""
    if type(layer) is CacheList:
        return max(_cut(cache, length) for cache in layer.caches)
    if not (dense.handles(layer) or rotating.handles(layer)):
        return length
    if layer.keys is None:  # never used
        return 0
    # Until its window is full a rotating cache has forgotten nothing.
    whole = dense.handles(layer) or layer.offset < layer.max_size
    least = 0 if whole else int(layer.offset)
    if not least <= length <= layer.offset:
        raise ValueError(
            f"a {type(layer).__name__} that read {layer.offset} tokens does not hold the first "
            f"{length}"
        )
    if whole:
        kept = slice(length)
        layer.offset = length
    elif layer._idx == layer.keys.shape[2] > layer.max_size:  # in order; the oldest are out of use
        kept = slice(-layer.max_size, None)
    else:
        return least
    layer.keys, layer.values = tree_map(lambda x: x[..., kept, :], (layer.keys, layer.values))
    if rotating.handles(layer):
        layer._idx = layer.keys.shape[2]
    return least


def _pack(value: Any, arrays: list[mx.array]) -> Any:
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is mx.array:
        arrays.append(value)
        return {"array": len(arrays) - 1}
    if kind is list:
        return [_pack(item, arrays) for item in value]
    if kind is tuple:
        return {"tuple": [_pack(item, arrays) for item in value]}
    if kind is dict and all(type(name) is str for name in value):
        return {"dict": {name: _pack(item, arrays) for name, item in value.items()}}
    names = _PARTS.get(kind)
    if names is None or vars(value).keys() != set(names):
        raise UnstorableError(f"a {kind.__name__} cannot be kept: its state is not known here")
    parts = {name: _pack(getattr(value, name), arrays) for name in names}
    return {"kind": kind.__name__, "parts": parts}


def _unpack(form: Any, arrays: list[mx.array]) -> Any:
    if isinstance(form, list):
        return [_unpack(item, arrays) for item in form]
    if not isinstance(form, dict):
        return form
    if "array" in form:
        return arrays[form["array"]][...]
    if "tuple" in form:
        return tuple(_unpack(item, arrays) for item in form["tuple"])
    if "dict" in form:
        return {name: _unpack(item, arrays) for name, item in form["dict"].items()}
    kind = _CLASSES[form["kind"]]
    parts = {name: _unpack(part, arrays) for name, part in form["parts"].items()}
    if parts.keys() != set(_PARTS[kind]):
        raise ValueError(f"a {kind.__name__} of another version")
    value: Any = object.__new__(kind)
    vars(value).update(parts)
    return value
