"""What to change in a run file, by comparing runs on paper. Pure.

The rules, in this order:

    bits            the widest setting whose run is at most a twentieth longer than the fastest one's: compress no more than pays
    num_in_flight   the fewest whose step is at most a hundredth longer than the best: fewer need less memory
    layers          the split whose busiest machine is least busy, of those that fit every machine's memory; kept as it is
                    unless the step gets a hundredth shorter, or the split at hand does not fit
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from pipecomp.errors import ConfigError
from pipecomp.partition import StagePlan, partition_by
from pipecomp.planning.choice import shipped_schedules
from pipecomp.planning.forecast import (
    Cluster,
    Forecast,
    actions_in_flight,
    forecast,
    stage_memory_nbytes,
    stage_seconds,
)
from pipecomp.planning.work import Width, Work
from pipecomp.schedules import Schedule
from pipecomp.schedules.one_f_one_b import OneFOneB
from pipecomp.types import Shard, StageIndex

WIDTH_SLACK = 1.05
STEP_SLACK = 1.01


class Advice(NamedTuple):
    """The best way found, and what it changes."""

    forecast: Forecast
    split: StagePlan
    schedule: str
    num_in_flight: int | None
    """None: the schedule's default."""
    layers: tuple[int, ...] | None
    """For `cluster.layers`; None: as the run file has it."""
    too_large: tuple[int, ...]
    """Ranks whose memory does not take their layers in any split that was found."""


def layer_counts(split: StagePlan) -> tuple[int, ...]:
    """Layers of each rank, as `cluster.layers` counts them."""
    counts = [0] * (max(split.ranks) + 1)
    for shard, rank in zip(split.shards, split.ranks, strict=True):
        counts[rank] += len(shard)
    return tuple(counts)


def choose_width(forecasts: Sequence[Forecast]) -> Forecast:
    """The widest that is not much slower than the fastest."""
    fastest = min(each.total_s for each in forecasts)
    fitting = [each for each in forecasts if each.total_s <= fastest * WIDTH_SLACK]
    return max(fitting, key=lambda each: (each.width.forward_bits + each.width.backward_bits, -each.total_s))


def best_split(work: Work, cluster: Cluster, split: StagePlan, schedule: Schedule, message_nbytes: Sequence[float]) -> StagePlan:
    """The same stages with their layers moved: busiest machine least busy, every machine's memory kept to.

    Args:
        work, cluster, schedule: what runs where, and how.
        split: who holds which stage, and where a tied weight lives.
        message_nbytes: of each rank, what its messages take of its memory.

    Raises:
        ConfigError: no split fits.
    """
    in_flight = actions_in_flight(work, split, schedule)
    colocated = len(split.shards) > len(cluster.machines)
    num_layers = len(work.layers) - colocated
    head = split.shards[-1]

    def cost(stage: int, start: int, end: int) -> float:
        machine, shards = cluster.machines[split.ranks[stage]], [(StageIndex(stage), Shard(start, end))]
        if colocated and stage == 0:
            shards.append((StageIndex(len(split.shards) - 1), head))
        memory_nbytes = message_nbytes[split.ranks[stage]]
        memory_nbytes += sum(stage_memory_nbytes(work, shard, in_flight[s]) for s, shard in shards)
        if memory_nbytes > machine.memory_nbytes:
            return math.inf
        seconds = [stage_seconds(work, machine, shard) for _, shard in shards]
        return sum(each.forward_s + each.backward_s for each in seconds)

    shards = partition_by(num_layers, len(split.shards) - colocated, cost)
    return msgspec.structs.replace(split, shards=(*shards, head) if colocated else tuple(shards))


def advise(work: Work, candidates: Sequence[Forecast], splits: Sequence[StagePlan], cluster: Cluster) -> Advice:
    """The best that was found.

    Args:
        work, cluster: what runs where.
        candidates: a forecast for each width.
        splits: of each candidate.
    """
    chosen = choose_width(candidates)
    width, split = chosen.width, splits[list(candidates).index(chosen)]
    name, schedule = _choose_schedule(work, width, cluster, split)
    best = forecast(work, width, cluster, split, schedule)
    layers = None
    moved = _moved(work, cluster, split, schedule, best)
    if moved is not None:
        other = forecast(work, width, cluster, moved, schedule)
        if too_large(best, cluster) or other.step_s * STEP_SLACK < best.step_s:
            best, split, layers = other, moved, layer_counts(moved)
    depth = schedule.num_in_flight if isinstance(schedule, OneFOneB) else None
    return Advice(best, split, name, depth, layers, too_large(best, cluster))


def too_large(each: Forecast, cluster: Cluster) -> tuple[int, ...]:
    """Ranks that are to hold more than their machine has."""
    pairs = zip(each.shares, cluster.machines, strict=True)
    return tuple(rank for rank, (share, machine) in enumerate(pairs) if share.memory_nbytes > machine.memory_nbytes)


def _choose_schedule(work: Work, width: Width, cluster: Cluster, split: StagePlan) -> tuple[str, Schedule]:
    """The one that holds least of those that are about as fast as the fastest."""
    tried = []
    for schedule in shipped_schedules(len(split.shards), work.num_microbatches).values():
        step_s = forecast(work, width, cluster, split, schedule).step_s
        tried.append((step_s, max(actions_in_flight(work, split, schedule).values()), schedule))
    fastest = min(step_s for step_s, _, _ in tried)
    _, _, schedule = min((each for each in tried if each[0] <= fastest * STEP_SLACK), key=lambda each: (each[1], each[0]))
    return schedule.name, schedule


def _moved(work: Work, cluster: Cluster, split: StagePlan, schedule: Schedule, now: Forecast) -> StagePlan | None:
    messages = [share.kept_nbytes if work.store == "memory" else 0.0 for share in now.shares]
    try:
        return best_split(work, cluster, split, schedule, messages)
    except ConfigError:
        return None
