"""Every drafter on every kind of cache under every kind of sampling gives what the target alone
gives: a new one belongs in its list here. ``pytest tests/conformance -v`` ends with the table.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import reference
import tiny
import tiny_drafts
from decoding import Scripted, rounds, shaky, tokens_of, widths

from dflash_engine.decode import decode
from dflash_engine.drafters import Drafter
from dflash_engine.drafters.block import Block
from dflash_engine.drafters.compose import Compose
from dflash_engine.drafters.lookup import Lookup
from dflash_engine.drafters.memory import Memory
from dflash_engine.drafters.small import Small
from dflash_engine.sampling import Sampler, Sampling
from dflash_engine.targets import Target, load
from dflash_engine.width import Costs

PROMPT = list(b"abcabcabc and abcabc")  # longer than the windows
MOST = 13
STEP = 16  # prompt tokens a forward


@dataclass(frozen=True)
class Kind:
    """A kind of cache, and a model that has it."""

    model: Callable[[], Path]
    kv_bits: int | None = None


CACHES = {
    "growing": Kind(functools.partial(tiny.model, "llama", 0.0)),
    "growing, 8 bits": Kind(functools.partial(tiny.heads, 32), kv_bits=8),
    "sliding": Kind(functools.partial(tiny.model, "gpt_oss", 0.0)),
    "gated delta": Kind(functools.partial(tiny.model, "qwen3_5", 0.0)),
    "convolution": Kind(functools.partial(tiny.model, "lfm2", 0.0)),
    "state space, list": Kind(functools.partial(tiny.model, "falcon_h1", 0.0)),
}

SAMPLINGS = {
    "greedy": Sampling(),
    "greedy, penalised": Sampling(
        logit_bias={65: 4.0, 97: -3.0},
        repetition_penalty=1.2,
        presence_penalty=0.5,
        frequency_penalty=0.3,
    ),
    "sampled": Sampling(2.0, top_p=0.9, top_k=40, min_p=0.01),
    "sampled, penalised": Sampling(
        3.0,
        top_p=0.95,
        min_p=0.005,
        logit_bias={65: 4.0, 97: -3.0},
        repetition_penalty=1.2,
        presence_penalty=0.5,
        frequency_penalty=0.3,
    ),
}


def small(target: Target, answer: list[int], folder: Path) -> Drafter:
    return Small(tiny.small_draft(), target)


def block(target: Target, answer: list[int], folder: Path) -> Drafter:
    draft = tiny_drafts.zlab((tiny.SLIDING, tiny.FULL), num_target_layers=len(target.layers))
    return Block(tiny.write_draft(folder / "draft", *draft), target)


def block2(target: Target, answer: list[int], folder: Path) -> Drafter:
    draft = tiny_drafts.zlab2(num_target_layers=len(target.layers))
    return Block(tiny.write_draft(folder / "draft2", *draft), target)


COSTS = Costs(rows=((1, 1.0), (32, 1.6)), drafts=((1, 0.1), (15, 0.1)))  # in which drafting pays


def composed(target: Target, answer: list[int], folder: Path) -> Drafter:
    memory = Memory()
    memory.add([*PROMPT[-4:], *shaky(answer)], owners=set())
    return Compose([memory, Lookup()], block(target, answer, folder), COSTS)


# Made for a target that is theirs, and the greedy answer, which a script may follow.
DRAFTERS: dict[str, Callable[[Target, list[int], Path], Drafter | None]] = {
    "none": lambda target, answer, folder: None,
    "lookup": lambda target, answer, folder: Lookup(),
    "DFlash": block,
    "DFlash 2": block2,
    "small model": small,
    "copies, by cost": lambda target, answer, folder: Compose([Lookup()], None, COSTS),
    "all together": composed,
    "all, of fixed width": lambda target, answer, folder: Compose(
        [Lookup()], block2(target, answer, folder), COSTS, width=5
    ),
    "mostly right": lambda target, answer, folder: Scripted(
        len(PROMPT), shaky(answer), widths(4, 1, 7)
    ),
}


@functools.cache
def plain_target(cache: str) -> Target:
    kind = CACHES[cache]
    return load(kind.model(), cache, kv_bits=kind.kv_bits)


@functools.cache
def greedy_answer(cache: str, sampling: str) -> list[int]:
    own = SAMPLINGS[sampling]
    if not own.greedy:
        own = Sampling()
    return reference.greedy(plain_target(cache), own, PROMPT, MOST, STEP)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple]:
    @functools.cache
    def made(drafter: str, cache: str, greedy_sampling: str) -> tuple[Target, Drafter | None]:
        kind = CACHES[cache]
        target = load(kind.model(), cache, kv_bits=kind.kv_bits)
        target.stop_tokens = frozenset()
        script = greedy_answer(cache, greedy_sampling)
        return target, DRAFTERS[drafter](target, script, tmp_path_factory.mktemp("draft"))

    def for_cell(drafter: str, cache: str, sampling: str) -> tuple[Target, Drafter | None]:
        scripted = drafter == "mostly right" and SAMPLINGS[sampling].greedy
        return made(drafter, cache, sampling if scripted else "greedy")

    return for_cell


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_cell(drafter: str, cache: str, sampling: str, pair: Callable[..., tuple]) -> None:
    target, made = pair(drafter, cache, sampling)
    own = SAMPLINGS[sampling]

    def answer(most: int) -> list[int]:
        return tokens_of(rounds(target, made, PROMPT, most, own, seed=7, step=STEP))

    whole = answer(MOST)
    for most in (1, 2, 7) if own.greedy else (2,):
        tokens = answer(most)
        assert len(tokens) == most
        assert not own.greedy or tokens == whole[:most]
    if own.greedy:
        assert whole == greedy_answer(cache, sampling)
    else:
        assert len(whole) == MOST
        random = np.random.default_rng(len(drafter))
        places = reference.ranks(target, own, PROMPT, whole, STEP, random)
        bound = 4 / np.sqrt(12 * MOST)
        assert abs(np.mean(places) - 0.5) < bound, "likely tokens are as frequent as they are"

    # An answer that is left half-way leaves nothing behind. (A cell's own later runs show it.)
    left = decode(target, made, PROMPT, max_tokens=MOST, sampler=Sampler(own, 1, PROMPT))
    for _ in range(5):
        next(left)
    left.close()

    # A stop token ends the answer where it comes first, be it in the middle of a draft.
    stop = next(token for token in whole[7:] if token not in whole[:7])
    target.stop_tokens = frozenset({stop})
    try:
        stopped = answer(MOST)
        assert stop not in stopped[:-1]
        assert len(stopped) == MOST or stopped[-1] == stop
        # What a draft model's tokens are drawn with depends on how many are drafted.
        if own.greedy or drafter != "all together":
            assert stopped == whole[: whole.index(stop) + 1]
    finally:
        target.stop_tokens = frozenset()
