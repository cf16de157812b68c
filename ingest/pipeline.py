"""An ingest: each file read, cut, embedded and stored, whole or not at all."""

from __future__ import annotations

import hashlib
import logging
import sqlite3
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ingest.discover import FoundFile, discover
from ingest.embed import Embedder
from ingest.errors import ChangingFile, IngestError, UnreadableFile
from ingest.library import Library
from ingest.passages import Cut, cut
from ingest.progress import EventKind, FailedFile, IngestEvent, IngestSummary
from ingest.readers import Document, read
from ingest.records import FileRecord, Passage, StoredPassage
from ingest.vectors import Vectors

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MAX_BYTES = 200 * 1000 * 1000
_TARGET_TOKENS, _MAX_TOKENS = 220, 240
# A file written this shortly before it was read may be written again within the same tick of its
# file system's clock, so its time proves nothing.
_CLOCK_TICK_NS = 2_000_000_000
_log = logging.getLogger(__name__)


class _Stopped(Exception):  # noqa: N818 - not an error: somebody asked for it
    """`should_stop` said so in the middle of a file."""


class Pipeline:
    """The steps from a file to the library and Chroma; one ingest at a time may run it."""

    def __init__(
        self,
        library: Library,
        vectors: Vectors,
        embedder: Embedder,
        data_root: Path,
        *,
        without: Path | None = None,
        max_bytes: int = MAX_BYTES,
        on_event: Callable[[IngestEvent], None] | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> None:
        self._library, self._vectors, self._embedder = library, vectors, embedder
        self._data_root, self._without, self._max_bytes = data_root, without, max_bytes
        self._emit = on_event or (lambda event: None)
        self._stop = should_stop or (lambda: False)
        self._index = self._total = 0
        self.summary = IngestSummary()

    def run(self, paths: Iterable[Path], *, again: bool, reuse: bool) -> IngestSummary:
        """Ingest what lies under `paths`; `again` also reads unchanged files.

        With `reuse` a text that already has a vector keeps it. Files that fail are listed with the
        reason, and the rest goes on.
        """
        began = time.monotonic()
        known = {record.file: record for record in self._library.files()}
        found = discover(paths, self._data_root, known, self._without)
        self._total = len(found.files)
        self._emit(IngestEvent("found", total=self._total))
        for name, reason in found.problems:
            self._failed(name, reason)
        try:
            for self._index, file in enumerate(found.files, 1):
                self._check_stop()
                self._file(file, known.get(file.key), again=again, reuse=reuse)
            for name in found.gone:
                self._check_stop()
                self._remove(name)
        except _Stopped:
            self.summary.stopped = True
        # What Chroma could not take in a moment ago it may take now; else this raises.
        self._in_step()
        self.summary.seconds = round(time.monotonic() - began, 3)
        return self.summary

    def _file(
        self, file: FoundFile, before: FileRecord | None, *, again: bool, reuse: bool
    ) -> None:
        try:
            if not again and before is not None and self._is_unchanged(file, before):
                self.summary.unchanged += 1
                self._event("unchanged", file.key)
                return
            self._event("reading", file.key)
            document, cuts, record = self._read(file)
            stored = self._embed(record, cuts, reuse=reuse)
            gone = self._library.replace(record, stored)
        except _Stopped:
            raise
        except UnreadableFile as error:
            self._keep_failure(file.key, before, error.reason)
            return
        except OSError as error:
            self._keep_failure(file.key, before, f"cannot be read: {error.strerror or error}")
            return
        except sqlite3.Error as error:
            self._keep_failure(file.key, before, f"could not be stored: {error}")
            return
        except IngestError:
            raise  # the model or the store, not this file
        except MemoryError:
            self._keep_failure(file.key, before, "there is not enough memory for it")
            return
        except Exception as error:  # noqa: BLE001 - one file must not end the run
            _log.exception("%s cannot be ingested", file.key)
            self._keep_failure(file.key, before, f"{type(error).__name__}: {error}")
            return
        self._follow({item.passage.id: item.vector for item in stored}, gone)
        self.summary.files += 1
        self.summary.pages += document.pages
        self.summary.passages += len(stored)
        self.summary.warnings += [f"{file.key}: {warning}" for warning in document.warnings]
        self._event("done", file.key, passages=len(stored))

    def _is_unchanged(self, file: FoundFile, before: FileRecord) -> bool:
        if before.sha256 is None:
            return False
        status = file.path.stat()
        same = (status.st_size, status.st_mtime_ns) == (before.size, before.mtime_ns)
        settled = before.ingested_at * 1e9 - before.mtime_ns > _CLOCK_TICK_NS
        if same and settled and before.state == "ok":
            return True
        if status.st_size > self._max_bytes or _sha256(file.path) != before.sha256:
            return False
        self._library.touch(
            replace(
                before,
                size=status.st_size,
                mtime_ns=status.st_mtime_ns,
                state="ok",
                reason="",
                ingested_at=time.time(),
            )
        )
        return True

    def _read(self, file: FoundFile) -> tuple[Document, list[Cut], FileRecord]:
        """The document as it was at one instant: read again if it changed meanwhile."""
        for _ in range(2):
            status = file.path.stat()
            if status.st_size > self._max_bytes:
                raise UnreadableFile(
                    f"it has {status.st_size / 1e6:.0f} MB; the limit is "
                    f"{self._max_bytes / 1e6:.0f} MB"
                )
            data = file.path.read_bytes()
            sha256 = hashlib.sha256(data).hexdigest()
            try:
                document = read(file.path, data)
                unreadable = None
            except UnreadableFile as error:
                unreadable = error
            after = file.path.stat()
            same = (status.st_size, status.st_mtime_ns) == (after.st_size, after.st_mtime_ns)
            if len(data) == after.st_size and (same or _sha256(file.path) == sha256):
                break
        else:
            raise ChangingFile("it is still being written; run ingest again when it is complete")
        if unreadable is not None:
            raise unreadable
        limit = min(_MAX_TOKENS, self._embedder.max_tokens)
        cuts = cut(document, self._embedder.count_tokens, min(_TARGET_TOKENS, limit), limit)
        record = FileRecord(
            file=file.key,
            sha256=sha256,
            size=after.st_size,
            mtime_ns=after.st_mtime_ns,
            pages=document.pages,
            state="ok",
            reason="",
            warnings=document.warnings,
            ingested_at=time.time(),
            passages=len(cuts),
        )
        return document, cuts, record

    def _embed(self, record: FileRecord, cuts: list[Cut], *, reuse: bool) -> list[StoredPassage]:
        digests = [hashlib.sha256(item.searchable.encode()).hexdigest() for item in cuts]
        vectors = self._library.known_vectors(digests) if reuse else {}
        missing = {
            digest: item.searchable
            for digest, item in zip(digests, cuts, strict=True)
            if digest not in vectors
        }

        def on_batch(done: int) -> None:
            self._event("embedding", record.file, passages=done, of_passages=len(missing))
            self._check_stop()

        made = self._embedder.embed_passages(list(missing.values()), on_batch)
        self.summary.embedded += len(missing)
        vectors |= dict(zip(missing, made, strict=True))
        return [
            StoredPassage(
                Passage(
                    id=passage_id(record.file, record.sha256 or "", ordinal),
                    file=record.file,
                    ordinal=ordinal,
                    page=item.page,
                    heading=item.heading,
                    text=item.text,
                    start=item.start,
                    end=item.end,
                    tokens=item.tokens,
                ),
                item.context,
                digest,
                vectors[digest],
            )
            for ordinal, (item, digest) in enumerate(zip(cuts, digests, strict=True))
        ]

    def _remove(self, name: str) -> None:
        try:
            gone = self._library.remove(name)
        except sqlite3.Error as error:
            self._failed(name, f"could not be removed: {error}")
            return
        self._follow({}, gone)
        self.summary.removed += 1
        self._event("removed", name, passages=len(gone))

    def _follow(self, new: dict[str, NDArray[np.float32]], gone: list[str]) -> None:
        try:
            self._vectors.add(new)
            self._vectors.delete(gone)
        except Exception:  # noqa: BLE001 - Chroma's errors have no one type
            _log.exception("Chroma did not take a file's vectors; it catches up at the end")

    def _in_step(self) -> None:
        try:
            self._vectors.follow()
        except Exception:  # noqa: BLE001 - as above
            _log.exception("Chroma cannot be brought in step; it is rebuilt")
            self._vectors.rebuild()

    def _keep_failure(self, name: str, before: FileRecord | None, reason: str) -> None:
        if before is not None and before.passages:
            reason += " (the earlier version is still served)"
        blank = FileRecord(name, None, 0, 0, 0, "failed", reason, [], time.time(), 0)
        record = before and replace(before, state="failed", reason=reason)
        try:
            self._library.touch(record or blank)
        except sqlite3.Error:
            _log.exception("the failure of %s could not be stored either", name)
        self._failed(name, reason)

    def _failed(self, name: str, reason: str) -> None:
        self.summary.failed.append(FailedFile(name, reason))
        self._event("failed", name, reason=reason)

    def _event(self, kind: EventKind, name: str, **facts: Any) -> None:
        self._emit(IngestEvent(kind, name, self._index, self._total, **facts))

    def _check_stop(self) -> None:
        if self._stop():
            raise _Stopped


def passage_id(file: str, sha256: str, ordinal: int) -> str:
    """A passage's id: the same whenever the same bytes under the same name are cut alike."""
    return hashlib.sha256(f"{file}\0{sha256}\0{ordinal}".encode()).hexdigest()[:32]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
