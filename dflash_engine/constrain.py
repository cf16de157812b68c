"""What may be written: constraints on the tokens of an answer.

A constraint says at each position which tokens may come next. The sampler takes all others out of
the scores, so that verifying a draft row by row gives what constrained decoding one token at a
time would. Where a single token may follow, it needs no model: such runs go into the draft.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Scores = NDArray[np.float64]  # logits of one position, [vocab]


class Constraint(Protocol):
    """What may follow in one answer. It starts at the answer's beginning; make one a request."""

    def allowed(self) -> NDArray[np.int64] | None:
        """The tokens that may come next, ascending, at least one; None: all.

        Stop tokens are among them where the answer may end. Behind a stop token it is None, since
        nothing that stands there is read.
        """
        ...

    def weights(self) -> NDArray[np.float64] | None:
        """Log weights to add to the logits of the allowed tokens, in their order; None: none."""
        ...

    def advance(self, token: int) -> None:
        """``token`` was written. ValueError if it is not allowed."""
        ...

    def back(self, count: int) -> None:
        """The last ``count`` tokens are taken back. ValueError if there were fewer."""
        ...


def masked(scores: Scores, constraint: Constraint) -> Scores:
    """``scores`` [vocab] with the weights added, and -inf for what is not allowed."""
    allowed, weights = constraint.allowed(), constraint.weights()
    if allowed is None:
        return scores if weights is None else scores + weights
    own = scores[allowed]
    result = np.full_like(scores, -np.inf)
    result[allowed] = own if weights is None else own + weights
    return result


def forced(constraint: Constraint, most: int) -> list[int]:
    """The tokens that must follow, up to the first choice, a stop token included; at most ``most``.

    The constraint is left where it was.
    """
    tokens: list[int] = []
    while len(tokens) < most:
        allowed = constraint.allowed()
        if allowed is None or len(allowed) > 1:
            break
        tokens.append(int(allowed[0]))
        constraint.advance(tokens[-1])
    constraint.back(len(tokens))
    return tokens


def permitted(constraint: Constraint, tokens: Sequence[int]) -> int:
    """How many of ``tokens``, from the first, may follow. The constraint is left where it was."""
    count = 0
    for token in tokens:
        if not is_allowed(token, constraint.allowed()):
            break
        constraint.advance(token)
        count += 1
    constraint.back(count)
    return count


def is_allowed(token: int, allowed: NDArray[np.int64] | None) -> bool:
    """Whether ``token`` is one of ``allowed``, which are ascending; None allows all."""
    if allowed is None:
        return True
    place = int(np.searchsorted(allowed, token))
    return place < len(allowed) and int(allowed[place]) == token


class Choice:
    """Exactly one of ``options``, then a stop token: an answer of yes or no, say.

    Where the answer must end, only the lowest of the stop tokens is allowed: no model need choose
    between them. ValueError without options or stop tokens, and for an option with a stop token.
    """

    def __init__(self, options: Sequence[Sequence[int]], stop_tokens: Iterable[int]) -> None:
        self._stop_tokens = sorted(set(stop_tokens))
        if not options or not self._stop_tokens:
            raise ValueError("a choice needs at least one option and one stop token")
        if any(token in self._stop_tokens for option in options for token in option):
            raise ValueError("an option holds a stop token, which would end the answer inside it")
        # After each token, the options that begin with those written; None behind a stop token.
        self._open: list[list[tuple[int, ...]] | None] = [[tuple(option) for option in options]]

    def allowed(self) -> NDArray[np.int64] | None:
        """The next tokens of the options still open, and stop tokens where one is complete."""
        options = self._open[-1]
        if options is None:
            return None
        written = len(self._open) - 1
        following = {option[written] for option in options if len(option) > written}
        if any(len(option) == written for option in options):
            following.update(self._stop_tokens if following else self._stop_tokens[:1])
        return np.array(sorted(following), np.int64)

    def weights(self) -> None:
        """None: all options are alike."""

    def advance(self, token: int) -> None:
        """``token`` was written. ValueError if it is not allowed."""
        options = self._open[-1]
        if not is_allowed(token, self.allowed()):
            raise ValueError(f"token {token} continues none of the options")
        written = len(self._open) - 1
        if options is None or token in self._stop_tokens:
            self._open.append(None)
        else:
            self._open.append([o for o in options if o[written : written + 1] == (token,)])

    def back(self, count: int) -> None:
        """The last ``count`` tokens are taken back. ValueError if there were fewer."""
        take_back(self._open, count)


def take_back(states: list[Any], count: int) -> None:
    """Drop the last ``count`` of ``states``, whose first one is that of nothing written."""
    if not 0 <= count < len(states):
        raise ValueError(f"cannot take back {count} tokens: {len(states) - 1} were written")
    del states[len(states) - count :]
