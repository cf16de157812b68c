"""Speculative decoding with DFlash drafts on MLX: the target's own output, sooner.

>>> from dflash_engine import DFlash
>>> DFlash(target_model="smollm2-135m").generate("The capital of France is").text
"""

from typing import TYPE_CHECKING, Any

from . import blas
from .errors import EngineError

blas.load()  # before anything imports mlx

if TYPE_CHECKING:
    from .engine import Delta, DFlash, Generation, Stats

__all__ = ["DFlash", "Delta", "EngineError", "Generation", "Stats"]


def __getattr__(name: str) -> Any:
    # The engine imports mlx and mlx-lm; a program that only names this package should not wait.
    if name in __all__:
        from . import engine

        return getattr(engine, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
