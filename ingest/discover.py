"""Which files an ingest is about: what lies under the given paths, and what has gone from there."""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from ingest.readers import supported


@dataclass(frozen=True)
class FoundFile:
    """A file to ingest: its key in the library, and where it lies."""

    key: str
    path: Path


@dataclass
class Discovery:
    """What was found; `problems` are `(file, reason)`, `gone` the known files no longer there."""

    files: list[FoundFile] = field(default_factory=list)
    problems: list[tuple[str, str]] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)


def file_key(path: Path, data_root: Path) -> str:
    """A file's name in the library: its path under `data_root`, else the whole path.

    With `/` on every system and letters in NFC, since file systems differ in both.
    """
    path, root = _absolute(path), _absolute(data_root)
    if not path.is_relative_to(root):
        resolved = path.parent.resolve() / path.name
        if resolved.is_relative_to(root.resolve()):
            path, root = resolved, root.resolve()
    name = path.relative_to(root) if path.is_relative_to(root) else path
    # Names that are no UTF-8 on disk cannot be stored as they are.
    readable = os.fsencode(name).decode("utf-8", "backslashreplace")
    return unicodedata.normalize("NFC", readable.replace(os.sep, "/"))


def discover(
    paths: Iterable[Path], data_root: Path, known: Iterable[str], without: Path | None = None
) -> Discovery:
    """The readable files under `paths`, and those of `known` that have gone from there.

    Folders are walked through links, each folder once; hidden and temporary files and the folder
    `without` are passed over. A known file has gone only if it lies under a given folder that
    exists and could be listed, or was named itself.
    """
    known = set(known)
    discovery = Discovery()
    found: dict[str, Path] = {}
    for path in map(_absolute, paths):
        key = file_key(path, data_root)
        try:
            is_folder = path.is_dir()
            exists = path.exists()
        except OSError as error:
            discovery.problems.append((key, f"cannot be reached: {error.strerror}"))
            continue
        if is_folder:
            walk = _Walk(data_root, without)
            walk.folder(path)
            found.update(walk.found)
            discovery.problems += walk.problems
            discovery.gone += _gone(path, data_root, known, walk)
        elif exists and supported(path):
            found[key] = path
        elif exists:
            discovery.problems.append((key, f"files of type {path.suffix or key} are not read"))
        elif key in known:
            discovery.gone.append(key)
        elif any(name.startswith(key + "/") for name in known):
            reason = "the folder is missing; what was ingested from it is still served"
            discovery.problems.append((key, reason))
        else:
            discovery.problems.append((key, "there is no such file or folder"))
    discovery.files = [FoundFile(key, found[key]) for key in sorted(found)]
    discovery.gone = sorted(set(discovery.gone) - set(found))
    return discovery


class _Walk:
    """One walk through a folder."""

    def __init__(self, data_root: Path, without: Path | None) -> None:
        self.found: dict[str, Path] = {}
        self.problems: list[tuple[str, str]] = []
        self.unlisted: list[Path] = []
        self._data_root = data_root
        self._without = without.resolve() if without else None
        self._visited: set[tuple[int, int]] = set()

    def folder(self, path: Path) -> None:
        """Walk a folder and those below it."""
        pending = [path]
        while pending:
            here = pending.pop()
            try:
                status = here.stat()
                # A link to a folder above would lead round for ever.
                if (status.st_dev, status.st_ino) in self._visited:
                    continue
                self._visited.add((status.st_dev, status.st_ino))
                entries = sorted(here.iterdir())
            except OSError as error:
                self.unlisted.append(here)
                key = file_key(here, self._data_root)
                self.problems.append((key, f"the folder cannot be listed: {error.strerror}"))
                continue
            for entry in entries:
                if _ignored(entry.name):
                    continue
                if entry.is_dir():
                    if entry.resolve() != self._without:
                        pending.append(entry)
                elif entry.is_file() and supported(entry):
                    self.found[file_key(entry, self._data_root)] = entry


def _ignored(name: str) -> bool:
    # Hidden files, macOS' and Office's by-products, and what editors and browsers write first.
    return name.startswith((".", "~$")) or name.endswith("~") or name == "__MACOSX"


def _gone(folder: Path, data_root: Path, known: set[str], walk: _Walk) -> list[str]:
    prefix = file_key(folder, data_root)
    root = file_key(data_root, data_root)
    inodes = {_inode(path) for path in walk.found.values()}
    gone = []
    for key in known - set(walk.found):
        relative = not key.startswith("/")
        path = _absolute(data_root) / key
        by_name = key.startswith(prefix + "/") or (prefix == root and relative)
        if not (by_name or path.is_relative_to(folder)):
            continue
        if any(path.is_relative_to(unlisted) for unlisted in walk.unlisted):
            continue
        try:
            path.lstat()
        except (FileNotFoundError, NotADirectoryError):
            gone.append(key)
        except OSError:
            continue
        else:
            # On a file system without case, a renamed file still answers to its old name; and a
            # link whose target has gone is gone too.
            if not path.exists() or _inode(path) in inodes:
                gone.append(key)
    return gone


def _inode(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except OSError:
        return (-1, -1)
    return (status.st_dev, status.st_ino)


def _absolute(path: Path) -> Path:
    # Without resolving links: a document is named as its owner sees it.
    return Path(os.path.abspath(path))  # noqa: PTH100
