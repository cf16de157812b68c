"""Whole answers beside the authors' own package, which is installed for this: the same target, the
same draft, the same prompts give the same tokens, and as many of them each round.

The targets write nearly all of their text with four letters, so that random drafts are often right.
"""

import functools
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import tiny
import tiny_drafts
from decoding import STEP, rounds, tokens_of, truth
from dflash import model_mlx as authors
from mlx_lm.models.cache import RotatingKVCache
from mlx_lm.utils import load as load_model
from tiny_drafts import FULL, SLIDING

from dflash_engine.drafters.block import Block
from dflash_engine.targets import load

KINDS = {  # with the seeds of weights whose text and draft agree now and then
    "llama": 2,
    "qwen3": 1,
    "qwen3_moe": 2,
    "qwen3_5": 2,
    "gpt_oss": 2,
    "gemma3_text": 2,
    "gemma4": 6,
    "lfm2": 3,
}
# The authors take back plain caches, windows, and qwen3_5's recurrent layers.
NOT_THEIRS = ("lfm2",)
SHORT = list(b"hello")
LONG = list(b"The quick brown fox jumps over the lazy dog.")  # longer than all windows
MOST = 40
BLOCK = 6


def target_folder(kind: str) -> Path:
    return tiny.model(kind, end_weight=0.0, letters=4, seed=KINDS[kind])


def dflash2(**more: Any) -> tiny_drafts.Draft:
    config, weights = tiny_drafts.zlab2((SLIDING, SLIDING), **more)
    for name in weights:
        if "codebook" in name:  # or what it says of pairs of tokens outweighs the head
            weights[name] *= 0.3
    return config, weights


DRAFTS = {
    "dflash": functools.partial(tiny_drafts.zlab, (SLIDING, FULL)),
    "dflash2": dflash2,
}


class InOrder(RotatingKVCache):
    """Theirs, made to hold the window in order of time.

    After an update of one position a rotating cache starts in the middle of its window, while
    their draft's mask counts distances as if it started with the oldest position: what they
    propose after such a round is not what the draft was trained to.
    """

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        return self._update_concat(keys, values)


@dataclass
class Theirs:
    """The authors' loop. It patches the model it is given, so that is one of its own."""

    model: Any
    tokenizer: Any
    draft: Any

    def rounds(self, prompt: list[int]) -> list[list[int]]:
        """The tokens of the prompt's end, and of each round."""
        answers = authors.stream_generate(
            self.model,
            self.draft,
            self.tokenizer,
            mx.array(prompt),
            max_tokens=MOST + BLOCK,
            prefill_step_size=STEP,
        )
        return [answer.tokens for answer in answers if answer.tokens]


def theirs(kind: str, draft_folder: Path) -> Theirs:
    model, tokenizer = load_model(str(target_folder(kind)))[:2]
    if kind == "gemma3_text":
        # Where they look for it. mlx-lm writes this kind's scale into the model's code, in bf16.
        model.model.embed_scale = mx.array(tiny.HIDDEN**0.5, mx.bfloat16).item()
    draft = authors.load_draft(str(draft_folder))
    make_cache = draft.make_cache
    draft.make_cache = lambda: [
        InOrder(cache.max_size) if isinstance(cache, RotatingKVCache) else cache
        for cache in make_cache()
    ]
    return Theirs(model, tokenizer, draft)


@pytest.fixture(autouse=True)
def _folders_instead_of_downloads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(authors, "snapshot_download", lambda path, **_: path)


def whole_rounds(rounds: list[list[int]]) -> list[list[int]]:
    """Those before which fewer than ``MOST`` tokens had come."""
    before = itertools.accumulate((len(tokens) for tokens in rounds), initial=0)
    return [tokens for tokens, count in zip(rounds, before, strict=False) if count < MOST]


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("kind", KINDS)
def test_answers_and_rounds_are_the_authors(kind: str, draft: str, tmp_path: Path) -> None:
    target = load(target_folder(kind), kind)
    config, weights = DRAFTS[draft](num_target_layers=len(target.layers))
    folder = tiny.write_draft(tmp_path / "draft", config, weights)
    block = Block(folder, target)
    peer = theirs(kind, folder)
    kept = []
    for prompt in (SHORT, LONG):
        run = rounds(target, block, prompt, MOST + BLOCK)
        own = [step.tokens for step in run if step.tokens]
        assert tokens_of(run) == truth(target, prompt, MOST + BLOCK)
        if kind not in NOT_THEIRS:
            # Their last rounds draft a token more than may be used.
            assert whole_rounds(own) == whole_rounds(peer.rounds(prompt))
        kept += [len(tokens) - 1 for tokens in own[1:]]
    assert sum(kept) / len(kept) > 0.1, "the draft is often right"
    assert max(kept) > 1


@pytest.mark.parametrize("kind", NOT_THEIRS)
def test_what_the_authors_do_not_run_yet(kind: str, tmp_path: Path) -> None:
    # When they do, it belongs in the comparison.
    folder = tiny.write_draft(tmp_path / "draft", *DRAFTS["dflash"]())
    with pytest.raises(AssertionError, match="every non-trimmable cache is a GatedDeltaNet"):
        theirs(kind, folder).rounds(SHORT)
