"""Every kind of mlx-lm's text models: with drafts it writes what mlx-lm writes without, or it is
refused by name.

Windows are of 16 positions, so that each run here wraps them several times.
"""

import functools
import itertools
import math
from pathlib import Path

import decoding
import mlx.core as mx
import pytest
import tiny
from decoding import Scripted, cut, rounds, shaky, tokens_of, truth, widths, wrong
from mlx_lm.generate import generate_step

from dflash_engine.drafters.block import Block
from dflash_engine.drafters.lookup import Lookup
from dflash_engine.errors import UnsupportedTargetError
from dflash_engine.targets import Target, load

SHORT = list(b"hello")
MIDDLE = list(b"The quick brown fox")  # longer than a window
LONG = list(b"The quick brown fox jumps over the lazy dog.")  # and one that no step divides

# Each way of keeping a context, and of reading it: these are run for long.
FAMILIES = (
    "falcon_h1",  # two caches a layer
    "gemma3_text",
    "gemma4",  # layers that share keys and values, and inputs of their own
    "gpt_oss",
    "lfm2",
    "mistral",
    "qwen3_5",
    "qwen3_moe",
    "qwen3_next",
)
REFUSED = {
    "baichuan_m1": "several tokens in one forward",  # a recurrent state inside its attention
    "llama4": "ChunkedKVCache",
    "plamo3": "",  # mlx-lm's mask for several rows is one wider than the window it keeps
}


@functools.cache
def target_of(kind: str) -> Target:
    return load(tiny.model(kind, end_weight=0.0), kind)


@functools.cache
def answer_to(kind: str, prompt: tuple[int, ...], most: int) -> list[int]:
    return truth(target_of(kind), prompt, most)


@pytest.mark.parametrize("kind", [kind for kind in tiny.KINDS if "wide" not in kind])
def test_every_kind_runs_exactly_or_is_refused_by_name(kind: str) -> None:
    target = target_of(kind)
    expected = answer_to(kind, tuple(MIDDLE), 24)
    if kind in REFUSED:
        with pytest.raises(UnsupportedTargetError, match=rf"^{kind}.*{REFUSED[kind]}.*'none'"):
            target.require_rollback()
        assert tokens_of(rounds(target, None, MIDDLE, 24)) == cut(expected, 24)
        return
    target.require_rollback()
    assert len(set(expected)) > 6, "the text wanders"
    script = shaky([*expected, *[0] * 20])
    run = rounds(target, Scripted(len(MIDDLE), script, widths(1)), MIDDLE, 24)
    assert tokens_of(run) == expected
    assert max(len(step.tokens) for step in run) > 2


@pytest.mark.parametrize("kind", FAMILIES)
def test_long_answers_are_mlx_lms_own(kind: str) -> None:
    target = target_of(kind)
    for prompt, most, changes in ((SHORT, 260, (list, shaky)), (LONG, 48, (wrong,))):
        expected = answer_to(kind, tuple(prompt), most)
        for change in changes:
            drafter = Scripted(len(prompt), change(expected), widths(most, least=0))
            assert tokens_of(rounds(target, drafter, prompt, most)) == expected, change


@pytest.mark.parametrize("kind", ["gpt_oss", "gemma4", "mistral"])
def test_rejected_rows_are_gone_from_a_window_when_a_single_row_follows(kind: str) -> None:
    # A rotating cache takes a single row in another way than several: it writes into its ring.
    expected = answer_to(kind, tuple(LONG), 48)
    for pattern in ((5, 0), (15, 0, 0), (1, 0, 3, 0)):
        turn = itertools.cycle(pattern)
        drafter = Scripted(len(LONG), wrong(expected), lambda turn=turn: next(turn))
        run = rounds(target_of(kind), drafter, LONG, 48)
        assert tokens_of(run) == expected, pattern
        assert {0, pattern[0]} <= {step.drafted for step in run}


@pytest.mark.parametrize("width", range(1, 16))
@pytest.mark.parametrize("kind", ["gemma4", "gpt_oss", "qwen3_5"])
def test_every_block_size_is_exact(kind: str, width: int) -> None:
    expected = answer_to(kind, tuple(SHORT), 48)
    right = width + 2  # and then wrong now and then
    script = [*expected[:right], *shaky(expected, 0.7)[right:]]
    drafter = Scripted(len(SHORT), script, width)
    run = rounds(target_of(kind), drafter, SHORT, 48)
    assert tokens_of(run) == expected
    kept = {len(step.tokens) for step in run if step.drafted == width}
    assert width + 1 in kept, "a whole block was kept"
    assert width == 1 or kept - {width + 1}, "and a part of one"


@pytest.mark.parametrize("kind", ["gpt_oss", "qwen3_5"])
def test_copies_are_exact(kind: str) -> None:
    # Lookup drafts up to 15 tokens, of a text that repeats itself.
    target = target_of(kind)
    prompt = list(b"abcabcabcabcabcabc xyz")
    expected = truth(target, prompt, 60)
    prompt = [*prompt, *expected, *prompt]
    run = rounds(target, Lookup(), prompt, 120)
    assert tokens_of(run) == truth(target, prompt, 120)
    assert any(step.drafted for step in run)


@pytest.mark.parametrize(
    "kind", ["falcon_h1", "gemma4", "gpt_oss", "lfm2", "llama4_text", "qwen3_5", "granite"]
)
def test_features_are_of_the_positions_kept(kind: str) -> None:
    target = load(tiny.model(kind, end_weight=0.0), kind)
    target.tap(tiny.TAPS)
    expected = answer_to(kind, tuple(SHORT), 50)
    drafter = Scripted(len(SHORT), shaky(expected), widths(5, 2, 6), taps=tiny.TAPS)
    run = rounds(target, drafter, SHORT, 50)
    assert tokens_of(run) == expected
    assert len({len(step.tokens) for step in run if step.drafted}) > 2, "of all lengths"

    _, whole = target.forward([*SHORT, *expected], target.make_cache())
    seen = mx.concatenate(drafter.seen, axis=1)
    assert whole is not None
    assert seen.shape == (1, seen.shape[1], len(tiny.TAPS) * tiny.HIDDEN)
    assert seen.shape[1] > len(SHORT) + 40
    whole = whole[:, : seen.shape[1]]
    assert mx.abs(seen - whole).max() <= 1e-5 * mx.abs(whole).max()


@pytest.mark.parametrize(
    ("kind", "scale"),
    [
        ("gemma3_text", math.sqrt(tiny.HIDDEN)),
        ("gemma4", math.sqrt(tiny.HIDDEN)),
        ("granite", 3.0),
        ("minicpm3", 4.0),
        ("gpt_oss", 1.0),
        ("lfm2", 1.0),
        ("mamba2", 1.0),
        ("qwen3_5", 1.0),
        ("recurrent_gemma", math.sqrt(tiny.HIDDEN)),
    ],
)
def test_what_the_first_layer_reads_is_the_embedding_scaled(kind: str, scale: float) -> None:
    target = target_of(kind)
    assert target.embedding_scale == pytest.approx(scale, rel=2e-3)
    assert target.embedding.weight.shape == (tiny.VOCAB, tiny.HIDDEN)


@pytest.mark.parametrize(
    ("kind", "own"),
    [
        ("qwen3_5", True),
        ("qwen3_5-nested", True),
        ("qwen3_5-tied", False),
        ("lfm2", False),
        ("gemma4", False),
        ("gpt_oss", True),
        ("llama4_text", True),
    ],
)
def test_an_untied_head_is_the_models_own(kind: str, own: bool) -> None:
    target = target_of(kind)
    states = mx.random.normal((1, 3, tiny.HIDDEN), key=mx.random.key(1))
    logits, tied = target.head(states), target.embedding.as_linear(states)
    assert logits.shape == (1, 3, tiny.VOCAB)
    assert mx.array_equal(logits, tied).item() != own


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_block_draft_is_exact_on_it(kind: str, tmp_path: Path) -> None:
    target = load(tiny.model(kind, end_weight=0.0), kind)
    config = tiny.draft_config(num_target_layers=len(target.layers))
    block = Block(tiny.write_draft(tmp_path / "draft", config), target)
    run = rounds(target, block, LONG, 48)
    assert tokens_of(run) == answer_to(kind, tuple(LONG), 48)
    assert any(step.drafted == 5 for step in run)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("size", [32, 64])
def test_keys_and_values_in_few_bits_are_mlx_lms(size: int, bits: int) -> None:
    folder = tiny.heads(size)
    target = load(folder, "heads", kv_bits=bits)
    steps = generate_step(
        mx.array(LONG),
        target.model,
        max_tokens=60,
        prefill_step_size=decoding.STEP,
        prompt_cache=target.make_cache().layers,
    )
    expected = [int(token) for token, _ in steps]
    assert expected != truth(target, LONG, 60), "the bits are felt"
    for drafter in (None, Scripted(len(LONG), shaky(expected), widths(2))):
        assert tokens_of(rounds(target, drafter, LONG, 60)) == expected


def test_heads_that_few_bits_do_not_fit_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedTargetError, match=r"llama has heads of 8.*kv_bits"):
        load(tiny.llama(), "llama", kv_bits=8).make_cache()


@pytest.mark.parametrize("kind", ["deepseek_v3-wide", "gemma2-wide", "gemma4-wide", "gpt_oss-wide"])
def test_attention_that_cannot_read_few_bits_is_refused_by_name(kind: str) -> None:
    with pytest.raises(UnsupportedTargetError, match=rf"(?s){kind}.*kv_bits"):
        load(tiny.model(kind, end_weight=0.0), kind, kv_bits=8).make_cache()


def test_windows_stay_as_they_are_beside_keys_in_few_bits() -> None:
    target = load(tiny.model("mistral-wide", end_weight=0.0), "mistral", kv_bits=8)
    kinds = {type(layer).__name__ for layer in target.make_cache().layers}
    assert kinds == {"QuantizedKVCache", "RotatingKVCache"}
    expected = tokens_of(rounds(target, None, LONG, 60))
    drafter = Scripted(len(LONG), shaky(expected), widths(3))
    assert tokens_of(rounds(target, drafter, LONG, 60)) == expected
