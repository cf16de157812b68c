"""What the decode loop asks of a drafter."""

from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx

from ..sampling import Draft, Sampling


@dataclass(frozen=True)
class Guess:
    """A continuation that costs no model: ``tokens``, and for each the chance that it is right if
    those before it are. ``match`` is how many tokens of the text led to it.
    """

    tokens: list[int]
    chances: list[float]
    match: int


class Proposer(Protocol):
    """A drafter at work on one request."""

    def observe(self, features: mx.array) -> None:
        """Learn of S more positions in the target's cache: their features [1, S, taps x hidden].

        Called for each position once, in order; never for a drafter without taps.
        """
        ...

    def propose(self, tokens: list[int], most: int, given: int = 0) -> Draft:
        """At most ``most`` tokens that may follow ``tokens``; an empty draft is a valid answer.

        ``tokens`` are the prompt and the answer so far. The last one, the anchor, is not in the
        target's cache yet; all before it are, and their features were observed. The last ``given``
        tokens stand behind the anchor: others propose them, and what comes back is to follow them.
        """
        ...

    def judge(self, kept: int, tried: int) -> None:
        """Of the first ``tried`` tokens proposed last, the first ``kept`` were kept."""
        ...

    def snapshot(self) -> Any:
        """What it knows of the positions observed, to go on from in another request; None if it
        needs nothing. See :mod:`dflash_engine.prefix_snapshot`.
        """
        ...

    def restore(self, snapshot: Any) -> None:
        """Go on from a snapshot, before anything was observed."""
        ...

    @property
    def state(self) -> list[mx.array]:
        """What it has computed for the positions observed, for the loop to evaluate between the
        chunks of a prompt.
        """
        ...


class TokensOnly:
    """What a proposer need not know if it reads tokens alone and does not learn."""

    def observe(self, features: mx.array) -> None:
        """Never called: it has no taps."""

    def judge(self, kept: int, tried: int) -> None:
        """Nothing to learn."""

    def snapshot(self) -> None:
        """None: it needs nothing to go on from."""

    def restore(self, snapshot: None) -> None:
        """Nothing to go on from."""

    @property
    def state(self) -> list[mx.array]:
        """Nothing that MLX computes."""
        return []


class Drafter(Protocol):
    """Makes a proposer for each request."""

    @property
    def name(self) -> str:
        """What it is called in settings and responses."""
        ...

    @property
    def taps(self) -> tuple[int, ...]:
        """The target layers whose outputs it reads."""
        ...

    @property
    def most(self) -> int:
        """The most tokens of one proposal."""
        ...

    def begin(self, sampling: Sampling, seed: int | None) -> Proposer:
        """Start on a new request, whose tokens are chosen by ``sampling``."""
        ...
