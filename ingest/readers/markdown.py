"""Markdown: titles become the heading path, marks of emphasis go, tables and code stay lines."""

from __future__ import annotations

import re

from ingest.readers.document import Block, Document, Headings
from ingest.readers.text import decode
from ingest.readers.wrapping import join
from ingest.text import normalise

_FRONT_MATTER = re.compile(r"\A(---|\+\+\+)[ ]*\n.*?\n\1[ ]*(?:\n|\Z)", re.DOTALL)
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_ATX = re.compile(r" {0,3}(#{1,6})(?:[ \t]+(.*?))?(?:[ \t]+#+)?[ \t]*$")
_SETEXT = re.compile(r" {0,3}(=+|-+)[ \t]*$")
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")
_ITEM = re.compile(r"\s*(?:[-*+]|\d{1,9}[.)])[ \t]+\S")
_QUOTE = re.compile(r" {0,3}> ?")
_RULE = re.compile(r" {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$")
_TABLE_RULE = re.compile(r"\s*\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)*\|?\s*$")
_INLINE = (
    (re.compile(r"!\[([^\]]*)\]\([^)]*\)"), r"\1"),
    (re.compile(r"\[([^\]]+)\]\(<?(https?://[^)\s>]+)>?[^)]*\)"), r"\1 (\2)"),
    (re.compile(r"\[([^\]]+)\]\([^)]*\)"), r"\1"),
    (re.compile(r"<((?:https?://|mailto:)[^>\s]+)>"), r"\1"),
    (re.compile(r"</?[a-zA-Z][^>\n]*>"), ""),
    (re.compile(r"(\*\*|__)(?=\S)(.+?)(?<=\S)\1"), r"\2"),
    (re.compile(r"(?<![\w*])\*(?=[^\s*])(.+?)(?<=[^\s*])\*(?![\w*])"), r"\1"),
    (re.compile(r"(?<!\w)_(?=[^\s_])(.+?)(?<=[^\s_])_(?!\w)"), r"\1"),
    (re.compile(r"(`+)(.+?)\1"), r"\2"),
    (re.compile(r"\\([\\`*_{}\[\]()#+\-.!|>~])"), r"\1"),
)


def read_markdown(data: bytes) -> Document:
    """A Markdown file as blocks under their heading paths; front matter and comments are left out.

    Raises `UndecodableFile` as plain text does.
    """
    source = normalise(decode(data))
    source = _COMMENT.sub("", _FRONT_MATTER.sub("", source))
    return Document(_Parser().parse(source.split("\n")))


class _Parser:
    """Line by line: a block gathers in `_lines` until something ends it."""

    def __init__(self) -> None:
        self._blocks: list[Block] = []
        self._headings = Headings()
        self._lines: list[str] = []
        self._open = False  # whether the next plain line continues the last one

    def parse(self, lines: list[str]) -> list[Block]:
        fence = ""
        for line in lines:
            mark = _FENCE.match(line)
            if fence:
                if mark and mark.group(1).startswith(fence) and not line.strip(" `~"):
                    fence = ""
                    self._close()
                else:
                    self._lines.append(line)
                continue
            if mark:
                fence = mark.group(1)
                self._close()
                continue
            self._line(line)
        self._close()
        return self._blocks

    def _line(self, line: str) -> None:
        line = _QUOTE.sub("", line)
        title = _ATX.match(line)
        if title:
            self._close()
            self._title(len(title.group(1)), title.group(2) or "")
        elif self._open and len(self._lines) == 1 and _SETEXT.match(line):
            text, self._lines, self._open = self._lines[0], [], False
            self._title(1 if "=" in line else 2, text)
        elif _RULE.match(line) or not line.strip():
            # A list with blank lines between its items stays one block.
            self._open = False
            if not (self._lines and _ITEM.match(self._lines[-1]) and not line.strip()):
                self._close()
        elif "|" in line and _TABLE_RULE.match(line) and "-" in line:
            self._open = False
        elif line.lstrip().startswith("|"):
            cells = re.split(r"(?<!\\)\|", line.strip().strip("|"))
            self._lines.append(" | ".join(plain(cell.strip()) for cell in cells))
            self._open = False
        elif _ITEM.match(line):
            self._lines.append(plain(line))
            self._open = True
        elif self._open and self._lines:
            self._lines[-1] = join(self._lines[-1], plain(line.strip()))
        else:
            if self._lines and _ITEM.match(self._lines[-1]) and not line[:1].isspace():
                self._close()
            self._lines.append(plain(line))
            self._open = "|" not in line

    def _title(self, rank: int, text: str) -> None:
        text = plain(text.strip())
        if text:
            path = self._headings.enter(rank, text)
            self._blocks.append(Block(normalise(text), heading=path, is_title=True))

    def _close(self) -> None:
        text = normalise("\n".join(self._lines))
        if text.strip():
            self._blocks.append(Block(text, heading=self._headings.path))
        self._lines, self._open = [], False


def plain(text: str) -> str:
    """A line without its inline marks; a link keeps its address, since people ask for it."""
    for pattern, replacement in _INLINE:
        text = pattern.sub(replacement, text)
    return text
