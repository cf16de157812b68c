"""One optimizer step after another, on random blocks of the target's own answers."""

import math
from collections.abc import Iterator
from collections.abc import Sequence as Row
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten, tree_map, tree_unflatten

from .features import Features, Seen
from .forward import Blocks
from .loss import Head, expectations, labels
from .recipe import Recipe
from .sequences import Sequence

_ORDER, _ANCHORS = 0, 1  # what is drawn


class Trainer:
    """A draft on its way: ``step`` makes one optimizer step."""

    def __init__(
        self, blocks: Blocks, recipe: Recipe, sequences: Row[Sequence], features: Features
    ) -> None:
        self.blocks, self.recipe, self.features = blocks, recipe, features
        self._sequences = sequences
        self._head = Head(blocks.target, recipe.vocabulary)
        self._optimizer = optim.AdamW(
            learning_rate=0.0, weight_decay=recipe.weight_decay, bias_correction=True
        )
        self._optimizer.init(blocks.model.trainable_parameters())
        self._gradients = nn.value_and_grad(blocks.model, self._loss)

    def step(self, number: int) -> float:
        """Make step ``number``, from 0, and return its mean loss."""
        recipe, model = self.recipe, self.blocks.model
        total = whole = 0.0
        summed: Any = None
        for sequence, anchors in self._batch(number):
            seen = self.features.of(sequence)
            (value, weight), gradients = self._gradients(sequence, anchors, seen)
            # A sequence at a time, so that memory does not grow with the batch.
            summed = tree_map(mx.add, summed, gradients) if summed else gradients
            mx.eval(value, weight, summed)
            total, whole = total + value.item(), whole + weight.item()
        whole = max(whole, 1e-6)  # no label at all: gradients are zero then
        gradients = tree_map(lambda gradient: gradient / whole, summed)
        gradients, _ = optim.clip_grad_norm(gradients, recipe.clip)
        self._optimizer.learning_rate = learning_rate(recipe, number)
        self._optimizer.update(model, gradients)
        mx.eval(model.parameters(), self._optimizer.state)
        return total / whole

    def _loss(
        self, sequence: Sequence, anchors: list[int], seen: Seen
    ) -> tuple[mx.array, mx.array]:
        size, tokens = self.blocks.config.block_size, sequence.tokens
        wanted = self._head.own(labels(tokens, anchors, size))
        expected, probabilities = expectations(seen, [a - sequence.answer for a in anchors], size)
        hidden = self.blocks.hidden(tokens, anchors, seen.features)
        logits = self._head(hidden)
        return self.recipe.loss(logits, wanted, self._head.own(expected), probabilities)

    def _batch(self, number: int) -> Iterator[tuple[Sequence, list[int]]]:
        # The next sequences and their anchors: epoch after epoch, each in an order of its own.
        # What is drawn depends on the seed and the place alone, so that no generator has a state.
        recipe, count = self.recipe, len(self._sequences)
        for i in range(number * recipe.batch, (number + 1) * recipe.batch):
            epoch, place = divmod(i, count)
            order = np.random.default_rng([recipe.seed, _ORDER, epoch]).permutation(count)
            sequence = self._sequences[order[place]]
            places = sequence.anchors
            drawn = np.random.default_rng([recipe.seed, _ANCHORS, i]).choice(
                len(places), min(recipe.anchors, len(places)), replace=False
            )
            yield sequence, [places[k] for k in sorted(drawn)]

    @property
    def weights(self) -> dict[str, mx.array]:
        """The draft's, by the names of its checkpoint."""
        return dict(tree_flatten(self.blocks.model.parameters()))

    @property
    def arrays(self) -> dict[str, mx.array]:
        """All that the next step depends on."""
        moments = tree_flatten(self._optimizer.state, prefix=".optimizer")
        return {f"draft.{name}": array for name, array in self.weights.items()} | dict(moments)

    @arrays.setter
    def arrays(self, arrays: dict[str, mx.array]) -> None:
        parts: dict[str, list[tuple[str, mx.array]]] = {"draft": [], "optimizer": []}
        for name, array in arrays.items():
            part, _, rest = name.partition(".")
            parts[part].append((rest, array))
        self.blocks.model.load_weights(parts["draft"])
        self._optimizer.state = tree_unflatten(parts["optimizer"])


def learning_rate(recipe: Recipe, step: int) -> float:
    """That of ``step``, from 0: a rise, then half a cosine."""
    rise = max(1, round(recipe.warmup * recipe.steps))
    if step < rise:
        return recipe.learning_rate * (step + 1) / rise
    done = (step - rise) / max(1, recipe.steps - rise)
    return recipe.learning_rate * (1 + math.cos(math.pi * done)) / 2
