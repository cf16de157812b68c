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
from dataclasses import asdict, dataclass, fields
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx

from .drafters import Drafter
from .sampling import Sampling
from .targets import Target

_LOG = logging.getLogger(__name__)
_FORMAT = 2  # of a cost file
ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)  # measured; between them costs are interpolated
FAR_ROWS = (1, 4, 16, 32)  # measured again behind a longer context
NEAR, FAR = 128, 512  # tokens read before: what attention costs grows with them
_REPEATS = 3
_SECONDS = 4.0  # after which no width is measured again


@dataclass(frozen=True)
class Costs:
    """Seconds of a target forward by its rows, and of a draft by its tokens: measured points.

    ``rows`` were measured behind ``NEAR`` tokens, ``far`` behind ``FAR``; without those, the
    context costs nothing.
    """

    rows: tuple[tuple[int, float], ...]
    drafts: tuple[tuple[int, float], ...] = ()
    far: tuple[tuple[int, float], ...] = ()

    def forward(self, rows: int, context: int = NEAR) -> float:
        """Seconds of a target forward of ``rows`` behind ``context`` tokens."""
        near = _between(self.rows, rows)
        if not self.far or context <= NEAR:
            return near
        more = max(_between(self.far, rows) - near, 0.0)
        return near + more * (context - NEAR) / (FAR - NEAR)

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

    Takes some 50 forwards, and ``FAR`` tokens are read. A target whose context is too short for
    that is measured behind ``NEAR`` tokens, or half its context, alone.
    """
    tokens = [(31 * i + 7) % target.vocab_size for i in range(FAR + max(ROWS))]
    cache = target.make_cache()
    proposer = drafter.begin(Sampling(), None) if drafter else None
    read = 0

    def read_to(end: int) -> None:
        nonlocal read
        logits, features = target.forward(tokens[read:end], cache, undoable=False)
        if proposer and features is not None:
            proposer.observe(features)
        mx.eval(logits, cache.state, proposer.state if proposer else [])
        read = end

    def verify(rows: int) -> None:
        logits, _ = target.forward(tokens[read : read + rows], cache)
        mx.eval(mx.argmax(logits, axis=-1))
        cache.roll_back(rows)
        mx.eval(cache.state)

    read_to(min(NEAR, target.context // 2))
    rows = _timed(verify, ROWS)
    drafts: tuple[tuple[int, float], ...] = ()
    if proposer:
        known = tokens[: read + 1]
        most = len(proposer.propose(known, max(ROWS)).tokens)
        counts = sorted({1, (most + 1) // 2, most} - {0})
        drafts = _timed(lambda n: proposer.propose(known, n), counts)
    far: tuple[tuple[int, float], ...] = ()
    if target.context >= len(tokens):
        read_to(FAR)
        far = _timed(verify, FAR_ROWS)
    return Costs(rows, drafts, far)


def _timed(run: Callable[[int], object], sizes: Sequence[int]) -> tuple[tuple[int, float], ...]:
    # In turn, so that what else the machine does slows all sizes alike.
    run(max(sizes))  # warm
    taken: dict[int, list[float]] = {n: [] for n in sizes}
    for _ in range(_REPEATS):
        for n in sizes:
            if taken[n] and sum(map(sum, taken.values())) > _SECONDS:
                break
            started = time.perf_counter()
            run(n)
            taken[n].append(time.perf_counter() - started)
    return _rising([(n, min(times)) for n, times in taken.items()])


def _rising(points: Sequence[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    # A smaller one does not cost more: what says so is noise, which only ever adds.
    lowest = float("inf")
    risen = []
    for x, y in reversed(points):
        lowest = min(lowest, y)
        risen.append((x, lowest))
    return tuple(reversed(risen))


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
            written.write_text(json.dumps({"key": key, **asdict(costs)}, indent=1))
            written.replace(path)
        except OSError as error:
            _LOG.warning("costs of %s are not kept: %s", identity, error)
    return costs


def _read(path: Path, key: list[object]) -> Costs | None:
    try:
        raw = json.loads(path.read_text())
        costs = Costs(
            **{
                part.name: tuple((int(x), float(y)) for x, y in raw[part.name])
                for part in fields(Costs)
            }
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
    good = raw.get("key") == key and [x for x, _ in costs.rows] == list(ROWS)
    good = good and [x for x, _ in costs.far] in ([], list(FAR_ROWS))
    seconds = [y for _, y in (*costs.rows, *costs.drafts, *costs.far)]
    return costs if good and all(0 < y < 3600 for y in seconds) else None


def _machine() -> str:
    threads = os.environ.get("OMP_NUM_THREADS", "")
    return f"{platform.machine()} {platform.processor()} {os.cpu_count()} {threads}"


class Pace:
    """Measured ``costs``, corrected by what rounds take: the machine may have been busy when it was
    measured, or be busy now, which need not slow all widths alike.
    """

    PRIOR = 1.0  # rounds of a width that all rounds together count for
    LATELY = 16.0  # rounds of a width that are remembered
    EVERY = 24  # rounds, among which one is plain: what speculation is compared with
    OUTLIER = 2.0  # a round counts as at most so many times what was expected

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._all: float | None = None
        self._widths: dict[int, tuple[float, float]] = {}  # the factor, and its rounds
        self._drafted = 0  # rounds since the last plain one

    def forward(self, rows: int, context: int) -> float:
        """Seconds of a target forward of ``rows`` behind ``context`` tokens, as they are now."""
        return self._costs.forward(rows, context) * self._factor(rows)

    @property
    def wants_plain(self) -> bool:
        """Whether it is long ago that a forward had one row: its cost may not be known any more."""
        return self._drafted >= self.EVERY

    def learn(self, rows: int, context: int, seconds: float) -> None:
        """A forward took ``seconds``; 0 if the clock could not tell."""
        if seconds <= 0:
            return
        self._drafted = self._drafted + 1 if rows > 1 else 0
        ratio = seconds / self._costs.forward(rows, context)
        if self._all is None:
            self._all = ratio
        known = self._factor(rows)
        ratio = min(max(ratio, known / self.OUTLIER), known * self.OUTLIER)
        self._all += (ratio - self._all) / self.LATELY
        factor, count = self._widths.get(rows.bit_length(), (0.0, 0.0))
        count = min(count, self.LATELY - 1)
        self._widths[rows.bit_length()] = ((factor * count + ratio) / (count + 1), count + 1)

    def _factor(self, rows: int) -> float:
        # Widths are told apart by powers of two.
        factor, count = self._widths.get(rows.bit_length(), (0.0, 0.0))
        every = 1.0 if self._all is None else self._all
        return (factor * count + every * self.PRIOR) / (count + self.PRIOR)


@dataclass
class _Count:
    kept: float = 0.0
    tried: float = 0.0
    at: int = 0


class Kept:
    """How often drafted tokens were kept, by where they came from and their place; it fades, so
    that what failed is tried again now and then.
    """

    PRIOR = 1.0  # tries that an expectation counts for
    LATELY = 24.0  # tries that are remembered
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
