"""What a draft folder may not be: each refusal names the reason."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import tiny

from dflash_engine.drafters import block_model
from dflash_engine.drafters.block import Block
from dflash_engine.errors import UnsupportedDraftError, UnsupportedTargetError
from dflash_engine.targets import load


def refused(tmp_path: Path, reason: str, **config: Any) -> None:
    folder = tiny.write_draft(tmp_path / "draft", tiny.draft_config(**config), {})
    with pytest.raises(UnsupportedDraftError, match=reason):
        block_model.load(folder)


def test_dflash_2(tmp_path: Path) -> None:
    refused(tmp_path, "DFlash2DraftModel.*DFlash 1", architectures=["DFlash2DraftModel"])


def test_no_architecture(tmp_path: Path) -> None:
    refused(tmp_path, "architecture not named", architectures=None)


@pytest.mark.parametrize(
    "key", ["hidden_size", "head_dim", "rms_norm_eps", "vocab_size", "num_hidden_layers"]
)
def test_a_missing_key(tmp_path: Path, key: str) -> None:
    refused(tmp_path, f"draft: config.json lacks '{key}'", **{key: None})


@pytest.mark.parametrize("key", ["target_layer_ids", "mask_token_id"])
def test_a_missing_key_of_dflash(tmp_path: Path, key: str) -> None:
    config = tiny.draft_config()
    del config["dflash_config"][key]
    folder = tmp_path / "draft"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedDraftError, match=f"lacks '{key}'"):
        block_model.load(folder)


@pytest.mark.parametrize(
    ("reason", "config"),
    [
        ("layer_types", {"num_hidden_layers": 3}),
        ("layer_types.*linear_attention", {"layer_types": [tiny.FULL, "linear_attention"]}),
        ("sliding_window", {"layer_types": (tiny.SLIDING, tiny.FULL), "sliding_window": None}),
        ("attention_bias", {"attention_bias": True}),
        ("block_size 1", {"block_size": 1}),
        ("target_layer_ids is empty", {"dflash_config": {"target_layer_ids": []}}),
        ("hidden_size|many|invalid", {"hidden_size": "many"}),
        ("sizes|int", {"hidden_size": [32]}),
        ("config.json", {"dflash_config": {"target_layer_ids": 3}}),
        ("spiral", {"rope_scaling": {"type": "spiral"}}),
        ("factor", {"rope_scaling": {"type": "linear"}}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_value_that_makes_no_sense(tmp_path: Path, reason: str, config: dict[str, Any]) -> None:
    refused(tmp_path, reason, **config)


@pytest.mark.parametrize("text", ["{", "[]", "null", "\x00"])
def test_a_config_that_is_no_object(tmp_path: Path, text: str) -> None:
    folder = tmp_path / "draft"
    folder.mkdir()
    (folder / "config.json").write_text(text)
    with pytest.raises(UnsupportedDraftError, match="draft"):
        block_model.load(folder)


def test_a_folder_without_config_or_weights(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedDraftError, match="no draft in"):
        block_model.load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(tiny.draft_config()))
    with pytest.raises(UnsupportedDraftError, match=r"no .safetensors"):
        block_model.load(tmp_path)


def test_weights_that_are_no_safetensors(tmp_path: Path) -> None:
    folder = tiny.write_draft(tmp_path / "draft", tiny.draft_config())
    (folder / "model.safetensors").write_bytes(b"not tensors at all")
    with pytest.raises(UnsupportedDraftError, match="cannot be loaded"):
        block_model.load(folder)


Weights = dict[str, mx.array]


def _without(name: str) -> Callable[[Weights], Weights]:
    return lambda weights: {key: array for key, array in weights.items() if key != name}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (_without("fc.weight"), r"fc\.weight: None"),
        (_without("layers.1.self_attn.k_norm.weight"), "k_norm"),
        (lambda w: w | {"lm_head.weight": mx.zeros((4, 4))}, r"lm_head\.weight.*expected None"),
        (lambda w: w | {"fc.weight": mx.zeros((tiny.HIDDEN, tiny.HIDDEN))}, r"fc\.weight"),
        (lambda w: {f"model.{key}": array for key, array in w.items()}, "50 tensors"),
    ],
    ids=["missing", "missing-deep", "extra", "wrong-shape", "prefixed"],
)
def test_tensors_that_do_not_fit(
    tmp_path: Path, change: Callable[[Weights], Weights], named: str
) -> None:
    config = tiny.draft_config()
    folder = tiny.write_draft(tmp_path / "draft", config, change(tiny.draft_weights(config)))
    with pytest.raises(UnsupportedDraftError, match=named):
        block_model.load(folder)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"hidden_size": 40}, "hidden_size 40.*llama has 32"),
        ({"vocab_size": 300}, "vocab_size 300.*llama has 288"),
        ({"dflash_config": {"target_layer_ids": [0, 4, 9]}}, r"layers \[4, 9\], llama has 4"),
        ({"dflash_config": {"target_layer_ids": [-1]}}, r"\[-1\]"),
        ({"dflash_config": {"mask_token_id": 288}}, "mask_token_id 288"),
    ],
    ids=["hidden-size", "vocabulary", "layers", "negative-layer", "mask"],
)
def test_a_draft_of_another_target(tmp_path: Path, config: dict[str, Any], named: str) -> None:
    target = load(tiny.llama(), "llama")
    folder = tiny.write_draft(tmp_path / "draft", tiny.draft_config(**config))
    with pytest.raises(UnsupportedDraftError, match=named):
        Block(folder, target)
    Block(tiny.draft(), target)  # what was refused left the target as it was


def test_a_second_draft_on_one_target() -> None:
    target = load(tiny.llama(), "llama")
    Block(tiny.draft(), target)
    with pytest.raises(UnsupportedTargetError, match="tapped already"):
        Block(tiny.draft(), target)


def test_weights_in_several_files_are_one_draft(tmp_path: Path) -> None:
    config = tiny.draft_config()
    weights = tiny.draft_weights(config)
    folder = tiny.write_draft(tmp_path / "draft", config, {})
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    for i, part in enumerate((names[:9], names[9:])):
        mx.save_safetensors(
            str(folder / f"model-{i}.safetensors"), {name: weights[name] for name in part}
        )
    _, model = block_model.load(folder)
    assert mx.array_equal(model.fc.weight, weights["fc.weight"])


def test_the_block_size_defaults_to_sixteen(tmp_path: Path) -> None:
    folder = tiny.write_draft(tmp_path / "draft", tiny.draft_config(block_size=None))
    assert block_model.load(folder)[0].block_size == 16
