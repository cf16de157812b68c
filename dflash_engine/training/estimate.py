"""How long training would take on this machine, from a few steps of it."""

import tempfile
import time
from collections.abc import Sequence as Row
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..drafters import block_checkpoint
from ..drafters.block_model import BlockModel
from ..targets import Target
from .check import check, step_bytes
from .features import Features
from .forward import Blocks
from .held_out import evaluate
from .recipe import Recipe
from .sequences import Sequence
from .trainer import Trainer

_STEPS = 3


@dataclass(frozen=True)
class Speed:
    """Seconds of a ``step``, of the hidden states of one ``token``, and of measuring one held-out
    sequence (``evaluation``); ``bytes`` that a step takes beside the target.
    """

    step: float
    token: float
    evaluation: float
    bytes: int

    def steps(self, seconds: float, tokens: int, held_out: int, evaluations: int) -> int:
        """How many steps fit into ``seconds`` beside reading ``tokens`` and ``evaluations`` over
        ``held_out`` sequences; at least 1.
        """
        left = seconds - tokens * self.token - evaluations * held_out * self.evaluation
        return max(1, int(left / self.step))


def measure(
    target: Target,
    draft: dict[str, Any],
    training: Row[Sequence],
    held_out: Row[Sequence],
    recipe: Recipe,
) -> Speed:
    """Time a few steps on ``training``, which may be a sample of what will be trained on, and the
    evaluation of a held-out sequence. Nothing stays of it. Errors as of :func:`check`.
    """
    config = block_checkpoint.parse(draft, "to be trained")
    check(config, target, training, held_out, recipe)
    training = [sequence for sequence in training if sequence.anchors]
    target.tap(config.target_layers)
    try:
        with tempfile.TemporaryDirectory() as folder:
            features = Features(target, "", config.target_layers, Path(folder), 1 << 30)
            trainer = Trainer(
                Blocks(BlockModel(config), config, target), recipe, training, features
            )
            features.of(training[0])  # warm
            read = training[1 : 1 + recipe.batch] or training
            token = _seconds(lambda: [features.of(row) for row in read]) / sum(
                len(row.tokens) for row in read
            )
            for row in training:
                features.of(row)
            trainer.step(0)
            step = _seconds(lambda: [trainer.step(1 + n) for n in range(_STEPS)]) / _STEPS
            looked = [row for row in held_out if row.anchors][:4]
            for row in looked:
                features.of(row)
            evaluation = _seconds(lambda: evaluate(trainer.blocks, looked, features))
            evaluation /= len(looked)
    finally:
        target.untap()
        mx.clear_cache()
    longest = max(len(row.tokens) for row in training)
    vocabulary = len(recipe.vocabulary or range(config.vocab_size))
    return Speed(step, token, evaluation, step_bytes(config, longest, recipe.anchors, vocabulary))


def _seconds(work: Any) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
