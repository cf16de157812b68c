"""The passages a question is about, or the finding that there are none.

Two rankings are fused: nearness of meaning (vectors) and shared words weighted by rarity (BM25,
Chinese by character pairs). An embedding model that does not read the question's script has no
say. Whether anything was found is judged on two measures that mean the same for every question:
the cosine, and the *coverage*, the share of the question's words, weighted by rarity, that a
passage has.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ingest import Embedder, Index, Passage
from ingest.text import index_terms, query_terms

CANDIDATES = 20  # of each ranking
TOGETHER = 1.4  # cosine and coverage, in units of their thresholds
JUDGED = 3  # best passages that say whether anything was found, however many are asked for
RRF = 60  # the usual constant of reciprocal rank fusion (Cormack et al., SIGIR 2009)


@dataclass(frozen=True)
class Scored:
    """A passage with its measures: ``cosine`` (None if the vectors had no say) and ``coverage``."""

    passage: Passage
    cosine: float | None
    coverage: float

    @property
    def score(self) -> float:
        """One number for people, 0 to 1: the better of the two measures."""
        return round(max(self.cosine or 0.0, self.coverage), 3)


@dataclass(frozen=True)
class Retrieval:
    """The best passages, best first; ``found`` is False when none is about the question."""

    passages: list[Scored]
    found: bool


@dataclass(frozen=True)
class Threshold:
    """What makes a passage count as about a question: cosine and coverage, each as a multiple of
    its value here, add up to 1.4; words alone give at most 1. None for ``coverage`` goes by the
    question's script. Where the vectors have no say, the coverage decides.

    The values were set on half of XQuAD-en and DRCD: with the articles indexed, 99% of the English
    and 93% of the Chinese questions pass; with them left out, 13% and 5%.
    """

    cosine: float
    coverage: float | None = None

    def passed(self, scored: Scored, question: str) -> bool:
        """Whether ``scored`` is about ``question``."""
        least = self.coverage or (0.35 if "han" in scripts(question) else 0.5)
        coverage = min(scored.coverage / least, 1.0)
        if scored.cosine is None:
            return coverage == 1.0
        cosine = scored.cosine / self.cosine if self.cosine > 0 else TOGETHER
        return cosine + coverage >= TOGETHER


def retrieve(
    question: str, index: Index, embedder: Embedder, *, top_k: int, threshold: Threshold
) -> Retrieval:
    """The ``top_k`` best passages for ``question``."""
    lexical = index.lexical(question, CANDIDATES)
    dense: list[tuple[str, float]] = []
    if scripts(question) <= embedder.model.scripts:
        dense = index.dense(embedder.embed_queries([question])[0], CANDIDATES)
    fused = fuse([[i for i, _ in dense], [i for i, _ in lexical]])
    rarity = Rarity.of(question, index)
    cosines = dict(dense)
    scored = [
        Scored(
            passage,
            cosines.get(passage.id, 0.0) if dense else None,
            rarity.coverage(f"{passage.heading} {passage.text}"),
        )
        for passage in index.passages(list(fused))
    ]
    scored.sort(key=lambda s: (-round(fused[s.passage.id], 6), -(s.cosine or 0.0) - s.coverage))
    # A row of emoji has no words, and an embedding model is near to anything with it.
    found = bool(rarity.weights) and any(threshold.passed(s, question) for s in scored[:JUDGED])
    return Retrieval(scored[:top_k], found)


def fuse(rankings: Sequence[Sequence[str]]) -> dict[str, float]:
    """Reciprocal rank fusion: each ranking gives 1 / (60 + rank) to what it lists, from rank 1."""
    fused: dict[str, float] = {}
    for ranking in rankings:
        for rank, item in enumerate(ranking, start=1):
            fused[item] = fused.get(item, 0.0) + 1 / (RRF + rank)
    return fused


@dataclass(frozen=True)
class Rarity:
    """The weight of each of a question's terms: high for those that few passages have."""

    weights: Mapping[str, float]

    @classmethod
    def of(cls, question: str, index: Index) -> "Rarity":
        """Weigh the terms by the passages of ``index``."""
        terms = list(dict.fromkeys(query_terms(question)))
        frequency = index.document_frequency(terms)
        count = index.passage_count
        return cls({term: math.log(1 + count / (1 + frequency.get(term, 0))) for term in terms})

    def coverage(self, text: str) -> float:
        """The weighted share of the question's terms that ``text`` has, 0 to 1."""
        total = sum(self.weights.values())
        if not total:
            return 0.0
        present = set(index_terms(text))
        return sum(w for term, w in self.weights.items() if term in present) / total


def scripts(text: str) -> frozenset[str]:
    """Which scripts ``text`` is written in: ``latin``, ``han`` or both; ``latin`` if neither."""
    han = any("\u3400" <= c <= "\u9fff" or "\uf900" <= c <= "\ufaff" for c in text)
    latin = any(c.isascii() and c.isalpha() for c in text)
    found = {name for name, there in (("han", han), ("latin", latin)) if there}
    return frozenset(found or {"latin"})
