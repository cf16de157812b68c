"""Token sequences in order, so that those which share most with a prompt stand next to it."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence

import numpy as np

_TOKEN = np.dtype("<u4")


def key_of(tokens: Sequence[int]) -> bytes:
    """``tokens`` as the bytes that an :class:`Index` orders."""
    return np.asarray(tokens, dtype=_TOKEN).tobytes()


def count(key: bytes) -> int:
    """How many tokens ``key`` has."""
    return len(key) // _TOKEN.itemsize


def shared(a: bytes, b: bytes) -> int:
    """How many tokens two sequences have in common from their beginning."""
    size = min(len(a), len(b))
    if a[:size] == b[:size]:
        return count(a[:size])
    differ = np.frombuffer(a[:size], _TOKEN) != np.frombuffer(b[:size], _TOKEN)
    return int(differ.argmax())


class Index:
    """A set of token sequences."""

    def __init__(self) -> None:
        self._keys: list[bytes] = []

    def __len__(self) -> int:
        """How many there are."""
        return len(self._keys)

    def add(self, key: bytes) -> None:
        """Put ``key`` in, if it is not there."""
        place = bisect_left(self._keys, key)
        if self._keys[place : place + 1] != [key]:
            self._keys.insert(place, key)

    def remove(self, key: bytes) -> None:
        """Take ``key`` out, if it is there."""
        place = bisect_left(self._keys, key)
        if self._keys[place : place + 1] == [key]:
            del self._keys[place]

    def nearest(self, key: bytes) -> Iterator[tuple[int, bytes]]:
        """Those that begin like ``key``, each with how many tokens they share with it, those that
        share most first. Must not be changed meanwhile.
        """
        # What is shared does not grow with the distance from where the key would stand.
        right = bisect_left(self._keys, key)
        left = right - 1
        of_left, of_right = self._shared(left, key), self._shared(right, key)
        while of_left or of_right:
            if of_left > of_right:
                yield of_left, self._keys[left]
                left -= 1
                of_left = self._shared(left, key)
            else:
                yield of_right, self._keys[right]
                right += 1
                of_right = self._shared(right, key)

    def _shared(self, place: int, key: bytes) -> int:
        return shared(self._keys[place], key) if 0 <= place < len(self._keys) else 0
