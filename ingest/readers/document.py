"""What every reader gives: a document as blocks of normal text."""

from __future__ import annotations

from dataclasses import dataclass, field

HEADING_JOINT = " > "
# Characters; a longer "title" is a paragraph, as each passage under a title is told it.
LONGEST_TITLE = 200


@dataclass(frozen=True)
class Block:
    """A stretch of text that belongs together: a paragraph, a list, a table, a title.

    `text` is normal (`ingest.text.normalise`); `page` counts from 1, None where a file has no
    pages; `heading` is the path of titles it stands under, its own included when it is a title.
    """

    text: str
    page: int | None = None
    heading: str = ""
    is_title: bool = False


@dataclass(frozen=True)
class Document:
    """A file's blocks in reading order, its number of pages (0 if it has none), and warnings."""

    blocks: list[Block]
    pages: int = 0
    warnings: list[str] = field(default_factory=list)

    def page_blocks(self) -> dict[int | None, list[Block]]:
        """The blocks of each page, pages in order."""
        pages: dict[int | None, list[Block]] = {}
        for block in self.blocks:
            pages.setdefault(block.page, []).append(block)
        return pages

    def page_text(self, page: int | None) -> str:
        """The text that positions on a page refer to: its blocks, a blank line between them."""
        return "\n\n".join(block.text for block in self.blocks if block.page == page)


class Headings:
    """The path of titles above the current place; a title replaces those of its rank and below.

    Ranks are any ordered numbers, 1 above 2.
    """

    def __init__(self) -> None:
        self._path: list[tuple[float, str]] = []

    def enter(self, rank: float, title: str) -> str:
        """Go under a title; returns the new path."""
        while self._path and self._path[-1][0] >= rank:
            self._path.pop()
        self._path.append((rank, " ".join(title.split())))
        return self.path

    @property
    def path(self) -> str:
        """The titles joined by ` > `, outermost first; empty at the top."""
        return HEADING_JOINT.join(title for _, title in self._path)
