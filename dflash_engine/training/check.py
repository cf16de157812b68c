"""What is refused before any work starts."""

import math
from collections.abc import Sequence as Row

import psutil

from ..drafters.block import require_made_for
from ..drafters.block_checkpoint import FULL, BlockConfig
from ..errors import NotEnoughMemoryError, TrainingError
from ..targets import Target
from .recipe import Recipe
from .sequences import Sequence


def check(
    config: BlockConfig,
    target: Target,
    training: Row[Sequence],
    held_out: Row[Sequence],
    recipe: Recipe,
) -> None:
    """Raise UnsupportedDraftError where the draft does not fit the ``target``, TrainingError where
    it is of a kind not trained here, or the data are none, or no tokens of the target;
    NotEnoughMemoryError where a step does not fit into what is free.
    """
    check_draft(config, target)
    _require_data(target, training, held_out)
    _require_recipe(config, target, recipe)
    longest = max(len(sequence.tokens) for sequence in [*training, *held_out])
    need = step_bytes(
        config, longest, recipe.anchors, len(recipe.vocabulary or range(config.vocab_size))
    )
    free = psutil.virtual_memory().available
    if need > free:
        raise NotEnoughMemoryError(
            f"a training step takes about {need / 1e9:.1f} GB beside the target, {free / 1e9:.1f} "
            f"GB are free: use fewer anchors than {recipe.anchors}, a smaller vocabulary, fewer "
            f"layers, or sequences shorter than {longest} tokens"
        )


def check_draft(config: BlockConfig, target: Target) -> None:
    """What :func:`check` says of the draft alone, which is known before there are any data."""
    require_made_for(config, target, "to be trained")
    special = config.kind != "dflash" or config.from_anchor or config.softcap
    scaled = config.output_multiplier != 1
    if special or scaled or set(config.layer_types) != {FULL} or config.is_causal:
        raise TrainingError(
            "only DFlash 1 drafts with full attention are trained here, without soft-capping or an "
            "output_multiplier"
        )


def _require_data(target: Target, training: Row[Sequence], held_out: Row[Sequence]) -> None:
    for what, sequences in (("to train with", training), ("held out", held_out)):
        if not any(sequence.anchors for sequence in sequences):
            raise TrainingError(
                f"there is no answer of two tokens or more among the {len(sequences)} sequences "
                f"{what}: have the target write more"
            )
    most = max(max(sequence.tokens) for sequence in [*training, *held_out])
    if most >= target.vocab_size:
        raise TrainingError(f"the data have token {most}, {target.name} only {target.vocab_size}")


def _require_recipe(config: BlockConfig, target: Target, recipe: Recipe) -> None:
    vocabulary, sources = recipe.vocabulary, recipe.sources
    if vocabulary is not None and (not vocabulary or max(vocabulary) >= target.vocab_size):
        raise TrainingError(f"the vocabulary to train with holds none, or none of {target.name}'s")
    depth, count = len(target.layers), len(config.layer_types)
    if sources is not None and (len(sources) != count or not set(sources) <= set(range(depth))):
        raise TrainingError(
            f"the draft's {count} layers cannot begin as layers {list(sources)} of {target.name}, "
            f"which has {depth}: name one for each"
        )


def step_bytes(config: BlockConfig, tokens: int, anchors: int, vocabulary: int) -> int:
    """About what a step over one sequence of ``tokens`` takes: weights, two moments and two
    gradients, and all that the way back needs, in fp32.
    """
    hidden, inner = config.hidden_size, config.intermediate_size
    heads = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    layers, taps = len(config.layer_types), len(config.target_layers)
    weights = layers * hidden * (2 * heads + 2 * keys + 3 * inner) + taps * hidden * hidden
    rows = anchors * config.block_size
    seen = rows + tokens
    a_layer = rows * (6 * hidden + 5 * heads + 5 * inner) + 6 * seen * keys
    a_layer += 3 * config.num_attention_heads * rows * seen
    outside = tokens * (taps + 3) * hidden + 3 * rows * vocabulary
    return math.ceil(4 * (5 * weights + layers * a_layer + outside))
