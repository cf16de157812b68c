"""A target: an mlx-lm model, its tokenizer, and what the decode loop needs of them."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
import psutil
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import dequantize_model
from mlx_lm.utils import load as load_model

from ..errors import UnsupportedTargetError
from . import dense
from .taps import Taps

Precision = Literal["auto", "float32", "native"]


class Target:
    """A loaded model. Use it from one thread.

    ``tokenizer`` is mlx-lm's wrapper; ``context`` is the longest prompt plus answer, in tokens;
    ``stop_tokens`` end an answer; ``hidden_size`` and ``vocab_size`` are what a draft must match.
    """

    def __init__(self, name: str, model: nn.Module, tokenizer: Any, config: dict[str, Any]) -> None:
        self.name = name
        self.model = model
        self.tokenizer = tokenizer
        text = config.get("text_config", config)
        self.context = int(text.get("max_position_embeddings") or 4096)
        self.hidden_size = int(text.get("hidden_size") or 0)  # not every model names them so;
        self.vocab_size = int(text.get("vocab_size") or 0)  # those can have no draft
        self.stop_tokens = frozenset(int(token) for token in tokenizer.eos_token_ids)
        self._taps: Taps | None = None

    @property
    def layers(self) -> Sequence[nn.Module]:
        """The decoder layers, in order."""
        return self.model.layers  # type: ignore[no-any-return]

    @property
    def embedding(self) -> nn.Module:
        """The input embedding, which a draft borrows."""
        return self.model.model.embed_tokens

    @property
    def head(self) -> Callable[[mx.array], mx.array]:
        """Hidden states to logits: the model's own head, or its tied embedding."""
        if "lm_head" in self.model:
            return self.model.lm_head  # type: ignore[no-any-return]
        return self.embedding.as_linear  # type: ignore[no-any-return]

    def tap(self, indices: Sequence[int]) -> None:
        """From now on, :meth:`forward` also returns the outputs of these layers, from 0."""
        if self._taps is not None:
            raise UnsupportedTargetError(f"{self.name} is tapped already: one draft an engine")
        self._taps = Taps(self.layers, indices)

    def make_cache(self) -> list[Any]:
        """A new, empty cache."""
        return make_prompt_cache(self.model)

    def require_rollback(self) -> None:
        """Raise UnsupportedTargetError unless rejected tokens can be taken out of the cache."""
        cache = self.make_cache()
        if not dense.handles(cache):
            kinds = sorted({type(layer).__name__ for layer in cache})
            raise UnsupportedTargetError(
                f"{self.name} keeps {', '.join(kinds)}, whose rejected rows this version cannot "
                "take back: use drafter='none'"
            )

    def forward(self, tokens: mx.array, cache: list[Any]) -> tuple[mx.array, mx.array | None]:
        """Logits [1, M, vocab] of ``tokens`` [M], and the tapped features [1, M, taps x hidden]."""
        if self._taps is None:
            return self.model(tokens[None], cache=cache), None
        with self._taps.recording():
            logits = self.model(tokens[None], cache=cache)
            return logits, self._taps.features()

    def roll_back(self, cache: list[Any], rows: int) -> None:
        """Forget the last ``rows`` positions of ``cache``."""
        dense.roll_back(cache, rows)


def load(folder: Path, name: str, precision: Precision = "auto") -> Target:
    """Load an mlx-lm folder.

    ``precision``: ``native`` keeps weights as stored; ``float32`` makes them dense fp32, which is
    the fast form on CPU; ``auto`` does that on CPU where memory allows, and keeps them on Metal.
    """
    try:
        model, tokenizer = load_model(str(folder), lazy=True)[:2]
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise UnsupportedTargetError(f"{name} in {folder} cannot be loaded: {error}") from error
    if precision == "float32" or (precision == "auto" and _dense_pays(model)):
        model.set_dtype(mx.float32)  # first the scales, so that no weight is rounded to fp16
        dequantize_model(model)
    mx.eval(model.parameters())
    return Target(name, model, tokenizer, config)


def _dense_pays(model: nn.Module) -> bool:
    # 4-bit kernels on CPU take as long as ten fp32 ones for a prompt; but fp32 needs the memory.
    if mx.default_device().type == mx.gpu:
        return False
    size = sum(
        array.size * (32 // _BITS_AT_LEAST if array.dtype == mx.uint32 else 1)
        for _, array in tree_flatten(model.parameters())
    )
    return bool(size * 4 < psutil.virtual_memory().total / 3)


_BITS_AT_LEAST = 4  # of packed weights, to guess from above how many there are
