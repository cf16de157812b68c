"""Whether an event loop goes on while something is awaited."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Ticks:
    """How often the loop came round."""

    count = 0


@asynccontextmanager
async def ticking(seconds: float) -> AsyncIterator[Ticks]:
    """Count the loop's rounds, ``seconds`` apart at least, until the block ends."""
    ticks = Ticks()

    async def tick() -> None:
        while True:
            ticks.count += 1
            await asyncio.sleep(seconds)

    ticker = asyncio.create_task(tick())
    try:
        yield ticks
    finally:
        ticker.cancel()
