"""The library: one SQLite file with every file, passage, vector and index term. The truth.

What is written for a file is one transaction, so each file is served whole, in its old generation
or its new one. Chroma is built from here and can be thrown away.
"""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ingest.records import FileRecord, Passage, StoredPassage
from ingest.schema import connect, migrate
from ingest.text import index_terms, query_terms

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_MAX_QUERY_TERMS = 64
_MAX_VARIABLES = 500


class Library:
    """The SQLite file, for one process and any number of its threads.

    Raises `LibraryTooNew`; what SQLite itself raises (`sqlite3.Error`, a full disk among them)
    comes through, with nothing of the transaction kept.
    """

    def __init__(self, path: Path) -> None:
        # Of documents that may be confidential: only for us to read, even in a folder for all.
        # SQLite gives the same mode to the files it keeps beside this one.
        path.touch(mode=0o600)
        with suppress(PermissionError):  # somebody else's file that we may use
            path.chmod(0o600)
        # One connection writes, the other reads: in WAL mode questions never wait for a file.
        self._writer, self._writing = connect(path), threading.RLock()
        migrate(self._writer)
        self._reader, self._reading = connect(path), threading.Lock()

    def close(self) -> None:
        """Close the file; the library cannot be used afterwards."""
        with self._writing, self._reading:
            self._reader.close()
            self._writer.close()

    # What is known

    def fact(self, name: str) -> str | None:
        """A stored fact about the library, such as its fingerprint."""
        rows = self._read("SELECT value FROM facts WHERE name = ?", (name,))
        return str(rows[0][0]) if rows else None

    def set_fact(self, name: str, value: str) -> None:
        """Store a fact."""
        with self._transaction() as db:
            db.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (name, value))

    def files(self) -> list[FileRecord]:
        """Every known file, by name."""
        rows = self._read(
            "SELECT file, sha256, size, mtime_ns, pages, state, reason, warnings, ingested_at,"
            " (SELECT count(*) FROM passages WHERE passages.file = files.number)"
            " FROM files ORDER BY file"
        )
        return [
            FileRecord(
                file=row[0],
                sha256=row[1],
                size=row[2],
                mtime_ns=row[3],
                pages=row[4],
                state=row[5],
                reason=row[6],
                warnings=json.loads(row[7]),
                ingested_at=row[8],
                passages=row[9],
            )
            for row in rows
        ]

    def passage_count(self) -> int:
        """How many passages there are."""
        return int(self._read("SELECT count(*) FROM passages")[0][0])

    def passages(self, ids: Sequence[str]) -> list[Passage]:
        """The passages with these ids, in the order asked; ids no longer there are left out."""
        found = {
            row[0]: Passage(*row)
            for row in self._read_in(
                'SELECT id, files.file, ordinal, page, heading, text, start, "end", tokens'
                " FROM passages JOIN files ON files.number = passages.file WHERE id IN ({})",
                ids,
            )
        }
        return [found[id] for id in ids if id in found]

    def ids(self) -> set[str]:
        """The ids of all passages."""
        return {row[0] for row in self._read("SELECT id FROM passages")}

    def vectors(self, ids: Sequence[str]) -> dict[str, NDArray[np.float32]]:
        """The stored vectors of these ids, `[dimension]` float32 each."""
        query = "SELECT id, vector FROM passages WHERE id IN ({})"
        return {row[0]: _vector(row[1]) for row in self._read_in(query, ids)}

    def known_vectors(self, digests: Sequence[str]) -> dict[str, NDArray[np.float32]]:
        """Vectors already made for the same embedded text, by its digest."""
        query = "SELECT digest, vector FROM passages WHERE digest IN ({})"
        return {row[0]: _vector(row[1]) for row in self._read_in(query, digests)}

    def search_lexical(self, question: str, k: int) -> list[tuple[str, float]]:
        """The `k` best passages that share a term with any text: `(id, BM25)`, best first."""
        terms = query_terms(question)[:_MAX_QUERY_TERMS]
        if not terms or k < 1:
            return []
        rows = self._read(
            "SELECT passages.id, -bm25(lexical) AS score FROM lexical"
            " JOIN passages ON passages.number = lexical.rowid"
            " WHERE lexical MATCH ? ORDER BY score DESC, passages.number LIMIT ?",
            (" OR ".join('"' + term.replace('"', '""') + '"' for term in terms), k),
        )
        return [(row[0], float(row[1])) for row in rows]

    def document_frequency(self, terms: Sequence[str]) -> dict[str, int]:
        """In how many passages each term (as `index_terms` makes them) occurs; 0 if in none."""
        query = "SELECT term, doc FROM lexical_terms WHERE term IN ({})"
        found = {row[0]: int(row[1]) for row in self._read_in(query, terms)}
        return {term: found.get(term, 0) for term in terms}

    # What changes

    def replace(
        self,
        record: FileRecord,
        passages: Sequence[StoredPassage],
    ) -> list[str]:
        """Store a file's new generation in place of its old one; returns ids that are gone."""
        new = {stored.passage.id for stored in passages}
        with self._transaction() as db:
            number = self._put(db, record)
            gone = self._drop_passages(db, number)
            for stored in passages:
                _insert(db, number, stored)
        return [id for id in gone if id not in new]

    def touch(self, record: FileRecord) -> None:
        """Store facts about a file (its state, times, reason) and leave its passages alone."""
        with self._transaction() as db:
            self._put(db, record)

    def remove(self, file: str) -> list[str]:
        """Forget a file; returns the ids of its passages, empty when it was not known."""
        with self._transaction() as db:
            row = db.execute("SELECT number FROM files WHERE file = ?", (file,)).fetchone()
            if row is None:
                return []
            gone = self._drop_passages(db, row[0])
            db.execute("DELETE FROM files WHERE number = ?", row)
        return gone

    def searchable(self) -> list[tuple[str, str]]:
        """`(id, embedded text)` of every passage."""
        rows = self._read("SELECT id, context, text FROM passages ORDER BY number")
        return [(id, f"{context}\n{text}" if context else text) for id, context, text in rows]

    def set_vectors(
        self, vectors: Iterable[tuple[str, NDArray[np.float32]]], fingerprint: str
    ) -> None:
        """Give passages new vectors and the library its new fingerprint, all or nothing.

        Files lose their hash, so that the next ingest reads them again, cut in today's way.
        """
        with self._transaction() as db:
            for id, vector in vectors:
                db.execute("UPDATE passages SET vector = ? WHERE id = ?", (_blob(vector), id))
            db.execute("UPDATE files SET sha256 = NULL")
            db.execute("INSERT OR REPLACE INTO facts VALUES ('fingerprint', ?)", (fingerprint,))

    @staticmethod
    def _put(db: sqlite3.Connection, record: FileRecord) -> int:
        row = db.execute(
            "INSERT INTO files"
            " (file, sha256, size, mtime_ns, pages, state, reason, warnings, ingested_at)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
            " ON CONFLICT (file) DO UPDATE SET sha256 = excluded.sha256, size = excluded.size,"
            " mtime_ns = excluded.mtime_ns, pages = excluded.pages, state = excluded.state,"
            " reason = excluded.reason, warnings = excluded.warnings,"
            " ingested_at = excluded.ingested_at RETURNING number",
            (
                record.file,
                record.sha256,
                record.size,
                record.mtime_ns,
                record.pages,
                record.state,
                record.reason,
                json.dumps(record.warnings, ensure_ascii=False),
                record.ingested_at,
            ),
        ).fetchone()
        return int(row[0])

    @staticmethod
    def _drop_passages(db: sqlite3.Connection, file: int) -> list[str]:
        ids = [row[0] for row in db.execute("SELECT id FROM passages WHERE file = ?", (file,))]
        db.execute(
            "DELETE FROM lexical WHERE rowid IN (SELECT number FROM passages WHERE file = ?)",
            (file,),
        )
        db.execute("DELETE FROM passages WHERE file = ?", (file,))
        return ids

    def _read(self, query: str, values: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        with self._reading:
            return self._reader.execute(query, values).fetchall()

    def _read_in(self, query: str, values: Sequence[str]) -> Iterator[tuple[Any, ...]]:
        for at in range(0, len(values), _MAX_VARIABLES):
            some = values[at : at + _MAX_VARIABLES]
            yield from self._read(query.format(", ".join("?" * len(some))), some)

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._writing:
            self._writer.execute("BEGIN IMMEDIATE")
            try:
                yield self._writer
                self._writer.execute("COMMIT")
            except BaseException:
                # A full disk makes SQLite roll back by itself; a second time would be an error.
                if self._writer.in_transaction:
                    self._writer.execute("ROLLBACK")
                raise


def _insert(db: sqlite3.Connection, file: int, stored: StoredPassage) -> None:
    passage = stored.passage
    row = db.execute(
        "INSERT INTO passages (id, file, ordinal, page, heading, context, text, start, "
        '"end", tokens, digest, vector) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)'
        " RETURNING number",
        (
            passage.id,
            file,
            passage.ordinal,
            passage.page,
            passage.heading,
            stored.context,
            passage.text,
            passage.start,
            passage.end,
            passage.tokens,
            stored.digest,
            _blob(stored.vector),
        ),
    ).fetchone()
    terms = " ".join(index_terms(f"{stored.context}\n{passage.text}"))
    db.execute("INSERT INTO lexical (rowid, terms) VALUES (?, ?)", (row[0], terms))


def _blob(vector: NDArray[np.float32]) -> bytes:
    return vector.astype("<f4").tobytes()


def _vector(blob: bytes) -> NDArray[np.float32]:
    import numpy as np

    return np.frombuffer(blob, "<f4").astype(np.float32)
