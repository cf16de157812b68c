"""DFlash 1: a block of tokens in one draft pass, conditioned on the target's hidden states."""

from pathlib import Path

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from ..errors import UnsupportedDraftError
from ..sampling import Draft, Sampler, Sampling
from ..targets import Target
from . import block_model


class Block:
    """A DFlash 1 draft bound to its target, whose layers it taps from now on.

    Raises UnsupportedDraftError when the draft was made for another target.
    """

    name = "block"

    def __init__(self, folder: Path, target: Target) -> None:
        self.config, self.model = block_model.load(folder)
        for what, draft, own in (
            ("hidden_size", self.config.hidden_size, target.hidden_size),
            ("vocab_size", self.config.vocab_size, target.vocab_size),
        ):
            if draft != own:
                raise UnsupportedDraftError(
                    f"{folder.name} has {what} {draft}, {target.name} has {own}: "
                    "this draft was made for another target"
                )
        wrong = [i for i in self.config.target_layers if not 0 <= i < len(target.layers)]
        if wrong:
            raise UnsupportedDraftError(
                f"{folder.name} reads layers {wrong}, {target.name} has {len(target.layers)}: "
                "this draft was made for another target"
            )
        if not 0 <= self.config.mask_token < target.vocab_size:
            raise UnsupportedDraftError(
                f"{folder.name}: mask_token_id {self.config.mask_token} is not a token of "
                f"{target.name}"
            )
        if target.embedding(mx.array([0])).dtype == mx.float32:
            self.model.set_dtype(mx.float32)  # or its weights would be converted at each call
        self.target = target
        self.taps = self.config.target_layers
        target.tap(self.taps)

    def begin(self, sampling: Sampling, seed: int | None) -> "BlockProposer":
        """Start with an empty draft cache."""
        return BlockProposer(self, sampling, seed)

    def logits(self, block: mx.array, features: mx.array, cache: list[KVCache]) -> mx.array:
        """Draft logits [rows - 1, vocab] for the masks of ``block`` [rows] = [anchor, mask, ...].

        Row k is for the token k + 1 places after the anchor: a mask is filled in its own place.
        """
        embedded = self.target.embedding(block[None]) * self.config.embedding_scale
        hidden = self.model(embedded, features, cache)
        logits = self.target.head(hidden[:, 1:])[0] * self.config.output_multiplier
        if self.config.softcap:
            logits = mx.tanh(logits / self.config.softcap) * self.config.softcap
        return logits


class BlockProposer:
    """One request's draft cache, which holds the context's keys and values only."""

    def __init__(self, drafter: Block, sampling: Sampling, seed: int | None) -> None:
        self._drafter = drafter
        self._sampling = sampling
        # Not the stream of the verifier, whose draws must not depend on the draft's.
        self._sampler = Sampler(sampling, None if seed is None else seed + 1)
        self._cache = [KVCache() for _ in drafter.model.layers]

    def propose(self, tokens: list[int], features: mx.array | None, most: int) -> Draft:
        """Fill a block of up to ``most`` masks after the anchor."""
        assert features is not None, "the target is tapped"
        count = min(self._drafter.config.block_size - 1, most)
        block = mx.array([tokens[-1]] + [self._drafter.config.mask_token] * count)
        logits = self._drafter.logits(block, features, self._cache)
        if self._sampling.greedy:
            return Draft(mx.argmax(logits, axis=-1).tolist())  # type: ignore[arg-type]
        probabilities = self._sampling.probabilities(logits)
        return Draft([self._sampler.draw(row) for row in probabilities], probabilities)
