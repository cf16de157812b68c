"""Above temperature 0 the answers have the target's own distribution, whatever drafts.

Three parts make that up: the loop with a target that is a table, whose joint distributions can be
written down (20,000 draws); the drafts of each model, which must be drawn from what they say they
are (20,000 again); and whole answers with draft models, token by token.
"""

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import reference
import tiny
import tiny_drafts
from decoding import rounds, tokens_of
from scipy import stats

from dflash_engine.drafters import Drafter
from dflash_engine.drafters.block import Block
from dflash_engine.drafters.lookup import Lookup
from dflash_engine.drafters.protocol import TokensOnly
from dflash_engine.drafters.small import Small
from dflash_engine.sampling import Distribution, Draft, Sampling
from dflash_engine.targets import load

VOCAB = 4
DRAWS = 20_000
RARE = 1e-4  # of right programs, that fail: the seeds are fixed, so none does
PROMPT = (0, 1)


def table(seed: int, like: np.ndarray | None = None) -> np.ndarray:
    """Logits for each last two tokens, and as near to another's as makes drafts half right."""
    logits = np.random.default_rng(seed).normal(size=(VOCAB, VOCAB, VOCAB), scale=1.2)
    logits = logits if like is None else 0.5 * logits + 0.7 * like
    return logits.astype(np.float32)


TARGET = table(3)
DRAFT = table(8, TARGET)


class Memory:
    """The cache of a table: the tokens themselves, so that a row too many would be felt."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.state: list[mx.array] = []

    def roll_back(self, rows: int) -> None:
        del self.tokens[len(self.tokens) - rows :]


class Table:
    """A target whose next token depends on the last two."""

    width_error = 0.0
    stop_tokens: frozenset[int] = frozenset()
    make_cache = staticmethod(Memory)

    def forward(self, tokens: Sequence[int], cache: Memory, undoable: bool = True) -> Any:
        start = len(cache.tokens)
        cache.tokens += tokens
        pairs = [(0, *cache.tokens)[i : i + 2] for i in range(start, len(cache.tokens))]
        before, last = zip(*pairs, strict=True)
        return mx.array(TARGET[before, last][None]), None


class Drawing(TokensOnly):
    """Drafts tokens from the draft table: from all of them, or from the likeliest two."""

    name, taps, state = "drawing", (), ()

    def __init__(self, likeliest: int = VOCAB) -> None:
        self._random = np.random.default_rng(5)
        self._likeliest = likeliest

    def begin(self, sampling: Sampling, seed: int | None) -> "Drawing":
        return self

    @functools.cache  # noqa: B019 - as many as the table has rows
    def _distribution(self, before: int, last: int) -> Distribution:
        logits = DRAFT[before, last]
        tokens = np.sort(np.argsort(-logits)[: self._likeliest])
        weights = np.exp(logits[tokens].astype(np.float64))
        return Distribution(tokens, weights / weights.sum())

    def propose(self, tokens: list[int], most: int, given: int = 0) -> Draft:
        drafted, distributions = list(tokens[-2:]), []
        for _ in range(min(2, most)):
            distributions.append(self._distribution(*drafted[-2:]))
            drafted.append(distributions[-1].draw(self._random))
        return Draft(drafted[2:], distributions)


class Certain(Drawing):
    """Drafts the first choices of the draft table."""

    def propose(self, tokens: list[int], most: int, given: int = 0) -> Draft:
        drafted = list(tokens[-2:])
        for _ in range(min(2, most)):
            drafted.append(int(DRAFT[drafted[-2], drafted[-1]].argmax()))
        return Draft(drafted[2:])


MODES: dict[str, Callable[[], Drafter | None]] = {
    "none": lambda: None,
    "lookup": lambda: Lookup(width=3),
    "certain": Certain,
    "drawn": Drawing,
    "drawn of few": lambda: Drawing(likeliest=2),
}
CUT = Sampling(1.3, top_p=0.9, top_k=3, min_p=0.05)
PENALISED = Sampling(
    1.5,
    logit_bias={1: 0.7},
    repetition_penalty=1.3,
    presence_penalty=0.3,
    frequency_penalty=0.4,
)


def joint(
    sampling: Sampling, length: int, prompt: tuple[int, ...] = PROMPT
) -> dict[tuple[int, ...], float]:
    """How likely each answer of ``length`` tokens is."""
    answers: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        longer = {}
        for answer, share in answers.items():
            before, last = (*prompt, *answer)[-2:]
            scores = reference.scores(TARGET[before, last].tolist(), sampling, prompt, answer)
            for token, p in reference.probabilities(scores, sampling).items():
                longer[(*answer, token)] = share * p
        answers = longer
    return answers


def p_value(counts: Counter[Any], expected: dict[Any, float]) -> float:
    """Of the chi-square test; outcomes expected fewer than five times are taken together."""
    assert set(counts) <= set(expected), "none that has no probability"
    total = counts.total()
    common = [outcome for outcome, p in expected.items() if p * total >= 5]
    seen = [counts[outcome] for outcome in common]
    due = [expected[outcome] * total for outcome in common]
    rest = total - sum(due)
    if rest > 1e-6 * total:
        seen, due = [*seen, total - sum(seen)], [*due, rest]
    return float(stats.chisquare(seen, due, sum_check=False).pvalue)


@pytest.mark.parametrize("mode", MODES)
def test_pairs_of_tokens_are_jointly_distributed_as_the_targets(mode: str) -> None:
    # Without penalties all that a pair depends on are the two tokens before it.
    drafter, length = MODES[mode](), 200
    counts: dict[tuple[int, ...], Counter[tuple[int, ...]]] = {}
    drafted = kept = 0
    for seed in range(DRAWS // length):
        run = rounds(Table(), drafter, PROMPT, length, CUT, seed)  # type: ignore[arg-type]
        tokens = [*PROMPT, *tokens_of(run)]
        for i in range(2, len(tokens), 2):
            before = counts.setdefault(tuple(tokens[i - 2 : i]), Counter())
            before[tuple(tokens[i : i + 2])] += 1
        drafted += sum(step.drafted for step in run)
        kept += sum(len(step.tokens) - 1 for step in run if step.drafted)
    if drafter:
        assert 0.15 < kept / drafted < 0.9, "some drafts are kept, some refused"
    values = [p_value(own, joint(CUT, 2, pair)) for pair, own in counts.items()]
    assert len(values) > VOCAB * (VOCAB - 1)
    assert min(values) > RARE / len(values)


def test_penalised_answers_are_jointly_distributed_as_the_targets() -> None:
    drafter = Drawing(likeliest=2)
    counts: Counter[tuple[int, ...]] = Counter()
    for seed in range(DRAWS):
        run = rounds(Table(), drafter, PROMPT, 3, PENALISED, seed)  # type: ignore[arg-type]
        counts[tuple(tokens_of(run))] += 1
    assert p_value(counts, joint(PENALISED, 3)) > RARE


def test_the_measure_sees_what_is_wrong() -> None:
    # The answers of another table, and those of drafts that are always kept.
    drafter = Drawing()
    counts: Counter[tuple[int, ...]] = Counter()
    for _ in range(DRAWS // 10):
        tokens = list(PROMPT)
        while len(tokens) < 5:
            tokens += drafter.propose(tokens, 5 - len(tokens)).tokens
        counts[tuple(tokens[2:])] += 1
    plain = Sampling(1.0)
    assert set(counts) <= set(joint(plain, 3))
    assert p_value(counts, joint(plain, 3)) < RARE
    assert not set(counts) <= set(joint(CUT, 3)), "tokens that are cut are noticed"


def draft_folder(kind: str, folder: Path) -> Path:
    draft = tiny_drafts.zlab() if kind == "DFlash" else tiny_drafts.zlab2()
    return tiny.write_draft(folder / "draft", *draft)


class Recalled:
    """A small model that computes the logits after each sequence once."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.context, self.vocab_size = model.context, model.vocab_size
        self.make_cache = Memory

    def forward(self, tokens: Sequence[int], cache: Memory, undoable: bool = True) -> Any:
        cache.tokens += tokens
        return self._logits(tuple(cache.tokens)), None

    @functools.cache  # noqa: B019 - few in this test
    def _logits(self, tokens: tuple[int, ...]) -> mx.array:
        return self._model.forward(tokens, self._model.make_cache())[0][:, -1:]


@pytest.mark.parametrize("kind", ["DFlash", "DFlash 2", "small model"])
def test_drafts_are_drawn_from_what_they_say(kind: str, tmp_path: Path) -> None:
    target = load(tiny.llama(), "llama")
    sampling = Sampling(2.5, top_k=3)
    prompt = list(b"hello")
    drafter: Any
    if kind == "small model":
        drafter = Small(tiny.small_draft(), target)
        drafter.model = Recalled(drafter.model)
    else:
        drafter = Block(draft_folder(kind, tmp_path), target)
        fill = drafter.fill
        recalled = functools.cache(
            lambda known, count: fill(list(known), count, proposer._contexts)
        )
        drafter.fill = lambda known, count, contexts: recalled(tuple(known), count)
        if kind == "DFlash 2":
            select = drafter.model.candidate_selector
            drafter.model.candidate_selector = functools.cache(lambda *inputs: select(*inputs))
    proposer = drafter.begin(sampling, 3)
    if drafter.taps:
        proposer.observe(target.forward(prompt, target.make_cache())[1])
    counts: dict[tuple[bytes, bytes], Counter[int]] = {}
    shares: dict[tuple[bytes, bytes], dict[int, float]] = {}
    drawn = 0
    while drawn < DRAWS:
        draft = proposer.propose([*prompt, drawn % 3], 4)
        assert draft.distributions is not None
        for token, own in zip(draft.tokens, draft.distributions, strict=True):
            key = (own.tokens.tobytes(), own.probabilities.tobytes())
            counts.setdefault(key, Counter())[token] += 1
            shares[key] = dict(zip(own.tokens.tolist(), own.probabilities.tolist(), strict=True))
        drawn += len(draft.tokens)
    assert len(counts) >= 4
    values = [p_value(own, shares[key]) for key, own in counts.items() if own.total() > 50]
    assert min(values) > RARE / len(values)
    assert any(len(own) > 1 for own in counts.values()), "there is something to draw"


@pytest.mark.parametrize("kind", ["DFlash", "DFlash 2", "small model"])
def test_answers_with_a_draft_model_are_the_targets(kind: str, tmp_path: Path) -> None:
    # Where each token lies in its own distribution is uniform, and independent of the one before.
    target = load(tiny.model("llama", 0.0, letters=4, seed=2), "llama")
    target.stop_tokens = frozenset()
    drafter: Drafter
    if kind == "small model":
        drafter = Small(tiny.small_draft(), target)
        drafter.model = load(tiny.model("llama", 0.0, letters=4, seed=2), "llama")
    else:
        drafter = Block(draft_folder(kind, tmp_path), target)
    sampling = Sampling(2.0, top_k=12, presence_penalty=0.5)
    prompt = list(b"hello")
    run = rounds(target, drafter, prompt, 160, sampling, seed=4)
    tokens = tokens_of(run)
    assert any(len(step.tokens) > 1 for step in run), "drafts are kept"
    places = reference.ranks(target, sampling, prompt, tokens, 8, np.random.default_rng(1))
    squares = Counter((int(a * 4), int(b * 4)) for a, b in itertools.pairwise(places))
    assert stats.kstest(places, "uniform").pvalue > RARE
    even = {(a, b): 1 / 16 for a in range(4) for b in range(4)}
    assert p_value(squares, even) > RARE
