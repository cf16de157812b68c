import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_engine.constrain import Choice, forced, masked, permitted

STOPS = {90, 80}
OPTIONS = st.lists(st.lists(st.integers(0, 3), max_size=5), min_size=1, max_size=5)


class Weighted:
    """Allows ``tokens`` (None: all) at every place, with ``log_weights``."""

    def __init__(self, tokens: list[int] | None, log_weights: list[float] | None) -> None:
        self.tokens = tokens
        self.log_weights = log_weights

    def allowed(self):
        return None if self.tokens is None else np.array(self.tokens)

    def weights(self):
        return None if self.log_weights is None else np.array(self.log_weights)

    def advance(self, token: int) -> None: ...

    def back(self, count: int) -> None: ...


def listed(choice: Choice) -> list[int] | None:
    allowed = choice.allowed()
    return None if allowed is None else allowed.tolist()


@settings(deadline=None, derandomize=True, max_examples=300)
@given(options=OPTIONS, seed=st.integers(0, 2**32))
def test_any_way_through_a_choice_writes_one_option(options: list[list[int]], seed: int) -> None:
    draw, choice, written = random.Random(seed), Choice(options, STOPS), []
    while (allowed := listed(choice)) is not None:
        begun = [option for option in options if option[: len(written)] == written]
        goes_on = {option[len(written)] for option in begun if len(option) > len(written)}
        stops = (STOPS if goes_on else {min(STOPS)}) if written in begun else set()
        assert allowed == sorted(goes_on | stops)
        written.append(draw.choice(allowed))
        choice.advance(written[-1])
    assert written[:-1] in options
    assert written[-1] in STOPS


@settings(deadline=None, derandomize=True, max_examples=300)
@given(options=OPTIONS, seed=st.integers(0, 2**32))
def test_going_back_in_a_choice_is_as_not_having_gone(options: list[list[int]], seed: int) -> None:
    draw, choice, written = random.Random(seed), Choice(options, STOPS), []
    for _ in range(12):
        count = draw.randint(0, len(written))
        choice.back(count)
        del written[len(written) - count :]
        for _ in range(draw.randint(0, 4)):
            written.append(draw.choice(listed(choice) or [7]))
            choice.advance(written[-1])
        again = Choice(options, STOPS)
        for token in written:
            again.advance(token)
        assert listed(again) == listed(choice)


def test_what_must_follow_runs_up_to_the_first_choice() -> None:
    choice = Choice([[1, 2, 3, 4], [1, 2, 3, 5, 6]], {9})
    assert forced(choice, 8) == [1, 2, 3]
    assert forced(choice, 2) == [1, 2]
    assert forced(choice, 0) == []
    for token in [1, 2, 3, 5]:
        choice.advance(token)
    assert forced(choice, 8) == [6, 9]
    assert listed(choice) == [6]


def test_an_end_that_must_come_is_forced_whatever_the_number_of_stop_tokens() -> None:
    choice = Choice([[1]], {90, 80})
    assert forced(choice, 8) == [1, 80]
    assert listed(Choice([[1], []], {90, 80})) == [1, 80, 90]


def test_what_may_follow_of_a_draft_ends_before_the_first_wrong_token() -> None:
    choice = Choice([[1, 2], [1, 3, 4]], {9})
    assert permitted(choice, [1, 3, 4, 9]) == 4
    assert permitted(choice, [1, 3, 9]) == 2
    assert permitted(choice, [2, 1]) == permitted(choice, []) == 0
    assert listed(choice) == [1]


def test_without_limits_all_may_and_nothing_must_follow() -> None:
    anything = Weighted(None, None)
    assert forced(anything, 5) == []
    assert permitted(anything, [1, 2, 3]) == 3
    scores = np.arange(4.0)
    assert masked(scores, anything).tolist() == [0, 1, 2, 3]
    assert masked(scores, Weighted(None, [0, 0, 0, -5])).tolist() == [0, 1, 2, -2]


def test_scores_keep_only_what_is_allowed_and_add_its_weights() -> None:
    scores = np.arange(4.0)
    inf = float("inf")
    assert masked(scores, Weighted([1, 3], [0.5, -4])).tolist() == [-inf, 1.5, -inf, -1]
    assert masked(scores, Weighted([0], None)).tolist() == [0, -inf, -inf, -inf]
    assert scores.tolist() == [0, 1, 2, 3]


def test_a_token_that_is_not_allowed_is_refused_and_changes_nothing() -> None:
    choice = Choice([[1, 2]], {9})
    for token in (2, 9, -1, 100):
        with pytest.raises(ValueError, match=f"token {token} continues none"):
            choice.advance(token)
    choice.advance(1)
    assert listed(choice) == [2]


def test_no_more_can_be_taken_back_than_was_written() -> None:
    choice = Choice([[1, 2]], {9})
    choice.advance(1)
    for count in (2, -1):
        with pytest.raises(ValueError, match=f"take back {count} tokens: 1 were written"):
            choice.back(count)
    choice.back(0)
    assert listed(choice) == [2]
    choice.back(1)
    assert listed(choice) == [1]


@pytest.mark.parametrize(
    ("options", "stops", "message"),
    [
        ([], {9}, "at least one option"),
        ([[1]], set(), "one stop token"),
        ([[1], [2, 9, 3]], {9}, "holds a stop token"),
    ],
)
def test_a_choice_that_cannot_be_made_is_refused(options, stops, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Choice(options, stops)
