"""The file of sequences: appended to, read, killed, and mistaken for another."""

import itertools
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dflash_engine.errors import TrainingError
from dflash_engine.training import Sequence, SequenceFile, split

KEY = "1" * 32


def test_what_is_appended_is_read_back_in_order(tmp_path: Path) -> None:
    file = SequenceFile(tmp_path / "new" / "answers.jsonl", KEY)
    assert (len(file), list(file), file.prompts()) == (0, [], set())
    file.append([5, 6, 7], 2, "a")
    SequenceFile(file.path, KEY).append(range(4), 1, "b\n\u2028ü")
    expected = [Sequence([5, 6, 7], 2, "a"), Sequence([0, 1, 2, 3], 1, "b\n\u2028ü")]
    assert list(file) == list(SequenceFile(file.path, KEY)) == expected
    assert (len(file), file.prompts()) == (2, {"a", "b\n\u2028ü"})


def test_a_round_can_start_where_another_token_of_the_answer_follows() -> None:
    assert list(Sequence([9, 9, 1, 2, 3], 2).anchors) == [2, 3]
    assert not Sequence([9, 9, 1], 2).anchors
    assert not Sequence([9, 9], 2).anchors


@pytest.mark.parametrize("answer", [0, 4])
def test_an_answer_starts_behind_a_prompt(tmp_path: Path, answer: int) -> None:
    file = SequenceFile(tmp_path / "answers.jsonl", KEY)
    with pytest.raises(ValueError, match=f"start at {answer} of 3"):
        file.append([1, 2, 3], answer)
    assert not file.path.exists()


def test_a_file_cut_off_at_any_byte_keeps_what_was_whole_and_goes_on(tmp_path: Path) -> None:
    file = SequenceFile(tmp_path / "answers.jsonl", KEY)
    file.append([1, 2], 1, "first")
    whole = file.path.read_bytes()
    file.append([3, 4], 1, "second")
    for size in range(len(file.path.read_bytes())):
        part = SequenceFile(tmp_path / f"{size}.jsonl", KEY)
        part.path.write_bytes(file.path.read_bytes()[:size])
        expected = [Sequence([1, 2], 1, "first")] if size >= len(whole) else []
        assert list(part) == expected
        part.append([5, 6], 1, "after")
        assert list(part) == [*expected, Sequence([5, 6], 1, "after")]


def test_a_process_killed_while_it_appends_leaves_a_readable_file(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    code = (
        "import sys; from pathlib import Path; from itertools import count\n"
        "from dflash_engine.training.sequences import SequenceFile\n"
        f"file = SequenceFile(Path(sys.argv[1]), {KEY!r})\n"
        "for i in count(): file.append([i] * 5000, 1, str(i))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(path)])
    try:
        deadline = time.monotonic() + 60
        while not path.exists() or path.stat().st_size < 200_000:
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.01)
    finally:
        process.kill()
        process.wait()
    file = SequenceFile(path, KEY)
    before = len(file)
    file.append([7], 1, "after")
    assert before > 5
    assert [s.prompt_id for s in file] == [*map(str, range(before)), "after"]
    assert all(sequence.tokens == [i] * 5000 for i, sequence in enumerate(list(file)[:-1]))


def test_another_targets_file_is_refused_and_both_are_named(tmp_path: Path) -> None:
    SequenceFile(tmp_path / "answers.jsonl", KEY).append([1, 2], 1)
    with pytest.raises(TrainingError, match=f"by the target {KEY}, this one is other"):
        SequenceFile(tmp_path / "answers.jsonl", "other")


@pytest.mark.parametrize("content", ["hello\n", "{}\n", '[1]\n{"tokens": [1]}\n'])
def test_any_other_file_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "answers.jsonl").write_text(content)
    with pytest.raises(TrainingError, match="no file of sequences"):
        SequenceFile(tmp_path / "answers.jsonl", KEY)
    assert (tmp_path / "answers.jsonl").read_text() == content


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    file = SequenceFile(tmp_path / "answers.jsonl", KEY)
    file.append([1, 2], 1)
    with file.path.open("a") as raw:
        raw.write('{"tokens": [1, 2]}\n')
    with pytest.raises(TrainingError, match="damaged in line 3"):
        list(file)


def test_the_split_depends_on_the_prompt_alone() -> None:
    prompts = list(itertools.product(range(20), repeat=2))
    sequences = [Sequence([*prompt, 1, 2], 2) for prompt in prompts]
    training, held_out = split(sequences, 0.2)
    assert len(training) + len(held_out) == len(sequences)
    assert 0.1 < len(held_out) / len(sequences) < 0.3
    others = [Sequence([*prompt, 3], 2) for prompt in reversed(prompts)]
    again = split([*others, *sequences], 0.2)[1]
    assert {tuple(s.tokens[:2]) for s in again} == {tuple(s.tokens[:2]) for s in held_out}
    assert len(again) == 2 * len(held_out)
