"""Memory: what earlier answers, and the documents' passages, said after the words at hand.

A shop is asked the same things in other words, and answers much as it did. Where the last tokens
occur in an earlier answer or in a passage, what followed there is proposed, as far as the counts
make it likely (SuffixDecoding, Oliaro et al., arXiv 2411.04975). It costs no model call, and only
proposes: no token of an answer depends on it.

The texts are indexed by :mod:`dflash_engine.drafters.chains`, and kept on disk by
:mod:`dflash_engine.drafters.memory_file`.
"""

import hashlib
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..sampling import Draft, Sampling
from .chains import END, LENGTHS, Chains, Tokens
from .memory_file import SAVE_SECONDS, Content, Kind, MemoryFile, Text
from .protocol import Guess, TokensOnly

WIDEST = 32  # tokens of a guess
LONGEST = 24  # tokens of a match; texts that agree in more count alike
LEAST = 0.15  # chance that a guess is right to its end
# Chosen by replaying 42 answers of SmolLM2-135M over the sample documents, each with the others and
# the passages remembered: of the tokens proposed, 0.69 were right, and their mean chance was 0.70.
DOUBT = 2.0
VOTES = {"answer": 1.0, "passage": 0.5}
PASSAGES = 0.75  # of the memory at most; the rest is for answers
_SPARE = 1 / 16  # of the memory is freed at once, as freeing means to enter the rest anew


@dataclass(slots=True)
class _Text(Text):
    digest: bytes = b""  # of its tokens
    start: int = 0  # in the row

    @property
    def identity(self) -> "_Identity":
        return self.kind, self.owners, self.digest


_Identity = tuple[Kind, tuple[str, ...], bytes]


class Memory:
    """Remembers texts of at most ``most_tokens`` tokens, and drafts from them.

    Kept in ``path``, which is written within ``save_seconds`` of a change. ``key`` names whatever
    gives token ids their meaning, such as the tokenizer; None takes the file's. A file of another
    key, or one that is damaged or of another format, is an empty memory; it is removed, which is
    logged. All methods may be called from any thread.
    """

    name = "memory"
    taps: tuple[int, ...] = ()

    def __init__(
        self,
        path: Path | None = None,
        *,
        key: str | None = "",
        most_tokens: int = 1_000_000,
        save_seconds: float = SAVE_SECONDS,
    ) -> None:
        self._most = most_tokens
        self._lock = threading.Lock()
        self._clock = 0
        self._enter([], [])
        self._file = MemoryFile(path, key, self._content, save_seconds) if path else None
        if self._file and (content := self._file.read()):
            self._load(content)

    def add(self, answer: Sequence[int], *, owners: AbstractSet[str]) -> None:
        """Remember an answer that rests on the documents ``owners``. Given again, it is counted.

        Put the prompt's last tokens before it, and its first words can be proposed; its stop token
        after it, and so can its end. When memory is full, the answers not given for longest go.
        """
        with self._lock:
            self._put(answer, "answer", tuple(sorted(owners)))

    def replace(self, owner: str, passages: Iterable[Sequence[int]]) -> None:
        """Remember ``passages`` as those of the document ``owner``. Unless they are what is already
        remembered of it, that is forgotten first, and so is every answer that rests on it.

        They push answers out of a full memory, but passages take at most three quarters of it: then
        the oldest go.
        """
        texts = [_tokens(passage, self._room) for passage in passages]
        with self._lock:
            held = {
                text.digest: text.count
                for text in self._texts
                if text.kind == "passage" and text.owners == (owner,)
            }
            if held == Counter(_digest(text) for text in texts if len(text) > LENGTHS[0]):
                return
            self._forget(owner)
            for text in texts:
                self._put(text, "passage", (owner,))

    def forget(self, *owners: str) -> None:
        """Forget the passages of documents and every answer that rests on one of them.

        The file is written anew at once, but not waited for: :meth:`save` does.
        """
        with self._lock:
            self._forget(*owners)

    def clear(self) -> None:
        """Forget everything; the file does as after :meth:`forget`."""
        with self._lock:
            self._enter([], [])
            self._changed(forgot=True)

    @property
    def owners(self) -> set[str]:
        """The documents that something is remembered of."""
        with self._lock:
            return {owner for text in self._texts for owner in text.owners}

    @property
    def size(self) -> int:
        """How many tokens are remembered, each text's end counted as one."""
        return self._chains.end - 1

    def guess(self, tokens: list[int], most: int) -> Guess | None:
        """At most ``most`` tokens that may follow ``tokens``: what followed the longest suffix of
        at least 2 tokens that occurs in memory. None where nothing is likely enough.

        Its occurrences vote for the next token, an answer with 1 for each time it was given, a
        passage with half of that. The winner's chance is v / (V + DOUBT / (m - 1)), where v of V
        votes are for it and m tokens led there: a single occurrence is trusted the more the longer
        it has agreed. Those that agree vote on, until the chance of all falls below ``LEAST``.
        """
        width = min(most, WIDEST)
        if width < 1:
            return None
        suffix = np.array(tokens[-LONGEST:], np.int32)
        with self._lock:
            places, match = self._chains.find(suffix)
            if not match:
                return None
            rows = self._chains.after(places, width)
            texts = [self._texts[n] for n in self._chains.text[places].tolist()]
            votes = [VOTES[text.kind] * text.count for text in texts]
        return _most_frequent(rows, votes, match)

    def begin(self, sampling: Sampling, seed: int | None) -> "MemoryProposer":
        """Start on a request; what is remembered meanwhile is proposed too."""
        return MemoryProposer(self)

    def save(self) -> None:
        """Write the file now if anything changed. It is replaced whole or not at all, whatever
        happens.

        Failure is logged and tried again later; the file is removed if it still has what was
        forgotten.
        """
        if self._file:
            self._file.save()

    def close(self) -> None:
        """Save, and write no more by itself; what is added later is remembered until the end of
        the process.
        """
        if self._file:
            self._file.close()

    def _changed(self, *, forgot: bool = False) -> None:
        if self._file:
            self._file.changed(forgot=forgot)

    def _content(self) -> Content:
        with self._lock:
            texts = [Text(t.kind, t.owners, t.size, t.count, t.used) for t in self._texts]
            return Content(texts, self._chains.row[1 : self._chains.end].copy())

    def _load(self, content: Content) -> None:
        texts = [_Text(t.kind, t.owners, t.size, t.count, t.used) for t in content.texts]
        ends = np.cumsum([text.size for text in texts])
        pieces = np.split(content.row, ends[:-1]) if texts else []
        for text, piece in zip(texts, pieces, strict=True):
            text.digest = _digest(piece[:-1])
        gone = self._surplus(texts, "passage", 0)
        kept = [n for n, text in enumerate(texts) if text.identity not in gone]
        self._enter([texts[n] for n in kept], [pieces[n] for n in kept])
        self._clock = max((text.used for text in texts), default=0)

    @property
    def _room(self) -> int:
        # The tokens of one text; with its end, what passages leave.
        return max(int(self._most * (1 - PASSAGES)) - 1, 0)

    def _put(self, tokens: Sequence[int] | Tokens, kind: Kind, owners: tuple[str, ...]) -> None:
        row = _tokens(tokens, self._room)
        if len(row) <= LENGTHS[0]:  # it can propose nothing
            return
        self._clock += 1
        self._changed()
        new = _Text(kind, owners, len(row) + 1, used=self._clock, digest=_digest(row))
        if known := self._known.get(new.identity):
            known.count += 1
            known.used = self._clock
            return
        passages = self._held["passage"] + (new.size if kind == "passage" else 0)
        if self.size + new.size > self._most or passages > self._most * PASSAGES:
            gone = self._surplus(self._texts, kind, new.size)
            self._keep([text for text in self._texts if text.identity not in gone])
        self._append([new], [np.append(row, np.int32(END))])

    def _forget(self, *owners: str) -> None:
        kept = [text for text in self._texts if not set(owners).intersection(text.owners)]
        if len(kept) < len(self._texts):
            self._keep(kept)
            self._changed(forgot=True)

    def _surplus(self, texts: list[_Text], kind: Kind, more: int) -> set[_Identity]:
        # Which must go before ``more`` tokens of ``kind`` come.
        gone = set()
        held = Counter({kind: more})
        for text in texts:
            held[text.kind] += text.size

        def drop(kind: Kind, room: float) -> None:
            if held[kind] <= room:
                return
            oldest = sorted((t for t in texts if t.kind == kind), key=lambda text: text.used)
            for text in oldest:
                if held[kind] <= room - self._most * _SPARE:
                    break
                held[kind] -= text.size
                gone.add(text.identity)

        drop("passage", self._most * PASSAGES)
        drop("answer", self._most - held["passage"])
        return gone

    def _keep(self, texts: list[_Text]) -> None:
        row = self._chains.row
        self._enter(texts, [row[text.start : text.start + text.size] for text in texts])

    def _enter(self, texts: list[_Text], pieces: list[Tokens]) -> None:
        # In place of all that is remembered.
        self._texts: list[_Text] = []
        self._known: dict[_Identity, _Text] = {}
        self._held = Counter[str]()
        self._chains = Chains(self._most)
        if texts:
            self._append(texts, pieces)

    def _append(self, texts: list[_Text], pieces: list[Tokens]) -> None:
        sizes = [text.size for text in texts]
        numbers = np.arange(len(self._texts), len(self._texts) + len(texts), dtype=np.int32)
        start = self._chains.end
        self._chains.extend(np.concatenate(pieces), np.repeat(numbers, sizes))
        for text in texts:
            text.start = start
            start += text.size
            self._held[text.kind] += text.size
            self._known[text.identity] = text
        self._texts += texts


class MemoryProposer(TokensOnly):
    """A request's view of the memory; it has no state of its own."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def guess(self, tokens: list[int], most: int) -> Guess | None:
        """The memory's."""
        return self._memory.guess(tokens, most)

    def propose(self, tokens: list[int], most: int, given: int = 0) -> Draft:
        """The tokens of the memory's guess."""
        guess = self._memory.guess(tokens, most)
        return Draft(guess.tokens) if guess else Draft()


def _most_frequent(rows: list[list[int]], votes: list[float], match: int) -> Guess | None:
    # Of equally frequent tokens that of the first row, which is the latest.
    tokens: list[int] = []
    chances: list[float] = []
    sure = 1.0
    for step in range(len(rows[0])):
        column = [row[step] for row in rows]
        token, total = column[0], sum(votes)
        if column.count(token) < len(column) or token == END:
            counts: dict[int, float] = {}
            for each, vote in zip(column, votes, strict=True):
                counts[each] = counts.get(each, 0.0) + vote
            total -= counts.pop(END, 0.0)  # where a text was cut says nothing
            if not counts:
                break
            token = max(counts, key=counts.__getitem__)
            agreeing = [n for n, each in enumerate(column) if each == token]
            rows, votes = [rows[n] for n in agreeing], [votes[n] for n in agreeing]
        chance = sum(votes) / (total + DOUBT / (match + step - 1))
        sure *= chance
        if sure < LEAST:
            break
        tokens.append(token)
        chances.append(chance)
    return Guess(tokens, chances, match) if tokens else None


def _tokens(tokens: Sequence[int] | Tokens, most: int) -> Tokens:
    return np.asarray(tokens[:most], np.int32)


def _digest(tokens: Tokens) -> bytes:
    return hashlib.blake2b(tokens.tobytes(), digest_size=16).digest()
