"""How long a worker waits for a coordinator that it does not hear, on a clock that only the test turns."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from pipecomp.protocol import messages as m
from pipecomp.protocol import wire
from pipecomp.runtime.trace import Recorder
from pipecomp.testing.message_examples import examples
from pipecomp.transport.base import Address, Connection
from pipecomp.transport.memory import MemoryNetwork, MemoryTransport
from workers import events as e
from workers.service import WorkerOptions, WorkerService

COORDINATOR = Address("memory://coordinator")
TIMEOUT_S = 5.0


class Work:
    """Loads at once, and is at everything else for ever."""

    activity = SimpleNamespace(text="work", step=0)
    model_hash = tokenizer_hash = ""

    def __init__(self) -> None:
        self.recorder = Recorder()

    async def listen(self) -> Address:
        return Address("memory://w")

    async def load(self, *_: Any) -> e.Event:
        return e.Loaded(num_parameters=1, num_trainable=1, peak_memory_nbytes=1)

    async def run_step(self, *_: Any) -> e.Event:
        raise await asyncio.Event().wait()  # type: ignore[misc]

    async def failed(self) -> e.Event:
        raise await asyncio.Event().wait()  # type: ignore[misc]

    async def close(self) -> None:
        pass


class Scene:
    """One worker, and a coordinator that says what the test says."""

    def __init__(self) -> None:
        self.now = 0.0
        self._time_passed = asyncio.Condition()
        self._network = MemoryNetwork()
        self._transport = MemoryTransport(self._network)
        self._connection: Connection
        work: Any = Work()
        self.service = WorkerService(
            WorkerOptions(coordinator=COORDINATOR, name="w"),
            control=MemoryTransport(self._network),
            work=work,
            clock=lambda: self.now,
            sleep=self._sleep,
        )

    async def begin(self) -> None:
        listener = await self._transport.listen(COORDINATOR)
        self.running = asyncio.create_task(self.service.run())
        self._connection = await listener.accept()
        assert isinstance(await self.hear(), m.Join)
        await self.say(
            m.Welcome(
                run="r", worker="w", weights_address="memory://x", heartbeat_interval_s=0.5, heartbeat_timeout_s=TIMEOUT_S
            )
        )

    async def begin_training(self) -> None:
        """Everyone is ready, and the first step is under way."""
        for kind in (m.Assignment, m.StepPlan):
            await self.say(next(each.message for each in examples() if isinstance(each.message, kind)))
            await self.pass_time(0.2)

    async def hear(self) -> m.Message:
        return wire.decode(await self._connection.receive()).message

    async def say(self, message: m.Message) -> None:
        lengths = getattr(message, "buffer_nbytes", ())
        await self._connection.send(wire.encode(message, [bytes(length) for length in lengths]))

    async def pass_time(self, seconds: float, *, step_s: float = 0.1) -> None:
        for _ in range(round(seconds / step_s)):
            self.now += step_s
            async with self._time_passed:
                self._time_passed.notify_all()
            for _ in range(20):
                await asyncio.sleep(0)

    async def is_lost_within(self, seconds: float) -> bool:
        await self.pass_time(seconds)
        return self.running.done()

    async def _sleep(self, seconds: float) -> None:
        until = self.now + seconds - 1e-9
        async with self._time_passed:
            await self._time_passed.wait_for(lambda: self.now >= until)

    async def close(self) -> None:
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)
        await self._transport.close()


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    scene = Scene()
    await scene.begin()
    yield scene
    await scene.close()


async def test_a_coordinator_that_falls_silent_in_training_is_given_up(scene: Scene) -> None:
    await scene.begin_training()
    assert not await scene.is_lost_within(TIMEOUT_S - 0.5)
    assert await scene.is_lost_within(0.7)
    assert "nothing heard for 5." in scene.running.result().reason


async def test_until_all_are_ready_there_is_more_patience(scene: Scene) -> None:
    assert not await scene.is_lost_within(29.0)
    assert await scene.is_lost_within(1.5)
    assert "nothing heard for 30." in scene.running.result().reason


@pytest.mark.parametrize("pause_s", [3.0, 600.0])
async def test_a_worker_that_was_frozen_itself_goes_on(scene: Scene, pause_s: float) -> None:
    await scene.begin_training()
    await scene.pass_time(3.0)
    await scene.pass_time(pause_s, step_s=pause_s)
    assert not await scene.is_lost_within(TIMEOUT_S - 0.5)
    assert await scene.is_lost_within(0.7)
