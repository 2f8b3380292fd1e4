"""Stores of a worker that cannot go on: whatever fails, the others are closed and temporary folders go."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest

from pipecomp.buffers.disk import DiskBuffer
from pipecomp.errors import PeerLost, StoreError
from pipecomp.protocol import messages as m
from pipecomp.runtime import assembly
from pipecomp.runtime.channel import CodecThreads
from pipecomp.runtime.compute import ComputeThread
from pipecomp.runtime.pipeline import Activity
from pipecomp.testing.local_pipeline import LocalPipeline
from pipecomp.testing.tiny_runs import MODEL, tiny_batch, tiny_run
from pipecomp.transport.base import Address
from pipecomp.transport.memory import MemoryNetwork, MemoryTransport
from pipecomp.types import StageIndex
from workers import events as e
from workers.job import AssignedWork
from workers.service import WorkerOptions, WorkerService


def pipeline() -> LocalPipeline:
    return LocalPipeline(tiny_run(messages={"store": "disk"}), MODEL, num_ranks=3)


def stores_in(folder: Path) -> list[str]:
    return [path.name for path in folder.glob("pipecomp-store-*")]


async def test_a_store_that_cannot_be_opened_leaves_no_folder_of_those_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    opened = []

    def open_store(*args: Any, **rest: Any) -> Any:
        if len(opened) == 2:  # the one of the first rank, and the first of the two of the next
            raise StoreError("no disk has room for this")
        opened.append(plain(*args, **rest))
        return opened[-1]

    plain = assembly.open_store
    monkeypatch.setattr(assembly, "open_store", open_store)
    with pytest.raises(StoreError, match="no disk has room for this"):
        async with pipeline():
            pass
    assert stores_in(tmp_path) == []


async def test_a_store_that_cannot_be_closed_keeps_no_other_open(monkeypatch: pytest.MonkeyPatch) -> None:
    async with pipeline() as three:
        await three.step(tiny_batch(), learning_rate=1e-3)
        middle = three.ranks[1].stages[StageIndex(1)]
        assert middle.forward_in is not None
        assert middle.forward_out is not None
        closed = []
        plain = DiskBuffer.close

        def close(buffer: DiskBuffer) -> None:
            plain(buffer)
            closed.append(buffer)
            if len(closed) == 1:
                raise StoreError("no space left")

        monkeypatch.setattr(DiskBuffer, "close", close)
        with pytest.raises(StoreError, match="no space left"):
            three.ranks[1].close()
        assert len(closed) == 2
        monkeypatch.undo()


class FailingStores:
    def close(self) -> None:
        raise StoreError("no space left")


async def test_a_store_that_fails_at_its_end_leaves_no_thread_of_its_worker_running() -> None:
    compute, threads = ComputeThread(num_threads=1), CodecThreads()
    work = AssignedWork(name="w", data_address=Address("memory://w"), transport=MemoryTransport(MemoryNetwork()))
    work._compute, work._codec_threads, work._pipeline = compute, threads, FailingStores()  # type: ignore[assignment]
    with pytest.raises(StoreError, match="no space left"):
        await work.close()
    for pool in (compute._pool, threads._pool):
        with pytest.raises(RuntimeError, match="cannot schedule new futures after shutdown"):
            pool.submit(print)


class ClosesBadly:
    activity = Activity()

    async def close(self) -> None:
        raise StoreError("no space left")


def ending(finish: e.Finish) -> WorkerService:
    """A worker that has come to its end in this way, and whose store cannot be closed."""

    async def serve() -> e.Finish:
        return finish

    work: Any = ClosesBadly()
    service = WorkerService(
        WorkerOptions(coordinator="memory://nobody", name="w"), control=MemoryTransport(MemoryNetwork()), work=work
    )
    service._serve = serve  # type: ignore[method-assign]
    return service


async def test_messages_that_are_lost_at_the_end_of_a_good_run_are_an_error() -> None:
    with pytest.raises(StoreError, match="no space left"):
        await ending(e.Finish(exit_code=0, reason="training is complete")).run()


async def test_those_of_a_failed_run_do_not_hide_why_it_failed() -> None:
    finish = await ending(e.Finish(exit_code=1, reason="w0 failed: out of memory")).run()
    assert (finish.exit_code, finish.reason) == (1, "w0 failed: out of memory; and at its end: no space left")


@pytest.mark.parametrize("arrives", [True, False])
async def test_a_failure_that_the_coordinator_was_told_is_not_told_again(arrives: bool) -> None:
    class Connection:
        async def send(self, frames: object) -> None:
            if not arrives:
                raise PeerLost("reset")

    connection: Any = Connection()
    service = ending(e.Finish(exit_code=1, reason=""))
    service._connection = connection
    assert not service.is_told
    await service._send(m.Failed(worker="w", stages=(0,), activity="forward", reason="no space left"))
    assert service.is_told is arrives


async def test_a_store_that_fails_at_its_end_does_not_swallow_the_last_words_of_its_worker() -> None:
    class Connection:
        linger_s = 0.0

        async def close(self, *, linger_s: float) -> None:
            self.linger_s = linger_s

    class Work:
        async def close(self) -> None:
            raise StoreError("no space left")

    connection: Any = Connection()
    work: Any = Work()
    service = WorkerService(
        WorkerOptions(coordinator="memory://nobody", name="w"), control=MemoryTransport(MemoryNetwork()), work=work
    )
    service._connection = connection
    with pytest.raises(StoreError, match="no space left"):
        await service._close()
    assert connection.linger_s > 0
