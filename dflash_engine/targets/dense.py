"""Rollback of key-value caches that only grow (llama, qwen2, qwen3, ...), plain or quantised.

Rejected rows are the last ones written, so taking them back is moving the write position.
"""

from typing import Any

from mlx_lm.models.cache import ConcatenateKVCache, KVCache, QuantizedKVCache


def handles(layer: Any) -> bool:
    """Whether ``layer`` is a cache of this kind."""
    return type(layer) in (KVCache, QuantizedKVCache, ConcatenateKVCache)


def roll_back(layer: Any, rows: int) -> None:
    """Forget the last ``rows`` positions."""
    layer.trim(rows)
    if type(layer) is ConcatenateKVCache:  # which finds its length from its arrays
        layer.keys, layer.values = (x[..., : layer.offset, :] for x in layer.state)
