"""PDF by PDFium: lines with their place on the page, put together to paragraphs and titles."""

from __future__ import annotations

import ctypes
import re
import threading
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from ingest.errors import BrokenFile, EmptyFile, EncryptedFile, ImageOnlyFile
from ingest.readers.document import LONGEST_TITLE, Block, Document, Headings
from ingest.readers.wrapping import append, ends_sentence, first_word, starts_item
from ingest.text import normalise

# PDFium must not be entered by two threads at once, not even for two documents.
_PDFIUM = threading.Lock()

_BOLD = re.compile(r"bold|black|heavy|semibold|demi|w[6-9]\b", re.IGNORECASE)
_DIGITS = re.compile(r"\d+")
_WORDS = re.compile(r"[^\W\d_]+(?:-[^\W\d_]+)*")


@dataclass
class Line:
    """A line as PDFium sees it; distances in points, `top` and `bottom` from the page's foot."""

    text: str
    page: int
    left: float
    right: float
    top: float
    bottom: float
    bold: bool
    is_row: bool  # its words stand in columns

    @property
    def height(self) -> float:
        return max(self.top - self.bottom, 0.1)


def read_pdf(data: bytes) -> Document:
    """A PDF as paragraphs with their page and heading.

    Raises `EncryptedFile`, `EmptyFile`, `ImageOnlyFile` or `BrokenFile`; pages without text among
    others that have some become a warning.
    """
    with _PDFIUM:
        pages = _read_lines(data)
    blank = [number for number, lines in enumerate(pages, 1) if not lines]
    if len(blank) == len(pages):
        raise ImageOnlyFile("pages are images: no text layer; OCR is not installed yet")
    warnings = []
    if blank:
        which = ", ".join(map(str, blank[:20])) + (", …" if len(blank) > 20 else "")
        warnings.append(f"no text on {len(blank)} of {len(pages)} pages (images?): page {which}")
    return Document(_blocks(_without_running_lines(pages)), len(pages), warnings)


def _read_lines(data: bytes) -> list[list[Line]]:
    import pypdfium2
    import pypdfium2.raw as raw

    try:
        pdf = pypdfium2.PdfDocument(data)
    except pypdfium2.PdfiumError as error:
        code = getattr(error, "err_code", None)
        if code == raw.FPDF_ERR_PASSWORD:
            raise EncryptedFile("it is encrypted: save a copy without the password") from None
        if code == raw.FPDF_ERR_SECURITY:
            raise EncryptedFile("it is encrypted in a way that is not supported") from None
        raise BrokenFile(f"it is not a readable PDF: {error}") from None
    try:
        if len(pdf) == 0:
            raise EmptyFile("the PDF has no pages")
        pages: list[list[Line]] = []
        for number in range(1, len(pdf) + 1):
            try:
                page = pdf[number - 1]
                pages.append(_page_lines(page.get_textpage(), number, raw))
                page.close()
            except pypdfium2.PdfiumError as error:
                raise BrokenFile(f"page {number} cannot be read: {error}") from None
        return pages
    finally:
        pdf.close()


def _page_lines(textpage: Any, page: int, raw: Any) -> list[Line]:
    lines: list[Line] = []
    signs: list[tuple[str, int]] = []
    for index in range(textpage.count_chars()):
        sign = chr(raw.FPDFText_GetUnicode(textpage, index))
        if sign in "\x02\ufffe":
            sign = "-"  # PDFium's mark for a hyphen at the end of a line
        if sign in "\r\n":
            if signs:
                lines.append(_line(textpage, page, signs, raw))
            signs = []
        elif sign != "\x00":
            signs.append((sign, index))
    if signs:
        lines.append(_line(textpage, page, signs, raw))
    return [line for line in lines if line.text.strip()]


def _line(textpage: Any, page: int, signs: list[tuple[str, int]], raw: Any) -> Line:
    boxes = [
        (sign, textpage.get_charbox(index, loose=True)) for sign, index in signs if sign.strip()
    ]
    boxes = [(sign, box) for sign, box in boxes if box[2] > box[0]]
    text = normalise("".join(sign for sign, _ in signs)).strip()
    if not boxes:
        return Line(text, page, 0, 0, 0, 0, False, False)
    height = median(box[3] - box[1] for _, box in boxes)
    gaps = [
        after[0] - before[2]
        for (_, before), (_, after) in pairwise(boxes)
        if after[0] - before[2] > 0.12 * height
    ]
    widest = max(gaps, default=0.0)
    usual = median(gaps) if len(gaps) > 2 else 0.25 * height
    solid = [index for sign, index in signs if sign.strip()]
    return Line(
        text,
        page,
        left=boxes[0][1][0],
        right=max(box[2] for _, box in boxes),
        top=max(box[3] for _, box in boxes),
        bottom=median(box[1] for _, box in boxes),
        bold=all(_is_bold(textpage, index, raw) for index in (solid[0], solid[-1])),
        is_row=widest > 0.8 * height and widest > 2.2 * usual,
    )


def _is_bold(textpage: Any, index: int, raw: Any) -> bool:
    name, flags = ctypes.create_string_buffer(256), ctypes.c_int()
    length = raw.FPDFText_GetFontInfo(textpage, index, name, 256, ctypes.byref(flags))
    return 0 < length <= 256 and bool(_BOLD.search(name.value.decode("utf-8", "replace")))


def _without_running_lines(pages: list[list[Line]]) -> list[list[Line]]:
    """Headers and footers kept where they occur first: repeated, they only dilute passages.

    A running line is the first or last of its page and, numbers aside, the same on more than half
    of three pages or more.
    """

    def edges(lines: list[Line]) -> set[str]:
        return {_DIGITS.sub("#", line.text) for line in (lines[:1] + lines[-1:])}

    seen = Counter(text for lines in pages if len(lines) > 2 for text in edges(lines))
    running = {text for text, count in seen.items() if count >= 3 and count * 2 > len(pages)}
    kept: list[list[Line]] = []
    met: set[str] = set()
    for lines in pages:
        out = []
        for at, line in enumerate(lines):
            key = _DIGITS.sub("#", line.text)
            if len(lines) > 2 and at in (0, len(lines) - 1) and key in running:
                if key in met:
                    continue
                met.add(key)
            out.append(line)
        kept.append(out)
    return kept


def _blocks(pages: list[list[Line]]) -> list[Block]:
    every = [line for lines in pages for line in lines]
    sizes: Counter[float] = Counter()
    for line in every:
        sizes[round(line.height * 2) / 2] += len(line.text)
    body = sizes.most_common(1)[0][0]
    bold_body = sum(len(line.text) for line in every if line.bold) * 2 > sum(sizes.values())
    words = {word.lower() for line in every for word in _WORDS.findall(line.text)}
    headings = Headings()
    blocks: list[Block] = []
    for lines in pages:
        at = 0
        while at < len(lines):
            title = _is_title(lines, at, body, bold_body)
            end = at + 1
            while end < len(lines) and _goes_on(lines, end, title, body, bold_body):
                end += 1
            text = normalise(_flow(lines[at:end], words))
            if title and len(text) <= LONGEST_TITLE:
                # Bigger letters rank higher; bold text of the body's size ranks below them all.
                path = headings.enter(-round(lines[at].height), text)
                blocks.append(Block(text, lines[at].page, path, is_title=True))
            else:
                blocks.append(Block(text, lines[at].page, headings.path))
            at = end
    return blocks


def _is_title(lines: list[Line], at: int, body: float, bold_body: bool) -> bool:
    line = lines[at]
    if line.is_row or len(line.text) > 120 or not any(sign.isalpha() for sign in line.text):
        return False
    if line.height > 1.15 * body:
        return True
    follows = at + 1 < len(lines) and not lines[at + 1].is_row
    return (
        line.bold
        and not bold_body
        and len(line.text) <= 80
        and line.height > 0.9 * body
        and follows
        and not line.text.endswith((".", "。", ",", "，", "、", ";"))
    )


def _goes_on(lines: list[Line], at: int, title: bool, body: float, bold_body: bool) -> bool:
    """Whether a line belongs to the block of the line before it."""
    before, line = lines[at - 1], lines[at]
    if _is_title(lines, at, body, bold_body) != title:
        return False
    alike = 0.85 < line.height / before.height < 1.18 and (not title or line.bold == before.bold)
    gap = before.bottom - line.top
    near = -0.6 * line.height < gap < (0.35 if title else 0.75) * line.height
    return alike and near and line.left < before.right + 4 * line.height


def _flow(lines: list[Line], words: set[str]) -> str:
    """The lines of a block: wrapped ones joined, rows, items and short lines on their own."""
    right = max(line.right for line in lines)
    out = [[lines[0].text]]
    for before, line in pairwise(lines):
        word = first_word(line.text)
        needed = (line.right - line.left) / max(len(line.text), 1) * (len(word) + 1)
        filled = before.right + needed > right - 0.1 * line.height
        rows = before.is_row or line.is_row
        stops = ends_sentence(before.text) and before.right < right - 2 * line.height
        if filled and not rows and not stops and not starts_item(line.text):
            append(out[-1], line.text, words)
        else:
            out.append([line.text])
    return "\n".join(map("".join, out))
