"""Replicas that train apart and average every so many steps what they have changed. Knows parameters and exchanges.

    steps      each replica: AdamW on its own gradients           ... every `local_steps` of them
    average    change_r = common - own_r  ->  mean over replicas, compressed, errors fed back to the next average
               common <- common - outer rate * Nesterov(mean)     own <- common

All replicas decode the same bytes of the mean, so they end with the same bits. Each one's Adam keeps its own moments.

Source: Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import torch

from pipecomp.config import ReplicasConfig
from pipecomp.errors import NonFiniteValues
from pipecomp.protocol.spans import Doing, Subject
from pipecomp.runtime.actions import cancel
from pipecomp.runtime.channel import Inbox
from pipecomp.runtime.engine import Engine
from pipecomp.runtime.gradients import GradientSums, Tied
from pipecomp.runtime.optimizer import ShardOptimizer
from pipecomp.runtime.replicas import ReplicaExchange
from pipecomp.runtime.trace import COMPUTE
from pipecomp.types import Kind


class LocalSteps(GradientSums):
    """One worker's gradients, which stay with its replica, and the averages of its parameters."""

    def __init__(
        self,
        engine: Engine,
        optimizer: ShardOptimizer,
        tied: Tied,
        replicas: Sequence[ReplicaExchange],
        inboxes: Sequence[Inbox],
        config: ReplicasConfig,
    ) -> None:
        """Parameters have their values, the same in all replicas."""
        super().__init__(engine, optimizer, tied, replicas, inboxes)
        self._parameters = [parameter for exchange in replicas for parameter in exchange.row.parameters]
        self._common = [parameter.detach().clone() for parameter in self._parameters]
        self._outer = None
        if self._parameters:
            self._outer = torch.optim.SGD(
                self._parameters,
                lr=config.outer_learning_rate,
                momentum=config.outer_momentum,
                nesterov=config.outer_momentum > 0,
            )
        self._has_samples = True

    @property
    def has_update(self) -> bool:
        return self._has_samples

    def begin(self, step: int, *, has_samples: bool) -> None:
        self._has_samples = has_samples

    def on_gradient(self, parameter: torch.nn.Parameter) -> None:
        """It stays here."""

    async def finish(self, step: int) -> None:
        await self._add_tied(step)

    async def average(self, step: int) -> None:
        """Give all replicas the same parameters again, after `step`.

        Raises:
            NonFiniteValues: what was trained is not finite; no parameter has changed.
        """
        await self._engine.compute.run(self._take_changes)
        self._start_exchanges(step)
        tasks, self._tasks = self._tasks, []
        try:
            for exchange in self._replicas:
                exchange.complete_all()
            with self._engine.recorder.during(Doing.REPLICAS, COMPUTE, Subject(Kind.GRADIENTS, step=step)):
                await asyncio.gather(*tasks)
        except NonFiniteValues as error:
            raise NonFiniteValues(f"what replicas have trained apart until step {step}: {error}") from error
        finally:
            await cancel(tasks)
        for exchange in self._replicas:
            exchange.commit()
        await self._engine.compute.run(self._apply)

    def _take_changes(self) -> None:
        with torch.no_grad():
            for parameter, common in zip(self._parameters, self._common, strict=True):
                parameter.grad = common - parameter

    def _apply(self) -> None:
        with torch.no_grad():
            for parameter, common in zip(self._parameters, self._common, strict=True):
                assert parameter.grad is not None
                parameter.grad.div_(self._num_replicas)
                parameter.copy_(common)
            if self._outer is not None:
                self._outer.step()
            for parameter, common in zip(self._parameters, self._common, strict=True):
                common.copy_(parameter)
                parameter.grad = None
