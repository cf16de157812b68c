"""The draft network: a few Qwen3-like layers that fill a block of masks in one pass.

They read a block ``[anchor, mask, mask, ...]`` together with hidden states tapped from the target,
the context. Embedding and head are the target's. Source: DFlash, arXiv 2602.06036; layout of the
z-lab drafts.
"""

from typing import cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.activations import swiglu
from mlx_lm.models.rope_utils import initialize_rope

from .block2 import CandidateSelector, DynamicConvolution
from .block_checkpoint import SLIDING, BlockConfig, Checkpoint, refusal
from .context import Context


class _Attention(nn.Module):
    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.scale = config.head_dim**-0.5
        dim, head, bias = config.hidden_size, config.head_dim, config.attention_bias
        self.q_proj = nn.Linear(dim, self.heads * head, bias=bias)
        self.k_proj = nn.Linear(dim, self.kv_heads * head, bias=bias)
        self.v_proj = nn.Linear(dim, self.kv_heads * head, bias=bias)
        self.o_proj = nn.Linear(self.heads * head, dim, bias=bias)
        self.q_norm = nn.RMSNorm(head, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(head, eps=config.rms_norm_eps)

    def observe(self, states: mx.array, positions: int, rope: nn.Module, context: Context) -> None:
        """Add ``positions`` to ``context``, given the last ``states`` [1, S, hidden] of them."""
        states = states[:, -(context.reach or positions) :]
        offset = context.offset + positions - states.shape[1]
        context.append(*self._keys_values(states, rope, offset), positions)

    def __call__(
        self, x: mx.array, rope: nn.Module, context: Context, mask: mx.array | None
    ) -> mx.array:
        # Keys and values come from context and block by the same projections; only the context's
        # are kept, so nothing ever has to be rolled back.
        queries = rope(self.q_norm(self._split(self.q_proj(x), self.heads)), offset=context.offset)
        keys, values = context.with_block(*self._keys_values(x, rope, context.offset))
        output = mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=self.scale, mask=mask
        )
        return self.o_proj(output.transpose(0, 2, 1, 3).reshape(1, x.shape[1], -1))  # type: ignore[no-any-return]

    def _keys_values(self, x: mx.array, rope: nn.Module, offset: int) -> tuple[mx.array, mx.array]:
        keys = self.k_norm(self._split(self.k_proj(x), self.kv_heads))
        return rope(keys, offset=offset), self._split(self.v_proj(x), self.kv_heads)

    @staticmethod
    def _split(x: mx.array, heads: int) -> mx.array:
        return x.reshape(1, x.shape[1], heads, -1).transpose(0, 2, 1, 3)


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
    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.self_attn = _Attention(config)
        self.mlp = _MLP(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def __call__(
        self, x: mx.array, rope: nn.Module, context: Context, mask: mx.array | None
    ) -> mx.array:
        x = x + self.self_attn(self.input_layernorm(x), rope, context, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class _Layer2(_Layer):
    """DFlash 2's: a convolution along the block before and after each sublayer."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__(config)
        assert config.block2 is not None
        self.attention_conv = DynamicConvolution(config.hidden_size, config.block2)
        self.mlp_conv = DynamicConvolution(config.hidden_size, config.block2)

    def __call__(
        self, x: mx.array, rope: nn.Module, context: Context, mask: mx.array | None
    ) -> mx.array:
        y, dynamic = self.attention_conv.prepare(self.input_layernorm(x))
        x = x + self.attention_conv.finish(self.self_attn(y, rope, context, mask), dynamic)
        y, dynamic = self.mlp_conv.prepare(self.post_attention_layernorm(x))
        return x + self.mlp_conv.finish(self.mlp(y), dynamic)


class BlockModel(nn.Module):
    """The network between the target's embedding and the head.

    ``lm_head`` is there only if the draft has one of its own, of ``own_head`` tokens.
    """

    def __init__(self, config: BlockConfig, own_head: int | None = None) -> None:
        super().__init__()
        hidden, taps = config.hidden_size, len(config.target_layers)
        self._config = config
        self.fc = nn.Linear(taps * hidden, hidden, bias=False)
        self.hidden_norm = nn.RMSNorm(hidden, eps=config.rms_norm_eps)
        layer = _Layer2 if config.block2 else _Layer
        self.layers = [layer(config) for _ in config.layer_types]
        self.norm = nn.RMSNorm(hidden, eps=config.rms_norm_eps)
        if config.block2:
            self.candidate_selector = CandidateSelector(hidden, config.vocab_size, config.block2)
        if own_head is not None:
            self.lm_head = nn.Linear(hidden, own_head, bias=False)
        self._rope = initialize_rope(
            dims=config.head_dim,
            base=config.rope_theta,
            traditional=False,
            scaling_config=config.rope_scaling,
            max_position_embeddings=config.max_position_embeddings,
        )

    @property
    def rope(self) -> nn.Module:
        """What rotates queries and keys: ``rope(x, offset=position of the first row)``."""
        return self._rope

    def make_contexts(self) -> list[Context]:
        """A new, empty context for each layer."""
        window = self._config.sliding_window
        return [
            Context(window - 1 if window and kind == SLIDING else None)
            for kind in self._config.layer_types
        ]

    def observe(self, features: mx.array, contexts: list[Context]) -> None:
        """Add S positions to ``contexts``, given their ``features`` [1, S, taps x hidden]."""
        positions = features.shape[1]
        reaches = [context.reach for context in contexts]
        if None not in reaches:  # what no layer keeps need not be projected
            features = features[:, -max(cast(list[int], reaches)) :]
        states = self.hidden_norm(self.fc(features))
        for layer, context in zip(self.layers, contexts, strict=True):
            layer.self_attn.observe(states, positions, self._rope, context)

    def __call__(self, block: mx.array, contexts: list[Context], first: int = 0) -> mx.array:
        """Hidden states [1, rows - first, hidden] of an embedded ``block`` [1, rows, hidden].

        Its positions follow those in ``contexts``, which stay as they are.
        """
        rows = block.shape[1]
        masks = {
            kind: self._mask(kind, rows, len(context))
            for kind, context in zip(self._config.layer_types, contexts, strict=True)
        }
        for kind, layer, context in zip(
            self._config.layer_types, self.layers, contexts, strict=True
        ):
            block = layer(block, self._rope, context, masks[kind])
        return self.norm(block[:, first:])  # type: ignore[no-any-return]

    def _mask(self, kind: str, rows: int, seen: int) -> mx.array | None:
        # Which of the context's rows and the block's each row of the block sees; None: all.
        causal = self._config.is_causal
        causal = kind == SLIDING if causal is None else causal
        window = self._config.sliding_window if kind == SLIDING else None
        if not causal and (window is None or seen + rows <= window):
            return None
        query = seen + mx.arange(rows)[:, None]
        key = mx.arange(seen + rows)[None]
        visible = key <= query if causal else key < seen + rows
        if window is not None:
            visible = visible & ((key >= seen) | (query - key < window))
        return visible


def build(
    checkpoint: Checkpoint, dtype: mx.Dtype | None = None, bits: int | None = None
) -> BlockModel:
    """The network with the checkpoint's weights, in the precision of the file or in ``dtype``.

    ``bits`` quantises the backbone's projections; the convolutions' and the selector, whose errors
    would add up along the block, are left alone. Raises UnsupportedDraftError when tensors are
    missing, extra, of another shape, damaged or integers, or the rope is of an unknown kind.
    """
    part = checkpoint.vocabulary
    own_head = None if part is None or checkpoint.config.kind == "dflash" else len(part)
    try:
        model = BlockModel(checkpoint.config, own_head)
    except (AssertionError, KeyError, ValueError) as error:
        raise refusal(checkpoint.name, f"config.json: its rope: {error}") from error
    wanted = {name: array.shape for name, array in tree_flatten(model.parameters())}
    found = {
        name: array.shape if mx.issubdtype(array.dtype, mx.floating) else array.dtype
        for name, array in checkpoint.tensors.items()
    }
    wrong = sorted(
        name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name)
    )
    if wrong:
        raise refusal(
            checkpoint.name,
            f"{len(wrong)} tensors do not fit its config.json, the first {wrong[0]}: "
            f"{found.get(wrong[0])}, expected {wanted.get(wrong[0])}",
        )
    try:
        model.load_weights(list(checkpoint.tensors.items()))
        checkpoint.tensors.clear()  # what is converted need not stay
        if dtype is not None:
            model.set_dtype(dtype)
        if bits is not None:
            _quantise(model, bits)
        mx.eval(model.parameters())
    except RuntimeError as error:
        raise refusal(checkpoint.name, error) from error
    return model


def _quantise(model: BlockModel, bits: int) -> None:
    def choose(path: str, module: nn.Module) -> bool | dict[str, int]:
        kept = path == "lm_head" or "_conv." in path or "candidate_selector." in path
        if kept or not isinstance(module, nn.Linear):
            return False
        inner = module.weight.shape[1]
        group = next((size for size in (64, 32) if inner % size == 0), None)
        return {"group_size": group, "bits": bits} if group else False

    nn.quantize(model, class_predicate=choose)
