import asyncio
import contextlib
import gc
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import tiny
from mlx_lm.generate import generate_step
from ticking import ticking

from dflash_engine import DFlash
from dflash_engine.errors import (
    CancelledError,
    EngineBusyError,
    EngineClosedError,
    ModelNameError,
    ModelNotPulledError,
    PromptTooLongError,
    UnsupportedDraftError,
    UnsupportedTargetError,
)
from dflash_engine.targets import load

DRAFTERS = ("none", "lookup", "block")
PROMPTS = ["a", "hello world", "abcabcabcabc", "The quick brown fox. 你好"]


def engine_with(drafter: str, **options: Any) -> DFlash:
    """On a target that never ends by itself."""
    return DFlash(
        str(tiny.llama(end_weight=0.0)),
        str(tiny.draft()) if drafter == "block" else None,
        drafter=drafter,  # type: ignore[arg-type]
        prefill_step=8,
        **options,
    )


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[str, DFlash]]:
    with contextlib.ExitStack() as stack:
        yield {name: stack.enter_context(engine_with(name)) for name in DRAFTERS}


@pytest.fixture(params=DRAFTERS)
def engine(request: pytest.FixtureRequest, engines: dict[str, DFlash]) -> DFlash:
    return engines[request.param]


@pytest.fixture(scope="module")
def truth() -> Callable[[str, int], list[int]]:
    target = load(tiny.llama(end_weight=0.0), "llama")

    def tokens(prompt: str, most: int) -> list[int]:
        steps = generate_step(
            mx.array(target.tokenizer.encode(prompt)), target.model, max_tokens=most
        )
        return [int(token) for token, _ in steps]

    return tokens


@contextlib.contextmanager
def counting(engine: DFlash) -> Iterator[list[int]]:
    """Lists the widths of the target forwards made meanwhile."""
    target = engine._parts[0]
    widths: list[int] = []

    def forward(tokens: mx.array, cache: list[Any]) -> Any:
        widths.append(tokens.size)
        return type(target).forward(target, tokens, cache)

    target.forward = forward  # type: ignore[method-assign]
    try:
        yield widths
    finally:
        del target.forward


def settled(widths: list[int]) -> int:
    """How many forwards there were once no more come."""
    known = -1
    while known != len(widths):
        known = len(widths)
        time.sleep(0.1)
    return known


def test_answers_are_the_targets_own(
    engine: DFlash, truth: Callable[[str, int], list[int]]
) -> None:
    for prompt in PROMPTS:
        for most in (1, 2, 30):
            answer = engine.generate(prompt, max_tokens=most)
            assert answer.tokens == truth(prompt, most)
            assert answer.text == engine.tokenizer.decode(answer.tokens)
            assert answer.finish_reason == "length"
            assert answer.stats.tokens == most


def test_tokens_are_as_good_as_text(engine: DFlash) -> None:
    text = engine.generate("hello", max_tokens=9)
    assert engine.generate(engine.tokenizer.encode("hello"), max_tokens=9).tokens == text.tokens


def test_stats_say_what_ran(engines: dict[str, DFlash]) -> None:
    for name, engine in engines.items():
        stats = engine.generate("abcabcabc", max_tokens=151).stats
        assert (stats.drafter, stats.prompt_tokens, stats.tokens) == (name, 9, 151)
        assert stats.draft == ("draft" if name == "block" else None)
        assert stats.rounds == 150 if name == "none" else stats.rounds <= 150
        assert (stats.drafted > 0) == (name != "none")
        assert stats.tokens_per_round == 150 / stats.rounds
        assert min(stats.queue_seconds, stats.prefill_seconds, stats.decode_seconds) >= 0
        assert stats.tokens_per_second == pytest.approx(150 / stats.decode_seconds)
        facts = json.loads(json.dumps(stats.to_dict()))
        assert facts["tokens_per_round"] == round(stats.tokens_per_round, 3)


def test_one_token_has_no_round(engine: DFlash) -> None:
    stats = engine.generate("a", max_tokens=1).stats
    assert (stats.rounds, stats.tokens_per_round, stats.tokens_per_second) == (0, 0.0, 0.0)


def test_an_end_token_is_in_the_tokens_and_not_in_the_text() -> None:
    with DFlash(str(tiny.llama(traditional=True))) as engine:
        answers = [engine.generate(prompt, max_tokens=300) for prompt in PROMPTS]
    ended = [answer for answer in answers if answer.finish_reason == "stop"]
    assert ended
    for answer in ended:
        assert answer.tokens.index(tiny.END) == len(answer.tokens) - 1
        assert "<end>" not in answer.text
        assert answer.stats.tokens == len(answer.tokens)


def test_a_stop_string_ends_text_tokens_and_computing(engines: dict[str, DFlash]) -> None:
    whole = engines["none"].generate("abcabcabcabc", max_tokens=60)
    text = whole.text
    place = next(i for i in range(20, len(text) - 1) if text[i : i + 2] not in text[: i + 1])
    answers = []
    for name, engine in engines.items():
        with counting(engine) as widths:
            answer = engine.generate("abcabcabcabc", max_tokens=60, stop=[text[place : place + 2]])
            forwards = settled(widths)
        assert answer.text == text[:place], name
        assert answer.finish_reason == "stop"
        assert answer.stats.tokens == len(answer.tokens) < 50
        prefills = 3
        assert forwards <= prefills + len(answer.tokens) + 1, "nothing runs on after the stop"
        assert answer.stats.rounds < len(answer.tokens)
        answers.append(answer.tokens)
    assert answers[0] == answers[1] == answers[2], "tokens past the stop string are not told"
    assert whole.tokens[: len(answers[0])] == answers[0]


def test_a_stop_string_may_be_given_alone(engines: dict[str, DFlash]) -> None:
    text = engines["none"].generate("hello", max_tokens=30).text
    stop = text[10:13]
    cut = engines["none"].generate("hello", max_tokens=30, stop=stop).text
    assert cut == text[: text.index(stop)]


def test_a_stream_is_the_answer_in_pieces(engine: DFlash) -> None:
    whole = engine.generate("hello world", max_tokens=30)
    deltas = list(engine.stream("hello world", max_tokens=30))
    assert "".join(delta.text for delta in deltas) == whole.text
    assert [token for delta in deltas for token in delta.tokens] == whole.tokens
    assert [delta.finish_reason for delta in deltas if delta.finish_reason] == ["length"]
    assert [delta.stats is not None for delta in deltas] == [False] * (len(deltas) - 1) + [True]


def test_chat_goes_through_the_template(engine: DFlash) -> None:
    prompt = "<start>system\nBe brief.<turn>\n<start>user\nHi<turn>\n<start>assistant\n"
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    tokens = engine.chat_prompt(messages)
    assert tokens == engine.tokenizer.encode(prompt)
    assert tokens.count(tiny.START) == 3
    answer = engine.chat(messages, max_tokens=9)
    assert answer.tokens == engine.generate(prompt, max_tokens=9).tokens


def test_a_target_without_chat_template_says_so(tmp_path: Path) -> None:
    folder = tmp_path / "plain"
    shutil.copytree(tiny.llama(), folder)
    (folder / "chat_template.jinja").unlink()
    with DFlash(str(folder)) as engine:
        with pytest.raises(UnsupportedTargetError, match=r"plain has no chat template.*generate"):
            engine.chat([{"role": "user", "content": "Hi"}])
        assert engine.generate("Hi", max_tokens=2).tokens


def test_the_context_window_bounds_prompt_and_answer(engine: DFlash) -> None:
    assert engine.context == tiny.CONTEXT
    answer = engine.generate([65] * (tiny.CONTEXT - 4), max_tokens=50)
    assert len(answer.tokens) == 4
    assert answer.finish_reason == "length"
    with pytest.raises(PromptTooLongError, match=r"the prompt has 1024 tokens.*at most 1024"):
        engine.stream([65] * tiny.CONTEXT)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"prompt": ""}, "prompt is empty"),
        ({"prompt": []}, "prompt is empty"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"seed": -1}, "non-negative|seed"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_bad_options_are_refused_where_they_are_given(
    engines: dict[str, DFlash], options: dict[str, Any], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        engines["lookup"].stream(**({"prompt": "a"} | options))


def test_a_seed_repeats_a_sampled_answer(engine: DFlash) -> None:
    options = {"max_tokens": 20, "temperature": 1.5, "top_p": 0.95, "top_k": 50}
    first = engine.generate("hello", seed=5, **options)
    assert engine.generate("hello", seed=5, **options).tokens == first.tokens
    assert engine.generate("hello", seed=6, **options).tokens != first.tokens
    assert len(first.tokens) == 20


def test_cancelling_stops_the_computing(engine: DFlash) -> None:
    with counting(engine) as widths:
        stream = engine.stream("hello", max_tokens=900)
        deltas = iter(stream)
        while not next(deltas).tokens:
            pass
        stream.cancel()
        before = len(widths)
        assert settled(widths) <= before + 3
    with pytest.raises(CancelledError):
        list(deltas)
    assert len(engine.generate("hello", max_tokens=5).tokens) == 5


def test_cancelling_stops_a_long_prompt(engine: DFlash) -> None:
    with counting(engine) as widths:
        stream = engine.stream([65] * 1000, max_tokens=5)
        next(iter(stream))
        assert settled(widths) < 60, "of 126"


def test_leaving_the_loop_stops_the_computing(engine: DFlash) -> None:
    with counting(engine) as widths:
        for delta in engine.stream("hello", max_tokens=900):
            if delta.tokens:
                break
        before = len(widths)
        assert settled(widths) <= before + 3


async def test_the_event_loop_goes_on_meanwhile(engine: DFlash) -> None:
    async with ticking(0.002) as ticks:
        tokens = [t async for delta in engine.stream("hello", max_tokens=200) for t in delta.tokens]
    assert len(tokens) == 200
    assert ticks.count > 20


async def test_leaving_an_async_loop_stops_the_computing(engine: DFlash) -> None:
    with counting(engine) as widths:
        async for delta in engine.stream("hello", max_tokens=900):
            if delta.tokens:
                break
        await asyncio.sleep(0.05)
        before = len(widths)
        assert await asyncio.to_thread(settled, widths) <= before + 1


def test_an_error_in_one_request_leaves_the_next_fine(
    engine: DFlash, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = engine.generate("hello", max_tokens=12).tokens
    target = engine._parts[0]
    own, calls = target.forward, 0

    def broken(tokens: mx.array, cache: list[Any]) -> Any:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise MemoryError("no room")
        return own(tokens, cache)

    monkeypatch.setattr(target, "forward", broken)
    with pytest.raises(MemoryError, match="no room"):
        engine.generate("hello", max_tokens=12)
    monkeypatch.undo()
    assert engine.generate("hello", max_tokens=12).tokens == expected


def test_callers_at_once_get_the_answers_they_get_alone(engine: DFlash) -> None:
    prompts = [f"{prompt}{i}" for i, prompt in enumerate(PROMPTS * 2)]
    alone = [engine.generate(prompt, max_tokens=25).tokens for prompt in prompts]
    together: dict[int, list[list[int]]] = {}

    def ask(i: int) -> None:
        together[i] = [engine.generate(prompts[i], max_tokens=25).tokens for _ in range(3)]

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == {i: [alone[i]] * 3 for i in range(8)}


def test_engines_side_by_side_do_not_disturb_each_other(engines: dict[str, DFlash]) -> None:
    expected = engines["none"].generate("hello", max_tokens=60).tokens
    streams = [engine.stream("hello", max_tokens=60) for engine in engines.values()]
    for stream in streams:
        assert [token for delta in stream for token in delta.tokens] == expected


def test_too_many_waiting_are_refused() -> None:
    with engine_with("none", max_waiting=2) as engine:
        running = engine.stream("a", max_tokens=900)
        deltas = iter(running)
        next(deltas)
        waiting = [engine.stream("a", max_tokens=1) for _ in range(2)]
        with pytest.raises(EngineBusyError, match="2 requests are waiting"):
            engine.stream("a", max_tokens=1)
        running.cancel()
        assert [len(list(stream)) for stream in waiting] == [2, 2]


def test_close_ends_requests_and_frees_the_weights() -> None:
    engine = engine_with("block")
    weights = weakref.ref(engine._parts[0].model)
    running, waiting = engine.stream("a", max_tokens=1000), engine.stream("b")
    deltas = iter(running)
    next(deltas)
    engine.close()
    for stream in (deltas, waiting):
        with pytest.raises(EngineClosedError):
            list(stream)
    for use in (
        lambda: engine.generate("a"),
        lambda: engine.chat([{"role": "user", "content": "a"}]),
        lambda: engine.context,
    ):
        with pytest.raises(EngineClosedError, match="make a new one"):
            use()
    gc.collect()
    assert weights() is None
    engine.close()


def test_a_program_may_end_while_an_engine_writes() -> None:
    code = (
        "import sys; from dflash_engine import DFlash; "
        "engine = DFlash(sys.argv[1], drafter='none'); "
        "print(next(iter(stream := engine.stream('a', max_tokens=1000))).tokens)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tiny.llama(end_weight=0.0))],
        capture_output=True,
        text=True,
        env={**os.environ},
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


def test_a_target_whose_cache_cannot_go_back_is_refused_a_drafter() -> None:
    folder = str(tiny.windowed())
    with pytest.raises(UnsupportedTargetError, match=r"RotatingKVCache.*use drafter='none'"):
        DFlash(folder)
    with pytest.raises(UnsupportedTargetError, match="drafter='none'"):
        DFlash(folder, str(tiny.draft()))
    with DFlash(folder, drafter="none") as engine:
        assert len(engine.generate("a", max_tokens=2).tokens) == 2


def test_a_draft_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    folder = tiny.write_draft(tmp_path / "other", tiny.draft_config(hidden_size=40))
    before = threading.active_count()
    with pytest.raises(UnsupportedDraftError, match="other has hidden_size 40"):
        DFlash(str(tiny.llama()), str(folder))
    assert threading.active_count() == before, "no thread is left behind"


def test_a_target_that_cannot_be_loaded_says_why(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedTargetError, match="cannot be loaded"):
        DFlash(str(tmp_path))
    broken = tmp_path / "broken"
    shutil.copytree(tiny.llama(), broken)
    (broken / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(UnsupportedTargetError, match="broken"):
        DFlash(str(broken))
    (broken / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(UnsupportedTargetError, match="broken"):
        DFlash(str(broken))


def test_names_of_models_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ModelNotPulledError, match="run 'dflash-rag models pull smollm2-135m'"):
        DFlash("smollm2-135m", models=tmp_path)
    with pytest.raises(ModelNameError, match=r"'no-such-model'.*smollm2-135m"):
        DFlash("no-such-model", models=tmp_path)
    with pytest.raises(ModelNotPulledError, match="pull hf:org/draft"):
        DFlash(str(tiny.llama()), "hf:org/draft", models=tmp_path)


def test_drafter_and_draft_model_must_agree() -> None:
    folder = str(tiny.llama())
    for drafter, draft in (("block", None), ("lookup", str(tiny.draft())), ("none", "hf:a/b")):
        with pytest.raises(ValueError, match="draft_model"):
            DFlash(folder, draft, drafter=drafter)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'fast' is none of auto, none, lookup, block"):
        DFlash(folder, drafter="fast")  # type: ignore[arg-type]


def test_auto_takes_the_draft_model_or_lookup(engines: dict[str, DFlash]) -> None:
    with DFlash(str(tiny.llama())) as plain, DFlash(str(tiny.llama()), str(tiny.draft())) as both:
        assert (plain.drafter_name, both.drafter_name) == ("lookup", "block")
        assert both.draft_name == "draft"
