"""Which store keeps the messages of each end of each link, and how much of them. Knows budgets and assignments; no codec.

A link keeps what the poorer of its two ends can: each worker divides its budget among the ends that it holds, and the link's
capacity is the smaller of the two shares. Both ends find it out of the assignment, so they agree without a word (law 10).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from pipecomp.buffers.base import MessageBuffer
from pipecomp.buffers.opening import StoreSettings, open_buffer
from pipecomp.buffers.retention import Retention
from pipecomp.config import MessagesConfig, RunConfig, messages_hash
from pipecomp.protocol.messages import Assignment
from pipecomp.units import parse_size

_BEFORE_ANY_STEP = 0


class StoreHome(NamedTuple):
    """What one worker's user said about its store; None: as the run file says, and a folder that goes with the worker."""

    folder: Path | None = None
    memory_nbytes: int | None = None
    disk_nbytes: int | None = None


def count_ends(ranks: Sequence[int]) -> Counter[int]:
    """How many ends of links between stages each rank holds; `ranks`: of the stages in order."""
    return Counter(rank for pair in itertools.pairwise(ranks) for rank in pair)


def store_settings(config: MessagesConfig, home: StoreHome, num_ends: int) -> StoreSettings:
    """Of each end that a worker holds: an even share of its budgets."""
    memory = parse_size(config.memory_budget, "messages.memory_budget") if home.memory_nbytes is None else home.memory_nbytes
    disk = parse_size(config.disk_budget, "messages.disk_budget") if home.disk_nbytes is None else home.disk_nbytes
    return StoreSettings(
        store=config.store,
        dtype=config.dtype,
        memory_nbytes=memory // max(1, num_ends),
        disk_nbytes=disk // max(1, num_ends),
        folder=home.folder,
        direct=config.direct_io,
    )


def link_capacity_nbytes(assignment: Assignment, stage: int) -> int:
    """Bytes of messages that the link from `stage` to the next keeps at each end."""
    return min(s.message_nbytes for s in assignment.stages[stage : stage + 2])


def adopt(buffer: MessageBuffer, retention: Retention) -> None:
    """Keep what an earlier run left in a folder as far as it fits, and give up the rest. Both ends do; where they do not come
    to the same, the next visit heals it."""
    for sample_id, nbytes in buffer.committed_nbytes().items():
        if not retention.adopt(sample_id, nbytes):
            buffer.drop(_BEFORE_ANY_STEP, sample_id)
    buffer.commit(_BEFORE_ANY_STEP)


def open_store(
    assignment: Assignment, config: RunConfig, home: StoreHome, *, stage: int, end: str, on_wait: Callable[[float], None]
) -> MessageBuffer:
    """The store of one end (`sender` or `receiver`) of the link from `stage` to the next. `on_wait`: as `open_buffer` says.

    Raises:
        StoreError: its folder cannot be used, or holds another run's messages.
    """
    num_ends = count_ends([s.rank for s in assignment.stages])[assignment.rank]
    identity = {
        "configuration": messages_hash(config),
        "model": assignment.model_hash,
        "link": f"{assignment.replica}/{stage}-{stage + 1}",
        "end": end,
    }
    settings = store_settings(config.messages, home, num_ends)
    return open_buffer(settings, identity, f"{assignment.replica}-{stage}-{end}", on_wait=on_wait)
