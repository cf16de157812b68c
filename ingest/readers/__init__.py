"""From a file to its text: blocks with their page and heading, one reader for a family of files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import PurePath

from ingest.errors import EmptyFile, UnsupportedFile
from ingest.readers.document import Block, Document

__all__ = ["Block", "Document", "read", "supported"]


def read(path: str | PurePath, data: bytes) -> Document:
    """The document in `data`, by the reader for the extension of `path` (which is not opened).

    Raises an `UnreadableFile` with the reason when there is nothing to be had from it.
    """
    reader = _reader(PurePath(path).suffix.lower())
    if reader is None:
        raise UnsupportedFile(
            f"files of type {PurePath(path).suffix or '(none)'} are not read; "
            f"these are: {', '.join(SUFFIXES)}"
        )
    if not data:
        raise EmptyFile("the file is empty (0 bytes)")
    document = reader(data)
    if not any(block.text.strip() for block in document.blocks):
        raise EmptyFile("there is no text in it")
    return document


def supported(path: str | PurePath) -> bool:
    """Whether some reader takes files with this extension."""
    return PurePath(path).suffix.lower() in SUFFIXES


SUFFIXES = (".pdf", ".md", ".markdown", ".txt")


def _reader(suffix: str) -> Callable[[bytes], Document] | None:
    # Imported on use: a reader's library may be slow to load or missing.
    if suffix == ".pdf":
        from ingest.readers.pdf import read_pdf

        return read_pdf
    if suffix in (".md", ".markdown"):
        from ingest.readers.markdown import read_markdown

        return read_markdown
    if suffix == ".txt":
        from ingest.readers.text import read_text

        return read_text
    return None
