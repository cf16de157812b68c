"""The block draft's forward pass beside a second one, written from the description of DFlash 1 in
float64 NumPy and without a cache: each round is computed anew from all features so far.

What packagings differ in is tested here: the authors' package reads its own only.
"""

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import tiny
import tiny_drafts
from tiny_drafts import FULL, SLIDING, Draft

from dflash_engine.drafters.block import Block
from dflash_engine.drafters.context import ROOM
from dflash_engine.sampling import Sampling
from dflash_engine.targets import Target, load


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
    """A draft given in z-lab's packaging. ``from_anchor`` uses all slots; ``head`` is its own."""

    def __init__(
        self,
        draft: Draft,
        target: Target,
        *,
        from_anchor: bool = False,
        head: mx.array | None = None,
        scale: float = 1.0,
    ):
        config, weights = draft
        self.config = config
        self.first = 0 if from_anchor else 1
        self.scale = scale * config["dflash_config"].get("input_embedding_scale", 1.0)
        self.weights = {name: as_double(array) for name, array in weights.items()}
        self.embedding = as_double(target.model.model.embed_tokens.weight)
        if head is None:
            tied = "lm_head" not in target.model
            head = (target.model.model.embed_tokens if tied else target.model.lm_head).weight
        self.head = as_double(head)
        self.theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]

    def linear(self, x: Any, name: str) -> Any:
        return x @ self.weights[f"{name}.weight"].T + self.weights.get(f"{name}.bias", 0.0)

    def norm(self, x: Any, name: str) -> Any:
        return rms(x, self.weights[f"{name}.weight"], self.config["rms_norm_eps"])

    def visible(self, layer: int, rows: int, context: int) -> Any:
        sliding = self.config["layer_types"][layer] == SLIDING
        causal = self.config.get("is_causal", self.config["dflash_config"].get("causal", sliding))
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
        """For the slots of ``block``, given the features of every position before it."""
        own = self.config["dflash_config"]
        x = self.embedding[block] * self.scale
        context = self.norm(self.linear(features, "fc"), "hidden_norm")
        for i in range(self.config["num_hidden_layers"]):
            name = f"layers.{i}"
            x = x + self.attention(self.norm(x, f"{name}.input_layernorm"), context, i)
            y = self.norm(x, f"{name}.post_attention_layernorm")
            gate = silu(self.linear(y, f"{name}.mlp.gate_proj"))
            x = x + self.linear(
                gate * self.linear(y, f"{name}.mlp.up_proj"), f"{name}.mlp.down_proj"
            )
        logits = (
            self.norm(x, "norm")[self.first :] @ self.head.T * own.get("output_multiplier", 1.0)
        )
        cap = own.get("final_logit_softcapping") or self.config.get("final_logit_softcapping")
        return np.tanh(logits / cap) * cap if cap else logits


DRAFTS: dict[str, Draft] = {
    "full": tiny_drafts.zlab(),
    "sliding-then-full": tiny_drafts.zlab((SLIDING, FULL)),
    "all-sliding": tiny_drafts.zlab((SLIDING, SLIDING)),
    "sliding-not-causal": tiny_drafts.zlab((SLIDING, FULL), is_causal=False),
    "all-causal": tiny_drafts.zlab((SLIDING, FULL), is_causal=True),
    "causal-spelled-inside": tiny_drafts.zlab((SLIDING, FULL), dflash_config={"causal": True}),
    "rope-parameters": tiny_drafts.zlab(
        rope_theta=None,
        rope_parameters={
            "rope_theta": 5000.0,
            "rope_type": "proportional",
            "partial_rotary_factor": 0.25,  # of the target: the draft rotates all
        },
    ),
    "biases": tiny_drafts.zlab((SLIDING, FULL), attention_bias=True),
    "scaled": tiny_drafts.zlab(
        dflash_config={
            "input_embedding_scale": 3.0,
            "output_multiplier": 0.5,
            "final_logit_softcapping": 4.0,
        }
    ),
    "softcap-at-top-level": tiny_drafts.zlab(final_logit_softcapping=2.0),
}
# Positions committed before a round, and tokens it drafts. The first is longer than the window.
ROUNDS = [(30, 5), (1, 5), (4, 5), (1, 2), (6, 5), (2, 1), (1, 5), (1, 5), (1, 5), (40, 5), (1, 5)]


@pytest.fixture(params=["llama", "qwen3"])
def target(request: pytest.FixtureRequest) -> Target:
    """One with a tied head and one with its own."""
    return load(getattr(tiny, request.param)(), request.param)


@pytest.fixture
def qwen3() -> Target:
    return load(tiny.qwen3(), "qwen3")


def random_features(random: np.random.Generator, count: int) -> Any:
    return random.normal(size=(count, len(tiny.TAPS) * tiny.HIDDEN)).astype(np.float32)


def compare(block: Block, reference: Reference) -> None:
    contexts = block.model.make_contexts()
    random = np.random.default_rng(4)
    features = random_features(random, 0)
    for committed, count in ROUNDS:
        new = random_features(random, committed)
        features = np.concatenate([features, new])
        anchor = int(random.integers(256))
        masks = [tiny.MASK] * (count - 1 + reference.first)
        block.model.observe(mx.array(new)[None], contexts)
        got = as_double(block.fill([anchor], count, contexts)[1])
        expected = reference.logits([anchor, *masks], features)
        assert got.shape == expected.shape
        assert np.abs(got - expected).max() < 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize("draft", DRAFTS.values(), ids=DRAFTS)
def test_logits_over_rounds_are_the_references(
    tmp_path: Path, target: Target, draft: Draft
) -> None:
    block = Block(tiny.write_draft(tmp_path / "draft", *draft), target)
    compare(block, Reference(draft, target))


def test_causal_and_window_change_the_logits(qwen3: Target) -> None:
    # Or the comparison above could not tell the variants apart.
    features = random_features(np.random.default_rng(4), 30)
    tokens = [65] + [tiny.MASK] * 5
    found = []
    for name in ("full", "sliding-then-full", "all-sliding", "sliding-not-causal", "all-causal"):
        found.append(Reference(DRAFTS[name], qwen3).logits(tokens, features))
    for i, one in enumerate(found):
        assert all(np.abs(one - other).max() > 0.05 for other in found[:i])


def test_deepspec_slots_are_for_the_token_after_their_place(tmp_path: Path, qwen3: Target) -> None:
    draft = tiny_drafts.zlab()
    block = Block(tiny.write_draft(tmp_path / "draft", *tiny_drafts.deepspec(draft)), qwen3)
    assert (block.config.kind, block.config.slots) == ("block7", 6)
    compare(block, Reference(draft, qwen3, from_anchor=True))


def test_speculators_may_have_a_head_over_a_part_of_the_vocabulary(
    tmp_path: Path, qwen3: Target
) -> None:
    kept = sorted(np.random.default_rng(0).choice(tiny.VOCAB, 100, replace=False).tolist())
    draft = tiny_drafts.zlab((SLIDING, FULL))
    config, weights = tiny_drafts.speculators(draft, kept)
    block = Block(tiny.write_draft(tmp_path / "draft", config, weights), qwen3)
    reference = Reference(draft, qwen3, head=weights["lm_head.weight"])
    compare(block, reference)
    features = random_features(np.random.default_rng(1), 20)
    choices = reference.logits([65] + [tiny.MASK] * 5, features).argmax(-1)
    for sampling in (Sampling(), Sampling(temperature=1e-5)):
        proposer = block.begin(sampling, seed=1)
        proposer.observe(mx.array(features)[None])
        assert proposer.propose([65], 9).tokens == [kept[choice] for choice in choices]


def test_a_draft_may_use_a_part_of_the_targets_head(tmp_path: Path, qwen3: Target) -> None:
    kept = sorted(np.random.default_rng(0).choice(tiny.VOCAB, 100, replace=False).tolist())
    config, weights = draft = tiny_drafts.zlab((SLIDING, FULL))
    part = weights | {"d2t": mx.array(kept) - mx.arange(len(kept))}
    block = Block(tiny.write_draft(tmp_path / "draft", config, part), qwen3)
    assert block.config.kind == "dflash"
    features = random_features(np.random.default_rng(1), 20)
    logits = Reference(draft, qwen3).logits([65] + [tiny.MASK] * 5, features)
    choices = logits[..., kept].argmax(-1)
    for sampling in (Sampling(), Sampling(temperature=1e-5)):
        proposer = block.begin(sampling, seed=1)
        proposer.observe(mx.array(features)[None])
        assert proposer.propose([65], 9).tokens == [kept[choice] for choice in choices]


def test_speculators_may_sample_from_the_anchor(tmp_path: Path, qwen3: Target) -> None:
    draft = tiny_drafts.zlab()
    packed = tiny_drafts.speculators(draft, sample_from_anchor=True)
    block = Block(tiny.write_draft(tmp_path / "draft", *packed), qwen3)
    compare(block, Reference(draft, qwen3, from_anchor=True))


@pytest.mark.parametrize(
    "draft",
    [
        tiny_drafts.zlab((SLIDING, FULL)),
        tiny_drafts.zlab((SLIDING, FULL), is_causal=False),
        tiny_drafts.zlab2(),
    ],
    ids=["causal", "not-causal", "dflash2"],
)
def test_a_draft_repacked_as_speculators_is_the_same(tmp_path: Path, draft: Draft) -> None:
    packings = (draft, tiny_drafts.speculators(draft))
    blocks = [
        Block(tiny.write_draft(tmp_path / str(i), *packed), load(tiny.qwen3(), "qwen3"))
        for i, packed in enumerate(packings)
    ]
    assert blocks[1].config.kind == "speculators"
    proposers = [block.begin(Sampling(temperature=1.0), seed=3) for block in blocks]
    contexts = [block.model.make_contexts() for block in blocks]
    random = np.random.default_rng(4)
    for committed, count in ROUNDS:
        new = mx.array(random_features(random, committed))[None]
        logits, tokens = [], []
        for block, proposer, context in zip(blocks, proposers, contexts, strict=True):
            block.model.observe(new, context)
            logits.append(block.fill([7], count, context)[1])
            proposer.observe(new)
            tokens.append(proposer.propose([7], count).tokens)
        assert mx.array_equal(*logits)
        assert tokens[0] == tokens[1]


def test_only_speculators_were_trained_on_an_unscaled_embedding(
    tmp_path: Path, qwen3: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Target, "embedding_scale", 5.0)
    draft = tiny_drafts.zlab()
    block = Block(tiny.write_draft(tmp_path / "zlab", *draft), qwen3)
    compare(block, Reference(draft, qwen3, scale=5.0))
    packed = tiny_drafts.speculators(draft)
    block = Block(tiny.write_draft(tmp_path / "packed", *packed), load(tiny.qwen3(), "qwen3"))
    compare(block, Reference(draft, qwen3, scale=1.0))


def test_a_long_answer_keeps_the_window_only_and_in_order(tmp_path: Path, qwen3: Target) -> None:
    draft = tiny_drafts.zlab((SLIDING, SLIDING))
    window = draft[0]["sliding_window"]
    block = Block(tiny.write_draft(tmp_path / "draft", *draft), qwen3)
    reference = Reference(draft, qwen3)
    random = np.random.default_rng(4)
    features = random_features(random, 4096)
    proposer = block.begin(Sampling(), None)
    most = 0
    for end in range(1, len(features) + 1):
        proposer.observe(mx.array(features[end - 1 : end])[None])
        if end % 128 == 0 or end % 257 == 1:
            tokens = proposer.propose([end % 256], 5).tokens
            if end % 1024 < 260:
                expected = reference.logits([end % 256] + [tiny.MASK] * 5, features[:end])
                assert tokens == expected.argmax(-1).tolist()
        mx.eval(proposer.state)
        most = max(most, *(array.shape[2] for array in proposer.state))
    assert most <= window + ROOM + 6


@pytest.mark.parametrize("where", ["top", "inside"])
def test_proposals_are_the_references_first_choices(
    tmp_path: Path, target: Target, where: str
) -> None:
    options: dict[str, Any] = {"block_size": 5}
    if where == "inside":
        options = {"block_size": None, "dflash_config": {"block_size": 5}}
    draft = tiny_drafts.zlab((SLIDING, FULL), **options)
    block = Block(tiny.write_draft(tmp_path / "draft", *draft), target)
    reference = Reference(draft, target)
    proposer = block.begin(Sampling(), None)
    prompt = target.tokenizer.encode("A prompt that is longer than the window.")
    _, features = target.forward(mx.array(prompt), target.make_cache())
    assert features is not None
    proposer.observe(features)
    for most, count in ((100, 4), (2, 2), (1, 1)):
        proposed = proposer.propose([*prompt, 65], most)
        expected = reference.logits([65] + [tiny.MASK] * count, as_double(features[0]))
        assert proposed.tokens == expected.argmax(-1).tolist()
        assert proposed.distributions is None
    assert proposer.propose([*prompt, 65], 0).tokens == []
