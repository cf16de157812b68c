"""Prompt prefixes: what is found, what is kept, what is written, and what damage does."""

import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from dflash_engine import fit, prefix, prefix_disk, prefix_snapshot
from dflash_engine.prefix import Hit, Prefixes
from dflash_engine.prefix_index import Index, count, key_of, shared
from dflash_engine.prefix_snapshot import Snapshot, storable

WINDOW = 16
ROW = 2 * 4 * 4  # bytes of a token in a KVCache made here: keys and values of 4 floats


def rows(tokens: Sequence[int], width: int = 4, scale: float = 1.0) -> mx.array:
    """Keys or values [1, 1, S, width] that tell which tokens they are of."""
    column = mx.array(list(tokens), dtype=mx.float32)[None, None, :, None] * scale
    return mx.broadcast_to(column, (1, 1, len(tokens), width))


def read(layers: Sequence[Any], tokens: Sequence[int]) -> Sequence[Any]:
    """What a model's layers do to their caches when they read ``tokens``."""
    for layer in layers:
        if isinstance(layer, CacheList):
            read(layer.caches, tokens)
        elif isinstance(layer, ArraysCache):
            for token in tokens:
                before = layer[0] if layer[0] is not None else mx.zeros((1, 3))
                layer[0] = before * 0.5 + token
        elif isinstance(layer, QuantizedKVCache):
            layer.update_and_fetch(rows(tokens, 64), rows(tokens, 64, -1.0))
        else:
            layer.update_and_fetch(rows(tokens), rows(tokens, scale=-1.0))
    return layers


def seen(layers: Sequence[Any]) -> list[Any]:
    """All that a model would see in its caches, as numbers."""
    found: list[Any] = []
    for layer in layers:
        if isinstance(layer, CacheList):
            found += seen(layer.caches)
        elif isinstance(layer, ArraysCache):
            found.append([array.tolist() for array in layer.cache])
        elif isinstance(layer, QuantizedKVCache):
            found.append(
                [layer.offset, *([x.tolist() for x in kv] for kv in layer.keys_and_values())]
            )
        elif isinstance(layer, RotatingKVCache):
            # What the next row sees beside itself, in order of time.
            keys = layer._temporal_order(layer.keys)[..., -(WINDOW - 1) :, :]
            found.append([layer.offset, keys.tolist()])
        else:
            found.append([layer.offset, *(x.tolist() for x in layer.keys_and_values())])
    return found


Make = Callable[[], list[Any]]
GROWING: dict[str, Make] = {
    "plain": lambda: [KVCache(), KVCache()],
    "quantised": lambda: [QuantizedKVCache(64, 8)],
    "concatenated": lambda: [ConcatenateKVCache()],
    "pairs": lambda: [CacheList(KVCache(), KVCache())],
}
FIXED: dict[str, Make] = {
    "rotating": lambda: [RotatingKVCache(WINDOW), KVCache()],
    "recurrent": lambda: [ArraysCache(1), KVCache()],
    "mixed pairs": lambda: [CacheList(ArraysCache(1), KVCache())],
}


def kinds(which: dict[str, Make]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("make", which.values(), ids=which.keys())


def plain(tokens: Sequence[int]) -> Sequence[Any]:
    return read(GROWING["plain"](), tokens)


def recurrent(tokens: Sequence[int]) -> Sequence[Any]:
    return read(FIXED["recurrent"](), tokens)


def prefixes(memory_bytes: int = 2**20, *, least: int = 1, **more: Any) -> Prefixes:
    more.setdefault("spare", lambda: 2**40)
    return Prefixes("model", memory_bytes=memory_bytes, least=least, **more)


def found(hit: Hit | None) -> Hit:
    assert hit is not None
    return hit


# Index


def test_tokens_are_compared_as_tokens_and_not_as_bytes() -> None:
    assert shared(key_of([1, 256, 7]), key_of([1, 257, 7])) == 1
    assert shared(key_of([5, 6]), key_of([5, 6, 7])) == 2
    assert shared(key_of([]), key_of([1])) == 0
    assert count(key_of([9, 9, 9])) == 3
    with pytest.raises(OverflowError):
        key_of([-1])


few = st.lists(st.integers(0, 2), max_size=6)


@given(entries=st.lists(few, max_size=12), gone=st.lists(few, max_size=3), prompt=few)
def test_the_nearest_are_those_that_share_most(
    entries: list[list[int]], gone: list[list[int]], prompt: list[int]
) -> None:
    index = Index()
    for entry in entries:
        index.add(key_of(entry))
    for entry in gone:
        index.remove(key_of(entry))
    left = {key_of(entry) for entry in entries} - {key_of(entry) for entry in gone}
    assert len(index) == len(left)

    wanted = key_of(prompt)
    nearest = list(index.nearest(wanted))

    expected = {key: n for key in left if (n := shared(key, wanted))}
    assert {key: n for n, key in nearest} == expected
    assert [n for n, _ in nearest] == sorted(expected.values(), reverse=True)


# Finding


@kinds(GROWING)
def test_a_growing_cache_serves_every_shorter_prefix(make: Make) -> None:
    store = prefixes()
    tokens = list(range(10, 50))
    store.put(tokens, read(make(), tokens))
    for prompt in ([*tokens, 1, 2], tokens, tokens[:7], [*tokens[:20], 3, 4]):
        hit = found(store.find(prompt))
        common = [t for t, own in zip(prompt[:-1], tokens, strict=False) if t == own]
        assert hit.length == len(common)
        assert seen(hit.layers) == seen(read(make(), common))
        assert not hit.from_disk


@kinds(FIXED)
def test_other_caches_serve_just_the_length_they_were_taken_at(make: Make) -> None:
    store = prefixes()
    tokens = list(range(10, 50))
    for length in (20, 40):
        store.put(tokens[:length], read(make(), tokens[:length]))
    for prompt, length in (
        ([*tokens, 1], 40),
        (tokens, 20),  # the last token is read in any case
        (tokens[:30], 20),
        ([*tokens[:20], 1], 20),
    ):
        hit = found(store.find(prompt))
        assert hit.length == length
        assert seen(hit.layers) == seen(read(make(), tokens[:length]))
    assert store.find(tokens[:20]) is None
    assert store.find([1, 2, 3]) is None


def test_a_rotating_cache_can_be_cut_until_its_window_is_full() -> None:
    tokens = list(range(10, 50))
    for length, served in ((WINDOW - 1, 9), (WINDOW, 0)):
        store = prefixes()
        store.put(tokens[:length], read([RotatingKVCache(WINDOW)], tokens[:length]))
        hit = store.find(tokens[:10])
        assert (hit.length if hit else 0) == served
        if hit:
            assert seen(hit.layers) == seen(read([RotatingKVCache(WINDOW)], tokens[:9]))


@pytest.mark.parametrize("before", [12, 15, 16, 17, 30])
@pytest.mark.parametrize("singles", [0, 1, 3, 20])
@pytest.mark.parametrize("after", [[1], [1, 2, 3], list(range(20))])
def test_a_rotating_cache_goes_on_as_if_it_had_not_been_stored(
    before: int, singles: int, after: list[int]
) -> None:
    layer = RotatingKVCache(WINDOW)
    tokens = list(range(100, 100 + before + singles))
    read([layer], tokens[:before])
    for token in tokens[before:]:
        read([layer], [token])
    store = prefixes()
    store.put(tokens, [layer])
    assert store.nbytes == min(WINDOW, len(tokens)) * ROW
    own = found(store.find([*tokens, 0])).layers
    for layers in (own, [layer]):
        read(layers, after)
        read(layers, [7])
    assert seen(own) == seen([layer])


@kinds(GROWING)
def test_a_cache_that_read_further_is_cut(make: Make) -> None:
    store = prefixes()
    tokens = list(range(40))
    layers = read(make(), tokens)
    store.put(tokens[:30], layers)
    assert seen(layers) == seen(read(make(), tokens))
    hit = found(store.find(tokens))
    assert hit.length == 30
    assert seen(hit.layers) == seen(read(make(), tokens[:30]))


def test_a_cache_that_has_not_the_tokens_is_refused() -> None:
    tokens = list(range(40))
    for layer, length in ((KVCache(), 21), (RotatingKVCache(WINDOW), 19)):
        with pytest.raises(ValueError, match=f"read 20 tokens does not hold the first {length}"):
            prefixes().put(tokens[:length], read([layer], tokens[:20]))


@kinds(FIXED)
def test_a_state_after_more_tokens_is_refused(make: Make) -> None:
    tokens = list(range(40))
    with pytest.raises(ValueError, match="read 40 tokens"):
        prefixes().put(tokens[:39], read(make(), tokens))


def test_a_layer_that_is_not_used_is_kept_as_it_is() -> None:
    store = prefixes()
    store.put([1, 2, 3], [*plain([1, 2, 3]), KVCache()])
    hit = found(store.find([1, 2, 3, 4]))
    assert hit.layers[-1].keys is None
    assert store.find([1, 2, 9]) is not None


def test_an_unknown_cache_is_logged_once_and_not_kept(caplog: pytest.LogCaptureFixture) -> None:
    class Own(KVCache):
        pass

    store = prefixes()
    for layer in (ChunkedKVCache(8), Own()):
        store.put([1, 2, 3], [layer])
    assert store.find([1, 2, 3, 4]) is None
    assert [record.message for record in caplog.records] == [
        "prompt prefixes are not kept: a ChunkedKVCache cannot be kept: its state is not known here"
    ]


def test_a_cache_with_more_state_than_is_known_is_not_kept() -> None:
    layer = KVCache()
    layer.added_by_another_version = 1
    store = prefixes()
    store.put([1, 2], read([layer], [1, 2]))
    assert store.count == 0


@kinds(GROWING | FIXED)
def test_nothing_that_happens_later_changes_what_is_kept(make: Make) -> None:
    store = prefixes()
    tokens = list(range(10, 50))
    layers = read(make(), tokens)
    store.put(tokens, layers)
    read(layers, [1, 2, 3])
    expected = seen(read(make(), tokens))
    for _ in range(3):
        hit = found(store.find([*tokens, 5]))
        assert seen(hit.layers) == expected
        read(hit.layers, [7, 8])
        read(hit.layers, [9])
        for layer in hit.layers:  # in place, where a slice assignment reaches
            for array in [a for a in vars(layer).values() if isinstance(a, mx.array)]:
                array[...] = 0


def test_only_what_is_used_takes_memory() -> None:
    store = prefixes()
    tokens = list(range(300))
    layer = KVCache()
    read([layer], tokens)
    assert layer.nbytes > 300 * ROW
    store.put(tokens, [layer])
    assert store.nbytes == 300 * ROW


def test_with_hundreds_of_prefixes_finding_is_quick() -> None:
    store = prefixes(2**30)
    common = list(range(1000))
    for n in range(300):
        tokens = [*common, n, 1]
        store.put(tokens, plain(tokens))
    started = time.perf_counter()
    for n in range(20):
        assert found(store.find([*common, n, 1, 2])).length == 1002
        assert found(store.find([*common, 5000 + n, 2])).length == 1000
    assert time.perf_counter() - started < 2


# Where to take snapshots


def test_the_third_request_with_a_shared_beginning_is_served() -> None:
    store = prefixes(least=8)
    system = list(range(100, 120))
    lengths = []
    for question in ([1] * 9, [2] * 9, [3] * 9, [4] * 9):
        prompt = [*system, *question, 0]
        hit = store.find(prompt)
        lengths.append(hit.length if hit else 0)
        stops = store.worth(prompt, lengths[-1])
        for stop in stops:
            store.put(prompt[:stop], recurrent(prompt[:stop]))
    assert lengths == [0, 0, 20, 20]


def test_snapshots_are_taken_where_prompts_part_and_at_the_end() -> None:
    store = prefixes(least=8)
    first = list(range(100, 140))
    assert store.worth(first) == [39]
    store.put(first[:39], recurrent(first[:39]))
    assert store.worth([*first[:20], *range(30)]) == [20, 49]
    assert store.worth([*first[:20], 1, 2, 3]) == [20]  # the end would save 2 more
    assert store.worth([*first[:5], *range(30)]) == [34]  # the parting would save 5
    assert store.worth([*first[:20], *range(30)], read=20) == [49]
    assert store.worth(first, read=39) == []
    assert store.worth(first[:4]) == []


def test_what_can_be_cut_needs_no_snapshot_where_prompts_part() -> None:
    store = prefixes(least=8)
    first = list(range(100, 140))
    store.put(first[:39], plain(first[:39]))
    assert store.worth([*first[:20], *range(30)], read=20) == [49]
    assert store.worth([*first[:20], *range(30)]) == [49]


def test_partings_are_known_from_prompts_that_were_not_kept_or_are_on_disk(
    tmp_path: Path,
) -> None:
    store = prefixes(1)  # room for none
    first = list(range(100, 140))
    store.put(first, recurrent(first))
    assert store.count == 0
    assert store.worth([*first[:20], 1, 2]) == [20, 21]

    store = prefixes(folder=tmp_path, disk_bytes=2**20)
    store.put(first, recurrent(first))
    store.close()
    store = prefixes(folder=tmp_path, disk_bytes=2**20)
    assert store.worth([*first[:20], 1, 2]) == [20, 21]


def test_only_so_many_prompts_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix, "_REMEMBERED", 2)
    store = prefixes()
    for first in (1, 2, 3):
        store.put([first] * 9, recurrent([first] * 9))
    assert [store.worth([first] * 5 + [0])[0] for first in (2, 3)] == [5, 5]
    assert store.worth([1] * 5 + [0, 0]) == [6]


# The draft


@storable
@dataclass(frozen=True)
class Cuttable:
    tokens: list[int]
    states: mx.array
    more: dict[str, Any]

    shortest = 0

    def trimmed(self, length: int) -> "Cuttable":
        return Cuttable(self.tokens[:length], self.states[:length], self.more)


@storable
@dataclass
class Whole:
    states: tuple[mx.array, ...]


def drafted(tokens: Sequence[int]) -> Cuttable:
    more = {"reach": None, "scale": 0.5, "parts": (1, [True, "x"])}
    return Cuttable(list(tokens), mx.array(list(tokens)), more)


@pytest.mark.parametrize("restarted", [False, True])
def test_the_draft_comes_back_with_the_target(tmp_path: Path, restarted: bool) -> None:
    store = prefixes(folder=tmp_path, disk_bytes=2**20)
    tokens = list(range(10, 30))
    store.put(tokens, plain(tokens), drafted(tokens))
    if restarted:
        store.close()
        store = prefixes(folder=tmp_path, disk_bytes=2**20)
    for prompt, length in (([*tokens, 1], 20), ([*tokens[:12], 1, 2], 12)):
        hit = found(store.find(prompt))
        assert hit.length == length
        assert hit.draft.tokens == tokens[:length]
        assert hit.draft.states.tolist() == tokens[:length]
        assert hit.draft.more == drafted([]).more


def test_a_draft_that_cannot_be_cut_binds_its_target_to_its_length() -> None:
    store = prefixes()
    tokens = list(range(10, 30))
    store.put(tokens, plain(tokens), Whole((mx.array([1.0]),)))
    assert store.find([*tokens[:12], 1, 2]) is None
    assert store.worth([*tokens[:12], 1, 2]) == [12, 13]
    store.put(tokens[:12], plain(tokens[:12]), Whole((mx.array([2.0]),)))
    hit = found(store.find([*tokens[:15], 1, 2]))
    assert (hit.length, hit.draft.states[0].item()) == (12, 2.0)
    hit = found(store.find([*tokens, 1]))
    assert (hit.length, hit.draft.states[0].item()) == (20, 1.0)


def test_a_drafts_arrays_are_its_own() -> None:
    store = prefixes()
    states = mx.array([1.0, 2.0])
    store.put([1, 2], plain([1, 2]), Whole((states,)))
    states[0] = 9.0
    for _ in range(2):
        hit = found(store.find([1, 2, 3]))
        assert hit.draft.states[0].tolist() == [1.0, 2.0]
        hit.draft.states[0][...] = 0.0


def test_a_snapshot_is_good_for_no_other_length() -> None:
    snapshot = Snapshot.take(3, recurrent([1, 2, 3]), None)
    with pytest.raises(ValueError, match="good for 3 to 3 tokens, not 2"):
        snapshot.restore(2)


# Memory


def test_those_used_longest_ago_go_first() -> None:
    store = prefixes(3 * 2 * 10 * ROW)
    texts = [[n] * 10 for n in range(4)]
    for tokens in texts[:3]:
        store.put(tokens, plain(tokens))
    assert store.find([*texts[0], 9]) is not None
    store.put(texts[3], plain(texts[3]))
    assert [store.find([*tokens, 9]) is not None for tokens in texts] == [True, False, True, True]
    assert store.nbytes == 3 * 2 * 10 * ROW


def test_putting_it_again_counts_as_use() -> None:
    store = prefixes(2 * 2 * 10 * ROW)
    texts = [[n] * 10 for n in range(3)]
    for tokens in (texts[0], texts[1], texts[0], texts[2]):
        store.put(tokens, plain(tokens))
    assert [store.find([*tokens, 9]) is not None for tokens in texts] == [True, False, True]


def test_what_takes_more_than_all_is_not_kept() -> None:
    store = prefixes(2 * 10 * ROW)
    store.put([1] * 10, plain([1] * 10))
    store.put([2] * 11, plain([2] * 11))
    assert store.find([2] * 12) is None
    assert store.find([1] * 11) is not None


def test_what_a_longer_one_serves_is_dropped() -> None:
    store = prefixes()
    for length in (10, 30, 20):
        store.put([1] * length, plain([1] * length))
    assert (store.count, store.nbytes) == (1, 2 * 30 * ROW)
    for length in (10, 20):
        store.put([2] * length, recurrent([2] * length))
    assert store.count == 3


def test_no_tokens_are_not_kept() -> None:
    store = prefixes()
    store.put([], [KVCache()])
    assert store.count == 0
    assert store.find([1]) is None


# The guard


def test_prefixes_go_before_the_system_swaps(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    free = 2**30
    size = 2 * 10 * ROW
    store = prefixes(spare=lambda: free - store.nbytes)
    for n in range(4):
        store.put([n] * 10, plain([n] * 10))
    assert store.find([*[0] * 10, 5]) is not None  # now the last to go
    free = 2 * size
    assert store.find([*[9] * 10]) is None
    assert store.count == 2
    assert "let go of prompt prefixes of" in caplog.text
    assert store.find([*[0] * 10, 5]) is not None
    assert store.find([*[3] * 10, 5]) is not None
    assert store.shed(room=size)
    assert store.count == 1
    free = -1
    assert not store.shed()
    assert store.count == 0


def test_a_hit_survives_the_guard() -> None:
    free = 2**30
    store = prefixes(spare=lambda: free)
    store.put([1] * 10, plain([1] * 10))
    free = -1
    hit = found(store.find([1] * 11))
    assert seen(hit.layers) == seen(plain([1] * 10))
    assert store.count == 0


def test_no_copy_is_made_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    store = prefixes(spare=lambda: 2 * 10 * ROW - 1)
    monkeypatch.setattr(mx, "eval", lambda *_: pytest.fail("evaluated"))
    store.put([1] * 10, plain([1] * 10))
    assert store.count == 0


@pytest.mark.parametrize(
    ("available", "machine", "expected"),
    [
        (4000, fit.Machine(16_000, 4000), 3000),
        (500, fit.Machine(16_000, 500), -500),
        (4000, fit.Machine(16_000, 11_000, 10_500, gpu=True), -500),  # near the working set
        (200, fit.Machine(16_000, 11_000, 2000, gpu=True), -800),  # others took the memory
    ],
)
def test_a_sixteenth_of_the_memory_is_left_to_others(
    monkeypatch: pytest.MonkeyPatch, available: int, machine: fit.Machine, expected: int
) -> None:
    memory = SimpleNamespace(total=16_000, available=available)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(fit.Machine, "here", classmethod(lambda cls: machine))
    assert prefix.spare() == expected


def test_this_machine_says_what_it_has_to_spare() -> None:
    assert -psutil.virtual_memory().total < prefix.spare() < psutil.virtual_memory().total


# Disk


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[Callable[..., Prefixes]]:
    """Makes stores over one folder, as one process after the other would."""
    made: list[Prefixes] = []

    def make(key: str = "model", disk_bytes: int = 2**20, memory_bytes: int = 2**20) -> Prefixes:
        if made:
            made[-1].close()
        made.append(
            Prefixes(
                key,
                memory_bytes=memory_bytes,
                folder=tmp_path / "prefixes",
                disk_bytes=disk_bytes,
                spare=lambda: 2**40,
            )
        )
        return made[-1]

    yield make
    made[-1].close()


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("prefixes/*"))


@kinds(GROWING | FIXED)
def test_prefixes_survive_the_process(stores: Callable[..., Prefixes], make: Make) -> None:
    tokens = list(range(10, 50))
    stores().put(tokens, read(make(), tokens))
    store = stores()
    hit = found(store.find([*tokens, 1]))
    assert (hit.length, hit.from_disk) == (40, True)
    assert seen(hit.layers) == seen(read(make(), tokens))
    read(hit.layers, [1])
    hit = found(store.find([*tokens, 1]))
    assert not hit.from_disk
    assert seen(hit.layers) == seen(read(make(), tokens))


@pytest.mark.parametrize(
    "dtype", [mx.bfloat16, mx.float16, mx.float32, mx.int32, mx.uint8, mx.bool_, mx.int64]
)
def test_numbers_of_all_kinds_come_back_as_they_were(
    stores: Callable[..., Prefixes], dtype: mx.Dtype
) -> None:
    values = (mx.arange(6) - 2).astype(dtype)
    arrays = (values.reshape(2, 3).T, values[:0], values[3])
    stores().put([1, 2], plain([1, 2]), Whole(arrays))
    hit = found(stores().find([1, 2, 3]))
    for old, new in zip(arrays, hit.draft.states, strict=True):
        assert (new.dtype, new.shape) == (dtype, old.shape)
        assert mx.array_equal(old, new).item()


def test_a_file_is_a_safetensors_file_for_its_owner_alone(
    stores: Callable[..., Prefixes], tmp_path: Path
) -> None:
    store = stores()
    store.put([1, 2, 3], plain([1, 2, 3]))
    store.flush()
    (file,) = files(tmp_path)
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.parent.stat().st_mode & 0o777 == 0o700
    arrays = mx.load(str(file))
    assert isinstance(arrays, dict)
    assert sorted(arrays) == ["0", "1", "2", "3", "sha256"]
    assert arrays["0"].shape == (1, 1, 3, 4)


@pytest.fixture
def disk_waits(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Until it is set, nothing is written."""
    go_on = threading.Event()
    write = prefix_disk.Disk._write

    def slowly(*args: Any) -> None:
        go_on.wait(10)
        write(*args)

    monkeypatch.setattr(prefix_disk.Disk, "_write", slowly)
    return go_on


def test_what_is_written_is_what_was_put(
    stores: Callable[..., Prefixes], disk_waits: threading.Event
) -> None:
    tokens = list(range(10, 50))
    store = stores()
    layers = plain(tokens)
    store.put(tokens, layers)
    read(layers, [1, 2])
    hit = found(store.find([*tokens, 3]))  # which does not wait for the disk
    read(hit.layers, [1, 2])
    hit.layers[0].keys[...] = 0
    disk_waits.set()
    assert seen(found(stores().find([*tokens, 3])).layers) == seen(plain(tokens))


def test_what_goes_before_it_is_written_is_not_written(
    stores: Callable[..., Prefixes], tmp_path: Path, disk_waits: threading.Event
) -> None:
    store = stores(memory_bytes=2 * 10 * ROW)
    for n in range(5):
        store.put([n] * 10, plain([n] * 10))
    disk_waits.set()
    store.flush()
    # The first one may be under way when the second comes.
    assert len(files(tmp_path)) in (1, 2)
    assert found(stores().find([*[4] * 10, 0])).length == 10


def test_a_prefix_is_read_only_where_it_saves_enough(stores: Callable[..., Prefixes]) -> None:
    tokens = list(range(80))
    stores().put(tokens, plain(tokens))
    store = stores()
    assert store.find([*tokens[:9], 999, 999]) is None
    assert found(store.find([*tokens[:10], 999, 999])).from_disk

    stores()
    store = stores()
    store.put(tokens[:75], plain(tokens[:75]))
    assert not found(store.find([*tokens, 999])).from_disk


def test_a_prefix_that_files_mostly_serve_gets_none(
    stores: Callable[..., Prefixes], tmp_path: Path
) -> None:
    store = stores()
    common = list(range(30))
    for more in ([100] * 10, [101] * 10, [102] * 11):
        store.put([*common, *more], plain([*common, *more]))
        store.flush()
    assert len(files(tmp_path)) == 2  # of the second 30 in 40 are served, of the third 30 in 41
    assert store.count == 3


def test_a_longer_file_takes_the_place_of_a_shorter(
    stores: Callable[..., Prefixes], tmp_path: Path
) -> None:
    store = stores()
    for length in (10, 40):
        store.put([1] * length, plain([1] * length))
        store.flush()
    assert len(files(tmp_path)) == 1
    for length in (10, 40):
        store.put([2] * length, recurrent([2] * length))
        store.flush()
    assert len(files(tmp_path)) == 3
    assert found(stores().find([1] * 41)).length == 40


def small_file(stores: Callable[..., Prefixes], folder: Path) -> Path:
    """A file with the prefix [1, 2, 3], made under the key "model"."""
    layers = read([KVCache(), ArraysCache(1)], [1, 2, 3])
    store = stores()
    store.put([1, 2, 3], layers, Whole((mx.array([0.5]),)))
    store.flush()
    (file,) = files(folder)
    store.close()
    return file


@pytest.mark.parametrize("flip", [0x01, 0x80])
def test_damage_anywhere_is_a_miss(
    stores: Callable[..., Prefixes], tmp_path: Path, flip: int
) -> None:
    file = small_file(stores, tmp_path)
    intact = file.read_bytes()
    for place in range(len(intact)):
        damaged = bytearray(intact)
        damaged[place] ^= flip
        file.write_bytes(damaged)
        assert prefixes(folder=file.parent, disk_bytes=2**20).find([1, 2, 3, 4]) is None, place
    file.write_bytes(intact)
    assert prefixes(folder=file.parent, disk_bytes=2**20).find([1, 2, 3, 4]) is not None


def test_a_file_that_is_cut_short_or_has_more_is_a_miss(
    stores: Callable[..., Prefixes], tmp_path: Path
) -> None:
    file = small_file(stores, tmp_path)
    intact = file.read_bytes()
    for size in (0, 4, 8, 9, 100, *range(len(intact) - 70, len(intact), 7)):
        file.write_bytes(intact[:size])
        assert prefixes(folder=file.parent, disk_bytes=2**20).find([1, 2, 3, 4]) is None
        assert not file.exists()
    file.write_bytes(intact + b"\0")
    assert prefixes(folder=file.parent, disk_bytes=2**20).find([1, 2, 3, 4]) is None


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"[]",
        b'{"__metadata__": {"prefix": "{}"}}',
        b'{"__metadata__": {"prefix": "[1]"}}',
        b'{"__metadata__": 3}',
        b'{"0": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}',
        b'{"0": {"dtype": "C64", "shape": [1], "data_offsets": [0, 4]}}',
        b"[" * 100_000,
        b"\xff" * 40,
    ],
)
def test_files_of_other_contents_are_misses(
    stores: Callable[..., Prefixes],
    tmp_path: Path,
    content: bytes,
    caplog: pytest.LogCaptureFixture,
) -> None:
    file = small_file(stores, tmp_path)
    file.write_bytes(len(content).to_bytes(8, "little") + content)
    assert prefixes(folder=file.parent, disk_bytes=2**20).find([1, 2, 3, 4]) is None
    assert not file.exists()
    assert "is damaged, and deleted" in caplog.text


def test_damage_after_the_start_is_a_miss_and_logged(
    stores: Callable[..., Prefixes], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = small_file(stores, tmp_path)
    store = prefixes(folder=file.parent, disk_bytes=2**20)
    damaged = bytearray(file.read_bytes())
    damaged[-40] ^= 1
    file.write_bytes(damaged)
    assert store.find([1, 2, 3, 4]) is None
    assert "its checksum is wrong" in caplog.text
    assert not file.exists()
    assert store.find([1, 2, 3, 4]) is None


def test_where_one_file_is_damaged_the_next_best_serves(
    stores: Callable[..., Prefixes], tmp_path: Path
) -> None:
    store = stores()
    for length in (20, 40):
        store.put([1] * length, recurrent([1] * length))
    store.flush()
    largest = max(files(tmp_path), key=lambda file: file.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-1] + b"?")
    assert found(stores().find([1] * 41)).length == 20


def test_a_file_under_anothers_name_is_a_miss(
    stores: Callable[..., Prefixes], tmp_path: Path
) -> None:
    store = stores()
    for n in (1, 2):
        store.put([n] * 8, plain([n] * 8))
    store.close()
    one, other = files(tmp_path)
    shutil.copy(one, other)
    store = stores()
    assert [store.find([n] * 9) is not None for n in (1, 2)].count(True) == 1
    assert len(files(tmp_path)) == 1


def test_another_key_is_a_miss(stores: Callable[..., Prefixes], tmp_path: Path) -> None:
    stores("model A, mlx 1").put([1] * 8, plain([1] * 8))
    assert stores("model A, mlx 2").find([1] * 9) is None
    assert stores("model A, mlx 1").find([1] * 9) is not None
    # Even if it is named as one of this key would be.
    (file,) = files(tmp_path)
    stores("model A, mlx 2").put([1] * 8, plain([1] * 8))
    stores("model A, mlx 1")
    (other,) = set(files(tmp_path)) - {file}
    shutil.copy(file, other)
    assert stores("model A, mlx 2").find([1] * 9) is None


@pytest.mark.parametrize("parts", [None, ("states", "more")])
def test_a_draft_of_another_version_is_a_miss(
    stores: Callable[..., Prefixes],
    monkeypatch: pytest.MonkeyPatch,
    parts: tuple[str, ...] | None,
) -> None:
    stores().put([1] * 8, plain([1] * 8), Whole((mx.array([1.0]),)))
    if parts:
        monkeypatch.setitem(prefix_snapshot._PARTS, Whole, parts)
    else:
        monkeypatch.delitem(prefix_snapshot._CLASSES, "Whole")
    assert stores().find([1] * 9) is None


def test_files_not_used_for_longest_go_when_the_budget_is_reached(
    stores: Callable[..., Prefixes], tmp_path: Path
) -> None:
    store = stores()
    for n in range(3):
        store.put([n] * 8, plain([n] * 8))
    store.flush()
    size = files(tmp_path)[0].stat().st_size
    for age, file in enumerate(files(tmp_path)):
        os.utime(file, (1000 + age, 1000 + age))
    store = stores(disk_bytes=3 * size + 50)
    assert store.find([1] * 9) is not None
    store.put([3] * 8, plain([3] * 8))
    store = stores(disk_bytes=3 * size + 50)
    assert len(files(tmp_path)) == 3
    assert [store.find([n] * 9) is not None for n in (1, 3)] == [True, True]


def test_use_from_memory_keeps_a_file_too(stores: Callable[..., Prefixes], tmp_path: Path) -> None:
    store = stores()
    store.put([1] * 8, plain([1] * 8))
    store.flush()
    (file,) = files(tmp_path)
    os.utime(file, (1000, 1000))
    store.find([1] * 9)
    assert file.stat().st_mtime > 1000
    os.utime(file, (1000, 1000))
    store.put([1] * 8, plain([1] * 8))
    assert file.stat().st_mtime > 1000


def test_files_of_other_keys_count_and_age_out(
    stores: Callable[..., Prefixes], tmp_path: Path
) -> None:
    stores("earlier").put([1] * 8, plain([1] * 8))
    stores("earlier").close()
    (old,) = files(tmp_path)
    os.utime(old, (1000, 1000))
    size = old.stat().st_size
    store = stores("now", disk_bytes=2 * size - 50)
    store.put([1] * 8, plain([1] * 8))
    store.flush()
    assert not old.exists()
    assert len(files(tmp_path)) == 1


def test_a_smaller_budget_is_kept_from_the_start(
    stores: Callable[..., Prefixes], tmp_path: Path
) -> None:
    store = stores()
    for n in range(4):
        store.put([n] * 8, plain([n] * 8))
    store.flush()
    size = files(tmp_path)[0].stat().st_size
    stores(disk_bytes=2 * size + 50)
    assert len(files(tmp_path)) == 2


def test_what_takes_more_than_the_budget_is_not_written(
    stores: Callable[..., Prefixes], tmp_path: Path
) -> None:
    store = stores()
    store.put([1] * 8, plain([1] * 8))
    store.flush()
    (file,) = files(tmp_path)
    store = stores(disk_bytes=file.stat().st_size + 50)
    store.put([2] * 100, plain([2] * 100))
    store.flush()
    assert files(tmp_path) == [file]


def test_other_files_are_left_alone(stores: Callable[..., Prefixes], tmp_path: Path) -> None:
    folder = tmp_path / "prefixes"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    (folder / "model.safetensors").write_text("mine too")
    (folder / f"{'0' * 16}-{'0' * 32}.safetensors").mkdir()
    stale, fresh = folder / "a.unfinished", folder / "b.unfinished"
    for file in (stale, fresh):
        file.write_text("half")
    os.utime(stale, (1000, 1000))
    store = stores(disk_bytes=3000)
    store.put([1] * 8, plain([1] * 8))
    store.clear()
    assert sorted(file.name for file in files(tmp_path)) == [
        f"{'0' * 16}-{'0' * 32}.safetensors",
        "b.unfinished",
        "model.safetensors",
        "notes.txt",
    ]


def test_a_file_that_another_process_deleted_is_a_miss(
    stores: Callable[..., Prefixes], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = small_file(stores, tmp_path)
    store = prefixes(folder=file.parent, disk_bytes=2**20)
    file.unlink()
    assert store.find([1, 2, 3, 4]) is None
    assert not caplog.records


def test_a_full_disk_is_logged_and_the_rest_goes_on(
    stores: Callable[..., Prefixes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = stores()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    store.put([1] * 8, plain([1] * 8))
    store.flush()
    assert "a prefix of 8 tokens is not kept on disk: [Errno 28] No space left" in caplog.text
    assert files(tmp_path) == []
    assert store.find([1] * 9) is not None
    monkeypatch.undo()
    store.put([2] * 8, plain([2] * 8))
    store.flush()
    assert len(files(tmp_path)) == 1


def test_the_last_of_the_disk_is_left_to_others(
    stores: Callable[..., Prefixes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2**29))
    store = stores()
    store.put([1] * 8, plain([1] * 8))
    store.flush()
    assert "512 MiB left" in caplog.text
    assert files(tmp_path) == []


def test_a_folder_that_cannot_be_used_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    store = prefixes(folder=tmp_path / "file" / "prefixes", disk_bytes=2**20)
    store.put([1] * 8, plain([1] * 8))
    store.flush()
    assert store.find([1] * 9) is not None
    assert "cannot be used" in caplog.text
    assert "not kept on disk" in caplog.text


def test_a_folder_that_was_deleted_is_made_again(
    stores: Callable[..., Prefixes], tmp_path: Path
) -> None:
    store = stores()
    shutil.rmtree(tmp_path / "prefixes")
    store.put([1] * 8, plain([1] * 8))
    store.flush()
    assert len(files(tmp_path)) == 1


def test_clearing_forgets_everything(stores: Callable[..., Prefixes], tmp_path: Path) -> None:
    stores("another").put([1] * 8, plain([1] * 8))
    store = stores()
    store.put([1] * 8, recurrent([1] * 8))
    store.clear()
    assert (store.count, store.nbytes, files(tmp_path)) == (0, 0, [])
    assert store.find([1] * 9) is None
    assert store.worth([1] * 200) == [199]
    store.put([1] * 8, plain([1] * 8))
    assert found(stores().find([1] * 9)).length == 8


def test_an_error_of_the_writing_thread_is_logged(
    stores: Callable[..., Prefixes],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("a fault of the program")

    monkeypatch.setattr(prefix_disk.Disk, "_write", fail)
    store = stores()
    store.put([1] * 8, plain([1] * 8))
    store.flush()
    assert "a fault of the program" in caplog.text
