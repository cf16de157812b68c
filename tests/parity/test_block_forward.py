"""The block draft's forward pass beside a second one, written from the description of DFlash 1 in
float64 NumPy and without a cache: each round is computed anew from all features so far.
"""

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import tiny
from mlx_lm.models.cache import KVCache

from dflash_engine.drafters.block import Block
from dflash_engine.sampling import Sampling
from dflash_engine.targets import Target, load

FULL, SLIDING = tiny.FULL, tiny.SLIDING


def as_double(array: mx.array) -> Any:
    return np.array(array, dtype=np.float64)


def rms(x: Any, weight: Any, eps: float) -> Any:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def silu(x: Any) -> Any:
    return x / (1 + np.exp(-x))


def rotate(x: Any, positions: Any, theta: float) -> Any:
    """``x`` [rows, heads, dim]: the first half of the dimensions is paired with the second."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * theta ** (-np.arange(half) / half)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    first, second = x[..., :half], x[..., half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


class Reference:
    def __init__(self, config: dict[str, Any], weights: dict[str, mx.array], target: Target):
        self.config = config
        self.weights = {name: as_double(array) for name, array in weights.items()}
        self.embedding = as_double(target.model.model.embed_tokens.weight)
        head = (
            target.model.lm_head if "lm_head" in target.model else target.model.model.embed_tokens
        )
        self.head = as_double(head.weight)
        self.theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]

    def linear(self, x: Any, name: str) -> Any:
        return x @ self.weights[f"{name}.weight"].T

    def norm(self, x: Any, name: str) -> Any:
        return rms(x, self.weights[f"{name}.weight"], self.config["rms_norm_eps"])

    def visible(self, layer: int, rows: int, context: int) -> Any:
        sliding = self.config["layer_types"][layer] == SLIDING
        causal = self.config.get("is_causal", sliding)
        seen = np.zeros((rows, context + rows), dtype=bool)
        for row in range(rows):
            for key in range(context + rows):
                if key < context:
                    near = context + row - key < self.config.get("sliding_window", 0)
                    seen[row, key] = near or not sliding
                else:
                    seen[row, key] = not causal or key - context <= row
        return seen

    def attention(self, x: Any, context: Any, layer: int) -> Any:
        name, head = f"layers.{layer}.self_attn", self.config["head_dim"]
        rows, known = len(x), len(context)

        def heads(y: Any, projection: str) -> Any:
            return self.linear(y, f"{name}.{projection}_proj").reshape(len(y), -1, head)

        places = np.arange(known + rows)
        both = np.concatenate([context, x])
        q = rotate(self.norm(heads(x, "q"), f"{name}.q_norm"), places[known:], self.theta)
        k = rotate(self.norm(heads(both, "k"), f"{name}.k_norm"), places, self.theta)
        v = heads(both, "v")
        share = q.shape[1] // k.shape[1]
        k, v = k.repeat(share, axis=1), v.repeat(share, axis=1)
        scores = np.einsum("rhd,khd->hrk", q, k) / np.sqrt(head)
        scores = np.where(self.visible(layer, rows, known), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        mixed = np.einsum("hrk,khd->rhd", weights, v).reshape(rows, -1)
        return self.linear(mixed, f"{name}.o_proj")

    def logits(self, block: list[int], features: Any) -> Any:
        """For the masks of ``block``, given the features of every position before it."""
        own = self.config["dflash_config"]
        x = self.embedding[block] * own.get("input_embedding_scale", 1.0)
        context = self.norm(self.linear(features, "fc"), "hidden_norm")
        for i in range(self.config["num_hidden_layers"]):
            name = f"layers.{i}"
            x = x + self.attention(self.norm(x, f"{name}.input_layernorm"), context, i)
            y = self.norm(x, f"{name}.post_attention_layernorm")
            gate = silu(self.linear(y, f"{name}.mlp.gate_proj"))
            x = x + self.linear(
                gate * self.linear(y, f"{name}.mlp.up_proj"), f"{name}.mlp.down_proj"
            )
        logits = self.norm(x, "norm")[1:] @ self.head.T * own.get("output_multiplier", 1.0)
        cap = own.get("final_logit_softcapping") or self.config.get("final_logit_softcapping")
        return np.tanh(logits / cap) * cap if cap else logits


CONFIGS: dict[str, dict[str, Any]] = {
    "full": {"layer_types": (FULL, FULL)},
    "sliding-then-full": {"layer_types": (SLIDING, FULL)},
    "all-sliding": {"layer_types": (SLIDING, SLIDING)},
    "sliding-not-causal": {"layer_types": (SLIDING, FULL), "is_causal": False},
    "all-causal": {"layer_types": (SLIDING, FULL), "is_causal": True},
    "rope-parameters": {
        "rope_theta": None,
        "rope_parameters": {"rope_theta": 5000.0, "rope_type": "default"},
    },
    "scaled": {
        "dflash_config": {
            "input_embedding_scale": 3.0,
            "output_multiplier": 0.5,
            "final_logit_softcapping": 4.0,
        }
    },
    "softcap-at-top-level": {"final_logit_softcapping": 2.0},
}


@pytest.fixture(params=["llama", "qwen3"])
def target(request: pytest.FixtureRequest) -> Target:
    """One with a tied head and one with its own."""
    return load(getattr(tiny, request.param)(), request.param)


def make(tmp_path: Path, target: Target, options: dict[str, Any]) -> tuple[Block, Reference]:
    config = tiny.draft_config(**options)
    weights = tiny.draft_weights(config)
    block = Block(tiny.write_draft(tmp_path / "draft", config, weights), target)
    return block, Reference(config, weights, target)


@pytest.mark.parametrize("options", CONFIGS.values(), ids=CONFIGS)
def test_logits_over_rounds_are_the_references(
    tmp_path: Path, target: Target, options: dict[str, Any]
) -> None:
    block, reference = make(tmp_path, target, options)
    cache = [KVCache() for _ in block.model.layers]
    random = np.random.default_rng(4)
    features = np.zeros((0, len(tiny.TAPS) * tiny.HIDDEN))
    # The prompt is longer than the window; then rounds that committed 1 to 6 positions.
    for committed, rows in [(30, 6), (1, 6), (4, 6), (1, 3), (6, 6), (2, 2), (1, 6)]:
        new = random.normal(size=(committed, features.shape[1])).astype(np.float32)
        features = np.concatenate([features, new])
        tokens = [int(random.integers(256))] + [tiny.MASK] * (rows - 1)
        got = as_double(block.logits(mx.array(tokens), mx.array(new)[None], cache))
        expected = reference.logits(tokens, features)
        assert got.shape == expected.shape == (rows - 1, tiny.VOCAB)
        assert np.abs(got - expected).max() < 1e-3 * np.abs(expected).max()
    assert {layer.offset for layer in cache} == {len(features)}, "the block's rows are not kept"


def test_causal_and_window_change_the_logits(tmp_path: Path, target: Target) -> None:
    # Or the comparison above could not tell the variants apart.
    random = np.random.default_rng(4)
    features = random.normal(size=(30, len(tiny.TAPS) * tiny.HIDDEN))
    tokens = [65] + [tiny.MASK] * 5
    found = []
    for name in ("full", "sliding-then-full", "all-sliding", "sliding-not-causal", "all-causal"):
        config = tiny.draft_config(**CONFIGS[name])
        reference = Reference(config, tiny.draft_weights(config), target)
        found.append(reference.logits(tokens, features))
    for i, one in enumerate(found):
        assert all(np.abs(one - other).max() > 0.05 for other in found[:i])


@pytest.mark.parametrize("where", ["top", "inside"])
def test_proposals_are_the_references_first_choices(
    tmp_path: Path, target: Target, where: str
) -> None:
    options: dict[str, Any] = {"layer_types": (SLIDING, FULL)}
    if where == "top":
        options["block_size"] = 5
    else:
        options |= {"block_size": None, "dflash_config": {"block_size": 5}}
    block, reference = make(tmp_path, target, options)
    proposer = block.begin(Sampling(), None)
    prompt = target.tokenizer.encode("A prompt that is longer than the window.")
    _, features = target.forward(mx.array(prompt), target.make_cache())
    assert features is not None
    for most, count in ((100, 4), (2, 2)):
        draft = (proposer if most == 100 else block.begin(Sampling(), None)).propose(
            [*prompt, 65], features, most
        )
        expected = reference.logits([65] + [tiny.MASK] * count, as_double(features[0]))
        assert draft.tokens == expected.argmax(-1).tolist()
        assert draft.probabilities is None
