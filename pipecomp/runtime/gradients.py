"""From this worker's own gradients to those of the whole batch: a tied weight's two, then all replicas'. Knows when, not how.

    backward ...  last backward         all actions done
    |             | bucket by bucket    | tied weight's two gradients, then its bucket
    |             |====== replicas exchange ==========================|  gradients are those of the batch
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import torch

from pipecomp.errors import NonFiniteValues
from pipecomp.protocol.messages import LinkMeter
from pipecomp.protocol.spans import Doing, Subject
from pipecomp.runtime.actions import cancel
from pipecomp.runtime.channel import Inbox
from pipecomp.runtime.engine import Engine
from pipecomp.runtime.gradient_row import make_readable
from pipecomp.runtime.replicas import ReplicaExchange
from pipecomp.runtime.tied import TiedExchange, add_tied_gradients
from pipecomp.runtime.trace import COMPUTE
from pipecomp.types import Kind

Tied = TiedExchange | tuple[torch.nn.Parameter, torch.nn.Parameter] | None


class GradientSums:
    """What becomes of one worker's gradients between its backwards and the vote."""

    def __init__(
        self, engine: Engine, tied: Tied, replicas: Sequence[ReplicaExchange] = (), inboxes: Sequence[Inbox] = ()
    ) -> None:
        """`tied`: the exchange, or (embedding, head) parameters where both are here, or None. `inboxes`: of the links that
        `replicas` use."""
        self._engine = engine
        self._tied = tied
        self._replicas = tuple(replicas)
        self._inboxes = tuple(inboxes)
        self._held = {id(parameter) for parameter in _tied_parameters(tied)}
        self._tasks: list[asyncio.Task[None]] = []
        self._loop: asyncio.AbstractEventLoop | None = None

    def begin(self, step: int) -> None:
        """Be ready for the gradients of `step`."""
        self._loop = asyncio.get_running_loop()
        for exchange in self._replicas:
            exchange.begin()
        self._tasks = [asyncio.create_task(exchange.run(step)) for exchange in self._replicas]

    def on_gradient(self, parameter: torch.nn.Parameter) -> None:
        """A parameter's gradient is complete; called in the compute thread."""
        if self._tasks and id(parameter) not in self._held:
            make_readable(parameter)
            assert self._loop is not None
            self._loop.call_soon_threadsafe(self._complete, parameter)

    async def finish(self, step: int) -> None:
        """All backwards are done: wait until the gradients are those of the whole batch.

        Raises:
            NonFiniteValues: a gradient or a sum is not finite.
        """
        recorder = self._engine.recorder
        if isinstance(self._tied, TiedExchange):
            with recorder.during(Doing.TIED, COMPUTE, Subject(Kind.TIED, step=step)):
                await self._exchange_tied(self._tied, step)
        elif self._tied is not None:
            await self._engine.compute.run(add_tied_gradients, *self._tied)
        if self._replicas:
            await self._engine.compute.run(self._make_readable)
            for exchange in self._replicas:
                exchange.complete_all()
            with recorder.during(Doing.REPLICAS, COMPUTE, Subject(Kind.GRADIENTS, step=step)):
                await asyncio.gather(*self._tasks)

    async def _exchange_tied(self, tied: TiedExchange, step: int) -> None:
        try:
            await tied.exchange(step)
        except NonFiniteValues as error:
            raise NonFiniteValues(f"tied gradient: {error}") from error

    async def stop(self) -> None:
        """Let go of what is still under way."""
        tasks, self._tasks = self._tasks, []
        await cancel(tasks)

    def end(self, step: int, *, is_committed: bool) -> None:
        """The step is over: keep or forget its errors, and drop what still comes of it."""
        for exchange in self._replicas:
            exchange.commit() if is_committed else exchange.abort()
        for inbox in self._inboxes:
            inbox.finish(Kind.GRADIENTS, step)
        if isinstance(self._tied, TiedExchange):
            self._tied.finish(step)

    def take_meters(self) -> list[LinkMeter]:
        """Meters since the last call."""
        return [meter for exchange in self._replicas for meter in exchange.take_meters()]

    @property
    def error_nbytes(self) -> int:
        """What is kept for error feedback."""
        return sum(exchange.error_nbytes for exchange in self._replicas)

    def _complete(self, parameter: torch.nn.Parameter) -> None:
        for exchange in self._replicas:
            exchange.complete(parameter)

    def _make_readable(self) -> None:
        for exchange in self._replicas:
            for parameter in exchange.row.parameters:
                make_readable(parameter)


def _tied_parameters(tied: Tied) -> tuple[torch.nn.Parameter, ...]:
    if isinstance(tied, TiedExchange):
        return (tied.parameter,)
    return () if tied is None else tied
