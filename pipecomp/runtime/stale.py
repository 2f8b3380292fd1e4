"""Gradients that are exchanged beside the next step, and so applied one step late. Knows when, not how.

    step k       | forwards and backwards | gradients of k are put aside; those of k - 1 are applied
    step k + 1   | forwards and backwards | ...
                 |== exchange of k =======|  while computing and messages of the pipeline go on

The first step applies nothing, and the last one's gradients are never applied. An aborted step takes those that were under way
with it.
"""

from __future__ import annotations

import torch

from pipecomp.runtime.gradients import GradientSums


class StaleSums(GradientSums):
    """One worker's gradients, a step late."""

    _aside: list[list[torch.Tensor]] | None = None
    """Of the step that is prepared, by exchange."""
    _is_under_way = False

    @property
    def has_update(self) -> bool:
        return self._is_under_way

    def begin(self, step: int, *, has_samples: bool) -> None:
        super().begin(step, has_samples=has_samples)
        for exchange in self._replicas:
            exchange.complete_all()

    def _start_exchanges(self, step: int) -> None:
        self._is_under_way = all(exchange.row.held is not None for exchange in self._replicas)
        if self._is_under_way:
            super()._start_exchanges(step)

    def on_gradient(self, parameter: torch.nn.Parameter) -> None:
        """It is put aside with all others."""

    async def finish(self, step: int) -> None:
        await self._add_tied(step)
        await self._engine.compute.run(self._make_all_ready)
        await self._finish_exchanges(step)
        await self._engine.compute.run(self._swap)

    def _swap(self) -> None:
        self._aside = [exchange.row.take() for exchange in self._replicas]
        if self._is_under_way:
            for exchange in self._replicas:
                exchange.row.release()

    def end(self, step: int, *, is_committed: bool) -> None:
        super().end(step, is_committed=is_committed)
        aside, self._aside = self._aside, None
        for index, exchange in enumerate(self._replicas):
            exchange.row.held = aside[index] if is_committed and aside is not None else None
