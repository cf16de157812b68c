"""The draft that comes with this package: what it is, and that it drafts here and elsewhere."""

import json
import runpy
from itertools import chain
from pathlib import Path

import mlx.core as mx
import pytest
from decoding import rounds, tokens_of, truth
from dflash import model_mlx as authors
from mlx_lm.utils import load as load_model

from dflash_engine import DFlash, hub
from dflash_engine.bench import peers, prompts
from dflash_engine.chat import ChatTemplate
from dflash_engine.drafters.block import Block
from dflash_engine.registry import find_draft
from dflash_engine.targets import Target, load
from dflash_engine.training.export import without_table

NAME = "smollm2-135m-dflash"
DRAFT = hub.OWN / NAME
MOST, STEP = 40, 512
SHIP = Path(__file__).parents[3] / "scripts" / "ship_draft.py"


@pytest.fixture(scope="module")
def source(models: Path) -> Path:
    return hub.resolve("smollm2-135m", models)


@pytest.fixture(scope="module")
def target(source: Path) -> Target:
    return load(source, "smollm2-135m")


@pytest.fixture(scope="module")
def asked(target: Target) -> list[list[int]]:
    chat = ChatTemplate(target.tokenizer, "smollm2-135m", {})
    return [chat(each.messages) for each in prompts.load(["passages", "chat"], 1)]


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    """The same draft, for all of the vocabulary."""
    return without_table(DRAFT, tmp_path / "whole")


def test_it_is_small_and_says_what_it_is(source: Path) -> None:
    assert sum(file.stat().st_size for file in DRAFT.iterdir()) < 20e6
    runs = json.loads((DRAFT / "training.json").read_text(encoding="utf-8"))
    assert runs[-1]["target_digest"] == hub.digest(source), "it was made for these weights"
    card = runpy.run_path(str(SHIP))["card"]
    config = json.loads((DRAFT / "config.json").read_text(encoding="utf-8"))
    assert (DRAFT / "README.md").read_text(encoding="utf-8") == card(NAME, runs, config)


def test_it_drafts_by_default_and_changes_no_answer(models: Path) -> None:
    messages = prompts.load(["passages"], 1)[0].messages
    answers = []
    for draft, drafter in ((None, "none"), ("auto", "auto"), ("auto", "block")):
        with DFlash("smollm2-135m", draft, drafter=drafter, models=models) as engine:
            answers.append(engine.generate(engine.chat_prompt(messages), max_tokens=MOST))
    plain, composed, block = answers
    assert find_draft("smollm2-135m", models) == NAME
    assert plain.tokens == composed.tokens == block.tokens
    assert block.stats.drafted > 0


def test_the_authors_package_runs_it_as_well(
    target: Target,
    source: Path,
    asked: list[list[int]],
    whole: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(authors, "snapshot_download", lambda path, **_: path)
    exported = tmp_path / "target"
    peers.export(target, source, exported)
    model, tokenizer = load_model(str(exported))[:2]
    draft = authors.load_draft(str(whole))
    block = Block(whole, target)
    counts = {"own": 0, "theirs": 0}
    total = 0
    try:
        for prompt in asked:
            own = [r.tokens for r in rounds(target, block, prompt, MOST, step=STEP) if r.tokens]
            expected = truth(target, prompt, MOST, step=STEP)[: len([*chain(*own)])]
            assert [*chain(*own)] == expected
            answer = authors.stream_generate(
                model, draft, tokenizer, mx.array(prompt), max_tokens=MOST, prefill_step_size=STEP
            )
            theirs = [r.tokens for r in answer if r.tokens]
            assert [*chain(*theirs)] == expected
            total += len(expected)
            counts["own"] += len(own)
            counts["theirs"] += len(theirs)
    finally:
        target.untap()
    assert total / counts["own"] == pytest.approx(total / counts["theirs"], rel=0.02)
    assert total / counts["own"] > 1.2


def test_a_part_of_the_vocabulary_costs_few_tokens_a_round(
    target: Target, asked: list[list[int]], whole: Path
) -> None:
    found = []
    for folder in (whole, DRAFT):
        block = Block(folder, target)
        try:
            steps = [rounds(target, block, prompt, MOST, step=STEP) for prompt in asked]
        finally:
            target.untap()
        tokens = [tokens_of(each) for each in steps]
        count = sum(not step.prefill for each in steps for step in each)
        found.append((tokens, sum(map(len, tokens)) / count))
    (every, rate), (part, of_part) = found
    assert every == part
    assert of_part > 0.9 * rate
