"""Files to passages to an index that can be searched. Knows nothing of models that write, or HTTP.

>>> from ingest import Embedder, EmbeddingModel, Home, Index
>>> embedder = Embedder(EmbeddingModel.named("all-MiniLM-L6-v2"), "models/minilm")
>>> with Home("var").lock() as home, Index.open(home, embedder, "data") as index:
...     print(index.ingest(["data"]).passages)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ingest.embed import Embedder, EmbeddingModel
    from ingest.errors import (
        BrokenFile,
        ChangingFile,
        EmptyFile,
        EncryptedFile,
        FingerprintMismatch,
        HomeLocked,
        HomeNotHeld,
        ImageOnlyFile,
        IngestError,
        LibraryTooNew,
        UndecodableFile,
        UnreadableFile,
        UnsupportedFile,
        UnusableModel,
        VectorsFailed,
    )
    from ingest.home import Home, Owner
    from ingest.index import Index
    from ingest.progress import FailedFile, IngestEvent, IngestSummary
    from ingest.records import FileRecord, Passage

__all__ = [
    "BrokenFile",
    "ChangingFile",
    "Embedder",
    "EmbeddingModel",
    "EmptyFile",
    "EncryptedFile",
    "FailedFile",
    "FileRecord",
    "FingerprintMismatch",
    "Home",
    "HomeLocked",
    "HomeNotHeld",
    "ImageOnlyFile",
    "Index",
    "IngestError",
    "IngestEvent",
    "IngestSummary",
    "LibraryTooNew",
    "Owner",
    "Passage",
    "UndecodableFile",
    "UnreadableFile",
    "UnsupportedFile",
    "UnusableModel",
    "VectorsFailed",
]

_MODULES = ("errors", "home", "embed", "progress", "records", "index")


def __getattr__(name: str) -> Any:
    # On first use: `dflash-rag --help` should not wait for what it does not need.
    if name in __all__:
        for module in _MODULES:
            found = getattr(import_module(f"ingest.{module}"), name, None)
            if found is not None:
                globals()[name] = found
                return found
    raise AttributeError(f"module 'ingest' has no attribute {name!r}")
