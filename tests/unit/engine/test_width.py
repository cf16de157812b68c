import json
from pathlib import Path

import pytest
import tiny

from dflash_engine.drafters.block import Block
from dflash_engine.targets import load
from dflash_engine.width import (
    _REPEATS,
    FAR,
    NEAR,
    ROWS,
    Costs,
    Kept,
    Pace,
    _timed,
    best,
    load_or_measure,
    measure,
)

COSTS = Costs(rows=((1, 1.0), (2, 1.2), (4, 1.4), (8, 3.0)), drafts=((1, 0.5), (5, 0.9)))


def test_costs_between_measured_points_lie_between() -> None:
    assert COSTS.forward(1) == 1.0
    assert COSTS.forward(3) == pytest.approx(1.3)
    assert COSTS.forward(8) == 3.0
    assert COSTS.forward(10) == pytest.approx(3.8), "on in the same direction"
    assert COSTS.draft(3) == pytest.approx(0.7)
    assert Costs(COSTS.rows).draft(3) == 0.0


def test_a_forward_costs_more_behind_a_long_context() -> None:
    costs = Costs(rows=((1, 1.0), (4, 1.4)), far=((1, 1.2), (4, 3.4)))
    assert costs.forward(4, NEAR) == 1.4
    assert costs.forward(4, FAR) == pytest.approx(3.4)
    assert costs.forward(4, (NEAR + FAR) // 2) == pytest.approx(2.4)
    assert costs.forward(1, 2 * FAR - NEAR) == pytest.approx(1.4)
    assert costs.forward(4, 1) == 1.4, "never less than was measured"
    assert Costs(rows=((1, 1.0),), far=((1, 0.9),)).forward(1, 9999) == 1.0, "noise"
    assert COSTS.forward(4, 9999) == 1.4, "not measured"


def test_the_best_width_weighs_tokens_against_seconds() -> None:
    def cost(n: int) -> float:
        return COSTS.forward(1 + n)

    assert best([1.0] * 7, cost) == (3, pytest.approx(4 / 1.4)), "eight rows cost too much"
    assert best([0.9] * 3, cost)[0] == 3
    assert best([0.1] * 3, cost) == (0, 1.0), "nothing pays"
    assert best([], cost) == (0, 1.0)
    # A first token that hardly pays alone may lead to ones that do.
    assert best([0.6, 1.0, 1.0], cost)[0] == 3


def test_what_rounds_take_corrects_what_was_measured() -> None:
    # Measured while the machine was busy: eight rows really cost 1.2 of one, not three.
    pace = Pace(COSTS)
    assert pace.forward(8, 0) == 3.0
    for _ in range(30):
        pace.learn(1, 0, 10.0)
        pace.learn(8, 0, 12.0)
    assert pace.forward(8, 0) / pace.forward(1, 0) == pytest.approx(1.2, rel=0.15)
    assert pace.forward(4, 0) > 5 * COSTS.forward(4), "slower all in all, as far as is known"


def test_now_and_then_a_round_is_to_be_plain() -> None:
    pace = Pace(COSTS)
    for _ in range(Pace.EVERY):
        assert not pace.wants_plain
        pace.learn(2, 0, 1.2)
    assert pace.wants_plain
    pace.learn(1, 0, 1.0)
    assert not pace.wants_plain


def test_a_stall_in_one_round_changes_little() -> None:
    pace = Pace(COSTS)
    for _ in range(20):
        pace.learn(1, 0, 1.0)
        pace.learn(4, 0, 1.4)
    pace.learn(4, 0, 60.0)
    pace.learn(4, 0, 0.0)  # a clock too coarse
    assert pace.forward(4, 0) < 1.1 * 1.4
    assert pace.forward(1, 0) < 1.1


def test_what_was_kept_is_expected_and_fades() -> None:
    kept = Kept()
    assert kept.expect("x", [0.5, 0.7]) == [0.5, 0.7], "nothing known: what was said"
    for _ in range(40):
        kept.next_round()
        kept.learn("x", tried=2, kept=0)
    first, second = kept.expect("x", [0.5, 0.7])
    assert first < 0.04, "little enough to stop trying where a token more costs almost nothing"
    assert second == 0.7, "never judged, as the first one failed"
    assert kept.expect("y", [0.5]) == [0.5], "of another origin"
    for _ in range(2500):
        kept.next_round()
    assert 0.4 < kept.expect("x", [0.5])[0] < 0.5, "long ago"
    for _ in range(40):
        kept.next_round()
        kept.learn("x", tried=2, kept=2)
    assert min(kept.expect("x", [0.5, 0.5])) > 0.9
    for _ in range(24):
        kept.next_round()
        kept.learn("x", tried=2, kept=0)
    assert kept.expect("x", [0.5])[0] < 0.4, "what happened lately counts"


def test_noise_while_measuring_only_ever_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    # One row took six seconds, as another program ran: what eight take says that it is less.
    ticks = iter([0.0, 0.05, 0.1, 6.1, 7.0, 7.2] * _REPEATS)
    monkeypatch.setattr("dflash_engine.width.time.perf_counter", lambda: next(ticks))
    assert _timed(lambda n: None, (1, 2, 8)) == (
        (1, pytest.approx(0.05)),
        (2, pytest.approx(0.2)),
        (8, pytest.approx(0.2)),
    )


def test_a_target_and_its_draft_are_measured_once(tmp_path: Path) -> None:
    target = load(tiny.llama(), "llama")
    block = Block(tiny.draft(), target)
    costs = load_or_measure(tmp_path, "llama and draft", target, block)
    assert [rows for rows, _ in costs.rows] == list(ROWS)
    assert [tokens for tokens, _ in costs.drafts] == [1, 3, 5]
    seconds = [y for _, y in (*costs.rows, *costs.drafts, *costs.far)]
    assert min(seconds) > 0
    for rows in (costs.rows, costs.far):
        assert [y for _, y in rows] == sorted(y for _, y in rows)
    assert load_or_measure(tmp_path, "llama and draft", target, block) == costs, "from the file"
    assert load_or_measure(tmp_path, "another", target, None) != costs
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(
    "damage",
    [
        lambda raw: "",
        lambda raw: "[]",
        lambda raw: "nonsense",
        lambda raw: json.dumps(raw | {"rows": []}),
        lambda raw: json.dumps(raw | {"rows": [[1, -1.0]]}),
        lambda raw: json.dumps(raw | {"rows": [[n, "x"] for n in ROWS]}),
        lambda raw: json.dumps(raw | {"rows": [[n, float("nan")] for n in ROWS]}),
        lambda raw: json.dumps(raw | {"drafts": 3}),
        lambda raw: json.dumps(raw | {"far": [[1, 1.0]]}),
        lambda raw: json.dumps(raw | {"key": ["of", "another", "machine"]}),
        lambda raw: json.dumps({k: v for k, v in raw.items() if k != "key"}),
    ],
)
def test_a_damaged_or_foreign_file_is_measured_anew(damage, tmp_path: Path) -> None:
    target = load(tiny.llama(), "llama")
    load_or_measure(tmp_path, "llama", target, None)
    (path,) = tmp_path.iterdir()
    good = json.loads(path.read_text())
    path.write_text(damage(good))
    costs = load_or_measure(tmp_path, "llama", target, None)
    assert [rows for rows, _ in costs.rows] == list(ROWS)
    assert json.loads(path.read_text())["key"] == good["key"], "and kept again"


def test_a_folder_that_cannot_be_written_costs_nothing_but_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = load(tiny.llama(), "llama")
    (tmp_path / "file").write_text("")
    assert load_or_measure(tmp_path / "file", "llama", target, None).rows
    assert "are not kept" in caplog.text


def test_recurrent_and_sliding_targets_are_measured_too() -> None:
    for kind in ("qwen3_5", "gpt_oss"):
        assert len(measure(load(tiny.model(kind), kind), None).rows) == len(ROWS)
