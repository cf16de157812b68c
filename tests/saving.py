"""Watching what a memory does in the background."""

import threading
import time
from collections.abc import Callable


def save_threads() -> list[threading.Thread]:
    """The threads that have something to write."""
    return [thread for thread in threading.enumerate() if thread.name == "dflash-memory"]


def soon(happened: Callable[[], bool]) -> bool:
    """Whether it happens within ten seconds."""
    until = time.monotonic() + 10
    while not (done := happened()) and time.monotonic() < until:
        time.sleep(0.01)
    return done
