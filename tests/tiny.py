"""Tiny random checkpoints in the layout of real ones, for tests that need a model and no answers.

Each builder writes a folder once a process and returns it. The weights are shaped so that greedy
text wanders over many tokens and now and then reaches the end token.
"""

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map

VOCAB = 288
END, TURN, START, MASK = 256, 257, 258, 259  # after the 256 byte tokens
HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 32, 4, 4, 2, 8
CONTEXT = 1024
_CHAT_TEMPLATE = (
    "{% for m in messages %}<start>{{ m['role'] }}\n{{ m['content'] }}<turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start>assistant\n{% endif %}"
)


@functools.cache
def _home() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="tiny-models-")


def _folder(name: str) -> Path:
    folder = Path(_home().name) / name
    folder.mkdir()
    return folder


def write_tokenizer(folder: Path) -> None:
    """A tokenizer with one token a byte, four special tokens, and unused ones up to VOCAB."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: i for i, letter in enumerate(letters)}
    vocab |= {name: 256 + i for i, name in enumerate(("<end>", "<turn>", "<start>", "<mask>"))}
    vocab["<|endoftext|>"] = len(vocab)  # transformers' qwen3_5 would add it past the end
    vocab |= {f"<unused{i}>": i for i in range(len(vocab), VOCAB)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(name, special=True) for name in ("<end>", "<turn>", "<start>", "<mask>")]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<end>",
        chat_template=_CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT,
    ).save_pretrained(folder)


def _write_model(folder: Path, model: nn.Module, config: dict[str, Any]) -> None:
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder)


def _shake(model: nn.Module, key: int, scale: float) -> None:
    mx.random.seed(key)
    model.update(
        tree_map(
            lambda array: (
                mx.random.normal(array.shape) * scale
                if array.ndim > 1
                else array + mx.random.normal(array.shape) * 0.1
            ),
            model.parameters(),
        )
    )


def _wander(embedding: nn.Module, head: nn.Module | None, end_weight: float) -> None:
    # Text tokens only, and an end token that wins once in a while.
    allowed = mx.array([1.0 if i < 256 else end_weight * (i == END) for i in range(VOCAB)])
    (head or embedding).weight = (head or embedding).weight * allowed[:, None]
    mx.eval(embedding.weight)


def _config(kind: str, **more: Any) -> dict[str, Any]:
    return {
        "model_type": kind,
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "intermediate_size": 64,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "rms_norm_eps": 1e-6,
        "vocab_size": VOCAB,
        "max_position_embeddings": CONTEXT,
        "rope_theta": 10000.0,
        "eos_token_id": END,
    } | more


@functools.cache
def llama(traditional: bool = False, end_weight: float = 1.25) -> Path:
    """Head tied to the embedding; ``traditional`` pairs neighbouring rotary dimensions."""
    from mlx_lm.models import llama as code

    config = _config("llama", rope_traditional=traditional, tie_word_embeddings=True)
    model = code.Model(code.ModelArgs.from_dict(config))
    _shake(model, 3 + traditional, 0.35)
    _wander(model.model.embed_tokens, None, end_weight)
    folder = _folder(f"llama-{traditional}-{end_weight}")
    _write_model(folder, model, config)
    return folder


@functools.cache
def qwen2() -> Path:
    """With biases on queries, keys and values."""
    from mlx_lm.models import qwen2 as code

    config = _config("qwen2", tie_word_embeddings=True)
    model = code.Model(code.ModelArgs.from_dict(config))
    _shake(model, 5, 0.35)
    _wander(model.model.embed_tokens, None, 1.25)
    folder = _folder("qwen2")
    _write_model(folder, model, config)
    return folder


@functools.cache
def qwen3(end_weight: float = 1.25) -> Path:
    """With a head of its own, and norms on queries and keys."""
    from mlx_lm.models import qwen3 as code

    config = _config("qwen3", tie_word_embeddings=False, head_dim=HEAD_DIM)
    model = code.Model(code.ModelArgs.from_dict(config))
    _shake(model, 7, 0.35)
    _wander(model.model.embed_tokens, model.lm_head, end_weight)
    folder = _folder(f"qwen3-{end_weight}")
    _write_model(folder, model, config)
    return folder


@functools.cache
def windowed() -> Path:
    """gpt_oss: rotating caches on every other layer."""
    from mlx_lm.models import gpt_oss as code

    config = _config(
        "gpt_oss",
        head_dim=HEAD_DIM,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=16,
        layer_types=["sliding_attention", "full_attention"] * (LAYERS // 2),
    )
    model = code.Model(code.ModelArgs.from_dict(config))
    _shake(model, 9, 0.35)
    _wander(model.model.embed_tokens, model.lm_head, 1.25)
    folder = _folder("windowed")
    _write_model(folder, model, config)
    return folder


@functools.cache
def heads(size: int) -> Path:
    """A llama with one head of ``size`` dimensions, as its keys and values in few bits need."""
    from mlx_lm.models import llama as code

    config = _config(
        "llama",
        head_dim=size,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    model = code.Model(code.ModelArgs.from_dict(config))
    _shake(model, 13, 0.35)
    _wander(model.model.embed_tokens, None, 0.0)
    folder = _folder(f"heads-{size}")
    _write_model(folder, model, config)
    return folder


@functools.cache
def small_draft() -> Path:
    """``llama(end_weight=0.0)`` without its last layer: the smaller model of a classic draft, which
    often guesses right.
    """
    whole = llama(end_weight=0.0)
    config = json.loads((whole / "config.json").read_text()) | {"num_hidden_layers": LAYERS - 1}
    weights = mx.load(str(whole / "model.safetensors"))
    assert isinstance(weights, dict)
    kept = {name: w for name, w in weights.items() if f"layers.{LAYERS - 1}." not in name}
    folder = _folder("small-draft")
    mx.save_safetensors(str(folder / "model.safetensors"), kept, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder)
    return folder


FULL, SLIDING = "full_attention", "sliding_attention"
WINDOW = 16
_SLIDES = {"sliding_window": WINDOW, "layer_types": [SLIDING, FULL] * 2}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_SHARED_EXPERT = {"shared_expert_intermediate_size": 16}
_LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": HEADS,
}
_DEEPSEEK = _LATENT | {
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
}
_LONGCAT = _LATENT | {
    "num_layers": 2,
    "attention_method": "MLA",
    "zero_expert_type": "identity",
    "ffn_hidden_size": 64,
    "moe_topk": 2,
    "expert_ffn_hidden_size": 32,
    "n_routed_experts": 4,
    "zero_expert_num": 2,
    "routed_scaling_factor": 1.0,
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
    "attention_bias": False,
}
_DELTA = {
    "head_dim": HEAD_DIM,
    "linear_num_key_heads": 2,  # not as many as value heads, as in all published ones
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
    "tie_word_embeddings": False,
}
_MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_proj_bias": False,
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_n_groups": 1,
    "mamba_conv_bias": True,
}
_MAMBA2 = {
    "conv_kernel": 4,
    "layer_norm_epsilon": 1e-5,
    "use_bias": False,
    "use_conv_bias": True,
}
_GRANITE = {
    "logits_scaling": 0.5,
    "attention_multiplier": 0.3,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.7,
    "attention_bias": False,
    "mlp_bias": False,
}
_CONVOLVED = {
    "norm_eps": 1e-5,
    "conv_bias": False,
    "conv_L_cache": 3,
    "layer_types": ["conv", FULL] * 2,
}
_GEMMA3 = {
    "head_dim": HEAD_DIM,
    "query_pre_attn_scalar": 8,
    "sliding_window": WINDOW,
    "sliding_window_pattern": 2,
}
_GEMMA4 = {
    "head_dim": HEAD_DIM,
    "global_head_dim": 2 * HEAD_DIM,
    "sliding_window": WINDOW,
    "num_hidden_layers": LAYERS + 1,
    "layer_types": [SLIDING, FULL, SLIDING, FULL, SLIDING],
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB,
}
_GPT2 = {"n_embd": HIDDEN, "n_head": HEADS, "n_layer": LAYERS, "n_positions": CONTEXT}

# What a config of each kind has beside _config. mlx-lm's model type is the kind unless given.
_KINDS: dict[str, dict[str, Any]] = {
    "afm7": {
        "hidden_dim": HIDDEN,
        "num_layers": LAYERS,
        "num_kv_reuse_layers": 1,
        "num_heads": HEADS,
        "num_kv_heads": KV_HEADS,
    },
    "baichuan_m1": {"sliding_window": WINDOW, "sliding_window_layers": [0, 2], "conv_window": 2},
    "bailing_moe_linear": _EXPERTS
    | {
        "num_shared_experts": 1,
        "norm_topk_prob": True,
        "first_k_dense_replace": 1,
        "layer_group_size": 2,
        "group_norm_size": 2,
        "head_dim": HEAD_DIM,
        "n_group": 1,
        "topk_group": 1,
        "num_key_value_heads": HEADS,
    },
    "cohere": {"logit_scale": 0.5, "use_qk_norm": True},
    "cohere2": {
        "head_dim": HEAD_DIM,
        "logit_scale": 0.5,
        "sliding_window": WINDOW,
        "sliding_window_pattern": 2,
    },
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v32": _DEEPSEEK | {"index_head_dim": 16, "index_n_heads": 2, "index_topk": 24},
    "exaone4": {
        "head_dim": HEAD_DIM,
        "tie_word_embeddings": False,
        "sliding_window": WINDOW,
        "sliding_window_pattern": "LG",
        "layer_types": [SLIDING, FULL] * 2,
        "rope_scaling": None,
    },
    "exaone_moe": _EXPERTS
    | _SLIDES
    | {
        "head_dim": HEAD_DIM,
        "num_shared_experts": 1,
        "is_moe_layer": [False, True, True, True],
    },
    "falcon_h1": {
        "head_dim": HEAD_DIM,
        "mamba_d_conv": 4,
        "mamba_d_head": 8,
        "mamba_d_ssm": 64,
        "mamba_d_state": 8,
        "mamba_n_heads": 8,
        "mamba_rms_norm": True,
        "tie_word_embeddings": False,
    },
    "gemma": {"head_dim": HEAD_DIM},
    "gemma2": {"head_dim": HEAD_DIM, "query_pre_attn_scalar": 8},
    "gemma3": {"text_config": _config("gemma3_text", **_GEMMA3)},
    "gemma3_text": _GEMMA3,
    "gemma3n": {
        "text_config": _config(
            "gemma3n_text",
            **_GEMMA4,
            rope_local_base_freq=10000.0,
            final_logit_softcapping=30.0,
            activation_sparsity_pattern=[0.95, 0.95, 0.0, 0.0, 0.0],
            altup_num_inputs=2,
            altup_coef_clip=120.0,
            altup_correct_scale=True,
            altup_active_idx=0,
            laurel_rank=8,
        )
    },
    "gemma4": {"text_config": _config("gemma4_text", **_GEMMA4)},
    "gemma4_text": _GEMMA4,
    "gemma4-experts": _GEMMA4
    | _SLIDES
    | {
        "model_type": "gemma4_text",
        "num_hidden_layers": LAYERS,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 16,
    },
    "glm4": {"attention_bias": True, "head_dim": HEAD_DIM, "partial_rotary_factor": 0.5},
    "gpt2": _GPT2 | {"n_ctx": CONTEXT, "layer_norm_epsilon": 1e-5, "num_key_value_heads": HEADS},
    "gpt_bigcode": _GPT2 | {"n_inner": 64, "layer_norm_epsilon": 1e-5},
    "gpt_neox": {
        "layer_norm_eps": 1e-5,
        "rotary_emb_base": 10000,
        "rotary_pct": 0.5,
        "num_key_value_heads": HEADS,
    },
    "gpt_oss": _SLIDES | {"head_dim": HEAD_DIM, "num_local_experts": 4, "num_experts_per_tok": 2},
    "granite": _GRANITE,
    "granitemoe": _GRANITE | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "granitemoehybrid": _GRANITE | _MAMBA | {"layer_types": ["mamba", "attention"] * 2},
    "hunyuan_v1_dense": {"head_dim": HEAD_DIM},
    "internlm3": {},
    "jamba": {
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_d_conv": 4,
        "mamba_d_state": 8,
        "mamba_expand": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
    "kimi_linear": _LATENT
    | _EXPERTS
    | {
        "model_max_length": CONTEXT,
        "head_dim": HEAD_DIM,
        "num_experts_per_token": 2,
        "num_shared_experts": 1,
        "first_k_dense_replace": 1,
        "linear_attn_config": {
            "num_heads": 4,
            "head_dim": 8,
            "short_conv_kernel_size": 4,
            "kda_layers": [1, 3],
            "full_attn_layers": [2, 4],
        },
    },
    "lfm2": _CONVOLVED
    | {
        "block_dim": HIDDEN,
        "block_multiple_of": 8,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
    },
    "lfm2_moe": _CONVOLVED
    | _EXPERTS
    | {"norm_topk_prob": True, "use_expert_bias": True, "num_dense_layers": 1},
    "llama": {},
    "llama4": {
        "text_config": _config(
            "llama4_text",
            attention_bias=False,
            attention_chunk_size=WINDOW,
            head_dim=HEAD_DIM,
            interleave_moe_layer_step=2,
            intermediate_size_mlp=64,
            num_experts_per_tok=1,
            num_local_experts=4,
            rope_scaling=None,
            use_qk_norm=True,
        )
    },
    "llama4_text": {
        "intermediate_size_mlp": 64,
        "head_dim": HEAD_DIM,
        "tie_word_embeddings": False,
        "no_rope_layers": [1, 1, 1, 0],
        "use_qk_norm": True,
    },
    "longcat_flash": _LONGCAT,
    "longcat_flash_ngram": _LONGCAT
    | {"ngram_vocab_size_ratio": 2, "emb_neighbor_num": 3, "emb_split_num": 2},
    "mamba": {
        "state_size": 8,
        "conv_kernel": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_rank": 4,
    },
    "mamba2": _MAMBA2
    | {
        "num_heads": 8,
        "head_dim": 8,
        "state_size": 8,
        "n_groups": 1,
        "tie_word_embeddings": True,
        "time_step_limit": (0.0, 100.0),
        "time_step_rank": "auto",
    },
    "mimo_v2_flash": {
        "num_experts_per_tok": 2,
        "hybrid_layer_pattern": [1, 0, 1, 0],
        "moe_layer_freq": [0, 1, 1, 1],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "sliding_window_size": WINDOW,
        "moe_intermediate_size": 32,
        "n_shared_experts": None,
        "n_routed_experts": 4,
        "routed_scaling_factor": None,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
        "layernorm_epsilon": 1e-5,
        "swa_rope_theta": 10000.0,
        "swa_num_attention_heads": HEADS,
        "swa_num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "v_head_dim": HEAD_DIM,
        "swa_head_dim": HEAD_DIM,
        "swa_v_head_dim": HEAD_DIM,
        "partial_rotary_factor": 0.5,
    },
    "minicpm3": _LATENT
    | {
        "dim_model_base": 8,
        "scale_depth": 1.4,
        "scale_emb": 4.0,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0] * 4,
            "long_factor": [1.0] * 4,
            "original_max_position_embeddings": CONTEXT,
        },
    },
    "minimax": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 0,
        "rotary_dim": 4,
        "head_dim": HEAD_DIM,
    },
    "ministral3": _SLIDES
    | {
        "rope_parameters": {
            "rope_theta": 10000.0,
            "rope_type": "default",
            "llama_4_scaling_beta": 0.1,
            "original_max_position_embeddings": 32,
        },
    },
    "mistral": _SLIDES | {"tie_word_embeddings": False},
    "mistral-short": {
        "model_type": "mistral",
        "num_hidden_layers": 2,
        "sliding_window": WINDOW,
        "layer_types": [SLIDING, FULL],
        "max_position_embeddings": 8192,
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "muse_glimmer": _SLIDES | {"head_dim": HEAD_DIM, "output_multiplier": 1.0},
    "nemotron_h": _MAMBA2
    | {
        "attention_bias": False,
        "mlp_bias": False,
        "head_dim": HEAD_DIM,
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "mamba_proj_bias": False,
        "ssm_state_size": 8,
        "n_groups": 2,
        "hybrid_override_pattern": ["M", "*", "M", "-"],
    },
    "olmo3": _SLIDES | {"tie_word_embeddings": False},
    "olmo_hybrid": _DELTA
    | {
        "linear_num_key_heads": 4,
        "linear_allow_neg_eigval": True,
        "attention_bias": False,
        "layer_types": ["linear_attention", FULL] * 2,
    },
    "phi3": {"partial_rotary_factor": 0.5},
    "plamo2": {
        "hidden_size_per_head": 8,
        "mamba_d_state": 8,
        "mamba_num_heads": 8,
        "mamba_step": 2,
        "attention_window_size": WINDOW,
        "full_attention_idx": [1],
    },
    "plamo3": {"head_dim": HEAD_DIM, "window_size": WINDOW, "sliding_window_pattern": 2},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": HEAD_DIM, "tie_word_embeddings": False},
    "qwen3_5": _DELTA,
    "qwen3_5-tied": _DELTA | {"model_type": "qwen3_5", "tie_word_embeddings": True},
    "qwen3_5-nested": {
        "model_type": "qwen3_5",
        "text_config": _config("qwen3_5_text", **_DELTA),
    },
    "qwen3_5_moe": {
        "text_config": _config("qwen3_5_moe_text", **_DELTA, **_EXPERTS, **_SHARED_EXPERT)
    },
    "qwen3_moe": _EXPERTS
    | {
        "head_dim": HEAD_DIM,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [1],
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
    },
    "qwen3_next": _DELTA
    | _EXPERTS
    | _SHARED_EXPERT
    | {"decoder_sparse_step": 1, "mlp_only_layers": [1], "partial_rotary_factor": 0.5},
    "recurrent_gemma": {
        "attention_bias": False,
        "conv1d_width": 4,
        "logits_soft_cap": 30.0,
        "attention_window_size": WINDOW,
        "block_types": ["recurrent", "attention"],
    },
    "rwkv7": {
        "norm_eps": 1e-5,
        "head_dim": HEAD_DIM,
        "a_low_rank_dim": 8,
        "v_low_rank_dim": 8,
        "gate_low_rank_dim": 8,
        "decay_low_rank_dim": 8,
    },
    "seed_oss": {"head_dim": HEAD_DIM, "tie_word_embeddings": False},
    "smollm3": {"tie_word_embeddings": False},
    "stablelm": {"use_qkv_bias": True, "partial_rotary_factor": 0.5, "layer_norm_eps": 1e-5},
    "step3p5": _SLIDES
    | {
        "num_attention_groups": KV_HEADS,
        "head_dim": HEAD_DIM,
        "moe_num_experts": 4,
        "moe_top_k": 2,
        "moe_intermediate_size": 32,
        "share_expert_dim": 16,
        "moe_layers_enum": "1,2,3",
        "attention_other_setting": {
            "num_attention_heads": HEADS,
            "num_attention_groups": KV_HEADS,
        },
    },
}
# Heads and latents that keys and values in few bits would fit.
_KINDS |= {
    "deepseek_v3-wide": _DEEPSEEK
    | {"model_type": "deepseek_v3", "kv_lora_rank": 32, "qk_rope_head_dim": 32},
    "gemma2-wide": _KINDS["gemma2"] | {"model_type": "gemma2", "head_dim": 32},
    "gemma4-wide": _GEMMA4 | {"model_type": "gemma4_text", "head_dim": 32, "global_head_dim": 64},
    "gpt_oss-wide": _KINDS["gpt_oss"] | {"model_type": "gpt_oss", "head_dim": 32},
    "mistral-wide": _SLIDES | {"model_type": "mistral", "head_dim": 32},
}
KINDS = tuple(_KINDS)

# A scaled embedding outweighs all layers and text stands still: smaller tables for these.
_SMALL_TABLES = {"gemma2": 0.1, "gemma3n": 0.1, "gemma4": 0.1, "plamo2": 0.03, "plamo3": 0.03}
_LARGE_WEIGHTS = ("cohere", "rwkv7")  # or too little becomes of the layers
_KEPT = ("A_log", "dt_bias", "D", "freqs", "inv_freq", "w0")  # time constants, as mlx-lm makes them
_HEADS = ("lm_head", "embed_out", "output")


def model(kind: str, end_weight: float = 1.25, letters: int = 256, seed: int = 17) -> Path:
    """A model of one of :data:`KINDS`; its text is nearly all of the first ``letters`` bytes."""
    return _model(kind, end_weight, letters, seed)  # one key, however the arguments were given


@functools.cache
def _model(kind: str, end_weight: float, letters: int, seed: int) -> Path:
    from mlx_lm.utils import _get_classes

    config = json.loads(json.dumps(_config(kind, **_KINDS[kind])))
    model_class, args_class = _get_classes(config)
    model = model_class(args_class.from_dict(json.loads(json.dumps(config))))
    table = next((s for name, s in _SMALL_TABLES.items() if kind.startswith(name)), 1.0)
    scale = 1.0 if kind in _LARGE_WEIGHTS else 0.35
    mx.random.seed(seed)
    weights = {}
    for name, array in tree_flatten(model.parameters()):
        if name.split(".")[-1] in _KEPT or not mx.issubdtype(array.dtype, mx.floating):
            weights[name] = array
        elif array.ndim > 1:
            weights[name] = mx.random.normal(array.shape) * scale
        else:
            weights[name] = array + mx.random.normal(array.shape) * 0.1
    tables = [n for n, a in weights.items() if a.ndim == 2 and len(a) == VOCAB and "per_" not in n]
    for name in tables:
        weights[name] = weights[name] * table
    allowed = mx.array([i < letters or end_weight * (i == END) or 0.02 for i in range(VOCAB)])
    for name in [n for n in tables if n.split(".")[-2] in _HEADS] or tables:
        weights[name] = weights[name] * allowed[:, None]
    model.load_weights(list(weights.items()))
    mx.eval(model.parameters())
    folder = _folder(f"{kind}-{end_weight}-{letters}-{seed}")
    _write_model(folder, model, config)
    return folder


TAPS = (0, 1, 3)
DRAFT_HEADS, DRAFT_KV_HEADS, DRAFT_HEAD_DIM, DRAFT_INNER = 4, 2, 16, 48


def draft_config(layer_types: tuple[str, ...] = (FULL, FULL), **more: Any) -> dict[str, Any]:
    """A DFlash 1 draft's config; ``more`` replaces keys, None removes one, and what is under
    ``dflash_config`` is merged with what is there.
    """
    own = {"target_layer_ids": list(TAPS), "mask_token_id": MASK} | more.pop("dflash_config", {})
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": HIDDEN,
        "num_hidden_layers": len(layer_types),
        "num_attention_heads": DRAFT_HEADS,
        "num_key_value_heads": DRAFT_KV_HEADS,
        "head_dim": DRAFT_HEAD_DIM,
        "intermediate_size": DRAFT_INNER,
        "vocab_size": VOCAB,
        "rms_norm_eps": 1e-6,
        "rope_theta": 20000.0,
        "max_position_embeddings": CONTEXT,
        "num_target_layers": LAYERS,
        "block_size": 6,
        "layer_types": list(layer_types),
        "sliding_window": 12 if SLIDING in layer_types else None,
        "dflash_config": own,
    } | more
    config["dflash_config"] = {k: v for k, v in own.items() if v is not None}
    return {key: value for key, value in config.items() if value is not None}


def draft_weights(config: dict[str, Any], seed: int = 11) -> dict[str, mx.array]:
    """Random tensors under the names of z-lab's checkpoints, norms included."""
    mx.random.seed(seed)
    hidden, head, inner = config["hidden_size"], config["head_dim"], config["intermediate_size"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    taps = len(config["dflash_config"]["target_layer_ids"])
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, taps * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for i in range(config["num_hidden_layers"]):
        shapes |= {
            f"layers.{i}.{name}.weight": shape
            for name, shape in {
                "self_attn.q_proj": (queries, hidden),
                "self_attn.k_proj": (keys, hidden),
                "self_attn.v_proj": (keys, hidden),
                "self_attn.o_proj": (hidden, queries),
                "self_attn.q_norm": (head,),
                "self_attn.k_norm": (head,),
                "mlp.gate_proj": (inner, hidden),
                "mlp.up_proj": (inner, hidden),
                "mlp.down_proj": (hidden, inner),
                "input_layernorm": (hidden,),
                "post_attention_layernorm": (hidden,),
            }.items()
        }
    return {
        name: mx.random.normal(shape) * 0.3 if len(shape) > 1 else 1 + mx.random.normal(shape) / 5
        for name, shape in shapes.items()
    }


def write_draft(
    folder: Path, config: dict[str, Any], weights: dict[str, mx.array] | None = None
) -> Path:
    """Write a draft of ``config`` into ``folder``, which is made."""
    folder.mkdir(parents=True)
    weights = draft_weights(config) if weights is None else weights
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@functools.cache
def draft() -> Path:
    """A random draft with full attention, which hardly ever guesses right."""
    return write_draft(Path(_home().name) / "draft", draft_config())
