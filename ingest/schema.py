"""The library's tables, and how a connection to them is set up."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from ingest.errors import LibraryTooNew

# One script a version of the schema; PRAGMA user_version says how many have run.
_MIGRATIONS = (
    """
    CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
    CREATE TABLE files (
        number INTEGER PRIMARY KEY,
        file TEXT NOT NULL UNIQUE,
        sha256 TEXT,
        size INTEGER NOT NULL DEFAULT 0,
        mtime_ns INTEGER NOT NULL DEFAULT 0,
        pages INTEGER NOT NULL DEFAULT 0,
        state TEXT NOT NULL CHECK (state IN ('ok', 'failed')),
        reason TEXT NOT NULL DEFAULT '',
        warnings TEXT NOT NULL DEFAULT '[]',
        ingested_at REAL NOT NULL
    );
    CREATE TABLE passages (
        number INTEGER PRIMARY KEY,
        id TEXT NOT NULL UNIQUE,
        file INTEGER NOT NULL REFERENCES files (number),
        ordinal INTEGER NOT NULL,
        page INTEGER,
        heading TEXT NOT NULL,
        context TEXT NOT NULL,
        text TEXT NOT NULL,
        start INTEGER NOT NULL,
        "end" INTEGER NOT NULL,
        tokens INTEGER NOT NULL,
        digest TEXT NOT NULL,
        vector BLOB NOT NULL,
        UNIQUE (file, ordinal)
    );
    CREATE INDEX passages_digest ON passages (digest);
    -- The ascii tokenizer keeps every sign beyond ASCII, so terms survive as index_terms made them.
    CREATE VIRTUAL TABLE lexical USING fts5 (terms, tokenize = "ascii tokenchars '.'");
    CREATE VIRTUAL TABLE lexical_terms USING fts5vocab (lexical, row);
    """,
)


def connect(path: Path) -> sqlite3.Connection:
    """A connection in autocommit mode that any thread may use, one at a time."""
    db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=30)
    for pragma in (
        "journal_mode = WAL",
        "synchronous = FULL",  # a power cut loses nothing that was committed
        "foreign_keys = ON",
        "secure_delete = ON",  # a removed document's text is overwritten
    ):
        db.execute(f"PRAGMA {pragma}")
    return db


def migrate(db: sqlite3.Connection) -> None:
    """Bring the tables up to this version, each step whole; raises `LibraryTooNew`."""
    version = db.execute("PRAGMA user_version").fetchone()[0]
    if version > len(_MIGRATIONS):
        raise LibraryTooNew(
            f"the library is of version {version}, this program knows {len(_MIGRATIONS)}: "
            "upgrade it, or restore a backup"
        )
    for number, script in enumerate(_MIGRATIONS[version:], version + 1):
        db.executescript(f"BEGIN IMMEDIATE; {script}; PRAGMA user_version = {number}; COMMIT;")
