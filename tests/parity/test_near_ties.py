"""``strict``: what reading several tokens at once could turn round is decided one at a time."""

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import pytest
import tiny
from mlx_lm.generate import generate_step

from dflash_engine.decode import Round, decode
from dflash_engine.drafters.protocol import TokensOnly
from dflash_engine.sampling import Draft, Sampler, Sampling
from dflash_engine.targets import Target, load

TARGETS = {
    "plain": tiny.qwen3,
    "rotating": tiny.windowed,
    "recurrent": lambda: tiny.model("qwen3_5"),
}


@dataclass
class Script(TokensOnly):
    """Drafts the target's own answer, every third token wrong, and checks what it observes."""

    prompt: int
    answer: list[int]
    taps: tuple[int, ...] = (1,)
    name: str = "script"
    observed: int = 0

    def begin(self, sampling: Sampling, seed: int | None) -> "Script":
        return self

    def observe(self, features: mx.array) -> None:
        self.observed += features.shape[1]

    def propose(self, tokens: list[int], most: int, given: int = 0) -> Draft:
        assert self.observed == len(tokens) - 1, "each position but the anchor's, once"
        done = len(tokens) - self.prompt
        script = [t if i % 3 else (t + 1) % 256 for i, t in enumerate(self.answer)]
        return Draft(script[done : done + min(5, most)])


def answer(target: Target, prompt: list[int], strict: bool) -> tuple[list[int], list[Round]]:
    truth = generate_step(mx.array(prompt), target.model, max_tokens=80, prefill_step_size=512)
    drafter = Script(len(prompt), [int(token) for token, _ in truth])
    rounds = list(
        decode(
            target,
            drafter,
            prompt,
            max_tokens=80,
            sampler=Sampler(Sampling()),
            strict=strict,
        )
    )
    tokens = [token for step in rounds for token in step.tokens]
    end = drafter.answer
    stop = next((i for i, token in enumerate(end) if token in target.stop_tokens), len(end))
    assert tokens == end[: stop + 1]
    return tokens, rounds


@pytest.mark.parametrize("kind", TARGETS)
@pytest.mark.parametrize("share", [0.0, 0.2, 1e6], ids=["none", "some", "all"])
def test_near_ties_are_decided_alone_and_nothing_else_changes(kind: str, share: float) -> None:
    target = load(TARGETS[kind](), kind)
    target.tap([1])
    prompt = target.tokenizer.encode("The quick brown fox jumps over the lazy dog")
    spread = float(mx.std(target.forward(prompt, target.make_cache())[0]))
    target.width_error = share * spread
    tokens, rounds = answer(target, prompt, strict=True)
    checked = [step for step in rounds if step.drafted]
    near = [step for step in checked if step.near_tie]
    assert checked
    if share == 0:
        assert not near
    elif share > 1:
        assert near == checked
        assert all(len(step.tokens) == 1 for step in checked), "the first row is a near-tie"
    else:
        assert 0 < len(near) < len(checked)
    assert not any(step.near_tie for step in answer(target, prompt, strict=False)[1])
    assert sum(len(step.tokens) for step in rounds) == len(tokens)


def test_what_counts_as_near() -> None:
    rows = mx.array([[0.0, 1.0, 3.0], [2.0, 2.5, 0.0], [5.0, 0.0, 1.0]])
    for sampling in (Sampling(), Sampling(logit_bias={0: 0.0}), Sampling(frequency_penalty=1e-9)):
        sampler = Sampler(sampling)
        assert sampler.verify(Draft([2, 1]), rows, 0.4) == (2, 0)
        assert sampler.verify(Draft([2, 1]), rows, 0.5) == (1, None), "the second row"
        assert sampler.verify(Draft([1, 1]), rows, 0.5) == (0, 2), "a refusal before it stands"
        assert sampler.verify(Draft([2, 1]), rows, 2.0) == (0, None)
        assert sampler.verify(Draft([2]), rows[:2], 0.5) == (1, None), "the row after the draft"
        assert sampler.verify(Draft(), rows[1:2], 9.0) == (0, 1), "one row is what decides"
        assert sampler.verify(Draft([2, 1]), rows) == (2, 0)


def test_a_drawn_token_is_never_a_near_tie() -> None:
    rows = mx.array(np.zeros((2, 4), np.float32))
    kept, following = Sampler(Sampling(1.0), 3).verify(Draft([1]), rows, 9.0)
    assert kept in (0, 1)
    assert following is not None
