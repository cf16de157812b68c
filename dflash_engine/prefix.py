"""Prompt prefixes that were read before, so that the next question with the same system prompt and
passages starts late.

Caches that only grow serve every shorter prefix too, by being cut. Those with sliding windows, once
these are full, and recurrent ones serve the length they were taken at and no other; so the loop is
told where prompts part, and takes a snapshot there (:meth:`Prefixes.worth`).
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import psutil

from .fit import Machine
from .fit import size as said
from .prefix_disk import Disk
from .prefix_index import Index, count, key_of
from .prefix_snapshot import Snapshot, UnstorableError

_LOG = logging.getLogger(__name__)
LEAST = 64  # tokens: fewer are read in one short forward, which a snapshot saves too little of
_REMEMBERED = 256  # prompts that could serve no other, to see where the next one parts from them
_MARGIN = 1 / 16  # of the memory, that prefixes leave to others


@dataclass(frozen=True)
class Hit:
    """The state after the first ``length`` tokens of a prompt: caches for the target, which may be
    changed, and the draft's snapshot, None if the draft has none.
    """

    length: int
    layers: list[Any]
    draft: Any
    from_disk: bool = False


def spare() -> int:
    """The bytes that may be taken before the system comes near swapping, or the GPU near what it
    may keep resident; negative where it is nearer.
    """
    memory = psutil.virtual_memory()
    free = min(int(memory.available), Machine.here().usable)
    return free - int(memory.total * _MARGIN)


class Prefixes:
    """Snapshots by their tokens, for the thread that owns the model; no other may use them.

    ``key`` names all that a snapshot depends on: the model's weights, their precision, ``kv_bits``,
    the draft, and the versions of mlx, mlx-lm and this package. ``memory_bytes`` are kept in
    memory, those used last; a single prefix that takes more is not kept at all. With ``folder``,
    ``disk_bytes`` are kept there too, written by another thread, for this process and later ones.
    ``least`` is how many tokens a snapshot must save to be worth taking. ``spare`` says how many
    bytes the system has left; when a request begins and when a snapshot comes in, prefixes go
    until there are enough.
    """

    def __init__(
        self,
        key: str,
        *,
        memory_bytes: int,
        folder: Path | None = None,
        disk_bytes: int = 0,
        least: int = LEAST,
        spare: Callable[[], int] = spare,
    ) -> None:
        self._memory_bytes = memory_bytes
        self._least = least
        self._spare = spare
        self._kept: OrderedDict[bytes, Snapshot] = OrderedDict()  # those used last come last
        self._index = Index()
        self._bytes = 0
        self._seen: OrderedDict[bytes, None] = OrderedDict()
        self._seen_index = Index()
        self._refused = False
        self._disk = Disk(folder, key, disk_bytes) if folder and disk_bytes else None
        for file in self._disk.files if self._disk else ():
            self._remember(file.tokens, file.shortest)

    @property
    def count(self) -> int:
        """How many are in memory."""
        return len(self._kept)

    @property
    def nbytes(self) -> int:
        """The memory that they take."""
        return self._bytes

    def find(self, prompt: Sequence[int], room: int = 0) -> Hit | None:
        """The state that saves most of reading ``prompt``, whose last token is always read; None if
        there is none. ``room`` are the bytes that the request will need: see :meth:`shed`.
        """
        tokens = key_of(prompt)
        most = len(prompt) - 1
        length, own = self._best(tokens, most)
        snapshot = self._kept.get(own)
        found = self._disk.find(tokens, most, length) if self._disk else None
        if found:
            length, own, snapshot = found
            self._keep(own, snapshot, room=0)
        if own in self._kept:
            self._use(own)
        self.shed(room)
        if snapshot is None:
            return None
        return Hit(length, *snapshot.restore(length), from_disk=found is not None)

    def worth(self, prompt: Sequence[int], read: int = 0) -> list[int]:
        """The lengths, ascending, at which a snapshot of ``prompt`` is worth taking, when its first
        ``read`` tokens are had from a :class:`Hit`.

        The end, without the last token; and before it where the prompt parts from earlier ones
        whose snapshots could not be cut to that.
        """
        end = len(prompt) - 1
        parting, _ = next(self._seen_index.nearest(key_of(prompt)), (0, b""))
        lengths = []
        for length in (min(parting, end), end):
            if length - read >= self._least:
                lengths.append(length)
                read = length
        return lengths

    def put(self, tokens: Sequence[int], layers: Sequence[Any], draft: Any = None) -> None:
        """Keep the state after ``tokens``, if it is not had already: the target's cache ``layers``
        and the ``draft`` snapshot, see :func:`dflash_engine.prefix_snapshot.storable`.

        What becomes of ``layers`` afterwards does not change what is kept. Growing ones may have
        read more than ``tokens``. Evaluates what they hold.
        """
        own = key_of(tokens)
        length, served_by = self._best(own, len(tokens))
        if length == len(tokens):
            if tokens:
                self._use(served_by)
            return
        try:
            snapshot = Snapshot.take(length=len(tokens), layers=layers, draft=draft)
        except UnstorableError as error:
            if not self._refused:
                _LOG.warning("prompt prefixes are not kept: %s", error)
            self._refused = True
            return
        self._remember(own, snapshot.shortest)
        if self._keep(own, snapshot, room=snapshot.nbytes) and self._disk:
            self._disk.save(own, snapshot)

    def shed(self, room: int = 0) -> bool:
        """Let go of prefixes in memory, those first that were not used for longest, until the
        system has ``room`` bytes to spare; whether it has.
        """
        lacking = room - self._spare()
        before = self._bytes
        while self._kept and before - self._bytes < lacking:
            self._drop(next(iter(self._kept)))
        if freed := before - self._bytes:
            mx.clear_cache()  # MLX would keep the memory for itself
            _LOG.info("memory is short: let go of prompt prefixes of %s", said(freed))
        return freed >= lacking

    def clear(self) -> None:
        """Forget all, also what is on disk, of other keys too."""
        for own in list(self._kept):
            self._drop(own)
        self._seen.clear()
        self._seen_index = Index()
        if self._disk:
            self._disk.clear()

    def flush(self) -> None:
        """Wait until what is to be on disk is there."""
        if self._disk:
            self._disk.flush()

    def close(self) -> None:
        """Write what is to be on disk, and let go of the memory."""
        if self._disk:
            self._disk.close()
            self._disk = None
        for own in list(self._kept):
            self._drop(own)

    def _best(self, tokens: bytes, most: int) -> tuple[int, bytes]:
        for length, own in self._index.nearest(tokens):
            length = min(length, most)
            if length and self._kept[own].shortest <= length:
                return length, own
        return 0, b""

    def _use(self, own: bytes) -> None:
        self._kept.move_to_end(own)
        if self._disk:
            self._disk.touch(own)

    def _keep(self, own: bytes, snapshot: Snapshot, room: int) -> bool:
        # ``room`` is what it will take beyond what it has; whether it was kept.
        size = snapshot.nbytes
        if size > self._memory_bytes or not self.shed(room):
            return False
        shorter = [
            other
            for length, other in self._index.nearest(own)
            if length == count(other) >= snapshot.shortest
        ]
        for other in shorter:
            self._drop(other)
        while self._bytes + size > self._memory_bytes:
            self._drop(next(iter(self._kept)))
        mx.eval(snapshot.arrays)
        self._kept[own] = snapshot
        self._index.add(own)
        self._bytes += size
        return True

    def _drop(self, own: bytes) -> None:
        self._bytes -= self._kept.pop(own).nbytes
        self._index.remove(own)
        if self._disk:
            self._disk.cancel(own)

    def _remember(self, own: bytes, shortest: int) -> None:
        if shortest == 0:
            return
        self._seen[own] = None
        self._seen.move_to_end(own)
        self._seen_index.add(own)
        if len(self._seen) > _REMEMBERED:
            oldest, _ = self._seen.popitem(last=False)
            self._seen_index.remove(oldest)
