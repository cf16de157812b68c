"""DFlash: a block of tokens in one draft pass, conditioned on the target's hidden states."""

from pathlib import Path

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ..errors import UnsupportedDraftError
from ..sampling import Distribution, Draft, Sampling
from ..targets import Target, head_over
from . import block_checkpoint, block_model
from .block_checkpoint import BlockConfig
from .context import Context, ContextSnapshot

CANDIDATES = 64  # tokens a slot is drawn from above temperature 0


class Block:
    """A draft bound to its target, whose layers it taps from now on.

    ``bits``, 8 or 4, quantises the draft's backbone. Raises UnsupportedDraftError when the draft
    cannot be run, or was made for another target; the target is left as it was then.
    """

    name = "block"

    def __init__(self, folder: Path, target: Target, bits: int | None = None) -> None:
        if bits not in (None, 4, 8):
            raise ValueError(f"bits must be 4, 8 or None, not {bits}")
        checkpoint = block_checkpoint.read(folder)
        self.config = checkpoint.config
        require_made_for(self.config, target, folder.name)
        full = target.embedding(mx.array([[0]])).dtype == mx.float32
        # With fp32 activations 16-bit weights would be converted at each call.
        self.model = block_model.build(checkpoint, mx.float32 if full else None, bits)
        self.target = target
        self.taps = self.config.target_layers
        self._scale = self.config.embedding_scale
        if self.config.scales_embedding:
            self._scale *= target.embedding_scale
        self.vocabulary = checkpoint.vocabulary
        self._head = target.head
        if self.vocabulary is not None:
            has_own = "lm_head" in self.model
            self._head = self.model.lm_head if has_own else head_over(target, self.vocabulary)
        target.tap(self.taps)

    def begin(self, sampling: Sampling, seed: int | None) -> "BlockProposer":
        """Start with an empty context."""
        return BlockProposer(self, sampling, seed)

    @property
    def most(self) -> int:
        """The most tokens of one proposal."""
        return self.config.slots

    def fill(
        self, known: list[int], count: int, contexts: list[Context]
    ) -> tuple[mx.array, mx.array]:
        """Hidden states [count, hidden] and logits [count, vocab] of the slots after ``known``.

        ``known`` are the anchor, and tokens behind it that are taken as given. The k-th row, from
        0, is for the token k + 1 places after the last of them.
        """
        unused = 0 if self.config.from_anchor else 1
        masks = [self.config.mask_token] * (count - 1 + unused)
        embedded = self.target.embedding(mx.array([[*known, *masks]]))
        if self._scale != 1:
            embedded = embedded * self._scale
        hidden = self.model(embedded, contexts, len(known) - 1 + unused)
        logits = self._head(hidden)[0]
        if self.config.output_multiplier != 1:
            logits = logits * self.config.output_multiplier
        if self.config.softcap:
            logits = mx.tanh(logits / self.config.softcap) * self.config.softcap
        return hidden[0], logits


def require_made_for(config: BlockConfig, target: Target, name: str) -> None:
    """Raise UnsupportedDraftError where draft ``name`` does not fit ``target``."""
    depth = len(target.layers)
    wrong = [
        f"its {what} is {draft}, that of {target.name} {own}"
        for what, draft, own in (
            ("hidden_size", config.hidden_size, target.hidden_size),
            ("vocab_size", config.vocab_size, target.vocab_size),
            ("num_target_layers", config.num_target_layers or depth, depth),
        )
        if draft != own
    ]
    beyond = [index for index in config.target_layers if not 0 <= index < depth]
    if beyond:
        wrong.append(f"it reads layers {beyond}, {target.name} has {depth}")
    if not 0 <= config.mask_token < target.vocab_size:
        wrong.append(f"its mask_token_id {config.mask_token} is no token of {target.name}")
    if wrong:
        raise UnsupportedDraftError(
            f"draft {name} was made for another target: {'; '.join(wrong)}. Use a draft made "
            f"for {target.name}"
        )


class BlockProposer:
    """One request's context, and its draws."""

    def __init__(self, drafter: Block, sampling: Sampling, seed: int | None) -> None:
        self._drafter = drafter
        # The selector's few candidates are drawn at the temperature, and not cut further.
        self._sampling = (
            sampling if drafter.config.block2 is None else Sampling(sampling.temperature)
        )
        # Not the stream of the verifier, whose draws must not depend on the draft's.
        self._random = np.random.default_rng(None if seed is None else [seed, 1])
        self._contexts = drafter.model.make_contexts()

    def observe(self, features: mx.array) -> None:
        """Project the features of S more positions into the draft's context."""
        self._drafter.model.observe(features, self._contexts)

    @property
    def state(self) -> list[mx.array]:
        """The context's keys and values."""
        return [array for context in self._contexts for array in context.arrays]

    def judge(self, kept: int, tried: int) -> None:
        """Nothing: it does not learn."""

    def snapshot(self) -> ContextSnapshot:
        """The context so far."""
        return ContextSnapshot.of(self._contexts)

    def restore(self, snapshot: ContextSnapshot) -> None:
        """Go on from a snapshot's context."""
        self._contexts = snapshot.contexts()

    def propose(self, tokens: list[int], most: int, given: int = 0) -> Draft:
        """Fill a block of up to ``most`` tokens after the anchor, in one draft pass."""
        drafter = self._drafter
        known = tokens[-1 - given :]
        anchor = known[-1]
        count = min(drafter.config.slots - len(known) + 1, most)
        if count < 1:
            return Draft()
        hidden, logits = drafter.fill(known, count, self._contexts)
        if drafter.config.block2 is not None:
            selector = drafter.model.candidate_selector
            candidates, scores = selector(hidden, logits, anchor)
        else:
            few = 1 if self._sampling.greedy else min(CANDIDATES, logits.shape[-1])
            candidates = _likeliest(logits, few)
            scores = mx.take_along_axis(logits, candidates, axis=-1)[:, None]
        scores = scores.astype(mx.float32)
        mx.eval(candidates, scores)
        ids = np.asarray(candidates)
        return walk(
            ids if drafter.vocabulary is None else drafter.vocabulary[ids],
            np.asarray(scores),
            self._sampling,
            self._random,
        )


def _likeliest(logits: mx.array, few: int) -> mx.array:
    if few == 1:
        return mx.argmax(logits, axis=-1, keepdims=True)
    return mx.argpartition(logits, -few, axis=-1)[:, -few:]


def walk(
    candidates: NDArray[np.integer],
    scores: NDArray[np.floating],
    sampling: Sampling,
    random: np.random.Generator,
) -> Draft:
    """Choose a token for each of n slots among its ``candidates`` [n, k], from left to right.

    ``scores`` [n, k, k]: row a of a slot's is for when candidate a of the slot before was chosen;
    [n, 1, k] where slots do not depend on one another.
    """
    tokens: list[int] = []
    distributions: list[Distribution] = []
    place = 0
    for ids, table in zip(candidates, scores, strict=True):
        own = table[place if len(table) > 1 else 0]
        if sampling.greedy:
            place = int(own.argmax())
        else:
            order = np.argsort(ids)
            among = sampling.distribution(own[order].astype(np.float64))
            drawn = among.draw(random)
            place = int(order[drawn])
            distributions.append(
                Distribution(ids[order[among.tokens]].astype(np.int64), among.probabilities)
            )
        tokens.append(int(ids[place]))
    return Draft(tokens, distributions or None)
