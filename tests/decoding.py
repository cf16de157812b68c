"""What the tests of decoding share: mlx-lm's own tokens, the loop run to its end, and drafters that
follow a script.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import tiny
from mlx_lm.generate import generate_step

from dflash_engine.decode import Round, decode
from dflash_engine.drafters import Drafter
from dflash_engine.drafters.protocol import TokensOnly
from dflash_engine.sampling import Draft, Sampler, Sampling
from dflash_engine.targets import Target

STEP = 8  # prompt tokens a forward, here and in mlx-lm
LONG = 30  # longer than any prompt's rest: no draft is cut by it


def truth(target: Target, prompt: Sequence[int], most: int, step: int = STEP) -> list[int]:
    """mlx-lm's own greedy tokens, past the end token."""
    steps = generate_step(mx.array(prompt), target.model, max_tokens=most, prefill_step_size=step)
    return [int(token) for token, _ in steps]


def cut(tokens: list[int], most: int) -> list[int]:
    """At most ``most`` of ``tokens``, and none past an end token."""
    tokens = tokens[:most]
    return tokens[: tokens.index(tiny.END) + 1] if tiny.END in tokens else tokens


def rounds(
    target: Target,
    drafter: Drafter | None,
    prompt: Sequence[int],
    most: int,
    sampling: Sampling | None = None,
    seed: int | None = None,
    step: int = STEP,
) -> list[Round]:
    """All rounds of one request; greedy unless told otherwise."""
    sampling = sampling or Sampling()
    return list(
        decode(
            target,
            drafter,
            prompt,
            max_tokens=most,
            sampler=Sampler(sampling, seed, prompt),
            seed=seed,
            prefill_step=step,
        )
    )


def tokens_of(rounds: Sequence[Round]) -> list[int]:
    """The answer that ``rounds`` add up to."""
    return [token for step in rounds for token in step.tokens]


@dataclass
class Scripted(TokensOnly):
    """Drafts what ``script`` says, which starts at the first token of the answer.

    ``prompt`` is the prompt's length; ``width`` the tokens drafted a round, or a function that
    gives them. With ``taps`` it checks that each position but the anchor's is observed once, in
    order, and keeps what it observed.
    """

    prompt: int
    script: Sequence[int]
    width: int | Callable[[], int] = 5
    taps: tuple[int, ...] = ()
    name: str = "scripted"
    seen: list[mx.array] = field(default_factory=list)

    def begin(self, sampling: Sampling, seed: int | None) -> "Scripted":
        """The same object: for one request."""
        return self

    def observe(self, features: mx.array) -> None:
        """Keep the features."""
        assert self.taps, "an untapped drafter was given features"
        self.seen.append(features)

    def propose(self, tokens: list[int], most: int, given: int = 0) -> Draft:
        """The script's next tokens."""
        if self.taps:
            known = sum(features.shape[1] for features in self.seen)
            assert known == len(tokens) - 1, "one row for each token but the anchor"
        done = len(tokens) - self.prompt
        width = self.width if isinstance(self.width, int) else self.width()
        return Draft(list(self.script[done : done + min(width, most)]))


def widths(seed: int, least: int = 1, most: int = 15) -> Callable[[], int]:
    """Another number of drafted tokens each round."""
    return lambda generator=random.Random(seed): generator.randint(least, most)  # type: ignore[misc]


def wrong(answer: Sequence[int]) -> list[int]:
    """A script that is wrong at every place."""
    return [(token + 1) % 256 for token in answer]


def shaky(answer: Sequence[int], share: float = 0.75, seed: int = 0) -> list[int]:
    """A script that is right at ``share`` of the places."""
    generator = random.Random(seed)
    return [token if generator.random() < share else (token + 1) % 256 for token in answer]
