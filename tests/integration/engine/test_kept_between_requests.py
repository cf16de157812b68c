"""What an engine keeps from one request to the next, and from one process to the next."""

from pathlib import Path
from typing import Any

import pytest
import tiny

from dflash_engine import DFlash, parts
from dflash_engine.constrain import Choice
from dflash_engine.drafters.memory import Memory
from dflash_engine.engine import collect

PROMPT = "The quick brown fox jumps over the lazy dog. " * 3


def open_engine(store: Path | None, **options: Any) -> DFlash:
    return DFlash(
        str(tiny.llama(end_weight=0.0)),
        store=store,
        prefix_bytes=2**28,
        prefix_disk_bytes=2**28 if store else 0,
        prefill_step=32,
        **options,
    )


def test_answers_and_prefixes_are_remembered_and_change_nothing(tmp_path: Path) -> None:
    with DFlash(str(tiny.llama(end_weight=0.0)), drafter="none") as engine:
        plain = engine.generate(PROMPT, max_tokens=40)
        assert (plain.stats.kept, plain.stats.reused) == ({}, 0)
    with open_engine(tmp_path) as engine:
        first = engine.generate(PROMPT, max_tokens=40, owners={"menu.pdf"})
        again = engine.generate(PROMPT, max_tokens=40)
        assert first.tokens == again.tokens == plain.tokens
        assert first.stats.reused == 0
        assert again.stats.reused == again.stats.prompt_tokens - 1
        assert again.stats.kept["memory"] > 20
        assert again.stats.rounds < first.stats.rounds
        assert again.stats.to_dict()["kept"] == again.stats.kept
    names = {path.name.split("-")[0] for path in tmp_path.iterdir()}
    assert names == {"costs", "memory.bin", "prefixes"}
    with open_engine(tmp_path) as engine:
        later = engine.generate(PROMPT, max_tokens=40)
        assert later.tokens == plain.tokens
        assert later.stats.reused == later.stats.prompt_tokens - 1, "from disk"
        assert later.stats.kept["memory"] > 20
        engine.forget({"menu.pdf", "unknown.pdf"})
        assert not list((tmp_path / "prefixes").iterdir()), "before the engine is closed"
        forgotten = engine.generate(PROMPT, max_tokens=40)
        assert forgotten.tokens == plain.tokens
        assert "memory" not in forgotten.stats.kept
        assert forgotten.stats.reused == 0
    with open_engine(tmp_path) as engine:
        assert "memory" not in engine.generate(PROMPT, max_tokens=40).stats.kept


def test_forgetting_goes_before_those_who_wait() -> None:
    with open_engine(None, max_waiting=1) as engine:
        engine.generate(PROMPT, max_tokens=2)
        under_way = engine.stream(PROMPT, max_tokens=300)
        deltas = iter(under_way)
        next(deltas)
        waiting = engine.stream(PROMPT, max_tokens=2)  # and no more may wait
        engine.forget({"menu.pdf"})
        assert collect(waiting).stats.reused == 0, "nothing was left of the prompt"


def test_prefixes_go_with_any_document_and_answers_with_their_own() -> None:
    with open_engine(None) as engine:
        engine.generate(PROMPT, max_tokens=40, owners={"menu.pdf"})
        engine.forget({"hours.pdf"})
        stats = engine.generate(PROMPT, max_tokens=40).stats
        assert stats.reused == 0
        assert stats.kept["memory"] > 20


def test_the_answer_to_a_seed_does_not_depend_on_how_many_tokens_are_drafted() -> None:
    answers = set()
    for width in (0, 1, 5):
        with DFlash(str(tiny.llama(end_weight=0.0)), str(tiny.draft()), width=width) as engine:
            answer = engine.generate(PROMPT, max_tokens=40, temperature=1.0, seed=7)
            assert width == 0 or answer.stats.drafted > answer.stats.rounds * 0.9
            answers.add(tuple(answer.tokens))
    assert len(answers) == 1


def test_passages_are_remembered_for_their_document() -> None:
    with open_engine(None) as engine:
        answer = engine.generate(PROMPT, max_tokens=40).tokens
        assert engine.memory is not None
        engine.memory.replace("menu.pdf", [answer])
        assert engine.generate(PROMPT, max_tokens=40).stats.kept["memory"] > 15
        assert engine.generate(PROMPT, max_tokens=40).tokens == answer


def test_an_answer_without_owners_or_one_cut_short_is_not_remembered() -> None:
    with open_engine(None) as engine:
        assert engine.memory is not None
        engine.generate(PROMPT, max_tokens=20)
        assert engine.memory.size == 0
        stream = engine.stream(PROMPT, max_tokens=200, owners={"menu.pdf"})
        next(iter(stream))
        stream.cancel()
        engine.generate(PROMPT, max_tokens=1)
        assert engine.memory.size == 0


@pytest.fixture
def full_store(tmp_path: Path) -> Path:
    with open_engine(tmp_path) as engine:
        for owner in ("menu.pdf", "hours.pdf"):
            engine.generate(owner + PROMPT, max_tokens=40, owners={owner})
    return tmp_path


@pytest.mark.parametrize("options", [{"memory_tokens": 0}, {"drafter": "lookup"}])
def test_what_an_engine_does_not_use_is_removed(full_store: Path, options: dict[str, Any]) -> None:
    # As this engine would never be made to forget it.
    with DFlash(str(tiny.llama(end_weight=0.0)), store=full_store, **options):
        names = {path.name.split("-")[0] for path in full_store.iterdir()}
        assert names == {"costs"}


def test_a_store_without_an_engine_forgets_too(full_store: Path) -> None:
    path = full_store / "memory.bin"
    held = Memory(path, key=None).size
    parts.forget(full_store, 10_000, lambda owners: owners - {"hours.pdf"})
    left = Memory(path, key=None)
    assert left.owners == {"hours.pdf"}
    assert 0 < left.size < held
    assert not (full_store / "prefixes").exists()
    parts.forget(full_store, 0, lambda owners: set())
    assert not path.exists()
    parts.forget(full_store, 0, lambda owners: set())  # with nothing there


def test_what_is_not_wanted_is_not_kept(tmp_path: Path) -> None:
    with DFlash(str(tiny.llama()), drafter="composed", store=tmp_path, memory_tokens=0) as engine:
        assert engine.memory is None
        engine.generate(PROMPT, max_tokens=5, owners={"x"})
        assert engine.generate(PROMPT, max_tokens=5).stats.reused == 0
    assert [path.name.split("-")[0] for path in tmp_path.iterdir()] == ["costs"]


@pytest.mark.parametrize("drafter", ["none", "lookup", "composed"])
def test_a_constraint_holds(drafter: str) -> None:
    with DFlash(str(tiny.llama()), drafter=drafter) as engine:  # type: ignore[arg-type]
        options = [engine.tokenizer.encode(text) for text in ("yes", "no")]
        for temperature in (0.0, 2.0):
            constraint = Choice(options, [tiny.END])
            answer = engine.generate("Is it?", temperature=temperature, constraint=constraint)
            assert answer.text in ("yes", "no")
            assert answer.finish_reason == "stop"
            assert answer.stats.kept["forced"] >= 2


def test_a_width_is_not_taken_and_then_ignored() -> None:
    with pytest.raises(ValueError, match="width is for drafter 'composed', not 'lookup'"):
        DFlash(str(tiny.llama()), drafter="lookup", width=4)


def test_options_that_would_have_no_effect_are_refused(tmp_path: Path) -> None:
    for options in ({"store": tmp_path}, {"prefix_bytes": 2**20}):
        with pytest.raises(ValueError, match="prefix_disk_bytes needs"):
            DFlash(str(tiny.llama()), prefix_disk_bytes=2**20, **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="draft_bits is for a DFlash draft"):
        DFlash(str(tiny.llama()), str(tiny.small_draft()), draft_bits=4)


@pytest.mark.parametrize("width", [-1, 32])
def test_widths_that_cannot_be_are_refused(width: int) -> None:
    with pytest.raises(ValueError, match="width must be between 0 and 31"):
        DFlash(str(tiny.llama()), drafter="composed", width=width)
