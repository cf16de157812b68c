"""A llama-architecture GGUF file, turned into a folder that mlx-lm loads.

GGUF's block formats Q4_0, Q4_1 and Q8_0 are MLX's own affine quantisation with groups of 32, so
the weights are kept as shipped. Its llama layout keeps rotary pairs interleaved, which is
``rope_traditional`` in mlx-lm. Source: the GGUF specification (ggml-org/ggml, docs/gguf.md).
"""

import json
import re
from pathlib import Path
from typing import Any, cast

from .errors import PullError

GROUP_SIZE = 32

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_SPECIAL = 3  # tokenizer.ggml.token_type of a control token


def convert(gguf: Path, folder: Path) -> None:
    """Write ``config.json``, ``model.safetensors`` and the tokenizer of ``gguf`` into ``folder``.

    Raises PullError for an architecture or a tokenizer that this reader does not know.
    """
    import mlx.core as mx

    loaded = cast(Any, mx.load(str(gguf), return_metadata=True))
    weights: dict[str, Any] = loaded[0]
    metadata: dict[str, Any] = loaded[1]
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise PullError(
            f"{gguf.name}: architecture {architecture!r} in a GGUF file is not known, only llama: "
            "name an mlx-lm folder or hf: repository of this model instead"
        )
    renamed = {_rename(name): array for name, array in weights.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), renamed, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(_config(metadata, renamed), indent=2))
    _write_tokenizer(metadata, folder)


def _rename(name: str) -> str:
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(\w+)", name)
    if match is None or match[2] not in _NAMES:
        raise PullError(f"GGUF tensor {name!r} is not part of a llama model")
    prefix = f"model.layers.{match[1]}." if match[1] else ""
    return f"{prefix}{_NAMES[match[2]]}.{match[3]}"


def _config(metadata: dict[str, Any], weights: dict[str, Any]) -> dict[str, Any]:
    def number(key: str) -> int:
        return int(metadata[f"llama.{key}"].item())

    bits = {
        name.removesuffix(".scales"): _bits(weights, name.removesuffix(".scales"))
        for name in weights
        if name.endswith(".scales")
    }
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": number("embedding_length"),
        "num_hidden_layers": number("block_count"),
        "intermediate_size": number("feed_forward_length"),
        "num_attention_heads": number("attention.head_count"),
        "num_key_value_heads": number("attention.head_count_kv"),
        "rms_norm_eps": _round(metadata["llama.attention.layer_norm_rms_epsilon"]),
        "rope_theta": _round(metadata["llama.rope.freq_base"]),
        "rope_traditional": True,
        "max_position_embeddings": number("context_length"),
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "tie_word_embeddings": "lm_head.weight" not in weights,
        "bos_token_id": int(metadata["tokenizer.ggml.bos_token_id"].item()),
        "eos_token_id": int(metadata["tokenizer.ggml.eos_token_id"].item()),
    }
    if bits:
        usual = min(bits.values())
        config["quantization"] = {"group_size": GROUP_SIZE, "bits": usual} | {
            layer: {"group_size": GROUP_SIZE, "bits": b} for layer, b in bits.items() if b != usual
        }
    return config


def _bits(weights: dict[str, Any], layer: str) -> int:
    packed, groups = weights[f"{layer}.weight"].shape[-1], weights[f"{layer}.scales"].shape[-1]
    return int(packed * 32 // (groups * GROUP_SIZE))


def _write_tokenizer(metadata: dict[str, Any], folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    kind = (metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre"))
    if kind != ("gpt2", "smollm"):
        raise PullError(
            f"GGUF tokenizer {kind} is not known, only gpt2/smollm: name an mlx-lm folder or hf: "
            "repository of this model instead"
        )
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=[tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]],
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = metadata["tokenizer.ggml.token_type"].tolist()
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind_of in zip(tokens, types, strict=True)
            if kind_of == _SPECIAL
        ]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=tokens[int(metadata["tokenizer.ggml.bos_token_id"].item())],
        eos_token=tokens[int(metadata["tokenizer.ggml.eos_token_id"].item())],
        unk_token=tokens[int(metadata["tokenizer.ggml.unknown_token_id"].item())],
        chat_template=metadata["tokenizer.chat_template"],
        clean_up_tokenization_spaces=False,
        model_max_length=int(metadata["llama.context_length"].item()),
    ).save_pretrained(folder)


def _round(value: Any) -> float:
    # GGUF stores fp32: 1e-5 must not become 9.999999747378752e-06.
    return float(f"{value.item():.7g}")
