"""The file of a memory: what is in it, and when it is written.

It is a line that names the format, the SHA-256 of all that follows, the length of the head, the
head as JSON (the key and the texts), and the row of tokens. It is written soon after a change, so
that a process that is killed loses little of what it learnt; sooner where documents have gone,
whose words are to leave the disk with them.
"""

import hashlib
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from .chains import Tokens

_LOG = logging.getLogger(__name__)

SAVE_SECONDS = 60.0  # from a change until it is written
_MAGIC = b"dflash-rag memory 1\n"  # the number is the format's

Kind = Literal["answer", "passage"]


@dataclass(slots=True)
class Text:
    """A text: ``size`` tokens of the row, the last of them its end."""

    kind: Kind
    owners: tuple[str, ...]  # documents, ascending
    size: int
    count: int = 1  # times it was given
    used: int = 0  # when it was given last


class Content(NamedTuple):
    """What a file holds: the texts, and the row in which their tokens stand in the same order."""

    texts: list[Text]
    row: Tokens


class MemoryFile:
    """The file at ``path``, written by a thread of its own within ``seconds`` of a change.

    ``key`` is that of the memory, None for the file's own, and ``content`` gives what is to be
    written: a copy, as other threads go on. There is a thread only while something waits to be
    written. All methods may be called from any thread.
    """

    def __init__(
        self,
        path: Path,
        key: str | None,
        content: Callable[[], Content],
        seconds: float = SAVE_SECONDS,
    ) -> None:
        self._path, self._key, self._content, self._seconds = path, key, content, seconds
        self._writing = threading.Lock()  # so that the file written last is the newest
        self._turn = threading.Condition()  # of all below
        self._due: float | None = None  # when to write what has changed since the last time
        self._forgot = False  # the file still has what was forgotten
        self._failure = ""  # of the last time, logged
        self._closed = False
        self._thread: threading.Thread | None = None

    def read(self) -> Content | None:
        """What the file holds. None if there is no file, or one that is damaged, or of another key
        or format: that is logged, and the file removed, as nobody would forget anything in it.
        """
        with suppress(OSError):
            _unfinished(self._path).unlink()  # a kill left it
        try:
            self._key, content = _unpack(_read(self._path), self._key)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            _LOG.warning("memory starts empty: %s: %s", self._path, error)
            with suppress(OSError):
                self._path.unlink()
            return None
        return content

    def changed(self, *, forgot: bool = False) -> None:
        """Have it written within ``seconds``, or at once if something was ``forgot``; never waits
        for the disk.
        """
        with self._turn:
            self._forgot = self._forgot or forgot
            self._write_in(0 if forgot else self._seconds)
            if self._thread is None and not self._closed:
                name = "dflash-memory"
                thread = threading.Thread(target=self._write_when_due, name=name, daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:  # too many, or the interpreter is about to end
                    self._report(str(error))
                else:
                    self._thread = thread

    def save(self) -> None:
        """Write it now if anything changed. It is replaced whole or not at all, whatever happens.

        Failure is logged, once for as long as it lasts, and it is tried again after ``seconds``.
        Meanwhile there is no file rather than one that still has what was forgotten.
        """
        with self._writing:
            with self._turn:
                if self._due is None:
                    return
                forgot = self._forgot
                self._due, self._forgot = None, False
                self._turn.notify()  # a thread that waits for this ends
            try:
                _write(self._path, _pack(self._key, self._content()))
            except OSError as error:
                self._failed(str(error), forgot)
            else:
                with self._turn:
                    self._failure = ""

    def close(self) -> None:
        """Save, and stop the thread. What changes afterwards is written by :meth:`save` alone."""
        with self._turn:
            self._closed = True
            thread = self._thread
            self._turn.notify()
        if thread:
            thread.join()
        self.save()

    def _write_in(self, seconds: float) -> None:
        due = time.monotonic() + seconds
        self._due = due if self._due is None else min(due, self._due)
        self._turn.notify()

    def _failed(self, failure: str, forgot: bool) -> None:
        if forgot:
            try:
                with suppress(FileNotFoundError, NotADirectoryError):
                    self._path.unlink()
                forgot = False
            except OSError as error:
                failure += f"; what was to be forgotten is still there: {error}"
        with self._turn:
            self._forgot = self._forgot or forgot
            self._write_in(self._seconds)
            self._report(failure)

    def _report(self, failure: str) -> None:
        if failure != self._failure:
            _LOG.warning("memory is not saved in %s: %s", self._path, failure)
        self._failure = failure

    def _write_when_due(self) -> None:
        while self._is_due():
            self.save()

    def _is_due(self) -> bool:
        # Waits for it; False where nothing is to be written any more, and the thread ends.
        with self._turn:
            while self._due is not None and not self._closed:
                seconds = self._due - time.monotonic()
                if seconds <= 0:
                    return True
                self._turn.wait(seconds)
            self._thread = None
            return False


def _pack(key: str | None, content: Content) -> bytes:
    texts = [[t.kind, t.owners, t.size, t.count, t.used] for t in content.texts]
    head = json.dumps({"key": key or "", "texts": texts}).encode()
    body = len(head).to_bytes(8, "little") + head + content.row.astype("<i4").tobytes()
    return _MAGIC + hashlib.sha256(body).digest() + body


def _unpack(data: bytes, key: str | None) -> tuple[str, Content]:
    # Raises ValueError, saying why.
    start = len(_MAGIC) + hashlib.sha256().digest_size
    body = memoryview(data)[start:]
    if hashlib.sha256(body).digest() != data[len(_MAGIC) : start]:
        raise ValueError("the file is damaged")
    size = int.from_bytes(body[:8], "little")
    head = json.loads(bytes(body[8 : 8 + size]))
    if key is not None and head["key"] != key:
        raise ValueError(f"it was made with {head['key']!r}, this is {key!r}")
    texts = [
        Text(kind, tuple(map(sys.intern, owners)), size, count, used)
        for kind, owners, size, count, used in head["texts"]
    ]
    return head["key"], Content(texts, np.frombuffer(body[8 + size :], "<i4").astype(np.int32))


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        start = file.read(len(_MAGIC))
        if start != _MAGIC:
            raise ValueError("it is no memory, or one of another version")
        return start + file.read()


def _write(path: Path, data: bytes) -> None:
    # Under another name until it is whole and on the disk.
    path.parent.mkdir(parents=True, exist_ok=True)
    new = _unfinished(path)
    try:
        with open(new, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except OSError:
        with suppress(OSError):  # the first error says more
            new.unlink()
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # now the name, too
    finally:
        os.close(folder)


def _unfinished(path: Path) -> Path:
    return path.with_name(path.name + ".new")
