"""The index: a home's library and vectors under one roof. Start reading here."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ingest.embed import Embedder
from ingest.errors import FingerprintMismatch, HomeNotHeld
from ingest.fingerprint import Fingerprint
from ingest.home import Home
from ingest.library import Library
from ingest.pipeline import MAX_BYTES, Pipeline
from ingest.progress import IngestEvent, IngestSummary
from ingest.records import FileRecord, Passage
from ingest.vectors import Vectors

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_REEMBED_BATCH = 256


class Index:
    """Everything that has been ingested into a home; searched and added to from any thread.

    >>> with home.lock(), Index.open(home, embedder, "data") as index:
    ...     index.ingest(["data"])
    ...     index.lexical("refund", k=5)
    """

    def __init__(
        self,
        home: Home,
        embedder: Embedder,
        data_root: Path,
        library: Library,
        vectors: Vectors,
        *,
        max_bytes: int = MAX_BYTES,
        reembedded: bool = False,
    ) -> None:
        self._home, self._embedder, self._data_root = home, embedder, data_root
        self._library, self._vectors = library, vectors
        self._max_bytes, self._reembedded = max_bytes, reembedded
        self._ingesting = threading.Lock()

    @classmethod
    def open(
        cls,
        home: Home,
        embedder: Embedder,
        data_root: str | os.PathLike[str],
        *,
        rebuild: bool = False,
        max_bytes: int = MAX_BYTES,
    ) -> Index:
        """Open a home's index, make it if there is none, and repair Chroma from the library.

        The home must be held (`HomeNotHeld`). An index made with another model or cutter raises
        `FingerprintMismatch`, unless `rebuild` allows to embed its passages anew; files larger
        than `max_bytes` will not be ingested. Also raises `LibraryTooNew`, `VectorsFailed`,
        `UnusableModel`.
        """
        if not home.held:
            raise HomeNotHeld(f"{home.path} must be locked before its index is opened")
        library = Library(home.library)
        try:
            fingerprint = Fingerprint.of(embedder)
            reembedded = _settle_fingerprint(library, fingerprint, embedder, rebuild)
            vectors = Vectors(home.chroma, library, fingerprint.digest)
        except BaseException:
            library.close()
            raise
        return cls(
            home,
            embedder,
            Path(data_root),
            library,
            vectors,
            max_bytes=max_bytes,
            reembedded=reembedded,
        )

    def ingest(
        self,
        paths: Iterable[str | os.PathLike[str]],
        on_event: Callable[[IngestEvent], None] | None = None,
        rebuild: bool = False,
        should_stop: Callable[[], bool] | None = None,
    ) -> IngestSummary:
        """Bring the index in step with the files under `paths`; searches go on meanwhile.

        New and changed files are read, unchanged ones passed over unless `rebuild`, files gone
        from disk removed. What cannot be read is listed in the summary. `should_stop` is asked
        between files and batches; what is done by then stays. A second ingest waits for the first.
        """
        with self._ingesting:
            pipeline = Pipeline(
                self._library,
                self._vectors,
                self._embedder,
                self._data_root,
                without=self._home.path,
                max_bytes=self._max_bytes,
                on_event=on_event,
                should_stop=should_stop,
            )
            reuse = not rebuild or self._reembedded
            return pipeline.run([Path(path) for path in paths], again=rebuild, reuse=reuse)

    def dense(self, vector: NDArray[np.float32], k: int) -> list[tuple[str, float]]:
        """The `k` passages nearest to a question's vector: `(id, cosine)`, nearest first."""
        return self._vectors.query(vector, k)

    def lexical(self, text: str, k: int) -> list[tuple[str, float]]:
        """The `k` best passages that share words with any text: `(id, BM25)`, best first."""
        return self._library.search_lexical(text, k)

    def passages(self, ids: Sequence[str]) -> list[Passage]:
        """The passages with these ids, in the order asked, without those that have gone."""
        return self._library.passages(ids)

    def every_passage(self) -> list[Passage]:
        """All passages, in the order of the documents."""
        passages = self._library.passages(list(self._library.ids()))
        return sorted(passages, key=lambda passage: (passage.file, passage.ordinal))

    def document_frequency(self, terms: Sequence[str]) -> dict[str, int]:
        """In how many passages each term (as `ingest.text.index_terms` makes them) occurs."""
        return self._library.document_frequency(terms)

    @property
    def passage_count(self) -> int:
        """How many passages there are."""
        return self._library.passage_count()

    def files(self) -> list[FileRecord]:
        """Every file that is served or has failed, by name."""
        return self._library.files()

    def close(self) -> None:
        """Wait for a running ingest, then close every file; the home may be released after."""
        with self._ingesting:
            self._vectors.close()
            self._library.close()

    def __enter__(self) -> Index:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _settle_fingerprint(
    library: Library, fingerprint: Fingerprint, embedder: Embedder, rebuild: bool
) -> bool:
    """Make sure the library's vectors are this embedder's; True if they were computed anew."""
    stored = library.fact("fingerprint")
    if stored is None or library.passage_count() == 0:
        library.set_fact("fingerprint", fingerprint.to_json())
        return False
    differences = fingerprint.differences(Fingerprint.from_json(stored))
    if not differences:
        return False
    if not rebuild:
        raise FingerprintMismatch(differences)
    texts = library.searchable()
    batches = (texts[at : at + _REEMBED_BATCH] for at in range(0, len(texts), _REEMBED_BATCH))
    library.set_vectors(
        (
            (id, vector)
            for batch in batches
            for (id, _), vector in zip(
                batch, embedder.embed_passages([text for _, text in batch]), strict=True
            )
        ),
        fingerprint.to_json(),
    )
    return True
