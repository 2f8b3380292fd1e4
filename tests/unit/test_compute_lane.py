"""Calls in the compute thread: in order, one queued behind the one that runs, results handed on in the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest

from pipecomp.runtime.actions import Lane
from pipecomp.runtime.compute import ComputeThread


@pytest.fixture
async def compute() -> AsyncIterator[ComputeThread]:
    thread = ComputeThread()
    yield thread
    thread.close()


async def until(event: threading.Event) -> None:
    async with asyncio.timeout(10):
        while not event.is_set():  # noqa: ASYNC110 - it is set in another thread
            await asyncio.sleep(0.002)


async def test_one_runs_and_one_is_queued_before_the_first_has_been_handed_on(compute: ComputeThread) -> None:
    first, second = threading.Event(), threading.Event()
    log: list[str] = []
    lane = Lane(compute, log.append)

    def run_first() -> str:
        assert first.wait(10)
        return "a"

    lane.put("first", run_first, lambda result: log.append(f"got {result}"))
    await lane.room()  # one more may be queued at once
    lane.put("second", lambda: second.set() or "b", lambda result: log.append(f"got {result}"))  # type: ignore[func-returns-value]
    first.set()
    second.wait(10)  # the loop is held up: the thread went on to the second without it
    assert log == ["first", "second"]
    await lane.idle()
    assert log == ["first", "second", "got a", "got b"]
    assert lane.is_idle()


async def test_there_is_room_for_no_third(compute: ComputeThread) -> None:
    first = threading.Event()
    lane = Lane(compute, lambda _: None)
    for _ in range(2):
        lane.put("wait", lambda: first.wait(10), lambda _: None)
    waiting = asyncio.create_task(lane.room())
    await asyncio.sleep(0.05)
    assert not waiting.done()
    assert not lane.is_idle()
    first.set()
    await asyncio.wait_for(waiting, 10)
    await lane.idle()


@pytest.mark.parametrize("place", ["call", "then"])
async def test_what_fails_is_raised_where_somebody_waits_and_what_is_queued_is_forgotten(
    compute: ComputeThread, place: str
) -> None:
    def fail(_: object = None) -> None:
        raise ValueError(place)

    begun, go_on, ran, noted = threading.Event(), threading.Event(), [], []
    lane = Lane(compute, noted.append)

    def call() -> None:
        begun.set()
        assert go_on.wait(10)
        if place == "call":
            fail()

    lane.put("call", call, fail if place == "then" else lambda _: None)
    lane.put("next", lambda: ran.append(1), lambda _: None)
    await until(begun)
    go_on.set()
    with pytest.raises(ValueError, match=place):
        await lane.idle()
    await lane.close()
    assert lane.is_idle()
    await compute.run(lambda: None)
    if place == "call":
        assert (ran, noted) == ([], ["call"])  # its words are the last


async def test_closing_forgets_what_has_not_begun_and_waits_for_nothing(compute: ComputeThread) -> None:
    begun, go_on, ran = threading.Event(), threading.Event(), []
    lane = Lane(compute, lambda _: None)
    lane.put("long", lambda: (begun.set(), go_on.wait(10)), lambda _: ran.append("handed on"))
    lane.put("never", lambda: ran.append("computed"), lambda _: None)
    await until(begun)
    await asyncio.wait_for(lane.close(), 5)
    go_on.set()
    await compute.run(lambda: None)
    assert ran == []


async def test_closing_forgets_a_call_that_was_put_at_the_same_moment(compute: ComputeThread) -> None:
    begun, go_on, ran = threading.Event(), threading.Event(), []
    lane = Lane(compute, lambda _: None)
    lane.put("long", lambda: (begun.set(), go_on.wait(10)), lambda _: None)
    await until(begun)
    lane.put("never", lambda: ran.append("computed"), lambda _: None)
    await lane.close()
    go_on.set()
    await compute.run(lambda: None)
    assert ran == []


async def test_either_is_over_when_the_input_is_here_or_the_call_has_ended(compute: ComputeThread) -> None:
    go_on = threading.Event()
    lane = Lane(compute, lambda _: None)
    lane.put("call", lambda: go_on.wait(10), lambda _: None)
    here = asyncio.create_task(asyncio.sleep(0))
    await asyncio.wait_for(lane.either(here), 5)
    assert here.done()
    never = asyncio.create_task(asyncio.sleep(60))
    go_on.set()
    await asyncio.wait_for(lane.either(never), 5)
    assert lane.is_idle()
    never.cancel()
