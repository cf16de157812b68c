"""The last turns of conversations, in memory, so that a follow-up question can be understood."""

import threading
import uuid
from collections import OrderedDict
from dataclasses import dataclass

CONVERSATIONS = 1000
TURNS = 2


@dataclass(frozen=True)
class Turn:
    """A question and what was answered."""

    question: str
    answer: str


class Conversations:
    """The last two turns of the last thousand conversations. Safe to use from any thread."""

    def __init__(self) -> None:
        self._turns: OrderedDict[str, tuple[Turn, ...]] = OrderedDict()
        self._lock = threading.Lock()

    def open(self, conversation_id: str | None) -> str:
        """The id itself if it was given out here and is remembered, else a new one."""
        with self._lock:
            if conversation_id is not None and conversation_id in self._turns:
                self._turns.move_to_end(conversation_id)
                return conversation_id
            new = uuid.uuid4().hex
            self._turns[new] = ()
            while len(self._turns) > CONVERSATIONS:
                self._turns.popitem(last=False)
            return new

    def turns(self, conversation_id: str) -> tuple[Turn, ...]:
        """What was said before, oldest first."""
        with self._lock:
            return self._turns.get(conversation_id, ())

    def add(self, conversation_id: str, turn: Turn) -> None:
        """Remember a turn."""
        with self._lock:
            if conversation_id in self._turns:
                self._turns[conversation_id] = (*self._turns[conversation_id], turn)[-TURNS:]
