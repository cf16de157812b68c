"""Answers that quote: whole sentences of given passages, each known to its source.

The tokens written so far are read in every way in which they can begin such an answer. Mostly there
is one. There are more where a sentence goes on as another one does ("It rains." and "It rains. It
pours."), or where several put together read like a longer one.
"""

import math
import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .constrain import is_allowed, take_back

# Ways to read the text that are followed at a time. Without a limit, passages made for it (dots,
# in every number) could take all day; a way that is given up only leaves out a possible answer.
_MOST_READINGS = 32

# What may stand before a sentence when asking for its tokens.
_CONTEXTS = ("。", ".")


@dataclass(frozen=True)
class Sentence:
    """A sentence of ``source``, and how likely it is to be wanted: ``prior``, a log weight.

    ``also``: other sources with the same sentence.
    """

    text: str
    source: str
    prior: float = 0.0
    also: tuple[str, ...] = ()


def separator(text: str) -> str:
    """What comes between ``text`` and the next sentence: a space, or nothing after a mark that ends
    a Chinese or Japanese sentence, whose glyph brings its own.

    It depends on the sentence before alone, so that each sentence has one tokenisation a separator.
    """
    if unicodedata.category(text[-1])[0] != "P":
        return " "
    if unicodedata.east_asian_width(text[-1]) in "WF":
        return ""
    # Quotes, brackets and dots are shared with Latin: the last letter before them tells.
    return "" if _is_dense(next((c for c in reversed(text) if c.isalnum()), " ")) else " "


def _is_dense(letter: str) -> bool:
    # Han and kana; Hangul is as wide, but puts spaces between words.
    return unicodedata.east_asian_width(letter) in "WF" and not "\uac00" <= letter <= "\ud7a3"


def joined(texts: Sequence[str]) -> str:
    """Sentences as one text, as a quoted answer has them."""
    return "".join(text + separator(text) for text in texts[:-1]) + "".join(texts[-1:])


class _Reading(NamedTuple):
    # A way to read the text: sentences ``done``, and one begun, which may be any of ``open``, all
    # longer than the ``depth`` tokens it has. ``lead`` is the separator before it, None before the
    # first. ``worth`` is that of the sentences done. Sentences are known by their number.
    done: tuple[int, ...]
    worth: float
    lead: str | None
    open: tuple[int, ...]
    depth: int


@dataclass
class _State:
    # What the tokens written so far can be read as; behind a stop token it has ``ended``. What may
    # follow is found when asked for.
    readings: list[_Reading]
    ended: bool = False
    options: tuple[NDArray[np.int64], NDArray[np.float64]] | None = None


class Quote:
    """The answer is whole ``sentences``: at least one, at most ``most_sentences``, in any order,
    none twice, a :func:`separator` between two; then a stop token.

    Outer space is cut off sentences and blank ones are dropped. Equal ones become one, with all
    their sources and the highest prior. What the tokenizer cannot give back word for word is in
    ``left_out``; what has no tokens of its own behind another sentence is allowed as the first one
    only. ValueError where nothing is left to quote.

    A sentence's worth is its prior less the best of all priors, at most 0; an answer's worth is the
    sum of its sentences', and its end adds nothing. So a second sentence is free where its prior is
    as good as the best, and weak ones are not appended. The weight of a token is the worth of the
    best answer that goes on with it, less that of the best answer from here: at most 0, and 0 for
    one token at least. Along an answer the weights add up to its worth. The best prior counts and
    not the sum, or greedy decoding would follow a word that begins many poor sentences instead of
    the one good sentence.

    Args:
        sentences: what may be quoted.
        encode: the target's tokens for a text. Special tokens put around every text are taken off.
        decode: the text that the target's tokens make.
        stop_tokens: what ends an answer. Where it must end, the lowest alone is allowed, so that no
            model need choose between them.
        most_sentences: how many an answer may have.
        special: names of special tokens; a sentence's text that looks like one is written as text.

    >>> quote = Quote([Sentence("It rains.", "a.txt")], encode, decode, {2})
    >>> for token in encode("It rains."):
    ...     quote.advance(token)
    >>> quote.chosen
    [Sentence(text='It rains.', source='a.txt', prior=0.0, also=())]
    """

    def __init__(
        self,
        sentences: Sequence[Sentence],
        encode: Callable[[str], list[int]],
        decode: Callable[[list[int]], str],
        stop_tokens: Iterable[int],
        *,
        most_sentences: int = 3,
        special: Iterable[str] = (),
    ) -> None:
        self._stop_tokens = sorted(set(stop_tokens))
        if not self._stop_tokens:
            raise ValueError("quoting needs at least one stop token")
        if most_sentences < 1:
            raise ValueError(f"most_sentences must be at least 1, not {most_sentences}")
        if not all(math.isfinite(sentence.prior) for sentence in sentences):
            raise ValueError("a sentence's prior must be finite: leave out what must not be chosen")
        merged = _merged(sentences)
        if not merged:
            raise ValueError("no sentences to quote: all are blank, or none were given")
        self._most = most_sentences
        verbatim = _Verbatim(encode, decode, special, frozenset(self._stop_tokens))
        alone = [verbatim.alone(sentence.text) for sentence in merged]
        self.left_out = [s for s, tokens in zip(merged, alone, strict=True) if not tokens]
        # By falling prior: the first of any is the best of them.
        ranked = sorted(
            ((s, tokens) for s, tokens in zip(merged, alone, strict=True) if tokens),
            key=lambda entry: -entry[0].prior,
        )
        if not ranked:
            raise ValueError(
                f"none of the {len(merged)} sentences to quote can be written word for word with "
                f"this model's tokens, such as {merged[0].text[:80]!r}"
            )
        self._sentences = [sentence for sentence, _ in ranked]
        # The tokens of each sentence by what leads to it; empty where it cannot stand there.
        self._tokens: dict[str | None, list[list[int]]] = {None: [tokens for _, tokens in ranked]}
        self._separators = [separator(sentence.text) for sentence in self._sentences]
        if most_sentences > 1:
            for lead in set(self._separators):
                self._tokens[lead] = [verbatim.behind(lead + s.text) for s in self._sentences]
        self._worths = [s.prior - self._sentences[0].prior for s in self._sentences]
        start = _Reading((), 0.0, None, tuple(range(len(self._sentences))), 0)
        self._states = [_State([start])]

    @property
    def chosen(self) -> list[Sentence]:
        """The sentences written so far, in order; one that is not complete yet is left out.

        Text that can be read in several ways is read as the likeliest, then the fewest sentences.
        """
        best = min(self._states[-1].readings, key=lambda r: (r.depth, -r.worth, len(r.done)))
        return [self._sentences[number] for number in best.done]

    def allowed(self) -> NDArray[np.int64] | None:
        """The next tokens of all sentences that may be under way, or begin, and stop tokens."""
        return None if self._states[-1].ended else self._options()[0]

    def weights(self) -> NDArray[np.float64] | None:
        """What is lost by each of the allowed tokens, at most 0."""
        return None if self._states[-1].ended else self._options()[1]

    def advance(self, token: int) -> None:
        """``token`` was written. ValueError if it is not allowed."""
        state = self._states[-1]
        if not is_allowed(token, self.allowed()):
            raise ValueError(f"token {token} continues no sentence to quote")
        if state.ended:
            self._states.append(state)
        elif token in self._stop_tokens:
            self._states.append(_State(state.readings, ended=True))
        else:
            self._states.append(_State(self._read(state.readings, token)))

    def back(self, count: int) -> None:
        """The last ``count`` tokens are taken back. ValueError if there were fewer."""
        take_back(self._states, count)

    def _options(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        state = self._states[-1]
        if state.options is None:
            state.options = self._find_options(state.readings)
        return state.options

    def _find_options(
        self, readings: list[_Reading]
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        # For each token, the worth of the best answer that goes on with it.
        worths: dict[int, float] = {}
        end = -math.inf
        for reading in readings:
            tokens, depth = self._tokens[reading.lead], reading.depth
            for number in reading.open:
                token, worth = tokens[number][depth], reading.worth + self._worths[number]
                if worth > worths.get(token, -math.inf):
                    worths[token] = worth
            if reading.done and not depth:
                end = max(end, reading.worth)
        if end > -math.inf:
            stops = self._stop_tokens if worths else self._stop_tokens[:1]
            worths.update(dict.fromkeys(stops, end))
        allowed = sorted(worths)
        weights = np.array([worths[token] for token in allowed])
        return np.array(allowed, np.int64), weights - weights.max()

    def _read(self, readings: list[_Reading], token: int) -> list[_Reading]:
        # The readings with one more token. Where a sentence is complete, the next may begin.
        following: list[_Reading] = []
        for reading in readings:
            tokens, depth = self._tokens[reading.lead], reading.depth
            matching = [n for n in reading.open if tokens[n][depth] == token]
            longer = tuple(n for n in matching if len(tokens[n]) > depth + 1)
            if longer:
                following.append(reading._replace(open=longer, depth=depth + 1))
            following += [self._after(reading, n) for n in matching if len(tokens[n]) == depth + 1]
        if len(following) == 1:
            return following
        # Sentences done in another order are as good, and what may follow is the same.
        distinct = {(frozenset(r.done), r.lead, r.depth): r for r in reversed(following)}
        return sorted(distinct.values(), key=self._rank)[:_MOST_READINGS]

    def _after(self, reading: _Reading, number: int) -> _Reading:
        done = (*reading.done, number)
        worth = reading.worth + self._worths[number]
        if len(done) == self._most:
            return _Reading(done, worth, None, (), 0)
        lead = self._separators[number]
        tokens = self._tokens[lead]
        unused = tuple(n for n in range(len(tokens)) if tokens[n] and n not in done)
        return _Reading(done, worth, lead, unused, 0)

    def _rank(self, reading: _Reading) -> tuple[float, int, int]:
        begun = self._worths[reading.open[0]] if reading.depth else 0.0
        return -reading.worth - begun, len(reading.done), reading.depth


def _merged(sentences: Iterable[Sentence]) -> list[Sentence]:
    found: dict[str, Sentence] = {}
    for sentence in sentences:
        text = sentence.text.strip()
        if not text:
            continue
        known = found.get(text)
        if known is None:
            found[text] = replace(sentence, text=text)
            continue
        sources = dict.fromkeys([*known.also, sentence.source, *sentence.also])
        sources.pop(known.source, None)
        found[text] = replace(known, prior=max(known.prior, sentence.prior), also=tuple(sources))
    return list(found.values())


class _Verbatim:
    # Finds tokens that decode to exactly a text.
    def __init__(
        self,
        encode: Callable[[str], list[int]],
        decode: Callable[[list[int]], str],
        special: Iterable[str],
        stop_tokens: frozenset[int],
    ) -> None:
        self._encode = encode
        self._decode = decode
        self._stop_tokens = stop_tokens
        names = sorted((name for name in special if len(name) > 1), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, names)) or "(?!)")
        self._added = encode("")
        self._heads = {context: self._bare(context) for context in ("", *_CONTEXTS)}

    def alone(self, text: str) -> list[int]:
        """Tokens that make ``text`` at the start of an answer; empty if none are found."""
        return self._behind(text, "")

    def behind(self, text: str) -> list[int]:
        """Tokens that make ``text`` behind another sentence; empty if none are found."""
        found = (self._behind(text, context) for context in _CONTEXTS)
        return next((tokens for tokens in found if tokens), [])

    def _behind(self, text: str, context: str) -> list[int]:
        first, *others = self._pieces(text)
        # What the context and the text share a token of does not decode to the text.
        begun = self._bare(context + first)[len(self._heads[context]) :]
        parts = [begun, *map(self.behind, others)]
        tokens = [token for part in parts for token in part]
        whole = self._decode(self._heads[context] + tokens)
        right = whole == context + text and self._stop_tokens.isdisjoint(tokens)
        return tokens if right else []

    def _bare(self, text: str) -> list[int]:
        # Without the special tokens, such as BOS, that the tokenizer puts around every text.
        tokens, added = list(self._encode(text)), self._added
        for before in range(len(added), -1, -1):
            behind = len(added) - before
            end = len(tokens) - behind
            if end >= before and tokens[:before] + tokens[end:] == added:
                return tokens[before:end]
        return tokens

    def _pieces(self, text: str) -> list[str]:
        # Cut inside the names of special tokens, so that no piece holds one.
        pieces = []
        while found := self._special.search(text):
            pieces.append(text[: found.start() + 1])
            text = text[found.start() + 1 :]
        return [*pieces, text]
