"""What a new draft for a target looks like, and the weights it starts from."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..drafters.block_checkpoint import FULL, BlockConfig
from ..drafters.block_model import BlockModel
from ..errors import UnsupportedDraftError
from ..targets import Target

# Of the target's last norm. With all of it a draft starts out sure of what is wrong: with SmolLM2
# the cross entropy was 5.6 after 32 steps of 64 blocks, and 5.1 so (5.2 with 0.1).
CALM = 0.25


def design(
    folder: Path,
    target: Target,
    *,
    layers: int = 2,
    block_size: int = 8,
    taps: Sequence[int] | None = None,
    mask_token: int | None = None,
) -> dict[str, Any]:
    """The ``config.json`` of a new DFlash 1 draft for the ``target`` in ``folder``.

    Its layers are of the target's sizes, as far as that says them. ``taps``: indices of target
    layers whose outputs it reads, four spread evenly unless given. ``mask_token``: what stands for
    a token to be drafted, by default the last of the tokenizer's special tokens but those that end
    an answer.
    """
    whole = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    own: dict[str, Any] = whole.get("text_config", whole)
    hidden, depth = target.hidden_size, len(target.layers)
    heads = int(own.get("num_attention_heads") or max(1, hidden // 64))
    rope = own.get("rope_parameters") or {}
    if taps is None:
        taps = sorted({min(depth - 1, round(1 + i * max(depth - 4, 0) / 3)) for i in range(4)})
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": int(own.get("num_key_value_heads") or heads),
        "head_dim": int(own.get("head_dim") or hidden // heads),
        "intermediate_size": int(own.get("intermediate_size") or 3 * hidden),
        "hidden_act": "silu",
        "vocab_size": target.vocab_size,
        "rms_norm_eps": float(own.get("rms_norm_eps") or 1e-6),
        "rope_theta": float(own.get("rope_theta") or rope.get("rope_theta") or 10000.0),
        "max_position_embeddings": int(own.get("max_position_embeddings") or target.context),
        "attention_bias": False,
        "tie_word_embeddings": False,
        "num_target_layers": depth,
        "layer_types": [FULL] * layers,
        "block_size": block_size,
        "dflash_config": {
            "target_layer_ids": list(taps),
            "mask_token_id": _mask_token(target) if mask_token is None else mask_token,
        },
    }


def design_of(start: Path, *, block_size: int | None = None) -> dict[str, Any]:
    """The ``config.json`` of the draft in folder ``start``, to train it further, with blocks of
    another size if one is given. UnsupportedDraftError if there is no draft.
    """
    try:
        config: dict[str, Any] = json.loads((start / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UnsupportedDraftError(f"no draft in {start}: {error}") from error
    return config if block_size is None else config | {"block_size": block_size}


def _mask_token(target: Target) -> int:
    added = target.tokenizer.added_tokens_decoder
    special = [int(id) for id, token in added.items() if token.special]
    fit = [id for id in special if id not in target.stop_tokens and id < target.vocab_size]
    if not fit:
        raise ValueError(f"{target.name} has no special token to spare: name a mask_token")
    return max(fit)


def late_layers(count: int, target: Target) -> tuple[int, ...]:
    """The layers that ``count`` layers of a draft begin as: every other one, up to the third from
    the end.
    """
    return tuple(max(0, len(target.layers) - 1 - 2 * (count - i)) for i in range(count))


def initialise(
    model: BlockModel,
    config: BlockConfig,
    target: Target,
    sources: Sequence[int],
    seed: int,
    scale: float = 0.02,
) -> None:
    """Give ``model`` the weights to start from: those of the ``target``'s layers ``sources`` where
    names and shapes agree; else random ones of ``scale``, drawn by ``seed``.

    The context starts as the mean of the taps, and the last norm as a part of the target's.
    """
    key = mx.random.key(seed)
    weights: dict[str, mx.array] = {}
    for name, array in tree_flatten(model.parameters()):
        key, own = mx.random.split(key)
        drawn = mx.random.normal(array.shape, key=own) * scale
        weights[name] = drawn if array.ndim > 1 else mx.ones(array.shape)
    for i, source in enumerate(sources):
        weights |= _fitting(f"layers.{i}.", weights, target.layers[source])
    hidden = config.hidden_size
    taps = len(config.target_layers)
    weights["fc.weight"] = mx.concatenate([mx.eye(hidden) / taps] * taps, axis=1)
    for name, module in target.model.named_modules():
        is_final = name.split(".")[-1] == "norm" and not any(p.isdigit() for p in name.split("."))
        if is_final and isinstance(module, nn.RMSNorm) and module.weight.size == hidden:
            weights["norm.weight"] = module.weight * CALM
    model.load_weights([(name, array.astype(mx.float32)) for name, array in weights.items()])
    mx.eval(model.parameters())


def _fitting(prefix: str, wanted: dict[str, mx.array], layer: nn.Module) -> dict[str, mx.array]:
    # Weights of a target's layer that a draft's layer, named by ``prefix``, has a place for.
    found: dict[str, mx.array] = {}
    for name, module in layer.named_modules():
        place = f"{prefix}{name}.weight"
        weight = _dense(module) if place in wanted else None
        if weight is None or weight.shape != wanted[place].shape:
            continue
        if name in ("self_attn.q_proj", "self_attn.k_proj"):
            rope: Any = getattr(layer.self_attn, "rope", None)
            if getattr(rope, "traditional", False):
                weight = _halves(weight, rope.dims)
        found[place] = weight
    return found


def _dense(module: nn.Module) -> mx.array | None:
    if isinstance(module, nn.QuantizedLinear):
        return mx.dequantize(
            module.weight,
            module.scales,
            module.biases,
            group_size=module.group_size,
            bits=module.bits,
            mode=module.mode,
        )
    return module.weight if isinstance(module, nn.Linear | nn.RMSNorm) else None


def _halves(weight: mx.array, dim: int) -> mx.array:
    # Rows [heads x dim] for a rotation that pairs neighbours, as one that pairs halves wants them.
    rows, width = weight.shape
    pairs = weight.reshape(rows // dim, dim // 2, 2, width)
    return pairs.transpose(0, 2, 1, 3).reshape(rows, width)
