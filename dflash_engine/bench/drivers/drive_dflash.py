"""Runs ``dflash``, the package of DFlash's authors: its MLX loop, with the draft's block size."""

from __future__ import annotations

from typing import Any

from line import Answering, Record, serve


def load(config: dict[str, Any]) -> Answering:
    """Target and draft in its own loop."""
    import mlx.core as mx
    from dflash import model_mlx as package

    # It looks up drafts on the hub only: here their names are folders.
    package.snapshot_download = lambda folder, **_: folder
    target, tokenizer = package.load(config["target"])
    draft = package.load_draft(config["draft"])

    def answer(prompt: list[int], record: Record) -> None:
        rounds = package.stream_generate(
            target, draft, tokenizer, mx.array(prompt), max_tokens=record.most, temperature=0.0
        )
        for step in rounds:
            record.add(step.tokens)

    return answer


if __name__ == "__main__":
    serve("dflash", load)
