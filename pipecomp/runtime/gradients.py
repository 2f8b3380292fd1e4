"""From this worker's own gradients to those of the whole batch: a tied weight's two, then all replicas'. Knows when, not how.

    backward ...  last backward         all actions done
    |             | bucket by bucket    | tied weight's two gradients, then its bucket
    |             |====== replicas exchange ==========================|  gradients are those of the batch

Two other ways are modules of their own: beside the next step (stale.py), and of parameters every few steps (local_steps.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import torch

from pipecomp.errors import NonFiniteValues, RemoteProtocolError
from pipecomp.protocol.messages import LinkMeter
from pipecomp.protocol.spans import Doing, Subject
from pipecomp.runtime.actions import cancel
from pipecomp.runtime.channel import Inbox
from pipecomp.runtime.engine import Engine
from pipecomp.runtime.gradient_row import make_readable
from pipecomp.runtime.optimizer import ShardOptimizer
from pipecomp.runtime.replicas import ReplicaExchange
from pipecomp.runtime.tied import TiedExchange, add_tied_gradients
from pipecomp.runtime.trace import COMPUTE
from pipecomp.types import Kind

Tied = TiedExchange | tuple[torch.nn.Parameter, torch.nn.Parameter] | None


class GradientSums:
    """What becomes of one worker's gradients between its backwards and the vote."""

    def __init__(
        self,
        engine: Engine,
        optimizer: ShardOptimizer,
        tied: Tied,
        replicas: Sequence[ReplicaExchange] = (),
        inboxes: Sequence[Inbox] = (),
    ) -> None:
        """`optimizer`: says what becomes of a gradient before it is exchanged. `tied`: the exchange, or (embedding, head)
        parameters where both are here, or None. `inboxes`: of the links that `replicas` use."""
        self._engine = engine
        self._optimizer = optimizer
        self._tied = tied
        self._replicas = tuple(replicas)
        self._inboxes = tuple(inboxes)
        self._held = {id(parameter) for parameter in _tied_parameters(tied)}
        self._tasks: list[asyncio.Task[None]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ready: set[int] = set()
        self._num_replicas = self._replicas[0].num_replicas if self._replicas else 1

    @property
    def has_update(self) -> bool:
        """Whether the step that is prepared has gradients to apply."""
        return True

    def begin(self, step: int, *, has_samples: bool) -> None:
        """Be ready for the gradients of `step`; `has_samples`: whether this replica trains any in it."""
        self._loop = asyncio.get_running_loop()
        self._ready = set()
        self._start_exchanges(step)

    def _start_exchanges(self, step: int) -> None:
        for exchange in self._replicas:
            exchange.begin()
        self._tasks = [asyncio.create_task(exchange.run(step)) for exchange in self._replicas]

    def on_gradient(self, parameter: torch.nn.Parameter) -> None:
        """A parameter's gradient is complete; called in the compute thread."""
        if self._tasks and id(parameter) not in self._held:
            self._make_ready(parameter)
            assert self._loop is not None
            self._loop.call_soon_threadsafe(self._complete, parameter)

    async def finish(self, step: int) -> None:
        """All backwards are done: wait until the gradients are those of the whole batch.

        Raises:
            NonFiniteValues: a gradient or a sum is not finite.
        """
        await self._add_tied(step)
        if self._replicas or self._optimizer.is_frozen:
            await self._engine.compute.run(self._make_all_ready)
        for exchange in self._replicas:
            exchange.complete_all()
        await self._finish_exchanges(step)

    async def _add_tied(self, step: int) -> None:
        if isinstance(self._tied, TiedExchange):
            with self._engine.recorder.during(Doing.TIED, COMPUTE, Subject(Kind.TIED, step=step)):
                await self._exchange_tied(self._tied, step)
        elif self._tied is not None:
            await self._engine.compute.run(add_tied_gradients, *self._tied)

    async def _finish_exchanges(self, step: int) -> None:
        if self._tasks:
            with self._engine.recorder.during(Doing.REPLICAS, COMPUTE, Subject(Kind.GRADIENTS, step=step)):
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
        """The step is over, in the optimizer too: keep or forget its errors, and drop what still comes of it."""
        for exchange in self._replicas:
            exchange.commit() if is_committed else exchange.abort()
        for inbox in self._inboxes:
            inbox.finish(Kind.GRADIENTS, step)
        if isinstance(self._tied, TiedExchange):
            self._tied.finish(step)

    async def average(self, step: int) -> None:
        """Average what replicas have trained apart. Raises RemoteProtocolError where they train together."""
        raise RemoteProtocolError(f"step {step} is to end with an average of parameters, but replicas have the same already")

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

    def freeze(self) -> None:
        """From the next step on momenta are exchanged: errors of gradients, that are still to be added, count as little in
        them as gradients do."""
        for exchange in self._replicas:
            exchange.scale_errors(self._optimizer.gradient_part)

    def _make_ready(self, parameter: torch.nn.Parameter) -> None:
        """A gradient is complete here: make of it what is exchanged. In the compute thread, once a step."""
        if id(parameter) not in self._ready:
            self._ready.add(id(parameter))
            make_readable(parameter)
            self._optimizer.to_momentum(parameter, self._num_replicas)

    def _make_all_ready(self) -> None:
        for owned in self._optimizer.owned:
            self._make_ready(owned.parameter)


def _tied_parameters(tied: Tied) -> tuple[torch.nn.Parameter, ...]:
    if isinstance(tied, TiedExchange):
        return (tied.parameter,)
    return () if tied is None else tied
