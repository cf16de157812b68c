"""Prompt lookup: continue the longest recent n-gram found in the prompt or the answer so far.

Answers over retrieved passages copy from them, and a copy can be read off. It costs no model call
(Saxena, prompt-lookup-decoding, 2023).
"""

from dataclasses import dataclass, field

from ..sampling import Draft, Sampling
from .protocol import Guess, TokensOnly

# That the next token is right after a match of 1, 2, ... tokens: where counting starts.
CHANCES = (0.35, 0.5, 0.6, 0.7, 0.8, 0.85, 0.88, 0.9)


@dataclass(frozen=True)
class Lookup:
    """``longest`` and ``shortest`` are the n-gram lengths tried, in that order. A match of
    ``longest`` tokens is a copy under way and drafts ``width`` more; a shorter one drafts
    ``short_width``, which a forward checks for little more than one token.

    The defaults were chosen by replaying 24 answers over the sample documents with the forward
    times of the embedded target on two CPU cores.
    """

    longest: int = 5
    shortest: int = 1
    width: int = 15
    short_width: int = 3
    name: str = "lookup"
    taps: tuple[int, ...] = ()

    @property
    def most(self) -> int:
        """The most tokens of one proposal."""
        return self.width

    def begin(self, sampling: Sampling, seed: int | None) -> "LookupProposer":
        """Start with an empty index."""
        return LookupProposer(self)


@dataclass
class LookupProposer(TokensOnly):
    """The n-grams of one request's tokens, each with the place where it last went on."""

    drafter: Lookup
    _next: dict[tuple[int, ...], int] = field(default_factory=dict)
    _indexed: int = 0

    def propose(self, tokens: list[int], most: int, given: int = 0) -> Draft:
        """The tokens that followed the last tokens when they last occurred."""
        guess = self.guess(tokens, min(most, self.drafter.width))
        if guess is None:
            return Draft()
        copying = guess.match == self.drafter.longest
        width = self.drafter.width if copying else self.drafter.short_width
        return Draft(guess.tokens[:width])

    def guess(self, tokens: list[int], most: int) -> Guess | None:
        """The same, at most ``most``, with the chances that matches of that length mostly have."""
        self._index(tokens)
        for length in range(self.drafter.longest, self.drafter.shortest - 1, -1):
            place = self._next.get(tuple(tokens[-length:]))
            if place is not None:
                copied = _continue(tokens, place, most)
                known = [CHANCES[min(length + i, len(CHANCES)) - 1] for i in range(len(copied))]
                return Guess(copied, known, length)
        return None

    def _index(self, tokens: list[int]) -> None:
        # An n-gram is entered once the token after it is known, so a suffix never finds itself.
        for end in range(max(self._indexed, 1), len(tokens)):
            for length in range(self.drafter.shortest, min(self.drafter.longest, end) + 1):
                self._next[tuple(tokens[end - length : end])] = end
        self._indexed = len(tokens)


def _continue(tokens: list[int], place: int, count: int) -> list[int]:
    # A match that reaches the end is a repetition under way: it goes on over itself.
    period = len(tokens) - place
    return [tokens[place + i % period] for i in range(count)]
