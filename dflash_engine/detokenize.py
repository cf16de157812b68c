"""Tokens to text, piece by piece: never half a character, never half a stop string."""

from collections.abc import Sequence
from typing import Any

REPLACEMENT = "\ufffd"  # what a decoder gives for bytes that are not whole characters yet


class Detokenizer:
    """Turns a growing list of tokens into pieces of text that add up to the whole.

    Text is held back while it ends inside a character, or may be the start of a stop string.
    ``tokenizer`` needs ``decode(ids)``.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self._decode = tokenizer.decode
        self._stop = tuple(text for text in stop if text)
        self._tokens: list[int] = []
        self._start = 0  # tokens before this are decoded for good
        self._read = 0  # tokens before this have given their text
        self._held = ""
        self.stopped = False

    @property
    def count(self) -> int:
        """How many tokens were read; those after a stop string are not."""
        return len(self._tokens)

    def add(self, tokens: Sequence[int]) -> str:
        """The text that is certain now. Empty once ``stopped``: a stop string was reached."""
        # One by one, so that the text does not depend on how many come in a round.
        pieces = []
        for token in tokens:
            if self.stopped:
                break
            self._tokens.append(token)
            text = self._pending()
            if text and not text.endswith(REPLACEMENT):
                self._held += text
                self._start, self._read = self._read, len(self._tokens)
                pieces.append(self._release(final=False))
        return "".join(pieces)

    def finish(self) -> str:
        """The rest of the text, at the end of the answer."""
        if self.stopped:
            return ""
        self._held += self._pending()
        self._start = self._read = len(self._tokens)
        return self._release(final=True)

    def _pending(self) -> str:
        # Decoded behind the last piece, since some tokenizers join a token to what precedes it.
        known = self._decode(self._tokens[self._start : self._read])
        return str(self._decode(self._tokens[self._start :])[len(known) :])

    def _release(self, *, final: bool) -> str:
        places = [self._held.find(stop) for stop in self._stop if stop in self._held]
        if places:
            self.stopped = True
            return self._held[: min(places)]
        keep = 0 if final else self._possible_stop()
        cut = len(self._held) - keep
        text, self._held = self._held[:cut], self._held[cut:]
        return text

    def _possible_stop(self) -> int:
        # The longest end of the text that begins a stop string.
        longest = max((len(stop) for stop in self._stop), default=0) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stop):
                return length
        return 0
