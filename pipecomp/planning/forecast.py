"""What a run will take on given machines: time, bytes, memory. Pure; knows work, machines and splits.

    step        the pipeline on paper (`step.py`) with this width's messages
              + the exchange of a tied weight's gradients, where there is one
              + the optimizer, on the worker that has most to update
              + three messages between coordinator and workers: plan, prepared, commit
    run         first epoch's steps, later steps (with smaller messages), evaluations, and moving the weights there and back
"""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import NamedTuple

from pipecomp.partition import StagePlan
from pipecomp.planning.machines import LayerSeconds, Machine, Ways
from pipecomp.planning.setting import Host, LinkCost, Path, Processor, Setting, StageCost
from pipecomp.planning.step import Step, simulate_step
from pipecomp.planning.work import Width, Work
from pipecomp.schedules import Schedule, peak_in_flight, without_backward
from pipecomp.types import Kind, Rank, Shard, StageIndex

_FP32_NBYTES = 4
_TRAINED_COPIES = 4
"""A trained parameter, its gradient, and two moments of Adam; a frozen one is itself alone."""
_CONTROL_MESSAGES = 3


class Cluster(NamedTuple):
    """Machines by rank, and whether they are one."""

    machines: tuple[Machine, ...]
    num_at_once: float | None = None
    """All workers share this machine's cores, which run so many of them at full speed, and their rates and latencies hold for
    what workers send each other only, as `pipecomp launch` has it. None: each has a machine of its own."""

    ways: Ways = MappingProxyType({})
    """Between machines that are farther apart than their own connections tell."""

    @property
    def is_one(self) -> bool:
        """Whether all workers are on one machine."""
        return self.num_at_once is not None


class Share(NamedTuple):
    """What one worker has to hold."""

    layers: tuple[int, ...]
    """Positions in the model's list."""
    memory_nbytes: float
    """Parameters, optimizer, activations in flight, messages kept in memory; not Python and torch themselves."""
    message_nbytes: float
    """Messages of all samples, at all its ends of links."""
    kept_nbytes: float
    """As much of them as its budget takes."""


class Forecast(NamedTuple):
    """One way to run, on paper."""

    width: Width
    step: Step
    """The pipeline's part of a step in later epochs."""
    first_step_s: float
    """Whole, in the first epoch."""
    step_s: float
    """Whole, in later ones."""
    evaluation_s: float
    """One pass over the held-out samples."""
    weights_s: float
    num_first_steps: int
    num_later_steps: int
    num_evaluations: int
    traffic: dict[Kind, float]
    """Bytes of the whole run."""
    shares: tuple[Share, ...]
    """By rank."""

    @property
    def training_s(self) -> float:
        return self.num_first_steps * self.first_step_s + self.num_later_steps * self.step_s

    @property
    def total_s(self) -> float:
        return self.training_s + self.num_evaluations * self.evaluation_s + self.weights_s

    @property
    def median_step_s(self) -> float:
        """What the median over all steps should be."""
        return self.first_step_s if self.num_first_steps > self.num_later_steps else self.step_s


def forecast(work: Work, width: Width, cluster: Cluster, split: StagePlan, schedule: Schedule) -> Forecast:
    """Put a run on paper.

    Args:
        work: what is trained.
        width: what travels.
        cluster: a machine for each rank of `split`.
        split: who holds what.
        schedule: the order of a step.
    """
    later_nbytes = _later_nbytes(work, width, split)
    first = _step(work, width, cluster, split, schedule, width.first_forward_nbytes)
    later = _step(work, width, cluster, split, schedule, later_nbytes)
    around_s = _around_s(work, width, cluster, split)
    num_first = min(work.total_steps, work.steps_per_epoch) if width.message_nbytes else 0
    num_later = work.total_steps - num_first
    return Forecast(
        width=width,
        step=later,
        first_step_s=first.duration_s + around_s,
        step_s=later.duration_s + around_s,
        evaluation_s=_evaluation_s(work, cluster, split, schedule) if work.evaluations.num_passes else 0.0,
        weights_s=_weights_s(work, cluster, split),
        num_first_steps=num_first,
        num_later_steps=num_later,
        num_evaluations=work.evaluations.num_passes,
        traffic=_traffic(work, width, split, num_first * width.first_forward_nbytes + num_later * later_nbytes),
        shares=shares_of(work, width, split, schedule),
    )


def step_s(work: Work, width: Width, cluster: Cluster, split: StagePlan, schedule: Schedule) -> float:
    """Only the length of a step in later epochs, as `forecast` has it."""
    step = _step(work, width, cluster, split, schedule, _later_nbytes(work, width, split))
    return step.duration_s + _around_s(work, width, cluster, split)


def _step(
    work: Work, width: Width, cluster: Cluster, split: StagePlan, schedule: Schedule, forward_nbytes: float
) -> Step:
    no_backward = [StageIndex(s) for s, shard in enumerate(split.shards) if shard.end_layer <= work.first_trainable]
    actions = without_backward(schedule.actions(split.ranks, work.num_microbatches), no_backward)
    setting = _setting(work, width, cluster, split, forward_nbytes)
    return simulate_step(actions, setting, num_deferred=work.num_deferred)


def _later_nbytes(work: Work, width: Width, split: StagePlan) -> float:
    """Of a microbatch's activations once every sample that has room for its message has one."""
    kept = _kept_part(work, width, split)
    return kept * width.forward_nbytes + (1 - kept) * width.first_forward_nbytes


def actions_in_flight(work: Work, split: StagePlan, schedule: Schedule) -> dict[StageIndex, int]:
    """For each stage the most microbatches that it holds between forward and backward."""
    return peak_in_flight(schedule.actions(split.ranks, work.num_microbatches))


def stage_seconds(work: Work, machine: Machine, shard: Shard) -> LayerSeconds:
    """A shard on a machine, one microbatch, handled."""
    block = work.block
    each = [
        machine.seconds(work.layers[layer], block, num_tokens=work.num_tokens, recompute=work.recompute)
        for layer in range(shard.first_layer, shard.end_layer)
    ]
    forward_s, backward_s = sum(one.forward_s for one in each), sum(one.backward_s for one in each)
    weights_s = sum(one.weights_s for one in each)
    return LayerSeconds(forward_s + machine.handling_s, backward_s + machine.handling_s, weights_s)


def stage_memory_nbytes(work: Work, shard: Shard, num_in_flight: int) -> float:
    """Parameters, optimizer, activations and what is deferred of a shard."""
    layers = work.layers[shard.first_layer : shard.end_layer]
    trained = sum(layer.num_trainable for layer in layers)
    frozen = sum(layer.num_parameters for layer in layers) - trained
    held = num_in_flight * sum(layer.kept_nbytes for layer in layers)
    held += min(work.num_deferred, work.num_microbatches) * sum(layer.deferred_nbytes for layer in layers)
    return _FP32_NBYTES * (_TRAINED_COPIES * trained + frozen) + held


def _setting(work: Work, width: Width, cluster: Cluster, split: StagePlan, forward_nbytes: float) -> Setting:
    stages = [stage_seconds(work, cluster.machines[rank], shard) for shard, rank in zip(split.shards, split.ranks, strict=True)]
    links = []
    for sender, receiver in zip(split.ranks, split.ranks[1:], strict=False):
        coding_s = _coding_s(width, cluster.machines[sender], cluster.machines[receiver])
        links.append(LinkCost(forward_nbytes, width.backward_nbytes, coding_s, coding_s))
    return Setting(
        stages=tuple(StageCost(each.forward_s, each.backward_s, each.weights_s) for each in stages),
        ranks=split.ranks,
        links=tuple(links),
        hosts=tuple(
            Host(machine.up_nbytes_per_s, machine.down_nbytes_per_s, machine.latency_ms / 1000) for machine in cluster.machines
        ),
        paths={pair: way.path for pair, way in cluster.ways.items()},
        processors=_processors(cluster),
    )


def _processors(cluster: Cluster) -> tuple[Processor, ...]:
    num_workers = len(cluster.machines)
    if cluster.num_at_once is None or cluster.num_at_once >= num_workers:
        return ()
    return (Processor(tuple(map(Rank, range(num_workers))), cluster.num_at_once),)


def _coding_s(width: Width, sender: Machine, receiver: Machine) -> float:
    """Half of a value's time is encoding, half decoding."""
    rates = [machine.coded_values_per_s for machine in (sender, receiver)]
    return sum(width.num_values / (2 * rate) for rate in rates if rate is not None)


def _kept_part(work: Work, width: Width, split: StagePlan) -> float:
    """How much of all samples' messages the poorest worker keeps; others follow it."""
    ends = max(_num_ends(split).values(), default=0)
    wanted = ends * width.message_nbytes
    return min(1.0, work.store_nbytes / wanted) if wanted else 1.0


def _num_ends(split: StagePlan) -> dict[int, int]:
    """Ends of links of each rank."""
    ends = dict.fromkeys(split.ranks, 0)
    for sender, receiver in _crossings(split):
        ends[sender] += 1
        ends[receiver] += 1
    return {int(rank): number for rank, number in ends.items()}


def _crossings(split: StagePlan) -> list[tuple[Rank, Rank]]:
    pairs = zip(split.ranks, split.ranks[1:], strict=False)
    return [(sender, receiver) for sender, receiver in pairs if sender != receiver]


def _around_s(work: Work, width: Width, cluster: Cluster, split: StagePlan) -> float:
    """What a step takes besides its pipeline."""
    update_s = 0.0
    for rank, machine in enumerate(cluster.machines):
        layers = _layers_of(split, rank)
        trained = sum(work.layers[layer].num_trainable for layer in layers)
        if machine.updates_per_s is not None:
            update_s = max(update_s, trained / machine.updates_per_s)
    slower = 1.0 if cluster.num_at_once is None else max(1.0, len(cluster.machines) / cluster.num_at_once)
    return slower * update_s + _tied_s(width, cluster, split) + _CONTROL_MESSAGES * _control_latency_s(cluster)


def _control_latency_s(cluster: Cluster) -> float:
    """The coordinator is taken to be as far away as the machine that is farthest."""
    return 0.0 if cluster.is_one else max(machine.latency_ms for machine in cluster.machines) / 1000


def _tied_s(width: Width, cluster: Cluster, split: StagePlan) -> float:
    if split.tied != "exchange":
        return 0.0
    ends = split.ranks[0], split.ranks[-1]
    return max(_sending_s(width.tied_nbytes, cluster, *pair) for pair in (ends, ends[::-1]))


def _sending_s(nbytes: float, cluster: Cluster, sender: Rank, receiver: Rank) -> float:
    """Of one message, alone on its way."""
    way = cluster.ways.get((sender, receiver))
    path = Path() if way is None else way.path
    one, other = cluster.machines[sender], cluster.machines[receiver]
    rate = min(one.up_nbytes_per_s, other.down_nbytes_per_s, path.nbytes_per_s)
    return nbytes / rate + one.latency_ms / 1000 + path.latency_s


def _layers_of(split: StagePlan, rank: int) -> list[int]:
    shards = [shard for shard, holder in zip(split.shards, split.ranks, strict=True) if holder == rank]
    return [layer for shard in shards for layer in range(shard.first_layer, shard.end_layer)]


def _evaluation_s(work: Work, cluster: Cluster, split: StagePlan, schedule: Schedule) -> float:
    evaluations = work.evaluations
    nothing_kept = Width("", {}, {}, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0)
    setting = _setting(work, nothing_kept, cluster, split, evaluations.message_nbytes)
    actions = schedule.actions(split.ranks, evaluations.num_microbatches)
    forwards = without_backward(actions, range(len(split.ranks)))
    return evaluations.num_plans * (simulate_step(forwards, setting).duration_s + 2 * _control_latency_s(cluster))


def _weights_s(work: Work, cluster: Cluster, split: StagePlan) -> float:
    """Workers get and return their layers side by side."""
    if cluster.is_one:
        return 0.0
    times = []
    for rank, machine in enumerate(cluster.machines):
        layers = _layers_of(split, rank)
        out = sum(work.weight_nbytes[layer] for layer in layers) / machine.down_nbytes_per_s
        back = sum(work.returned_nbytes[layer] for layer in layers) / machine.up_nbytes_per_s
        times.append(out + back)
    return max(times)


def shares_of(work: Work, width: Width, split: StagePlan, schedule: Schedule) -> tuple[Share, ...]:
    """What each rank has to hold."""
    in_flight = actions_in_flight(work, split, schedule)
    ends = _num_ends(split)
    shares = []
    for rank in range(max(split.ranks) + 1):
        held = [(StageIndex(s), shard) for s, shard in enumerate(split.shards) if split.ranks[s] == rank]
        memory_nbytes = sum(stage_memory_nbytes(work, shard, in_flight[stage]) for stage, shard in held)
        message_nbytes = ends[rank] * width.message_nbytes
        kept_nbytes = min(message_nbytes, work.store_nbytes)
        if work.store == "memory":
            memory_nbytes += kept_nbytes
        shares.append(Share(tuple(_layers_of(split, rank)), memory_nbytes, message_nbytes, kept_nbytes))
    return tuple(shares)


def _traffic(work: Work, width: Width, split: StagePlan, forward_nbytes_of_steps: float) -> dict[Kind, float]:
    crossings = _crossings(split)
    returning = [
        1
        for stage, (sender, receiver) in enumerate(zip(split.ranks, split.ranks[1:], strict=False))
        if sender != receiver and split.shards[stage].end_layer > work.first_trainable
    ]
    evaluations = work.evaluations
    num_evaluated = evaluations.num_passes * evaluations.num_plans * evaluations.num_microbatches
    several = work.total_steps * work.num_microbatches
    return {
        Kind.FORWARD: forward_nbytes_of_steps * work.num_microbatches * len(crossings),
        Kind.BACKWARD: several * width.backward_nbytes * len(returning),
        Kind.TIED: work.total_steps * 2 * width.tied_nbytes if split.tied == "exchange" else 0.0,
        Kind.EVALUATION: num_evaluated * evaluations.message_nbytes * len(crossings),
        Kind.WEIGHTS: math.fsum(work.weight_nbytes) + math.fsum(work.returned_nbytes),
    }
