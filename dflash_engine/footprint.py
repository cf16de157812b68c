"""What a model takes of memory, read off its files: headers and ``config.json``, no weights.

Sizes are in bytes. A *value* is one number of a key, a value, a state or an activation.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

CACHE_STEP = 256  # tokens by which mlx-lm's caches grow
PREFILL_STEP = 512  # tokens in one forward while a prompt is read
BLOCK_ROWS = 32  # rows of logits at once while an answer is written: more than any draft proposes

Precision = Literal["float32", "native"]


@dataclass(frozen=True)
class Cache:
    """What is kept of a text while it is read and continued.

    ``growing``: values a token, over the layers that keep every token; ``windowed``: values a
    token, over those that keep ``window`` tokens; ``states`` (fp32) and ``convolutions``: values of
    recurrent layers, whatever the length. ``group`` is how many values share a scale when keys and
    values are quantised; None where the size of the heads does not allow it.
    """

    growing: int
    windowed: int = 0
    window: int = 0
    states: int = 0
    convolutions: int = 0
    group: int | None = 64

    def bytes(
        self, tokens: int, value_bytes: int, kv_bits: int | None = None, chunk: int = PREFILL_STEP
    ) -> int:
        """The most it takes up to ``tokens`` tokens, read ``chunk`` at a time."""
        stored = math.ceil(tokens / CACHE_STEP) * CACHE_STEP
        kept = min(stored, self.window + chunk - 1)
        value: float = value_bytes
        if kv_bits and self.group:
            value = kv_bits / 8 + 2 * value_bytes / self.group
        return (
            int(self.growing * stored * value)
            + self.windowed * kept * value_bytes
            + self.states * 4
            + self.convolutions * value_bytes
        )


@dataclass(frozen=True)
class Footprint:
    """A model's ``weights`` in memory, and what its cache and its forwards take.

    ``value_bytes`` is the size of an activation; ``hidden`` and ``inner`` are the widths of a layer
    outside and inside; ``taps`` says how many layers of its target a draft reads; ``context`` is
    the longest text the model was made for, in tokens.
    """

    weights: int
    value_bytes: int
    cache: Cache
    hidden: int = 0
    inner: int = 0
    vocab: int = 0
    heads: int = 0
    head_dim: int = 0
    taps: int = 0
    context: int = 0

    def working(self, context: int, *, fused: bool) -> int:
        """The most that a forward holds besides: for a chunk of a prompt, and a block's logits.

        ``fused`` attention never holds the scores of all heads; MLX has it on Metal, for heads of
        up to 128.
        """
        rows = PREFILL_STEP * 8 * max(self.inner, 2 * self.hidden)
        scores = 0 if fused and self.head_dim <= 128 else PREFILL_STEP * self.heads * context
        return (rows + scores) * self.value_bytes + BLOCK_ROWS * self.vocab * 3 * 4


def read_model(folder: Path, precision: Precision = "native") -> Footprint:
    """The footprint of the mlx-lm model in ``folder``.

    ``precision`` is of :func:`dflash_engine.targets.load`. Raises OSError, ValueError, LookupError,
    TypeError or AttributeError for a folder that holds no model.
    """
    config = json.loads((folder / "config.json").read_text())
    text = config.get("text_config") or config  # models that also read images nest it
    tensors = [t for t in read_tensors(folder, config) if not t.dropped]
    if text.get("tie_word_embeddings", config.get("tie_word_embeddings")):
        tensors = [t for t in tensors if not t.name.startswith(("lm_head.", "model.lm_head."))]
    experts = _number(text, "num_experts_per_tok", "top_k_experts")
    return Footprint(
        weights=sum(tensor.bytes(precision) for tensor in tensors),
        value_bytes=4 if precision == "float32" else _value_bytes(tensors),
        cache=read_cache(text),
        hidden=_number(text, "hidden_size"),
        inner=max(
            _number(text, "intermediate_size"), experts * _number(text, "moe_intermediate_size")
        ),
        vocab=_number(text, "vocab_size"),
        heads=_number(text, "num_attention_heads"),
        head_dim=max(_head_dim(text), _number(text, "global_head_dim")),
        context=_number(text, "max_position_embeddings") or 4096,
    )


def read_block(folder: Path, precision: Precision = "native", bits: int | None = None) -> Footprint:
    """The footprint of the DFlash draft in ``folder``, beside a target of ``precision``.

    ``bits`` quantises it as the engine does. Raises UnsupportedDraftError as loading it would.
    """
    from .drafters import block_checkpoint  # imports mlx, whose arrays stay on disk until used

    checkpoint = block_checkpoint.read(folder)
    config, tensors = checkpoint.config, checkpoint.tensors
    weights = 0
    for name, array in tensors.items():
        value_bytes = 4 if precision == "float32" else array.itemsize
        group = next((g for g in (64, 32) if array.shape[-1] % g == 0), None)
        linear = name == "fc.weight" or name.endswith("_proj.weight")
        if bits and group and linear:
            weights += array.size * bits // 8 + array.size // group * 2 * value_bytes
        else:
            weights += array.size * value_bytes
    full = config.layer_types.count("full_attention")
    layer = 2 * config.num_key_value_heads * config.head_dim
    return Footprint(
        weights=weights,
        value_bytes=max(4 if precision == "float32" else a.itemsize for a in tensors.values()),
        cache=Cache(
            growing=full * layer,
            windowed=(len(config.layer_types) - full) * layer,
            window=config.sliding_window or 0,
        ),
        hidden=config.hidden_size,
        taps=len(config.target_layers),
    )


_FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
# Parts of a checkpoint that mlx-lm leaves out of a model that reads text.
_DROPPED = ("vision", "visual", "audio", "embed_vision", "embed_audio", "multi_modal", "mtp")
# Tensors that every token passes: their type is that of keys and values.
_PASSED = ("embed_tokens", "input_layernorm", "operator_norm")


@dataclass(frozen=True)
class Tensor:
    """A tensor as its file's header has it; ``size`` in bytes.

    ``packed_bits`` is set where it holds quantised weights, several to a number.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    size: int
    packed_bits: int | None = None

    @property
    def dropped(self) -> bool:
        """Whether loading leaves it out."""
        return any(part.startswith(_DROPPED) for part in self.name.split("."))

    def bytes(self, precision: Precision) -> int:
        """Its size once loaded."""
        if precision == "native":
            return self.size
        if self.packed_bits:
            return math.prod(self.shape) * 32 // self.packed_bits * 4
        if self.dtype not in _FLOATS:
            return self.size
        # With the weights dense there is nothing left to scale.
        scales = self.name.endswith((".scales", ".biases"))
        return 0 if scales else math.prod(self.shape) * 4


def read_tensors(folder: Path, config: Mapping[str, Any]) -> Iterator[Tensor]:
    """The tensors of the files that mlx-lm would load."""
    quantization = config.get("quantization") or config.get("quantization_config") or {}
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        raise FileNotFoundError(f"no model*.safetensors in {folder}")
    header: dict[str, Any] = {}
    for file in files:
        header |= _header(file)
    for name, entry in header.items():
        module = name.removesuffix(".weight")
        packed = None
        if entry["dtype"] == "U32" and f"{module}.scales" in header:
            packed = _bits(quantization, module)
        start, end = entry["data_offsets"]
        yield Tensor(name, entry["dtype"], tuple(entry["shape"]), end - start, packed)


def _header(file: Path) -> dict[str, Any]:
    # safetensors: the length of a JSON header as 8 bytes, little endian; the header; the data.
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > size - 8:
            raise ValueError(f"{file.name} is cut short, or is no safetensors file")
        header: dict[str, Any] = json.loads(stream.read(length))
    header.pop("__metadata__", None)
    if size < 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0):
        raise ValueError(f"{file.name} is cut short")
    return header


def _bits(quantization: Mapping[str, Any], module: str) -> int:
    own = quantization.get(module)
    bits = own.get("bits") if isinstance(own, dict) else None
    return int(bits or quantization.get("bits") or 4)


def _value_bytes(tensors: list[Tensor]) -> int:
    sizes = (
        _FLOATS.get(tensor.dtype, 0)
        for tensor in tensors
        if any(part in tensor.name for part in _PASSED)
    )
    return max(sizes, default=0) or 2


def read_cache(text: Mapping[str, Any]) -> Cache:
    """The cache of the model that ``text`` describes: a ``config.json``, or its ``text_config``.

    Exact for the layers that mlx-lm's configs name in the common ways (full, sliding, gated delta,
    short convolution). Layers of any other kind count as growing ones where all are alike, and as
    nothing among those named.
    """
    kinds = _layer_kinds(text)
    del kinds[len(kinds) - _number(text, "num_kv_shared_layers") :]  # these use others' keys
    growing, windowed = kinds.count("full"), kinds.count("sliding")
    recurrent, convolved = kinds.count("linear"), kinds.count("conv")
    heads = _number(text, "num_key_value_heads") or _number(text, "num_attention_heads")
    size, wide_heads = _head_dim(text), heads
    # Gemma 4's layers that see all have heads of their own size and number.
    wide_size = _number(text, "global_head_dim") or size
    if text.get("attention_k_eq_v"):
        wide_heads = _number(text, "num_global_key_value_heads") or heads
    a_token = 2 * wide_heads * wide_size
    if latent := _number(text, "kv_lora_rank"):  # DeepSeek's: one compressed row for all heads
        rope = _number(text, "qk_rope_head_dim")
        a_token, wide_size = latent + rope, math.gcd(latent, rope)
    delta = {
        name: _number(text, f"linear_{name}")
        for name in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
    }
    keys = delta["num_key_heads"] * delta["key_head_dim"]
    values = delta["num_value_heads"] * delta["value_head_dim"]
    steps = max(_number(text, "linear_conv_kernel_dim") - 1, 0)
    short_steps = max(_number(text, "conv_L_cache") - 1, 0)
    return Cache(
        growing=growing * a_token,
        windowed=windowed * 2 * heads * size,
        window=_number(text, "sliding_window") if windowed else 0,
        states=recurrent * values * delta["key_head_dim"],
        convolutions=recurrent * steps * (2 * keys + values)
        + convolved * short_steps * _number(text, "hidden_size"),
        group=next((group for group in (64, 32) if wide_size and wide_size % group == 0), None),
    )


_KIND = {
    "full_attention": "full",
    "attention": "full",
    "sliding_attention": "sliding",
    "linear_attention": "linear",
    "conv": "conv",
}


def _layer_kinds(text: Mapping[str, Any]) -> list[str]:
    layers = _number(text, "num_hidden_layers")
    if (attending := text.get("full_attn_idxs")) is not None:
        return ["full" if i in attending else "conv" for i in range(layers)]
    if types := text.get("layer_types"):
        return [_KIND.get(kind, "") for kind in types][:layers]
    if pattern := text.get("hybrid_override_pattern"):
        return ["full" if kind == "*" else "" for kind in pattern]
    if "linear_num_value_heads" in text:
        interval = _number(text, "full_attention_interval") or 4
        return ["linear" if (i + 1) % interval else "full" for i in range(layers)]
    every = _number(text, "sliding_window_pattern")
    if every and text.get("sliding_window"):
        return ["sliding" if (i + 1) % every else "full" for i in range(layers)]
    if text.get("model_type") == "gpt_oss":
        return ["full" if i % 2 else "sliding" for i in range(layers)]
    return ["full"] * layers


def _head_dim(text: Mapping[str, Any]) -> int:
    heads = _number(text, "num_attention_heads")
    return _number(text, "head_dim") or (_number(text, "hidden_size") // heads if heads else 0)


def _number(text: Mapping[str, Any], *names: str) -> int:
    return next((int(text[name]) for name in names if isinstance(text.get(name), int | float)), 0)
