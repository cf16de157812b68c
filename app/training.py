"""What a draft for this installation is trained on: prompts in the product's own shape, made from
the passages that were ingested.
"""

import hashlib
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dflash_engine.training.generate import prompt_id
from ingest import Embedder, Index, Passage

from .rag import prompt, quote
from .rag.questions import ChatPrompt, Question
from .rag.retrieve import CANDIDATES, JUDGED, Threshold, retrieve

_ENGLISH = "Answer the customer's question in detail, using only the passages."
_CHINESE = "只根據下列段落，以問題的語言和字體，詳細回答客人的問題。"


@dataclass(frozen=True)
class TrainingPrompt:
    """A prompt for the target: its ``tokens``, the ``question`` and the ``passages`` in it, the
    ``messages`` that it was made of, and the ``file`` that it is about.

    ``id`` is :func:`dflash_engine.training.generate.prompt_id`. Those ``held_out`` are for
    measuring the draft; no other prompt has a passage of their files.
    """

    id: str
    tokens: list[int]
    messages: list[dict[str, str]]
    question: str
    passages: list[str]
    file: str
    held_out: bool


def hold_out(files: Iterable[str], share: float, seed: int = 0) -> frozenset[str]:
    """Which of ``files`` to hold out: about ``share`` of them, whole.

    At least one unless ``share`` is 0, and never all. The same for the same ``seed``; files that
    come and go hardly change what is said of the others. ValueError unless 0 <= share < 1.
    """
    if not 0 <= share < 1:
        raise ValueError(f"share must be at least 0 and below 1, not {share}")
    ranked = sorted(set(files), key=lambda f: hashlib.sha256(f"{seed}\0{f}".encode()).digest())
    number = max(1, round(share * len(ranked))) if share else 0
    return frozenset(ranked[: max(0, min(number, len(ranked) - 1))])


def prompts(
    questions: Iterable[Question],
    index: Index,
    embedder: Embedder,
    chat_prompt: ChatPrompt,
    target_key: str,
    *,
    held_out: Collection[str] = (),
    top_k: int = 3,
    detailed: bool = False,
    threshold: Threshold | None = None,
) -> list[TrainingPrompt]:
    """The prompts that the product would put before the target of ``target_key``.

    Passages are found for each question, and its nearest sentences quoted, as for a customer;
    questions for which nothing is found, or that make a prompt again, are left out. The files
    ``held_out`` and the others know nothing of each other: neither kind of prompt has passages of
    the other. Prompts in which the best passage alone stands, and an answer in detail is asked for,
    come in with ``detailed``: as the target reads most of the time where prompts are long and
    answers short, they give more to learn from. ``chat_prompt`` makes tokens of a conversation;
    ``threshold`` is the embedding model's own if None.

    In the order of the ids, which is a random one that stays the same: the first of them are a fair
    sample of all.
    """
    threshold = threshold or Threshold(embedder.model.min_cosine)
    embedder = _Remembering(embedder)
    found: dict[str, TrainingPrompt] = {}
    for question in questions:
        file = question.passage.file
        apart = file in held_out
        passages = _found(question.text, index, embedder, threshold, held_out, apart)[:top_k]
        if not passages:
            continue
        quoted = [q.sentence for q in quote.quotes(question.text, passages, index, embedder)]
        asked = [(passages, _messages(question.text, passages, quoted))]
        if detailed and not apart:
            asked.append((passages[:1], _in_detail(_messages(question.text, passages[:1], []))))
        for shown, messages in asked:
            tokens = chat_prompt(messages)
            id = prompt_id(target_key, tokens)
            texts = [passage.text for passage in shown]
            found.setdefault(
                id, TrainingPrompt(id, tokens, messages, question.text, texts, file, apart)
            )
    return [found[id] for id in sorted(found)]


def _messages(
    question: str, passages: Sequence[Passage], quoted: Sequence[str]
) -> list[dict[str, str]]:
    turns = prompt.messages(question, passages, quoted)
    return [{"role": turn.role.value, "content": turn.content or ""} for turn in turns]


def _in_detail(messages: list[dict[str, str]]) -> list[dict[str, str]]:
    instructions = _CHINESE if messages[0]["content"] == prompt.CHINESE else _ENGLISH
    return [messages[0] | {"content": instructions}, *messages[1:]]


def _found(
    question: str,
    index: Index,
    embedder: Embedder,
    threshold: Threshold,
    held_out: Collection[str],
    apart: bool,
) -> list[Passage]:
    # Best first, of the files held out or of the others; none if they are not about the question.
    retrieval = retrieve(question, index, embedder, top_k=CANDIDATES, threshold=threshold)
    scored = [s for s in retrieval.passages if (s.passage.file in held_out) == apart]
    found = retrieval.found and any(threshold.passed(s, question) for s in scored[:JUDGED])
    return [s.passage for s in scored] if found else []


class _Remembering(Embedder):
    """An embedder that embeds nothing twice: questions on one passage weigh the same sentences."""

    def __init__(self, embedder: Embedder) -> None:
        super().__init__(embedder.model, embedder.folder)
        self._embedder = embedder
        self._queries: dict[str, NDArray[np.float32]] = {}
        self._passages: dict[str, NDArray[np.float32]] = {}

    def embed_queries(self, texts: Sequence[str]) -> NDArray[np.float32]:
        return _remembered(texts, self._queries, self._embedder.embed_queries)

    def embed_passages(
        self,
        texts: Sequence[str],
        on_batch: Callable[[int], None] | None = None,
        *,
        urgent: bool = False,
    ) -> NDArray[np.float32]:
        return _remembered(texts, self._passages, self._embedder.embed_passages)


def _remembered(
    texts: Sequence[str],
    known: dict[str, NDArray[np.float32]],
    embed: Callable[[Sequence[str]], NDArray[np.float32]],
) -> NDArray[np.float32]:
    new = [text for text in dict.fromkeys(texts) if text not in known]
    if new:
        known.update(zip(new, embed(new), strict=True))
    return np.stack([known[text] for text in texts])
