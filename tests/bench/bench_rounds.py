"""DFlash rounds beside the authors' package, and what a round spends outside the two models.

    python tests/bench/bench_rounds.py [folder with models]

The same target weights, the same random draft, the same prompts and the same BLAS; the two run in
turn, so that a busy machine slows both alike: read the ratios. A random draft is refused nearly
always, which makes a round as dear as it gets: a draft forward, a verify forward of a whole block,
and a rollback. ``none`` is plain decoding beside mlx-lm's.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from dflash_engine import hub  # before mlx, for its BLAS

# isort: split
import dflash.model_mlx as authors
import mlx.core as mx
import tiny
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from mlx_lm.utils import _get_classes

from dflash_engine.decode import decode
from dflash_engine.drafters import Drafter
from dflash_engine.drafters.block import Block
from dflash_engine.options import default_models
from dflash_engine.sampling import Sampler, Sampling
from dflash_engine.targets import Target, load

TOKENS = 24
REPEATS = 5
PROMPT = [(31 * i * i + 7) % 1900 + 20 for i in range(160)]
HYBRID = {  # qwen3_5 with twice as many value heads as key heads, as the published ones have
    "model_type": "qwen3_5",
    "hidden_size": 384,
    "num_hidden_layers": 8,
    "intermediate_size": 1024,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-6,
    "vocab_size": 8192,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "full_attention_interval": 4,
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {
        "type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
    },
}


@dataclass
class Pair:
    """A target twice, since the authors' package changes the one it is given, and a draft."""

    name: str
    ours: Target
    theirs: Any
    tokenizer: Any
    draft: Path


@dataclass
class Times:
    """Seconds a round, and the tokens that came."""

    rounds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)


def draft_for(target: Target, folder: Path, layers: int) -> Path:
    """A random draft of the published shape: full attention, block 16, five taps."""
    depth = len(target.layers)
    config = tiny.draft_config(
        (tiny.FULL,) * layers,
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        num_attention_heads=target.hidden_size // 64,
        num_key_value_heads=max(1, target.hidden_size // 192),
        head_dim=64,
        intermediate_size=3 * target.hidden_size,
        block_size=16,
        num_target_layers=depth,
        max_position_embeddings=2048,
        dflash_config={
            "target_layer_ids": [round(1 + i * (depth - 4) / 4) for i in range(5)],
            "mask_token_id": 3,
        },
    )
    weights = {
        name: array * (0.1 if array.ndim > 1 else 1.0)
        for name, array in tiny.draft_weights(config).items()
    }
    return tiny.write_draft(folder, config, weights)


def smollm2(models: Path, scratch: Path) -> Pair:
    folder = hub.resolve("smollm2-135m", models)
    ours, other = (load(folder, "smollm2-135m") for _ in range(2))
    draft = draft_for(ours, scratch / "smollm2-draft", 5)
    return Pair("smollm2-135m, dense", ours, other.model, other.tokenizer, draft)


def hybrid(models: Path, scratch: Path) -> Pair:
    folder = scratch / "hybrid"
    folder.mkdir()
    model_class, args = _get_classes(HYBRID)
    mx.random.seed(1)
    model = model_class(args.from_dict(json.loads(json.dumps(HYBRID))))
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(HYBRID))
    tiny.write_tokenizer(folder)
    ours, other = (load(folder, "hybrid") for _ in range(2))
    draft = draft_for(ours, scratch / "hybrid-draft", 5)
    return Pair("qwen3_5, recurrent", ours, other.model, other.tokenizer, draft)


def timed(steps: Any, times: Times, tokens_of: Callable[[Any], list[int]]) -> None:
    last = None
    for step in steps:
        now = time.perf_counter()
        new = tokens_of(step)
        if new and last is not None:
            times.rounds.append(now - last)
        if new:
            last = time.perf_counter()
        times.tokens += new


def ours(pair: Pair, drafter: Drafter | None) -> Times:
    times = Times()
    steps = decode(
        pair.ours,
        drafter,
        PROMPT,
        max_tokens=TOKENS,
        sampler=Sampler(Sampling()),
        prefill_step=2048,
    )
    timed(steps, times, lambda step: step.tokens)
    return times


def theirs(pair: Pair, draft: Any) -> Times:
    times = Times()
    steps = authors.stream_generate(
        pair.theirs, draft, pair.tokenizer, mx.array(PROMPT), max_tokens=TOKENS
    )
    timed(steps, times, lambda step: step.tokens)
    return times


def plain(pair: Pair) -> Times:
    times = Times()
    steps = generate_step(mx.array(PROMPT), pair.ours.model, max_tokens=TOKENS)
    timed(steps, times, lambda step: [int(step[0])])
    return times


class Inside:
    """A drafter that adds up the seconds spent in itself; :meth:`watch` does so for the target."""

    def __init__(self, drafter: Block) -> None:
        self.drafter = drafter
        self.name, self.taps = drafter.name, drafter.taps
        self.seconds = 0.0

    def begin(self, sampling: Sampling, seed: int | None) -> "Inside":
        self.proposer = self.drafter.begin(sampling, seed)
        return self

    def observe(self, features: mx.array) -> None:
        self.proposer.observe(features)

    def judge(self, kept: int, tried: int) -> None:
        self.proposer.judge(kept, tried)

    def snapshot(self) -> None:
        pass

    def restore(self, snapshot: None) -> None:
        pass

    def propose(self, tokens: list[int], most: int, given: int = 0) -> Any:
        started = time.perf_counter()
        draft = self.proposer.propose(tokens, most, given)
        self.seconds += time.perf_counter() - started
        return draft

    @property
    def state(self) -> list[mx.array]:
        return self.proposer.state

    def watch(self, target: Target) -> Callable[[], None]:
        own = target.forward

        def forward(tokens: Any, cache: Any, **more: Any) -> Any:
            started = time.perf_counter()
            logits, features = own(tokens, cache, **more)
            mx.eval(logits, features)
            self.seconds += time.perf_counter() - started
            return logits, features

        target.forward = forward  # type: ignore[method-assign]
        return lambda: vars(target).pop("forward")


def outside(pair: Pair, block: Block) -> float:
    """The share of a round that neither model accounts for."""
    inside = Inside(block)
    unwatch = inside.watch(pair.ours)
    shares = []
    for _ in range(2):
        steps = decode(pair.ours, inside, PROMPT, max_tokens=TOKENS, sampler=Sampler(Sampling()))
        while not next(steps).tokens:
            pass
        inside.seconds, started = 0.0, time.perf_counter()
        for _ in steps:
            pass
        total = time.perf_counter() - started
        shares.append(1 - inside.seconds / total)
    unwatch()
    return min(shares)


def main() -> None:
    parser = argparse.ArgumentParser(description="DFlash rounds beside the authors' package.")
    parser.add_argument("models", nargs="?", type=Path, default=default_models())
    models = parser.parse_args().models
    authors.snapshot_download = lambda path, **_: path
    print("ms a round, ours to theirs above 1 is faster; the draft and its rounds cost the most")
    print("they can here: nearly nothing is accepted\n")
    print(f"{'target':22} {'plain':>7} {'mlx-lm':>7} {'ratio':>6}", end="")
    print(f" {'block':>7} {'authors':>8} {'ratio':>6} {'outside':>8}  same tokens")
    with tempfile.TemporaryDirectory() as scratch:
        for make in (smollm2, hybrid):
            pair = make(models, Path(scratch))
            block = Block(pair.draft, pair.ours)
            draft = authors.load_draft(str(pair.draft))
            runs: dict[str, list[Times]] = {"none": [], "mlx": [], "block": [], "authors": []}
            for _ in range(REPEATS):
                runs["none"].append(ours(pair, None))
                runs["mlx"].append(plain(pair))
                runs["block"].append(ours(pair, block))
                runs["authors"].append(theirs(pair, draft))
            ms = {
                name: 1e3 * median(s for run in times[1:] for s in run.rounds)
                for name, times in runs.items()
            }
            same = len({tuple(run.tokens) for times in runs.values() for run in times}) == 1
            print(
                f"{pair.name:22} {ms['none']:7.1f} {ms['mlx']:7.1f} {ms['mlx'] / ms['none']:6.2f}"
                f" {ms['block']:7.1f} {ms['authors']:8.1f} {ms['authors'] / ms['block']:6.2f}"
                f" {outside(pair, block):8.1%}  {'yes' if same else 'NO'}"
            )


if __name__ == "__main__":
    main()
