"""Whether models fit, what is said when they do not, and which to recommend."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import psutil
import pytest
import tiny

from dflash_engine import fit, registry
from dflash_engine.errors import NotEnoughMemoryError, UnsupportedDraftError, UnsupportedTargetError
from dflash_engine.fit import GIB, Machine, check, choose, resolve_precision, unwire, wire

CPU = Machine(total=1000 * GIB, limit=900 * GIB)
MAC = Machine(total=1000 * GIB, limit=900 * GIB, gpu=True)


def write(folder: Path, config: dict[str, Any], tensors: dict[str, tuple[str, int, int]]) -> Path:
    """A model's folder with a file of the right size and nothing in it: type, rows, columns."""
    bytes_of = {"BF16": 2, "F32": 4, "U32": 4}
    header, end = {}, 0
    for name, (dtype, *shape) in tensors.items():
        start, end = end, end + shape[0] * shape[1] * bytes_of[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    folder.mkdir(parents=True)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """As large as Qwen3-4B in 4 bits."""
    config = {
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "quantization": {"group_size": 64, "bits": 4},
    }
    tensors = {
        "layers.weight": ("U32", 4_000_000, 125),
        "layers.scales": ("BF16", 4_000_000, 15),
        "layers.biases": ("BF16", 4_000_000, 15),
    }
    return write(tmp_path / "Qwen3-4B-4bit", config, tensors)


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    """As large as its draft."""
    config = tiny.draft_config(
        (tiny.FULL,) * 5, num_attention_heads=32, num_key_value_heads=8, head_dim=128
    )
    return write(tmp_path / "draft", config, {"fc.weight": ("BF16", 8_390_625, 64)})


def machine_for(need: fit.Need, *, gpu: bool = True) -> Machine:
    """A machine that has just that much to spare."""
    return Machine(total=16 * GIB, limit=need.total + GIB, used=GIB, gpu=gpu)


def test_the_parts_of_a_need(target: Path, draft: Path) -> None:
    need = check(target, draft, context=8192, machine=MAC)
    assert need.target == 4_000_000 * (125 * 4 + 2 * 15 * 2)
    assert need.draft == 8_390_625 * 64 * 2
    assert need.cache == 8192 * 36 * 2 * 8 * 128 * 2
    assert need.draft_cache > 8192 * 5 * 2 * 8 * 128 * 2
    assert 0.25 * GIB < need.working < 0.75 * GIB
    assert need.total == sum((need.target, need.draft, need.cache, need.draft_cache, need.working))


def test_fewer_bits_need_less(target: Path, draft: Path) -> None:
    def need(**options: Any) -> fit.Need:
        return check(target, draft, context=8192, machine=MAC, **options)

    plain = need()
    assert need(kv_bits=8).cache == plain.cache * 8.5 / 16
    assert need(kv_bits=4).cache == plain.cache * 4.5 / 16
    assert need(draft_bits=8).draft == plain.draft * 8.5 / 16
    assert need(draft_bits=4).draft == plain.draft * 4.5 / 16
    assert need(kv_bits=4).draft_cache == plain.draft_cache


def test_dense_fp32_needs_four_bytes_a_weight(target: Path, draft: Path) -> None:
    native = check(target, draft, context=8192, precision="native", machine=CPU)
    dense = check(target, draft, context=8192, precision="float32", machine=CPU)
    assert dense.target == 4_000_000 * 1000 * 4
    assert (dense.draft, dense.cache) == (2 * native.draft, 2 * native.cache)


def test_a_small_draft_is_a_model_of_its_own(target: Path) -> None:
    small = check(target, tiny.small_draft(), context=1024, precision="native", machine=MAC)
    alone = check(tiny.small_draft(), context=1024, precision="native", machine=MAC)
    assert (small.draft, small.draft_cache) == (alone.target, alone.cache)


def test_what_just_fits_fits_and_a_byte_less_does_not(target: Path, draft: Path) -> None:
    need = check(target, draft, context=8192, machine=MAC)
    machine = machine_for(need)
    assert check(target, draft, context=8192, machine=machine) == need
    with pytest.raises(NotEnoughMemoryError):
        check(target, draft, context=8192, machine=replace(machine, limit=machine.limit - 1))


LITTLE = {"kv_bits": 4, "draft_bits": 4}


@pytest.mark.parametrize(
    ("asked", "changes", "said"),
    [
        ({"context": 40960}, {"kv_bits": 8}, "kv_bits=8"),
        ({"context": 2048}, {"draft_bits": 4}, "draft_bits=4"),
        ({"context": 40960}, {"kv_bits": 4}, "kv_bits=4"),
        ({"context": 40960, **LITTLE}, {"context": 16384}, "context=16384"),
        ({"context": 40960, **LITTLE}, {"context": 17000}, "context=16384"),
        (
            {"context": 2048, "precision": "float32", **LITTLE},
            {"precision": "native"},
            "precision='native'",
        ),
        ({"context": 2048, **LITTLE}, {"draft_folder": None}, "no draft model"),
        (
            {"context": 8192},
            {"kv_bits": 8, "draft_bits": 4},
            "kv_bits=8 and draft_bits=4",
        ),
        (
            {"context": 40960},
            {"context": 5000, **LITTLE},
            "kv_bits=4 and draft_bits=4 and context=4096",
        ),
    ],
)
def test_the_refusal_names_the_change_that_costs_least(
    target: Path, draft: Path, asked: dict[str, Any], changes: dict[str, Any], said: str
) -> None:
    options = {"draft_folder": draft} | asked
    room = check(target, **options | changes, machine=MAC)
    with pytest.raises(NotEnoughMemoryError) as refused:
        check(target, **options, machine=machine_for(room))
    assert str(refused.value).endswith(f"It would fit with {said}")


def test_the_refusal_says_what_each_part_needs_and_what_there_is(target: Path, draft: Path) -> None:
    machine = Machine(total=8 * GIB, limit=5 * GIB, used=GIB, gpu=True)
    with pytest.raises(NotEnoughMemoryError) as refused:
        check(target, draft, context=40960, machine=machine)
    assert str(refused.value) == (
        "Qwen3-4B-4bit needs 9.9 GiB of memory (target 2.1 GiB, draft 1.8 GiB, a context of 40960 "
        "tokens 5.6 GiB, working 388 MiB); this machine has 4.0 GiB for it, of 8.0 GiB in all. It "
        "would fit with context=2048"
    )


@pytest.mark.parametrize(
    ("limit", "said"),
    [
        (6 * GIB, "No setting makes it fit; Qwen/Qwen3.5-4B in 4 bits would"),
        (GIB, "No setting makes it fit: close other programs, or take a smaller model"),
    ],
)
def test_a_target_that_no_setting_makes_fit(tmp_path: Path, limit: int, said: str) -> None:
    big = write(tmp_path / "big", {}, {"layers.weight": ("BF16", 10**7, 1000)})
    with pytest.raises(NotEnoughMemoryError) as refused:
        check(big, machine=replace(MAC, limit=limit))
    assert said in str(refused.value)


def test_the_context_is_the_models_or_what_fits(target: Path, draft: Path) -> None:
    assert check(target, draft, machine=MAC).context == 40960
    assert check(target, draft, context=100_000, machine=MAC).context == 40960
    assert check(target, draft, context=5000, machine=MAC).context == 5000
    room = check(target, draft, context=6000, machine=MAC)
    fits = check(target, draft, machine=machine_for(room))
    assert fits.context == 6144  # caches grow by 256
    assert fits.total <= room.total


def test_a_context_of_no_use_is_refused(target: Path, draft: Path) -> None:
    room = check(target, draft, context=1024, machine=MAC)
    with pytest.raises(NotEnoughMemoryError, match="a context of 2048 tokens"):
        check(target, draft, machine=machine_for(room))
    assert check(target, draft, context=1024, machine=machine_for(room)) == room


@pytest.mark.parametrize(
    ("machine", "precision"),
    [
        (replace(MAC, total=16 * GIB), "native"),
        (replace(CPU, total=48 * GIB), "float32"),
        (replace(CPU, total=44 * GIB), "native"),  # four bytes of 4e9 weights: 14.9 GiB
    ],
)
def test_what_auto_precision_is(target: Path, machine: Machine, precision: str) -> None:
    assert resolve_precision(target, "auto", machine) == precision
    assert resolve_precision(target, "native", machine) == "native"
    assert resolve_precision(target, "float32", machine) == "float32"
    assert check(target, context=2048, machine=machine).target == (
        check(target, context=2048, precision=precision, machine=machine).target  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda folder: (folder / "config.json").unlink(), "No such file"),
        (lambda folder: (folder / "config.json").write_text("{"), "Expecting"),
        (lambda folder: (folder / "config.json").write_text("[]"), "list"),
        (lambda folder: (folder / "model.safetensors").unlink(), "no model.*safetensors in"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"\0"), "cut short"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"\7" * 900), "cut short"),
        (
            lambda folder: (folder / "model.safetensors").write_bytes(b"\1" + b"\0" * 7 + b"1"),
            "int",
        ),
        (
            lambda folder: (folder / "model.safetensors").write_bytes(
                b"\x09" + b"\0" * 7 + b'{"a": {}}'
            ),
            "data_offsets",
        ),
    ],
)
def test_a_folder_that_cannot_be_read_is_named(
    target: Path, tmp_path: Path, damage: Any, said: str
) -> None:
    damage(target)
    with pytest.raises(UnsupportedTargetError, match=f"(?s){target} cannot be loaded.*{said}"):
        check(target, machine=MAC)


def test_weights_whose_end_is_missing_are_refused(target: Path) -> None:
    file = target / "model.safetensors"
    with file.open("rb+") as stream:
        stream.truncate(file.stat().st_size - 1)
    with pytest.raises(UnsupportedTargetError, match="cut short"):
        check(target, machine=MAC)


def test_a_draft_that_cannot_be_read_is_named(target: Path, tmp_path: Path) -> None:
    for text in (None, "{", "[]", "{}"):
        folder = tmp_path / f"draft {text}"
        folder.mkdir()
        if text is not None:
            (folder / "config.json").write_text(text)
        with pytest.raises(UnsupportedDraftError, match="no draft in"):
            check(target, folder, machine=MAC)


def test_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.cpu))
    memory = psutil.virtual_memory()
    here = Machine.here()
    assert (here.total, here.gpu, here.used) == (memory.total, False, 0)
    assert 0 < here.usable == here.limit < here.total


METAL = {"memory_size": 16 * GIB, "max_recommended_working_set_size": 11 * GIB}


@pytest.fixture
def metal(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A Mac with 16 GiB, of which this process uses one; lists the wired limits it is given."""
    limits = [0]

    def set_limit(limit: int) -> int:
        limits.append(limit)
        return limits[-2]

    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    monkeypatch.setattr(mx, "device_info", lambda: METAL)
    monkeypatch.setattr(mx, "get_active_memory", lambda: GIB)
    monkeypatch.setattr(mx, "set_wired_limit", set_limit)
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    return limits


def test_a_mac(metal: list[int]) -> None:
    here = Machine.here()
    assert here == Machine(total=16 * GIB, limit=11 * GIB, used=GIB, gpu=True)
    assert here.usable == 10 * GIB


def test_a_mac_with_an_older_mlx(metal: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(mx, "device_info")
    monkeypatch.setattr(mx.metal, "device_info", lambda: METAL)
    assert Machine.here().limit == 11 * GIB


def test_what_is_needed_is_wired_and_never_more_than_allowed(
    metal: list[int], target: Path
) -> None:
    machine = Machine.here()
    need = check(target, context=8192, machine=machine)
    assert wire(machine, need) == 0
    assert wire(machine, replace(need, cache=100 * GIB)) == need.total + GIB
    assert metal == [0, need.total + GIB, 11 * GIB]
    unwire(0)
    unwire(None)
    assert metal[3:] == [0], "the old limit, once"


def test_nothing_is_wired_without_metal(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "set_wired_limit", lambda limit: pytest.fail("it was set"))
    assert wire(CPU, check(target, context=8192, machine=CPU)) is None


@pytest.mark.parametrize(
    ("memory", "for_models", "target"),
    [
        (8, 5.3, "Qwen/Qwen3.5-4B"),
        (16, 10.7, "Qwen/Qwen3.5-4B"),
        (24, 16, "Qwen/Qwen3.5-4B"),
        (32, 21.3, "Qwen/Qwen3.5-9B"),
        (64, 48, "Qwen/Qwen3.6-35B-A3B"),
        (192, 144, "Qwen/Qwen3.5-122B-A10B"),
    ],
)
def test_the_pair_for_a_mac(memory: int, for_models: float, target: str) -> None:
    pair = choose(Machine(memory * GIB, int(for_models * GIB), gpu=True))
    assert pair is not None
    assert pair.target.repo == target
    assert pair.general
    assert pair.confirmed


def test_no_pair_is_recommended_where_none_fits_or_all_are_slow() -> None:
    assert choose(Machine(4 * GIB, 3 * GIB, gpu=True)) is None
    assert choose(Machine(64 * GIB, 60 * GIB)) is None


def test_what_a_registered_pair_needs() -> None:
    pair = registry.draft_for("Qwen/Qwen3-4B")
    assert pair is not None
    needs = {bits: fit.of_pair(pair, bits) for bits in (4, 8, 16, 32)}
    assert needs[4].target == int(4.0e9 * 4.5 / 8)
    assert needs[8].target == int(4.0e9 * 8.5 / 8)
    assert needs[16].target == int(4.0e9 * 2)
    assert needs[4].draft == int(0.537e9 * 2)
    assert needs[32].cache == 2 * needs[4].cache == 2 * 8192 * 36 * 2 * 8 * 128 * 2


def test_a_model_made_in_4_bits_has_no_8(tmp_path: Path) -> None:
    pair = registry.draft_for("openai/gpt-oss-20b")
    assert pair is not None
    assert fit.of_pair(pair, 8) == fit.of_pair(pair, 4)


def test_sizes() -> None:
    assert [fit.size(n) for n in (0, 2**20, GIB - 2**20, GIB, 3 * GIB // 2)] == [
        "0 MiB",
        "1 MiB",
        "1023 MiB",
        "1.0 GiB",
        "1.5 GiB",
    ]
