"""Where a model keeps its embedding and its head, found by what they compute.

A draft borrows both. Models name and nest them in many ways, and some scale the embedding; so a
forward of a few tokens is watched, and only what reproduces it is taken.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..errors import UnsupportedTargetError
from .hook import hook

_TOKENS = mx.array([[1, 2, 3, 5, 8, 13, 21, 34]])


@dataclass(frozen=True)
class Structure:
    """``embedding`` of tokens, times ``embedding_scale``, is what the first layer reads; ``head``
    of the last hidden states gives logits, before what the model may do to them (soft-capping).
    """

    embedding: nn.Module
    embedding_scale: float
    head: Callable[[mx.array], mx.array]


def find(model: nn.Module, name: str) -> Structure:
    """The structure of an mlx-lm ``model``; UnsupportedTargetError where it has none such."""
    layer = model.layers[0]
    modules = [module for _, module in model.named_modules()]
    body = next((module for module in modules if _holds(module, layer)), None)
    if body is None:
        raise UnsupportedTargetError(f"{name}: no module holds its layers: it can have no draft")
    first: list[mx.array] = []
    last: list[mx.array] = []
    unhook = [hook(layer, _note(first, inputs=True)), hook(body, _note(last))]
    try:
        logits = model(_TOKENS)
    finally:
        for off in reversed(unhook):
            off()
    embedding, scale = _embedding(body, first[0].astype(mx.float32), name)
    return Structure(embedding, scale, _head(model, embedding, last[0], logits, name))


def _holds(module: nn.Module, layer: nn.Module) -> bool:
    lists = [value for value in module.values() if isinstance(value, list)]
    return any(own is layer for own in itertools.chain.from_iterable(lists))


def _note(seen: list[mx.array], inputs: bool = False) -> Callable[..., Any]:
    def note(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        output = call(*args, **kwargs)
        value = next(iter((*args, *kwargs.values()))) if inputs else output
        seen.append(value[0] if isinstance(value, tuple) else value)
        return output

    return note


def _embedding(body: nn.Module, states: mx.array, name: str) -> tuple[nn.Module, float]:
    for module in body.children().values():
        if not isinstance(module, nn.Embedding | nn.QuantizedEmbedding):
            continue
        plain = module(_TOKENS).astype(mx.float32)
        if plain.shape != states.shape:
            continue
        scales = (plain * states).sum(axis=-1) / (plain * plain).sum(axis=-1)
        rest = mx.abs(plain * scales[..., None] - states).max() / mx.abs(states).max()
        if not float(rest) < 0.02:  # rounding in 16 bits; another table leaves about 1
            continue
        scale = float(scales.mean())
        # A model may normalise each row instead (Muse); its drafts read the rows as they are.
        is_one = abs(scale - 1) < 1e-3 or float(mx.abs(scales - scale).max()) > 0.02 * abs(scale)
        return module, 1.0 if is_one else scale
    raise UnsupportedTargetError(
        f"{name}: what its first layer reads is not an embedding of the tokens alone: no draft "
        "model can be run with it; use drafter='lookup'"
    )


def _head(
    model: nn.Module, embedding: nn.Module, states: mx.array, logits: mx.array, name: str
) -> Callable[[mx.array], mx.array]:
    def heads() -> Iterator[Callable[[mx.array], mx.array]]:
        for path, module in model.named_modules():
            is_linear = isinstance(module, nn.Linear | nn.QuantizedLinear)
            if is_linear and not any(part.isdigit() for part in path.split(".")):  # of no layer
                yield module
        yield embedding.as_linear

    logits = logits.astype(mx.float32)
    top = logits.max(axis=-1)
    slack = 0.01 * (top - logits.min(axis=-1))
    for head in heads():
        try:
            own = head(states)
        except ValueError:  # of other sizes
            continue
        if own.shape != logits.shape:
            continue
        chosen = mx.take_along_axis(logits, mx.argmax(own, axis=-1, keepdims=True), axis=-1)
        if mx.all(chosen[..., 0] >= top - slack).item():
            return head
    raise UnsupportedTargetError(
        f"{name}: no layer gives its logits from its last hidden states: no draft model can be "
        "run with it; use drafter='lookup'"
    )
