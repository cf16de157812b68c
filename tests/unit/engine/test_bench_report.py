"""Rates of answers, also of those that took no time."""

import pytest

from dflash_engine.bench.answer import Answer
from dflash_engine.bench.report import COMPOSED, PLAIN, Row, summary


def row(base: Answer, own: Answer) -> Row:
    return Row("chat", "hello", 10, {PLAIN: base, COMPOSED: own})


def test_all_prompts_together_and_the_middle_one() -> None:
    rows = [
        row(Answer([1] * 11, 1.0, 3.0, 10), Answer([1] * 11, 1.0, 2.0, 5, {"lookup": 5})),
        row(Answer([1] * 5, 1.0, 2.0, 4), Answer([1] * 5, 1.0, 2.0, 4, {"memory": 1})),
        row(Answer([1] * 3, 1.0, 2.0, 2), Answer([1] * 3, 1.0, 3.0, 2)),
    ]
    own = summary(rows, COMPOSED)
    assert (own["prompts"], own["tokens"], own["rounds"]) == (3, 16, 11)
    assert own["tps"] == 16 / 4
    assert own["ratio"] == (16 / 4) / (16 / 4)
    assert own["median_ratio"] == 1.0
    assert own["total_ratio"] == 7 / 7
    assert own["tokens_per_round"] == pytest.approx(16 / 11)
    assert own["prefill_tps"] == 30 / 3
    assert own["kept"] == {"lookup": 5, "memory": 1}
    assert own["identical"]


def test_an_answer_that_took_no_rounds_or_no_time_has_no_rate() -> None:
    forced = summary([row(Answer([1] * 6, 1.0, 2.0, 5), Answer([1] * 6, 1.0, 1.5, 0))], COMPOSED)
    assert (forced["tps"], forced["rounds"], forced["tokens_per_round"]) == (10.0, 0, None)
    single = summary([row(Answer([1], 1.0, 1.0, 0), Answer([1], 1.0, 1.0, 0))], COMPOSED)
    assert single["identical"]
    for rate in ("tps", "ratio", "median_ratio", "tokens_per_round"):
        assert single[rate] is None


def test_rounds_are_not_known_where_one_answer_does_not_tell_them() -> None:
    told, untold = Answer([1, 2], 1.0, 2.0, 1), Answer([1, 3], 1.0, 2.0)
    own = summary([row(told, told), row(told, untold)], COMPOSED)
    assert (own["rounds"], own["tokens_per_round"], own["identical"]) == (None, None, False)
