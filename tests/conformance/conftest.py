"""The table of what was tried: drafters down, caches across, one letter for each sampling."""

import re
from typing import Any

import pytest

MARKS = {"passed": "+", "failed": "F", "skipped": "-"}


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if config.getoption("verbose") < 1:
        return
    table: dict[str, dict[str, str]] = {}
    samplings: dict[str, None] = {}
    for outcome, mark in MARKS.items():
        for report in terminalreporter.stats.get(outcome, []):
            cell = _cell(report)
            if cell:
                drafter, cache, sampling = cell
                samplings[sampling] = None
                row = table.setdefault(drafter, {})
                row[cache] = row.get(cache, "") + mark
    if not table:
        return
    caches = list(dict.fromkeys(cache for row in table.values() for cache in row))
    widths = [max(len(cache), len(samplings)) for cache in caches]
    first = max(map(len, table))
    terminalreporter.section("conformance")
    terminalreporter.line(f"one mark each: {'; '.join(samplings)}")
    for drafter, cells in {"": dict(zip(caches, caches, strict=True)), **table}.items():
        columns = [cells.get(c, "").ljust(w) for c, w in zip(caches, widths, strict=True)]
        terminalreporter.line(f"{drafter.ljust(first)}  {'  '.join(columns)}".rstrip())


def _cell(report: Any) -> list[str] | None:
    # The order of ids is that of the parametrize marks, from the function's own upwards.
    match = re.search(r"::test_cell\[(.+)-(.+)-(.+)\]$", getattr(report, "nodeid", ""))
    return list(match.groups()) if match and getattr(report, "when", "call") == "call" else None
