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
    """gpt_oss: rotating caches on every other layer, which cannot be rolled back."""
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


FULL, SLIDING = "full_attention", "sliding_attention"
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
