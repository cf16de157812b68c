"""What a draft learns from: prompts with the target's own answers, in a file that grows.

The file is JSON lines: a head that names the format and the target, then a sequence a line. A
process that is killed leaves at most a line without its end, which readers pass over and the next
writer cuts off.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import TrainingError

_FORMAT = "dflash-rag sequences 1"  # the number is the format's


@dataclass(frozen=True)
class Sequence:
    """The ``tokens`` of a prompt and of its answer, which starts at index ``answer``.

    ``prompt_id`` is whatever its maker knows the prompt by.
    """

    tokens: list[int]
    answer: int
    prompt_id: str = ""

    @property
    def anchors(self) -> range:
        """Where a round can start: at a token of the answer that another one follows."""
        return range(self.answer, len(self.tokens) - 1)


class SequenceFile:
    """The sequences in the file at ``path``, all written by the target of ``target_key``.

    There need not be a file yet. Iterating reads it from its start, ``len`` counts. One process
    may append while others read.

    Raises TrainingError if the file is another target's, or no such file.

    >>> file = SequenceFile(Path("answers.jsonl"), hub.identity(target_folder))
    >>> file.append(prompt + answer, len(prompt), "handbook.pdf, question 3")
    """

    def __init__(self, path: Path, target_key: str) -> None:
        self.path, self.target_key = path, target_key
        for _ in self._lines():  # reads the head
            break

    def append(self, tokens: Iterable[int], answer: int, prompt_id: str = "") -> None:
        """Add a sequence. It is with the operating system when this returns."""
        ids = [int(token) for token in tokens]
        if not 0 < answer <= len(ids):
            raise ValueError(f"the answer cannot start at {answer} of {len(ids)} tokens")
        row = {"prompt": prompt_id, "answer": answer, "tokens": ids}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a+b") as file:
            _cut_unfinished(file)
            if not file.tell():
                file.write(_line({"format": _FORMAT, "target": self.target_key}))
            file.write(_line(row))

    def __iter__(self) -> Iterator[Sequence]:
        for number, line in self._lines():
            try:
                row = json.loads(line)
                yield Sequence(row["tokens"], row["answer"], row["prompt"])
            except (KeyError, TypeError, ValueError) as error:
                raise TrainingError(
                    f"{self.path} is damaged in line {number}: {error!r}. Remove that line"
                ) from error

    def __len__(self) -> int:
        return sum(1 for _ in self._lines())

    def prompts(self) -> set[str]:
        """The ids of all prompts that are in it."""
        return {sequence.prompt_id for sequence in self}

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        # Whole ones after the head, with their numbers in the file.
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            return
        with file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    return
                if number == 1:
                    self._require_own(line)
                else:
                    yield number, line

    def _require_own(self, head: bytes) -> None:
        try:
            found = json.loads(head)
        except ValueError:
            found = None
        if not isinstance(found, dict) or found.get("format") != _FORMAT:
            raise TrainingError(
                f"{self.path} is no file of sequences, or one of another version: choose another "
                "name, or remove it"
            )
        if found.get("target") != self.target_key:
            raise TrainingError(
                f"{self.path} was written by the target {found.get('target')}, this one is "
                f"{self.target_key}: a draft learns from its own target's answers. Have them "
                "written anew, into another file"
            )


def split(
    sequences: Iterable[Sequence], held_out: float = 0.1
) -> tuple[list[Sequence], list[Sequence]]:
    """Those to train with, and about the share ``held_out`` to measure with.

    Where a sequence goes depends on its prompt alone: more of them move none, and answers to one
    prompt stay together.
    """
    kept: tuple[list[Sequence], list[Sequence]] = ([], [])
    for sequence in sequences:
        prompt = json.dumps(sequence.tokens[: sequence.answer]).encode()
        place = int.from_bytes(hashlib.sha256(prompt).digest()[:8], "big") / 2**64
        kept[place < held_out].append(sequence)
    return kept


def _line(row: dict[str, Any]) -> bytes:
    return json.dumps(row, separators=(",", ":")).encode() + b"\n"


def _cut_unfinished(file: BinaryIO) -> None:
    # Leaves the position at the end, after the last whole line.
    end = file.seek(0, 2)
    if not end:
        return
    file.seek(end - 1)
    if file.read(1) != b"\n":
        file.seek(0)
        end = file.read().rfind(b"\n") + 1
        file.truncate(end)
        file.seek(end)
