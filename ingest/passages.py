"""Cutting a document into passages: what is embedded, found, and quoted with its page."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import ceil

from ingest.readers.document import HEADING_JOINT, Block, Document
from ingest.text import sentences

# Part of an index's fingerprint: raise it when the same file would be cut in another way.
CUTTER_VERSION = 1

_CONTEXT_TOKENS = 32
_SIGNS_A_TOKEN = 16
_BREAKABLE = re.compile(r"[\s，,、；;：:。]")


@dataclass(frozen=True)
class Cut:
    """A passage within its document.

    `text` is `document.page_text(page)[start:end]`; `page_end` equals `page`, as a passage never
    crosses pages; `tokens` counts `searchable`.
    """

    text: str
    page: int | None
    page_end: int | None
    heading: str
    start: int
    end: int
    context: str = ""
    tokens: int = 0

    @property
    def searchable(self) -> str:
        """What is embedded and indexed: the text, after the titles it stands under."""
        return f"{self.context}\n{self.text}" if self.context else self.text


@dataclass(frozen=True)
class _Unit:
    """A sentence, line or title that is not divided further; its place on the page."""

    start: int
    end: int
    tokens: int


def cut(
    document: Document,
    count_tokens: Callable[[str], int],
    target: int = 220,
    limit: int = 240,
) -> list[Cut]:
    """A document as passages of about `target` tokens and never more than `limit`.

    Passages end where sentences or lines do and keep to one page and one heading; together they
    hold every non-space character once, in order. A sentence longer than the limit is divided at a
    space, a comma or, where there is none, between two characters.
    """
    target = min(target, limit)
    cuts: list[Cut] = []
    for page, blocks in document.page_blocks().items():
        text = "\n\n".join(block.text for block in blocks)  # document.page_text(page)
        for section in _sections(blocks):
            parts = section.heading.split(HEADING_JOINT) if section.heading else []
            # The first passage shows its titles itself; the others are told what they stand under.
            first = _fitting([part for part in parts if part not in section.titles], count_tokens)
            later = _fitting(parts, count_tokens)
            head = max(count_tokens(first + "\n"), count_tokens(later + "\n"))
            room = max(limit - head, limit // 2)
            units = [
                unit
                for start, end in section.spans
                for unit in _units(text, start, end, count_tokens, room)
            ]
            packed = _pack(text, units, count_tokens, max(target - head, room // 2), room)
            for number, (start, end) in enumerate(packed):
                context = later if number else first
                piece = text[start:end]
                if context and count_tokens(f"{context}\n{piece}") > limit:
                    context = ""
                tokens = count_tokens(f"{context}\n{piece}" if context else piece)
                cuts.append(Cut(piece, page, page, section.heading, start, end, context, tokens))
    return cuts


@dataclass
class _Section:
    """Blocks under one heading: their spans on the page, and the titles it opens with."""

    heading: str
    spans: list[tuple[int, int]]
    titles: list[str]
    only_titles: bool


def _sections(blocks: list[Block]) -> list[_Section]:
    """A page's blocks by heading; a bare title goes with what follows it.

    At the foot of a page a title that nothing follows stays a section of its own.
    """
    sections: list[_Section] = []
    at = 0
    for block in blocks:
        span = (at, at + len(block.text))
        at = span[1] + 2
        last = sections[-1] if sections else None
        if last is None or not (last.only_titles or last.heading == block.heading):
            last = _Section(block.heading, [], [], True)
            sections.append(last)
        last.heading = block.heading
        last.spans.append(span)
        if block.is_title and last.only_titles:
            last.titles.append(" ".join(block.text.split()))
        last.only_titles = last.only_titles and block.is_title
    return sections


def _fitting(parts: list[str], count_tokens: Callable[[str], int]) -> str:
    """As many titles of a path as fit, the innermost first."""
    while parts and count_tokens(HEADING_JOINT.join(parts)) > _CONTEXT_TOKENS:
        parts = parts[1:]
    return HEADING_JOINT.join(parts)


def _units(
    text: str, start: int, end: int, count_tokens: Callable[[str], int], limit: int
) -> Iterator[_Unit]:
    for left, right in sentences(text[start:end]):
        yield from _divided(text, start + left, start + right, count_tokens, limit)


def _divided(
    text: str, start: int, end: int, count_tokens: Callable[[str], int], limit: int
) -> Iterator[_Unit]:
    """A sentence as one unit or, beyond the limit, as the fewest that fit."""
    while start < end:
        # Some tokenizers count a long run of letters as one unknown word: length is bounded too.
        window = min(end, start + _SIGNS_A_TOKEN * limit)
        if window == end and count_tokens(text[start:window]) <= limit:
            yield _unit(text, start, end, count_tokens)
            return
        low, high = start + 1, window
        while low < high:
            middle = (low + high + 1) // 2
            if count_tokens(text[start:middle]) <= limit:
                low = middle
            else:
                high = middle - 1
        stop = low
        if stop < end and not text[stop].isspace():
            half = start + (stop - start) // 2
            breaks = [match.end() for match in _BREAKABLE.finditer(text, half, stop)]
            stop = breaks[-1] if breaks else stop
        piece = text[start:stop]
        yield _unit(text, start, start + len(piece.rstrip()), count_tokens)
        start = stop
        while start < end and text[start].isspace():
            start += 1


def _unit(text: str, start: int, end: int, count_tokens: Callable[[str], int]) -> _Unit:
    # Weighed by its length too, or many unknown words would be packed into one endless passage.
    return _Unit(start, end, max(count_tokens(text[start:end]), (end - start) // _SIGNS_A_TOKEN))


def _pack(
    text: str, units: list[_Unit], count_tokens: Callable[[str], int], target: int, limit: int
) -> Iterator[tuple[int, int]]:
    """Units gathered to passages of even size, so that a section leaves no scrap at its end."""
    total = sum(unit.tokens for unit in units)
    even = total if total <= limit else total / ceil(total / target)
    at = 0
    while at < len(units):
        stop, tokens = at + 1, units[at].tokens
        while stop < len(units) and tokens + units[stop].tokens <= limit:
            # Stop where one more unit would land further from the even size than this one.
            over = tokens + units[stop].tokens - even
            if over > 0 and over > even - tokens:
                break
            tokens += units[stop].tokens
            stop += 1
        # Tokens of joined text can exceed the sum of its parts; then the last part waits.
        while stop > at + 1 and count_tokens(text[units[at].start : units[stop - 1].end]) > limit:
            stop -= 1
        yield units[at].start, units[stop - 1].end
        at = stop
