"""Runs ``mlx-dspark`` as its ``mlx-dspark generate`` does: plainly, with its lookup, with a draft.

Its kernels for Metal are calibrated as there. Elsewhere they do not exist, and a draft of 4 bits,
its default, would be slower than a dense one: there it stays as stored.
"""

from __future__ import annotations

import time
from itertools import islice
from typing import Any

from line import Answering, Record, serve


def load(config: dict[str, Any]) -> Answering:
    """The target, and the draft in mode ``block``."""
    import mlx.core as mx
    import mlx_dspark as package
    from mlx_dspark.calibrate import static_cap

    metal = mx.metal.is_available()
    mode, folder = config["mode"], config["target"]
    target, tokenizer = package.load_target(folder, require_tap=mode == "block")
    draft: Any = None
    if mode == "block":
        draft, _ = package.load_dflash(config["draft"], quantize=metal)
        draft.bind(target.model)
    if metal:
        _use_kernels(target, draft, config)

    options: dict[str, Any] = {}
    if mode == "plain":
        generate = package.greedy_generate
    elif mode == "lookup":
        generate = package.lookup_generate
    else:
        generate = package.dflash_generate
        options = {
            "drafter": draft,
            "max_draft_tokens": static_cap(
                target,
                draft,
                mode="dflash",
                target_repo=folder,
                drafter_repo=config["draft"],
                fallback=draft.config.block_size - 1,
            ),
        }

    # It tells of rounds, not of the first token of a prompt: that is known when the first round is
    # verified.
    verified: list[float] = []
    verify = target.verify

    def noted(*args: Any) -> Any:
        verified.append(time.perf_counter())
        return verify(*args)

    target.verify = noted

    def answer(prompt: list[int], record: Record) -> None:
        rounds: list[tuple[float, int]] = []
        verified.clear()
        result = generate(
            target,
            tokenizer,
            **options,
            prompt_ids=prompt,
            max_new_tokens=record.most,
            temperature=0.0,
            on_round=lambda committed, **_: rounds.append((time.perf_counter(), committed)),
        )
        if mode != "plain":
            rounds.insert(0, (verified[0] if verified else time.perf_counter(), 1))
        given = iter(result.token_ids)
        for at, count in rounds:
            record.add(list(islice(given, count)), at=at)

    return answer


def _use_kernels(target: Any, draft: Any, config: dict[str, Any]) -> None:
    # In its order: widths are measured with the kernels that will run.
    from mlx_dspark import calibrate

    folders = {"target_repo": config["target"], "drafter_repo": config["draft"]}
    calibrate.apply_small_m(target, draft, **folders)
    calibrate.apply_sdpa_split(target, target_repo=config["target"])
    calibrate.apply_multirow_attn(target, draft)
    calibrate.apply_wide_gemm(target, draft, target_repo=config["target"])
    calibrate.apply_cpu_split(target, draft, target_repo=config["target"])


if __name__ == "__main__":
    serve("mlx-dspark", load)
