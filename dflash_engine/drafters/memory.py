"""Memory: what earlier answers, and the documents' passages, said after the words at hand.

A shop is asked the same things in other words, and answers much as it did. Where the last tokens
occur in an earlier answer or in a passage, what followed there is proposed, as far as the counts
make it likely (SuffixDecoding, Oliaro et al., arXiv 2411.04975). It costs no model call, and only
proposes: no token of an answer depends on it.

The texts are indexed by :mod:`dflash_engine.drafters.chains`.
"""

import hashlib
import json
import logging
import os
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ..sampling import Draft, Sampling
from .chains import END, LENGTHS, Chains, Tokens
from .protocol import Guess, TokensOnly

_LOG = logging.getLogger(__name__)

WIDEST = 32  # tokens of a guess
LONGEST = 24  # tokens of a match; texts that agree in more count alike
LEAST = 0.15  # chance that a guess is right to its end
# Chosen by replaying 42 answers of SmolLM2-135M over the sample documents, each with the others and
# the passages remembered: of the tokens proposed, 0.69 were right, and their mean chance was 0.70.
DOUBT = 2.0
VOTES = {"answer": 1.0, "passage": 0.5}
PASSAGES = 0.75  # of the memory at most; the rest is for answers
_SPARE = 1 / 16  # of the memory is freed at once, as freeing means to enter the rest anew
_MAGIC = b"dflash-rag memory 1\n"  # the number is the format's

Kind = Literal["answer", "passage"]


@dataclass(slots=True)
class _Text:
    """A text in the row: ``size`` tokens with its end, from ``start``."""

    kind: Kind
    owners: tuple[str, ...]  # documents, ascending
    size: int
    count: int = 1  # times it was given
    used: int = 0  # when it was given last
    digest: bytes = b""  # of its tokens
    start: int = 0

    @property
    def identity(self) -> "_Identity":
        return self.kind, self.owners, self.digest


_Identity = tuple[Kind, tuple[str, ...], bytes]


class Memory:
    """Remembers texts of at most ``most_tokens`` tokens, and drafts from them.

    Kept in ``path`` by :meth:`save`. ``key`` names whatever gives token ids their meaning, such as
    the tokenizer: a file of another key, or one that is damaged or of another format, is an empty
    memory, and logged. All methods may be called from any thread.
    """

    name = "memory"
    taps: tuple[int, ...] = ()

    def __init__(
        self, path: Path | None = None, *, key: str = "", most_tokens: int = 1_000_000
    ) -> None:
        self._path, self._key, self._most = path, key, most_tokens
        self._lock = threading.Lock()
        self._saving = threading.Lock()  # so that the file written last is the newest
        self._clock = 0
        self._changed = self._forgot = False  # since the last save
        self._enter([], [])
        if path:
            self._load(path)

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

    def forget(self, owner: str) -> None:
        """Forget the passages of a document and every answer that rests on it.

        The file still has them until :meth:`save`.
        """
        with self._lock:
            self._forget(owner)

    def clear(self) -> None:
        """Forget everything; the file still has it until :meth:`save`."""
        with self._lock:
            self._enter([], [])
            self._changed = self._forgot = True

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
        """Write the file if anything changed. It is replaced whole or not at all, whatever happens.

        Failure is logged. Then a file that still has what was forgotten is removed.
        """
        if self._path is None:
            return
        with self._saving:
            with self._lock:
                if not self._changed:
                    return
                forgot = self._forgot
                self._changed = self._forgot = False
                row = self._chains.row[1 : self._chains.end].copy()
                texts = [[t.kind, t.owners, t.size, t.count, t.used] for t in self._texts]
            try:
                _write(self._path, _pack(self._key, texts, row))
            except OSError as error:
                _LOG.warning("memory is not saved in %s: %s", self._path, error)
                with self._lock:
                    self._changed, self._forgot = True, self._forgot or forgot
                _remove(_new(self._path))
                if forgot:
                    _remove(self._path)

    def _load(self, path: Path) -> None:
        try:
            texts, row = _unpack(_read(path), self._key)
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            _LOG.warning("memory starts empty: %s: %s", path, error)
            return
        ends = np.cumsum([text.size for text in texts])
        pieces = np.split(row, ends[:-1]) if texts else []
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
        self._changed = True
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

    def _forget(self, owner: str) -> None:
        kept = [text for text in self._texts if owner not in text.owners]
        if len(kept) < len(self._texts):
            self._keep(kept)
            self._changed = self._forgot = True

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


def _pack(key: str, texts: list[list[Any]], row: Tokens) -> bytes:
    # The magic, sha256 of all that follows, the head's length, the head, the row.
    head = json.dumps({"key": key, "texts": texts}).encode()
    body = len(head).to_bytes(8, "little") + head + row.astype("<i4").tobytes()
    return _MAGIC + hashlib.sha256(body).digest() + body


def _unpack(data: bytes, key: str) -> tuple[list[_Text], Tokens]:
    # Raises ValueError, saying why.
    start = len(_MAGIC) + hashlib.sha256().digest_size
    body = memoryview(data)[start:]
    if hashlib.sha256(body).digest() != data[len(_MAGIC) : start]:
        raise ValueError("the file is damaged")
    size = int.from_bytes(body[:8], "little")
    head = json.loads(bytes(body[8 : 8 + size]))
    if head["key"] != key:
        raise ValueError(f"it was made with {head['key']!r}, this is {key!r}")
    texts = [
        _Text(kind, tuple(map(sys.intern, owners)), size, count, used)
        for kind, owners, size, count, used in head["texts"]
    ]
    return texts, np.frombuffer(body[8 + size :], "<i4").astype(np.int32)


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        start = file.read(len(_MAGIC))
        if start != _MAGIC:
            raise ValueError("it is no memory, or one of another version")
        return start + file.read()


def _write(path: Path, data: bytes) -> None:
    # Under another name until it is whole and on the disk. What a kill leaves there is overwritten.
    path.parent.mkdir(parents=True, exist_ok=True)
    new = _new(path)
    with open(new, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # now the name, too
    finally:
        os.close(folder)


def _new(path: Path) -> Path:
    return path.with_name(path.name + ".new")


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        _LOG.warning("%s could not be removed: %s", path, error)
