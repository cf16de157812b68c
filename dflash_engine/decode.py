"""The loop: draft, verify, accept. Everything else in this package serves it.

At the start of a round the last token, the *anchor*, is chosen but not yet in the target's cache.
The drafter proposes n tokens to follow it; one target forward over [anchor, d1 .. dn] gives the
target's own view after each; the drafted tokens that agree are kept, the target's token after them
is the next anchor, and the cache forgets the rows of those refused.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx

from .drafters import Drafter
from .sampling import Draft, Sampler, first_choices
from .targets import Target

CLEAR_EVERY = 256  # rounds between returning MLX's freed buffers to the system, as mlx-lm does


@dataclass(frozen=True)
class Round:
    """What one target forward gave: the ``tokens`` it adds to the answer, and how many it checked.

    A prefill chunk adds none, but for the last one, which gives the answer's first token.
    """

    tokens: list[int]
    drafted: int = 0
    prefill: bool = False


def decode(
    target: Target,
    drafter: Drafter | None,
    prompt: Sequence[int],
    *,
    max_tokens: int,
    sampler: Sampler,
    seed: int | None = None,
    prefill_step: int = 512,
) -> Generator[Round, None, None]:
    """Yield a :class:`Round` after each target forward until ``max_tokens`` tokens or a stop token.

    ``prompt`` has at least one token. Exactly ``max_tokens`` come unless a stop token ends the
    answer; the stop token is the last one yielded. To stop early, close the iterator: no forward
    is made ahead of what was yielded, but for the one under way in plain greedy decoding.
    """
    cache = target.make_cache()
    features: list[mx.array] = []

    def forward(tokens: Sequence[int]) -> mx.array:
        logits, tapped = target.forward(mx.array(list(tokens)), cache)
        if tapped is not None:
            features.append(tapped)
        return logits[0]

    # Prefill in chunks; the last prompt token goes alone, as in mlx-lm.
    for start in range(0, len(prompt) - 1, prefill_step):
        forward(prompt[start : min(start + prefill_step, len(prompt) - 1)])
        mx.eval([layer.state for layer in cache], features)
        yield Round([], prefill=True)
    tokens = [*prompt, sampler.choose(forward(prompt[-1:])[-1])]
    end = len(prompt) + max_tokens
    if drafter is None and sampler.sampling.greedy:
        yield from _plain(target, cache, tokens[-1], max_tokens)
        return
    yield Round(tokens[-1:], prefill=True)
    if tokens[-1] in target.stop_tokens:
        return

    proposer = drafter.begin(sampler.sampling, seed) if drafter else None
    rounds = 0
    while len(tokens) < end:
        room = end - len(tokens) - 1
        draft = Draft()
        if proposer and room:
            committed = mx.concatenate(features, axis=1) if features else None
            draft = proposer.propose(tokens, committed, room)
        features.clear()
        logits = forward([tokens[-1], *draft.tokens])
        kept, following = sampler.verify(draft, logits)
        target.roll_back(cache, len(draft.tokens) - kept)
        if features:
            features[0] = features[0][:, : kept + 1]

        new = [*draft.tokens[:kept], following]
        stop = next((i for i, token in enumerate(new) if token in target.stop_tokens), None)
        if stop is not None:
            new = new[: stop + 1]
        tokens += new
        yield Round(new, drafted=len(draft.tokens))
        if stop is not None:
            return
        rounds += 1
        if rounds % CLEAR_EVERY == 0:
            mx.clear_cache()


def _plain(
    target: Target, cache: list[Any], first: int, count: int
) -> Generator[Round, None, None]:
    # One token a forward. The next forward is queued before this one's token is read, so that
    # building it costs no time.
    def step(token: mx.array) -> mx.array:
        logits, _ = target.forward(token, cache)
        chosen = first_choices(logits[0, -1:])
        mx.async_eval(chosen)
        return chosen

    chosen = following = mx.array([first])
    try:
        for n in range(count):
            if n + 1 < count and first not in target.stop_tokens:
                following = step(chosen)
            token = int(cast(int, chosen.item()))
            yield Round([token], prefill=n == 0)
            if token in target.stop_tokens:
                return
            chosen = following
            if n and n % CLEAR_EVERY == 0:
                mx.clear_cache()
    finally:
        mx.eval(following)  # MLX aborts a process that ends with a forward still queued
