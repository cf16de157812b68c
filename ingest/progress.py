"""What an ingest tells while it runs, and when it is done."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

EventKind = Literal["found", "reading", "embedding", "done", "failed", "unchanged", "removed"]


@dataclass(frozen=True)
class IngestEvent:
    """Progress: what happened to which file.

    `index` of `total` files; for "embedding" `passages` of `of_passages` are done, for "done" and
    "removed" `passages` is how many; "found" comes once, without a file.
    """

    kind: EventKind
    file: str = ""
    index: int = 0
    total: int = 0
    passages: int = 0
    of_passages: int = 0
    reason: str = ""

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class FailedFile:
    """A file or folder that was not ingested, and why."""

    file: str
    reason: str


@dataclass
class IngestSummary:
    """What an ingest did.

    `files` counts those read and stored, `pages` and `passages` what is in them; `embedded` counts
    passages whose vector was computed and not taken over; `warnings` read `file: what`.
    """

    files: int = 0
    unchanged: int = 0
    removed: int = 0
    pages: int = 0
    passages: int = 0
    embedded: int = 0
    seconds: float = 0.0
    stopped: bool = False
    failed: list[FailedFile] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)
