"""``dflash-rag models``: what is listed, what is pulled, and what is said of what is missing."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from app import cli, models
from dflash_engine import fit, hub, registry
from dflash_engine.errors import PullError
from dflash_engine.fit import GIB, Machine

DOCS = Path(__file__).parents[3] / "docs"
MAC = Machine(total=16 * GIB, limit=int(10.7 * GIB), gpu=True)
QWEN = "hf:mlx-community/Qwen3.5-4B-4bit"


def pairs_table() -> str:
    """The table of docs/models.md, made from the code."""
    rows = [
        "| target | draft | kind | block | 4 bit | 8 bit |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for pair in registry.PAIRS:
        four, eight = (fit.of_pair(pair, bits).total / GIB for bits in (4, 8))
        draft = f"`{pair.draft.repo}`" + ("" if pair.confirmed else " (unconfirmed)")
        block = pair.block_size or "?"
        rows.append(
            f"| `{pair.target.repo}` | {draft} | {pair.kind} | {block} | {four:.1f} | {eight:.1f} |"
        )
    return "\n".join(rows)


def test_the_table_of_pairs_is_the_codes_own():
    assert pairs_table() in (DOCS / "models.md").read_text(), pairs_table()


def pull(source: str, folder: Path) -> None:
    """Leave what a pull leaves, as far as lists go."""
    made = folder / hub._slug(source)
    made.mkdir(parents=True)
    (made / hub.SOURCE_FILE).write_text(json.dumps({"source": source, "layout": hub._LAYOUT}))


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Run ``dflash-rag`` on a home in ``tmp_path``; return its exit status, output and errors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("TARGET_MODEL", "DRAFT_MODEL", "DRAFTER", "MODELS", "HOME"):
        monkeypatch.delenv(f"DFLASH_RAG_{name}", raising=False)

    def run(*arguments: str, **settings: str):
        for name, value in settings.items():
            monkeypatch.setenv(f"DFLASH_RAG_{name.upper()}", value)
        monkeypatch.setattr("sys.argv", ["dflash-rag", *arguments])
        with pytest.raises(SystemExit) as end:
            cli.main()
        output = capsys.readouterr()
        return end.value.code or 0, output.out, output.err

    return run


def test_what_is_here_is_named(tmp_path):
    for name in (QWEN, "hf:mlx-community/Qwen3.5-4B-8bit", "hf:z-lab/Qwen3-4B-DFlash-b16"):
        pull(name, tmp_path)
    pairs = {pair["draft"]: pair for pair in models.pairs(tmp_path, MAC)}
    here = pairs["z-lab/Qwen3.5-4B-DFlash"]
    assert sorted(here["target_here"]) == [QWEN, "hf:mlx-community/Qwen3.5-4B-8bit"]
    assert here["draft_here"] is False
    other = pairs["z-lab/Qwen3-4B-DFlash-b16"]
    assert (other["target_here"], other["draft_here"]) == ([], True)
    assert here["memory_4_bit"] < here["memory_8_bit"]


def test_one_pair_is_recommended_for_a_machine(tmp_path):
    recommended = [pair for pair in models.pairs(tmp_path, MAC) if pair["recommended"]]
    assert [pair["target"] for pair in recommended] == ["Qwen/Qwen3.5-4B"]
    without_gpu = models.pairs(tmp_path, Machine(64 * GIB, 60 * GIB))
    assert not any(pair["recommended"] for pair in without_gpu)


def test_the_list_fits_80_columns_and_says_it_all(run, tmp_path, monkeypatch):
    monkeypatch.setattr(Machine, "here", classmethod(lambda cls: MAC))
    pull(QWEN, tmp_path / "var" / "models")
    status, output, _ = run("models", "list")
    assert status == 0
    lines = [line.rstrip() for line in output.splitlines()]
    assert max(map(len, lines)) <= 80
    at = lines.index("Qwen/Qwen3.5-4B  recommended here")
    assert lines[at + 1].split() == [QWEN, "yes"]
    assert lines[at + 2].split() == ["z-lab/Qwen3.5-4B-DFlash", "DFlash,", "16", "4.2", "6.2"]
    assert "This machine has 10.7 for models." in " ".join(lines)
    for name in (*hub.KNOWN, *(pair.target.repo for pair in registry.PAIRS)):
        assert name in output


def test_the_list_as_json(run, tmp_path):
    pull(QWEN, tmp_path / "var" / "models")
    status, output, _ = run("models", "list", "--json")
    found = json.loads(output)
    assert status == 0
    assert set(found["machine"]) == {"memory", "for_models", "gpu"}
    assert [model["name"] for model in found["models"]] == list(hub.KNOWN)
    assert [pair["draft"] for pair in found["pairs"]] == [p.draft.repo for p in registry.PAIRS]
    assert [pair["target_here"] for pair in found["pairs"] if pair["target_here"]] == [[QWEN]]


def test_the_list_takes_less_than_a_second(tmp_path):
    def seconds() -> float:
        start = time.perf_counter()
        command = [sys.executable, "-m", "app.cli", "models", "list"]
        subprocess.run(command, capture_output=True, check=True, timeout=30, cwd=tmp_path)
        return time.perf_counter() - start

    times = [seconds() for _ in range(3)]  # other programs may get in the way of some
    assert min(times) < 1, times


@pytest.fixture
def pulls(monkeypatch):
    """Stands for the hub; lists what was asked of it."""
    asked = []

    def pull(name, folder, on_step):
        asked.append(name)
        return folder / name

    monkeypatch.setattr(hub, "pull", pull)
    return asked


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({}, ["smollm2-135m", "smollm2-135m-dflash", "all-minilm-l6-v2"]),
        ({"target_model": QWEN}, [QWEN, "hf:z-lab/Qwen3.5-4B-DFlash", "all-minilm-l6-v2"]),
        ({"target_model": QWEN, "draft_model": "none"}, [QWEN, "all-minilm-l6-v2"]),
        ({"target_model": QWEN, "drafter": "lookup"}, [QWEN, "all-minilm-l6-v2"]),
        ({"target_model": QWEN, "draft_model": "hf:a/b"}, [QWEN, "hf:a/b", "all-minilm-l6-v2"]),
        ({"target_model": "hf:a/Other-4bit"}, ["hf:a/Other-4bit", "all-minilm-l6-v2"]),
    ],
)
def test_without_names_all_that_is_needed_is_pulled(run, pulls, settings, names):
    status, output, _ = run("models", "pull", **settings)
    assert status == 0
    assert pulls == names
    assert [line.split(": ")[0] for line in output.splitlines()] == names


def test_with_names_just_those(run, pulls):
    assert run("models", "pull", "bge-m3", target_model=QWEN)[0] == 0
    assert pulls == ["bge-m3"]


def test_a_pull_that_fails_says_why_and_ends_with_3(run, monkeypatch):
    def pull(name, folder, on_step):
        raise PullError(f"{name} could not be fetched: no network")

    monkeypatch.setattr(hub, "pull", pull)
    status, output, errors = run("models", "pull", target_model=QWEN)
    assert (status, output) == (3, "")
    assert errors == f"dflash-rag: {QWEN} could not be fetched: no network\n"


def test_a_wrong_option_ends_with_2(run):
    status, _, errors = run("models", "list", "--all")
    assert status == 2
    assert "--all" in errors
