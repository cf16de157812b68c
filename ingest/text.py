"""Text as the rest of the package sees it: one normal form, sentences, and terms for the index."""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache

# Invisible characters that split words, steer display or hide instructions: soft hyphen, zero
# width space, word joiner, BOM, direction overrides, Unicode tags, and control characters other
# than tab and newline. ZWJ and ZWNJ stay: emoji and Indic scripts need them.
_INVISIBLE = re.compile(
    "[\x00-\x08\x0e-\x1f\x7f-\x84\x86-\x9f\u00ad\u200b\u2060\ufeff\ufffe\uffff"
    "\u200e\u200f\u202a-\u202e\u2066-\u2069\U000e0000-\U000e007f]"
)
_BREAK = re.compile("\r\n?|[\x0b\x0c\x85\u2028\u2029]")
_SPACE = re.compile("[\u00a0\u2000-\u200a\u202f\u205f]")
# Possessive, and only from the start of a run: else a long run of spaces takes quadratic time.
_INNER_SPACES = re.compile(r"(?<=\S)[ \t]{2,}+(?=\S)|\t")
_LINE_ENDS = re.compile(r"(?<![ \t])[ \t]++(?=\n|$)")
_BLANK_LINES = re.compile(r"\n{3,}")
# Combining marks are sorted in quadratic time; no script puts more than 30 on a letter (UAX 15).
_MOST_MARKS = 30
_MARKS = re.compile(rf"[^\w\s\x00-\x7f]{{{_MOST_MARKS + 1},}}")

# Scripts written without spaces between words: kana, Han, Hangul (bigrams serve it well too),
# Thai, Lao, Khmer, Myanmar.
_DENSE = (
    "\u2e80-\u2fdf\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uac00-\ud7a3\u3005-\u3007"
    "\u0e00-\u0e7f\u0e80-\u0eff\u1000-\u109f\u1780-\u17ff\U00020000-\U000323af"
)
_DENSE_SIGN = re.compile(f"[{_DENSE}]")
_TOKEN = re.compile(
    rf"(?P<dense>[{_DENSE}]+)"
    r"|(?P<number>\d{1,3}(?:,\d{3})+(?:\.\d+)?(?![\d,])|\d+\.\d+(?![\w.]))"
    rf"|(?P<word>[^\W_{_DENSE}]+(?:['’\-./_&+][^\W_{_DENSE}]+)*)"
)
_PARTS = re.compile(r"[^\W_]+")

_OPEN_END = "。！？；｡…"  # these end a sentence wherever they stand
_CLOSERS = "\"'”’»」』）)】]》〉〕"
_CLOSING = f"[{re.escape(_CLOSERS)}]*"
_END = re.compile(rf"[{_OPEN_END}]+{_CLOSING}|[.!?．]+{_CLOSING}|\n")
_ABBREVIATIONS = frozenset(
    re.findall(
        r"\S+",
        """mr mrs ms dr prof st vs etc e.g i.e cf no nos fig figs vol pp ed eds inc ltd co corp dept
        tel ext approx est min max jan feb mar apr jun jul aug sep sept oct nov dec a.m p.m u.s""",
    )
)
_LAST_WORD = re.compile(r"[^\W_]+(?:\.[^\W_]+)*$")
_LONG_WORD = 16  # longer than any of the words that a dot need not end

STOP_WORDS = frozenset(
    re.findall(
        r"\S+",
        """a about am an and any are as at be been but by can could did do does for from had has
        have how i if in into is it its may me my of on or our please s shall should so such t
        tell than that the their them then there these they this those to us was we were what
        when where which who whom whose why will with would you your""",
    )
)
# What Chinese questions are made of beside their subject, in both scripts. Single characters that
# also begin common nouns (會 as in 會員, 上 as in 上午) are left alone.
_CHINESE_STOP_WORDS = re.compile(
    "|".join(
        sorted(
            re.findall(
                r"\S+",
                """請問 请问 什麼 什么 甚麼 怎麼 怎么 怎樣 怎样 如何 為什麼 为什么 為何 为何
                多少 多久 哪裡 哪里 哪兒 哪個 哪个 哪一 哪些 哪 何時 何时 何處 誰 谁 是否
                可不可以 可以 能不能 會不會 会不会 有沒有 有没有 沒有 没有 我們 我们 你們 你们
                他們 他们 這個 这个 那個 那个 應該 应该 需要 嗎 吗 呢 吧 的 了 是 我 你 您 他 她
                與 与 及 幾 几 於 也 都 被""",
            ),
            key=len,
            reverse=True,
        )
    )
)


def normalise(text: str) -> str:
    r"""The text in NFC with `\n` line ends, plain spaces and nothing invisible; idempotent.

    Widths and letter forms stay as written, since this is what people are shown.
    """
    text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    text = _INVISIBLE.sub("", _BREAK.sub("\n", text))
    text = unicodedata.normalize("NFC", _MARKS.sub(_few_marks, _SPACE.sub(" ", text)))
    text = _MARKS.sub(_few_marks, text)  # NFC makes two marks of some
    text = _LINE_ENDS.sub("", _INNER_SPACES.sub(" ", text))
    return _BLANK_LINES.sub("\n\n", text).strip("\n ")


def _few_marks(match: re.Match[str]) -> str:
    kept, marks = [], 0
    for sign in match.group():
        marks = marks + 1 if unicodedata.combining(sign) else 0
        if marks <= _MOST_MARKS:
            kept.append(sign)
    return "".join(kept)


def sentences(text: str) -> list[tuple[int, int]]:
    """Spans `(start, end)` of the sentences of any script, in order, without outer space.

    Every line break ends one; a dot does not inside numbers, URLs, initials and abbreviations.
    Together the spans hold every non-space character once.
    """
    spans: list[tuple[int, int]] = []
    start = 0

    def close(end: int) -> None:
        piece = text[start:end]
        if piece.strip():
            left = start + len(piece) - len(piece.lstrip())
            spans.append((left, start + len(piece.rstrip())))

    for match in _END.finditer(text):
        if _ends(text, start, match):
            close(match.end())
            start = match.end()
    close(len(text))
    return spans


def _ends(text: str, start: int, match: re.Match[str]) -> bool:
    mark = match.group()[0]
    if mark == "\n" or mark in _OPEN_END:
        return True
    after = text[match.end() : match.end() + 1]
    if after and not after.isspace():
        return (is_dense(after) and mark != ".") or after in "「『（【《"
    following = re.compile(r"[ \t]*(\S?)").match(text, match.end())
    if following and following.group(1).islower():
        return False
    if mark == "." and len(match.group().rstrip(_CLOSERS)) == 1:
        word = _LAST_WORD.search(text, max(start, match.start() - _LONG_WORD), match.start())
        if word:
            found = word.group()
            if found.lower() in _ABBREVIATIONS and following and following.group(1):
                return False
            if len(found) == 1 and found.isalpha() and found.isupper():
                return False  # an initial, as in "J. Smith"
            if found.isdigit() and len(found) <= 3:
                # "1. Open the box" goes on; "It takes 3. Then ..." does not
                return bool(text[start : word.start()].strip(_CLOSERS + " \t\n([（"))
    return True


def index_terms(text: str) -> list[str]:
    """Terms of a text for the lexical index, in order, with repeats; the same for questions.

    Words in lower case, NFKC, plural folded; numbers without thousands commas; a compound such as
    `H-100` as its parts and as `h100`; dense scripts as overlapping pairs of characters, or the
    single one that stands alone. A term holds only letters, digits, marks and inner dots.
    """
    terms: list[str] = []
    for match in _TOKEN.finditer(unicodedata.normalize("NFKC", normalise(text)).lower()):
        token = match.group()
        if match.lastgroup == "dense":
            pairs = [token[i : i + 2] for i in range(len(token) - 1)]
            terms.extend(pairs or [token])
        elif match.lastgroup == "number":
            terms.append(token.replace(",", ""))
        else:
            parts = _PARTS.findall(re.sub(r"['’]s\b", "", token))
            terms.extend(_singular(part) for part in parts)
            if len(parts) > 1 and len(parts) <= 4:
                terms.append("".join(parts))
    return terms


def query_terms(text: str) -> list[str]:
    """The distinct terms of a question without stop words, unless nothing else is left.

    Chinese ones are taken out before characters are paired, or half of the pairs would be of a stop
    word and its neighbour, which no passage has.
    """
    terms = dict.fromkeys(index_terms(_CHINESE_STOP_WORDS.sub(" ", text)))
    return [term for term in terms if term not in STOP_WORDS] or list(
        dict.fromkeys(index_terms(text))
    )


@lru_cache(maxsize=8192)
def is_dense(character: str) -> bool:
    """Whether a character, or a mark, joins its neighbours without a space; Hangul does not."""
    if "\u3000" < character <= "\u303f" or "\uff00" < character <= "\uffef":
        return True
    return bool(_DENSE_SIGN.match(character)) and not "\uac00" <= character <= "\ud7a3"


def _singular(word: str) -> str:
    if len(word) < 4 or not word.isascii() or not word.endswith("s"):
        return word
    if word.endswith("ies") and len(word) > 4:
        return word[:-3] + "y"
    if word.endswith(("sses", "xes", "ches", "shes")):
        return word[:-2]
    return word if word.endswith(("ss", "us", "is")) else word[:-1]
