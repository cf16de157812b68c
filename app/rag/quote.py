"""The sentences that answer, word for word.

A small model cannot be trusted to pick the sentence; retrieval at sentence level can. A sentence
is scored by the question's words it has, weighted by rarity, and, where the embedding model reads
the question's script, by nearness of meaning.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ingest import Embedder, Index, Passage
from ingest.text import sentences

from .retrieve import Rarity, scripts

MOST = 2
SECOND = 0.85  # of the best sentence's score, for a second one to be worth showing
SHORTEST = 8  # characters, or a heading would do; Chinese says a lot in that


@dataclass(frozen=True)
class Quote:
    """A sentence of passage ``n`` (as cited), verbatim."""

    n: int
    sentence: str
    file: str
    page: int | None


def quotes(
    question: str, passages: Sequence[Passage], index: Index, embedder: Embedder
) -> list[Quote]:
    """At most two sentences of ``passages`` (cited 1, 2, ...) that match ``question`` best."""
    found = [
        (n, passage, passage.text[start:end].strip())
        for n, passage in enumerate(passages, start=1)
        for start, end in sentences(passage.text)
    ]
    titles = {title for passage in passages for title in passage.heading.split(" > ")}
    found = [entry for entry in found if len(entry[2]) >= SHORTEST and entry[2] not in titles]
    if not found:
        return []
    rarity = Rarity.of(question, index)
    scores = [rarity.coverage(sentence) for _, _, sentence in found]
    if scripts(question) <= embedder.model.scripts:
        texts = [sentence for _, _, sentence in found]
        vectors = embedder.embed_passages(texts, urgent=True)
        near = vectors @ embedder.embed_queries([question])[0]
        scores = [words + float(cosine) for words, cosine in zip(scores, near, strict=True)]
    if max(scores) <= 0:  # a follow-up may share nothing with any sentence
        return []
    ranked = sorted(range(len(found)), key=lambda i: (-scores[i], i))
    chosen: list[Quote] = []
    for i in ranked:
        n, passage, sentence = found[i]
        if len(chosen) == MOST or scores[i] < SECOND * scores[ranked[0]]:
            break
        if all(sentence != quote.sentence for quote in chosen):
            chosen.append(Quote(n, sentence, passage.file, passage.page))
    return chosen
