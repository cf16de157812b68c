"""The training run: step, measure, save, until it is time to stop."""

import hashlib
import json
import time
from collections.abc import Callable
from collections.abc import Sequence as Row
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx

from .. import hub
from ..drafters import block_checkpoint, block_model
from ..drafters.block_checkpoint import BlockConfig
from ..drafters.block_model import BlockModel
from ..errors import TrainingError
from ..targets import Target
from .check import check
from .design import initialise, late_layers
from .features import Features
from .forward import Blocks
from .held_out import HeldOut, evaluate
from .recipe import Limits, Recipe
from .run import BestDraft, Run, State
from .sequences import Sequence
from .trainer import Trainer

Reason = Literal["steps", "time", "stalled"]


@dataclass(frozen=True)
class Progress:
    """After a step: its mean ``loss``, the ``seconds`` spent so far, and what was measured, if
    anything was.
    """

    step: int
    steps: int
    loss: float
    seconds: float
    held_out: HeldOut | None = None


@dataclass(frozen=True)
class Outcome:
    """Why and when training stopped, and the best it measured; :func:`export` writes that draft."""

    stopped: Reason
    step: int
    seconds: float
    best: HeldOut


def train(
    target: Target,
    target_key: str,
    draft: dict[str, Any],
    training: Row[Sequence],
    held_out: Row[Sequence],
    folder: Path,
    *,
    start: Path | None = None,
    recipe: Recipe | None = None,
    limits: Limits | None = None,
    features: Path | None = None,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> Outcome:
    """Train a draft of config ``draft`` (see :func:`design`) for ``target``, from its late layers,
    or from the draft in folder ``start``, whose config it then has (see :func:`design_of`).

    State, log and the best draft so far are kept in ``folder``, and so are hidden states unless
    there is a folder ``features`` for them, which runs may share one after another. A run that was
    interrupted, by an error in ``on_progress`` or a kill, goes on from its last saved state when
    called again, and ends with the weights it would have had.

    Raises what :func:`check` raises before any work starts, UnsupportedTargetError if the target
    cannot be tapped, TrainingError if ``folder`` holds another run.
    """
    recipe, limits = recipe or Recipe(), limits or Limits()
    config = block_checkpoint.parse(draft, "to be trained")
    check(config, target, training, held_out, recipe)
    training = [sequence for sequence in training if sequence.anchors]
    made_of = {
        "target": target_key,
        "draft": draft,
        "recipe": asdict(recipe),
        "data": _digest([*training, *held_out]),
        "start": start and hub.digest(start),
    }
    run = Run(folder, made_of)
    state = run.load()
    target.tap(config.target_layers)
    try:
        kept = features or folder / "features"
        states = Features(target, target_key, config.target_layers, kept, limits.feature_bytes)
        if start is None:
            model = BlockModel(config)
            sources = recipe.sources or late_layers(len(config.layer_types), target)
            initialise(model, config, target, sources, recipe.seed)
        else:
            model = _begun(start, config)
        trainer = Trainer(Blocks(model, config, target), recipe, training, states)
        return _loop(trainer, run, state, draft, held_out, limits, on_progress)
    finally:
        target.untap()


def _begun(start: Path, config: BlockConfig) -> BlockModel:
    checkpoint = block_checkpoint.read(start)
    if replace(checkpoint.config, block_size=config.block_size) != config:
        raise TrainingError(f"the draft to begin as, {start}, has another config: take its own")
    return block_model.build(checkpoint, mx.float32)


def _loop(
    trainer: Trainer,
    run: Run,
    state: State | None,
    draft: dict[str, Any],
    held_out: Row[Sequence],
    limits: Limits,
    on_progress: Callable[[Progress], None],
) -> Outcome:
    state = state or State({}, 0, 0.0, None, 0)
    if state.arrays:
        trainer.arrays = state.arrays
    steps, step, best, stalled = trainer.recipe.steps, state.step, state.best, state.stalled
    seconds = state.seconds
    started = time.monotonic() - seconds

    def reason() -> Reason | None:
        if step >= steps:
            return "steps"
        if limits.seconds is not None and seconds >= limits.seconds:
            return "time"
        return "stalled" if limits.patience and stalled >= limits.patience else None

    stopped = reason() if best else None
    while stopped is None:
        loss = trainer.step(step)
        step += 1
        seconds = time.monotonic() - started
        measured = None
        if reason() or step % limits.evaluate_every == 0:
            measured = evaluate(trainer.blocks, held_out, trainer.features)
            stalled += 1
            if best is None or measured.tokens_per_round > best.tokens_per_round:
                best, stalled = measured, 0
                run.save_best(BestDraft(draft, trainer.weights, measured, step))
            seconds = time.monotonic() - started
        stopped = reason() if measured else None
        if stopped or step % limits.save_every == 0:
            run.save(State(trainer.arrays, step, seconds, best, stalled))
            mx.clear_cache()  # sequences of many lengths leave buffers of many sizes
        progress = Progress(step, steps, loss, seconds, measured)
        run.log(asdict(progress))
        on_progress(progress)
    assert best is not None
    return Outcome(stopped, step, seconds, best)


def _digest(sequences: Row[Sequence]) -> str:
    digest = hashlib.sha256()
    for sequence in sequences:
        digest.update(json.dumps([sequence.answer, sequence.tokens]).encode())
    return digest.hexdigest()
