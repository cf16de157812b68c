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
from .prefix import Prefixes
from .sampling import Draft, Sampler, first_choices
from .targets import Cache, Target

FORCED = "forced"  # the origin of tokens that a constraint leaves no choice about
CLEAR_EVERY = 256  # rounds between returning MLX's freed buffers to the system, as mlx-lm does


@dataclass(frozen=True)
class Round:
    """What one round gave: the ``tokens`` it adds to the answer, and how many it checked.

    A prefill chunk adds none, but for the last one, which gives the answer's first token.
    ``forwards`` of the target it took: one, two after a near-tie, none where nothing else could
    follow. ``origins`` name where the kept tokens came from, as far as drafters tell. ``reused``:
    prompt tokens that did not have to be read, in the first round.
    """

    tokens: list[int]
    drafted: int = 0
    prefill: bool = False
    near_tie: bool = False
    forwards: int = 1
    origins: tuple[str, ...] = ()
    reused: int = 0


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
    prefixes: Prefixes | None = None,
) -> Generator[Round, None, None]:
    """Yield a :class:`Round` after each target forward until ``max_tokens`` tokens or a stop token.

    ``prompt`` has at least one token. Exactly ``max_tokens`` come unless a stop token ends the
    answer; the stop token is the last one yielded. To stop early, close the iterator: no forward
    is made ahead of what was yielded, but for the one under way in plain greedy decoding.

    ``strict``: where the two best logits of a greedy choice lie closer than reading several tokens
    at once may move them, a forward of that token alone decides. ``prefixes``: where what was read
    before is kept.
    """
    proposer = drafter.begin(sampler.sampling, seed) if drafter else None
    margin = 2 * target.width_error if strict else None
    hit = prefixes.find(prompt) if prefixes else None
    cache = target.make_cache(hit.layers) if hit else target.make_cache()
    read = hit.length if hit else 0
    if hit and proposer:
        proposer.restore(hit.draft)
    worth = prefixes.worth(prompt, read) if prefixes else []

    def observe(features: mx.array | None) -> None:
        if proposer and features is not None:
            proposer.observe(features)

    # The last prompt token goes alone, as in mlx-lm.
    while read < len(prompt) - 1:
        end = min(read + prefill_step, len(prompt) - 1, *(at for at in worth if at > read))
        _, features = target.forward(prompt[read:end], cache, undoable=False)
        observe(features)
        mx.eval(cache.state, proposer.state if proposer else [])
        read = end
        if prefixes and read in worth:
            prefixes.put(prompt[:read], cache.layers, proposer.snapshot() if proposer else None)
        yield Round([], prefill=True)
    logits, features = target.forward(prompt[-1:], cache, undoable=False)
    observe(features)
    tokens = [*prompt, sampler.choose(logits[0, -1])]
    reused = hit.length if hit else 0
    if proposer is None and sampler.plain:
        yield from _plain(target, cache, tokens[-1], max_tokens, reused)
        return
    yield Round(tokens[-1:], prefill=True, reused=reused)

    end = len(prompt) + max_tokens
    rounds = 0
    while len(tokens) < end and tokens[-1] not in target.stop_tokens:
        forced = sampler.forced(end - len(tokens))
        if forced and (forced[-1] in target.stop_tokens or len(tokens) + len(forced) == end):
            sampler.take(forced)  # the answer ends with what had to come
            yield Round(forced, forwards=0, origins=(FORCED,) * len(forced))
            return
        room = end - len(tokens) - len(forced) - 1
        draft = Draft()
        if proposer and room:
            draft = proposer.propose([*tokens, *forced], room, len(forced))
        draft = sampler.permitted(draft.behind(forced, FORCED))
        logits, features = target.forward([tokens[-1], *draft.tokens], cache)
        kept, following = sampler.verify(draft, logits[0], margin)
        decided = following is not None
        rows = kept + decided  # of the forward, that stay in the cache
        cache.roll_back(len(draft.tokens) + 1 - rows)
        if rows:
            observe(None if features is None else features[:, :rows])
        if proposer and room:
            proposer.judge(kept - len(forced), len(draft.tokens) - len(forced))
        new = draft.tokens[:kept]
        if following is None:
            logits, features = target.forward([*tokens, *new][-1:], cache)
            following = sampler.choose(logits[0, -1])
            observe(features)
        new = _until_stop([*new, following], target.stop_tokens)
        tokens += new
        yield Round(
            new,
            drafted=len(draft.tokens),
            near_tie=not decided,
            forwards=2 - decided,
            origins=draft.origins[: min(kept, len(new))],
        )
        rounds += 1
        if rounds % CLEAR_EVERY == 0:
            mx.clear_cache()


def _until_stop(tokens: list[int], stop_tokens: frozenset[int]) -> list[int]:
    stop = next((i for i, token in enumerate(tokens) if token in stop_tokens), len(tokens))
    return tokens[: stop + 1]


def _plain(
    target: Target, cache: Cache, first: int, count: int, reused: int
) -> Generator[Round, None, None]:
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
            yield Round([token], prefill=n == 0, reused=0 if n else reused)
            if token in target.stop_tokens:
                return
            chosen = following
            if n and n % CLEAR_EVERY == 0:
                mx.clear_cache()
    finally:
        mx.eval(following)  # MLX aborts a process that ends with a forward still queued
