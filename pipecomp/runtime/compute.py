"""The one thread that computes. Knows how to run a function there; knows no sockets and never waits for one (law 9)."""

from __future__ import annotations

import asyncio
import concurrent.futures
import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class ComputeThread:
    """Runs torch work one call at a time, away from the event loop.

    The default random generator belongs to the process, so stages that live in one process share one ComputeThread; then
    seeding a layer and running it cannot be torn apart by another stage.
    """

    def __init__(self, *, num_threads: int = 0) -> None:
        """`num_threads`: torch's threads inside one operation; 0 leaves torch's own choice."""
        self._pool = concurrent.futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="compute")
        self._busy_s = 0.0
        if num_threads > 0:
            self._pool.submit(_set_num_threads, num_threads).result()

    @property
    def busy_s(self) -> float:
        """Seconds spent computing since the start."""
        return self._busy_s

    def start(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
        """Queue `function` for the compute thread. Cancelled before its turn, it never runs; afterwards it ends by itself."""
        return asyncio.get_running_loop().run_in_executor(self._pool, lambda: self._timed(function, *args, **kwargs))

    async def run(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `function` in the compute thread. If the caller is cancelled, the function still ends by itself."""
        return await self.start(function, *args, **kwargs)

    def _timed(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        started = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            self._busy_s += time.perf_counter() - started

    def close(self) -> None:
        """Let a running function end; start no other."""
        self._pool.shutdown(wait=True, cancel_futures=True)


def _set_num_threads(num_threads: int) -> None:
    import torch

    torch.set_num_threads(num_threads)
