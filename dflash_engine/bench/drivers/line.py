"""The line between a bench and the driver of another engine, at the driver's end.

One JSON object a line. The command's only argument has ``target`` and ``draft`` (folders),
``mode``, ``libraries`` (the BLAS that MLX is to use) and ``stop`` (the tokens that end an answer).
The driver says ``{"ready": true, "version": ..., "mlx": ..., "mlx_lm": ...}`` once. From then on it
answers ``{"prompt": [tokens], "max_tokens": n}`` with ``{"tokens": [...], "first": seconds,
"total": seconds, "rounds": n, "peak": bytes}``. Whatever fails is told as ``{"error": ...}``.

Standard library only: this runs in environments that are not ours.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any


class Record:
    """An answer as it comes: at most ``most`` tokens, up to the first of ``stop``, which is kept
    if the package gives it. What a package gives beyond is left out, with its time.
    """

    def __init__(self, most: int, stop: Sequence[int]) -> None:
        self.most = most
        self._stop = frozenset(stop)
        self._tokens: list[int] = []
        self._rounds = 0
        self._start = time.perf_counter()
        self._first = self._last = 0.0  # when tokens came

    def add(self, tokens: Sequence[int], forwards: int = 1, at: float | None = None) -> None:
        """Note ``tokens``, which took so many ``forwards`` of the target and came ``at`` that time
        of ``time.perf_counter``, or now.
        """
        before = len(self._tokens)
        for token in tokens:
            if len(self._tokens) == self.most or self._stop.intersection(self._tokens[-1:]):
                break
            self._tokens.append(int(token))
        if len(self._tokens) > before:
            self._last = at or time.perf_counter()
            self._first = self._first or self._last
            self._rounds += forwards if before else 0

    def result(self) -> dict[str, Any]:
        """What the bench is told of it."""
        end = time.perf_counter()  # where no token came
        return {
            "tokens": self._tokens,
            "first": (self._first or end) - self._start,
            "total": (self._last or end) - self._start,
            "rounds": self._rounds,
        }


Answering = Callable[[list[int], Record], None]


def serve(package: str, load: Callable[[dict[str, Any]], Answering]) -> None:
    """Answer prompts until the bench hangs up.

    ``load`` imports the package and loads the models; what it returns writes one answer into a
    record.
    """
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what the package prints is no answer

    def say(**message: Any) -> None:
        print(json.dumps(message), file=out, flush=True)

    def fail(error: Exception) -> None:
        traceback.print_exc()
        say(error=f"{type(error).__name__}: {error}")

    config = json.loads(sys.argv[1])
    try:
        for library in config["libraries"]:  # before MLX, which takes the first it finds
            ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
        answer = load(config)
        import mlx.core as mx

        say(ready=True, version=version(package), mlx=version("mlx"), mlx_lm=version("mlx-lm"))
    except Exception as error:  # noqa: BLE001 - told to the bench, whatever it is
        fail(error)
        return
    for asked in sys.stdin:
        try:
            question = json.loads(asked)
            mx.reset_peak_memory()
            record = Record(question["max_tokens"], config["stop"])
            answer(question["prompt"], record)
            say(**record.result(), peak=mx.get_peak_memory())
        except Exception as error:  # noqa: BLE001 - told to the bench, whatever it is
            fail(error)
