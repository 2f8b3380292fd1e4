"""Which store keeps the messages of each end of each link, and how much of them. Knows budgets and assignments; no codec.

A link keeps what the poorer of its two ends can: each worker divides its budget among the ends that it holds, and the link's
capacity is the smaller of the two shares. Both ends find it out of the assignment, so they agree without a word (law 10).
"""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from pipecomp.buffers.base import MessageBuffer
from pipecomp.buffers.opening import StoreSettings, open_buffer
from pipecomp.config import MessagesConfig, RunConfig, config_hash, parse_size
from pipecomp.protocol.messages import Assignment


class StoreHome(NamedTuple):
    """What one worker's user said about its store; None: as the run file says, and a folder that goes with the worker."""

    folder: Path | None = None
    memory_nbytes: int | None = None
    disk_nbytes: int | None = None


class Budget(NamedTuple):
    """Bytes that one worker has for messages."""

    memory_nbytes: int
    disk_nbytes: int

    @property
    def nbytes(self) -> int:
        return self.memory_nbytes + self.disk_nbytes


def message_budget(config: MessagesConfig, home: StoreHome) -> Budget:
    """What a worker can keep with the run's kind of store."""
    memory = parse_size(config.memory_budget, "messages.memory_budget") if home.memory_nbytes is None else home.memory_nbytes
    disk = parse_size(config.disk_budget, "messages.disk_budget") if home.disk_nbytes is None else home.disk_nbytes
    return Budget(0 if config.store == "disk" else memory, 0 if config.store == "memory" else disk)


def link_capacity_nbytes(assignment: Assignment, stage: int) -> int:
    """Bytes of messages that the link from `stage` to the next keeps at each end."""
    ends = Counter(s.rank for pair in itertools.pairwise(assignment.stages) for s in pair)
    here, there = assignment.stages[stage], assignment.stages[stage + 1]
    return min(here.message_nbytes // ends[here.rank], there.message_nbytes // ends[there.rank])


def open_store(assignment: Assignment, config: RunConfig, home: StoreHome, *, stage: int, end: str) -> MessageBuffer:
    """The store of one end (`sender` or `receiver`) of the link from `stage` to the next.

    Raises:
        StoreError: its folder cannot be used, or holds another run's messages.
    """
    num_ends = sum(s.rank == assignment.rank for pair in itertools.pairwise(assignment.stages) for s in pair)
    budget = message_budget(config.messages, home)
    settings = StoreSettings(
        store=config.messages.store,
        dtype=config.messages.dtype,
        memory_nbytes=budget.memory_nbytes // num_ends,
        disk_nbytes=budget.disk_nbytes // num_ends,
        folder=home.folder,
        direct=config.messages.direct_io,
    )
    identity = {
        "configuration": config_hash(config),
        "model": assignment.model_hash,
        "link": f"{assignment.replica}/{stage}-{stage + 1}",
        "end": end,
    }
    return open_buffer(settings, identity, f"{assignment.replica}-{stage}-{end}")
