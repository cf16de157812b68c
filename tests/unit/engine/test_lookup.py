from hypothesis import given
from hypothesis import strategies as st

from dflash_engine.drafters.lookup import Lookup
from dflash_engine.sampling import Sampling


def propose(tokens: list[int], most: int = 100, **options: int) -> list[int]:
    return Lookup(**options).begin(Sampling(), None).propose(tokens, most).tokens


def test_what_followed_the_last_tokens_is_proposed() -> None:
    assert propose([1, 2, 3, 4, 5, 9, 1, 2], longest=2, shortest=2, width=3) == [3, 4, 5]


def test_the_latest_place_wins() -> None:
    assert propose([1, 2, 3, 1, 2, 4, 8, 8, 1, 2], longest=2, shortest=2, width=2) == [4, 8]


def test_the_longest_match_wins_over_a_later_shorter_one() -> None:
    tokens = [7, 1, 2, 5, 0, 1, 2, 6, 0, 7, 1, 2]
    assert propose(tokens, longest=3, shortest=2, width=1) == [5]


def test_shorter_matches_propose_less() -> None:
    tokens = [*range(10, 30), 99, 12, 13]
    assert len(propose(tokens, longest=4, width=8, short_width=2)) == 2
    assert len(propose([*tokens[:-2], 10, 11, 12, 13], longest=4, width=8, short_width=2)) == 8


def test_nothing_known_proposes_nothing() -> None:
    assert propose([1]) == propose([1, 2, 3, 4]) == []
    assert propose([1, 2, 3, 9, 2], shortest=2) == []


def test_a_repetition_goes_on_over_its_end() -> None:
    assert propose([1, 2, 3, 1, 2, 3], longest=3, shortest=2, width=7) == [1, 2, 3, 1, 2, 3, 1]


def test_no_more_is_proposed_than_asked_for() -> None:
    assert propose([1, 2, 3, 4, 5, 1, 2], most=1) == [3]


@given(
    tokens=st.lists(st.integers(0, 3), min_size=1, max_size=60),
    cuts=st.lists(st.integers(1, 7), min_size=1, max_size=20),
)
def test_growing_step_by_step_finds_what_a_fresh_look_finds(
    tokens: list[int], cuts: list[int]
) -> None:
    proposer = Lookup().begin(Sampling(), None)
    end = 0
    for cut in cuts:
        end = min(end + cut, len(tokens))
        fresh = Lookup().begin(Sampling(), None)
        known = tokens[:end]
        draft = proposer.propose(known, 9).tokens
        assert draft == fresh.propose(known, 9).tokens
        assert len(draft) <= 9
        if draft:
            pairs = {tuple(known[i : i + 2]) for i in range(len(known) - 1)}
            assert (known[-1], draft[0]) in pairs, "it did follow once"
