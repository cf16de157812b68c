"""What is remembered of conversations, and how little of it."""

import threading

from app.rag import conversation
from app.rag.conversation import Conversations, Turn


def test_an_id_that_was_not_given_out_here_gets_a_new_one():
    conversations = Conversations()
    mine = conversations.open(None)
    assert conversations.open(mine) == mine
    for foreign in ("", "guess", "0" * 32):
        opened = conversations.open(foreign)
        assert opened not in (foreign, mine)
        assert conversations.turns(opened) == ()


def test_only_the_last_turns_are_kept_oldest_first():
    conversations = Conversations()
    id = conversations.open(None)
    turns = [Turn(f"q{n}", f"a{n}") for n in range(5)]
    for turn in turns:
        conversations.add(id, turn)
    assert conversations.turns(id) == tuple(turns[-conversation.TURNS :])


def test_the_conversation_unused_for_longest_is_forgotten_first(monkeypatch):
    monkeypatch.setattr(conversation, "CONVERSATIONS", 3)
    conversations = Conversations()
    first, second, third = (conversations.open(None) for _ in range(3))
    conversations.add(first, Turn("q", "a"))
    conversations.open(first)
    conversations.open(None)
    assert conversations.open(second) != second
    assert conversations.open(first) == first
    assert conversations.turns(first) == (Turn("q", "a"),)
    conversations.add(second, Turn("late", "answer"))  # of an answer that took long
    assert conversations.turns(second) == ()
    assert conversations.turns(third) == ()


def test_threads_do_not_lose_each_others_conversations():
    conversations = Conversations()
    ids: list[str] = []

    def talk() -> None:
        for n in range(100):
            id = conversations.open(None)
            conversations.add(id, Turn(str(n), id))
            ids.append(id)

    threads = [threading.Thread(target=talk) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(ids)) == 800
    assert all(conversations.turns(id)[0].answer == id for id in ids)
