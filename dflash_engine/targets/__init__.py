"""The model whose output is wanted: loading, forward passes with taps, rollback of its cache."""

from .target import Target, load

__all__ = ["Target", "load"]
