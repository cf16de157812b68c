"""How a training run went, and a picture of it."""

import json
from pathlib import Path
from typing import Any


def log(run: Path) -> list[dict[str, Any]]:
    """The steps of the training run in folder ``run``: see :class:`Progress`."""
    by_step = {}  # a run that was resumed may have steps twice
    for line in (run / "log.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        by_step[row["step"]] = row
    return [by_step[step] for step in sorted(by_step)]


def plot(run: Path, path: Path) -> None:
    """Draw the log of the training run in folder ``run``: loss and tokens a round by step, and the
    share of rounds in which so many drafted tokens were kept, at the best evaluation.

    Needs matplotlib. The format is that of the file's name, such as PNG.
    """
    from matplotlib.figure import Figure

    rows = log(run)
    measured = [row for row in rows if row["held_out"]]
    figure = Figure(figsize=(10, 9), layout="constrained")
    losses, rates, positions = figure.subplots(3, 1)

    losses.plot([row["step"] for row in rows], [row["loss"] for row in rows], linewidth=0.6)
    losses.set_ylabel("training loss")
    rates.plot(
        [row["step"] for row in measured],
        [row["held_out"]["tokens_per_round"] for row in measured],
        marker="o",
    )
    rates.set_ylabel("held-out tokens a round")
    rates.set_xlabel("step")
    if measured:
        best = max(measured, key=lambda row: row["held_out"]["tokens_per_round"])
        shares = best["held_out"]["by_position"]
        positions.bar(range(1, len(shares) + 1), shares)
        positions.set_title(f"step {best['step']}", fontsize="medium")
    positions.set_ylabel("kept, of rounds")
    positions.set_xlabel("drafted token")
    figure.savefig(path)
