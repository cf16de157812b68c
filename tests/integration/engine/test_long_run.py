"""What only shows after a while: memory that grows, and what one engine leaves to another."""

import functools
import gc
import threading
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.models
import psutil
import pytest
import tiny
import tiny_drafts
from mlx_lm.generate import generate_step
from mlx_lm.models import cache as caches
from mlx_lm.models import gated_delta, gpt_oss, lfm2, llama, qwen3_5, qwen3_next
from mlx_lm.utils import load as load_model

from dflash_engine import DFlash
from dflash_engine.targets import load

PROMPT = "abcabcabc"
LENGTH = 4096
SAMPLES = 256  # tokens between two looks at memory


def short_target() -> Path:
    """Two layers, of which one keeps a window; it writes with few letters, so drafts are right."""
    return tiny.model("mistral-short", end_weight=0.0, letters=4, seed=24)


KEPT_A_TOKEN = 2 * tiny.KV_HEADS * tiny.HEAD_DIM * 4  # bytes, by the layer without a window


@functools.cache
def long_answer() -> list[int]:
    target = load(short_target(), "mistral")
    prompt = mx.array(target.tokenizer.encode(PROMPT))
    return [int(t) for t, _ in generate_step(prompt, target.model, max_tokens=LENGTH)]


@pytest.fixture(scope="module")
def sliding_draft(tmp_path_factory: pytest.TempPathFactory) -> str:
    draft = tiny_drafts.zlab(
        (tiny.SLIDING,), num_target_layers=2, dflash_config={"target_layer_ids": [0, 1]}
    )
    return str(tiny.write_draft(tmp_path_factory.mktemp("drafts") / "sliding", *draft))


def resident() -> int:
    """Bytes of this process, without the freed buffers that MLX keeps up to a limit of its own."""
    return int(psutil.Process().memory_info().rss) - mx.get_cache_memory()


def rise(values: list[int]) -> float:
    """By how much ``values`` rise from the first to the last of the line through them."""
    middle = (len(values) - 1) / 2
    mean = sum(values) / len(values)
    slope = sum((i - middle) * (v - mean) for i, v in enumerate(values)) / sum(
        (i - middle) ** 2 for i in range(len(values))
    )
    return slope * (len(values) - 1)


@pytest.mark.parametrize("drafter", ["block", "lookup"])
def test_a_long_answer_is_exact_and_keeps_to_its_memory(drafter: str, sliding_draft: str) -> None:
    active, taken, tokens = [], [], []
    with DFlash(
        str(short_target()),
        sliding_draft if drafter == "block" else None,
        drafter=drafter,  # type: ignore[arg-type]
        context=LENGTH + 64,
    ) as engine:
        for delta in engine.stream(PROMPT, max_tokens=LENGTH):
            before = len(tokens) // SAMPLES
            tokens += delta.tokens
            if len(tokens) // SAMPLES > before:
                active.append(mx.get_active_memory())
                taken.append(resident())
    assert delta.stats is not None
    assert delta.stats.tokens_per_round > 1.1, "drafts are kept"
    assert tokens == long_answer()
    warm = len(active) // 4
    grown = KEPT_A_TOKEN * SAMPLES * (len(active) - warm)
    assert rise(active[warm:]) < 1.1 * grown + 64 * 1024
    assert rise(taken[warm:]) < 2 * grown + 6 * 1024 * 1024


def test_answers_one_after_the_other_keep_to_their_memory() -> None:
    active, taken = [], []
    with DFlash(str(tiny.model("qwen3_5", end_weight=0.0)), str(tiny.draft())) as engine:
        for _ in range(16):
            for delta in engine.stream("hello", max_tokens=400):
                if delta.tokens:
                    break
            engine.generate("hello", max_tokens=20)  # begins when the one that was left has ended
            gc.collect()
            active.append(mx.get_active_memory())
            taken.append(resident())
    assert rise(active[5:]) < 64 * 1024
    assert rise(taken[5:]) < 6 * 1024 * 1024


ENGINES: dict[str, Callable[[], DFlash]] = {
    "qwen3_5 block": lambda: DFlash(
        str(tiny.model("qwen3_5", end_weight=0.0)), str(tiny.draft()), prefill_step=8
    ),
    "qwen3_5 lookup": lambda: DFlash(str(tiny.model("qwen3_5", end_weight=0.0)), prefill_step=8),
    "gpt_oss block": lambda: DFlash(
        str(tiny.model("gpt_oss", end_weight=0.0)), str(tiny.draft()), prefill_step=8
    ),
    "lfm2 lookup": lambda: DFlash(str(tiny.model("lfm2", end_weight=0.0)), prefill_step=8),
}


def test_engines_at_work_at_once_answer_as_alone() -> None:
    engines = {name: make() for name, make in ENGINES.items()}
    try:
        alone = {
            n: engine.generate("abcabc", max_tokens=60).tokens for n, engine in engines.items()
        }
        together: dict[str, list[list[int]]] = {}
        start = threading.Barrier(len(engines))

        def ask(name: str) -> None:
            start.wait()
            together[name] = [
                [t for delta in engines[name].stream("abcabc", max_tokens=60) for t in delta.tokens]
                for _ in range(2)
            ]

        threads = [threading.Thread(target=ask, args=(name,)) for name in engines]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert together == {name: [tokens] * 2 for name, tokens in alone.items()}
    finally:
        for engine in engines.values():
            engine.close()


@pytest.mark.parametrize("name", ENGINES)
def test_a_cancelled_request_leaves_the_next_right(name: str) -> None:
    with ENGINES[name]() as engine:
        expected = engine.generate("abcabc", max_tokens=40).tokens
        for steps in (1, 2, 3, 7):
            stream = engine.stream("abcabc abcabc", max_tokens=500)
            deltas = iter(stream)
            for _ in range(steps):
                next(deltas)
            stream.cancel()
            assert engine.generate("abcabc", max_tokens=40).tokens == expected


def test_nothing_of_mlx_lm_is_changed_by_engines() -> None:
    modules = (qwen3_5, qwen3_next, gpt_oss, lfm2, llama, gated_delta, caches)
    before = _definitions(modules)
    for make in ENGINES.values():
        with make() as engine:
            engine.generate("abc", max_tokens=12)
            # While it lives, too.
            assert _definitions(modules) == before
            model = load_model(str(tiny.model("qwen3_5", end_weight=0.0)))[0]
            for _, module in model.named_modules():
                kind = type(module)
                assert getattr(__import__(kind.__module__, fromlist=["x"]), kind.__name__) is kind
    assert qwen3_5.GatedDeltaNet.__call__.__module__ == "mlx_lm.models.qwen3_5"


def _definitions(modules: tuple[object, ...]) -> dict[str, object]:
    # All classes of these modules with what is defined in them, and their functions.
    found: dict[str, object] = {}
    for module in (*modules, mlx_lm.models.base, nn.layers.base, nn.layers.linear):
        for name, value in vars(module).items():
            path = f"{module.__name__}.{name}"  # type: ignore[attr-defined]
            if isinstance(value, type):
                found |= {f"{path}.{key}": own for key, own in vars(value).items()}
            elif callable(value):
                found[path] = value
    return found
