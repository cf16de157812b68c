"""The model whose output is wanted: loading, forward passes with taps, rollback of its cache."""

from .cache import Cache
from .head import head_over
from .target import Target, load

__all__ = ["Cache", "Target", "head_over", "load"]
