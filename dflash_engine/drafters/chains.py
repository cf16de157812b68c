"""An index of token texts: where the last tokens occur in them, and what followed there.

The texts stand in one row of tokens. For n-grams of three lengths there is a chain of the places
where they went on, the latest first, as LZ77 compressors keep them: a text is entered in time that
does not depend on how much there is, and a longest match is found from the longest n-gram down.
32 bytes a token.
"""

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]

LENGTHS = (2, 4, 8)  # of the n-grams that have chains
END = -1  # follows each text in the row
_SEARCHED = 128  # latest places of an n-gram that are compared
_COUNTED = 48  # of those with the longest match, that are given back


class Chains:
    """A ``row`` of texts, each followed by its end, and where each n-gram in it went on.

    ``text`` [capacity + 1] is the number of each token's text. A *place* is where a token follows
    an n-gram; place 0 is none.
    """

    def __init__(self, capacity: int) -> None:
        self.row = np.empty(capacity + 1, np.int32)
        self.row[0] = END
        self.text = np.zeros(capacity + 1, np.int32)
        self.end = 1
        bits = max(capacity.bit_length(), 4)
        self._shift = np.uint64(64 - bits)
        self._latest = [np.zeros(1 << bits, np.int32) for _ in LENGTHS]  # place, by hash
        self._earlier = [np.zeros(capacity + 1, np.int32) for _ in LENGTHS]  # place, by place

    def extend(self, tokens: Tokens, texts: Tokens) -> None:
        """Enter texts: ``tokens`` [n], the last of each text its end, and their ``texts`` [n]."""
        start, self.end = self.end, self.end + len(tokens)
        self.row[start : self.end] = tokens
        self.text[start : self.end] = texts
        for level, hashes in enumerate(_hashes(tokens)):
            length, latest, earlier = LENGTHS[level], self._latest[level], self._earlier[level]
            within = texts[:-length] == texts[length:]
            entered = np.flatnonzero(within & (tokens[length:] != END))
            if not len(entered):
                continue
            buckets = (hashes[entered] >> self._shift).astype(np.int64)
            places = entered + (start + length)
            ranked = np.sort(buckets << 32 | places)  # much faster than argsort
            buckets, places = ranked >> 32, ranked & 0xFFFFFFFF
            new = np.append(True, buckets[1:] != buckets[:-1])
            before = np.append(0, places[:-1])
            earlier[places] = np.where(new, latest[buckets], before)
            last = np.append(new[1:], True)
            latest[buckets[last]] = places[last]

    def find(self, suffix: Tokens) -> tuple[NDArray[np.int64], int]:
        """Where the longest suffix of ``suffix`` went on, the latest place first, and how many
        tokens match; (empty, 0) where no n-gram does.
        """
        back = np.arange(1, len(suffix) + 1)
        hashes = _hashes(suffix)
        for level in reversed(range(len(LENGTHS))):
            if not len(hashes[level]):
                continue
            place = int(self._latest[level][hashes[level][-1] >> self._shift])
            found: list[int] = []
            while place and len(found) < _SEARCHED:
                found.append(place)
                place = self._earlier[level].item(place)
            if not found:
                continue
            places = np.array(found)
            same = self.row[np.maximum(places[:, None] - back, 0)] == suffix[::-1]
            matches = np.where(same.all(axis=1), len(suffix), same.argmin(axis=1))
            longest = int(matches.max())
            if longest >= LENGTHS[level]:  # else only the hash is the same
                return places[matches == longest][:_COUNTED], longest
        return np.empty(0, np.int64), 0

    def after(self, places: NDArray[np.int64], width: int) -> list[list[int]]:
        """The ``width`` tokens from each place; what comes after an end is of no meaning."""
        columns = np.minimum(places[:, None] + np.arange(width), self.end - 1)
        rows: list[list[int]] = self.row[columns].tolist()
        return rows


def _hashes(tokens: Tokens) -> list[NDArray[np.uint64]]:
    # Of all n-grams [n - length + 1], for each of the lengths.
    one = tokens.astype(np.uint64)
    two = _joined(one[:-1], one[1:])
    four = _joined(two[:-2], two[2:])
    return [two, four, _joined(four[:-4], four[4:])]


def _joined(left: NDArray[np.uint64], right: NDArray[np.uint64]) -> NDArray[np.uint64]:
    mixed = left * np.uint64(0x9E3779B97F4A7C15) + right  # modulo 2**64
    mixed ^= mixed >> np.uint64(32)
    return mixed * np.uint64(0xD6E8FEB86659FD93)
