"""The DFlash 1 draft network and its checkpoint.

A few Qwen3-like layers that read a block of tokens ``[anchor, mask, mask, ...]`` together with
hidden states tapped from the target, and fill all masks in one pass. Embedding and head are the
target's. Source: DFlash, arXiv 2602.06036; checkpoint layout of the z-lab drafts.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.activations import swiglu
from mlx_lm.models.cache import KVCache
from mlx_lm.models.rope_utils import initialize_rope

from ..errors import UnsupportedDraftError

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class BlockConfig:
    """A draft's ``config.json``. ``block_size`` counts the anchor; ``target_layers`` are 0-based
    indices of the target layers whose outputs it reads; ``is_causal`` None means: sliding layers
    causal inside the block, full layers not.
    """

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    max_position_embeddings: int
    block_size: int
    target_layers: tuple[int, ...]
    mask_token: int
    layer_types: tuple[str, ...]
    sliding_window: int | None
    is_causal: bool | None
    softcap: float | None
    embedding_scale: float
    output_multiplier: float

    @classmethod
    def read(cls, folder: Path) -> "BlockConfig":
        """Read ``config.json``; UnsupportedDraftError names what this version cannot run."""
        try:
            config = json.loads((folder / "config.json").read_text())
        except (OSError, ValueError) as error:
            raise UnsupportedDraftError(f"no draft in {folder}: {error}") from error
        if not isinstance(config, dict):
            raise UnsupportedDraftError(f"{folder.name}: config.json is not an object")
        architectures = config.get("architectures") or []
        if architectures != ["DFlashDraftModel"]:
            raise UnsupportedDraftError(
                f"{folder.name}: architecture {', '.join(architectures) or 'not named'}; this "
                "version runs DFlashDraftModel (DFlash 1) only"
            )
        try:
            return cls._of(config)
        except KeyError as error:
            raise UnsupportedDraftError(f"{folder.name}: config.json lacks {error}") from error
        except (AttributeError, TypeError, ValueError) as error:
            raise UnsupportedDraftError(f"{folder.name}: config.json: {error}") from error

    @classmethod
    def _of(cls, config: dict[str, Any]) -> "BlockConfig":
        # Two spellings are in use for the rope and for what stands in dflash_config.
        own = config.get("dflash_config") or {}
        rope = config.get("rope_parameters") or config.get("rope_scaling")
        layers = int(config["num_hidden_layers"])
        types = tuple(config.get("layer_types") or [FULL] * layers)
        window = config.get("sliding_window")
        if len(types) != layers or set(types) - {FULL, SLIDING}:
            raise UnsupportedDraftError(f"layer_types {list(types)} do not fit {layers} layers")
        if SLIDING in types and not window:
            raise UnsupportedDraftError(
                "sliding_attention layers need sliding_window in the config"
            )
        block_size = int(own.get("block_size") or config.get("block_size") or 16)
        if block_size < 2:
            raise UnsupportedDraftError(f"block_size {block_size} leaves nothing to draft")
        if not own["target_layer_ids"]:
            raise UnsupportedDraftError("target_layer_ids is empty: the draft would see no context")
        if config.get("attention_bias"):
            raise UnsupportedDraftError("attention_bias is set: no DFlash 1 draft has it")
        return cls(
            hidden_size=int(config["hidden_size"]),
            num_hidden_layers=layers,
            num_attention_heads=int(config["num_attention_heads"]),
            num_key_value_heads=int(config["num_key_value_heads"]),
            head_dim=int(config["head_dim"]),
            intermediate_size=int(config["intermediate_size"]),
            vocab_size=int(config["vocab_size"]),
            rms_norm_eps=float(config["rms_norm_eps"]),
            rope_theta=float(config.get("rope_theta") or (rope or {}).get("rope_theta") or 10000.0),
            rope_scaling=rope,
            max_position_embeddings=int(config["max_position_embeddings"]),
            block_size=block_size,
            target_layers=tuple(int(i) for i in own["target_layer_ids"]),
            mask_token=int(own["mask_token_id"]),
            layer_types=types,
            sliding_window=int(window) if window else None,
            is_causal=config.get("is_causal"),
            softcap=own.get("final_logit_softcapping") or config.get("final_logit_softcapping"),
            embedding_scale=float(own.get("input_embedding_scale") or 1.0),
            output_multiplier=float(own.get("output_multiplier") or 1.0),
        )


class _Attention(nn.Module):
    def __init__(self, config: BlockConfig, layer_type: str) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.scale = config.head_dim**-0.5
        self.window = config.sliding_window if layer_type == SLIDING else None
        causal = config.is_causal
        self.causal = layer_type == SLIDING if causal is None else causal
        dim, head = config.hidden_size, config.head_dim
        self.q_proj = nn.Linear(dim, self.heads * head, bias=False)
        self.k_proj = nn.Linear(dim, self.kv_heads * head, bias=False)
        self.v_proj = nn.Linear(dim, self.kv_heads * head, bias=False)
        self.o_proj = nn.Linear(self.heads * head, dim, bias=False)
        self.q_norm = nn.RMSNorm(head, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(head, eps=config.rms_norm_eps)

    def __call__(self, x: mx.array, context: mx.array, rope: nn.Module, cache: KVCache) -> mx.array:
        # Keys and values come from the context and the block by the same projections; only the
        # context's are cached, so the cache never has to be rolled back.
        rows, new = x.shape[1], context.shape[1]
        start = cache.offset
        queries = rope(self.q_norm(self._heads(self.q_proj(x), self.heads)), offset=start + new)
        block_keys = rope(
            self.k_norm(self._heads(self.k_proj(x), self.kv_heads)), offset=start + new
        )
        block_values = self._heads(self.v_proj(x), self.kv_heads)
        keys, values = cache.update_and_fetch(
            rope(self.k_norm(self._heads(self.k_proj(context), self.kv_heads)), offset=start),
            self._heads(self.v_proj(context), self.kv_heads),
        )
        seen = keys.shape[2]
        output = mx.fast.scaled_dot_product_attention(
            queries,
            mx.concatenate([keys, block_keys], axis=2),
            mx.concatenate([values, block_values], axis=2),
            scale=self.scale,
            mask=self._mask(rows, seen),
        )
        return self.o_proj(output.transpose(0, 2, 1, 3).reshape(1, rows, -1))  # type: ignore[no-any-return]

    @staticmethod
    def _heads(x: mx.array, count: int) -> mx.array:
        return x.reshape(1, x.shape[1], count, -1).transpose(0, 2, 1, 3)

    def _mask(self, rows: int, seen: int) -> mx.array | None:
        if self.window is None and not self.causal:
            return None
        query = seen + mx.arange(rows)[:, None]
        key = mx.arange(seen + rows)[None]
        context = key < seen
        if self.window is not None:
            context = context & (query - key < self.window)
        block = key >= seen
        if self.causal:
            block = block & (key <= query)
        return context | block


class _MLP(nn.Module):
    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        dim, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(dim, inner, bias=False)
        self.up_proj = nn.Linear(dim, inner, bias=False)
        self.down_proj = nn.Linear(inner, dim, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))  # type: ignore[no-any-return]


class _Layer(nn.Module):
    def __init__(self, config: BlockConfig, layer_type: str) -> None:
        super().__init__()
        self.self_attn = _Attention(config, layer_type)
        self.mlp = _MLP(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def __call__(self, x: mx.array, context: mx.array, rope: nn.Module, cache: KVCache) -> mx.array:
        x = x + self.self_attn(self.input_layernorm(x), context, rope, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class BlockModel(nn.Module):
    """The network between the target's embedding and the target's head."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        taps = len(config.target_layers)
        self.fc = nn.Linear(taps * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = [_Layer(config, layer_type) for layer_type in config.layer_types]
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self._rope = initialize_rope(
            dims=config.head_dim,
            base=config.rope_theta,
            traditional=False,
            scaling_config=config.rope_scaling,
            max_position_embeddings=config.max_position_embeddings,
        )

    def __call__(self, block: mx.array, features: mx.array, cache: list[KVCache]) -> mx.array:
        """Hidden states [1, rows, hidden] of an embedded ``block`` [1, rows, hidden].

        ``features`` [1, S, taps x hidden] are of the S positions committed since the last call;
        they join ``cache`` at positions that follow those there, and the block's follow them.
        """
        context = self.hidden_norm(self.fc(features))
        for layer, layer_cache in zip(self.layers, cache, strict=True):
            block = layer(block, context, self._rope, layer_cache)
        return self.norm(block)  # type: ignore[no-any-return]


def load(folder: Path) -> tuple[BlockConfig, BlockModel]:
    """Load a draft folder in z-lab's layout, in the precision of its file.

    Raises UnsupportedDraftError when tensors are missing, extra or of another shape.
    """
    config = BlockConfig.read(folder)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UnsupportedDraftError(f"{folder.name} holds no .safetensors file")
    weights: dict[str, mx.array] = {}
    try:
        for file in files:
            weights |= cast(dict[str, mx.array], mx.load(str(file)))
        model = BlockModel(config)
    except (RuntimeError, KeyError, ValueError) as error:  # a broken file; an unknown kind of rope
        raise UnsupportedDraftError(f"{folder.name} cannot be loaded: {error}") from error
    wanted = {name: array.shape for name, array in tree_flatten(model.parameters())}
    found = {name: array.shape for name, array in weights.items()}
    wrong = sorted(
        name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name)
    )
    if wrong:
        first = wrong[0]
        raise UnsupportedDraftError(
            f"{folder.name}: {len(wrong)} tensors do not fit its config as DFlash 1, the first "
            f"{first}: {found.get(first)}, expected {wanted.get(first)}"
        )
    model.load_weights(list(weights.items()))
    mx.eval(model.parameters())
    return config, model
