"""The split of a model and of a machine's cores over workers; the first as a table for people. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.preparation import PreparedRun
from coordinator.summary import format_grid
from pipecomp.protocol.messages import Join
from pipecomp.types import Shard

_TIED = {
    "none": "",
    "local": "embedding and head share a weight; both are on the first worker",
    "exchange": "embedding and head share a weight; its gradients are exchanged every step (kind tied)",
}


def describe_split(run: PreparedRun, joins: Sequence[Join]) -> str:
    """One row a worker: host, replica where there are several, layers, parameters; `joins` by place."""
    has_replicas = run.terms.num_replicas > 1
    rows = [["worker", "host", *(["replica"] if has_replicas else []), "stages", "layers", "parameters", "trained"]]
    for place, join in enumerate(joins):
        replica, rank = run.seat(place)
        held = [
            (stage, shard)
            for stage, (shard, holder) in enumerate(zip(run.stage_plan.shards, run.stage_plan.ranks, strict=True))
            if holder == rank
        ]
        layers = [layer for _, shard in held for layer in range(shard.first_layer, shard.end_layer)]
        plan = run.model.plan
        held_parameters = [p for p in plan.parameters if p.layer in layers]  # a tied weight counts once, with the embedding
        total = sum(_count(p.shape) for p in held_parameters)
        trained = sum(_count(p.shape) for p in held_parameters if p.trainable)
        rows.append(
            [
                join.worker,
                join.host,
                *([str(replica)] if has_replicas else []),
                ", ".join(str(stage) for stage, _ in held),
                ", ".join(_range(shard) for _, shard in held),
                f"{total:,}",
                f"{trained:,}",
            ]
        )
    align = "<<<<<>>" if has_replicas else "<<<<>>"
    lines = [format_grid(rows, align=align), _TIED[run.stage_plan.tied], _describe_run(run), *run.notes]
    return "\n".join(line for line in lines if line)


def threads_share(joins: Sequence[Join], place: int) -> int:
    """Torch threads for a worker whose own user names none: its share of the cores where it is not alone on its host, since
    threads that outnumber the cores wait for each other; else 0, all of them."""
    own = joins[place]
    num_neighbours = sum(join.host == own.host for join in joins)
    return max(1, own.num_cores // num_neighbours) if num_neighbours > 1 else 0


def _describe_run(run: PreparedRun) -> str:
    plan = run.model.plan
    millions = sum(_count(p.shape) for p in plan.parameters) / 1e6
    sizes = ", ".join(map(str, run.batches.replica_sizes))
    replicas = f" ({sizes} in each replica)" if run.terms.num_replicas > 1 else ""
    return (
        f"{plan.family}, {len(plan.layers)} layers, {millions:.1f} M parameters; {run.num_samples} samples to train on"
        f"{replicas}, {run.num_held_out} held out; {run.terms.total_steps} steps, {run.terms.steps_per_epoch} an epoch"
    )


def _range(shard: Shard) -> str:
    last = shard.end_layer - 1
    return str(last) if shard.first_layer == last else f"{shard.first_layer}-{last}"


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
