"""A draft trained from the answers of a tiny target: it gets better, survives interruption, and
runs where drafts run.
"""

import functools
import json
import random
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
import tiny
from decoding import STEP, rounds, tokens_of, truth
from dflash import model_mlx as authors
from mlx_lm.utils import load as load_model

from dflash_engine.drafters.block import Block
from dflash_engine.errors import TrainingError, UnsupportedDraftError
from dflash_engine.sampling import Sampling
from dflash_engine.targets import Target, load
from dflash_engine.training import (
    Limits,
    Loss,
    Outcome,
    Progress,
    Recipe,
    Sequence,
    design,
    design_of,
    export,
    train,
)
from dflash_engine.training.run import best_draft

KEY = "llama"
BLOCK = 6
QUICK = Recipe(steps=8, batch=2, anchors=4, learning_rate=1e-3)


@functools.cache
def folder() -> Path:
    """Its greedy text is nearly all of four letters."""
    return tiny.model("llama", end_weight=0.0, letters=4, seed=2)


@pytest.fixture(scope="module")
def target() -> Target:
    return load(folder(), "llama")


@functools.cache
def cycles(count: int, seed: int) -> tuple[Sequence, ...]:
    """Texts that go up the alphabet, over and over, from anywhere on."""
    generator = random.Random(seed)
    made = []
    for _ in range(count):
        start, length = generator.randrange(16), generator.randrange(20, 40)
        made.append(Sequence([97 + (start + i) % 16 for i in range(length)], 4))
    return tuple(made)


@functools.cache
def answers(count: int, seed: int) -> tuple[Sequence, ...]:
    """The target's own."""
    generator = random.Random(seed)
    model = load(folder(), "llama")
    made = []
    for _ in range(count):
        prompt = [generator.randrange(256) for _ in range(generator.randint(3, 8))]
        made.append(Sequence([*prompt, *truth(model, prompt, 32)], len(prompt)))
    return tuple(made)


def config(target: Target) -> dict[str, Any]:
    return design(folder(), target, taps=tiny.TAPS, block_size=BLOCK)


def run(
    target: Target,
    to: Path,
    training: tuple[Sequence, ...] | None = None,
    held_out: tuple[Sequence, ...] | None = None,
    recipe: Recipe = QUICK,
    limits: Limits | None = None,
    key: str = KEY,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> Outcome:
    return train(
        target,
        key,
        config(target),
        training or cycles(20, 1),
        held_out or cycles(3, 2),
        to,
        recipe=recipe,
        limits=limits or Limits(evaluate_every=4, save_every=3),
        on_progress=on_progress,
    )


def untrained(target: Target, to: Path, held_out: tuple[Sequence, ...]) -> Outcome:
    recipe = Recipe(steps=1, batch=1, learning_rate=0.0)
    return run(target, to, held_out, held_out, recipe)


def arrays(to: Path) -> dict[str, mx.array]:
    found = mx.load(str(to / "state.safetensors"))
    assert isinstance(found, dict)
    return found


def same(one: dict[str, mx.array], other: dict[str, mx.array]) -> bool:
    assert one.keys() == other.keys()
    return all(mx.array_equal(one[name], other[name]).item() for name in one)


@pytest.mark.parametrize(
    "loss", [Loss("decay", soft=0.0), Loss("dpace", soft=0.0)], ids=["decay", "dpace"]
)
def test_a_repetitive_corpus_is_learnt(tmp_path: Path, loss: Loss) -> None:
    target = load(tiny.llama(), "llama")  # which can write all letters
    seen: list[Progress] = []
    held_out = cycles(6, 2)
    before = untrained(target, tmp_path / "untrained", held_out)
    recipe = Recipe(steps=100, batch=6, anchors=8, learning_rate=2e-2, loss=loss)
    limits = Limits(evaluate_every=25)
    after = run(
        target, tmp_path / "run", cycles(40, 1), held_out, recipe, limits, on_progress=seen.append
    )
    assert before.best.tokens_per_round < 1.3
    assert after.best.tokens_per_round > 2.5
    assert after.best.by_position[0] > 0.6
    assert seen[-1].loss < seen[0].loss / 2
    assert [p.step for p in seen if p.held_out] == [25, 50, 75, 100]
    rows = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 101))
    assert rows[-1]["held_out"]["tokens_per_round"] == seen[-1].held_out.tokens_per_round  # type: ignore[union-attr]
    assert [row["loss"] for row in rows] == [p.loss for p in seen]


class _KilledError(Exception):
    pass


def killed_after(step: int) -> Callable[[Progress], None]:
    def watch(progress: Progress) -> None:
        if progress.step == step:
            raise _KilledError

    return watch


def test_an_interrupted_run_ends_with_the_weights_of_a_straight_one(
    target: Target, tmp_path: Path
) -> None:
    straight = run(target, tmp_path / "straight")
    for step in (1, 5, 7):  # nothing is saved yet; after 3 steps; after 6
        with pytest.raises(_KilledError):
            run(target, tmp_path / "broken", on_progress=killed_after(step))
    began: list[Progress] = []
    resumed = run(load(folder(), "llama"), tmp_path / "broken", on_progress=began.append)
    assert began[0].step == 7
    assert same(arrays(tmp_path / "straight"), arrays(tmp_path / "broken"))
    assert (resumed.best, resumed.step) == (straight.best, straight.step)
    best = [best_draft(tmp_path / name) for name in ("straight", "broken")]
    assert best[0].step == best[1].step
    assert same(best[0].weights, best[1].weights)


def test_another_seed_gives_other_weights(target: Target, tmp_path: Path) -> None:
    run(target, tmp_path / "one")
    run(target, tmp_path / "other", recipe=Recipe(**(vars(QUICK) | {"seed": 1})))
    assert not same(arrays(tmp_path / "one"), arrays(tmp_path / "other"))


def test_a_finished_run_is_not_run_again(target: Target, tmp_path: Path) -> None:
    outcome = run(target, tmp_path / "run")
    again = run(target, tmp_path / "run", on_progress=lambda progress: pytest.fail("it went on"))
    assert (again.stopped, again.step, again.best) == ("steps", 8, outcome.best)


def test_hidden_states_not_kept_on_disk_are_the_same(target: Target, tmp_path: Path) -> None:
    size = 2 * len(tiny.TAPS) * tiny.HIDDEN * 30  # a sequence's
    for name, limit in (("all", 1 << 30), ("some", 4 * size), ("none", 0)):
        limits = Limits(evaluate_every=8, feature_bytes=limit)
        run(target, tmp_path / name, limits=limits)
    kept = {
        name: [file.stat().st_size for file in (tmp_path / name / "features").iterdir()]
        for name in ("all", "some", "none")
    }
    assert 10 < len(kept["all"]) <= 16 + 3  # two a step, and those held out; some are the same
    assert 0 < sum(kept["some"]) < 4 * size + 1000
    assert not kept["none"]
    assert same(arrays(tmp_path / "all"), arrays(tmp_path / "none"))
    assert same(arrays(tmp_path / "all"), arrays(tmp_path / "some"))


def test_a_damaged_file_of_hidden_states_is_made_anew(target: Target, tmp_path: Path) -> None:
    run(target, tmp_path / "whole")
    with pytest.raises(_KilledError):
        run(target, tmp_path / "torn", on_progress=killed_after(7))
    for file in (tmp_path / "torn" / "features").iterdir():
        file.write_bytes(file.read_bytes()[:200])
    run(target, tmp_path / "torn")
    assert same(arrays(tmp_path / "whole"), arrays(tmp_path / "torn"))


def test_a_run_of_anything_else_is_refused(target: Target, tmp_path: Path) -> None:
    run(target, tmp_path / "run", recipe=Recipe(steps=1, batch=1))
    with pytest.raises(TrainingError, match="another target, recipe: go on with"):
        run(target, tmp_path / "run", key="other")
    with pytest.raises(TrainingError, match="another recipe, data: go on with"):
        run(target, tmp_path / "run", cycles(7, 3))
    (tmp_path / "run" / "state.safetensors").write_bytes(b"torn")
    with pytest.raises(TrainingError, match="is damaged"):
        run(target, tmp_path / "run")


def test_it_stops_when_the_time_is_spent(target: Target, tmp_path: Path) -> None:
    limits = Limits(seconds=0.001)
    outcome = run(target, tmp_path / "run", limits=limits)
    assert (outcome.stopped, outcome.step) == ("time", 1)
    assert run(target, tmp_path / "run", limits=limits).step == 1
    assert run(target, tmp_path / "run", limits=Limits()).stopped == "steps"  # with more of it


def test_it_stops_when_held_out_answers_get_no_better(target: Target, tmp_path: Path) -> None:
    recipe = Recipe(steps=50, batch=1, anchors=2, learning_rate=0.0)
    limits = Limits(evaluate_every=2, patience=3)
    outcome = run(target, tmp_path / "run", recipe=recipe, limits=limits)
    assert (outcome.stopped, outcome.step) == ("stalled", 8)  # the best was the first, after 2
    assert best_draft(tmp_path / "run").step == 2


def test_the_target_can_be_used_with_another_draft_afterwards(
    target: Target, tmp_path: Path
) -> None:
    with pytest.raises(_KilledError):
        run(target, tmp_path / "run", on_progress=killed_after(1))
    target.tap([1])
    target.untap()


@pytest.mark.parametrize("kind", ["qwen3_5", "gpt_oss", "gemma3_text", "quantised"])
def test_targets_of_other_kinds(tmp_path: Path, kind: str) -> None:
    folder = tiny.qwen3() if kind == "quantised" else tiny.model(kind)
    target = load(folder, kind)
    if kind == "quantised":
        target.model.set_dtype(mx.bfloat16)
        nn.quantize(target.model, group_size=32, bits=4)
    seen: list[Progress] = []
    config = design(folder, target, taps=(0, 2), block_size=BLOCK)
    data = cycles(20, 1)
    limits, to = Limits(evaluate_every=50), tmp_path / "run"
    recipe = Recipe(steps=20, batch=2, anchors=4, learning_rate=1e-2)
    options = {"recipe": recipe, "limits": limits, "on_progress": seen.append}
    train(target, kind, config, data, data[:2], to, **options)
    assert seen[-1].loss < seen[0].loss - 0.3
    Block(export(to, tmp_path / "draft"), target)


@pytest.fixture(scope="module")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Exported: one trained with the target's own answers, and one as it began."""
    to, target = tmp_path_factory.mktemp("drafts"), load(folder(), "llama")
    held_out = answers(5, 2)
    recipe = Recipe(steps=120, batch=4, anchors=16, learning_rate=5e-3)
    outcome = run(target, to / "run", answers(40, 1), held_out, recipe, Limits(evaluate_every=30))
    assert outcome.best.tokens_per_round > 1.4
    untrained(target, to / "untrained-run", held_out)
    return {
        "trained": export(to / "run", to / "trained", mx.float32),
        "untrained": export(to / "untrained-run", to / "untrained", mx.float32),
        "run": to / "run",
    }


PROMPTS = [list(b"hello"), list(b"A question?"), [200, 3, 77, 145]]


def ours(draft: Path) -> list[list[list[int]]]:
    """The rounds of each prompt, after checking that they add up to plain decoding."""
    target = load(folder(), "llama")
    block = Block(draft, target)
    found = []
    for prompt in PROMPTS:
        steps = rounds(target, block, prompt, 48)
        assert tokens_of(steps) == truth(target, prompt, 48)
        found.append([step.tokens for step in steps if step.tokens])
    return found


def test_an_exported_draft_drafts_in_the_engine(drafts: dict[str, Path]) -> None:
    kept = {
        name: sum(len(tokens) - 1 for steps in ours(drafts[name]) for tokens in steps)
        for name in ("trained", "untrained")
    }
    assert kept["trained"] > 1.5 * kept["untrained"]


def test_a_run_may_begin_as_a_draft(
    drafts: dict[str, Path], target: Target, tmp_path: Path
) -> None:
    start, held_out = drafts["trained"], answers(5, 2)
    still = Recipe(steps=1, batch=1, learning_rate=0.0)

    def begin(to: str, design: dict[str, Any], start: Path = start) -> Outcome:
        return train(
            target, KEY, design, held_out, held_out, tmp_path / to, start=start, recipe=still
        )

    outcome = begin("run", design_of(start))
    assert outcome.best == best_draft(drafts["run"]).held_out
    shorter = begin("shorter", design_of(start, block_size=3)).best
    assert len(shorter.by_position) == 2
    assert shorter.tokens_per_round > 1.4
    with pytest.raises(TrainingError, match="holds a training run with another start"):
        begin("run", design_of(start), drafts["untrained"])
    with pytest.raises(TrainingError, match="has another config: take its own"):
        begin("other", design(folder(), target, taps=tiny.TAPS, layers=1))
    with pytest.raises(UnsupportedDraftError, match="no draft in"):
        design_of(tmp_path / "none")


def test_a_draft_of_a_part_of_the_vocabulary_proposes_nothing_else(
    drafts: dict[str, Path], tmp_path: Path
) -> None:
    letters = sorted({token for sequence in answers(5, 2) for token in sequence.tokens})
    whole = export(drafts["run"], tmp_path / "whole", mx.float32, letters)
    assert ours(whole) == ours(drafts["trained"])
    few = export(drafts["run"], tmp_path / "few", mx.float32, letters[:3])
    block = Block(few, load(folder(), "llama"))
    proposer = block.begin(Sampling(), seed=1)
    proposer.observe(mx.zeros((1, 9, len(tiny.TAPS) * tiny.HIDDEN)))
    drafted = proposer.propose([65], BLOCK).tokens
    assert len(drafted) == BLOCK - 1
    assert set(drafted) <= set(letters[:3])
    ours(few)  # still plain decoding's tokens


def test_an_exported_draft_drafts_in_the_authors_package(
    drafts: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(authors, "snapshot_download", lambda path, **_: path)
    model, tokenizer = load_model(str(folder()))[:2]
    draft = authors.load_draft(str(drafts["trained"]))
    for prompt, own in zip(PROMPTS, ours(drafts["trained"]), strict=True):
        answer = authors.stream_generate(
            model, draft, tokenizer, mx.array(prompt), max_tokens=48, prefill_step_size=STEP
        )
        theirs = [step.tokens for step in answer if step.tokens]
        assert [*chain(*theirs)] == [*chain(*own)]
        # The same rounds, but for a near-tie that rounding decides, and the last one's length.
        assert abs(len(theirs) - len(own)) <= 2
        same = sum(a == b for a, b in zip(theirs, own, strict=False))
        assert same >= 10


def test_measured_on_held_out_answers_is_what_decoding_gives(drafts: dict[str, Path]) -> None:
    target = load(folder(), "llama")
    block = Block(drafts["trained"], target)
    tokens = count = 0
    for sequence in answers(5, 2):
        prompt = sequence.tokens[: sequence.answer]
        steps = rounds(target, block, prompt, len(sequence.tokens) - len(prompt))
        tokens += len(sequence.tokens) - len(prompt) - 1
        count += sum(not step.prefill for step in steps)
    measured = best_draft(drafts["run"]).held_out
    # Hidden states in 16 bits may turn a near-tie.
    assert tokens / count == pytest.approx(measured.tokens_per_round, rel=0.05)


def test_an_export_is_bf16_and_takes_no_folder_that_is_there(
    drafts: dict[str, Path], tmp_path: Path
) -> None:
    made = export(drafts["run"], tmp_path / "draft")
    weights = mx.load(str(made / "model.safetensors"))
    assert isinstance(weights, dict)
    assert {array.dtype for array in weights.values()} == {mx.bfloat16}
    assert len(weights) == 2 * 11 + 3
    assert json.loads((made / "config.json").read_text())["dtype"] == "bfloat16"
    assert [file.name for file in tmp_path.iterdir()] == ["draft"]
    Block(made, load(folder(), "llama"))
    with pytest.raises(TrainingError, match="is there already"):
        export(drafts["run"], made)
    with pytest.raises(TrainingError, match="no trained draft"):
        export(tmp_path, tmp_path / "other")
