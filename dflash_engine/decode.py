"""The loop: draft, verify, accept. Everything else in this package serves it.

At the start of a round the last token, the *anchor*, is chosen but not yet in the target's cache.
The drafter proposes n tokens to follow it; one target forward over [anchor, d1 .. dn] gives the
target's own view after each; the drafted tokens that agree are kept, the target's token after them
is the next anchor, and the cache forgets the rows of those refused.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import cast

import mlx.core as mx

from .drafters import Drafter
from .sampling import Draft, Sampler, first_choices
from .targets import Cache, Target

CLEAR_EVERY = 256  # rounds between returning MLX's freed buffers to the system, as mlx-lm does


@dataclass(frozen=True)
class Round:
    """What one target forward gave: the ``tokens`` it adds to the answer, and how many it checked.

    A prefill chunk adds none, but for the last one, which gives the answer's first token. After a
    ``near_tie`` the round's last token was decided by a forward of its own.
    """

    tokens: list[int]
    drafted: int = 0
    prefill: bool = False
    near_tie: bool = False


def decode(
    target: Target,
    drafter: Drafter | None,
    prompt: Sequence[int],
    *,
    max_tokens: int,
    sampler: Sampler,
    seed: int | None = None,
    prefill_step: int = 512,
    strict: bool = False,
) -> Generator[Round, None, None]:
    """Yield a :class:`Round` after each target forward until ``max_tokens`` tokens or a stop token.

    ``prompt`` has at least one token. Exactly ``max_tokens`` come unless a stop token ends the
    answer; the stop token is the last one yielded. To stop early, close the iterator: no forward
    is made ahead of what was yielded, but for the one under way in plain greedy decoding.

    ``strict``: where the two best logits of a greedy choice lie closer than reading several tokens
    at once may move them, a forward of that token alone decides.
    """
    cache = target.make_cache()
    proposer = drafter.begin(sampler.sampling, seed) if drafter else None
    margin = 2 * target.width_error if strict else None

    def prefill(tokens: Sequence[int]) -> mx.array:
        logits, features = target.forward(tokens, cache, undoable=False)
        if proposer and features is not None:
            proposer.observe(features)
        return logits[0, -1]

    # The last prompt token goes alone, as in mlx-lm.
    for start in range(0, len(prompt) - 1, prefill_step):
        prefill(prompt[start : min(start + prefill_step, len(prompt) - 1)])
        mx.eval(cache.state, proposer.state if proposer else [])
        yield Round([], prefill=True)
    tokens = [*prompt, sampler.choose(prefill(prompt[-1:]))]
    if proposer is None and sampler.sampling.greedy and sampler.sampling.plain:
        yield from _plain(target, cache, tokens[-1], max_tokens)
        return
    yield Round(tokens[-1:], prefill=True)

    end = len(prompt) + max_tokens
    rounds = 0
    while len(tokens) < end and tokens[-1] not in target.stop_tokens:
        room = end - len(tokens) - 1
        draft = proposer.propose(tokens, room) if proposer and room else Draft()
        logits, features = target.forward([tokens[-1], *draft.tokens], cache)
        kept, following = sampler.verify(draft, logits[0], margin)
        decided = following is not None
        rows = kept + decided  # of the forward, that stay in the cache
        cache.roll_back(len(draft.tokens) + 1 - rows)
        if proposer and features is not None and rows:
            proposer.observe(features[:, :rows])
        new = draft.tokens[:kept]
        if following is None:
            logits, features = target.forward([*tokens, *new][-1:], cache)
            following = sampler.choose(logits[0, -1])
            if proposer and features is not None:
                proposer.observe(features)
        new = _until_stop([*new, following], target.stop_tokens)
        tokens += new
        yield Round(new, drafted=len(draft.tokens), near_tie=not decided)
        rounds += 1
        if rounds % CLEAR_EVERY == 0:
            mx.clear_cache()


def _until_stop(tokens: list[int], stop_tokens: frozenset[int]) -> list[int]:
    stop = next((i for i, token in enumerate(tokens) if token in stop_tokens), len(tokens))
    return tokens[: stop + 1]


def _plain(target: Target, cache: Cache, first: int, count: int) -> Generator[Round, None, None]:
    # One token a forward. The next forward is queued before this one's token is read, so that
    # building it costs no time.
    def step(token: mx.array) -> mx.array:
        logits, _ = target.forward(token, cache, undoable=False)
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
