"""What a run will take on given machines: time, bytes, memory. Pure; knows work, machines and splits.

    step        the pipeline on paper (`step.py`) with this width's messages; of several replicas the slowest
              + their exchange of gradients (`replicas.py`)
              + the exchange of a tied weight's gradients, where there is one
              + the optimizer, on the worker that has most to update
              + three messages between coordinator and workers: plan, prepared, commit
    run         first epoch's steps, later steps (with smaller messages), evaluations, and moving the weights there and back
"""

from __future__ import annotations

import functools
import math
from types import MappingProxyType
from typing import NamedTuple

from pipecomp.partition import StagePlan
from pipecomp.planning.machines import LayerSeconds, Machine, Ways
from pipecomp.planning.replicas import Exchanging, with_exchanges
from pipecomp.planning.setting import Host, LinkCost, Path, Processor, Setting, StageCost
from pipecomp.planning.step import Step, simulate_step
from pipecomp.planning.work import Exchange, Width, Work
from pipecomp.schedules import Schedule, peak_in_flight, without_backward
from pipecomp.types import Kind, Rank, Shard, StageIndex

_FP32_NBYTES = 4
_TRAINED_COPIES = 4
"""A trained parameter, its gradient, and two moments of Adam; a frozen one is itself alone."""
_CONTROL_MESSAGES = 3


class Cluster(NamedTuple):
    """Machines by place (those of replica 0 by rank, then those of replica 1, ...), and whether they are one."""

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

    def replicas(self, num_replicas: int) -> tuple[Cluster, ...]:
        """Each replica's machines by rank, with its part of what all of them share."""
        if num_replicas == 1:
            return (self,)
        num_ranks = len(self.machines) // num_replicas
        at_once = None if self.num_at_once is None else self.num_at_once / num_replicas
        found = []
        for first in range(0, len(self.machines), num_ranks):
            within = range(first, first + num_ranks)
            ways = {
                (Rank(sender - first), Rank(receiver - first)): way
                for (sender, receiver), way in self.ways.items()
                if sender in within and receiver in within
            }
            found.append(Cluster(self.machines[first : first + num_ranks], at_once, ways))
        return tuple(found)


class Share(NamedTuple):
    """What one worker has to hold."""

    layers: tuple[int, ...]
    """Positions in the model's list."""
    memory_nbytes: float
    """Parameters, optimizer, activations in flight, messages kept in memory, errors of gradients that are fed back; not Python
    and torch themselves."""
    message_nbytes: float
    """Messages of all samples of its replica, at all its ends of links."""
    kept_nbytes: float
    """As much of them as its budget takes."""


class Forecast(NamedTuple):
    """One way to run, on paper."""

    width: Width
    steps: tuple[Step, ...]
    """The part of a step in later epochs that is a pipeline's and the exchange's: of each replica."""
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
    """By place."""

    @property
    def replica(self) -> int:
        """The one that has the busiest part of all; of equal ones the first. All end together."""
        return max(range(len(self.steps)), key=lambda replica: self.steps[replica].loads[0].busy_s)

    @property
    def step(self) -> Step:
        """Of this replica."""
        return self.steps[self.replica]

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
        cluster: a machine for each rank of `split` in each replica.
        split: who holds what.
        schedule: the order of a step.
    """
    later_nbytes = _later_nbytes(work, width, split)
    first = _steps(work, width, cluster, split, schedule, width.first_forward_nbytes)
    later = _steps(work, width, cluster, split, schedule, later_nbytes)
    around_s = _around_s(work, width, cluster, split)
    num_first = min(work.total_steps, work.steps_per_epoch) if width.message_nbytes else 0
    num_later = work.total_steps - num_first
    return Forecast(
        width=width,
        steps=later,
        first_step_s=first[0].duration_s + around_s,
        step_s=later[0].duration_s + around_s,
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
    steps = _steps(work, width, cluster, split, schedule, _later_nbytes(work, width, split))
    return steps[0].duration_s + _around_s(work, width, cluster, split)


def _steps(
    work: Work, width: Width, cluster: Cluster, split: StagePlan, schedule: Schedule, forward_nbytes: float
) -> tuple[Step, ...]:
    """Of each replica; all are of one length."""
    no_backward = [StageIndex(s) for s, shard in enumerate(split.shards) if shard.end_layer <= work.first_trainable]
    actions = without_backward(schedule.actions(split.ranks, work.num_microbatches), no_backward)
    settings = [_setting(work, width, each, split, forward_nbytes) for each in cluster.replicas(work.num_replicas)]
    steps: list[Step] = []
    for replica, setting in enumerate(settings):
        same = settings.index(setting)  # machines are often alike
        steps.append(simulate_step(actions, setting, num_deferred=work.num_deferred) if same == replica else steps[same])
    exchanges = exchanges_of(work, width, split)
    if not exchanges:
        return tuple(steps)
    exchanging = [_exchanging(each, rank, cluster) for rank, each in enumerate(exchanges)]
    return with_exchanges(steps, settings, exchanging)


def rows_of(work: Work, split: StagePlan, rank: int) -> tuple[int, ...]:
    """Values of each row of gradients that a rank's workers in all replicas add up: what it trains; apart from that, a weight of
    which another rank has a copy."""
    trained = sum(work.layers[layer].num_trainable for layer in _layers_of(split, rank))
    if split.tied != "exchange" or rank not in (split.ranks[0], split.ranks[-1]):
        return (trained,)
    return trained - (work.tied_values if rank == split.ranks[0] else 0), work.tied_values  # it counts with the embedding


def exchanges_of(work: Work, width: Width, split: StagePlan) -> list[Exchange]:
    """Of each rank; none with one replica."""
    if width.gradients is None:
        return []
    exchange = width.gradients.exchange
    rows = [rows_of(work, split, rank) for rank in range(max(split.ranks) + 1)]
    return [functools.reduce(Exchange.plus, map(exchange, of_rank)) for of_rank in rows]


def _exchanging(exchange: Exchange, rank: int, cluster: Cluster) -> Exchanging:
    """On the machines of one rank."""
    num_replicas = len(exchange.nbytes)
    num_ranks = len(cluster.machines) // num_replicas
    places = range(rank, len(cluster.machines), num_ranks)
    # A worker encodes its part of what others own and its own sums; it decodes others' parts, and all sums.
    num_coded = exchange.num_values * (1 + (2 * num_replicas - 1) / num_replicas)
    rates = [cluster.machines[place].coded_values_per_s for place in places]
    return Exchanging(
        exchange,
        tuple(0.0 if rate is None else _slower(cluster) * num_coded / (2 * rate) for rate in rates),
        {
            (sender // num_ranks, receiver // num_ranks): way.path
            for (sender, receiver), way in cluster.ways.items()
            if sender in places and receiver in places
        },
    )


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


def error_nbytes(work: Work, shard: Shard) -> float:
    """What coding a shard's gradients loses, and replicas keep to send it at the next step."""
    return _FP32_NBYTES * sum(layer.num_trainable for layer in work.layers[shard.first_layer : shard.end_layer])


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
    num_workers = len(cluster.machines)  # of one replica
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
    """What a step takes besides its pipeline and the exchange of gradients."""
    replicas = cluster.replicas(work.num_replicas)
    update_s = 0.0
    for rank in range(len(replicas[0].machines)):
        layers = _layers_of(split, rank)
        trained = sum(work.layers[layer].num_trainable for layer in layers)
        for each in replicas:
            rate = each.machines[rank].updates_per_s
            if rate is not None:
                update_s = max(update_s, trained / rate)
    tied_s = max(_tied_s(width, each, split) for each in replicas)
    return _slower(cluster) * update_s + tied_s + _CONTROL_MESSAGES * _control_latency_s(cluster)


def _slower(cluster: Cluster) -> float:
    """By how much all workers at once are slower on the cores that they share."""
    return 1.0 if cluster.num_at_once is None else max(1.0, len(cluster.machines) / cluster.num_at_once)


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
    actions = schedule.actions(split.ranks, -(-evaluations.num_microbatches // work.num_replicas))
    forwards = without_backward(actions, range(len(split.ranks)))
    settings = [
        _setting(work, nothing_kept, each, split, evaluations.message_nbytes) for each in cluster.replicas(work.num_replicas)
    ]
    longest_s = max(simulate_step(forwards, setting).duration_s for setting in settings)
    return evaluations.num_plans * (longest_s + 2 * _control_latency_s(cluster))


def _weights_s(work: Work, cluster: Cluster, split: StagePlan) -> float:
    """Workers get and return their layers side by side; the first replica's return them."""
    if cluster.is_one:
        return 0.0
    times = []
    for replica, each in enumerate(cluster.replicas(work.num_replicas)):
        for rank, machine in enumerate(each.machines):
            layers = _layers_of(split, rank)
            out = sum(work.weight_nbytes[layer] for layer in layers) / machine.down_nbytes_per_s
            back = sum(work.returned_nbytes[layer] for layer in layers) / machine.up_nbytes_per_s
            times.append(out + (back if replica == 0 else 0.0))
    return max(times)


def shares_of(work: Work, width: Width, split: StagePlan, schedule: Schedule) -> tuple[Share, ...]:
    """What each place has to hold; the same in every replica."""
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
        if width.gradients is not None and width.gradients.keeps_errors:
            memory_nbytes += _FP32_NBYTES * sum(rows_of(work, split, rank))
        shares.append(Share(tuple(_layers_of(split, rank)), memory_nbytes, message_nbytes, kept_nbytes))
    return tuple(shares) * work.num_replicas


def _traffic(work: Work, width: Width, split: StagePlan, forward_nbytes_of_steps: float) -> dict[Kind, float]:
    crossings = _crossings(split)
    returning = [
        1
        for stage, (sender, receiver) in enumerate(zip(split.ranks, split.ranks[1:], strict=False))
        if sender != receiver and split.shards[stage].end_layer > work.first_trainable
    ]
    evaluations = work.evaluations
    num_evaluated = evaluations.num_passes * evaluations.num_plans * evaluations.num_microbatches
    several = work.total_steps * work.num_microbatches * work.num_replicas
    exchanged = math.fsum(nbytes for exchange in exchanges_of(work, width, split) for nbytes in exchange.nbytes)
    tied_nbytes = 2 * width.tied_nbytes if split.tied == "exchange" else 0.0
    return {
        Kind.FORWARD: forward_nbytes_of_steps * work.num_microbatches * len(crossings) * work.num_replicas,
        Kind.BACKWARD: several * width.backward_nbytes * len(returning),
        Kind.GRADIENTS: work.total_steps * exchanged,
        Kind.TIED: work.total_steps * tied_nbytes * work.num_replicas,
        Kind.EVALUATION: num_evaluated * evaluations.message_nbytes * len(crossings),
        Kind.WEIGHTS: work.num_replicas * math.fsum(work.weight_nbytes) + math.fsum(work.returned_nbytes),
    }
