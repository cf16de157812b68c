"""The bench's tables."""

import io

from rich.console import Console

from app import bench

RESULT = {
    "target": "t", "precision": "float32", "draft": None, "most_tokens": 8, "machine": "m",
    "blas": "b", "versions": {}, "kinds": {}, "prefix": None,
}  # fmt: skip


def test_why_a_peer_failed_is_told_as_it_was_said():
    # Square brackets are marks to what prints the tables.
    said = io.StringIO()
    why = "died: [/bold] line [red] in <module>"
    bench._print(RESULT | {"failed": {"dflash block": why}}, Console(file=said, width=200))
    assert f"dflash block: failed: {why}" in said.getvalue()
