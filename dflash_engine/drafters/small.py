"""Classic speculative decoding: a smaller model of the same tokenizer drafts token by token.

For targets that have no DFlash draft (Leviathan et al., arXiv 2211.17192).
"""

from pathlib import Path

import mlx.core as mx
import numpy as np

from ..errors import UnsupportedDraftError
from ..fit import Precision
from ..sampling import Distribution, Draft, Sampling, first_choices
from ..targets import Target, load
from .protocol import TokensOnly

CANDIDATES = 64  # of the draft's tokens that one is drawn from above temperature 0
PREFILL_STEP = 512


class Small:
    """A draft model that writes ``width`` tokens a round.

    Raises UnsupportedDraftError when its tokens are not the target's, or its cache cannot be taken
    back by several forwards.
    """

    name = "small"
    taps: tuple[int, ...] = ()

    @property
    def most(self) -> int:
        """The most tokens of one proposal."""
        return self.width

    def __init__(
        self, folder: Path, target: Target, width: int = 4, precision: Precision = "auto"
    ) -> None:
        self.model = load(folder, folder.name, precision)
        self.width = width
        own, vocab = self.model.tokenizer.get_vocab(), target.tokenizer.get_vocab()
        if own != vocab:
            differing = len(own.items() ^ vocab.items())
            raise UnsupportedDraftError(
                f"{folder.name} has another tokenizer than {target.name} ({differing} entries "
                "differ): choose a smaller model of the same family"
            )
        if not self.model.only_grows:
            raise UnsupportedDraftError(
                f"{folder.name} has sliding or recurrent layers, which forget what a refused draft "
                "would need again: choose a draft model without"
            )
        self.vocab_size = min(self.model.vocab_size, target.vocab_size)

    def begin(self, sampling: Sampling, seed: int | None) -> "SmallProposer":
        """Start with an empty cache."""
        return SmallProposer(self, sampling, seed)


class SmallProposer(TokensOnly):
    """One request's draft cache, and the tokens in it."""

    def __init__(self, drafter: Small, sampling: Sampling, seed: int | None) -> None:
        self._drafter = drafter
        self._sampling = sampling
        # Not the stream of the verifier, whose draws must not depend on the draft's.
        self._random = np.random.default_rng(None if seed is None else seed + 1)
        self._cache = drafter.model.make_cache()
        self._read: list[int] = []
        self._sure = 0  # of those read, known to be the target's

    def propose(self, tokens: list[int], most: int, given: int = 0) -> Draft:
        """Read what is new in ``tokens``, then write; nothing where the draft's context ends."""
        width = min(self._drafter.width, most)
        if len(tokens) + width > self._drafter.model.context:
            return Draft()
        known = min(len(self._read), len(tokens) - 1)  # the anchor is read anew, for its logits
        while self._sure < known and self._read[self._sure] == tokens[self._sure]:
            self._sure += 1
        self._cache.roll_back(len(self._read) - self._sure)
        del self._read[self._sure :]
        while len(tokens) - len(self._read) > PREFILL_STEP:
            self._forward(tokens[len(self._read) :][:PREFILL_STEP])
            mx.eval(self._cache.state)
        logits = self._forward(tokens[len(self._read) :])
        return self._greedy(logits, width) if self._sampling.greedy else self._drawn(logits, width)

    def _greedy(self, logits: mx.array, width: int) -> Draft:
        # All forwards are queued before the first token is read.
        chosen = [first_choices(logits[None])]
        for _ in range(width - 1):
            out, _ = self._drafter.model.forward(chosen[-1], self._cache, undoable=False)
            chosen.append(first_choices(out[0, -1:, : self._drafter.vocab_size]))
        draft: list[int] = mx.concatenate(chosen).tolist()  # type: ignore[assignment]
        self._read += draft[:-1]
        return Draft(draft)

    def _drawn(self, logits: mx.array, width: int) -> Draft:
        distributions = [self._distribution(logits)]
        draft = [distributions[0].draw(self._random)]
        for _ in range(width - 1):
            distributions.append(self._distribution(self._forward(draft[-1:])))
            draft.append(distributions[-1].draw(self._random))
        return Draft(draft, distributions)

    def _forward(self, tokens: list[int]) -> mx.array:
        logits, _ = self._drafter.model.forward(tokens, self._cache, undoable=False)
        self._read += tokens
        return logits[0, -1, : self._drafter.vocab_size]

    def _distribution(self, logits: mx.array) -> Distribution:
        # Any distribution is a valid one to draw from; the likeliest tokens are nearly all of it.
        count = min(CANDIDATES, logits.size)
        likeliest = mx.sort(mx.argpartition(logits, -count)[-count:])
        scores = np.array(logits[likeliest].astype(mx.float32), np.float64)
        own = self._sampling.distribution(scores)
        return Distribution(np.array(likeliest, np.int64)[own.tokens], own.probabilities)
