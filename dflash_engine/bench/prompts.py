"""What the bench asks: five kinds of prompts, ten of each, of the project's own words.

How much a drafter saves depends on what is asked. Answers copied from passages, a question that
another customer asked before, and code that comes back changed repeat what was read; free chat does
not. So the kinds are told apart in what is measured.
"""

import csv
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

# "known": questions on documents that the draft was trained on, which only train-draft has.
Kind = Literal["passages", "again", "chat", "code", "chinese", "known"]
KINDS: tuple[Kind, ...] = ("passages", "again", "chat", "code", "chinese")
PROMPTS = 10  # of each kind
Compose = Callable[[str, Sequence[str]], list[dict[str, str]]]  # of a question and passages
FILE = Path(__file__).with_name("prompts.json")

_FROM_PASSAGES = (
    "Answer the customer's question in two or three sentences, using only the passages, in their "
    "words where you can."
)
INSTRUCTIONS: dict[Kind, str] = {
    "passages": _FROM_PASSAGES,
    "again": _FROM_PASSAGES,
    "chat": "You are a friendly assistant. Answer in plain words, and briefly.",
    "code": "You are a careful programmer. Answer with the code, and explain it in one sentence.",
    "chinese": "只根據段落，用兩三句話回答客人的問題，盡量沿用段落裡的字句。",
}


@dataclass(frozen=True)
class Prompt:
    """A conversation to be answered: the system's turn, then the user's.

    ``name`` is its own within the ``kind``; for ``again`` it is a category of banking77. Those have
    ``earlier``, the same passages with the question in another customer's words: to be asked before
    ``messages``, after which those meet an engine that remembers. Other kinds have None there.
    ``questions`` (the earlier one first, if there is one) and ``passages`` are what the messages
    were made of, if there are passages.
    """

    kind: Kind
    name: str
    messages: list[dict[str, str]]
    earlier: list[dict[str, str]] | None = None
    questions: tuple[str, ...] = ()
    passages: tuple[str, ...] = ()

    def composed(self, compose: Compose) -> "Prompt":
        """The same, with the messages that ``compose`` makes of question and passages, if any."""
        if not self.passages:
            return self
        made = [compose(question, self.passages) for question in self.questions]
        return replace(self, messages=made[-1], earlier=made[0] if self.earlier else None)


def load(
    kinds: Sequence[str] = KINDS, count: int = PROMPTS, wordings: Path | None = None
) -> list[Prompt]:
    """The first ``count`` prompts of each of the ``kinds``, in the order of :data:`KINDS`.

    Args:
        kinds: some of :data:`KINDS`.
        count: prompts of each kind, 1 to :data:`PROMPTS`.
        wordings: a CSV in UTF-8 with the columns ``text`` and ``category``, such as the training
            set of banking77 (Casanueva et al. 2020, arXiv:2003.04807). The first two different
            texts of a category there are the earlier and the later question of ``again``; the
            passages stay. Other categories and further texts are not used.

    Raises:
        ValueError: a kind is unknown, ``count`` out of range, or ``wordings`` cannot be read, lacks
            a column or two different texts for a category, or is given without ``again``.

    >>> load(["again"], count=1)[0].name
    'card_arrival'
    """
    for kind in kinds:
        if kind not in KINDS:
            raise ValueError(f"no prompts of the kind {kind!r}: choose from {', '.join(KINDS)}")
    if not 1 <= count <= PROMPTS:
        raise ValueError(f"{count} prompts of each kind: ask for 1 to {PROMPTS}")
    if wordings is not None and "again" not in kinds:
        raise ValueError(f"{wordings} has wordings for the kind 'again': ask for that kind as well")
    data = json.loads(FILE.read_text(encoding="utf-8"))
    prompts: list[Prompt] = []
    for kind in KINDS:
        if kind not in kinds:
            continue
        if kind == "again":
            topics = data[kind]["topics"][:count]
            prompts += _asked_again(data[kind]["faq"], topics, wordings)
        else:
            prompts += [
                Prompt(
                    kind,
                    p["name"],
                    _messages(kind, p),
                    questions=(p["question"],) if "question" in p else (),
                    passages=tuple(p.get("passages", ())),
                )
                for p in data[kind][:count]
            ]
    return prompts


def _asked_again(
    faq: dict[str, str], topics: list[dict[str, Any]], wordings: Path | None
) -> list[Prompt]:
    questions = {topic["name"]: topic["questions"] for topic in topics}
    if wordings is not None:
        questions = _read(wordings, list(questions))
    prompts = []
    for topic in topics:
        passages = [faq[name] for name in topic["passages"]]
        asked = questions[topic["name"]]
        earlier, later = (
            _messages("again", {"passages": passages, "question": question}) for question in asked
        )
        prompts.append(
            Prompt("again", topic["name"], later, earlier, tuple(asked), tuple(passages))
        )
    return prompts


def _messages(kind: Kind, prompt: dict[str, Any]) -> list[dict[str, str]]:
    if kind in ("chat", "code"):
        user = prompt["request"]
    else:
        above, before = ("段落：", "問題：") if kind == "chinese" else ("Passages:", "Question: ")
        user = "\n\n".join([f"{above}\n{prompt['passages'][0]}", *prompt["passages"][1:]])
        user += f"\n\n{before}{prompt['question']}"
    return [
        {"role": "system", "content": INSTRUCTIONS[kind]},
        {"role": "user", "content": user},
    ]


def _read(wordings: Path, categories: list[str]) -> dict[str, list[str]]:
    """The first two different texts of each category; white space in them becomes one blank."""
    found: dict[str, list[str]] = {category: [] for category in categories}
    try:
        with wordings.open(encoding="utf-8-sig", newline="") as file:
            rows = csv.DictReader(file, strict=True)
            missing = {"text", "category"}.difference(rows.fieldnames or ())
            if missing:
                raise ValueError(
                    f"{wordings} has no column {' and no column '.join(sorted(missing))}: its "
                    "first line must name the columns text and category, with a comma between"
                )
            for row in rows:
                texts = found.get(row["category"])
                text = " ".join((row["text"] or "").split())
                if texts is not None and text and text not in texts and len(texts) < 2:
                    texts.append(text)
    except OSError as error:
        raise ValueError(
            f"cannot read the wordings at {wordings} ({error.strerror}): name a CSV file with the "
            "columns text and category"
        ) from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{wordings} is not in UTF-8: save it as CSV in UTF-8") from error
    except csv.Error as error:
        raise ValueError(
            f"{wordings} is not a CSV file ({error}): separate the columns by commas, and put "
            "texts with commas or quotes into double quotes"
        ) from error
    few = [category for category, texts in found.items() if len(texts) < 2]
    if few:
        raise ValueError(
            f"{wordings} needs two different texts for each category, and has fewer for "
            f"{', '.join(few)}: add them, or ask for fewer prompts"
        )
    return found
