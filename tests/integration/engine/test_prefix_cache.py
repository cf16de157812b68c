"""A request that starts from a kept prefix answers what it would answer from the start."""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import mlx.core as mx
import pytest
import tiny
from mlx.utils import tree_flatten

from dflash_engine.prefix import Hit, Prefixes
from dflash_engine.targets import Cache, Target, load

STEP = 16
ANSWER = 18  # tokens, more than the window of the tiny models
TOLERANCE = 1e-5

# How many tokens are served of the second and third prompt, which part from the first after 60.
KINDS = {
    "growing": (tiny.llama, None, [60, 60]),
    "growing, in 8 bits": (lambda: tiny.heads(64), 8, [60, 60]),
    "pairs of growing": (lambda: tiny.model("deepseek_v32"), None, [60, 60]),
    "sliding": (tiny.windowed, None, [0, 60]),
    "sliding, shared between layers": (lambda: tiny.model("gemma3n"), None, [0, 60]),
    "delta nets": (lambda: tiny.model("qwen3_5"), None, [0, 60]),
    "convolutions": (lambda: tiny.model("lfm2"), None, [0, 60]),
    "pairs with a recurrent one": (lambda: tiny.model("falcon_h1"), None, [0, 60]),
}


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> tuple[Target, list[int]]:
    folder, kv_bits, served = KINDS[request.param]
    return load(folder(), request.param, kv_bits=kv_bits), served


@pytest.fixture
def store() -> Prefixes:
    return prefixes()


def prefixes(folder: Path | None = None) -> Prefixes:
    return Prefixes(
        "tiny",
        memory_bytes=2**24,
        folder=folder,
        disk_bytes=2**24,
        least=4,
        spare=lambda: 2**40,
    )


def text(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(256), k=count)


def prompts() -> Iterator[list[int]]:
    for seed in range(3):
        yield [*text(99, 60), *text(seed, 10 + 3 * seed)]


def cache_of(target: Target, hit: Hit | None) -> Cache:
    cache = target.make_cache()
    return Cache(hit.layers, cache._recorder) if hit else cache


def read(target: Target, cache: Cache, tokens: Sequence[int]) -> None:
    for start in range(0, len(tokens), STEP):
        target.forward(tokens[start : start + STEP], cache, undoable=False)
        mx.eval(cache.state)


def answer(target: Target, cache: Cache, last: int) -> tuple[mx.array, list[int]]:
    """The logits after ``last``, and a greedy answer, in forwards of one row and of four in turn,
    three of which are taken back.
    """
    first, tokens = None, [last]
    for n in range(ANSWER):
        wrong = [(tokens[-1] + 7 * i) % 256 for i in range(3)] if n % 2 else []
        logits, _ = target.forward([tokens[-1], *wrong], cache)
        cache.roll_back(len(wrong))
        first = logits[0, 0] if first is None else first
        tokens.append(int(mx.argmax(logits[0, 0]).item()))
    assert first is not None
    return first, tokens[1:]


def ask(
    target: Target, store: Prefixes | None, prompt: Sequence[int]
) -> tuple[int, mx.array, list[int]]:
    """How many tokens were served, the first logits and the answer; as the loop does it."""
    hit = store.find(prompt) if store else None
    cache, done = cache_of(target, hit), hit.length if hit else 0
    served = done
    for stop in store.worth(prompt, done) if store else []:
        read(target, cache, prompt[done:stop])
        done = stop
        assert store is not None
        store.put(prompt[:stop], cache.layers)
    read(target, cache, prompt[done:-1])
    logits, tokens = answer(target, cache, prompt[-1])
    if store:  # for the next turn of the conversation
        store.put([*prompt, *tokens[:-1]], cache.layers)
    return served, logits, tokens


def same(one: mx.array, other: mx.array) -> bool:
    return bool(mx.allclose(one, other, rtol=0, atol=TOLERANCE * float(mx.abs(other).max())))


def test_a_hit_answers_as_a_cold_run_does(kind: tuple[Target, list[int]], store: Prefixes) -> None:
    target, served = kind
    for prompt, expected in zip(prompts(), [0, *served], strict=True):
        _, cold, tokens = ask(target, None, prompt)
        length, logits, own = ask(target, store, prompt)
        assert length == expected
        assert same(logits, cold)
        assert own == tokens

        # Again, from what the first time left; and with the answer as a part of the prompt.
        length, logits, own = ask(target, store, prompt)
        assert length >= 60
        assert same(logits, cold)
        assert own == tokens
        further = [*prompt, *tokens, *text(5, 8)]
        _, cold, tokens = ask(target, None, further)
        length, logits, own = ask(target, store, further)
        assert length == len(prompt) + ANSWER - 1
        assert same(logits, cold)
        assert own == tokens


def test_a_hit_from_disk_answers_as_a_cold_run_does(
    kind: tuple[Target, list[int]], tmp_path: Path
) -> None:
    target, served = kind
    asked = list(prompts())
    for prompt in asked[:2]:
        store = prefixes(tmp_path)
        ask(target, store, prompt)
        store.close()
    store = prefixes(tmp_path)
    _, cold, tokens = ask(target, None, asked[2])
    length, logits, own = ask(target, store, asked[2])
    store.close()
    assert length == served[1]
    assert same(logits, cold)
    assert own == tokens


def test_requests_do_not_change_what_they_were_served(
    kind: tuple[Target, list[int]], store: Prefixes
) -> None:
    target, _ = kind
    prompt = next(prompts())
    ask(target, store, prompt)

    def served() -> list[mx.array]:
        hit = store.find(prompt)
        assert hit is not None
        cache = cache_of(target, hit)
        return [array for _, array in tree_flatten(cache.state) if isinstance(array, mx.array)]

    before = served()
    held = [mx.array(array.tolist(), dtype=array.dtype) for array in before]
    for seed in range(3):
        ask(target, store, [*prompt[:-1], *text(seed, 5)])
    for now, then in zip(served(), held, strict=True):
        assert mx.array_equal(now, then).item()
    for now, then in zip(before, held, strict=True):
        assert mx.array_equal(now, then).item()
