import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Iterator

import pytest
from ticking import ticking

from dflash_engine.errors import CancelledError, EngineBusyError, EngineClosedError
from dflash_engine.worker import Stream, Worker

WAIT = 5.0


@pytest.fixture
def worker() -> Iterator[Worker]:
    worker = Worker("test", max_waiting=3)
    yield worker
    worker.close()


class Steps:
    """Work that goes on one item at a time, when told to."""

    def __init__(self) -> None:
        self.started = threading.Event()
        self.ended = threading.Event()
        self.go = threading.Semaphore(0)
        self.made = 0

    def __call__(self) -> Iterator[int]:
        self.started.set()
        try:
            while True:
                assert self.go.acquire(timeout=WAIT)
                self.made += 1
                yield self.made
        finally:
            self.ended.set()


def count(n: int) -> Iterator[int]:
    yield from range(n)


def fail_after(n: int) -> Iterator[int]:
    yield from range(n)
    raise RuntimeError("broken")


def test_items_come_in_order(worker: Worker) -> None:
    assert list(worker.submit(lambda: count(100))) == list(range(100))


async def test_items_come_in_order_without_blocking_the_loop(worker: Worker) -> None:
    def slow() -> Iterator[int]:
        for i in range(10):
            time.sleep(0.02)
            yield i

    async with ticking(0.005) as ticks:
        assert [item async for item in worker.submit(slow)] == list(range(10))
    assert ticks.count > 10


async def test_no_wake_up_is_lost(worker: Worker) -> None:
    # Items arrive while the loop is between looking and waiting.
    for n in (0, 1, 2, 500):
        stream = worker.submit(lambda n=n: count(n))
        got = await asyncio.wait_for(_collect(stream), WAIT)
        assert got == list(range(n))
    streams = [worker.submit(lambda: count(50)) for _ in range(3)]
    for got in await asyncio.wait_for(asyncio.gather(*map(_collect, streams)), WAIT):
        assert got == list(range(50))


async def _collect(stream: Stream[int]) -> list[int]:
    return [item async for item in stream]


def test_an_error_comes_after_the_items_and_the_next_request_is_fine(worker: Worker) -> None:
    stream = worker.submit(lambda: fail_after(2))
    items = iter(stream)
    assert [next(items), next(items)] == [0, 1]
    with pytest.raises(RuntimeError, match="broken"):
        next(items)
    assert list(worker.submit(lambda: count(3))) == [0, 1, 2]


async def test_an_error_reaches_an_async_caller(worker: Worker) -> None:
    with pytest.raises(RuntimeError, match="broken"):
        await _collect(worker.submit(lambda: fail_after(2)))


def test_an_error_keeps_nothing_of_the_request_alive(worker: Worker) -> None:
    class Cache:
        pass

    alive: list[weakref.ref[Cache]] = []

    def work() -> Iterator[int]:
        cache = Cache()
        alive.append(weakref.ref(cache))
        yield from fail_after(1)

    gc.disable()
    try:
        with pytest.raises(RuntimeError) as caught:
            list(worker.submit(work))
        assert alive[0]() is None
        assert "fail_after" in str(caught.traceback[-1]), "the place of the error is still told"
    finally:
        gc.enable()


def test_cancel_ends_the_request_at_its_next_step(worker: Worker) -> None:
    steps = Steps()
    stream = worker.submit(steps)
    steps.go.release()
    items = iter(stream)
    assert next(items) == 1
    stream.cancel()
    steps.go.release()
    assert steps.ended.wait(WAIT)
    assert steps.made == 2
    with pytest.raises(CancelledError):
        list(items)
    assert list(worker.submit(lambda: count(2))) == [0, 1]


def test_a_request_cancelled_while_waiting_never_starts(worker: Worker) -> None:
    first, second = Steps(), Steps()
    running, waiting = worker.submit(first), worker.submit(second)
    assert first.started.wait(WAIT)
    waiting.cancel()
    with pytest.raises(CancelledError):
        list(waiting)  # at once, although the first request goes on
    running.cancel()
    first.go.release()
    assert list(worker.submit(lambda: count(1))) == [0]
    assert not second.started.is_set()


def test_cancel_wakes_a_caller_that_waits_in_another_thread(worker: Worker) -> None:
    first = Steps()
    running = worker.submit(first)
    waiting = worker.submit(Steps())
    seen: list[BaseException] = []

    def iterate() -> None:
        try:
            list(waiting)
        except CancelledError as error:
            seen.append(error)

    caller = threading.Thread(target=iterate)
    caller.start()
    waiting.cancel()
    worker.submit(Steps()).cancel()  # clears those cancelled out of the queue
    caller.join(WAIT)
    assert not caller.is_alive()
    assert len(seen) == 1
    running.cancel()
    first.go.release()


def test_leaving_a_loop_cancels(worker: Worker) -> None:
    steps = Steps()
    steps.go.release()
    for item in worker.submit(steps):
        assert item == 1
        break
    steps.go.release()
    assert steps.ended.wait(WAIT)
    assert steps.made == 2


def test_a_stream_let_go_of_unread_cancels(worker: Worker) -> None:
    steps = Steps()
    stream = worker.submit(steps)
    assert steps.started.wait(WAIT)
    del stream
    steps.go.release()
    assert steps.ended.wait(WAIT)
    assert steps.made == 1


async def test_leaving_an_async_loop_cancels(worker: Worker) -> None:
    steps = Steps()
    steps.go.release()
    async for item in worker.submit(steps):
        assert item == 1
        break
    await asyncio.sleep(0.05)
    steps.go.release()
    assert await asyncio.to_thread(steps.ended.wait, WAIT)
    assert steps.made == 2


async def test_cancelling_the_task_cancels_the_request(worker: Worker) -> None:
    steps = Steps()
    task = asyncio.create_task(_collect(worker.submit(steps)))
    assert await asyncio.to_thread(steps.started.wait, WAIT)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    steps.go.release()
    assert await asyncio.to_thread(steps.ended.wait, WAIT)
    assert steps.made == 1


def test_a_closed_event_loop_does_not_stop_the_worker(worker: Worker) -> None:
    steps = Steps()
    stream = worker.submit(steps)
    loop = asyncio.new_event_loop()
    items = stream.__aiter__()
    task = loop.create_task(anext(items))  # type: ignore[arg-type]
    loop.run_until_complete(asyncio.sleep(0.05))
    loop.close()  # with the caller still waiting
    steps.go.release()
    steps.go.release()
    assert steps.ended.wait(WAIT)
    assert steps.made <= 2
    assert list(worker.submit(lambda: count(2))) == [0, 1]
    task.get_coro().close()  # type: ignore[union-attr]
    task._log_destroy_pending = False  # type: ignore[attr-defined]


def test_one_more_than_may_wait_is_refused(worker: Worker) -> None:
    first = Steps()
    running = worker.submit(first)
    assert first.started.wait(WAIT)
    waiting = [worker.submit(lambda: count(1)) for _ in range(3)]
    assert worker.waiting == 3
    with pytest.raises(EngineBusyError, match="3 requests"):
        worker.submit(lambda: count(1))
    waiting[0].cancel()
    waiting.append(worker.submit(lambda: count(1)))  # its place is free
    running.cancel()
    first.go.release()
    assert [list(stream) for stream in waiting[1:]] == [[0]] * 3


def test_close_ends_what_runs_and_what_waits() -> None:
    worker = Worker("test", max_waiting=3)
    first = Steps()
    running, waiting = worker.submit(first), worker.submit(lambda: count(1))
    assert first.started.wait(WAIT)
    closer = threading.Thread(target=worker.close)
    closer.start()
    while not worker._closed:
        time.sleep(0.001)
    first.go.release()
    closer.join(WAIT)
    assert first.ended.is_set()
    for stream in (running, waiting):
        with pytest.raises(EngineClosedError):
            list(stream)
    with pytest.raises(EngineClosedError, match="make a new one"):
        worker.submit(lambda: count(1))
    worker.close()  # may be repeated


def test_many_threads_get_their_own_items() -> None:
    worker = Worker("test", max_waiting=100)
    results: dict[int, list[int]] = {}

    def ask(n: int) -> None:
        results[n] = [item for _ in range(20) for item in worker.submit(lambda: count(n))]

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    worker.close()
    assert results == {n: list(range(n)) * 20 for n in range(8)}
