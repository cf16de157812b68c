"""Putting wrapped lines back together: what a line end means, and how two lines join."""

from __future__ import annotations

import re

from ingest.text import is_dense

_ITEM = re.compile(
    r"\s*(?:[•‣▪◦●○■□◆※*·\-–—]\s|\(?[0-9]{1,3}[.)、]\s*\S|\(?[a-zA-Z][.)]\s"
    r"|[（(]?[一二三四五六七八九十]{1,3}[)）、.]|[QA問答问]\s?[:：.]|\|)"
)
_SENTENCE_END = re.compile(r"[.!?。！？；:：]['\"”’」』)）]*$")
_HYPHENATED = re.compile(r"(?<![^\W\d_])([^\W\d_]++)-$")
_NEXT_WORD = re.compile(r"[^\W\d_]+")


def starts_item(line: str) -> bool:
    """Whether a line opens a list item, a question or an answer, and so never continues another."""
    return bool(_ITEM.match(line))


def ends_sentence(line: str) -> bool:
    """Whether a line ends where a sentence does."""
    return bool(_SENTENCE_END.search(line))


def first_word(line: str) -> str:
    """What a typesetter would have had to fit on the line before: a word, or one dense sign."""
    if line[:1] and is_dense(line[0]):
        return line[0]
    return line.split(maxsplit=1)[0] if line.strip() else ""


def join(line: str, following: str, words: frozenset[str] | set[str] = frozenset()) -> str:
    """Two wrapped lines as one.

    Dense scripts join without a space. A hyphen at the end goes when the word it leaves occurs in
    `words` (lower case, the document's own), or when nothing says that it belongs there.
    """
    if not line or not following:
        return line + following
    hyphenated = _HYPHENATED.search(line)
    rest = _NEXT_WORD.match(following)
    if hyphenated and rest and rest.group()[0].islower():
        head, tail = hyphenated.group(1).lower(), rest.group().lower()
        if f"{head}-{tail}" in words and head + tail not in words:
            return line + following
        return line[:-1] + following
    if is_dense(line[-1]) or is_dense(following[0]):
        return line + following
    return f"{line} {following}"


def append(
    pieces: list[str], following: str, words: frozenset[str] | set[str] = frozenset()
) -> None:
    """Join a line to those in `pieces`, whose text is their concatenation.

    Only the last piece is looked at, so that a paragraph of many lines takes linear time.
    """
    if following:
        joined = join(pieces[-1], following, words)
        pieces[-1] = joined[: len(joined) - len(following)]
        pieces.append(following)
