"""Random drafts in every packaging, beside those of ``tiny``: each function gives a config and
tensors for ``tiny.write_draft``.
"""

from typing import Any

import mlx.core as mx
import numpy as np
import tiny

Draft = tuple[dict[str, Any], dict[str, mx.array]]
FULL, SLIDING = tiny.FULL, tiny.SLIDING
RANK, TOP_K, TAPS, GROUP = 5, 4, 2, 8  # of DFlash 2


def zlab(layer_types: tuple[str, ...] = (FULL, FULL), seed: int = 11, **more: Any) -> Draft:
    """DFlash 1 in z-lab's packaging; ``more`` as in ``tiny.draft_config``."""
    config = tiny.draft_config(layer_types, **more)
    weights = tiny.draft_weights(config, seed)
    if config.get("attention_bias"):
        for i in range(len(layer_types)):
            for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                projection = f"layers.{i}.self_attn.{name}"
                rows = weights[f"{projection}.weight"].shape[0]
                weights[f"{projection}.bias"] = mx.random.normal((rows,)) * 0.3
    return config, weights


def zlab2(layer_types: tuple[str, ...] = (SLIDING, SLIDING), **more: Any) -> Draft:
    """DFlash 2, all its layers sliding and not causal as in the published ones."""
    own = {
        "block_size": 6,
        "conv_kernel_size": TAPS,
        "conv_group_size": GROUP,
        "selector_rank": RANK,
        "selector_top_k": TOP_K,
    } | more.pop("dflash_config", {})
    options = {"architectures": ["DFlash2DraftModel"], "is_causal": False, "block_size": None}
    config, weights = zlab(layer_types, dflash_config=own, **(options | more))
    hidden, groups = config["hidden_size"], config["hidden_size"] // GROUP
    for i in range(len(layer_types)):
        for name in ("attention_conv", "mlp_conv"):
            identity = mx.array([1.0] + [0.0] * (TAPS - 1))[:, None]
            weights[f"layers.{i}.{name}.base_kernel"] = (
                identity + mx.random.normal((2, TAPS, hidden)) * 0.3
            )
            weights[f"layers.{i}.{name}.kernel_projection.weight"] = (
                mx.random.normal((2 * TAPS * groups, hidden)) * 0.1
            )
    selector = "candidate_selector"
    for name in ("predecessor_codebook", "successor_codebook"):
        weights[f"{selector}.{name}"] = mx.random.normal((tiny.VOCAB, RANK))
    weights[f"{selector}.hidden_projection.weight"] = mx.random.normal((RANK, hidden)) * 0.3
    return config, weights


def deepspec(draft: Draft) -> Draft:
    """A z-lab draft as DeepSpec would pack it: a flat config, and copies of embedding and head."""
    config, weights = draft
    flat = {key: value for key, value in config.items() if key != "dflash_config"}
    flat |= config["dflash_config"] | {
        "architectures": ["Qwen3DSparkModel"],
        "markov_rank": 0,
        "enable_confidence_head": False,
        "num_anchors": 512,
    }
    return flat, weights | _copies(tiny.VOCAB)


def speculators(draft: Draft, kept: list[int] | None = None, **more: Any) -> Draft:
    """A z-lab draft as vLLM's speculators would pack it.

    ``kept``: the tokens of a reduced vocabulary, ascending, whose head is random.
    """
    config, weights = draft
    own = config["dflash_config"]
    layers = {
        key: value
        for key, value in config.items()
        if key not in ("architectures", "block_size", "dflash_config", "num_target_layers")
    }
    del layers["rms_norm_eps"]  # the default, which is not written
    packed = {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "transformer_layer_config": layers,
        "draft_vocab_size": len(kept) if kept else tiny.VOCAB,
        "block_size": own.get("block_size") or config["block_size"],
        "aux_hidden_state_layer_ids": [index + 1 for index in own["target_layer_ids"]],
        "mask_token_id": own["mask_token_id"],
        "sample_from_anchor": False,
        "sliding_window_non_causal": config.get("is_causal") is False,
    }
    if "selector_rank" in own:
        names = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
        packed |= {"speculators_model_type": "dflash2"} | {name: own[name] for name in names}
    tensors = weights | _copies(len(kept) if kept else tiny.VOCAB)
    if kept:
        mx.random.seed(5)
        chosen = np.isin(np.arange(tiny.VOCAB), kept)
        tensors |= {
            "lm_head.weight": mx.random.normal((len(kept), tiny.HIDDEN)) * 0.3,
            "d2t": mx.array(np.array(kept) - np.arange(len(kept))),
            "t2d": mx.array(chosen),
        }
    return packed | more, tensors


def _copies(head: int) -> dict[str, mx.array]:
    # Copies of what is the target's, here of no use: nothing may read them.
    return {
        "embed_tokens.weight": mx.zeros((tiny.VOCAB, tiny.HIDDEN)),
        "lm_head.weight": mx.zeros((head, tiny.HIDDEN)),
    }
