"""How a draft chooses its tokens: the candidates' scores, and the walk through them."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import tiny
import tiny_drafts

from dflash_engine.drafters.block import Block, walk
from dflash_engine.drafters.block2 import Block2Config, CandidateSelector
from dflash_engine.sampling import Draft, Sampling
from dflash_engine.targets import load

SLOTS, K = 3, 4


@pytest.fixture
def lattice() -> tuple[Any, Any]:
    random = np.random.default_rng(2)
    candidates = np.stack([random.choice(20, K, replace=False) for _ in range(SLOTS)])
    return candidates, random.normal(size=(SLOTS, K, K)).astype(np.float32)


def softmax(scores: Any) -> Any:
    weights = np.exp(scores.astype(np.float64) - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def test_tokens_follow_the_distributions_reported(lattice: tuple[Any, Any]) -> None:
    candidates, scores = lattice
    temperature, draws = 0.7, 20_000
    steps = softmax(scores / temperature)
    random = np.random.default_rng(9)
    counts = np.zeros((K,) * SLOTS)
    for _ in range(draws):
        draft = walk(candidates, scores, Sampling(temperature), random)
        assert draft.distributions is not None
        place, path = 0, []
        for slot, (token, q) in enumerate(zip(draft.tokens, draft.distributions, strict=True)):
            known = dict(zip(candidates[slot].tolist(), steps[slot, place], strict=True))
            reported = dict(zip(q.tokens.tolist(), q.probabilities, strict=True))
            assert list(reported) == sorted(known), "ascending"
            assert all(abs(reported[one] - known[one]) < 1e-6 for one in known)
            assert abs(sum(reported.values()) - 1) < 1e-9
            place = candidates[slot].tolist().index(token)
            path.append(place)
        counts[tuple(path)] += 1
    expected = draws * np.einsum("a,ab,bc->abc", steps[0, 0], steps[1], steps[2])
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert chi_square < 110, "63 degrees of freedom: more comes once in five thousand times"


def test_at_temperature_0_each_slot_takes_the_best_after_the_one_before(
    lattice: tuple[Any, Any],
) -> None:
    candidates, scores = lattice
    place, expected = 0, []
    for slot in range(SLOTS):
        place = int(scores[slot, place].argmax())
        expected.append(candidates[slot, place])
    draft = walk(candidates, scores, Sampling(), np.random.default_rng())
    assert draft == Draft(expected)
    alone = walk(candidates, scores[:, :1], Sampling(), np.random.default_rng())
    places = scores[:, 0].argmax(axis=-1)
    assert alone.tokens == candidates[np.arange(SLOTS), places].tolist() != draft.tokens


def test_scores_are_of_each_candidate_after_each_one_before() -> None:
    hidden_size, vocab, rank = 6, 12, 5
    selector = CandidateSelector(hidden_size, vocab, Block2Config(2, 2, rank, K))
    random = np.random.default_rng(3)
    hidden = random.normal(size=(SLOTS, hidden_size)).astype(np.float32)
    logits = random.normal(size=(SLOTS, vocab)).astype(np.float32)
    candidates, scores = map(np.array, selector(mx.array(hidden), mx.array(logits), 7))
    projected = hidden @ np.array(selector.hidden_projection.weight).T
    before = np.array(selector.predecessor_codebook.weight)
    after = np.array(selector.successor_codebook.weight)
    for slot in range(SLOTS):
        assert sorted(candidates[slot]) == sorted(np.argsort(logits[slot])[-K:])
        for a in range(K):
            previous = candidates[slot - 1, a] if slot else 7
            for b, token in enumerate(candidates[slot]):
                edge = (before[previous] * projected[slot] * after[token]).sum()
                assert abs(scores[slot, a, b] - logits[slot, token] - edge) < 1e-5


def propose(folder: Path, sampling: Sampling, seed: int | None, rounds: int = 1) -> list[Draft]:
    block = Block(folder, load(tiny.qwen3(), "qwen3"))
    proposer = block.begin(sampling, seed)
    random = np.random.default_rng(1)
    size = (1, 20, len(tiny.TAPS) * tiny.HIDDEN)
    proposer.observe(mx.array(random.normal(size=size).astype(np.float32)))
    return [proposer.propose([65], 5) for _ in range(rounds)]


def same(one: Draft, other: Draft) -> bool:
    return one.tokens == other.tokens


@pytest.mark.parametrize("pack", [tiny_drafts.zlab, tiny_drafts.zlab2])
def test_a_seed_makes_the_draft_repeatable(tmp_path: Path, pack: Any) -> None:
    folder = tiny.write_draft(tmp_path / "draft", *pack())
    sampling = Sampling(temperature=2.0)
    first, again = propose(folder, sampling, 5, 4), propose(folder, sampling, 5, 4)
    assert [draft.tokens for draft in first] == [draft.tokens for draft in again]
    assert len({tuple(draft.tokens) for draft in first}) > 1
    other = propose(folder, sampling, 6, 4)
    assert [draft.tokens for draft in first] != [draft.tokens for draft in other]


def test_dflash_1_is_cut_as_the_request_asks(tmp_path: Path) -> None:
    folder = tiny.write_draft(tmp_path / "draft", *tiny_drafts.zlab())
    (plain,) = propose(folder, Sampling(temperature=3.0), 1)
    (cut,) = propose(folder, Sampling(temperature=3.0, top_k=3), 1)
    assert plain.distributions is not None
    assert cut.distributions is not None
    for token, q in zip(plain.tokens, plain.distributions, strict=True):
        assert len(q.tokens) == 64
        assert (np.diff(q.tokens) > 0).all()
        assert token in q.tokens
        assert abs(q.probabilities.sum() - 1) < 1e-9
    for token, q, whole in zip(cut.tokens, cut.distributions, plain.distributions, strict=True):
        likeliest = np.sort(whole.tokens[np.argsort(whole.probabilities)[-3:]])
        assert q.tokens.tolist() == likeliest.tolist()
        assert token in q.tokens


def test_dflash_2_has_a_temperature_only(tmp_path: Path) -> None:
    folder = tiny.write_draft(tmp_path / "draft", *tiny_drafts.zlab2())
    (draft,) = propose(folder, Sampling(temperature=3.0, top_k=1, top_p=0.1, min_p=0.9), 1)
    assert draft.distributions is not None
    assert [len(q.tokens) for q in draft.distributions] == [tiny_drafts.TOP_K] * 5
