"""Markdown: titles become the heading path, marks of emphasis go, tables and code stay lines."""

from __future__ import annotations

import re

from ingest.readers.document import LONGEST_TITLE, Block, Document, Headings
from ingest.readers.text import decode
from ingest.readers.wrapping import append
from ingest.text import normalise

_FRONT_MATTER = re.compile(r"\A(---|\+\+\+)[ ]*\n.*?\n\1[ ]*(?:\n|\Z)", re.DOTALL)
_COMMENT = re.compile(r"<!--"), re.compile(r"-->")
_ATX = re.compile(r" {0,3}(#{1,6})(?:[ \t]+(.*?))?(?:[ \t]+#+)?[ \t]*$")
_SETEXT = re.compile(r" {0,3}(=+|-+)[ \t]*$")
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")
_ITEM = re.compile(r"\s*(?:[-*+]|\d{1,9}[.)])[ \t]+\S")
_QUOTE = re.compile(r"\A(?: {0,3}> ?)+")
_RULE = re.compile(r" {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$")
# Inline marks. Each is found in linear time, whatever the text: what stands between two marks does
# not run over another opening one, and nothing that has matched is given back.
_TICKS = re.compile(r"(`+)")
_HELD = re.compile(r"\x00(\d+)\x00")
_MARKED = re.compile(r"[*_`\\<\[]")
_TARGET = r"\(((?:[^()]++|\([^()]*+\))*+)\)"
_IMAGE = re.compile(r"!\[([^\[\]]*+)\]" + _TARGET)
_LINK = re.compile(r"\[([^\[\]]++)\]" + _TARGET)
_ADDRESS = re.compile(r"<?(https?://[^\s>]+)")
_AUTOLINK = re.compile(r"<((?:https?://|mailto:)[^<>\s]++|[^<>\s@]++@[^<>\s@]++)>")
_LINE_BREAK = re.compile(r"<br\s*+/?>", re.IGNORECASE)
_TAG = re.compile(r"</?[a-zA-Z][^<>\n]*+>")
_PAIRS = tuple(
    (re.compile(opening), re.compile(closing))
    for opening, closing in (
        (r"\*\*(?=\S)", r"(?<=\S)\*\*"),
        (r"__(?=\S)", r"(?<=\S)__"),
        (r"(?<![\w*])\*(?=[^\s*])", r"(?<=[^\s*])\*(?![\w*])"),
        (r"(?<!\w)_(?=[^\s_])", r"(?<=[^\s_])_(?!\w)"),
    )
)
_ESCAPED = re.compile(r"\\([\\`*_{}\[\]()#+\-.!|>~])")


def read_markdown(data: bytes) -> Document:
    """A Markdown file as blocks under their heading paths; front matter and comments are left out.

    Raises `UndecodableFile` as plain text does.
    """
    source = normalise(decode(data))
    source = _without_pairs(_FRONT_MATTER.sub("", source), *_COMMENT, keep=False)
    return Document(_Parser().parse(source.split("\n")))


class _Parser:
    """Line by line: a block gathers in `_lines` until something ends it."""

    def __init__(self) -> None:
        self._blocks: list[Block] = []
        self._headings = Headings()
        self._lines: list[list[str]] = []  # of each the pieces it was joined of
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
                    self._lines.append([line])
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
            text, self._lines, self._open = "".join(self._lines[0]), [], False
            self._title(1 if "=" in line else 2, text)
        elif _RULE.match(line) or not line.strip():
            # A list with blank lines between its items stays one block.
            self._open = False
            if not (self._lines and _ITEM.match(self._lines[-1][0]) and not line.strip()):
                self._close()
        elif "|" in line and "-" in line and not line.strip("|:- \t"):
            self._open = False
        elif line.lstrip().startswith("|"):
            cells = re.split(r"(?<!\\)\|", line.strip().strip("|"))
            self._lines.append([" | ".join(plain(cell.strip()) for cell in cells)])
            self._open = False
        elif _ITEM.match(line):
            self._lines.append([plain(line)])
            self._open = True
        elif self._open and self._lines:
            append(self._lines[-1], plain(line.strip()))
        else:
            if self._lines and _ITEM.match(self._lines[-1][0]) and not line[:1].isspace():
                self._close()
            self._lines.append([plain(line)])
            self._open = "|" not in line

    def _title(self, rank: int, text: str) -> None:
        text = plain(text.strip())
        if len(text) > LONGEST_TITLE:
            self._lines = [[text]]
            self._close()
        elif text:
            path = self._headings.enter(rank, text)
            self._blocks.append(Block(normalise(text), heading=path, is_title=True))

    def _close(self) -> None:
        text = normalise("\n".join(map("".join, self._lines)))
        if text.strip():
            self._blocks.append(Block(text, heading=self._headings.path))
        self._lines, self._open = [], False


def plain(text: str) -> str:
    """A line without its inline marks; a link keeps its address, since people ask for it."""
    if not _MARKED.search(text):
        return text
    text, codes = _hold_codes(text)
    text = _LINK.sub(_linked, _IMAGE.sub(r"\1", text))
    text = _TAG.sub("", _LINE_BREAK.sub(" ", _AUTOLINK.sub(r"\1", text)))
    for opening, closing in _PAIRS:
        text = _without_pairs(text, opening, closing)
    return _HELD.sub(lambda held: codes[int(held.group(1))], _ESCAPED.sub(r"\1", text))


def _hold_codes(text: str) -> tuple[str, list[str]]:
    """The text with each span of code replaced by its number between NULs, and the spans.

    What is in code is no mark. As many ticks as open a span close it. Normal text has no NUL.
    """
    pieces = _TICKS.split(text)  # ticks at the odd places
    following: dict[int, int] = {}
    last: dict[str, int] = {}
    for at in range(len(pieces) - 2, 0, -2):
        if pieces[at] in last:
            following[at] = last[pieces[at]]
        last[pieces[at]] = at
    out, codes, at = [pieces[0]], list[str](), 1
    while at < len(pieces):
        end = following.get(at)
        if end is None:
            out.append(pieces[at])
            end = at
        else:
            out.append(f"\0{len(codes)}\0")
            codes.append("".join(pieces[at + 1 : end]))
        out.append(pieces[end + 1])
        at = end + 2
    return "".join(out), codes


def _linked(link: re.Match[str]) -> str:
    address = _ADDRESS.match(link.group(2))
    return f"{link.group(1)} ({address.group(1)})" if address else link.group(1)


def _without_pairs(
    text: str, opening: re.Pattern[str], closing: re.Pattern[str], *, keep: bool = True
) -> str:
    """The text without pairs of marks and, unless `keep`, what stands between them.

    A mark that nothing closes ends the search, for nothing closes a later one either: this keeps
    it linear, where one pattern for both would look to the end from every opening mark.
    """
    kept: list[str] = []
    at = 0
    while start := opening.search(text, at):
        end = closing.search(text, start.end() + keep)
        if end is None:
            break
        kept += (text[at : start.start()], text[start.end() : end.start()] if keep else "")
        at = end.end()
    return "".join(kept) + text[at:]
