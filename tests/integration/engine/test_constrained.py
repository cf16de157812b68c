"""Constraints inside verify, and prefixes inside the loop, with every drafter: the same answer as
without drafts and without anything kept.
"""

import random
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
import tiny
import tiny_drafts

from dflash_engine.constrain import Choice, Constraint, masked
from dflash_engine.decode import FORCED, Round, decode
from dflash_engine.drafters import Drafter
from dflash_engine.drafters.block import Block
from dflash_engine.drafters.compose import Compose
from dflash_engine.drafters.lookup import Lookup
from dflash_engine.drafters.memory import Memory
from dflash_engine.prefix import Prefixes
from dflash_engine.quote import Quote, Sentence, joined
from dflash_engine.sampling import Sampler, Sampling
from dflash_engine.targets import Target, load
from dflash_engine.width import Costs

COSTS = Costs(rows=((1, 1.0), (32, 1.6)), drafts=((1, 0.1), (15, 0.1)))
KINDS = ("qwen3", "gpt_oss", "qwen3_5", "lfm2")
SENTENCES = [
    Sentence("The shop is open from nine to five.", "hours"),
    Sentence("The shop is closed on Mondays.", "hours"),
    Sentence("It rains.", "weather"),
    Sentence("It rains. It pours.", "song", prior=0.5),
    Sentence("退貨期限為七天。", "returns", prior=-1.0),
    Sentence("退貨期限為七天。運費自付。", "returns"),
]


def drafters(target: Target, folder: Path) -> dict[str, Drafter | None]:
    draft = tiny_drafts.zlab((tiny.SLIDING, tiny.FULL), num_target_layers=len(target.layers))
    block = Block(tiny.write_draft(folder, *draft), target)
    memory = Memory()
    memory.add(list(b"The shop is open from nine to six."), owners=set())
    return {
        "none": None,
        "lookup": Lookup(),
        "block": block,
        "composed": Compose([memory, Lookup()], block, COSTS),
    }


@pytest.fixture(scope="module", params=KINDS)
def made(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Target, dict[str, Drafter | None]]:
    target = load(tiny.model(request.param), request.param)
    return target, drafters(target, tmp_path_factory.mktemp("drafts") / "draft")


def quote(target: Target) -> Quote:
    tokenizer = target.tokenizer
    return Quote(
        SENTENCES,
        lambda text: tokenizer.encode(text, add_special_tokens=False),
        tokenizer.decode,
        target.stop_tokens,
    )


def answer(
    target: Target,
    drafter: Drafter | None,
    prompt: list[int],
    constraint: Constraint | None,
    sampling: Sampling | None = None,
    most: int = 150,
    prefixes: Prefixes | None = None,
) -> tuple[list[int], list[Round]]:
    sampler = Sampler(sampling or Sampling(), 3, prompt, constraint)
    rounds = list(
        decode(
            target,
            drafter,
            prompt,
            max_tokens=most,
            sampler=sampler,
            seed=3,
            prefill_step=32,
            prefixes=prefixes,
        )
    )
    return [token for step in rounds for token in step.tokens], rounds


def one_at_a_time(
    target: Target, prompt: list[int], constraint: Constraint, sampling: Sampling, most: int
) -> list[int]:
    """Constrained plain decoding, written once more."""
    cache = target.make_cache()
    logits, _ = target.forward(prompt, cache)
    tokens: list[int] = []
    while len(tokens) < most:
        scores = np.array(logits[0, -1].astype(mx.float32), np.float64)
        for token, bias in sampling.logit_bias.items():
            scores[token] += bias
        for token in set(tokens):
            scores[token] -= sampling.frequency_penalty * tokens.count(token)
        tokens.append(int(masked(scores, constraint).argmax()))
        if tokens[-1] in target.stop_tokens:
            break
        constraint.advance(tokens[-1])
        logits, _ = target.forward(tokens[-1:], cache)
    return tokens


@pytest.mark.parametrize("drafter", ["none", "lookup", "block", "composed"])
def test_quotes_are_what_constrained_plain_decoding_writes(
    made: tuple[Target, dict[str, Drafter | None]], drafter: str
) -> None:
    target, all_of_them = made
    for question, sampling in (
        ("When is the shop open? The shop is open", Sampling()),
        ("It rains", Sampling(logit_bias={84: -3.0}, frequency_penalty=0.4)),
        ("退貨", Sampling()),
    ):
        prompt = target.tokenizer.encode(question)
        constraint = quote(target)
        tokens, rounds = answer(target, all_of_them[drafter], prompt, constraint, sampling)
        assert tokens == one_at_a_time(target, prompt, quote(target), sampling, 150)
        assert tokens[-1] in target.stop_tokens
        text = target.tokenizer.decode(tokens[:-1])
        assert text == joined([sentence.text for sentence in constraint.chosen])
        origins = [origin for step in rounds for origin in step.origins]
        assert origins.count(FORCED) > len(tokens) / 3, "where nothing else may follow"
        forwards = sum(step.forwards for step in rounds if not step.prefill)
        assert forwards < len(tokens) / 2


@pytest.mark.parametrize("drafter", ["none", "lookup", "block", "composed"])
def test_drawn_quotes_are_whole_sentences(
    made: tuple[Target, dict[str, Drafter | None]], drafter: str
) -> None:
    target, all_of_them = made
    prompt = target.tokenizer.encode("What do you say?")
    seen = set()
    for _ in range(12):
        constraint = quote(target)
        sampler = Sampler(Sampling(3.0), random.randrange(10**6), prompt, constraint)
        steps = decode(target, all_of_them[drafter], prompt, max_tokens=200, sampler=sampler)
        tokens = [token for step in steps for token in step.tokens]
        text = target.tokenizer.decode(tokens[:-1])
        assert text == joined([sentence.text for sentence in constraint.chosen])
        seen.add(text)
    assert len(seen) > 3


def test_max_tokens_cuts_a_forced_run_to_the_token(
    made: tuple[Target, dict[str, Drafter | None]],
) -> None:
    target, all_of_them = made
    prompt = target.tokenizer.encode("Yes or no?")
    options = [list(b"yes, of course"), list(b"no")]
    for drafter in all_of_them.values():
        whole, _ = answer(target, drafter, prompt, Choice(options, target.stop_tokens))
        assert whole[:-1] in options
        for most in range(1, len(whole)):
            constraint = Choice(options, target.stop_tokens)
            tokens, _ = answer(target, drafter, prompt, constraint, most=most)
            assert tokens == whole[:most]


@pytest.mark.parametrize("drafter", ["none", "lookup", "block", "composed"])
def test_prefixes_change_no_answer(
    made: tuple[Target, dict[str, Drafter | None]],
    drafter: str,
    tmp_path: Path,
) -> None:
    target, all_of_them = made
    shared = "A long prompt that many questions begin with, and that is read once only. " * 2
    prompts = [target.tokenizer.encode(shared + q) for q in ("Who? ", "Where to? ", "What for? ")]
    prompts.append(prompts[0])

    def all_answers(prefixes: Prefixes | None) -> tuple[list[list[int]], list[int]]:
        runs = [
            answer(target, all_of_them[drafter], p, None, most=30, prefixes=prefixes)
            for p in prompts
        ]
        reused = [sum(step.reused for step in rounds) for _, rounds in runs]
        return [tokens for tokens, _ in runs], reused

    cold, none = all_answers(None)
    assert none == [0] * 4

    def made_prefixes() -> Prefixes:
        return Prefixes("key", memory_bytes=2**28, folder=tmp_path, disk_bytes=2**28, least=8)

    prefixes = made_prefixes()
    warm, reused = all_answers(prefixes)
    assert warm == cold
    assert reused[0] == 0
    assert reused[2] >= len(shared) - 2, "at the latest the third knows where they part"
    assert reused[3] == len(prompts[0]) - 1
    prefixes.close()
    again = made_prefixes()
    restarted, reused = all_answers(again)
    again.close()
    assert restarted == cold
    assert reused[0] >= len(shared) - 2, "from disk"


def test_a_draft_takes_its_context_from_a_prefix(
    made: tuple[Target, dict[str, Drafter | None]],
) -> None:
    target, all_of_them = made
    block = all_of_them["block"]
    assert isinstance(block, Block)
    prompt = target.tokenizer.encode("The quick brown fox jumps over the lazy dog. " * 3)
    prefixes = Prefixes("key", memory_bytes=2**28, least=8)
    cold, cold_rounds = answer(target, block, prompt, None, most=20, prefixes=prefixes)
    warm, warm_rounds = answer(target, block, prompt, None, most=20, prefixes=prefixes)
    assert warm == cold
    assert [step.tokens for step in warm_rounds if step.drafted] == [
        step.tokens for step in cold_rounds if step.drafted
    ], "it proposes what it proposed with all it saw"
