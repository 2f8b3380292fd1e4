"""Which messages a link keeps within its capacity. Knows samples, sizes and steps; holds no message. Pure."""

from __future__ import annotations

from typing import NamedTuple

from pipecomp.types import SampleId


class Retained(NamedTuple):
    """What becomes of one visit's message."""

    keep: bool
    evicted: tuple[SampleId, ...]


class Retention:
    """Decides at the sender; the receiver is told. A sample that is kept stays; a new one is kept while there is room."""

    def __init__(self, capacity_nbytes: int) -> None:
        self._capacity = capacity_nbytes
        self._committed: dict[SampleId, int] = {}
        self._staged: dict[int, dict[SampleId, int]] = {}

    def visit(self, step: int, sample_id: SampleId, nbytes: int) -> Retained:
        """A message of `nbytes` would be kept once `step` commits."""
        staged = self._staged.setdefault(step, {})
        held = sum({**self._committed, **staged, sample_id: nbytes}.values())
        if held > self._capacity:
            return Retained(keep=False, evicted=())
        staged[sample_id] = nbytes
        return Retained(keep=True, evicted=())

    def commit(self, step: int) -> None:
        self._committed.update(self._staged.pop(step, {}))

    def abort(self, step: int) -> None:
        self._staged.pop(step, None)
