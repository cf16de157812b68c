"""One thread that owns the model, and the streams that its callers hold.

MLX arrays belong to the thread that made them, and one model serves one request at a time. So a
single thread loads the model and works through a queue; callers, sync or async, get a
:class:`Stream` each. A stream can be cancelled at any time: waiting, it is dropped; under way, it
ends at its next step.
"""

import asyncio
import atexit
import threading
import traceback
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from typing import Any, Generic, TypeVar

import mlx.core as mx

from .errors import CancelledError, EngineBusyError, EngineClosedError

T = TypeVar("T")


class Stream(Generic[T]):
    """The items of one request, as they come: iterate it with ``for`` or ``async for``, once.

    Leaving the loop, or letting go of the stream, cancels the request. Errors of the request are
    raised where it is iterated.
    """

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._changed = threading.Condition()
        self._wake: Callable[[], object] | None = None
        self._finished = False
        self._error: BaseException | None = None
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        """Stop the request as soon as its current step ends. Never raises, may be repeated."""
        with self._changed:
            self._cancelled.set()
            self._notify()

    @property
    def cancelled(self) -> bool:
        """Whether :meth:`cancel` was called."""
        return self._cancelled.is_set()

    def __iter__(self) -> Iterator[T]:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._ready)
                    item = self._take()
                if item is None:
                    return
                yield item[0]
        finally:
            self.cancel()

    async def __aiter__(self) -> AsyncIterator[T]:
        loop = asyncio.get_running_loop()
        try:
            while True:
                arrived = asyncio.Event()
                with self._changed:
                    ready = self._ready
                    item = self._take() if ready else None
                    self._wake = partial(loop.call_soon_threadsafe, arrived.set)
                if ready:
                    if item is None:
                        return
                    yield item[0]
                else:
                    await arrived.wait()
        finally:
            with self._changed:
                self._wake = None
            self.cancel()

    @property
    def _ready(self) -> bool:
        return bool(self._items) or self._finished or self.cancelled

    def _take(self) -> tuple[T] | None:
        if self._items:
            return (self._items.popleft(),)
        if self._error is not None:
            raise self._error
        if not self._finished:
            raise CancelledError("the request was cancelled")
        return None

    def _push(self, item: T) -> None:
        with self._changed:
            self._items.append(item)
            self._notify()

    def _end(self, error: BaseException | None = None) -> None:
        with self._changed:
            self._finished = True
            self._error = error
            self._notify()

    def _notify(self) -> None:
        self._changed.notify_all()
        if self._wake is not None:
            try:
                self._wake()
            except RuntimeError:  # the caller's event loop is closed: nobody waits any more
                self._wake = None
                self._cancelled.set()


_Held = weakref.ref[Stream[Any]]


class Worker:
    """Runs iterators one after the other in a thread of its own.

    It keeps streams by weak references, so that one nobody holds any more counts as cancelled.

    At most ``max_waiting`` requests wait; one more raises EngineBusyError.
    """

    def __init__(self, name: str, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._waiting: deque[tuple[Callable[[], Iterator[Any]], _Held]] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        atexit.register(self.close)  # the interpreter must not end in the middle of a forward

    @property
    def waiting(self) -> int:
        """How many requests wait for their turn."""
        return len(self._waiting)

    def submit(self, work: Callable[[], Iterator[T]], *, urgent: bool = False) -> Stream[T]:
        """Queue ``work``; what it yields comes out of the stream. ``urgent`` goes before those that
        wait, however many they are.
        """
        stream: Stream[T] = Stream()
        with self._changed:
            if self._closed:
                raise EngineClosedError("the engine is closed: make a new one")
            self._waiting = deque(pair for pair in self._waiting if _wanted(pair[1]))
            if urgent:
                self._waiting.appendleft((work, weakref.ref(stream)))
                self._changed.notify()
                return stream
            if len(self._waiting) >= self._max_waiting:
                raise EngineBusyError(
                    f"{len(self._waiting)} requests are waiting already: try again shortly"
                )
            self._waiting.append((work, weakref.ref(stream)))
            self._changed.notify()
        return stream

    def close(self) -> None:
        """End the request under way at its next step, drop those waiting, stop the thread."""
        atexit.unregister(self.close)
        with self._changed:
            self._closed = True
            self._changed.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    break
                work, held = self._waiting.popleft()
            self._serve(work, held)
            del work, held  # or the last request's arrays live until the next one
        for _, held in self._waiting:
            _end(held, EngineClosedError("the engine was closed"))
        self._waiting.clear()
        # Left to the end of the thread, which join() does not wait for, this may run while the
        # interpreter ends, and then MLX aborts the process.
        mx.clear_streams()

    def _serve(self, work: Callable[[], Iterator[Any]], held: _Held) -> None:
        try:
            if _wanted(held) is None:
                return
            for item in work():
                if self._closed:
                    raise EngineClosedError("the engine was closed")
                stream = _wanted(held)
                if stream is None:
                    raise CancelledError("the request was cancelled")
                stream._push(item)
                del stream, item
        except BaseException as error:  # noqa: BLE001 - it belongs to the caller, not this thread
            # The lines stay, what they held goes: an error must not keep a cache alive.
            traceback.clear_frames(error.__traceback__)
            _end(held, error)
        else:
            _end(held)


def _wanted(held: _Held) -> Stream[Any] | None:
    stream = held()
    return None if stream is None or stream.cancelled else stream


def _end(held: _Held, error: BaseException | None = None) -> None:
    stream = held()
    if stream is not None:
        stream._end(error)
