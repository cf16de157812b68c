"""Answers to many prompts at once are those to each alone, and a file of them can be resumed."""

import functools
import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny
from decoding import cut, truth

from dflash_engine.decode import decode
from dflash_engine.errors import PromptTooLongError
from dflash_engine.sampling import Sampler, Sampling
from dflash_engine.targets import Target, load
from dflash_engine.targets.hook import hook
from dflash_engine.training import generate
from dflash_engine.training.generate import answers, cannot_batch, make_sequences, prompt_id
from dflash_engine.training.sequences import SequenceFile

MOST = 30
# Each way of keeping a context.
FAMILIES = (
    "falcon_h1",
    "gemma3_text",
    "gemma4",
    "gpt_oss",
    "granite",
    "lfm2",
    "mistral",
    "qwen3",
    "qwen3_5",
    "qwen3_moe",
)


@functools.cache
def target_of(kind: str) -> Target:
    return load(tiny.model(kind), kind)


@pytest.fixture(scope="module")
def llama() -> Target:
    return load(tiny.llama(), "llama")


def some_prompts(count: int, longest: int = 60) -> list[list[int]]:
    generator = random.Random(count)
    lengths = [generator.randint(1, longest) for _ in range(count)]
    return [[generator.randrange(256) for _ in range(length)] for length in lengths]


def alone(target: Target, prompt: list[int], most: int = MOST) -> list[int]:
    return cut(truth(target, prompt, most), most)


@pytest.mark.parametrize("kind", FAMILIES)
def test_greedy_answers_are_those_to_each_prompt_alone(kind: str) -> None:
    target = target_of(kind)
    prompts = some_prompts(9)  # one more than mlx-lm begins together: it joins those under way
    assert cannot_batch(target) is None
    found = dict(answers(target, prompts, max_tokens=24))
    assert found == {i: alone(target, prompt, 24) for i, prompt in enumerate(prompts)}


def test_each_prompt_is_answered_once_and_as_soon_as_it_ends() -> None:
    prompts = some_prompts(50)
    found = list(answers(load(tiny.llama(end_weight=2.0), "llama"), prompts, max_tokens=MOST))
    assert sorted(index for index, _ in found) == list(range(50))
    ended = [len(tokens) for _, tokens in found if tokens[-1] == tiny.END]
    assert len(ended) > 5, "some end by themselves"
    assert MOST in {len(tokens) for _, tokens in found}
    assert [index for index, _ in found] != sorted(range(50), key=lambda i: len(prompts[i]))


@pytest.mark.parametrize("most", [1, 2])
def test_short_answers_are_exact(llama: Target, most: int) -> None:
    prompts = some_prompts(5)
    found = dict(answers(llama, prompts, max_tokens=most))
    assert found == {i: alone(llama, prompt, most) for i, prompt in enumerate(prompts)}


def test_answers_are_cut_to_the_context() -> None:
    target = load(tiny.llama(end_weight=0.0), "llama", context=64)
    found = dict(answers(target, [[1] * 60, [2] * 63, [3] * 5], max_tokens=MOST))
    assert {index: len(tokens) for index, tokens in found.items()} == {0: 4, 1: 1, 2: MOST}


@pytest.mark.parametrize("together", [True, False])
def test_a_seed_gives_a_prompt_its_answer_whatever_else_is_answered(
    llama: Target, together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not together:
        monkeypatch.setattr(generate, "cannot_batch", lambda target: "for a test")
    prompts = some_prompts(6)
    found = dict(answers(llama, prompts, max_tokens=20, temperature=0.8, seed=5))
    own = dict(answers(llama, prompts[3:4], max_tokens=20, temperature=0.8, seed=5))
    assert own[0] == found[3]
    other = dict(answers(llama, prompts, max_tokens=20, temperature=0.8, seed=6))
    assert all(other[i] != found[i] for i in found)
    assert found[0] != alone(llama, prompts[0], 20)


def test_sampled_answers_are_drawn_as_the_engine_draws(llama: Target) -> None:
    prompt = some_prompts(1)[0]
    [(_, found)] = answers(llama, [prompt], max_tokens=20, temperature=0.8, seed=5)
    sampler = generate._sampler(Sampling(temperature=0.8), 5, prompt)
    rounds = decode(llama, None, prompt, max_tokens=20, sampler=sampler)
    assert found == [token for step in rounds for token in step.tokens]


def rows_read(target: Target, count: int, **options: int) -> tuple[int, int]:
    """The most rows of a forward that writes, and the most positions that all of them have."""
    seen: list[tuple[int, int]] = []

    def note(call, hidden, mask, cache, *rest, **more):
        if hidden.shape[1] == 1:
            seen.append((hidden.shape[0], hidden.shape[0] * int(cache.size() + 1)))
        return call(hidden, mask, cache, *rest, **more)

    off = hook(target.layers[0], note)
    try:
        found = list(answers(target, some_prompts(count), max_tokens=12, **options))
    finally:
        off()
    assert len(found) == count
    return max(rows for rows, _ in seen), max(positions for _, positions in seen)


def test_what_is_under_way_is_bounded(llama: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "cannot_batch", lambda target: None)
    assert rows_read(llama, 45)[0] == generate.ROWS
    rows, positions = rows_read(llama, 30, batch_tokens=400)
    assert 5 <= rows <= 20
    assert positions <= 400
    assert rows_read(llama, 3, batch_tokens=1)[0] == 1


def test_endless_prompts_are_read_ahead_by_a_window_only(llama: Target) -> None:
    read = []

    def endless() -> Iterator[list[int]]:
        for n in itertools.count():
            read.append(n)
            yield [n % 256, 7]

    found = answers(llama, endless(), max_tokens=2)
    for _ in range(20):
        next(found)
    found.close()
    assert len(read) == 64
    assert dict(answers(llama, [[5]], max_tokens=2))[0] == alone(llama, [5], 2)


def test_no_prompt_is_begun_once_it_should_stop(llama: Target) -> None:
    found: list[int] = []
    for index, tokens in answers(
        llama, some_prompts(60), max_tokens=MOST, should_stop=lambda: bool(found)
    ):
        assert tokens[-1] == tiny.END or len(tokens) == MOST, "what was begun is finished"
        found.append(index)
    assert len(found) == generate.ROWS
    assert list(answers(llama, [[1]], should_stop=lambda: True)) == []


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        (lambda: load(tiny.model("llama4"), "llama4"), "ChunkedKVCache"),
        (lambda: load(tiny.heads(32), "kv", kv_bits=8), "8 bits"),
    ],
)
def test_what_cannot_be_batched_is_answered_one_at_a_time_and_says_so(
    target, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    target = target()
    assert reason in (cannot_batch(target) or "")
    prompts = some_prompts(4)
    found = dict(answers(target, prompts, max_tokens=8))
    for index, prompt in enumerate(prompts):
        rounds = decode(target, None, prompt, max_tokens=8, sampler=Sampler(Sampling()))
        assert found[index] == [token for step in rounds for token in step.tokens]
    assert f"{target.name} answers one prompt at a time" in caplog.text


def test_a_target_that_several_prompts_confuse_is_not_batched(llama: Target) -> None:
    def blind(call, hidden, mask, cache, *rest, **more):
        # A model whose layers do not know of the padding.
        if hidden.shape[0] > 1 and hidden.shape[1] == 1:
            mask = None
        return call(hidden, mask, cache, *rest, **more)

    off = hook(llama.layers[1], blind)
    try:
        assert "change its logits" in (cannot_batch(llama) or "")
    finally:
        off()
    assert cannot_batch(llama) is None


def test_what_cannot_be_answered_is_refused(llama: Target) -> None:
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        list(answers(llama, [[1], []]))
    with pytest.raises(ValueError, match="max_tokens"):
        list(answers(llama, [[1]], max_tokens=0))
    with pytest.raises(ValueError, match="temperature"):
        list(answers(llama, [[1]], temperature=-1))
    with pytest.raises(PromptTooLongError, match=r"prompt 0 has 1024 tokens.*at most 1024"):
        list(answers(llama, [[1] * 1024]))


@pytest.fixture
def file(tmp_path: Path) -> SequenceFile:
    return SequenceFile(tmp_path / "answers.jsonl", "key")


def named(prompts: list[list[int]]) -> list[tuple[str, list[int]]]:
    return [(prompt_id("key", prompt), prompt) for prompt in prompts]


def test_sequences_are_prompts_with_their_answers(llama: Target, file: SequenceFile) -> None:
    heard: list[generate.Made] = []
    prompts = named(some_prompts(20))
    made = make_sequences(llama, prompts, file, max_tokens=MOST, on_progress=heard.append)
    assert {(k.prompt_id, tuple(k.tokens[: k.answer])) for k in file} == {
        (id, tuple(prompt)) for id, prompt in prompts
    }
    assert all(k.tokens[k.answer :] == alone(llama, k.tokens[: k.answer]) for k in file)
    assert made.answered == len(file) == 20
    assert made.tokens == sum(len(k.tokens) - k.answer for k in file)
    assert [m.answered for m in heard] == list(range(1, 21))
    assert heard[-1].tokens == made.tokens
    assert 0 < heard[0].seconds <= made.seconds


def test_a_run_that_was_killed_goes_on_without_answering_again(
    llama: Target, file: SequenceFile
) -> None:
    prompts = named(some_prompts(40))

    def killed(made: generate.Made) -> None:
        if made.answered == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_sequences(llama, prompts, file, max_tokens=MOST, on_progress=killed)
    assert len(file) == 7
    made = make_sequences(llama, [*prompts, *prompts[:3]], file, max_tokens=MOST)
    assert (made.answered, made.known) == (33, 10)
    assert sorted(k.prompt_id for k in file) == sorted(id for id, _ in prompts)
    again = make_sequences(llama, prompts, file, max_tokens=MOST)
    assert (again.answered, again.known, again.tokens) == (0, 40, 0)


def test_it_stops_at_a_size_that_counts_what_the_file_had(
    llama: Target, file: SequenceFile
) -> None:
    prompts = named(some_prompts(60, longest=20))
    first = make_sequences(llama, prompts, file, max_tokens=MOST, most_tokens=300)
    assert 300 <= first.tokens <= 300 + generate.ROWS * MOST
    assert first.answered < 100
    assert make_sequences(llama, prompts, file, max_tokens=MOST, most_tokens=300).answered == 0
    assert make_sequences(llama, prompts, file, most_tokens=first.tokens + 1).answered > 0


def test_it_stops_after_a_time(llama: Target, file: SequenceFile) -> None:
    endless = (("id" + str(n), [n % 256, n // 256 % 256]) for n in itertools.count())
    made = make_sequences(llama, endless, file, max_tokens=4, most_seconds=0.3)
    assert made.answered >= generate.ROWS
    assert 0.3 <= made.seconds < 10
    late = make_sequences(llama, named([[1]]), file, most_seconds=0)
    assert late.answered == 0


def test_prompts_that_leave_no_room_are_counted(llama: Target, file: SequenceFile) -> None:
    made = make_sequences(llama, named([[1] * 1024, [2]]), file, max_tokens=2)
    assert (made.answered, made.too_long) == (1, 1)
    assert [k.tokens[0] for k in file] == [2]


def test_prompt_ids_tell_targets_and_prompts_apart_and_stay() -> None:
    assert prompt_id("a", [1, 2]) == prompt_id("a", (1, 2)) == "33b57c2aef26ab1fe7bbeccc938e6e13"
    assert len({prompt_id("a", [1, 2]), prompt_id("b", [1, 2]), prompt_id("a", [12])}) == 3
