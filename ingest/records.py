"""What the library keeps: files, and passages that can be cited."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True)
class Passage:
    """A stretch of a document that can be cited.

    `file` is the path under the data folder; `page` counts from 1 (None without pages);
    `[start, end)` are character positions in the normal text of that page, or of the file.
    """

    id: str
    file: str
    ordinal: int
    page: int | None
    heading: str
    text: str
    start: int
    end: int
    tokens: int


@dataclass(frozen=True)
class StoredPassage:
    """A passage on its way into the library, with what only search needs.

    `context` are the titles put before the text for search, `digest` names the embedded text and
    `vector` is `[dimension]` float32.
    """

    passage: Passage
    context: str
    digest: str
    vector: NDArray[np.float32]


@dataclass(frozen=True)
class FileRecord:
    """A file the library knows; `passages` are those served, even while `state` is "failed".

    `sha256`, `size` and `mtime_ns` are those of the served generation, None and 0 without one.
    """

    file: str
    sha256: str | None
    size: int
    mtime_ns: int
    pages: int
    state: str
    reason: str
    warnings: list[str]
    ingested_at: float
    passages: int
