"""What is read off a model's files, against what the model takes once it is loaded."""

import json
import shutil
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
import pytest
import tiny
import tiny_drafts
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import dequantize_model, load_model, save_model

from dflash_engine import hub
from dflash_engine.drafters import block_checkpoint, block_model
from dflash_engine.errors import UnsupportedDraftError
from dflash_engine.footprint import Cache, read_block, read_cache, read_model
from dflash_engine.targets import cache

FULL, SLIDING = tiny.FULL, tiny.SLIDING
# Those whose caches are counted exactly: every family with a published draft is among them.
EXACT = (
    *("llama4_text", "mistral", "ministral3", "mixtral", "phi3", "qwen3_moe", "seed_oss", "glm4"),
    *("gemma2", "gemma3", "gemma3_text", "gemma4", "gemma4_text", "gemma4-experts", "gpt_oss"),
    *("qwen3_5", "qwen3_5-nested", "qwen3_5_moe", "qwen3_next", "lfm2", "lfm2_moe", "muse_glimmer"),
    *("deepseek_v3", "exaone4", "cohere2", "olmo3", "step3p5", "minimax"),
)
Precision = Literal["float32", "native"]


def bytes_of(model: nn.Module) -> int:
    return sum(array.nbytes for _, array in tree_flatten(model.parameters()))


@pytest.mark.parametrize("kind", EXACT)
def test_a_model_takes_what_its_files_say(kind: str) -> None:
    folder = tiny.model(kind)
    model, _ = load_model(folder)
    footprint = read_model(folder)
    assert footprint.weights == bytes_of(model)

    real = size_of(cache_of(model, [299, 1]))
    assert footprint.cache.bytes(300, footprint.value_bytes, chunk=1) == real
    assert footprint.context == tiny.CONTEXT


def cache_of(model: nn.Module, steps: list[int], kv_bits: int | None = None) -> list[Any]:
    """The model's cache after reading so many tokens in each step."""
    layers = cache.quantised(model, "it", kv_bits) if kv_bits else make_prompt_cache(model)
    for rows in steps:
        model(mx.array([[5] * rows]), cache=layers)  # not computed: the sizes are known
    return layers


def size_of(layers: list[Any]) -> int:
    return sum(int(leaf.nbytes) for leaf in cache.leaves(layers))


@pytest.mark.parametrize("tokens", [1, 255, 256, 257, 1000])
def test_a_growing_cache_grows_in_steps(tokens: int) -> None:
    model, _ = load_model(tiny.llama())
    footprint = read_model(tiny.llama())
    assert footprint.cache.bytes(tokens, 4) == size_of(cache_of(model, [tokens]))


@pytest.mark.parametrize(("head", "group"), [(64, 64), (32, 32), (8, None)])
@pytest.mark.parametrize("bits", [8, 4])
def test_keys_and_values_in_few_bits(head: int, group: int | None, bits: int) -> None:
    folder = tiny.heads(head) if group else tiny.llama()
    model, _ = load_model(folder)
    counted = read_model(folder).cache
    assert counted.group == group
    real = cache_of(model, [299, 1], bits if group else None)
    assert counted.bytes(300, 4, bits) == size_of(real)


def test_a_chunk_of_a_prompt_lies_behind_a_window() -> None:
    model, _ = load_model(tiny.windowed())
    after_two_chunks = size_of(cache_of(model, [512, 512]))
    assert after_two_chunks == read_model(tiny.windowed()).cache.bytes(1024, 4, chunk=512)
    assert after_two_chunks > size_of(cache_of(model, [512, 512, 1]))


def loaded(folder: Path, precision: Precision) -> nn.Module:
    """As the engine loads it, but for that nothing is computed: MLX knows the sizes before."""
    model, _ = load_model(folder, lazy=True)
    if precision == "float32":
        model.set_dtype(mx.float32)
        dequantize_model(model)
    return model


@pytest.mark.parametrize("precision", ["native", "float32"])
def test_the_weights_and_the_cache_of_smollm2(models: Path, precision: Precision) -> None:
    folder = hub.resolve("smollm2-135m", models)
    footprint, model = read_model(folder, precision), loaded(folder, precision)
    assert footprint.weights == bytes_of(model)
    assert footprint.cache.bytes(20, footprint.value_bytes) == size_of(cache_of(model, [20]))


def test_weights_quantised_in_several_ways(tmp_path: Path) -> None:
    model, config = load_model(tiny.qwen3())
    embedding = {"group_size": 32, "bits": 8}

    def how(path: str, module: nn.Module) -> bool | dict[str, int]:
        return embedding if path == "model.embed_tokens" else hasattr(module, "to_quantized")

    model.set_dtype(mx.bfloat16)
    nn.quantize(model, group_size=32, bits=4, class_predicate=how)
    save_model(tmp_path, model)
    config["quantization"] = {"group_size": 32, "bits": 4, "model.embed_tokens": embedding}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for precision, value_bytes in (("native", 2), ("float32", 4)):
        footprint = read_model(tmp_path, precision)  # type: ignore[arg-type]
        assert footprint.weights == bytes_of(loaded(tmp_path, precision))  # type: ignore[arg-type]
        assert footprint.value_bytes == value_bytes


def test_what_is_not_loaded_is_not_counted(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny.llama(), tmp_path / "it"))
    before = read_model(folder).weights
    weights = mx.load(str(folder / "model.safetensors"))
    assert isinstance(weights, dict)
    for name in ("vision_tower.patch.weight", "mtp.fc.weight", "lm_head.weight"):  # it is tied
        weights[name] = mx.zeros((100, 100))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    assert read_model(folder).weights == before


DRAFTS = {
    "z-lab": tiny_drafts.zlab,
    "sliding": lambda: tiny_drafts.zlab((SLIDING, FULL)),
    "dflash2": tiny_drafts.zlab2,
    "block7": lambda: tiny_drafts.deepspec(tiny_drafts.zlab()),
}


@pytest.mark.parametrize("precision", ["native", "float32"])
@pytest.mark.parametrize("bits", [None, 8, 4])
@pytest.mark.parametrize("name", DRAFTS)
def test_a_draft_takes_what_its_files_say(
    tmp_path: Path, name: str, bits: int | None, precision: Precision
) -> None:
    config, weights = DRAFTS[name]()
    halves = {
        name: array.astype(mx.bfloat16) if array.dtype == mx.float32 else array
        for name, array in weights.items()
    }
    folder = tiny.write_draft(tmp_path / "draft", config, halves)
    footprint = read_block(folder, precision, bits)
    dtype = mx.float32 if precision == "float32" else None
    model = block_model.build(block_checkpoint.read(folder), dtype, bits)
    assert footprint.weights == bytes_of(model)
    assert footprint.value_bytes == (4 if precision == "float32" else 2)
    assert footprint.taps == len(tiny.TAPS)
    contexts = model.make_contexts()
    features = mx.zeros((1, 100, footprint.taps * tiny.HIDDEN), dtype or mx.bfloat16)
    model.observe(features, contexts)
    held = sum(array.nbytes for context in contexts for array in context.arrays)
    counted = footprint.cache.bytes(100, footprint.value_bytes)
    assert held <= 2 * counted  # it allocates ahead by its own steps
    assert footprint.cache.growing + footprint.cache.windowed == 2 * 2 * 2 * 16


def test_a_draft_that_cannot_be_run_has_no_footprint(tmp_path: Path) -> None:
    config = tiny.draft_config(architectures=["EagleModel"])
    folder = tiny.write_draft(tmp_path / "draft", config, tiny.draft_weights(tiny.draft_config()))
    with pytest.raises(UnsupportedDraftError, match="EagleModel"):
        read_block(folder)


BASE = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "hidden_size": 256}


@pytest.mark.parametrize(
    ("config", "kept"),
    [
        ({"num_hidden_layers": 3}, Cache(3 * 256)),
        ({"num_hidden_layers": 3, "head_dim": None}, Cache(3 * 256)),
        ({"num_hidden_layers": 3, "num_key_value_heads": None}, Cache(3 * 512)),
        (
            {"num_hidden_layers": 4, "sliding_window": 32, "sliding_window_pattern": 2},
            Cache(2 * 256, 2 * 256, 32),
        ),
        # Without a pattern a window is one that mlx-lm does not use.
        ({"num_hidden_layers": 4, "sliding_window": 32}, Cache(4 * 256)),
        (
            {
                "num_hidden_layers": 4,
                "sliding_window": 32,
                "layer_types": [SLIDING, FULL] * 2,
                "num_kv_shared_layers": 1,
            },
            Cache(256, 2 * 256, 32),
        ),
        (
            {"num_hidden_layers": 3, "conv_L_cache": 3, "full_attn_idxs": [1]},
            Cache(256, convolutions=2 * 2 * 256),
        ),
        ({"num_hidden_layers": 3, "hybrid_override_pattern": "M*-"}, Cache(256)),
        (
            {"num_hidden_layers": 4, "model_type": "gpt_oss", "sliding_window": 8},
            Cache(512, 512, 8),
        ),
        ({}, Cache(0)),
    ],
)
def test_spellings_of_layers(config: dict[str, Any], kept: Cache) -> None:
    assert read_cache(BASE | config) == kept
