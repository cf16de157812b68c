"""Chroma, built from the library: in step with it, checked against it, made anew when damaged."""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ingest.errors import VectorsFailed
from ingest.library import Library

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_COLLECTION = "passages"
_SAMPLE = 32
_SAME = 0.999
_log = logging.getLogger(__name__)


class Vectors:
    """The dense index of one library in a folder of its own.

    Opening checks it and rebuilds it where needed; only the holder of the home's lock may do so.
    Raises `VectorsFailed` when not even an empty folder makes a working index.
    """

    def __init__(self, folder: Path, library: Library, fingerprint: str) -> None:
        self._folder, self._library, self._fingerprint = folder, library, fingerprint
        self._swapping = threading.RLock()  # questions wait while the folder is made anew
        self._client: Any = None
        self._collection: Any = None
        # Damaged HNSW files can end the whole process instead of raising. The mark outlives such
        # an end, so that the next start begins from the library and not from the same files.
        self._mark = folder.with_name(folder.name + ".opening")
        crashed = self._mark.exists()
        self._mark.touch()
        if crashed or not self._sound():
            _log.warning("rebuilding %s from the library", folder)
            self.rebuild()
        self._mark.unlink(missing_ok=True)

    def query(self, vector: NDArray[np.float32], k: int) -> list[tuple[str, float]]:
        """The `k` nearest passages to a vector of length 1: `(id, cosine)`, nearest first.

        Fewer when there are fewer.
        """
        with self._swapping:
            k = min(k, self.count())
            if k < 1:
                return []
            found = self._collection.query(
                query_embeddings=[vector.tolist()], n_results=k, include=["distances"]
            )
        return [
            (id, 1.0 - distance)
            for id, distance in zip(found["ids"][0], found["distances"][0], strict=True)
        ]

    def count(self) -> int:
        """How many vectors there are."""
        return int(self._collection.count())

    def add(self, vectors: dict[str, NDArray[np.float32]]) -> None:
        """Add or overwrite vectors by passage id, in batches that Chroma accepts."""
        for ids in self._batches(list(vectors)):
            self._collection.upsert(ids=ids, embeddings=[vectors[id].tolist() for id in ids])

    def delete(self, ids: Sequence[str]) -> None:
        """Delete vectors; ids that are not there are passed over."""
        for some in self._batches(list(ids)):
            self._collection.delete(ids=some)

    def follow(self) -> None:
        """Make the set of ids the library's: add what is missing, delete what is not its own."""
        wanted = self._library.ids()
        present = set(self._collection.get(include=[])["ids"])
        for ids in self._batches(sorted(wanted - present)):
            self.add(self._library.vectors(ids))
        self.delete(sorted(present - wanted))

    def check(self) -> bool:
        """Whether up to 32 passages, spread over the library, are found by their own vectors."""
        ids = sorted(self._library.ids())
        if self.count() != len(ids):
            return False
        step = max(1, len(ids) // _SAMPLE)
        sample = self._library.vectors(ids[::step][:_SAMPLE])
        for id, vector in sample.items():
            nearest = self.query(vector, 1)
            if not nearest or nearest[0][1] < _SAME:
                return False
            found = nearest[0][0]
            # Two passages may have the very same vector; then either may come first.
            if found != id and self._cosine(found, vector) < _SAME:
                return False
        return True

    def rebuild(self) -> None:
        """Throw the folder away and fill a new one from the library; raises `VectorsFailed`."""
        with self._swapping:
            self.close()
            shutil.rmtree(self._folder, ignore_errors=True)
            try:
                self._open()
                self.follow()
                sound = self.check()
            except Exception as error:
                raise VectorsFailed(f"Chroma cannot be used in {self._folder}: {error}") from error
        if not sound:
            raise VectorsFailed(f"Chroma does not find what was just put into {self._folder}")

    def close(self) -> None:
        """Close Chroma's files; another process may own them then."""
        if self._client is not None:
            self._client.close()
        self._client = self._collection = None

    def _cosine(self, id: str, vector: NDArray[np.float32]) -> float:
        stored = self._library.vectors([id]).get(id)
        return float(stored @ vector) if stored is not None else -1.0

    def _sound(self) -> bool:
        """Open what is there and bring it in step; False if it has to be made anew."""
        try:
            self._open()
            metadata = self._collection.metadata or {}
            if metadata.get("fingerprint") != self._fingerprint:
                return False
            self.follow()
            return self.check()
        except Exception:  # noqa: BLE001 - Chroma's damage has no one type; all mean "rebuild"
            _log.warning("%s cannot be used", self._folder, exc_info=True)
            return False

    def _open(self) -> None:
        import chromadb
        from chromadb.api.shared_system_client import SharedSystemClient
        from chromadb.config import Settings

        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            self._client = chromadb.PersistentClient(
                str(self._folder), settings=Settings(anonymized_telemetry=False)
            )
        except Exception:
            # Chroma keeps a system that failed to start and would hand it to the next client.
            SharedSystemClient.clear_system_cache()
            raise
        # Not get_or_create: that would overwrite the fingerprint which is to be compared.
        if any(found.name == _COLLECTION for found in self._client.list_collections()):
            self._collection = self._client.get_collection(_COLLECTION, embedding_function=None)
        else:
            self._collection = self._client.create_collection(
                _COLLECTION,
                embedding_function=None,
                metadata={"fingerprint": self._fingerprint},
                configuration={"hnsw": {"space": "cosine", "ef_search": 200}},
            )

    def _batches(self, ids: list[str]) -> Iterator[list[str]]:
        size = int(self._client.get_max_batch_size())
        for at in range(0, len(ids), size):
            yield ids[at : at + size]
