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

DRAFTERS = ("none", "lookup", "block", "small", "composed")
DRAFTS = {"block": tiny.draft, "small": tiny.small_draft, "composed": tiny.draft}
PROMPTS = ["a", "hello world", "abcabcabcabc", "The quick brown fox. 你好"]


def engine_with(drafter: str, target: Path | None = None, **options: Any) -> DFlash:
    """On a target that never ends by itself."""
    return DFlash(
        str(target or tiny.llama(end_weight=0.0)),
        str(DRAFTS[drafter]()) if drafter in DRAFTS else None,
        drafter=drafter,  # type: ignore[arg-type]
        prefill_step=8,
        **options,
    )


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[str, DFlash]]:
    with contextlib.ExitStack() as stack:
        yield {name: stack.enter_context(engine_with(name)) for name in DRAFTERS}


@pytest.fixture(params=["none", "lookup", "block", "composed"])
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
    target = engine._parts.target
    widths: list[int] = []

    def forward(tokens: Any, cache: Any, **options: Any) -> Any:
        widths.append(len(tokens))
        return type(target).forward(target, tokens, cache, **options)

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
        drafts = {"block": "draft", "small": "small-draft", "composed": "draft"}
        assert stats.draft == drafts.get(name)
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
    assert all(tokens == answers[0] for tokens in answers), (
        "tokens past the stop string are not told"
    )
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
        ({"min_p": 1.5}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"logit_bias": {1: 200}}, "logit_bias"),
        ({"logit_bias": {tiny.VOCAB: 1}}, "logit_bias names token 288"),
        ({"logit_bias": {-1: 1}}, "logit_bias names token -1"),
        ({"seed": -1}, "non-negative|seed"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_bad_options_are_refused_where_they_are_given(
    engines: dict[str, DFlash], options: dict[str, Any], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        engines["lookup"].stream(**({"prompt": "a"} | options))


@pytest.mark.parametrize("token", [tiny.VOCAB, -1])
def test_tokens_that_are_none_of_the_targets_are_refused(
    engines: dict[str, DFlash], token: int
) -> None:
    # MLX would read what lies beside the embedding, and end the process where nothing does.
    for options in ({}, {"repetition_penalty": 1.1}):
        with pytest.raises(ValueError, match=f"token {token}"):
            engines["lookup"].stream([65, token], **options)  # type: ignore[arg-type]


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
    target = engine._parts.target
    own, calls = target.forward, 0

    def broken(*inputs: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise MemoryError("no room")
        return own(*inputs, **options)

    monkeypatch.setattr(target, "forward", broken)
    with pytest.raises(MemoryError, match="no room"):
        engine.generate("hello", max_tokens=12)
    monkeypatch.undo()
    assert engine.generate("hello", max_tokens=12).tokens == expected


def test_callers_at_once_get_the_answers_they_get_alone(engine: DFlash) -> None:
    prompts = [f"{prompt}{i}" for i, prompt in enumerate(PROMPTS * 2)]
    alone = [engine.generate(prompt, max_tokens=15).tokens for prompt in prompts]
    together: dict[int, list[list[int]]] = {}

    def ask(i: int) -> None:
        together[i] = [engine.generate(prompts[i], max_tokens=15).tokens for _ in range(2)]

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == {i: [alone[i]] * 2 for i in range(8)}


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
    weights = weakref.ref(engine._parts.target.model)
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
    folder = str(tiny.model("llama4"))
    before = threading.active_count()
    with pytest.raises(UnsupportedTargetError, match=r"ChunkedKVCache.*use drafter='none'"):
        DFlash(folder)
    with pytest.raises(UnsupportedTargetError, match="drafter='none'"):
        DFlash(folder, str(tiny.draft()))
    assert threading.active_count() == before, "no thread is left behind"
    with DFlash(folder, drafter="none") as engine:
        assert len(engine.generate("a", max_tokens=2).tokens) == 2


def test_a_draft_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    folder = tiny.write_draft(tmp_path / "other", tiny.draft_config(hidden_size=40))
    before = threading.active_count()
    with pytest.raises(UnsupportedDraftError, match="draft other was made for another target"):
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
    draft = str(tiny.draft())
    for drafter, own in (("block", None), ("small", None), ("lookup", draft), ("none", draft)):
        with pytest.raises(ValueError, match="draft_model"):
            DFlash(folder, own, drafter=drafter)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'fast' is none of auto, none, lookup, block, small"):
        DFlash(folder, drafter="fast")  # type: ignore[arg-type]


def test_auto_composes_what_there_is() -> None:
    folder = str(tiny.llama())
    for draft, name in (
        (None, None),
        ("auto", None),  # no draft is registered for it
        (str(tiny.draft()), "draft"),
        (str(tiny.small_draft()), "small-draft"),
    ):
        with DFlash(folder, draft) as engine:
            assert (engine.drafter_name, engine.draft_name) == ("composed", name)


PENALTIES: dict[str, Any] = {
    "repetition_penalty": 1.4,
    "presence_penalty": 0.8,
    "frequency_penalty": 0.6,
    "logit_bias": {101: 3.0, 32: -5.0},
}


@pytest.mark.parametrize("name", PENALTIES)
def test_penalties_and_bias_are_honoured_with_any_drafter(
    engines: dict[str, DFlash], name: str
) -> None:
    option = {name: PENALTIES[name]}
    plain, *drafted = [
        engine.generate("abcabcabcabc", max_tokens=60, **option).tokens
        for engine in engines.values()
    ]
    assert all(tokens == plain for tokens in drafted)
    assert plain != engines["none"].generate("abcabcabcabc", max_tokens=60).tokens


def test_a_penalty_of_one_request_is_none_of_the_next(engine: DFlash) -> None:
    before = engine.generate("hello", max_tokens=30).tokens
    engine.generate("hello", max_tokens=30, **PENALTIES)
    assert engine.generate("hello", max_tokens=30).tokens == before


def test_a_temperature_is_honoured_with_any_drafter(engine: DFlash) -> None:
    greedy = engine.generate("hello", max_tokens=30).tokens
    hot = [engine.generate("hello", max_tokens=30, temperature=2.0, seed=i).tokens for i in (1, 2)]
    assert hot[0] != hot[1]
    assert greedy not in hot
    cold = engine.generate("hello", max_tokens=30, temperature=1e-6, seed=1).tokens
    assert cold == greedy
    cut = engine.generate("hello", max_tokens=30, temperature=2.0, min_p=1.0, seed=1).tokens
    assert cut == greedy, "min_p of 1 leaves the likeliest token"


def test_answers_have_max_tokens_to_the_token(
    engine: DFlash, truth: Callable[[str, int], list[int]]
) -> None:
    expected = truth("abcabcabc", 24)
    for most in (1, 2, 3, 4, 6, 9, 13, 24):
        answer = engine.generate("abcabcabc", max_tokens=most)
        assert answer.tokens == expected[:most]
        assert answer.stats.tokens == most
    for most in (1, 5, 13):
        answer = engine.generate("abcabcabc", max_tokens=most, temperature=1.5, seed=2)
        assert len(answer.tokens) == most


def test_the_answer_before_leaves_nothing_behind(engine: DFlash) -> None:
    alone = {prompt: engine.generate(prompt, max_tokens=12).tokens for prompt in PROMPTS}
    for prompt in reversed(PROMPTS):
        assert engine.generate(prompt, max_tokens=12).tokens == alone[prompt]


def test_an_end_token_is_obeyed_with_any_drafter() -> None:
    folder = tiny.llama(traditional=True)
    with contextlib.ExitStack() as stack:
        engines = [stack.enter_context(engine_with(name, folder)) for name in DRAFTERS]
        for prompt in PROMPTS[:2]:
            plain, *drafted = [engine.generate(prompt, max_tokens=60) for engine in engines]
            for answer in drafted:
                assert answer.tokens == plain.tokens
                assert answer.finish_reason == plain.finish_reason
                assert answer.text == plain.text


@contextlib.contextmanager
def saying(engine: DFlash, prompt: str, text: str) -> Iterator[None]:
    """Make the target write ``text`` after ``prompt``, and its end token."""
    target, start = engine._parts.target, len(engine.tokenizer.encode(prompt))
    script = [*engine.tokenizer.encode(text), tiny.END]
    read: dict[int, int] = {}  # by the cache's id, how many positions it holds

    def forward(tokens: Any, cache: Any, **options: Any) -> Any:
        if id(cache) not in read:
            read[id(cache)] = 0
            own = cache.roll_back

            def roll_back(rows: int) -> None:
                read[id(cache)] -= rows
                own(rows)

            cache.roll_back = roll_back
        _, features = type(target).forward(target, tokens, cache, **options)
        first = read[id(cache)] + 1 - start  # of the script, after the first of these tokens
        read[id(cache)] += len(tokens)
        places = range(first, first + len(tokens))
        following = [script[i] if 0 <= i < len(script) else tiny.END for i in places]
        logits = mx.arange(tiny.VOCAB)[None] == mx.array(following)[:, None]
        return logits.astype(mx.float32)[None], features

    target.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        del target.forward


CHINESE = "退货须在三十天内。退货须在三十天内，退款须在十四天内。🎉退款须在十四天内。"


def test_characters_are_whole_wherever_a_round_ends(engine: DFlash) -> None:
    with saying(engine, "退货", CHINESE):
        for most in range(1, 40, 5):  # of bytes: inside characters too
            deltas = list(engine.stream("退货", max_tokens=most))
            text = "".join(delta.text for delta in deltas)
            assert text.rstrip("\ufffd") == CHINESE.encode()[:most].decode(errors="ignore")
            assert not any("\ufffd" in delta.text for delta in deltas[:-1])
        answer = engine.generate("退货", max_tokens=400)
    assert answer.text == CHINESE
    assert answer.finish_reason == "stop"
    assert answer.tokens == [*engine.tokenizer.encode(CHINESE), tiny.END]
    if engine.drafter_name == "lookup":
        assert answer.stats.tokens_per_round > 1.5, "the repetitions are copied"


@pytest.mark.parametrize("stop", ["十四", "在十四天", "，", "\ufffd", "内。退"])
def test_a_stop_string_is_found_across_tokens_and_rounds(engine: DFlash, stop: str) -> None:
    with saying(engine, "退货", CHINESE), counting_rounds(engine) as rounds:
        answer = engine.generate("退货", max_tokens=400, stop=[stop, "nowhere"])
    place = CHINESE.find(stop) if stop in CHINESE else len(CHINESE)
    assert answer.text == CHINESE[:place]
    assert answer.finish_reason == "stop"
    if stop in CHINESE:
        end = len((CHINESE[:place] + stop).encode())
        assert len(answer.tokens) == answer.stats.tokens == end
        assert sum(rounds) <= end + 31, "nothing was computed after the round of the stop string"


@contextlib.contextmanager
def counting_rounds(engine: DFlash) -> Iterator[list[int]]:
    """Lists how many tokens the rounds meanwhile gave."""
    from dflash_engine import engine as code

    own, counts = code.decode, []

    def decode(*inputs: Any, **options: Any) -> Any:
        for step in own(*inputs, **options):
            counts.append(len(step.tokens))
            yield step

    code.decode = decode  # type: ignore[assignment]
    try:
        yield counts
    finally:
        code.decode = own


def test_a_draft_that_is_refused_whole_does_not_end_lookup(engines: dict[str, DFlash]) -> None:
    # The first copies go wrong at once; a long one comes later.
    engine = engines["lookup"]
    prompt = "one two one tea. Goods may be sent back within thirty days, unused."
    text = "one toe one ten: Goods may be sent back within thirty days, unused."
    with saying(engine, prompt, text), counting_rounds(engine) as rounds:
        answer = engine.generate(prompt, max_tokens=200)
    assert answer.text == text
    assert 1 in rounds[2:10], "one was refused whole"
    assert max(rounds) == 16, "and later ones were kept whole"


@pytest.mark.parametrize("drafter", ["none", "lookup", "block"])
@pytest.mark.parametrize("kind", ["gpt_oss", "qwen3_5", "lfm2"])
def test_targets_with_windows_and_states_answer_as_without_drafts(kind: str, drafter: str) -> None:
    folder = tiny.model(kind, end_weight=0.0)
    target = load(folder, kind)
    with engine_with(drafter, folder) as engine:
        for prompt in ("abcabcabc abcabcabc", "hi"):  # longer and shorter than windows
            steps = generate_step(
                mx.array(target.tokenizer.encode(prompt)),
                target.model,
                max_tokens=40,
                prefill_step_size=8,
            )
            answer = engine.generate(prompt, max_tokens=40)
            assert answer.tokens == [int(token) for token, _ in steps]
            assert (answer.stats.drafted > 0) == (drafter != "none")


def test_a_context_may_be_asked_for() -> None:
    with engine_with("lookup", context=40) as engine:
        assert engine.context == 40
        answer = engine.generate([65] * 39, max_tokens=9)
        assert (len(answer.tokens), answer.finish_reason) == (1, "length")
        with pytest.raises(PromptTooLongError, match=r"40 tokens.*at most 40"):
            engine.stream([65] * 40)


@pytest.mark.parametrize("bits", [8, 4])
def test_keys_and_values_may_be_kept_in_few_bits(bits: int) -> None:
    folder = tiny.heads(32)
    with (
        engine_with("none", folder, kv_bits=bits) as plain,
        engine_with("lookup", folder, kv_bits=bits) as drafted,
        engine_with("none", folder) as whole,
    ):
        answers = [
            engine.generate("abcabcabcabc", max_tokens=80).tokens
            for engine in (plain, drafted, whole)
        ]
    assert answers[0] == answers[1] != answers[2]


@pytest.mark.parametrize("drafter", ["none", "lookup"])
def test_heads_that_few_bits_do_not_fit_are_refused_when_the_engine_is_made(drafter: str) -> None:
    with pytest.raises(UnsupportedTargetError, match=r"heads of 8.*kv_bits"):
        engine_with(drafter, kv_bits=8)


@pytest.mark.parametrize("bits", [8, 4])
def test_a_draft_may_be_quantised(bits: int, truth: Callable[[str, int], list[int]]) -> None:
    with engine_with("block", draft_bits=bits) as engine:
        answer = engine.generate("hello", max_tokens=30)
    assert answer.tokens == truth("hello", 30)
    assert answer.stats.drafted > 0


def test_bits_are_eight_or_four() -> None:
    for option in ("kv_bits", "draft_bits"):
        with pytest.raises(ValueError, match=f"{option} must be 4, 8 or None, not 3"):
            DFlash(str(tiny.llama()), **{option: 3})  # type: ignore[arg-type]


@pytest.mark.parametrize("drafter", ["lookup", "block", "small"])
def test_a_strict_engine_counts_its_near_ties(
    drafter: str, truth: Callable[[str, int], list[int]]
) -> None:
    with engine_with(drafter, strict=True) as engine:
        assert engine.generate("abcabc", max_tokens=40).stats.near_ties == 0
        engine._parts.target.width_error = 1e6  # so that all are near
        answer = engine.generate("abcabc", max_tokens=40)
    assert answer.tokens == truth("abcabc", 40)
    assert 0 < answer.stats.near_ties <= answer.stats.rounds
    assert answer.stats.to_dict()["near_ties"] == answer.stats.near_ties
