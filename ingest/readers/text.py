"""Plain text, in the encodings that small businesses' files really have."""

from __future__ import annotations

import re
import unicodedata
from itertools import pairwise

from ingest.errors import UndecodableFile
from ingest.readers.document import Block, Document
from ingest.readers.wrapping import append, ends_sentence, first_word, starts_item
from ingest.text import normalise

_BOMS = (
    (b"\xef\xbb\xbf", "utf-8-sig"),
    (b"\xff\xfe\x00\x00", "utf-32"),
    (b"\x00\x00\xfe\xff", "utf-32"),
    (b"\xff\xfe", "utf-16"),
    (b"\xfe\xff", "utf-16"),
)
_PARAGRAPHS = re.compile(r"\n{2,}")
_SAMPLE = 1 << 20


def read_text(data: bytes) -> Document:
    """A text file as paragraphs; raises `UndecodableFile` when it is no text."""
    paragraphs = _PARAGRAPHS.split(normalise(decode(data)))
    return Document([Block(_unwrap(text.strip("\n"))) for text in paragraphs if text.strip()])


def decode(data: bytes) -> str:
    """The text in `data`: a byte order mark decides, else UTF-8, Big5, GB 18030, Windows-1252.

    UTF-8 comes first since other text hardly ever passes for it. Big5 and GB 18030 accept much of
    each other's text, so the one whose reading is made of common characters wins, Big5 on a tie.
    Windows-1252 reads anything, so it is taken only for text that is mostly ASCII.
    """
    for bom, encoding in _BOMS:
        if data.startswith(bom):
            try:
                return data.decode(encoding)
            except UnicodeDecodeError as error:
                raise UndecodableFile(f"it starts as {encoding} but breaks off: {error}") from None
    if b"\x00" in data:
        raise UndecodableFile("this is no text file: it contains NUL bytes")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        pass
    texts = [
        text
        for text in (_decoded(data, "cp950", "big5hkscs"), _decoded(data, "gb18030"))
        if text is not None
    ]
    big5, gb = _level_one(data, 0xA1, 0xC6), _level_one(data, 0xA1, 0xD7)
    western = _decoded(data, "cp1252")
    if western is not None and _looks_western(data):
        return western
    if len(texts) == 2:
        return texts[0] if big5 >= gb else texts[1]
    if texts:
        return texts[0]
    raise UndecodableFile(
        "its encoding is not one of UTF-8, UTF-16, Big5, GB 18030, Windows-1252; save it as UTF-8"
    )


def _decoded(data: bytes, *encodings: str) -> str | None:
    for encoding in encodings:
        try:
            return data.decode(encoding)
        except UnicodeDecodeError:
            continue
    return None


def _level_one(data: bytes, first: int, last: int) -> float:
    """Share of two-byte characters whose first byte is in the plane of common ones."""
    common = total = at = 0
    data = data[:_SAMPLE]
    while at < len(data):
        if data[at] < 0x80:
            at += 1
            continue
        total += 1
        common += first <= data[at] <= last
        at += 2
    return common / total if total else 0.0


def _looks_western(data: bytes) -> bool:
    # Accented letters stand alone among ASCII ones; a Chinese sentence is a run of high bytes.
    runs = re.findall(rb"[\x80-\xff]+", data[:_SAMPLE])
    high = sum(map(len, runs))
    letters = len(re.findall(rb"[A-Za-z]", data[:_SAMPLE]))
    single = sum(len(run) == 1 for run in runs)
    return bool(runs) and high < letters / 2 and single >= 0.8 * len(runs)


def _unwrap(paragraph: str) -> str:
    """A paragraph whose lines were filled to one width, as one line; others as they are.

    A line was wrapped if the next line's first word would not have fitted on it.
    """
    lines = paragraph.split("\n")
    width = max(map(_columns, lines))
    if (len(lines) < 3 and width < 60) or not 40 <= width <= 120:
        return paragraph
    out = [[lines[0]]]
    for before, line in pairwise(lines):
        filled = _columns(before) + 1 + _columns(first_word(line)) > width
        table = "  " in before.strip() or "\t" in before or "|" in before
        same_indent = line[:1].isspace() == before[:1].isspace() or before is lines[0]
        ended = ends_sentence(before) and _columns(before) < 0.8 * width
        if filled and same_indent and not (table or ended or starts_item(line)):
            append(out[-1], line.strip())
        else:
            out.append([line])
    return "\n".join(map("".join, out))


def _columns(text: str) -> int:
    return sum(2 if unicodedata.east_asian_width(sign) in "WF" else 1 for sign in text)
