"""The bench on tiny models: every way gives mlx-lm's tokens, and the report says what happened."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import pytest
import tiny

from dflash_engine.bench import peers
from dflash_engine.bench.prompts import Prompt
from dflash_engine.bench.report import plot
from dflash_engine.bench.run import Plan, run
from dflash_engine.bench.ways import Wrong, mlx_lm, ours
from dflash_engine.drafters.compose import Compose
from dflash_engine.options import Options
from dflash_engine.targets import load
from dflash_engine.width import Costs

PASSAGE = "The shop is open. It closes at six."


def ask(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


PROMPTS = [
    Prompt("passages", "hours", ask(PASSAGE + " When?"), passages=(PASSAGE,)),
    Prompt("again", "hours", ask("open?"), earlier=ask("is it open?"), passages=(PASSAGE,)),
    Prompt("chat", "hello", ask("hello")),
]
COUNT = {
    "prompts", "tps", "ratio", "median_ratio", "total_ratio", "tokens", "rounds",
    "tokens_per_round", "prefill_tps", "peak", "kept", "identical",
}  # fmt: skip


def options(draft: Path | None = None) -> Options:
    return Options.of(str(tiny.llama(end_weight=0.0)), draft and str(draft), memory_tokens=10_000)


def bench(draft: Path | None = None, **plan: Any) -> tuple[dict[str, Any], list[str]]:
    told: list[str] = []
    chosen = Plan(**{"prompts": PROMPTS, "tokens": 40, "prefixes": 1, **plan})
    return run(options(draft), chosen, told.append), told


def test_all_own_ways_are_compared_and_give_mlx_lms_tokens() -> None:
    result, told = bench(tiny.draft())
    assert json.dumps(result)
    assert list(result["modes"]) == ["none", "lookup", "block", "copies", "composed"]
    assert list(result["kinds"]) == ["passages", "again", "chat", "repeated", "quoted"]
    for kind, ways in result["kinds"].items():
        for way, of in ways.items():
            assert set(of) == COUNT
            assert of["identical"], (kind, way)
            assert (of["prompts"], of["tps"] > 0, of["prefill_tps"] > 0) == (1, True, True)
    passages = result["kinds"]["passages"]
    assert passages["none"]["tokens_per_round"] == 1.0
    assert passages["mlx-lm"]["ratio"] == 1.0
    assert result["plain_tps"] == passages["mlx-lm"]["tps"]
    assert result["always_wrong_ratio"] == passages["always wrong"]["ratio"]
    assert "always wrong" not in result["kinds"]["chat"]
    assert result["repeated_ratio"] == result["kinds"]["again"]["composed"]["ratio"]
    assert result["same_words_ratio"] == result["kinds"]["repeated"]["composed"]["ratio"]
    assert result["kinds"]["repeated"]["composed"]["kept"]["memory"] > 20
    assert result["quoted_ratio"] == result["kinds"]["quoted"]["composed"]["ratio"]
    assert result["kinds"]["quoted"]["composed"]["kept"]["forced"] > 10
    assert set(result["prefix"]) == {"cold", "memory", "disk"}
    rounds = [result["kinds"][kind]["composed"]["rounds"] for kind in ("passages", "chat")]
    assert [len(result["widths"][kind][0]) for kind in ("passages", "chat")] == rounds
    names = (tiny.llama(end_weight=0.0).name, tiny.draft().name)
    assert (result["target"], result["draft"], result["failed"]) == (*names, {})
    assert told


def test_a_small_model_is_compared_with_mlx_lms_speculative_decoding() -> None:
    result, _ = bench(tiny.small_draft(), prompts=PROMPTS[2:], prefixes=0)
    assert list(result["modes"]) == [
        "mlx-lm small",
        "none",
        "lookup",
        "small",
        "copies",
        "composed",
    ]
    assert all(of["identical"] for of in result["modes"].values())
    assert result["modes"]["mlx-lm small"]["kept"]["small"] > 0
    assert result["modes"]["mlx-lm small"]["tokens_per_round"] > 1
    for unasked in ("always_wrong", "repeated", "same_words", "quoted"):
        assert result[f"{unasked}_ratio"] is None
    assert result["prefix"] is None


def test_a_quick_bench_leaves_ways_out() -> None:
    result, _ = bench(short=True, prefixes=0)
    assert list(result["modes"]) == ["lookup", "composed"]
    assert set(result["kinds"]["again"]) == {"mlx-lm", "composed"}


def test_a_peer_that_cannot_run_is_reported_and_the_others_go_on(tmp_path: Path) -> None:
    # Where they run, that is, as the tests' own environment has the authors' package alone. It
    # knows no table of tokens.
    draft = tmp_path / "draft"
    shutil.copytree(tiny.draft(), draft)
    tensors = cast(dict[str, mx.array], mx.load(str(draft / "model.safetensors")))
    table = {"d2t": mx.arange(tiny.VOCAB // 2)}  # every other token
    mx.save_safetensors(str(draft / "model.safetensors"), tensors | table)
    for name in ("dflash", "mlx-dspark"):
        python = peers.interpreter(tmp_path, name)
        python.parent.mkdir(parents=True)
        python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
        python.chmod(0o755)
    result, _ = bench(draft, prompts=PROMPTS[2:], peers=tmp_path, prefixes=0)
    assert result["modes"]["block"]["identical"]
    assert result["modes"]["dflash block"]["identical"]
    assert result["versions"]["dflash"] == "0.1.0"
    assert set(result["failed"]) == {f"mlx-dspark {mode}" for mode in ("plain", "lookup", "block")}
    assert "mlx_dspark" in result["failed"]["mlx-dspark lookup"]


def test_wrong_drafts_are_parked() -> None:
    target = load(tiny.llama(end_weight=0.0), "llama")
    prompt = target.tokenizer.encode("hello")
    costs = Costs(rows=((1, 1.0), (32, 9.0)))
    drafter = Compose([], Wrong(target.vocab_size), costs, clock=lambda: 0.0)
    answer = ours(target, drafter, prompt, 200)
    assert answer.tokens == mlx_lm(target, prompt, 200).tokens
    assert sum(width > 0 for width in answer.widths) < 20
    assert answer.rounds == 199


def test_a_report_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result, _ = bench(prefixes=0, prompts=PROMPTS[:2])
    plot(result, tmp_path / "bench.png")
    assert (tmp_path / "bench.png").read_bytes()[:4] == b"\x89PNG"
