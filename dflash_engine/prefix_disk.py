"""Snapshots on disk: a safetensors file each, read back only if every byte is as it was written.

The last tensor of a file is the SHA-256 of all before it. What the file says of itself is under
``prefix`` in its metadata: the key it was made under, its tokens, and the form of the snapshot. Its
name is made of the first two, so that a list of the files is had from their headers alone.
"""

import base64
import hashlib
import json
import logging
import math
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import mlx.core as mx
import numpy as np

from .fit import size as said
from .prefix_index import Index, count
from .prefix_snapshot import Snapshot

_LOG = logging.getLogger(__name__)
_FORMAT = 1  # of the files; part of every key
_NAME = re.compile(r"[0-9a-f]{16}-[0-9a-f]{32}\.safetensors")
_UNFINISHED = ".unfinished"
_ABANDONED = 3600  # seconds after which nobody writes at an unfinished file any more
_RESERVE = 512 * 2**20  # bytes of the disk that are left to others
_WORTH = 1 / 8  # of a file's tokens must be gained, or reading them anew is as fast
_COVERED = 3 / 4  # of a prefix that other files serve: then it gets none of its own

# safetensors' names, MLX's types, and what NumPy reads and writes them as.
_TYPES: dict[str, tuple[mx.Dtype, str]] = {
    "F64": (mx.float64, "f8"),
    "F32": (mx.float32, "f4"),
    "F16": (mx.float16, "f2"),
    "BF16": (mx.bfloat16, "u2"),
    "I64": (mx.int64, "i8"),
    "I32": (mx.int32, "i4"),
    "I16": (mx.int16, "i2"),
    "I8": (mx.int8, "i1"),
    "U64": (mx.uint64, "u8"),
    "U32": (mx.uint32, "u4"),
    "U16": (mx.uint16, "u2"),
    "U8": (mx.uint8, "u1"),
    "BOOL": (mx.bool_, "u1"),
}
_NAMES = {dtype: name for name, (dtype, _) in _TYPES.items()}
_UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError)


@dataclass(frozen=True)
class File:
    """What the header of a file says; ``size`` in bytes."""

    path: Path
    size: int
    tokens: bytes
    shortest: int


class Disk:
    """The files of one ``key`` in ``folder``, which those of other keys share.

    All of them together take no more than ``budget`` bytes: those go first that were not used for
    longest. Files of another key, an earlier version's for one, are not looked at and go in that
    way too. A file that cannot be read, or is not as it was written, is deleted and logged.

    Files are written by a thread of its own, which only reads the memory of evaluated arrays; the
    rest is for the thread that owns the arrays.
    """

    def __init__(self, folder: Path, key: str, budget: int) -> None:
        self._folder = folder
        self._key = f"{_FORMAT} {key}"
        self._budget = budget
        self._prefix = hashlib.sha256(self._key.encode()).hexdigest()[:16]
        self._lock = threading.Lock()  # of the three below
        self._files: dict[bytes, File] = {}
        self._index = Index()
        self._waiting: dict[bytes, tuple[Snapshot, list[memoryview]]] = {}
        self._writer = ThreadPoolExecutor(1, "dflash-prefixes")
        self._list()

    @property
    def files(self) -> list[File]:
        """What there is under this key."""
        with self._lock:
            return list(self._files.values())

    def find(self, tokens: bytes, most: int, beyond: int) -> tuple[int, bytes, Snapshot] | None:
        """The snapshot of the file that serves the longest prefix of ``tokens``, at most ``most``
        tokens, if it saves enough over the ``beyond`` that are had otherwise; with the prefix's
        length, and the file's own tokens.
        """
        while found := self._best(tokens, most, beyond):
            length, file = found
            snapshot = self._load(file)
            if snapshot is not None:
                return length, file.tokens, snapshot
        return None

    def touch(self, tokens: bytes) -> None:
        """The prefix of just these ``tokens`` was used: its file, if any, goes last."""
        if (file := self._files.get(tokens)) is not None:
            with suppress(OSError):  # another process deleted it
                os.utime(file.path)

    def save(self, tokens: bytes, snapshot: Snapshot) -> None:
        """Write ``snapshot``, whose arrays are evaluated, when there is time; unless other files
        serve most of it.
        """
        views = [memoryview(array) for array in snapshot.arrays]  # type: ignore[arg-type]
        with self._lock:
            self._waiting[tokens] = snapshot, views
        self._writer.submit(self._write_waiting, tokens).add_done_callback(_log_error)

    def cancel(self, tokens: bytes) -> None:
        """Do not write what waits to be written for ``tokens``, and let its memory go."""
        with self._lock:
            self._waiting.pop(tokens, None)

    def clear(self) -> None:
        """Delete all files, of other keys too."""
        with self._lock:
            self._waiting.clear()
        self._writer.submit(lambda: self._delete(path for path, _ in self._all())).result()

    def flush(self) -> None:
        """Wait until all that waits is written."""
        self._writer.submit(lambda: None).result()

    def close(self) -> None:
        """Write what waits, and stop."""
        self._writer.shutdown()

    def _list(self) -> None:
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for path in self._folder.glob(f"*{_UNFINISHED}"):
                if time.time() - path.stat().st_mtime > _ABANDONED:
                    path.unlink()
        except OSError as error:
            _LOG.warning("prefixes in %s cannot be used: %s", self._folder, error)
        for path, _ in self._all():
            if path.name.startswith(self._prefix):
                try:
                    with path.open("rb") as stream:
                        file = self._file(path, _header(stream, path.stat().st_size))
                except _UNREADABLE as error:
                    self._discard(path, error)
                else:
                    self._add(file)
        self._make_room(0)

    def _all(self) -> list[tuple[Path, os.stat_result]]:
        # Those used last come last.
        found = []
        with suppress(OSError):
            for entry in os.scandir(self._folder):
                if _NAME.fullmatch(entry.name):
                    with suppress(OSError):
                        found.append((Path(entry.path), entry.stat()))
        return sorted(found, key=lambda pair: pair[1].st_mtime_ns)

    def _file(self, path: Path, header: dict[str, Any]) -> File:
        own = json.loads(header["__metadata__"]["prefix"])
        tokens = base64.b64decode(own["tokens"], validate=True)
        if own["key"] != self._key or path.name != self._name(tokens):
            raise ValueError("its name is not that of its tokens")
        return File(path, path.stat().st_size, tokens, int(own["shortest"]))

    def _name(self, tokens: bytes) -> str:
        return f"{self._prefix}-{hashlib.sha256(tokens).hexdigest()[:32]}.safetensors"

    def _add(self, file: File) -> None:
        with self._lock:
            self._files[file.tokens] = file
            self._index.add(file.tokens)

    def _delete(self, paths: Iterable[Path]) -> None:
        names = set()
        for path in paths:
            names.add(path.name)
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                _LOG.warning("%s cannot be deleted: %s", path, error)
        with self._lock:
            gone = [tokens for tokens, file in self._files.items() if file.path.name in names]
            for tokens in gone:
                del self._files[tokens]
                self._index.remove(tokens)

    def _discard(self, path: Path, error: BaseException) -> None:
        if isinstance(error, FileNotFoundError):
            _LOG.info("%s is gone: another process made room", path.name)
        else:
            _LOG.warning("%s is damaged, and deleted: %s", path, error)
        self._delete([path])

    def _make_room(self, needed: int) -> None:
        files = self._all()
        over = sum(stat.st_size for _, stat in files) + needed - self._budget
        out = []
        for path, stat in files:
            if over <= 0:
                break
            out.append(path)
            over -= stat.st_size
        self._delete(out)

    def _best(self, tokens: bytes, most: int, beyond: int) -> tuple[int, File] | None:
        with self._lock:
            for length, own in self._index.nearest(tokens):
                file, length = self._files[own], min(length, most)
                if length <= beyond:
                    return None
                if file.shortest <= length and length - beyond >= _WORTH * count(own):
                    return length, file
        return None

    def _load(self, file: File) -> Snapshot | None:
        try:
            snapshot = self._read(file)
        except _UNREADABLE as error:
            self._discard(file.path, error)
            return None
        self.touch(file.tokens)
        return snapshot

    def _read(self, file: File) -> Snapshot:
        digest = hashlib.sha256()
        with file.path.open("rb") as stream:
            header = _header(stream, file.size)
            digest.update(_reread(stream))
            arrays = []
            for name, dtype, shape, bytes_ in _tensors(header):
                if name == "sha256":
                    break
                raw = np.empty(bytes_, np.uint8)
                if stream.readinto(raw) != bytes_:  # type: ignore[arg-type]
                    raise ValueError("it is cut short")
                digest.update(raw)  # type: ignore[arg-type]
                mlx_type, numpy_type = _TYPES[dtype]
                arrays.append(mx.array(raw.view(numpy_type).reshape(shape)).view(mlx_type))
            if stream.read() != digest.digest():
                raise ValueError("its checksum is wrong")
        if self._file(file.path, header).tokens != file.tokens:
            raise ValueError("it is of other tokens")
        own = json.loads(header["__metadata__"]["prefix"])
        mx.eval(arrays)
        snapshot = Snapshot(count(file.tokens), file.shortest, own["form"], arrays)
        snapshot.restore(snapshot.length)  # raises where objects or lengths are not as expected
        return snapshot

    def _write_waiting(self, tokens: bytes) -> None:
        try:
            with self._lock:
                waiting = self._waiting.pop(tokens, None)
            if waiting is not None and not self._covered(tokens):
                self._write(tokens, *waiting)
        except OSError as error:
            _LOG.warning("a prefix of %d tokens is not kept on disk: %s", count(tokens), error)

    def _covered(self, tokens: bytes) -> bool:
        enough = math.ceil(_COVERED * count(tokens))
        with self._lock:
            for length, own in self._index.nearest(tokens):
                if length < enough:
                    return False
                if self._files[own].shortest <= length:
                    return True
        return False

    def _write(self, tokens: bytes, snapshot: Snapshot, views: list[memoryview]) -> None:
        own = {
            "key": self._key,
            "tokens": base64.b64encode(tokens).decode(),
            "shortest": snapshot.shortest,
            "form": snapshot.form,
        }
        head = _head(json.dumps(own), snapshot.arrays)
        size = len(head) + snapshot.nbytes + hashlib.sha256().digest_size
        if size > self._budget:
            return
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._make_room(size)
        free = shutil.disk_usage(self._folder).free
        if free < size + _RESERVE:
            raise OSError(f"{self._folder} has {said(free)} left, and {said(size)} are needed")
        file = File(self._folder / self._name(tokens), size, tokens, snapshot.shortest)
        # Only for its owner: a prefix can be read off its keys and values, and off its tokens.
        handle, unfinished = tempfile.mkstemp(_UNFINISHED, self._prefix, self._folder)
        try:
            with os.fdopen(handle, "wb") as stream:
                digest = hashlib.sha256()
                for part in [memoryview(head), *views]:
                    digest.update(part)
                    stream.write(part)
                stream.write(digest.digest())
            Path(unfinished).replace(file.path)
        finally:
            Path(unfinished).unlink(missing_ok=True)
        self._add(file)
        self._delete(self._superseded(file))

    def _superseded(self, new: File) -> list[Path]:
        with self._lock:
            return [
                self._files[own].path
                for length, own in self._index.nearest(new.tokens)
                if own != new.tokens and length == count(own) >= new.shortest
            ]


def _log_error(done: Future[None]) -> None:
    if error := done.exception():
        _LOG.error("a prefix is not kept on disk", exc_info=error)


def _head(prefix: str, arrays: list[mx.array]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"prefix": prefix}}
    end = 0
    for i, array in enumerate(arrays):
        header[str(i)] = _entry(_NAMES[array.dtype], array.shape, end, array.nbytes)
        end += array.nbytes
    header["sha256"] = _entry("U8", (32,), end, 32)
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    return len(encoded).to_bytes(8, "little") + encoded


def _entry(dtype: str, shape: tuple[int, ...], start: int, nbytes: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, start + nbytes]}


def _header(stream: BinaryIO, size: int) -> dict[str, Any]:
    """The header of a file of ``size`` bytes, whose tensors fill it; the stream is then there."""
    length = int.from_bytes(stream.read(8), "little")
    if length > size:
        raise ValueError("it is cut short, or no safetensors file")
    header: dict[str, Any] = json.loads(stream.read(length))
    if 8 + length + sum(bytes_ for *_, bytes_ in _tensors(header)) != size:
        raise ValueError("its tensors do not fill it")
    return header


def _tensors(header: dict[str, Any]) -> Iterator[tuple[str, str, tuple[int, ...], int]]:
    """Names, types, shapes and bytes of the tensors, in the order in which they stand."""
    for name, entry in header.items():
        if name != "__metadata__":
            shape = tuple(int(n) for n in entry["shape"])
            bytes_ = math.prod(shape) * np.dtype(_TYPES[entry["dtype"]][1]).itemsize
            if bytes_ < 0:
                raise ValueError(f"tensor {name} has shape {shape}")
            yield name, entry["dtype"], shape, bytes_


def _reread(stream: BinaryIO) -> bytes:
    length = stream.tell()
    stream.seek(0)
    return stream.read(length)
