"""The folder of a training run: its last state, its best draft, and its log.

A state is one file, replaced whole: weights, the optimizer's moments, and counts. No generator's
state is in it, as the draws of a step depend on the seed and the step alone.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..errors import TrainingError
from . import store
from .held_out import HeldOut


@dataclass(frozen=True)
class State:
    """After ``step`` steps: ``arrays`` by name, ``seconds`` spent, the ``best`` held-out result,
    and how many evaluations have gone by since (``stalled``).
    """

    arrays: dict[str, mx.array]
    step: int
    seconds: float
    best: HeldOut | None
    stalled: int


@dataclass(frozen=True)
class BestDraft:
    """The best draft of a run: its ``config.json``, weights, and what it was measured at."""

    config: dict[str, Any]
    weights: dict[str, mx.array]
    held_out: HeldOut
    step: int


class Run:
    """A run in ``folder``. ``made_of`` is all that its weights depend on, for JSON: a state made of
    anything else is refused.
    """

    def __init__(self, folder: Path, made_of: Mapping[str, Any]) -> None:
        self.folder = folder
        self._made_of = json.loads(json.dumps(made_of))
        store.clear(folder)

    def save(self, state: State) -> None:
        """Replace the last state."""
        about = {
            "step": state.step,
            "seconds": state.seconds,
            "best": state.best and asdict(state.best),
            "stalled": state.stalled,
            "made_of": self._made_of,
        }
        store.write(self.folder / "state.safetensors", state.arrays, about)

    def load(self) -> State | None:
        """The last state, None if there is none. TrainingError if it is of another run."""
        path = self.folder / "state.safetensors"
        if not path.exists():
            return None
        arrays, about = _read(path)
        found = about.pop("made_of")
        other = [key for key in self._made_of if found.get(key) != self._made_of[key]]
        if other:
            raise TrainingError(
                f"{self.folder} holds a training run with another {', '.join(other)}: go on with "
                "what it was begun with, or choose another folder"
            )
        best = about["best"] and _held_out(about["best"])
        return State(arrays, about["step"], about["seconds"], best, about["stalled"])

    def save_best(self, best: BestDraft) -> None:
        """Replace the best draft."""
        about = {"config": best.config, "held_out": asdict(best.held_out), "step": best.step}
        store.write(self.folder / "best.safetensors", best.weights, about)

    def log(self, row: Mapping[str, Any]) -> None:
        """Add a line to ``log.jsonl``. A run that is resumed may have steps in it twice."""
        with (self.folder / "log.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def best_draft(folder: Path) -> BestDraft:
    """The best draft of the run in ``folder``; TrainingError if it has none yet."""
    path = folder / "best.safetensors"
    if not path.exists():
        raise TrainingError(f"{folder} holds no trained draft: train one first")
    weights, about = _read(path)
    return BestDraft(about["config"], weights, _held_out(about["held_out"]), about["step"])


def _held_out(raw: dict[str, Any]) -> HeldOut:
    return HeldOut(raw["tokens_per_round"], tuple(raw["by_position"]), raw["rounds"])


def _read(path: Path) -> tuple[dict[str, mx.array], dict[str, Any]]:
    try:
        return store.read(path)
    except ValueError as error:
        raise TrainingError(f"{path} is damaged: {error}. Remove it, and train anew") from error
