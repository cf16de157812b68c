"""Rollback of the plain key-value caches of dense models (llama, qwen2, qwen3, ...).

Rejected rows are the last ones written, so taking them back is moving the write position.
"""

from collections.abc import Sequence
from typing import Any

from mlx_lm.models.cache import KVCache


def handles(cache: Sequence[Any]) -> bool:
    """Whether every layer keeps a plain, growing cache."""
    return all(type(layer) is KVCache for layer in cache)


def roll_back(cache: Sequence[Any], rows: int) -> None:
    """Forget the last ``rows`` positions in every layer."""
    if rows:
        for layer in cache:
            layer.trim(rows)
