"""The model whose output is wanted: loading, forward passes with taps, rollback of its cache."""

from .cache import Cache
from .target import Target, load

__all__ = ["Cache", "Target", "load"]
