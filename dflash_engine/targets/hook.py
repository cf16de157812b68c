"""Hooks on one module *object*, so that no class is patched and two engines can share a process."""

from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.nn as nn

Around = Callable[..., Any]  # (call, *args, **kwargs) -> what the module's caller gets


def hook(module: nn.Module, around: Around) -> Callable[[], None]:
    """From now on calls of ``module`` go through ``around``, which is given the module's own call.

    The object gets a subclass of its own class. What is returned takes the hook off again; take
    the last one off first.
    """
    own = type(module)

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return around(partial(own.__call__, self), *args, **kwargs)

    module.__class__ = type(f"Hooked{own.__name__}", (own,), {"__call__": call})

    def unhook() -> None:
        module.__class__ = own

    return unhook
