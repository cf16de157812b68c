"""Draft checkpoints of every packaging, read into one config and z-lab's tensor names.

Block drafts share one network, a few Qwen3-like layers, and come in four packagings:

- ``dflash`` and ``dflash2``: z-lab's own and SpecForge's. Embedding and head are the target's. Some
  made by :mod:`dflash_engine.training` have a ``d2t``, as speculators' do, and no head: then the
  target's is used, over that part of the vocabulary.
- ``block7``: DeepSpec's. Each slot of the block predicts the token *after* its place.
- ``speculators``: vLLM's. The layers' config is nested, taps are counted from the embedding, and
  the head may be one of its own over a part of the vocabulary.

Copies of the target's embedding and head, which the last two hold because their trainers freeze
them, are left out: the target's serve. What would have to be run otherwise is refused.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ..errors import UnsupportedDraftError
from .block2 import Block2Config

FULL, SLIDING = "full_attention", "sliding_attention"
Kind = Literal["dflash", "dflash2", "block7", "speculators"]


@dataclass(frozen=True)
class BlockConfig:
    """How a draft is run.

    ``block_size`` counts the anchor. ``target_layers`` are 0-based indices of the target layers
    whose outputs it reads. ``is_causal`` None means: sliding layers are causal inside the block,
    full ones not. ``from_anchor``: slot k is for the token k + 1 places after the anchor, so all
    slots are used; otherwise slot k is for the token k places after it, and slot 0 unused.
    ``scales_embedding``: the target's embedding is scaled as the target does, times
    ``embedding_scale``.
    """

    kind: Kind
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rms_norm_eps: float
    attention_bias: bool
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    max_position_embeddings: int
    block_size: int
    from_anchor: bool
    target_layers: tuple[int, ...]
    num_target_layers: int | None
    mask_token: int
    layer_types: tuple[str, ...]
    sliding_window: int | None
    is_causal: bool | None
    softcap: float | None
    embedding_scale: float
    scales_embedding: bool
    output_multiplier: float
    block2: Block2Config | None

    @property
    def slots(self) -> int:
        """The most tokens one block drafts."""
        return self.block_size if self.from_anchor else self.block_size - 1


@dataclass(frozen=True)
class Checkpoint:
    """A draft folder's contents; ``tensors`` are read from disk when first used.

    ``vocabulary`` [draft vocab], ascending, are the target's tokens that the draft gives logits of,
    by its own head (``lm_head.weight``) if it has one, else by the target's; None where it is all
    of them, by the target's head.
    """

    name: str
    config: BlockConfig
    tensors: dict[str, mx.array]
    vocabulary: NDArray[np.int64] | None


def refusal(name: str, reason: object) -> UnsupportedDraftError:
    """The error for a draft that cannot be run."""
    return UnsupportedDraftError(
        f"draft {name} cannot be run: {reason}. Use another draft, or drafter='lookup', which "
        "needs none"
    )


def read(folder: Path) -> Checkpoint:
    """Read a draft folder; UnsupportedDraftError names what this version cannot run."""
    config = _read_config(folder)
    try:
        tensors, vocabulary = _read_tensors(folder, config)
    except (OSError, RuntimeError, ValueError) as error:  # MLX has many names for a damaged file
        raise refusal(folder.name, error) from error
    return Checkpoint(folder.name, config, tensors, vocabulary)


def _read_config(folder: Path) -> BlockConfig:
    try:
        raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UnsupportedDraftError(f"no draft in {folder}: {error}") from error
    return parse(raw, folder.name)


def parse(raw: Any, name: str) -> BlockConfig:
    """What the ``config.json`` of draft ``name`` says; UnsupportedDraftError as in :func:`read`."""
    try:
        return _config(*_unpacked(raw))
    except KeyError as error:
        raise refusal(name, f"config.json lacks {error}") from error
    except (ArithmeticError, AttributeError, TypeError, ValueError) as error:
        raise refusal(name, f"config.json: {error}") from error


def _unpacked(raw: Any) -> tuple[Kind, dict[str, Any]]:
    # The packaging, and the config as z-lab would write it. A speculators file may name z-lab's
    # architecture, so it is looked for first.
    if not isinstance(raw, dict):
        raise TypeError("it is not an object")
    if "speculators_model_type" in raw:
        return "speculators", _from_speculators(raw)
    match raw.get("architectures"):
        case ["DFlashDraftModel"]:
            return "dflash", raw
        case ["DFlash2DraftModel"]:
            return "dflash2", raw
        case ["Qwen3DSparkModel"]:
            own = {key: raw[key] for key in ("target_layer_ids", "mask_token_id", "block_size")}
            return "block7", raw | {"dflash_config": own | {"sample_from_anchor": True}}
        case other:
            named = ", ".join(map(str, other or [])) or "not named"
            raise ValueError(
                f"architecture {named}; this version runs DFlashDraftModel, DFlash2DraftModel and "
                "Qwen3DSparkModel without a Markov head"
            )


# Of the layers' config only what differs from its class's defaults is sure to be written.
_LAYER_DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen3": {
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
    },
    "llama": {  # a name only: the layers are the same
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "vocab_size": 32000,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
    },
}


def _from_speculators(raw: dict[str, Any]) -> dict[str, Any]:
    algorithm = raw["speculators_model_type"]
    if algorithm not in ("dflash", "dflash2"):
        raise ValueError(
            f"speculators_model_type {algorithm}; this version runs dflash and dflash2"
        )
    given: dict[str, Any] = raw["transformer_layer_config"]
    model_type = given.get("model_type", "qwen3")
    if model_type not in _LAYER_DEFAULTS:
        raise ValueError(f"transformer_layer_config has model_type {model_type}")
    layers = _LAYER_DEFAULTS[model_type] | raw | given
    if model_type == "llama":
        heads = layers["num_attention_heads"]
        layers = {"num_key_value_heads": heads, "head_dim": layers["hidden_size"] // heads} | layers
    own = {
        # 0 is the embedding there, 1 the output of the first layer.
        "target_layer_ids": [index - 1 for index in raw["aux_hidden_state_layer_ids"]],
        "mask_token_id": raw["mask_token_id"],
        "block_size": raw.get("block_size") or 8,
    }
    # Full layers are never causal there. A window reaches as far as vLLM serves it, which for the
    # anchor is one position less than in training.
    bidirectional = raw.get("sliding_window_non_causal", algorithm == "dflash2")
    layers["is_causal"] = False if bidirectional else None
    if algorithm == "dflash2":
        own |= {key: raw[key] for key in Block2Config.__dataclass_fields__}
    return layers | {"dflash_config": own}


# What would change the forward pass, and the value with which it does not.
_NOT_RUN: dict[str, Any] = {
    "hidden_act": "silu",
    "is_neox_style": True,
    "logit_scale": 1,
    "use_swa": False,
    "attention_sink_bias": False,
    "add_swa_attention_sink_bias": False,
    "attention_value_scale": 1,
    "use_aux_hidden_state": True,
    "draft_ffn_type": "dense",
    "hc_mult": 1,
    "projector_type": "dflash",
    "shift_label": False,
    "markov_rank": 0,
    "enable_confidence_head": False,
    "use_heterogeneous_kv": False,
    "quantization": None,
    "quantization_config": None,
}


def _config(kind: Kind, config: dict[str, Any]) -> BlockConfig:
    own = config.get("dflash_config") or {}
    hidden = int(config["hidden_size"])
    for key, plain in (_NOT_RUN | {"target_hidden_size": hidden}).items():
        value = own.get(key, config.get(key))
        if value not in (None, plain):
            raise ValueError(f"{key} is {value!r}, which this version does not run")
    heads, kv_heads = int(config["num_attention_heads"]), int(config["num_key_value_heads"])
    if heads % kv_heads:
        raise ValueError(f"{heads} heads do not share {kv_heads} key-value heads")
    layers = int(config["num_hidden_layers"])
    types = tuple(config.get("layer_types") or [FULL] * layers)
    window = config.get("sliding_window")
    if not types or len(types) != layers or set(types) - {FULL, SLIDING}:
        raise ValueError(f"layer_types {list(types)} do not fit {layers} layers of full or sliding")
    if SLIDING in types and int(window or 0) < 2:
        raise ValueError(f"sliding_window {window} leaves sliding_attention layers no context")
    block_size = int(own.get("block_size") or config.get("block_size") or 16)
    if block_size < 2:
        raise ValueError(f"block_size {block_size} leaves nothing to draft")
    depth = config.get("num_target_layers")
    taps = own.get("target_layer_ids")
    if taps is None:
        taps = _spread(int(config["num_target_layers"]), layers)
    if not taps:
        raise ValueError("target_layer_ids is empty: the draft would see no context")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if any(isinstance(value, dict) for value in rope.values()):
        raise ValueError("rope_parameters differ by layer, which this version does not run")
    # z-lab's own code takes the flat theta; the others write what transformers 5 reads.
    thetas = [config.get("rope_theta"), rope.get("rope_theta"), 10000.0]
    if kind in ("block7", "speculators"):
        thetas = [thetas[1], thetas[0], thetas[2]]
    causal = own.get("causal") if config.get("is_causal") is None else config["is_causal"]
    softcap = own.get("final_logit_softcapping") or config.get("final_logit_softcapping")
    block2 = None
    if kind == "dflash2" or config.get("speculators_model_type") == "dflash2":
        block2 = Block2Config(**{key: int(own[key]) for key in Block2Config.__dataclass_fields__})
        if hidden % block2.conv_group_size:
            raise ValueError(f"conv_group_size {block2.conv_group_size} does not divide {hidden}")
        if not 0 < block2.selector_top_k <= int(config["vocab_size"]):
            raise ValueError(f"selector_top_k {block2.selector_top_k} does not fit the vocabulary")
    return BlockConfig(
        kind=kind,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=int(config["head_dim"]),
        intermediate_size=int(config["intermediate_size"]),
        vocab_size=int(config["vocab_size"]),
        rms_norm_eps=float(config["rms_norm_eps"]),
        attention_bias=bool(config.get("attention_bias")),
        rope_theta=float(next(theta for theta in thetas if theta)),
        # Copied from targets that rotate a part of each head; drafts rotate all of it.
        rope_scaling={k: v for k, v in rope.items() if k != "partial_rotary_factor"} or None,
        max_position_embeddings=int(config["max_position_embeddings"]),
        block_size=block_size,
        from_anchor=any(
            bool(place.get(key))
            for place in (own, config)
            for key in ("sample_from_anchor", "query_zero_predicts_next")
        ),
        target_layers=tuple(int(i) for i in taps),
        num_target_layers=int(depth) if depth else None,
        mask_token=int(own["mask_token_id"]),
        layer_types=types,
        sliding_window=int(window) if window else None,
        is_causal=None if causal is None else bool(causal),
        softcap=float(softcap) if softcap else None,
        embedding_scale=float(own.get("input_embedding_scale") or 1.0),
        scales_embedding=kind != "speculators",  # trained on the table as it is
        output_multiplier=float(own.get("output_multiplier") or 1.0),
        block2=block2,
    )


def _spread(depth: int, layers: int) -> list[int]:
    # The taps of a draft that does not name them: as many as it has layers, evenly spread.
    if layers == 1:
        return [depth // 2]
    return [round(1 + i * (depth - 4) / (layers - 1)) for i in range(layers)]


def _read_tensors(
    folder: Path, config: BlockConfig
) -> tuple[dict[str, mx.array], NDArray[np.int64] | None]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise RuntimeError("it holds no .safetensors file")
    if (folder / "mask_embedding.pt").exists():
        raise RuntimeError("it embeds masks by mask_embedding.pt, which this version does not run")
    tensors: dict[str, mx.array] = {}
    for file in files:
        tensors |= cast(dict[str, mx.array], mx.load(str(file)))
    for codebook in ("predecessor_codebook", "successor_codebook"):
        name = f"candidate_selector.{codebook}"
        if name in tensors:
            tensors[f"{name}.weight"] = tensors.pop(name)
    if config.kind == "dflash2" or (config.kind == "dflash" and "d2t" not in tensors):
        return tensors, None
    offsets, chosen = tensors.pop("d2t", None), tensors.pop("t2d", None)
    for copy in ("embed_tokens", "verifier_norm", "verifier_lm_head"):
        tensors.pop(f"{copy}.weight", None)
    if offsets is None:
        head = tensors.pop("lm_head.weight", None)
        if head is not None and head.shape[0] != config.vocab_size:
            raise RuntimeError(
                f"its head is over {head.shape[0]} of {config.vocab_size} tokens, and no d2t says "
                "which"
            )
        return tensors, None
    vocabulary = np.arange(offsets.size) + np.asarray(offsets, dtype=np.int64).ravel()
    bounds = np.concatenate([[-1], vocabulary, [config.vocab_size]])
    if not offsets.size or (np.diff(bounds) < 1).any():
        raise RuntimeError(f"d2t does not pick out tokens of {config.vocab_size}")
    if chosen is not None and not np.array_equal(np.flatnonzero(np.asarray(chosen)), vocabulary):
        raise RuntimeError("d2t and t2d do not agree")
    if config.block2 is not None:
        raise RuntimeError("its selector is over the whole vocabulary, its head over a part")
    return tensors, vocabulary
