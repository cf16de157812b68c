"""What the decode loop asks of a drafter."""

from typing import Protocol

import mlx.core as mx

from ..sampling import Draft, Sampling


class Proposer(Protocol):
    """A drafter at work on one request."""

    def propose(self, tokens: list[int], features: mx.array | None, most: int) -> Draft:
        """At most ``most`` tokens that may follow ``tokens``; an empty draft is a valid answer.

        ``tokens`` are the prompt and the answer so far; the last one, the anchor, is not in the
        target's cache yet. ``features`` [1, S, taps x hidden] are the tapped hidden states of the S
        positions committed since the last call (the whole prompt at the first), or None without
        taps.
        """
        ...


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

    def begin(self, sampling: Sampling, seed: int | None) -> Proposer:
        """Start on a new request, whose tokens are chosen by ``sampling``."""
        ...
