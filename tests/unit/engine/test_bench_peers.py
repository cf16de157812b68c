import pytest

from dflash_engine.bench import peers
from dflash_engine.bench.drivers.line import Record

END = 7


def test_what_needs_a_draft_is_offered_with_one_only() -> None:
    assert {name: peers.offered(name, draft=False) for name in peers.DRIVERS} == {
        "dflash": [],
        "dflash-mlx": [],
        "mlx-dspark": ["plain", "lookup"],
    }
    assert all("block" in peers.offered(name, draft=True) for name in peers.DRIVERS)


@pytest.mark.parametrize(
    ("most", "expected"),
    [(10, [1, 2, 3, END]), (4, [1, 2, 3, END]), (3, [1, 2, 3]), (2, [1, 2]), (1, [1])],
)
def test_an_answer_has_no_token_beyond_the_most_or_the_end(most: int, expected: list[int]) -> None:
    record = Record(most, [END])
    for tokens in ([1], [2, 3], [END, 4, 5], [6]):
        record.add(tokens)
    assert record.result()["tokens"] == expected


def test_forwards_are_counted_after_the_first_token_and_up_to_the_last() -> None:
    record = Record(4, [END])
    for tokens, forwards in (([1], 0), ([2, 3], 1), ([], 5), ([4], 2), ([5], 1)):
        record.add(tokens, forwards=forwards)
    assert record.result()["rounds"] == 3


def test_times_are_those_of_the_first_and_the_last_token() -> None:
    record = Record(3, [])
    start = record._start
    for at, tokens in enumerate(([1], [2], [3, 4], [5]), start=1):
        record.add(tokens, at=start + at)
    result = record.result()
    assert (result["first"], result["total"]) == pytest.approx((1, 3))


def test_an_answer_without_tokens_takes_its_time() -> None:
    result = Record(3, []).result()
    assert result["tokens"] == []
    assert 0 < result["first"] <= result["total"]
