"""A target: an mlx-lm model, its tokenizer, and what the decode loop needs of them."""

import json
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import dequantize_model
from mlx_lm.utils import load as load_model

from ..errors import UnsupportedTargetError
from ..fit import Precision, resolve_precision
from . import cache, dense, hybrid, probe, structure
from .cache import Cache
from .taps import Taps


class Target:
    """A loaded model. Use it from one thread.

    ``tokenizer`` is mlx-lm's wrapper; ``context`` is the longest prompt plus answer, in tokens;
    ``stop_tokens`` end an answer; ``hidden_size`` and ``vocab_size`` are what a draft must match.
    ``width_error`` is how far a logit was seen to move, in a probe when the model was loaded, when
    several tokens are read in one forward.
    """

    def __init__(
        self,
        name: str,
        model: nn.Module,
        tokenizer: Any,
        config: dict[str, Any],
        kv_bits: int | None = None,
        context: int | None = None,
    ) -> None:
        self.name = name
        self.model = model
        self.tokenizer = tokenizer
        text = config.get("text_config", config)
        most = int(text.get("max_position_embeddings") or 4096)
        self.context = min(context or most, most)
        # Not every model names it so; those can have no draft.
        self.hidden_size = int(text.get("hidden_size") or 0)
        self.vocab_size = int(text.get("vocab_size") or model(mx.array([[0]])).shape[-1])
        self.stop_tokens = frozenset(int(token) for token in tokenizer.eos_token_ids)
        self.kv_bits = kv_bits
        self._taps: Taps | None = None
        self._refusal: UnsupportedTargetError | None = None
        self.width_error = 0.0
        self._recorder: hybrid.Recorder | None = None
        if any(hybrid.handles(leaf) for leaf in cache.leaves(make_prompt_cache(model))):
            self._recorder = hybrid.Recorder(model, make_prompt_cache(model))
        probe.runs(self)
        try:
            probe.cache_kinds(self)
            self.width_error = probe.width_error(self)
        except UnsupportedTargetError as error:
            self._refusal = error

    @property
    def layers(self) -> Sequence[nn.Module]:
        """The decoder layers, in order."""
        return self.model.layers  # type: ignore[no-any-return]

    @cached_property
    def _structure(self) -> structure.Structure:
        return structure.find(self.model, self.name)

    @property
    def embedding(self) -> nn.Module:
        """The input embedding, which a draft borrows. UnsupportedTargetError if there is none."""
        return self._structure.embedding

    @property
    def embedding_scale(self) -> float:
        """What the model multiplies its embedding by."""
        return self._structure.embedding_scale

    @property
    def head(self) -> Callable[[mx.array], mx.array]:
        """Hidden states to logits: the model's own head, or its tied embedding."""
        return self._structure.head

    def tap(self, indices: Sequence[int]) -> None:
        """From now on, :meth:`forward` also returns the outputs of these layers, from 0.

        Raises UnsupportedTargetError if that changes the logits, or the layers do not give hidden
        states.
        """
        if self._taps is not None:
            raise UnsupportedTargetError(f"{self.name} is tapped already: one draft an engine")
        tokens = list(range(1, 9))
        plain, _ = self.forward(tokens, self.make_cache(), undoable=False)
        mx.eval(plain)
        self._taps = Taps(self.layers, indices)
        tapped, features = self.forward(tokens, self.make_cache(), undoable=False)
        shape = (1, len(tokens), len(indices) * self.hidden_size)
        if features is None or features.shape != shape or not mx.array_equal(plain, tapped).item():
            self.untap()
            raise UnsupportedTargetError(
                f"{self.name}: reading the hidden states of layers {list(indices)} changes what it "
                "computes, or they have another size: no draft model can be run with it"
            )

    def untap(self) -> None:
        """Take the taps off again, so that another draft can have its own."""
        if self._taps is not None:
            self._taps.remove()
            self._taps = None

    def make_cache(self, layers: list[Any] | None = None) -> Cache:
        """A new, empty cache; or one of ``layers`` that mlx-lm made for this model."""
        if layers is not None:
            return Cache(layers, self._recorder)
        if self.kv_bits:
            return Cache(cache.quantised(self.model, self.name, self.kv_bits), self._recorder)
        return Cache(make_prompt_cache(self.model), self._recorder)

    @property
    def only_grows(self) -> bool:
        """Whether its cache can be taken back by any number of positions."""
        return all(dense.handles(leaf) for leaf in cache.leaves(self.make_cache().layers))

    def require_rollback(self) -> None:
        """Raise UnsupportedTargetError if several tokens in one forward, some of which are then
        taken back, do not give what one at a time gives: the target can only decode plainly.
        """
        if self._refusal is not None:
            raise self._refusal

    def forward(
        self, tokens: Sequence[int] | mx.array, cache: Cache, *, undoable: bool = True
    ) -> tuple[mx.array, mx.array | None]:
        """Logits [1, M, vocab] of ``tokens`` [M], and the tapped features [1, M, taps x hidden].

        Rows can be taken back from ``cache`` if ``undoable``, which costs memory.
        """
        ids = tokens if isinstance(tokens, mx.array) else mx.array(list(tokens))
        with cache.reading(ids.size, undoable=undoable):
            if self._taps is None:
                return self.model(ids[None], cache=cache.layers), None
            with self._taps.recording():
                logits = self.model(ids[None], cache=cache.layers)
                return logits, self._taps.features()


def load(
    folder: Path,
    name: str,
    precision: Precision = "auto",
    kv_bits: int | None = None,
    context: int | None = None,
) -> Target:
    """Load an mlx-lm folder.

    ``precision``: ``native`` keeps weights as stored; ``float32`` makes them dense fp32, which is
    the fast form on CPU; ``auto``: see :func:`dflash_engine.fit.resolve_precision`.
    ``kv_bits``: 8 or 4 keeps keys and values of growing caches in that many bits. ``context``
    shortens the longest prompt plus answer.
    """
    try:
        model, tokenizer = load_model(str(folder), lazy=True)[:2]
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise UnsupportedTargetError(f"{name} in {folder} cannot be loaded: {error}") from error
    if resolve_precision(folder, precision) == "float32":
        model.set_dtype(mx.float32)  # first the scales, so that no weight is rounded to fp16
        dequantize_model(model)
    mx.eval(model.parameters())
    return Target(name, model, tokenizer, config, kv_bits, context)
