"""The state folder and who owns it.

Two processes on one Chroma folder give wrong answers without an error, so exactly one process may
hold a home. The lock is the operating system's: it goes when its holder dies, however it dies.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from ingest.errors import HomeLocked, HomeNotHeld

# `owner()` of another process takes the lock for an instant to see whether it is free; a real
# owner waits that instant out instead of failing on it.
_PROBE_SECONDS = 0.2


@dataclass(frozen=True)
class Owner:
    """The process that holds a home; `url` and `token` are set once it serves."""

    pid: int | None
    url: str | None = None
    token: str | None = None


class Home:
    """The folder with an installation's state (`DFLASH_RAG_HOME`); made, 0700, when first owned.

    A folder that is there already keeps its mode, as it may be anybody's (`/tmp`); in it the owner
    file, the library and Chroma's folder are readable for their owner only.

    >>> home = Home("var")
    >>> with home.lock():
    ...     index = Index.open(home, embedder, "data")
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()
        from filelock import FileLock

        # Not thread-local: a server takes the lock in one thread and asks about it in others.
        self._lock = FileLock(self.path / "owner.lock", thread_local=False)

    @property
    def library(self) -> Path:
        """The SQLite file that holds the truth."""
        return self.path / "library.sqlite3"

    @property
    def chroma(self) -> Path:
        """Chroma's folder, which can always be made again from the library."""
        return self.path / "chroma"

    @property
    def models(self) -> Path:
        """Where weights are kept."""
        return self.path / "models"

    @property
    def held(self) -> bool:
        """Whether this object holds the lock."""
        return bool(self._lock.is_locked)

    def acquire(self, url: str | None = None) -> None:
        """Own the home until `release()` or the end of the process.

        Raises `HomeLocked` at once (within 0.2 s) when somebody else does; the same object may
        acquire again, and then releases as often.
        """
        from filelock import Timeout

        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            self._lock.acquire(timeout=_PROBE_SECONDS, poll_interval=0.02)
        except Timeout:
            owner = self._facts()
            raise HomeLocked(str(self.path), owner.pid, owner.url) from None
        if self._lock.lock_counter == 1:
            self._write(Owner(os.getpid(), url))

    def release(self) -> None:
        """Give the home up; without effect when it is not held."""
        if self._lock.lock_counter == 1:
            self._owner_file.unlink(missing_ok=True)
        self._lock.release()

    @contextmanager
    def lock(self, url: str | None = None) -> Iterator[Home]:
        """Own the home inside a `with` block; raises `HomeLocked` as `acquire` does."""
        self.acquire(url)
        try:
            yield self
        finally:
            self.release()

    def announce(self, url: str, token: str | None = None) -> None:
        """Tell other processes where the owner listens; raises `HomeNotHeld` if that is not us."""
        if not self.held:
            raise HomeNotHeld(f"{self.path} is not held by this process")
        self._write(Owner(os.getpid(), url, token))

    def owner(self) -> Owner | None:
        """The live owner's facts, or None when nobody holds the lock, whatever a dead one left."""
        from filelock import FileLock, Timeout

        if self.held:
            return self._facts()
        if not self.path.is_dir():
            return None
        probe = FileLock(self.path / "owner.lock", thread_local=False)
        try:
            probe.acquire(timeout=0)
        except Timeout:
            return self._facts()
        self._owner_file.unlink(missing_ok=True)
        probe.release()
        return None

    @property
    def _owner_file(self) -> Path:
        return self.path / "owner.json"

    def _facts(self) -> Owner:
        # An owner writes its facts just after it takes the lock: give it that moment.
        for _ in range(10):
            try:
                facts = json.loads(self._owner_file.read_text())
                return Owner(facts["pid"], facts.get("url"), facts.get("token"))
            except (OSError, ValueError, KeyError, TypeError):
                time.sleep(0.01)
        return Owner(None)

    def _write(self, owner: Owner) -> None:
        # mkstemp makes the file 0600, and it is never visible half written: it may hold a token.
        handle, name = tempfile.mkstemp(dir=self.path, prefix="owner.", suffix=".tmp")
        with os.fdopen(handle, "w") as file:
            json.dump(asdict(owner), file)
        Path(name).replace(self._owner_file)
