"""What is found in a model, and what is refused, when it is loaded as a target."""

import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
import tiny
from mlx_lm.models.cache import KVCache, RotatingKVCache

from dflash_engine.decode import decode
from dflash_engine.drafters.lookup import Lookup
from dflash_engine.errors import UnsupportedTargetError
from dflash_engine.sampling import Sampler, Sampling
from dflash_engine.targets import Target, load, rotating, structure
from dflash_engine.targets.hook import hook


class Twice(nn.Module):
    def __call__(self, x: int, *, plus: int = 0) -> int:
        return 2 * x + plus


def test_a_hook_is_on_one_object_and_comes_off() -> None:
    hooked, other = Twice(), Twice()
    off = hook(hooked, lambda call, *args, **kwargs: -call(*args, **kwargs))
    inner_off = hook(hooked, lambda call, *args, **kwargs: call(*args, **kwargs) + 100)
    assert hooked(3, plus=1) == 93
    assert other(3, plus=1) == 7
    assert isinstance(hooked, Twice)
    inner_off()
    assert hooked(3, plus=1) == -7
    off()
    assert type(hooked) is Twice
    assert hooked(3) == 6


def test_learned_positions_leave_no_embedding_to_borrow() -> None:
    target = load(tiny.model("gpt2"), "gpt2")
    with pytest.raises(UnsupportedTargetError, match=r"not an embedding of the.*lookup"):
        _ = target.embedding
    target.require_rollback()


def test_a_head_that_does_not_give_the_logits_is_not_taken() -> None:
    target = load(tiny.qwen3(), "qwen3")
    own = target.model.lm_head
    hook(target.model, lambda call, *args, **kwargs: -call(*args, **kwargs))
    with pytest.raises(UnsupportedTargetError, match="no layer gives its logits"):
        structure.find(target.model, "upside-down")
    assert own is target.model.lm_head


def test_a_mask_wider_than_the_window_it_keeps_is_refused() -> None:
    # mlx-lm's plamo3: the two agree until the window is full, which no short probe sees.
    target = load(tiny.model("plamo3"), "plamo3")
    with pytest.raises(UnsupportedTargetError, match="17 positions, its cache keeps 16 for one"):
        target.require_rollback()


class Crooked:
    """mlx-lm's tiny llama with a mask that lets a row see the ones after it."""

    def __init__(self) -> None:
        self.target = load(tiny.llama(), "llama")

        def see_all(call: Any, x: mx.array, mask: Any, cache: Any) -> Any:
            return call(x, None, cache)

        for layer in self.target.layers:
            hook(layer, see_all)

    def load(self) -> Target:
        own = self.target
        config = {"vocab_size": own.vocab_size, "hidden_size": own.hidden_size}
        return Target("crooked", own.model, own.tokenizer, config)


def test_the_probe_sees_a_wrong_mask_in_every_mode() -> None:
    target = Crooked().load()
    with pytest.raises(UnsupportedTargetError, match="crooked: several tokens in one forward"):
        target.require_rollback()
    # One token at a time it is what it is.
    prompt = target.tokenizer.encode("a")
    steps = decode(target, None, prompt, max_tokens=5, sampler=Sampler(Sampling()))
    assert sum(len(step.tokens) for step in steps) >= 1


def test_the_probe_sees_rows_that_were_not_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def only_trim(layer: RotatingKVCache, rows: int) -> None:
        layer.trim(rows // 2)

    monkeypatch.setattr(rotating, "roll_back", only_trim)
    target = load(tiny.windowed(), "windowed")
    with pytest.raises(UnsupportedTargetError, match="windowed: several tokens"):
        target.require_rollback()


def test_the_width_error_is_measured_and_never_less_than_rounding() -> None:
    target = load(tiny.llama(), "llama")
    assert 1e-7 < target.width_error < 1e-3
    half = target.model
    half.set_dtype(mx.bfloat16)
    config = {"vocab_size": target.vocab_size, "hidden_size": target.hidden_size}
    assert Target("half", half, target.tokenizer, config).width_error >= 2**-7


def test_taps_that_change_the_logits_are_refused_and_taken_off() -> None:
    target = load(tiny.llama(), "llama")
    layer = target.layers[1]

    calls = []

    def unsteady(call: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return call(*args, **kwargs) + 1e-3 * (len(calls) > 1)

    off = hook(layer, unsteady)
    with pytest.raises(UnsupportedTargetError, match=r"layers \[1\] changes what it computes"):
        target.tap([1])
    off()
    plain, features = target.forward([1, 2, 3], target.make_cache())
    assert features is None
    target.tap([1, 2])
    tapped, features = target.forward([1, 2, 3], target.make_cache())
    assert mx.array_equal(plain, tapped).item()
    assert features is not None
    assert features.shape == (1, 3, 2 * tiny.HIDDEN)
    with pytest.raises(UnsupportedTargetError, match="tapped already"):
        target.tap([0])


@pytest.mark.parametrize("before", [3, 15, 16, 17, 40], ids=lambda n: f"{n}-positions")
def test_a_window_is_as_it_was_when_a_whole_forward_is_taken_back(before: int) -> None:
    def keys(start: int, count: int) -> mx.array:
        return mx.arange(start, start + count, dtype=mx.float32).reshape(1, 1, count, 1)

    for rows, following in ((2, 1), (5, 1), (5, 4), (30, 1), (30, 3)):
        cache = RotatingKVCache(max_size=16)
        for i in range(before):
            cache.update_and_fetch(keys(i, 1), keys(i, 1))
        cache.update_and_fetch(keys(1000, rows), keys(1000, rows))
        rotating.roll_back(cache, rows)
        seen, _ = cache.update_and_fetch(keys(before, following), keys(before, following))
        window = {int(x) for x in seen.flatten().tolist()}  # type: ignore[union-attr, arg-type]
        assert max(window) == before + following - 1, "nothing of what was taken back"
        needed = set(range(max(0, before + following - 16), before + following))
        assert needed <= window
        assert cache.offset == before + following


def test_keys_and_values_in_few_bits() -> None:
    folder = tiny.heads(64)
    full, eight = load(folder, "heads"), load(folder, "heads", kv_bits=8)
    prompt = full.tokenizer.encode("The quick brown fox jumps over the lazy dog")

    def run(target: Target) -> tuple[mx.array, int]:
        cache = target.make_cache()
        logits, _ = target.forward(prompt, cache)
        mx.eval(logits)
        return logits, sum(layer.nbytes for layer in cache.layers)

    (exact, bytes_full), (rough, bytes_eight) = run(full), run(eight)
    assert bytes_eight < 0.4 * bytes_full
    assert 0 < float(mx.std(exact - rough)) < 0.05 * float(mx.std(exact))
    eight.require_rollback()
    drafted = [
        token
        for drafter in (None, Lookup())
        for step in decode(eight, drafter, prompt, max_tokens=40, sampler=Sampler(Sampling()))
        for token in step.tokens
    ]
    assert drafted[: len(drafted) // 2] == drafted[len(drafted) // 2 :]


def test_heads_that_do_not_fit_few_bits_are_named() -> None:
    with pytest.raises(UnsupportedTargetError, match=r"heads of 8.*leave kv_bits unset"):
        load(tiny.llama(), "llama", kv_bits=4)


def test_layers_that_take_no_quantised_keys_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    # Attention sinks, say.
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise ValueError("Quantized SDPA does not support attention sinks.")

    monkeypatch.setattr("mlx_lm.models.llama.scaled_dot_product_attention", fail)
    with pytest.raises(UnsupportedTargetError, match=r"heads.*attention sinks.*leave kv_bits"):
        load(tiny.heads(64), "heads", kv_bits=8)


def test_the_context_can_be_shortened_and_not_lengthened() -> None:
    assert load(tiny.llama(), "llama", context=100).context == 100
    assert load(tiny.llama(), "llama", context=10**6).context == tiny.CONTEXT


def test_a_cache_that_only_grows() -> None:
    assert load(tiny.llama(), "llama").only_grows
    assert not load(tiny.windowed(), "windowed").only_grows
    assert isinstance(load(tiny.llama(), "llama").make_cache().layers[0], KVCache)


@pytest.mark.parametrize("kept", [0, 100, -1000], ids=["empty", "a header's start", "cut off"])
def test_damaged_weights_are_named(kept: int, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny.llama(), tmp_path / "damaged")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:kept])
    with pytest.raises(UnsupportedTargetError, match=r"damaged in .* cannot be loaded"):
        load(folder, "damaged", precision="native")
    with pytest.raises(UnsupportedTargetError, match="damaged"):
        load(folder, "damaged")
