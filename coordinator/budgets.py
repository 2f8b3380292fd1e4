"""What the workers' budgets for messages come to, and in words whether that is enough. Knows joins and sizes; pure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from coordinator.summary import format_nbytes
from pipecomp.buffers.formats import MessageDtype
from pipecomp.buffers.opening import kept_nbytes
from pipecomp.config import RunConfig
from pipecomp.protocol.messages import Join
from pipecomp.runtime.rehearsal import make_codec
from pipecomp.runtime.stores import StoreHome, count_ends, store_settings
from pipecomp.types import Kind, TensorSpec

if TYPE_CHECKING:
    from coordinator.preparation import PreparedRun

_COARSER: tuple[MessageDtype, ...] = ("bf16", "int8")
"""What is proposed in place of fp32; 4 bits are a person's own choice."""


class _Poorest(NamedTuple):
    """The link that keeps least, and the worker that keeps it from keeping more."""

    stage: int
    place: int
    nbytes: int


def capacity_nbytes(config: RunConfig, join: Join, num_ends: int) -> int:
    """What a worker can keep of messages at each of the `num_ends` ends of links that it holds."""
    folder = Path() if join.keeps_messages else None
    home = StoreHome(folder, join.message_memory_nbytes, join.message_disk_nbytes)
    return store_settings(config.messages, home, num_ends).capacity_nbytes


def describe_budget(run: PreparedRun, joins: Sequence[Join]) -> str:
    """Which share of the samples keeps its message, and what to set so that all do; empty where all do or none comes twice.

    `joins` by place.
    """
    config = run.config
    if len(run.stage_plan.ranks) < 2 or run.terms.total_steps <= run.terms.steps_per_epoch:
        return ""
    if not make_codec(config, Kind.FORWARD).has_messages:
        return ""
    poorest = _poorest(run, joins)
    wanted = _wanted_nbytes(run, config.messages.dtype)
    if wanted <= poorest.nbytes:
        return ""
    return (
        f"messages: link {poorest.stage}-{poorest.stage + 1} has room for {poorest.nbytes / wanted:.0%} of them "
        f"({format_nbytes(poorest.nbytes)} of {format_nbytes(wanted)} at each end); the other samples are sent as on a first "
        f"visit each time. To keep all: {', or '.join(_remedies(run, joins, poorest, wanted))}"
    )


def _poorest(run: PreparedRun, joins: Sequence[Join]) -> _Poorest:
    ranks = run.stage_plan.ranks
    num_ends, num_ranks = count_ends(ranks), 1 + max(ranks)
    return min(
        (
            _Poorest(stage, first + rank, capacity_nbytes(run.config, joins[first + rank], num_ends[rank]))
            for first in range(0, len(joins), num_ranks)
            for stage in range(len(ranks) - 1)
            for rank in ranks[stage : stage + 2]
        ),
        key=lambda end: end.nbytes,
    )


def _wanted_nbytes(run: PreparedRun, dtype: MessageDtype) -> int:
    """What the messages of all samples of a replica come to at one end of a link; all replicas have about as many."""
    lengths, counts = np.unique(run.batches.lengths, return_counts=True)
    counts = -(-counts // run.terms.num_replicas)
    store, columns = run.config.messages.store, run.model.plan.hidden_size
    return sum(
        int(count) * kept_nbytes(store, dtype, TensorSpec(int(length), columns))
        for length, count in zip(lengths, counts, strict=True)
    )


def _remedies(run: PreparedRun, joins: Sequence[Join], poorest: _Poorest, wanted: int) -> list[str]:
    config, join = run.config.messages, joins[poorest.place]
    of_worker = wanted * max(1, *count_ends(run.stage_plan.ranks).values())
    found = []
    if config.store == "memory":
        budget = f'"{_rounded_up(of_worker)}"'
        own = join.message_memory_nbytes is not None
        found.append(f"{join.worker} --message-memory {budget}" if own else f"messages.memory_budget = {budget}")
        found.append('messages.store = "tiered"')
    else:
        budget = f'"{_rounded_up(2 * of_worker)}"'  # half of a disk's budget is room to reclaim
        own = join.message_disk_nbytes is not None
        found.append(f"{join.worker} --message-disk {budget}" if own else f"messages.disk_budget = {budget}")
    if config.dtype == "fp32":
        coarser = next((dtype for dtype in _COARSER if _wanted_nbytes(run, dtype) <= poorest.nbytes), None)
        found += [] if coarser is None else [f'messages.dtype = "{coarser}"']
    return found


def _rounded_up(nbytes: int) -> str:
    """As a run file has it, and a little more rather than less."""
    unit, size = ("GB", 10**8) if nbytes >= 10**9 else ("MB", 10**5)
    return f"{-(-nbytes // size) / 10:.1f}{unit}"
