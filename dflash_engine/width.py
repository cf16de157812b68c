"""How many tokens to verify next: what a forward costs here, against what was kept lately.

Reading n more tokens in a forward costs little on one machine and much on another, and text differs
in how well it can be guessed. So the seconds are measured once, what is kept is counted all the
time, and the width that gives most tokens a second is taken, down to none.
"""

import hashlib
import json
import logging
import os
import platform
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median

import mlx.core as mx

from .drafters import Drafter
from .sampling import Sampling
from .targets import Target

_LOG = logging.getLogger(__name__)
_FORMAT = 1  # of a cost file
ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)  # measured; between them costs are interpolated
_CONTEXT = 192  # tokens read before, so that attention has something to look at
_REPEATS = 3


@dataclass(frozen=True)
class Costs:
    """Seconds of a target forward by its rows, and of a draft by its tokens: measured points."""

    rows: tuple[tuple[int, float], ...]
    drafts: tuple[tuple[int, float], ...] = ()

    def forward(self, rows: int) -> float:
        """Seconds of a target forward of ``rows``."""
        return _between(self.rows, rows)

    def draft(self, tokens: int) -> float:
        """Seconds in which the draft model proposes ``tokens``."""
        return _between(self.drafts, tokens) if self.drafts else 0.0


def _between(points: Sequence[tuple[int, float]], x: int) -> float:
    place = bisect_left(points, (x, 0.0))
    if place == 0:
        return points[0][1]
    if place == len(points):
        place -= 1  # beyond the last point, on in the same direction
    (x0, y0), (x1, y1) = points[place - 1], points[place]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def measure(target: Target, drafter: Drafter | None) -> Costs:
    """Time forwards of ``target`` at several widths, and proposals of ``drafter``, a draft model.

    Takes some 30 forwards. Widths that the context does not hold are left out.
    """
    tokens = [(31 * i + 7) % target.vocab_size for i in range(_CONTEXT + max(ROWS))]
    read = min(_CONTEXT, target.context // 2)
    cache = target.make_cache()
    logits, features = target.forward(tokens[:read], cache, undoable=False)
    mx.eval(logits, cache.state)

    def verify(rows: int) -> None:
        logits, _ = target.forward(tokens[read : read + rows], cache)
        mx.eval(mx.argmax(logits, axis=-1))
        cache.roll_back(rows)
        mx.eval(cache.state)

    def seconds(run: Callable[[], object]) -> float:
        taken = []
        for _ in range(_REPEATS):
            started = time.perf_counter()
            run()
            taken.append(time.perf_counter() - started)
        return median(taken)

    verify(max(ROWS))  # warm
    # A wider forward does not cost less: what says so is noise.
    rows = _rising([(n, seconds(lambda n=n: verify(n))) for n in ROWS])  # type: ignore[misc]
    if drafter is None:
        return Costs(rows)
    proposer = drafter.begin(Sampling(), None)
    if features is not None:
        proposer.observe(features)
    most = len(proposer.propose(tokens[: read + 1], max(ROWS)).tokens)
    counts = sorted({1, (most + 1) // 2, most} - {0})
    drafts = [
        (n, seconds(lambda n=n: proposer.propose(tokens[: read + 1], n)))  # type: ignore[misc]
        for n in counts
    ]
    return Costs(rows, _rising(drafts))


def _rising(points: Sequence[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    highest = 0.0
    risen = []
    for x, y in points:
        highest = max(highest, y)
        risen.append((x, highest))
    return tuple(risen)


def load_or_measure(
    folder: Path | None, identity: str, target: Target, drafter: Drafter | None
) -> Costs:
    """The costs kept in ``folder`` for this machine, MLX and ``identity``, else measured and kept.

    ``identity`` names target, draft and their precision. A file that cannot be read, or was made
    elsewhere, is measured anew; one that cannot be written is logged.
    """
    key = [_FORMAT, identity, _machine(), version("mlx"), target.kv_bits]
    name = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
    path = folder / f"costs-{name}.json" if folder else None
    if path and (kept := _read(path, key)):
        return kept
    costs = measure(target, drafter)
    if path:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            written = path.with_suffix(f".{os.getpid()}")
            written.write_text(
                json.dumps({"key": key, "rows": costs.rows, "drafts": costs.drafts}, indent=1)
            )
            written.replace(path)
        except OSError as error:
            _LOG.warning("costs of %s are not kept: %s", identity, error)
    return costs


def _read(path: Path, key: list[object]) -> Costs | None:
    try:
        raw = json.loads(path.read_text())
        rows, drafts = ([(int(x), float(y)) for x, y in raw[part]] for part in ("rows", "drafts"))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    good = raw.get("key") == key and [x for x, _ in rows] == list(ROWS)
    good = good and all(0 < y < 3600 for _, y in (*rows, *drafts)) and rows == sorted(rows)
    return Costs(tuple(rows), tuple(drafts)) if good else None


def _machine() -> str:
    threads = os.environ.get("OMP_NUM_THREADS", "")
    return f"{platform.machine()} {platform.processor()} {os.cpu_count()} {threads}"


@dataclass
class _Count:
    kept: float = 0.0
    tried: float = 0.0
    at: int = 0


class Kept:
    """How often drafted tokens were kept, by where they came from and their place; it fades, so
    that what failed is tried again now and then.
    """

    PRIOR = 2.0  # tries that an expectation counts for
    LATELY = 12.0  # tries that are remembered
    FADE = 0.998  # a round, whether tried in it or not

    def __init__(self) -> None:
        self._counts: dict[tuple[object, int], _Count] = {}
        self._round = 0

    def expect(self, origin: object, chances: Sequence[float]) -> list[float]:
        """The chance of each token to be kept if all before it are, given one's expectation."""
        return [
            (count.kept + self.PRIOR * chance) / (count.tried + self.PRIOR)
            for count, chance in zip(
                (self._faded(origin, place) for place in range(len(chances))), chances, strict=True
            )
        ]

    def learn(self, origin: object, tried: int, kept: int) -> None:
        """The first ``kept`` of ``tried`` tokens were kept; what came after was not judged."""
        for place in range(min(kept + 1, tried)):
            count = self._faded(origin, place)
            shrink = min(1.0, (self.LATELY - 1) / max(count.tried, 1.0))
            count.tried = count.tried * shrink + 1
            count.kept = count.kept * shrink + (place < kept)
            self._counts[origin, min(place, _PLACES)] = count

    def next_round(self) -> None:
        """Let one round's time pass."""
        self._round += 1

    def _faded(self, origin: object, place: int) -> _Count:
        count = self._counts.get((origin, min(place, _PLACES)))
        if count is None:
            return _Count(at=self._round)
        fade = self.FADE ** (self._round - count.at)
        return _Count(count.kept * fade, count.tried * fade, self._round)


_PLACES = 15  # later ones are counted together


def best(chances: Sequence[float], cost: Callable[[int], float]) -> tuple[int, float]:
    """How many of the tokens with these ``chances`` to draft for most tokens a second, and how many
    a second that gives. ``cost(n)`` is the seconds of a round that drafts n.
    """
    right = expected = 1.0
    width, rate = 0, 1.0 / cost(0)
    for n, chance in enumerate(chances, 1):
        right *= chance
        expected += right
        if expected / cost(n) > rate:
            width, rate = n, expected / cost(n)
    return width, rate
