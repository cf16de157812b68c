"""``dflash-rag train-draft`` on the small model and the samples, in two minutes."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny

from app import train_draft
from app.errors import AppError
from app.settings import Settings
from dflash_engine import DFlash
from dflash_engine.errors import UnsupportedDraftError
from dflash_engine.training import generate

SAMPLES = Path(__file__).parents[3] / "data" / "samples"


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(train_draft, "HELD_OUT", 4)
    monkeypatch.setattr(train_draft, "BENCHED", 1)
    monkeypatch.setattr(train_draft, "BENCH_TOKENS", 8)
    monkeypatch.setattr(train_draft, "EVALUATIONS", 2)
    monkeypatch.setattr(train_draft, "MOST_HELD_OUT", 16)
    for module in (train_draft, generate):
        monkeypatch.setattr(module, "ROWS", 4)
    short = (replace(each, tokens=12) for each in train_draft.PASSES)
    monkeypatch.setattr(train_draft, "PASSES", tuple(short))


def settings(models: Path, home: Path) -> Settings:
    return Settings(home=home, models=models, data=SAMPLES)


def run(models: Path, home: Path, **changed: Any) -> int:
    options = {
        "documents": [SAMPLES],
        "hours": 0.01,
        "start": None,
        "block_size": 4,
        "folder": None,
        "to": None,
        "as_json": True,
    }
    return train_draft.run(settings(models, home), **options | changed)


@pytest.mark.timeout(400)
def test_a_draft_is_made_and_goes_on_after_an_interruption(models, tmp_path, monkeypatch, capsys):
    # Interrupted when all but the bench is done.
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    draft = tmp_path / "drafts" / "smollm2-135m-dflash"
    folder = tmp_path / "training" / "smollm2-135m-dflash"
    with monkeypatch.context() as interrupted:
        interrupted.setattr(train_draft, "compare", stop)
        with pytest.raises(KeyboardInterrupt):
            run(models, tmp_path)
    assert not draft.exists()
    done = {name: (folder / name).read_bytes() for name in ("answers.jsonl", "state.safetensors")}

    with pytest.raises(AppError, match=r"other hours \(0\.01\)"):
        run(models, tmp_path, hours=0.02)
    with pytest.raises(AppError, match="other block_size"):
        run(models, tmp_path, block_size=5)

    capsys.readouterr()
    assert run(models, tmp_path) == 0
    result = json.loads(capsys.readouterr().out)
    for name, was in done.items():
        assert (folder / name).read_bytes() == was, "nothing was done twice"
    assert result["draft"] == str(draft)
    assert result["training"]["best"]["tokens_per_round"] >= 1
    assert len(result["training"]["best"]["by_position"]) == 3
    assert result["answer_tokens"] > 0
    assert len(result["held_out_documents"]) == 1
    modes = result["bench"]["modes"]
    assert set(modes) == {"none", "lookup", "block", "copies", "composed"}
    assert all(mode["identical"] for mode in modes.values())
    assert set(result["bench"]["kinds"]) == {"passages", "known"}
    assert result["bench"]["heldout"] is True
    assert (folder / "training.png").read_bytes()[:4] == b"\x89PNG"

    prompt = "Question: When is the shop open?\nAnswer:"
    with DFlash("smollm2-135m", drafter="none", models=models) as engine:
        plain = engine.generate(prompt, max_tokens=24)
    with DFlash("smollm2-135m", str(draft), drafter="block", models=models) as engine:
        drafted = engine.generate(prompt, max_tokens=24)
    assert drafted.tokens == plain.tokens
    assert drafted.stats.drafted > 0

    with pytest.raises(AppError, match="is there already"):
        run(models, tmp_path)


def test_documents_that_are_not_there_are_told_before_anything_starts(models, tmp_path):
    with pytest.raises(AppError, match="none: no such file"):
        run(models, tmp_path, documents=[tmp_path / "none"], hours=1)
    assert not (tmp_path / "training").exists()


def test_a_draft_to_begin_as_that_does_not_fit_is_told_before_documents_are_read(models, tmp_path):
    with pytest.raises(UnsupportedDraftError, match="made for another target"):
        run(models, tmp_path, start=str(tiny.draft()), block_size=None)
    assert not list((tmp_path / "training").rglob("library.sqlite3"))


def test_documents_that_say_too_little_are_told(models, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.txt").write_text("We are open on Monday from nine to five o'clock.")
    with pytest.raises(AppError, match="give more documents"):
        run(models, tmp_path / "home", documents=[tmp_path / "data"])
