"""A new draft's config and first weights, and what is refused before training starts."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import psutil
import pytest
import tiny
from mlx.utils import tree_flatten

from dflash_engine.drafters import block_checkpoint
from dflash_engine.drafters.block_model import BlockModel
from dflash_engine.errors import NotEnoughMemoryError, TrainingError, UnsupportedDraftError
from dflash_engine.targets import Target, load
from dflash_engine.training import Recipe, Sequence, design, train
from dflash_engine.training.check import check, step_bytes
from dflash_engine.training.design import CALM, initialise, late_layers

DATA = [Sequence([1, 2, 3, 4, 5], 2)]


@pytest.fixture
def target() -> Target:
    return load(tiny.qwen3(), "qwen3")


def initial(target: Target, folder: Path, seed: int = 0, **more: Any) -> dict[str, mx.array]:
    config = block_checkpoint.parse(design(folder, target, **more), "new")
    model = BlockModel(config)
    sources = late_layers(len(config.layer_types), target)
    initialise(model, config, target, sources, seed)
    return dict(tree_flatten(model.parameters()))


def test_a_design_takes_the_targets_sizes(target: Target) -> None:
    config = block_checkpoint.parse(design(tiny.qwen3(), target, layers=3, block_size=5), "new")
    sizes = (config.hidden_size, config.num_attention_heads, config.num_key_value_heads)
    assert sizes == (tiny.HIDDEN, tiny.HEADS, tiny.KV_HEADS)
    assert (config.head_dim, config.intermediate_size) == (tiny.HEAD_DIM, 64)
    assert (config.rope_theta, config.mask_token) == (10000.0, tiny.MASK)
    assert (len(config.layer_types), config.slots) == (3, 4)
    assert set(config.target_layers) < set(range(tiny.LAYERS))
    chosen = design(tiny.qwen3(), target, taps=(0, 3), mask_token=7)["dflash_config"]
    assert chosen == {"target_layer_ids": [0, 3], "mask_token_id": 7}


def test_a_nested_config_is_read_too() -> None:
    folder = tiny.model("gemma3")
    config = block_checkpoint.parse(design(folder, load(folder, "gemma3")), "new")
    assert (config.head_dim, config.vocab_size) == (tiny.HEAD_DIM, tiny.VOCAB)


def test_the_first_weights_are_late_layers_of_the_target(target: Target) -> None:
    weights = initial(target, tiny.qwen3(), taps=tiny.TAPS)
    for i, source in enumerate((0, 1)):  # of four layers
        for name, array in tree_flatten(target.layers[source].parameters()):
            assert mx.array_equal(weights[f"layers.{i}.{name}"], array).item(), name
    assert mx.array_equal(weights["norm.weight"], CALM * target.model.model.norm.weight).item()
    states = mx.random.normal((len(tiny.TAPS), tiny.HIDDEN), key=mx.random.key(0))
    context = weights["fc.weight"] @ states.reshape(-1)
    assert mx.allclose(context, states.mean(axis=0), atol=1e-5).item()


def test_quantised_layers_are_taken_too(target: Target) -> None:
    nn.quantize(target.model, group_size=32, bits=8)
    weights = initial(target, tiny.qwen3())
    dense = load(tiny.qwen3(), "dense").layers[1].mlp.down_proj.weight
    assert mx.abs(weights["layers.1.mlp.down_proj.weight"] - dense).max().item() < 0.02


def test_queries_of_paired_neighbours_are_reordered() -> None:
    # Scores of queries and keys must not change with the way they are rotated.
    folder = tiny.llama(traditional=True)
    target = load(folder, "llama")
    attention = target.layers[1].self_attn
    weights = initial(target, folder)
    x = mx.random.normal((1, 6, tiny.HIDDEN), key=mx.random.key(0))

    def scores(queries: mx.array, keys: mx.array, rope: nn.Module) -> mx.array:
        q, k = (
            rope((x @ w.T).reshape(1, 6, -1, tiny.HEAD_DIM).transpose(0, 2, 1, 3))
            for w in (queries, keys)
        )
        return q[:, ::2] @ k.transpose(0, 1, 3, 2)

    expected = scores(attention.q_proj.weight, attention.k_proj.weight, attention.rope)
    names = [f"layers.1.self_attn.{name}_proj.weight" for name in "qk"]
    own = scores(weights[names[0]], weights[names[1]], nn.RoPE(tiny.HEAD_DIM))
    assert mx.allclose(own, expected, atol=1e-4).item()


def test_where_nothing_fits_weights_are_drawn_by_the_seed() -> None:
    folder = tiny.model("gpt2")
    target = load(folder, "gpt2")
    weights, again, other = (initial(target, folder, seed) for seed in (1, 1, 2))
    drawn = weights["layers.0.mlp.up_proj.weight"]
    assert 0.015 < drawn.std().item() < 0.025
    for name, array in weights.items():
        assert mx.array_equal(array, again[name]).item()
    assert not mx.array_equal(drawn, other["layers.0.mlp.up_proj.weight"]).item()
    assert (weights["layers.0.self_attn.q_norm.weight"] == 1).all().item()


def refused(
    target: Target,
    draft: dict[str, Any],
    training: list[Sequence] = DATA,
    held_out: list[Sequence] = DATA,
    **more: Any,
) -> None:
    recipe = Recipe(**({"anchors": 4} | more))
    check(block_checkpoint.parse(draft, "new"), target, training, held_out, recipe)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"hidden_size": 64}, "its hidden_size is 64, that of qwen3 32"),
        ({"dflash_config": {"target_layer_ids": [1, 4]}}, r"it reads layers \[4\], qwen3 has 4"),
        ({"dflash_config": {"mask_token_id": 999}}, "mask_token_id 999"),
    ],
)
def test_a_draft_that_does_not_fit_is_refused(
    target: Target, more: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UnsupportedDraftError, match=reason):
        refused(target, tiny.draft_config(**more))


@pytest.mark.parametrize(
    "more",
    [
        {"layer_types": (tiny.SLIDING, tiny.FULL)},
        {"is_causal": True},
        {"final_logit_softcapping": 2.0},
        {"dflash_config": {"sample_from_anchor": True}},
        {"dflash_config": {"output_multiplier": 0.5}},
    ],
)
def test_kinds_that_are_not_trained_are_refused(target: Target, more: dict[str, Any]) -> None:
    with pytest.raises(TrainingError, match="only DFlash 1 drafts with full"):
        refused(target, tiny.draft_config(**more))


@pytest.mark.parametrize("empty", ["training", "held_out"])
@pytest.mark.parametrize("data", [[], [Sequence([1, 2, 3], 2)]])
def test_no_data_is_refused(target: Target, empty: str, data: list[Sequence]) -> None:
    with pytest.raises(TrainingError, match=f"among the {len(data)} sequences"):
        refused(target, tiny.draft_config(), **{empty: data})


def test_tokens_of_another_vocabulary_are_refused(target: Target) -> None:
    with pytest.raises(TrainingError, match="token 288, qwen3 only 288"):
        refused(target, tiny.draft_config(), training=[Sequence([1, 288, 3], 1)])
    for vocabulary in ((), (5, 288)):
        with pytest.raises(TrainingError, match="vocabulary to train with"):
            refused(target, tiny.draft_config(), vocabulary=vocabulary)


@pytest.mark.parametrize("sources", [(0,), (0, 1, 2), (0, 4), (-1, 0)])
def test_layers_to_begin_as_that_are_not_there_are_refused(
    target: Target, sources: tuple[int, ...]
) -> None:
    refused(target, tiny.draft_config(), sources=(3, 3))
    with pytest.raises(TrainingError, match="2 layers cannot begin as"):
        refused(target, tiny.draft_config(), sources=sources)


def test_the_layers_a_draft_begins_as_are_late_ones(target: Target) -> None:
    assert late_layers(1, target) == (1,)  # of four
    assert late_layers(3, target) == (0, 0, 1)


def test_what_does_not_fit_into_memory_is_refused(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = block_checkpoint.parse(tiny.draft_config(), "new")
    need = step_bytes(config, 5, 4, tiny.VOCAB)
    # SmolLM2-135M's draft of two layers: 8.4 M parameters.
    big = replace(
        config,
        hidden_size=576,
        intermediate_size=1536,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        block_size=8,
        target_layers=(1, 10, 18, 27),
    )
    assert 2e8 < step_bytes(big, 400, 16, 6254) < 5e8
    memory = psutil.virtual_memory()
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory._replace(available=need))
    refused(target, tiny.draft_config())
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory._replace(available=need - 1))
    with pytest.raises(NotEnoughMemoryError, match="fewer anchors than 4"):
        refused(target, tiny.draft_config())


def test_a_refused_training_leaves_no_trace(target: Target, tmp_path: Path) -> None:
    with pytest.raises(TrainingError):
        train(target, "key", tiny.draft_config(), [], DATA, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    target.tap([0])  # it is not tapped
