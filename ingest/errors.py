# ruff: noqa: N818 - the names say the condition, as in "raises HomeLocked"
"""Everything that can go wrong between a file and its passages, as one tree under `IngestError`."""

from __future__ import annotations


class IngestError(Exception):
    """Root of this package's errors; `str(error)` says what happened and what to do."""


class UnreadableFile(IngestError):
    """A document yields no passages; `reason` says why, to the person who put it there."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class EncryptedFile(UnreadableFile):
    """The document needs a password to be opened at all."""


class EmptyFile(UnreadableFile):
    """The document has no bytes, no pages or no words."""


class ImageOnlyFile(UnreadableFile):
    """The document has pages, and not one of them carries text."""


class BrokenFile(UnreadableFile):
    """The bytes are not what the file's name says they are."""


class UndecodableFile(UnreadableFile):
    """A text file whose bytes fit no encoding this project knows."""


class UnsupportedFile(UnreadableFile):
    """No reader takes files with this extension."""


class ChangingFile(UnreadableFile):
    """The file went on changing while it was read, twice."""


class HomeLocked(IngestError):
    """Another process owns the home folder; `pid` and `url` say which, as far as it has said."""

    def __init__(self, path: str, pid: int | None, url: str | None) -> None:
        who = f"process {pid}" if pid is not None else "another process"
        at = f" (serving at {url})" if url else ""
        super().__init__(
            f"{path} is in use by {who}{at}. One process owns an index at a time: "
            "stop that one, or give it the work."
        )
        self.path, self.pid, self.url = path, pid, url


class HomeNotHeld(IngestError):
    """The index was asked for without the home's lock; hold it with `with home.lock():` first."""


class FingerprintMismatch(IngestError):
    """The index was made with another embedding model or cutter; `differences` names each."""

    def __init__(self, differences: list[str]) -> None:
        super().__init__(
            "this index was made in another way: "
            + "; ".join(differences)
            + ". Its vectors cannot be compared with new ones: "
            "run `dflash-rag ingest --rebuild`, or go back to the earlier settings."
        )
        self.differences = differences


class UnusableModel(IngestError):
    """The embedding model cannot be used: unknown name, no such folder, or another dimension."""


class LibraryTooNew(IngestError):
    """The library was written by a newer version of this program."""


class VectorsFailed(IngestError):
    """Chroma could not be brought in step with the library even from an empty folder."""
