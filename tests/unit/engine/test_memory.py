import random
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from saving import save_threads, soon

from dflash_engine.drafters import chains, memory_file
from dflash_engine.drafters.memory import DOUBT, LEAST, LONGEST, WIDEST, Memory
from dflash_engine.drafters.protocol import Guess
from dflash_engine.sampling import Sampling

FEW = 2_000  # tokens; a small memory is made quickly
Texts = list[list[int]]

texts_of_few_words = st.lists(st.lists(st.integers(0, 3), max_size=30), max_size=12)
some_words = st.lists(st.integers(0, 3), max_size=40)
owners = st.sampled_from(["a", "b", "c"])


def remember(
    *answers: Sequence[int], passages: Sequence[Sequence[int]] = (), most: int = FEW
) -> Memory:
    memory = Memory(most_tokens=most)
    memory.replace("document", passages)
    for answer in answers:
        memory.add(answer, owners={"document"})
    return memory


def tokens_after(memory: Memory, tokens: Sequence[int], most: int = 99) -> list[int]:
    guess = memory.guess(list(tokens), most)
    return guess.tokens if guess else []


def test_what_followed_the_last_tokens_in_an_answer_is_proposed() -> None:
    guess = remember([1, 2, 3, 4, 5, 6, 7, 8]).guess([9, 2, 3, 4, 5], 3)
    assert guess is not None
    assert (guess.tokens, guess.match) == ([6, 7, 8], 4)


def test_passages_are_proposed_too() -> None:
    assert tokens_after(remember(passages=[range(10, 30)]), range(14, 20), 3) == [20, 21, 22]


def test_the_longest_match_wins_over_more_frequent_shorter_ones() -> None:
    memory = remember([1, 2, 3, 4, 50], [8, 3, 4, 60], [9, 3, 4, 60])
    assert tokens_after(memory, [1, 2, 3, 4]) == [50]


def test_what_followed_most_often_wins_and_of_equals_the_latest() -> None:
    often = [[1, 2, 3, 4, 5], [6, 1, 2, 3, 4, 5], [7, 1, 2, 3, 4, 6]]
    assert tokens_after(remember(*often), [0, 1, 2, 3, 4], 1) == [5]
    assert tokens_after(remember(*often, [8, 1, 2, 3, 4, 6]), [0, 1, 2, 3, 4], 1) == [6]


def test_chances_are_counts_that_a_longer_match_makes_surer() -> None:
    memory = remember(
        [9, 1, 2, 3, 5, 6, 7], [8, 1, 2, 3, 5, 6, 8], [7, 1, 2, 3, 5, 6, 7], [6, 1, 2, 3, 4]
    )
    guess = memory.guess([1, 2, 3], 9)
    assert guess is not None
    assert guess.tokens == [5, 6, 7]
    expected = [3 / (4 + DOUBT / 2), 3 / (3 + DOUBT / 3), 2 / (3 + DOUBT / 4)]
    assert guess.chances == pytest.approx(expected)


def test_an_answer_outvotes_a_passage_but_not_three() -> None:
    answer, passage = [9, 1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 7]
    assert tokens_after(remember(answer, passages=[passage]), [0, 1, 2, 3, 4, 5], 1) == [6]
    three = [[n, *passage] for n in (6, 7, 8)]
    assert tokens_after(remember(answer, passages=three), [0, 1, 2, 3, 4, 5], 1) == [7]


def test_an_answer_given_again_counts_twice_and_takes_no_more_room() -> None:
    once = remember([1, 2, 3, 4, 5], [9, 2, 3, 4, 6])
    twice = remember([1, 2, 3, 4, 5], [9, 2, 3, 4, 6], [1, 2, 3, 4, 5])
    assert tokens_after(once, [0, 2, 3, 4], 1) == [6]
    assert tokens_after(twice, [0, 2, 3, 4], 1) == [5]
    assert twice.size == once.size


def test_a_guess_ends_where_it_is_no_longer_likely() -> None:
    guess = remember(range(1, 60)).guess([0, 7, 8, 9], 99)
    assert guess is not None
    chance = 1.0
    for each in guess.chances:
        chance *= each
    following = 1 / (1 + DOUBT / (guess.match + len(guess.tokens) - 1))
    assert chance >= LEAST > chance * following


def test_a_guess_is_no_longer_than_asked_for_nor_than_a_forward_is_wide() -> None:
    memory = remember(*[[n, *range(100, 300)] for n in range(5)])
    assert len(tokens_after(memory, range(100, 130), 5)) == 5
    assert len(tokens_after(memory, range(100, 130), 1000)) == WIDEST
    assert memory.guess(list(range(100, 130)), 0) is None


def test_nothing_known_is_no_guess() -> None:
    assert Memory(most_tokens=FEW).guess([1, 2, 3], 9) is None
    memory = remember([1, 2, 3, 4])
    for unknown in ([], [3], [7, 3], [4, 5, 6], [3, 4], [-1, 1], [2, 1]):
        assert memory.guess(unknown, 9) is None, unknown


def test_no_guess_runs_on_into_another_text() -> None:
    memory = remember(passages=[list(range(10)), list(range(10, 20)), list(range(20, 30))])
    assert tokens_after(memory, [4, 5, 6, 7]) == [8, 9]
    assert tokens_after(memory, [16, 17, 18, 19]) == []
    assert tokens_after(memory, [19, 20]) == []


def test_texts_too_short_to_go_on_are_not_kept() -> None:
    assert remember([], [1], [1, 2], passages=[[], [3, 4]]).size == 0


def test_many_occurrences_count_by_the_latest() -> None:
    old = [[n, 1, 2, 3, 4, 5] for n in range(100, 200)]
    new = [[n, 1, 2, 3, 4, 6] for n in range(200, 260)]
    assert tokens_after(remember(*old, *new), [0, 1, 2, 3, 4], 1) == [6]


def test_matches_longer_than_is_looked_at_count_alike() -> None:
    longer, later = [*range(10, 50), 60], [*range(20, 50), 70]
    guess = remember(longer, later).guess(list(range(10, 50)), 1)
    assert guess is not None
    assert (guess.tokens, guess.match) == ([70], LONGEST)


def test_one_token_over_and_over_is_found_and_goes_on() -> None:
    memory = remember([7] * 200)
    assert tokens_after(memory, [7] * 60) == [7] * WIDEST


def expected(texts: list[tuple[list[int], float]], tokens: list[int], most: int) -> Guess | None:
    """The guess, by trying every suffix at every place; ``texts`` with their votes."""
    for length in range(min(len(tokens), LONGEST), 1, -1):
        suffix = tokens[-length:]
        going = [
            (text[place:], vote)
            for text, vote in reversed(texts)
            for place in range(len(text) - 1, length - 1, -1)
            if text[place - length : place] == suffix
        ]
        if going:
            break
    else:
        return None
    going = going[: chains._COUNTED]
    guess = Guess([], [], length)
    sure = 1.0
    for step in range(min(most, WIDEST)):
        counts: dict[int, float] = {}
        for rest, vote in going:
            if step < len(rest):
                counts[rest[step]] = counts.get(rest[step], 0.0) + vote
        if not counts:
            break
        token = max(counts, key=lambda token: counts[token])
        chance = counts[token] / (sum(counts.values()) + DOUBT / (length + step - 1))
        sure *= chance
        if sure < LEAST:
            break
        guess.tokens.append(token)
        guess.chances.append(chance)
        going = [(rest, vote) for rest, vote in going if step < len(rest) and rest[step] == token]
    return guess if guess.tokens else None


def same(one: Guess | None, other: Guess | None) -> bool:
    if one is None or other is None:
        return one is other
    return (one.tokens, one.match) == (other.tokens, other.match) and (
        one.chances == pytest.approx(other.chances)
    )


@given(
    answers=st.lists(st.lists(st.integers(0, 3), max_size=20), max_size=3),
    passages=st.lists(st.lists(st.integers(0, 3), max_size=20), max_size=3),
    tokens=some_words,
)
def test_a_guess_is_what_trying_every_place_gives(
    answers: Texts, passages: Texts, tokens: list[int]
) -> None:
    # The texts are so short that no n-gram has more places than are compared, and the memory so
    # small that many share a bucket.
    votes: dict[tuple[str, tuple[int, ...]], float] = {}
    for kind, vote, texts in (("passage", 0.5, passages), ("answer", 1.0, answers)):
        for text in texts:
            votes[kind, tuple(text)] = votes.get((kind, tuple(text)), 0.0) + vote
    texts_with_votes = [(list(text), vote) for (_, text), vote in votes.items()]
    guess = remember(*answers, passages=passages, most=160).guess(tokens, 40)
    assert same(guess, expected(texts_with_votes, tokens, 40))


@given(answers=texts_of_few_words, passages=texts_of_few_words, tokens=some_words)
def test_a_guess_did_follow_the_last_tokens_in_some_text(
    answers: Texts, passages: Texts, tokens: list[int]
) -> None:
    guess = remember(*answers, passages=passages).guess(tokens, 40)
    if guess is None:
        return
    assert all(0 < chance < 1 for chance in guess.chances)
    assert len(guess.chances) == len(guess.tokens)
    said = [*tokens[-guess.match :], *guess.tokens]
    assert any(
        text[start : start + len(said)] == said
        for text in (*answers, *passages)
        for start in range(len(text))
    )


@given(
    documents=st.lists(st.tuples(owners, texts_of_few_words), max_size=4),
    answers=st.lists(st.tuples(st.frozensets(owners), some_words), max_size=12),
    forgotten=owners,
    asked=st.lists(some_words, min_size=1, max_size=5),
)
@settings(max_examples=60)
def test_forgetting_a_document_leaves_no_trace(
    documents: list[tuple[str, Texts]],
    answers: list[tuple[frozenset[str], list[int]]],
    forgotten: str,
    asked: Texts,
) -> None:
    memory, never = Memory(most_tokens=FEW), Memory(most_tokens=FEW)
    for owner, passages in documents:
        memory.replace(owner, passages)
        if owner != forgotten:
            never.replace(owner, passages)
    for rests_on, answer in answers:
        memory.add(answer, owners=rests_on)
        if forgotten not in rests_on:
            never.add(answer, owners=rests_on)
    memory.forget(forgotten)
    assert memory.size == never.size
    assert all(same(memory.guess(tokens, 40), never.guess(tokens, 40)) for tokens in asked)


def test_a_changed_document_takes_its_old_passages_and_answers_along() -> None:
    memory = remember([1, 2, 3, 4, 5], passages=[[11, 12, 13, 14, 15]])
    memory.add([21, 22, 23, 24, 25], owners={"another"})
    memory.replace("document", [[31, 32, 33, 34, 35]])
    assert tokens_after(memory, [1, 2, 3]) == tokens_after(memory, [11, 12, 13]) == []
    assert tokens_after(memory, [21, 22, 23]) == [24, 25]
    assert tokens_after(memory, [30, 31, 32, 33]) == [34]


def test_a_document_given_again_unchanged_changes_nothing() -> None:
    passages = [[11, 12, 13, 14, 15], [11, 12, 13, 14, 15], [1, 2]]
    memory = remember([1, 2, 3, 4, 5], passages=passages)
    before = memory.size, memory.guess([11, 12, 13], 9)
    memory.replace("document", passages)
    assert (memory.size, memory.guess([11, 12, 13], 9)) == before
    assert tokens_after(memory, [1, 2, 3]) == [4, 5]


def test_a_cleared_memory_is_empty_and_goes_on(tmp_path: Path) -> None:
    memory = Memory(tmp_path / "memory", most_tokens=FEW)
    memory.add([1, 2, 3, 4], owners=set())
    memory.save()
    memory.clear()
    assert (memory.size, memory.guess([1, 2, 3], 9)) == (0, None)
    memory.save()
    assert Memory(tmp_path / "memory", most_tokens=FEW).size == 0
    memory.add([1, 2, 3, 5], owners=set())
    assert tokens_after(memory, [1, 2, 3]) == [5]
    memory.close()


# Its size.


def answer(number: int, length: int = 49) -> list[int]:
    """An answer that shares no n-gram with those of other numbers."""
    return [number * 1000 + n for n in range(length)]


def known(memory: Memory, numbers: Sequence[int]) -> list[int]:
    return [n for n in numbers if memory.guess(answer(n)[:9], 1)]


def test_a_full_memory_forgets_the_answers_not_given_for_longest() -> None:
    memory = Memory(most_tokens=500)
    for number in range(10):
        memory.add(answer(number), owners=set())
    assert known(memory, range(10)) == list(range(10))
    memory.add(answer(0), owners=set())
    memory.add(answer(10), owners=set())
    kept = known(memory, range(11))
    assert {0, 10} <= set(kept)
    assert kept[1:] == list(range(11 - len(kept) + 1, 11)), "the oldest went"
    assert len(kept) >= 8


def test_a_memory_full_to_the_last_token_proposes_up_to_it() -> None:
    memory = Memory(most_tokens=100)
    for number in range(4):
        memory.add(answer(number, 24), owners=set())
    assert memory.size == 100
    assert tokens_after(memory, answer(3)[:20]) == answer(3)[20:24]
    assert tokens_after(memory, answer(0)[:20]) == answer(0)[20:24]


def test_passages_push_out_answers_and_leave_them_a_quarter() -> None:
    memory = Memory(most_tokens=1000)
    for number in range(20):
        memory.add(answer(number), owners=set())
    for number in range(100, 120):
        memory.replace(str(number), [answer(number)])
    passages, answers = known(memory, range(100, 120)), known(memory, range(20))
    assert passages == list(range(120 - len(passages), 120))
    assert 0.6 * 1000 < len(passages) * 50 <= 750
    assert answers == list(range(20 - len(answers), 20))
    assert len(answers) >= 4
    for number in range(20, 60):
        memory.add(answer(number), owners=set())
    assert known(memory, range(100, 120)) == passages, "answers push out no passage"
    assert 59 in known(memory, range(60))


@given(
    sizes=st.lists(st.tuples(st.booleans(), st.integers(0, 300)), max_size=40),
    most=st.integers(0, 400),
)
@settings(max_examples=50)
def test_no_more_is_remembered_than_allowed(sizes: list[tuple[bool, int]], most: int) -> None:
    memory = Memory(most_tokens=most)
    for number, (is_answer, size) in enumerate(sizes):
        if is_answer:
            memory.add(answer(number, size), owners={"a"})
        else:
            memory.replace(str(number), [answer(number, size)])
        assert memory.size <= most
        if size > 12 and most > 100:
            assert known(memory, [number]), "the newest is there"


# Its file.


@given(
    documents=st.lists(st.tuples(owners, texts_of_few_words), max_size=3),
    answers=st.lists(st.tuples(st.frozensets(owners), some_words), max_size=9),
    forgotten=owners,
    asked=st.lists(some_words, min_size=1, max_size=5),
)
@settings(max_examples=40)
def test_a_saved_memory_is_loaded_as_it_was(
    tmp_path_factory: pytest.TempPathFactory,
    documents: list[tuple[str, Texts]],
    answers: list[tuple[frozenset[str], list[int]]],
    forgotten: str,
    asked: Texts,
) -> None:
    path = tmp_path_factory.mktemp("saved") / "memory"
    memory = Memory(path, most_tokens=FEW)
    for owner, passages in documents:
        memory.replace(owner, passages)
    for rests_on, text in answers:
        memory.add(text, owners=rests_on)
    memory.save()
    loaded = Memory(path, most_tokens=FEW)
    for each in ("as it was", "after forgetting", "after more"):
        assert loaded.size == memory.size, each
        for tokens in asked:
            assert memory.guess(tokens, 40) == loaded.guess(tokens, 40), each
        for one in (memory, loaded):
            one.forget(forgotten) if each == "as it was" else one.add([0, 1, 2, 3], owners=set())
    memory.close()
    loaded.close()


def test_a_loaded_memory_still_knows_which_answers_are_old(tmp_path: Path) -> None:
    memory = Memory(tmp_path / "memory", most_tokens=500)
    for number in (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0):
        memory.add(answer(number), owners=set())
    memory.save()
    smaller = Memory(tmp_path / "memory", most_tokens=300)
    assert smaller.size <= 300
    assert known(smaller, range(10)) == [0, 6, 7, 8, 9]
    loaded = Memory(tmp_path / "memory", most_tokens=500)
    for number in range(10, 15):
        loaded.add(answer(number), owners=set())
    assert known(loaded, range(15)) == [0, 7, 8, 9, 10, 11, 12, 13, 14]
    loaded.close()


def test_a_file_of_another_tokenizer_is_an_empty_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "memory"
    memory = Memory(path, key="tokenizer", most_tokens=FEW)
    memory.add(answer(1), owners=set())
    memory.close()
    assert known(Memory(path, key="tokenizer", most_tokens=FEW), [1]) == [1]
    assert Memory(path, key="another", most_tokens=FEW).size == 0
    assert "memory starts empty" in caplog.text


def test_a_killed_process_leaves_its_answers(tmp_path: Path) -> None:
    code = """
import sys, time
from pathlib import Path
from dflash_engine.drafters.memory import Memory
memory = Memory(Path(sys.argv[1]), most_tokens=2000, save_seconds=0.2)
print(memory.size, memory.guess([501, 502, 503], 1), flush=True)
memory.add(range(500, 900), owners={"menu.pdf"})
time.sleep(60)
"""
    path = tmp_path / "memory"
    command = [sys.executable, "-c", code, str(path)]
    for found in ("0 None", "401 Guess(tokens=[504],"):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                assert process.stdout.readline().startswith(found)
                assert soon(path.exists)
            finally:
                process.kill()


@pytest.mark.parametrize("disk", ["waits for its time", "does not answer"])
def test_a_process_that_does_not_close_it_ends_all_the_same(tmp_path: Path, disk: str) -> None:
    code = f"""
import os, sys, threading
from pathlib import Path
from dflash_engine.drafters.memory import Memory
asked = threading.Event()
os.fsync = lambda _: (asked.set(), threading.Event().wait())
memory = Memory(Path(sys.argv[1]), most_tokens=2000)
memory.add(range(500, 900), owners=set())
if {disk!r} == "does not answer":
    memory.clear()
    assert asked.wait(10)
"""
    command = [sys.executable, "-c", code, str(tmp_path / "memory")]
    ended = subprocess.run(command, timeout=30, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize("way", ["forget", "replace", "clear"])
def test_what_is_forgotten_leaves_the_disk_within_moments(tmp_path: Path, way: str) -> None:
    path = tmp_path / "memory"
    memory = Memory(path, most_tokens=FEW)
    memory.replace("menu.pdf", [answer(1)])
    memory.add(answer(2), owners={"menu.pdf"})
    memory.save()
    words = [np.array(answer(n)[:4], np.int32).tobytes() for n in (1, 2)]
    assert all(each in path.read_bytes() for each in words)
    assert soon(lambda: not save_threads())
    memory.add(answer(4), owners=set())
    time.sleep(0.05)  # now a thread sleeps until its time, which is far off
    match way:
        case "forget":
            memory.forget("menu.pdf")
        case "replace":
            memory.replace("menu.pdf", [answer(3)])
        case _:
            memory.clear()
    assert soon(lambda: not any(each in path.read_bytes() for each in words))
    memory.close()


def test_answers_are_written_together_when_it_is_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes: list[int] = []
    write = memory_file._write
    monkeypatch.setattr(
        memory_file, "_write", lambda path, data: (writes.append(len(data)), write(path, data))
    )
    path = tmp_path / "memory"
    memory = Memory(path, most_tokens=FEW, save_seconds=0.3)
    for number in range(20):
        memory.add(answer(number), owners=set())
    assert not path.exists()
    assert soon(lambda: not save_threads())
    assert len(writes) == 1
    assert known(Memory(path, most_tokens=FEW), range(20)) == list(range(20))


def test_nothing_waits_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Event(), threading.Event()
    write = memory_file._write

    def write_slowly(path: Path, data: bytes) -> None:
        begun.set()
        assert go_on.wait(10)
        write(path, data)

    monkeypatch.setattr(memory_file, "_write", write_slowly)
    path = tmp_path / "memory"
    memory = Memory(path, most_tokens=FEW, save_seconds=0)
    memory.add(answer(1), owners={"menu.pdf"})
    assert begun.wait(10)
    memory.add(answer(2), owners=set())
    memory.forget("menu.pdf")
    memory.replace("another.pdf", [answer(3)])
    assert known(memory, range(4)) == [2, 3]
    assert not path.exists()
    go_on.set()
    memory.close()
    assert known(Memory(path, most_tokens=FEW), range(4)) == [2, 3]


def test_there_is_a_thread_only_while_something_is_to_be_written(tmp_path: Path) -> None:
    memory = Memory(most_tokens=FEW, save_seconds=0)
    memory.replace("menu.pdf", [answer(1)])
    memory.forget("menu.pdf")
    memory.close()
    memory = Memory(tmp_path / "memory", most_tokens=FEW)
    memory.guess([1, 2, 3], 9)
    memory.forget("unknown.pdf")
    assert not save_threads()
    memory.add(answer(1), owners=set())
    assert len(save_threads()) == 1
    memory.save()
    assert soon(lambda: not save_threads())


def test_a_closed_memory_remembers_and_writes_only_when_told(tmp_path: Path) -> None:
    path = tmp_path / "memory"
    memory = Memory(path, most_tokens=FEW, save_seconds=0)
    memory.add(answer(1), owners={"menu.pdf"})
    memory.close()
    assert not save_threads()
    before = path.read_bytes()
    memory.add(answer(2), owners=set())
    memory.forget("menu.pdf")
    assert known(memory, [1, 2]) == [2]
    assert not save_threads()
    assert path.read_bytes() == before
    memory.save()
    assert known(Memory(path, most_tokens=FEW), [1, 2]) == [2]
    memory.close()
    assert not save_threads()


# At work.


def test_one_thread_proposes_while_others_add_forget_and_save(tmp_path: Path) -> None:
    memory = Memory(tmp_path / "memory", most_tokens=FEW, save_seconds=0.001)
    texts = [answer(n) for n in range(60)]
    failures: list[BaseException] = []
    rounds = 0

    def write(seed: int) -> None:
        rng = random.Random(seed)
        try:
            for _ in range(300):
                number = rng.randrange(60)
                match rng.randrange(8):
                    case 0:
                        memory.forget(str(number % 5))
                    case 1:
                        memory.replace(str(number % 5), [texts[number]])
                    case 2 if number < 10:
                        memory.save()
                    case _:
                        memory.add(texts[number], owners={str(number % 5)})
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    writers = [threading.Thread(target=write, args=[seed]) for seed in range(2)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        number = rounds % 60
        guess = memory.guess(texts[number][:20], 9)
        assert guess is None or guess.tokens == texts[number][20:29][: len(guess.tokens)]
        rounds += 1
    for writer in writers:
        writer.join()
    assert not failures
    memory.close()
    loaded = Memory(tmp_path / "memory", most_tokens=FEW)
    assert loaded.size == memory.size
    assert known(loaded, range(60)) == known(memory, range(60))


def test_as_a_drafter_it_proposes_its_guess() -> None:
    memory = remember([1, 2, 3, 4, 5, 6, 7, 8])
    assert (memory.name, memory.taps) == ("memory", ())
    proposer = memory.begin(Sampling(temperature=1.0), 7)
    proposer.restore(proposer.snapshot())
    draft = proposer.propose([2, 3, 4, 5], 2)
    assert (draft.tokens, draft.distributions) == ([6, 7], None)
    assert proposer.guess([2, 3, 4, 5], 2) == memory.guess([2, 3, 4, 5], 2)
    assert proposer.propose([5, 5], 9).tokens == []
    proposer.judge(2, 3)
    assert proposer.state == []
    memory.add([5, 5, 6], owners=set())
    assert proposer.propose([5, 5], 9).tokens == [6], "what is added meanwhile is known"
