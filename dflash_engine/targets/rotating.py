"""Rollback of the caches of sliding-window layers (gpt_oss, gemma3, gemma4, ...).

Such a cache keeps the last window of positions. A forward of several rows leaves it in the order of
time, the window before the first of them still whole; so the rejected rows can be cut off its end.
mlx-lm's own ``trim`` only moves the write position: rejected rows would stay in the buffer, to be
seen by a single row that comes next.
"""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import RotatingKVCache


def handles(layer: Any) -> bool:
    """Whether ``layer`` is a cache of this kind."""
    return type(layer) is RotatingKVCache and layer.keep == 0


def roll_back(layer: Any, rows: int) -> None:
    """Forget the last ``rows`` positions, which came in a forward of more rows than one."""
    layer.offset -= rows
    for name in ("keys", "values"):
        left = getattr(layer, name)[..., :-rows, :]
        if left.shape[2] < min(layer.offset, layer.max_size):
            # All rows of the forward went, and it had made room for the first of them: the oldest
            # place, the next to be overwritten, is filled with anything.
            left = mx.concatenate([left[..., :1, :], left], axis=2)
        setattr(layer, name, left)
    layer._idx = layer.keys.shape[2]


def too_wide_a_mask(model: nn.Module, caches: list[Any]) -> tuple[int, int] | None:
    """The positions that the model's masks let several rows see and that a cache keeps for one, if
    the mask has more: such a model reads a prompt otherwise than it writes (mlx-lm's plamo3).

    ``caches`` are all caches of the model, new.
    """
    seen: list[tuple[int, int]] = []

    def watch(cache: RotatingKVCache) -> None:
        own = cache.make_mask

        def make_mask(rows: int, window_size: int | None = None, **more: Any) -> Any:
            seen.append((window_size or cache.max_size, cache.max_size))
            return own(rows, window_size=window_size, **more)

        vars(cache)["make_mask"] = make_mask  # of this object only

    for cache in filter(handles, caches):
        watch(cache)
    model(mx.array([[0, 0]]), cache=caches)  # never computed
    return next((pair for pair in seen if pair[0] > pair[1]), None)
