"""How long training would take, and the log and picture of a run."""

import json
from pathlib import Path

import pytest
import tiny

from dflash_engine.errors import TrainingError
from dflash_engine.targets import load
from dflash_engine.training import Recipe, Sequence, design
from dflash_engine.training.estimate import Speed, measure
from dflash_engine.training.plot import log, plot

ROWS = [Sequence([97 + (start + i) % 16 for i in range(24)], 4) for start in range(5)]


def test_steps_are_what_time_is_left_for() -> None:
    speed = Speed(step=2.0, token=0.01, evaluation=0.5, bytes=0)
    assert speed.steps(1000, 10_000, held_out=10, evaluations=20) == (1000 - 100 - 100) / 2
    assert speed.steps(10, 10_000, held_out=10, evaluations=20) == 1


def test_a_few_steps_are_timed_and_nothing_stays() -> None:
    folder = tiny.llama()
    target = load(folder, "llama")
    config = design(folder, target, taps=tiny.TAPS, block_size=4)
    recipe = Recipe(batch=2, anchors=4)
    speed = measure(target, config, ROWS, ROWS[:2], recipe)
    assert min(speed.step, speed.token, speed.evaluation) > 0
    assert measure(target, config, ROWS, ROWS[:2], recipe).bytes == speed.bytes > 0
    target.tap([1])  # nobody else reads it
    target.untap()
    with pytest.raises(TrainingError, match="no answer of two tokens"):
        measure(target, config, [Sequence([1, 2], 1)], ROWS, recipe)


def test_the_log_of_a_resumed_run_has_each_step_once(tmp_path: Path) -> None:
    held_out = {"tokens_per_round": 1.5, "by_position": [0.4, 0.1], "rounds": 9}
    rows = [
        {"step": step, "loss": loss, "held_out": held_out if step == 2 else None}
        for step, loss in ((1, 5.0), (2, 4.0), (3, 3.5), (2, 4.0), (3, 3.0))
    ]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [(row["step"], row["loss"]) for row in log(tmp_path)] == [(1, 5.0), (2, 4.0), (3, 3.0)]
    plot(tmp_path, tmp_path / "training.png")
    assert (tmp_path / "training.png").read_bytes().startswith(b"\x89PNG")
