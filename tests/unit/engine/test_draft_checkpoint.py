"""What a draft folder may be, and what it may not: each refusal names the folder and the reason."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
import tiny
import tiny_drafts
from mlx.utils import tree_flatten
from tiny_drafts import FULL, SLIDING, Draft

from dflash_engine.drafters import block_checkpoint, block_model
from dflash_engine.drafters.block import Block
from dflash_engine.drafters.block_checkpoint import BlockConfig
from dflash_engine.drafters.block_model import BlockModel
from dflash_engine.drafters.kind import kind_of
from dflash_engine.errors import UnsupportedDraftError, UnsupportedTargetError
from dflash_engine.sampling import Sampling
from dflash_engine.targets import Target, load


def read(tmp_path: Path, config: Any) -> BlockConfig:
    folder = tmp_path / "draft"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), {})
    return block_checkpoint.read(folder).config


def build(folder: Path) -> BlockModel:
    return block_model.build(block_checkpoint.read(folder))


def refused(tmp_path: Path, reason: str, config: Any) -> None:
    with pytest.raises(UnsupportedDraftError, match=f"draft.*{reason}") as refusal:
        read(tmp_path, config)
    assert "lookup" in str(refusal.value), "what to do"


@pytest.mark.parametrize(
    "name",
    ["Gemma4DSparkModel", "DSparkDraftModel", "DominoDraftModel", "LlamaForCausalLMEagle3"],
)
def test_another_architecture(tmp_path: Path, name: str) -> None:
    refused(tmp_path, f"{name}.*DFlash2DraftModel", tiny.draft_config(architectures=[name]))


def test_no_architecture(tmp_path: Path) -> None:
    refused(tmp_path, "architecture not named", tiny.draft_config(architectures=None))


@pytest.mark.parametrize("algorithm", ["dspark", "eagle3", "mtp"])
def test_another_algorithm_of_speculators(tmp_path: Path, algorithm: str) -> None:
    config, _ = tiny_drafts.speculators(tiny_drafts.zlab(), speculators_model_type=algorithm)
    refused(tmp_path, f"speculators_model_type {algorithm}", config)


def test_layers_of_an_unknown_kind(tmp_path: Path) -> None:
    config, _ = tiny_drafts.speculators(tiny_drafts.zlab())
    config["transformer_layer_config"]["model_type"] = "mamba"
    refused(tmp_path, "model_type mamba", config)


@pytest.mark.parametrize(
    "key", ["hidden_size", "head_dim", "rms_norm_eps", "vocab_size", "num_hidden_layers"]
)
def test_a_missing_key(tmp_path: Path, key: str) -> None:
    refused(tmp_path, f"config.json lacks '{key}'", tiny.draft_config(**{key: None}))


@pytest.mark.parametrize("key", ["conv_kernel_size", "selector_top_k", "mask_token_id"])
def test_a_missing_key_of_dflash(tmp_path: Path, key: str) -> None:
    config, _ = tiny_drafts.zlab2()
    del config["dflash_config"][key]
    refused(tmp_path, f"lacks '{key}'", config)


@pytest.mark.parametrize("key", ["aux_hidden_state_layer_ids", "transformer_layer_config"])
def test_a_missing_key_of_speculators(tmp_path: Path, key: str) -> None:
    config, _ = tiny_drafts.speculators(tiny_drafts.zlab())
    del config[key]
    refused(tmp_path, f"lacks '{key}'", config)


@pytest.mark.parametrize("key", ["target_layer_ids", "mask_token_id", "block_size"])
def test_a_missing_key_of_deepspec(tmp_path: Path, key: str) -> None:
    config, _ = tiny_drafts.deepspec(tiny_drafts.zlab())
    del config[key]
    refused(tmp_path, f"lacks '{key}'", config)


@pytest.mark.parametrize(
    ("reason", "more"),
    [
        ("layer_types", {"num_hidden_layers": 3}),
        ("layer_types.*linear_attention", {"layer_types": [FULL, "linear_attention"]}),
        ("4 heads do not share 3", {"num_key_value_heads": 3}),
        ("zero", {"num_key_value_heads": 0}),
        ("0 layers", {"layer_types": ()}),
        ("sliding_window None", {"layer_types": (SLIDING, FULL), "sliding_window": None}),
        ("sliding_window 1", {"layer_types": (SLIDING, FULL), "sliding_window": 1}),
        ("block_size 1", {"block_size": 1}),
        ("target_layer_ids is empty", {"dflash_config": {"target_layer_ids": []}}),
        ("hidden_size|many|invalid", {"hidden_size": "many"}),
        ("not 'list'", {"hidden_size": [32]}),
        ("config.json", {"dflash_config": {"target_layer_ids": 3}}),
        ("rope_parameters differ", {"rope_parameters": {FULL: {"rope_theta": 1e6}}}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_value_that_makes_no_sense(tmp_path: Path, reason: str, more: dict[str, Any]) -> None:
    refused(tmp_path, reason, tiny.draft_config(**more))


@pytest.mark.parametrize(
    "more",
    [
        {"hidden_act": "gelu"},
        {"is_neox_style": False},
        {"logit_scale": 0.5},
        {"quantization": {"bits": 4, "group_size": 64}},
        {"quantization_config": {"quant_method": "compressed-tensors"}},
        {"markov_rank": 256},
        {"enable_confidence_head": True},
        {"hc_mult": 4},
        {"target_hidden_size": 64},
        {"dflash_config": {"projector_type": "domino"}},
        {"dflash_config": {"shift_label": True}},
        {"dflash_config": {"use_swa": True}},
        {"dflash_config": {"attention_sink_bias": True}},
    ],
    ids=str,
)
def test_what_would_change_the_forward_pass(tmp_path: Path, more: dict[str, Any]) -> None:
    name = next(iter(more.get("dflash_config", more)))
    refused(tmp_path, f"{name} is", tiny.draft_config(**more))


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("conv_group_size", 5, "conv_group_size 5 does not divide 32"),
        ("conv_group_size", 0, "zero"),
        ("selector_top_k", 0, "selector_top_k 0"),
        ("selector_top_k", 289, "selector_top_k 289"),
    ],
)
def test_sizes_of_dflash_2_that_do_not_fit(
    tmp_path: Path, key: str, value: int, reason: str
) -> None:
    config, _ = tiny_drafts.zlab2(dflash_config={key: value})
    refused(tmp_path, reason, config)


@pytest.mark.parametrize("rope", [{"type": "spiral"}, {"type": "linear"}, {"type": "mrope"}])
def test_a_rope_that_is_not_known(tmp_path: Path, rope: dict[str, Any]) -> None:
    folder = tiny.write_draft(tmp_path / "draft", *tiny_drafts.zlab(rope_scaling=rope))
    with pytest.raises(UnsupportedDraftError, match=r"draft.*its rope"):
        build(folder)


@pytest.mark.parametrize("text", ["{", "[]", "null", "3", "\x00", "\xff"])
def test_a_config_that_is_no_object(tmp_path: Path, text: str) -> None:
    folder = tmp_path / "draft"
    folder.mkdir()
    (folder / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(UnsupportedDraftError, match="draft"):
        block_checkpoint.read(folder)


def test_a_folder_without_config_or_weights(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedDraftError, match="no draft in"):
        block_checkpoint.read(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(tiny.draft_config()))
    with pytest.raises(UnsupportedDraftError, match=r"no .safetensors"):
        block_checkpoint.read(tmp_path)


def test_an_embedding_of_masks_of_its_own(tmp_path: Path) -> None:
    folder = tiny.write_draft(tmp_path / "draft", *tiny_drafts.zlab())
    (folder / "mask_embedding.pt").write_bytes(b"")
    with pytest.raises(UnsupportedDraftError, match=r"draft.*mask_embedding\.pt"):
        block_checkpoint.read(folder)


@pytest.mark.parametrize("share", [0.0, 0.0001, 0.02, 0.5, 0.9999])
def test_weights_that_are_cut_off(tmp_path: Path, share: float) -> None:
    folder = tiny.write_draft(tmp_path / "draft", *tiny_drafts.zlab())
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[: int(len(whole) * share)])
    target = load(tiny.llama(), "llama")
    with pytest.raises(UnsupportedDraftError, match="draft draft cannot be run"):
        Block(folder, target)
    Block(tiny.draft(), target)  # what was refused left the target as it was


def test_weights_that_are_damaged(tmp_path: Path) -> None:
    folder = tiny.write_draft(tmp_path / "draft", *tiny_drafts.zlab())
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    for start in range(0, 400, 16):
        file.write_bytes(whole[:start] + b"\xff" * 16 + whole[start + 16 :])
        with pytest.raises(UnsupportedDraftError, match="draft draft cannot be run"):
            build(folder)


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
        (lambda w: w | {"norm.weight": mx.zeros((tiny.HIDDEN,), mx.int32)}, "norm.*int32"),
        (lambda w: w | {"layers.0.self_attn.q_proj.bias": mx.zeros((64,))}, "q_proj.bias"),
        (lambda w: w | {"markov_head.markov_w1.weight": mx.zeros((4, 4))}, "markov_head"),
        (lambda w: {f"model.{key}": array for key, array in w.items()}, "50 tensors"),
    ],
    ids=["missing", "deep", "extra", "shape", "integers", "bias", "markov", "prefixed"],
)
@pytest.mark.parametrize("pack", [lambda draft: draft, tiny_drafts.deepspec])
def test_tensors_that_do_not_fit(
    tmp_path: Path,
    pack: Callable[[Draft], Draft],
    change: Callable[[Weights], Weights],
    named: str,
) -> None:
    config, weights = tiny_drafts.zlab()
    changed = change(weights)
    if pack is tiny_drafts.deepspec and "lm_head.weight" in changed:
        named = "head is over 4 of 288 tokens"
        config, _ = pack((config, weights))
    else:
        config, changed = pack((config, changed))
    folder = tiny.write_draft(tmp_path / "draft", config, changed)
    with pytest.raises(UnsupportedDraftError, match=f"draft.*{named}"):
        build(folder)


def _replaced(**more: mx.array) -> Callable[[Weights], Weights]:
    return lambda weights: weights | more


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (_without("d2t"), "head is over 3 of 288"),
        (_without("lm_head.weight"), r"lm_head\.weight: None"),
        (_replaced(d2t=mx.array([9, 7, 5])), "d2t does not pick"),
        (_replaced(d2t=mx.array([-1, 8, 17])), "d2t does not pick"),
        (_replaced(d2t=mx.array([9, 18, 286])), "d2t does not pick"),
        (_replaced(d2t=mx.array([9, 18])), "t2d do not agree"),
        (_replaced(d2t=mx.array([], mx.int64)), "d2t does not pick"),
        (_replaced(t2d=mx.zeros((288,), mx.bool_)), "t2d do not agree"),
    ],
    ids=["none", "headless", "falls", "negative", "beyond", "short", "empty", "disagrees"],
)
def test_a_table_of_tokens_that_does_not_fit(
    tmp_path: Path, change: Callable[[Weights], Weights], named: str
) -> None:
    config, weights = tiny_drafts.speculators(tiny_drafts.zlab(), [9, 19, 30])
    folder = tiny.write_draft(tmp_path / "draft", config, change(weights))
    with pytest.raises(UnsupportedDraftError, match=f"draft.*{named}"):
        build(folder)


def test_a_selector_beside_a_reduced_head(tmp_path: Path) -> None:
    packed = tiny_drafts.speculators(tiny_drafts.zlab2(), [9, 19, 30])
    folder = tiny.write_draft(tmp_path / "draft", *packed)
    with pytest.raises(UnsupportedDraftError, match=r"draft.*whole vocabulary"):
        build(folder)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"hidden_size": 40}, "hidden_size is 40, that of llama 32"),
        ({"vocab_size": 300}, "vocab_size is 300, that of llama 288"),
        ({"num_target_layers": 36}, "num_target_layers is 36, that of llama 4"),
        ({"dflash_config": {"target_layer_ids": [0, 4, 9]}}, r"layers \[4, 9\], llama has 4"),
        ({"dflash_config": {"target_layer_ids": [-1]}}, r"\[-1\]"),
        ({"dflash_config": {"mask_token_id": 288}}, "mask_token_id 288"),
    ],
    ids=["hidden-size", "vocabulary", "depth", "layers", "negative-layer", "mask"],
)
def test_a_draft_of_another_target(tmp_path: Path, config: dict[str, Any], named: str) -> None:
    target = load(tiny.llama(), "llama")
    folder = tiny.write_draft(tmp_path / "draft", tiny.draft_config(**config))
    with pytest.raises(UnsupportedDraftError, match=f"draft.*{named}"):
        Block(folder, target)
    Block(tiny.draft(), target)  # what was refused left the target as it was


def test_speculators_taps_of_the_embedding(tmp_path: Path) -> None:
    packed = tiny_drafts.speculators(tiny_drafts.zlab(), aux_hidden_state_layer_ids=[0, 2, 3])
    folder = tiny.write_draft(tmp_path / "draft", *packed)
    with pytest.raises(UnsupportedDraftError, match=r"layers \[-1\]"):
        Block(folder, load(tiny.llama(), "llama"))


def test_a_second_draft_on_one_target() -> None:
    target = load(tiny.llama(), "llama")
    Block(tiny.draft(), target)
    with pytest.raises(UnsupportedTargetError, match="tapped already"):
        Block(tiny.draft(), target)


def test_weights_in_several_files_are_one_draft(tmp_path: Path) -> None:
    config, weights = tiny_drafts.zlab()
    folder = tiny.write_draft(tmp_path / "draft", config, {})
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    for i, part in enumerate((names[:9], names[9:])):
        mx.save_safetensors(
            str(folder / f"model-{i}.safetensors"), {name: weights[name] for name in part}
        )
    assert mx.array_equal(build(folder).fc.weight, weights["fc.weight"])


def test_the_block_size_defaults_to_sixteen(tmp_path: Path) -> None:
    config = read(tmp_path, tiny.draft_config(block_size=None))
    assert (config.block_size, config.slots) == (16, 15)


@pytest.mark.parametrize(
    ("depth", "layers", "taps"),
    [(36, 5, (1, 9, 17, 25, 33)), (64, 5, (1, 16, 31, 46, 61)), (32, 1, (16,)), (28, 2, (1, 25))],
)
def test_taps_that_are_not_named_are_spread(
    tmp_path: Path, depth: int, layers: int, taps: tuple[int, ...]
) -> None:
    own = {"target_layer_ids": None}
    config = tiny.draft_config((FULL,) * layers, num_target_layers=depth, dflash_config=own)
    assert read(tmp_path, config).target_layers == taps


def test_nulls_are_as_good_as_nothing(tmp_path: Path) -> None:
    keys = ("rope_scaling", "rope_parameters", "layer_types", "is_causal", "sliding_window")
    config = read(tmp_path, tiny.draft_config() | dict.fromkeys(keys))
    assert config.layer_types == (FULL, FULL)
    assert (config.rope_scaling, config.is_causal, config.sliding_window) == (None, None, None)


@pytest.mark.parametrize(
    ("pack", "theta"),
    [
        (lambda draft: draft, 5e5),
        (tiny_drafts.deepspec, 1e6),
        (tiny_drafts.speculators, 1e6),
    ],
    ids=["zlab", "deepspec", "speculators"],
)
def test_of_two_thetas_each_packaging_means_its_own(
    tmp_path: Path, pack: Callable[[Draft], Draft], theta: float
) -> None:
    rope = {"rope_type": "default", "rope_theta": 1e6}
    config, _ = pack(tiny_drafts.zlab(rope_theta=5e5, rope_parameters=rope))
    assert read(tmp_path, config).rope_theta == theta


@pytest.mark.parametrize(
    ("model_type", "expected"), [("qwen3", (32, 32, 128)), ("llama", (16, 16, 2))]
)
def test_speculators_leave_out_what_is_the_default(
    tmp_path: Path, model_type: str, expected: tuple[int, int, int]
) -> None:
    config, _ = tiny_drafts.speculators(tiny_drafts.zlab())
    layers = config["transformer_layer_config"] | {"model_type": model_type}
    for key in ("num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps"):
        layers.pop(key, None)
    if model_type == "llama":
        layers["num_attention_heads"] = 16
    found = read(tmp_path, config | {"transformer_layer_config": layers})
    heads = (found.num_attention_heads, found.num_key_value_heads, found.head_dim)
    assert heads == expected
    assert (found.rms_norm_eps, found.block_size) == (1e-6, 6)


@pytest.mark.parametrize(
    ("algorithm", "flag", "expected"),
    [
        ("dflash", None, None),
        ("dflash", False, None),
        ("dflash", True, False),
        ("dflash2", None, False),
        ("dflash2", False, None),
    ],
)
def test_speculators_name_causality_the_other_way_round(
    tmp_path: Path, algorithm: str, flag: bool | None, expected: bool | None
) -> None:
    draft = tiny_drafts.zlab2() if algorithm == "dflash2" else tiny_drafts.zlab((SLIDING, FULL))
    config, _ = tiny_drafts.speculators(draft)
    del config["sliding_window_non_causal"]
    if flag is not None:
        config["sliding_window_non_causal"] = flag
    found = read(tmp_path, config)
    assert found.is_causal is expected
    assert (found.block2 is None) == (algorithm == "dflash")


def in_bf16(draft: Draft) -> Draft:
    return draft[0], {name: array.astype(mx.bfloat16) for name, array in draft[1].items()}


def dtypes(model: nn.Module) -> set[mx.Dtype]:
    return {array.dtype for _, array in tree_flatten(model.parameters())}


def native_bf16() -> Target:
    target = load(tiny.qwen3(), "qwen3", "native")
    target.model.set_dtype(mx.bfloat16)
    return target


def test_a_draft_keeps_the_precision_of_its_file(tmp_path: Path) -> None:
    folder = tiny.write_draft(tmp_path / "draft", *in_bf16(tiny_drafts.zlab2()))
    block = Block(folder, native_bf16())
    assert dtypes(block.model) == {mx.bfloat16}
    proposer = block.begin(Sampling(temperature=1.0), 3)
    proposer.observe(mx.zeros((1, 20, len(tiny.TAPS) * tiny.HIDDEN), mx.bfloat16))
    assert len(proposer.propose([65], 9).tokens) == 5
    assert {array.dtype for array in proposer.state} == {mx.bfloat16}


def test_beside_an_fp32_target_a_draft_is_fp32_too(tmp_path: Path) -> None:
    folder = tiny.write_draft(tmp_path / "draft", *in_bf16(tiny_drafts.zlab()))
    assert dtypes(Block(folder, load(tiny.qwen3(), "qwen3")).model) == {mx.float32}


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("target", [native_bf16, lambda: load(tiny.qwen3(), "qwen3")])
def test_few_bits_are_for_the_backbone(
    tmp_path: Path, bits: int, target: Callable[[], Target]
) -> None:
    folder = tiny.write_draft(tmp_path / "draft", *in_bf16(tiny_drafts.zlab2()))
    block = Block(folder, target(), bits)
    groups = {}
    for path, module in block.model.named_modules():
        if isinstance(module, nn.QuantizedLinear):
            assert module.bits == bits
            groups[path.split(".")[-1]] = module.group_size
        elif isinstance(module, nn.Linear | nn.Embedding):
            assert "_conv." in path or "selector" in path or path.endswith("down_proj")
    # 32 columns, but for o_proj's 64; down_proj's 48 are in no group and stay as they are.
    names = ("fc", "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    assert groups == dict.fromkeys(names, 32) | {"o_proj": 64}
    assert mx.float16 not in dtypes(block.model)


def test_eight_bits_change_little(tmp_path: Path) -> None:
    folder = tiny.write_draft(tmp_path / "draft", *tiny_drafts.zlab())
    random = np.random.default_rng(1)
    features = random.normal(size=(1, 20, len(tiny.TAPS) * tiny.HIDDEN)).astype(np.float32)
    logits = []
    for bits in (None, 8, 4):
        block = Block(folder, load(tiny.qwen3(), "qwen3"), bits)
        contexts = block.model.make_contexts()
        block.model.observe(mx.array(features), contexts)
        logits.append(np.array(block.fill([65], 5, contexts)[1]))
    dense, eight, four = logits
    assert 0 < np.abs(eight - dense).max() < np.abs(four - dense).max()
    assert np.abs(eight - dense).max() < 0.1 * np.abs(dense).max()


def test_other_bits(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="4, 8 or None, not 3"):
        Block(tiny.draft(), load(tiny.llama(), "llama"), 3)


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "small"),
        ({"model_type": "llama"}, "small"),
        ({"architectures": ["DFlashDraftModel"], "dflash_config": {}}, "block"),
        ({"architectures": ["Qwen3DSparkModel"]}, "block"),
        ({"speculators_model_type": "dflash"}, "block"),
    ],
)
def test_a_draft_is_known_for_what_it_is(tmp_path: Path, config: object, kind: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert kind_of(tmp_path) == kind


def test_a_folder_without_a_config_is_no_draft(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedDraftError, match="no draft in"):
        kind_of(tmp_path)
