"""The draft network beside the authors' own, which is installed for this: the same checkpoint in
both, the same features, round after round.

Seen here, they agree bit for bit. Another BLAS may add in another order.
"""

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import tiny
import tiny_drafts
from dflash import model_mlx as authors
from mlx_lm.models.cache import RotatingKVCache
from tiny_drafts import FULL, SLIDING, Draft

from dflash_engine.drafters.block import Block
from dflash_engine.sampling import Sampling
from dflash_engine.targets import Target, load

# Positions committed before a round, and rows of its block. The first is longer than the window.
ROUNDS = [(30, 6), (1, 6), (4, 6), (1, 3), (6, 6), (2, 2), (1, 6), (14, 6), (1, 6), (1, 4), (5, 6)]


class InOrder(RotatingKVCache):
    """Theirs, made to hold the window in order of time.

    After an update of one position a rotating cache starts in the middle of its window, while
    their mask counts distances as if it started with the oldest position.
    """

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        return self._update_concat(keys, values)


class Authors:
    """The authors' draft, bound to the target."""

    def __init__(self, folder: Path, target: Target, in_order: bool) -> None:
        self.draft = authors.load_draft(str(folder))
        self.draft.bind(target.model)
        self.cache = self.draft.make_cache()
        if in_order:
            self.cache = [
                InOrder(max_size=cache.max_size) if isinstance(cache, RotatingKVCache) else cache
                for cache in self.cache
            ]

    def fill(self, block: list[int], features: mx.array) -> tuple[Any, Any, list[int]]:
        """Hidden states, logits and greedy tokens of the masks of ``block``."""
        ids = mx.array([block])
        hidden = self.draft.hidden_states(ids, features, self.cache, logits_start=1)
        logits = self.draft.compute_logits(hidden)
        if isinstance(self.draft, authors.DFlash2DraftModel):
            tokens, _, _ = self.draft.candidate_selector.select(hidden, logits, ids[:, 0], 0.0)
        else:
            tokens = mx.argmax(logits, axis=-1)
        return as_single(hidden[0]), as_single(logits[0]), tokens[0].tolist()


def as_single(array: mx.array) -> Any:
    return np.array(array.astype(mx.float32))


DRAFTS: dict[str, Draft] = {
    "full": tiny_drafts.zlab(),
    "sliding": tiny_drafts.zlab((SLIDING, SLIDING)),
    "sliding-not-causal": tiny_drafts.zlab((SLIDING, SLIDING), is_causal=False),
    "mixed": tiny_drafts.zlab((SLIDING, SLIDING, FULL)),
    "mixed-not-causal": tiny_drafts.zlab((SLIDING, FULL), is_causal=False),
    "mixed-causal": tiny_drafts.zlab((SLIDING, FULL), is_causal=True),
    "wide-window": tiny_drafts.zlab((SLIDING, FULL), sliding_window=40),
    "window-of-two": tiny_drafts.zlab((SLIDING, FULL), sliding_window=2),
    "scaled": tiny_drafts.zlab(
        dflash_config={
            "input_embedding_scale": 3.0,
            "output_multiplier": 0.5,
            "final_logit_softcapping": 4.0,
        }
    ),
    "softcap-at-top-level": tiny_drafts.zlab(final_logit_softcapping=2.0),
    "yarn": tiny_drafts.zlab(
        rope_scaling={"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16}
    ),
    "llama3": tiny_drafts.zlab(
        rope_scaling={
            "rope_type": "llama3",
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    ),
    "rope-parameters": tiny_drafts.zlab(
        rope_theta=None,
        rope_parameters={
            "rope_theta": 5000.0,
            "rope_type": "default",
            "partial_rotary_factor": 0.25,
            "mrope_section": [1, 1, 2],
        },
    ),
    "block-size-inside": tiny_drafts.zlab(block_size=None, dflash_config={"block_size": 6}),
    "dflash2": tiny_drafts.zlab2(),
    "dflash2-causal": tiny_drafts.zlab2(is_causal=None),
    "dflash2-mixed": tiny_drafts.zlab2((SLIDING, FULL)),
    "dflash2-scaled": tiny_drafts.zlab2(
        (FULL,), dflash_config={"output_multiplier": 0.2, "final_logit_softcapping": 20.0}
    ),
}


@pytest.fixture(autouse=True)
def _folders_instead_of_downloads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(authors, "snapshot_download", lambda path, **_: path)


def compare(
    folder: Path,
    *,
    in_order: bool = True,
    rounds: list[tuple[int, int]] = ROUNDS,
    dtype: mx.Dtype = mx.float32,
) -> None:
    target = load(tiny.qwen3(), "qwen3")
    target.model.set_dtype(dtype)
    theirs = Authors(folder, target, in_order)
    ours = Block(folder, target)
    proposer, contexts = ours.begin(Sampling(), None), ours.model.make_contexts()
    random = np.random.default_rng(4)
    for committed, rows in rounds:
        size = (1, committed, len(ours.taps) * tiny.HIDDEN)
        features = mx.array(random.normal(size=size), dtype)
        anchor = int(random.integers(256))
        hidden, logits, tokens = theirs.fill([anchor] + [tiny.MASK] * (rows - 1), features)
        ours.model.observe(features, contexts)
        own_hidden, own_logits = ours.fill([anchor], rows - 1, contexts)
        assert own_logits.dtype == dtype
        assert np.abs(as_single(own_hidden) - hidden).max() <= 1e-4
        assert np.abs(as_single(own_logits) - logits).max() <= 1e-4
        proposer.observe(features)
        assert proposer.propose([anchor], rows - 1).tokens == tokens


@pytest.mark.parametrize("draft", DRAFTS.values(), ids=DRAFTS)
def test_every_round_is_the_authors(tmp_path: Path, draft: Draft) -> None:
    compare(tiny.write_draft(tmp_path / "draft", *draft))


@pytest.mark.parametrize("name", ["mixed", "scaled", "dflash2"])
def test_in_bf16_too(tmp_path: Path, name: str) -> None:
    config, weights = DRAFTS[name]
    halved = {key: array.astype(mx.bfloat16) for key, array in weights.items()}
    compare(tiny.write_draft(tmp_path / "draft", config, halved), dtype=mx.bfloat16)


@pytest.mark.parametrize("name", ["mixed", "dflash2"])
def test_their_own_cache_agrees_where_it_is_in_order(tmp_path: Path, name: str) -> None:
    several = [(committed, rows) for committed, rows in ROUNDS if committed > 1]
    folder = tiny.write_draft(tmp_path / "draft", *DRAFTS[name])
    compare(folder, in_order=False, rounds=several)
