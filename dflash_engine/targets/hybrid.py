"""Rollback of recurrent layers (gated delta nets, Mamba, short convolutions, ...).

A recurrent state has no rows to cut off: it is computed anew, from the state before the forward and
the inputs of the steps that were kept. The layer's own code does that. Its projections and
convolutions, which cost nearly all of it, are remembered from the forward; what the state does not
depend on is never computed, since MLX is lazy.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache

from .hook import Around, hook


def handles(layer: Any) -> bool:
    """Whether ``layer`` is a cache of this kind."""
    return type(layer) is ArraysCache


@dataclass
class Step:
    """One call of a recurrent layer with M ``rows``, to be made again with fewer."""

    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    rows: int
    projected: dict[int, mx.array] = field(default_factory=dict)  # by the id of the projection
    kept: int | None = None  # rows, once cut

    def cut(self, rows: int) -> None:
        """Leave only the first ``rows`` of what the layer is called with."""

        def first(value: Any) -> Any:
            has_rows = isinstance(value, mx.array) and value.ndim > 1
            return value[:, :rows] if has_rows and value.shape[1] == self.rows else value

        self.kept = rows
        self.args = tuple(map(first, self.args))
        self.kwargs = {name: first(value) for name, value in self.kwargs.items()}


@dataclass
class Undo:
    """What takes a forward back: the recurrent ``states`` before it, and its ``steps``."""

    states: list[tuple[ArraysCache, list[Any]]]
    steps: list[Step] = field(default_factory=list)


class Recorder:
    """Notes the calls of a model's recurrent layers while :meth:`recording`."""

    def __init__(self, model: nn.Module, cache: list[Any]) -> None:
        self._undo: Undo | None = None
        self._step: Step | None = None
        for layer in _recurrent_layers(model, cache):
            hook(layer, self._note)
            for child in layer.children().values():
                if isinstance(child, nn.Linear | nn.QuantizedLinear | nn.Conv1d):
                    hook(child, self._projection(id(child)))

    @contextmanager
    def recording(self, caches: list[ArraysCache]) -> Iterator[Undo]:
        """Note one forward pass, which changes ``caches``."""
        self._undo = Undo([(cache, list(cache.cache)) for cache in caches])
        try:
            yield self._undo
        finally:
            self._undo = None

    def keep(self, undo: Undo, rows: int) -> None:
        """Leave the caches as if the forward had had its first ``rows`` only."""
        for cache, state in undo.states:
            cache.cache = list(state)
        for step in undo.steps if rows else ():
            step.cut(rows)
            with self._within(step):
                step.call(*step.args, **step.kwargs)

    def _note(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._undo is None:
            return call(*args, **kwargs)
        inputs = next(x for x in (*args, *kwargs.values()) if isinstance(x, mx.array))
        step = Step(call, args, kwargs, inputs.shape[1])
        self._undo.steps.append(step)
        with self._within(step):
            return call(*args, **kwargs)

    @contextmanager
    def _within(self, step: Step) -> Iterator[None]:
        self._step = step
        try:
            yield
        finally:
            self._step = None

    def _projection(self, key: int) -> Around:
        def project(call: Callable[..., Any], x: mx.array) -> Any:
            # A row depends on no later one, so the rows kept are what they were.
            step = self._step
            if step is None:
                return call(x)
            if step.kept is None:
                output = step.projected[key] = call(x)
                return output
            output = step.projected[key]
            return output[:, : step.kept] if output.shape[1] == step.rows else call(x)

        return project


def _recurrent_layers(model: nn.Module, cache: list[Any]) -> list[nn.Module]:
    # The innermost modules that are handed a recurrent cache, found in a forward of one token,
    # which is never computed.
    found: list[nn.Module] = []

    def watch(module: nn.Module) -> Callable[[], None]:
        def note(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            before = len(found)
            output = call(*args, **kwargs)
            given = any(handles(value) for value in (*args, *kwargs.values()))
            if given and len(found) == before:
                found.append(module)
            return output

        return hook(module, note)

    hooks = [watch(module) for _, module in model.named_modules()]
    try:
        model(mx.array([[0]]), cache=cache)
    finally:
        for unhook in reversed(hooks):
            unhook()
    return found
