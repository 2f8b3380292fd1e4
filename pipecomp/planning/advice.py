"""What to change in a run file, by comparing runs on paper. Pure.

    bits                      the widest setting whose run is at most a twentieth longer than the fastest one's: compress no more
                              than pays
    num_in_flight and layers  every shipped schedule is tried with the layers at hand and with those that it is best served by:
                              the busiest machine least busy, every machine's memory kept to. Of those that fit, at most a
                              hundredth longer than the shortest step: the layers at hand before others, then the fewest
                              microbatches in flight, which need less memory
    num_deferred              then, with these: none, the run file's own, or as many as stages; the fewest of those that fit and
                              are at most a hundredth longer than the shortest
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
    Share,
    actions_in_flight,
    error_nbytes,
    forecast,
    shares_of,
    stage_memory_nbytes,
    stage_seconds,
    step_s,
)
from pipecomp.planning.machines import Machine
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
    num_deferred: int
    layers: tuple[int, ...] | None
    """For `cluster.layers`; None: as the run file has it."""
    too_large: tuple[int, ...]
    """Places whose memory does not take their layers in any split that was found."""


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

    def bits(width: Width) -> float:
        return width.forward_bits + width.backward_bits + width.gradient_bits

    return max(fitting, key=lambda each: (bits(each.width), -each.total_s))


def best_split(
    work: Work,
    cluster: Cluster,
    split: StagePlan,
    schedule: Schedule,
    message_nbytes: Sequence[float],
    *,
    keeps_errors: bool = False,
) -> StagePlan:
    """The same stages with their layers moved: busiest machine least busy, every machine's memory kept to.

    Args:
        work, cluster, schedule: what runs where, and how.
        split: who holds which stage, and where a tied weight lives.
        message_nbytes: of each rank, what its messages take of its memory.
        keeps_errors: whether replicas keep what coding their gradients lost.

    Raises:
        ConfigError: no split fits.
    """
    in_flight = actions_in_flight(work, split, schedule)
    replicas = cluster.replicas(work.num_replicas)
    colocated = len(split.shards) > len(replicas[0].machines)
    num_layers = len(work.layers) - colocated
    head = split.shards[-1]

    def cost(stage: int, start: int, end: int) -> float:
        machines = [each.machines[split.ranks[stage]] for each in replicas]
        shards = [(StageIndex(stage), Shard(start, end))]
        if colocated and stage == 0:
            shards.append((StageIndex(len(split.shards) - 1), head))
        memory_nbytes = message_nbytes[split.ranks[stage]]
        memory_nbytes += sum(stage_memory_nbytes(work, shard, in_flight[s]) for s, shard in shards)
        if keeps_errors:
            memory_nbytes += sum(error_nbytes(work, shard) for _, shard in shards)
        if any(memory_nbytes > machine.memory_nbytes for machine in machines):
            return math.inf
        return max(_computing_s(work, machine, [shard for _, shard in shards]) for machine in machines)

    shards = partition_by(num_layers, len(split.shards) - colocated, cost)
    return msgspec.structs.replace(split, shards=(*shards, head) if colocated else tuple(shards))


def _computing_s(work: Work, machine: Machine, shards: Sequence[Shard]) -> float:
    seconds = [stage_seconds(work, machine, shard) for shard in shards]
    return sum(each.forward_s + each.backward_s for each in seconds)


def advise(work: Work, candidates: Sequence[Forecast], splits: Sequence[StagePlan], cluster: Cluster) -> Advice:
    """The best that was found.

    Args:
        work, cluster: what runs where.
        candidates: a forecast for each width.
        splits: of each candidate.
    """
    chosen = choose_width(candidates)
    width, split = chosen.width, splits[list(candidates).index(chosen)]
    tried = _trials(work._replace(num_deferred=0), width, cluster, split)  # the run file's own is chosen, or not, afterwards
    fitting = [trial for trial in tried if not trial.too_large]
    if fitting:
        shortest = min(trial.step_s for trial in fitting)
        short = [trial for trial in fitting if trial.step_s <= shortest * STEP_SLACK]
        best = min(short, key=lambda trial: (trial.is_moved, trial.num_in_flight, trial.is_gpipe, trial.step_s))
    else:
        best = min(tried, key=lambda trial: (len(trial.too_large), trial.num_in_flight))
    depth = best.schedule.num_in_flight if isinstance(best.schedule, OneFOneB) else None
    work = work._replace(num_deferred=_choose_deferral(work, width, cluster, best))
    return Advice(
        forecast(work, width, cluster, best.split, best.schedule),
        best.split,
        best.schedule.name,
        depth,
        work.num_deferred,
        layer_counts(best.split) if best.is_moved else None,
        best.too_large,
    )


class _Trial(NamedTuple):
    """A schedule with a split."""

    schedule: Schedule
    split: StagePlan
    is_moved: bool
    """Whether it is another split than the one at hand."""
    step_s: float
    num_in_flight: int
    too_large: tuple[int, ...]

    @property
    def is_gpipe(self) -> bool:
        """The default goes before it where both hold as much."""
        return not isinstance(self.schedule, OneFOneB)


def _trials(work: Work, width: Width, cluster: Cluster, split: StagePlan) -> list[_Trial]:
    trials = []
    for schedule in shipped_schedules(len(split.shards), work.num_microbatches).values():
        depth = max(actions_in_flight(work, split, schedule).values())
        for each in dict.fromkeys((split, _moved(work, width, cluster, split, schedule))):
            large = _too_large(shares_of(work, width, each, schedule), cluster)
            length_s = step_s(work, width, cluster, each, schedule)
            trials.append(_Trial(schedule, each, each != split, length_s, depth, large))
    return trials


def _choose_deferral(work: Work, width: Width, cluster: Cluster, best: _Trial) -> int:
    """With everything else chosen. Where nothing fits, nothing is deferred."""
    lengths = {}
    for num_deferred in sorted({0, work.num_deferred, len(best.split.shards)}):
        changed = work._replace(num_deferred=num_deferred)
        if not _too_large(shares_of(changed, width, best.split, best.schedule), cluster):
            lengths[num_deferred] = step_s(changed, width, cluster, best.split, best.schedule)
    shortest = min(lengths.values(), default=math.inf)
    return next((num for num, length_s in lengths.items() if length_s <= shortest * STEP_SLACK), 0)


def _moved(work: Work, width: Width, cluster: Cluster, split: StagePlan, schedule: Schedule) -> StagePlan:
    """The best split for a schedule; the same one where none fits."""
    shares = shares_of(work, width, split, schedule)
    messages = [share.kept_nbytes if work.store == "memory" else 0.0 for share in shares]
    try:
        keeps_errors = width.gradients is not None and width.gradients.keeps_errors
        return best_split(work, cluster, split, schedule, messages, keeps_errors=keeps_errors)
    except ConfigError:
        return split


def too_large(each: Forecast, cluster: Cluster) -> tuple[int, ...]:
    """Places that are to hold more than their machine has."""
    return _too_large(each.shares, cluster)


def _too_large(shares: Sequence[Share], cluster: Cluster) -> tuple[int, ...]:
    pairs = zip(shares, cluster.machines, strict=True)
    return tuple(place for place, (share, machine) in enumerate(pairs) if share.memory_nbytes > machine.memory_nbytes)
