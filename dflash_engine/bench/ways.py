"""Ways to answer a prompt that are compared, on one target in this process: mlx-lm's own and this
engine's. Other engines answer in processes of their own: :mod:`dflash_engine.bench.peers`.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm import stream_generate

from ..constrain import Constraint, masked
from ..decode import decode
from ..drafters import Drafter
from ..drafters.protocol import TokensOnly
from ..prefix import Prefixes
from ..sampling import Draft, Sampler, Sampling
from ..targets import Target
from .answer import Answer

PREFILL_STEP = 512
Way = Callable[[Sequence[int], int], Answer]  # prompt, most tokens


def mlx_lm(
    target: Target,
    prompt: Sequence[int],
    most: int,
    *,
    draft: Any = None,
    constraint: Constraint | None = None,
) -> Answer:
    """mlx-lm's own generation, greedy; with the mlx-lm model ``draft``, its speculative decoding.

    A ``constraint`` is kept by a logits processor, token by token.
    """
    # On the stream that this engine uses: on CPU another one has threads of its own, and idle ones
    # slow down all others.
    stream = mx.default_stream(mx.default_device())
    options: dict[str, Any] = {"prefill_step_size": PREFILL_STEP, "stream": stream}
    if draft is not None:
        options["draft_model"] = draft
    if constraint:
        options["logits_processors"] = [_Allowed(constraint)]
    mx.reset_peak_memory()
    started = time.perf_counter()
    first = 0.0
    tokens: list[int] = []
    drafted = 0
    for response in stream_generate(
        target.model, target.tokenizer, list(prompt), max_tokens=most, **options
    ):
        first = first or time.perf_counter() - started
        tokens.append(int(response.token))
        drafted += response.from_draft
    total = time.perf_counter() - started
    kept = {"small": drafted} if draft is not None else {}
    return Answer(tokens, first, total, len(tokens) - 1 - drafted, kept, peak=mx.get_peak_memory())


class _Allowed:
    """Tells mlx-lm what may follow. It is asked before each choice, with the tokens since the last
    chunk of the prompt.
    """

    def __init__(self, constraint: Constraint) -> None:
        self._constraint = constraint
        self._read: int | None = None

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        if self._read is not None:
            for token in np.asarray(tokens[self._read :]).tolist():
                self._constraint.advance(int(token))
        self._read = len(tokens)
        scores = np.asarray(logits.astype(mx.float32)).astype(np.float64)
        return mx.array(masked(scores[0], self._constraint).astype(np.float32))[None]


def ours(
    target: Target,
    drafter: Drafter | None,
    prompt: Sequence[int],
    most: int,
    *,
    constraint: Constraint | None = None,
    prefixes: Prefixes | None = None,
) -> Answer:
    """This engine's loop, greedy, with ``drafter``."""
    mx.reset_peak_memory()
    started = time.perf_counter()
    first = 0.0
    tokens: list[int] = []
    widths: list[int] = []
    rounds = 0
    kept = Counter[str]()
    sampler = Sampler(Sampling(), None, list(prompt), constraint)
    for step in decode(
        target,
        drafter,
        prompt,
        max_tokens=most,
        sampler=sampler,
        prefill_step=PREFILL_STEP,
        prefixes=prefixes,
    ):
        if step.tokens:
            first = first or time.perf_counter() - started
        if not step.prefill:
            rounds += step.forwards
            widths.append(step.drafted)
            kept.update(step.origins)
        tokens += step.tokens
    total = time.perf_counter() - started
    return Answer(tokens, first, total, rounds, dict(kept), widths, mx.get_peak_memory())


class Wrong(TokensOnly):
    """A draft model whose tokens come at random, so that none is kept: what speculation costs where
    it cannot win.
    """

    name = "wrong"
    taps: tuple[int, ...] = ()
    most = 15

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def begin(self, sampling: Sampling, seed: int | None) -> "Wrong":
        """It has no state of its own."""
        return self

    def propose(self, tokens: list[int], most: int, given: int = 0) -> Draft:
        """As many tokens as asked for."""
        random = np.random.default_rng(len(tokens))
        return Draft(random.integers(self._vocab_size, size=min(most, self.most)).tolist())
