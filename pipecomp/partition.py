"""Which layers go to which stage, and which stage to which rank. Pure: knows costs and counts, not models, links or tensors.

    plain        ranks [0, 1, 2, 3]       stage i on rank i
    colocated    ranks [0, 1, 2, 3, 0]    the last stage is the output head alone, beside the embedding it is tied to
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from pipecomp.errors import ConfigError
from pipecomp.types import Rank, Shard

TiedMode = Literal["auto", "colocate", "exchange"]
TiedPlace = Literal["none", "local", "exchange"]
StageCost = Callable[[int, int, int], float]
"""Cost of the layers `start` .. `end - 1` on a stage: (stage, start, end)."""


class StagePlan(msgspec.Struct, frozen=True):
    """The shards in the order a microbatch visits them, and who holds each."""

    shards: tuple[Shard, ...]
    ranks: tuple[Rank, ...]  # of each stage
    tied: TiedPlace  # local: one rank holds both uses of a tied weight


def partition_layers(costs: Sequence[float], num_stages: int, *, first_extra: float = 0.0) -> list[Shard]:
    """Contiguous shards, none empty, of the smallest possible largest cost; among those, the most even ones.

    Exact: first the smallest largest cost, then the smallest sum of squared costs under it, each in
    O(num_stages x num_layers^2).

    Args:
        costs: cost of each layer, none negative.
        num_stages: at least 1.
        first_extra: what the first stage carries besides its layers.

    Raises:
        ConfigError: fewer layers than stages.
    """
    before = [0.0]
    for cost in costs:
        before.append(before[-1] + cost)

    def stage_cost(_stage: int, start: int, end: int) -> float:
        return before[end] - before[start] + (first_extra if start == 0 else 0.0)

    return partition_by(len(costs), num_stages, stage_cost)


def partition_by(num_layers: int, num_stages: int, stage_cost: StageCost) -> list[Shard]:
    """Contiguous shards, none empty, of the smallest possible largest cost, where a stage's cost may be any function.

    Exact, as `partition_layers`.

    Args:
        num_layers: at least as many as stages.
        num_stages: at least 1.
        stage_cost: of (stage, first layer, end layer), not negative; infinite for what cannot be.

    Raises:
        ConfigError: fewer layers than stages, or every split has a stage that cannot be.
    """
    if num_stages < 1 or num_layers < num_stages:
        raise ConfigError(
            f"{num_layers} layers cannot be split into {num_stages} stages: every stage needs a layer. "
            f"Set cluster.num_stages to {max(num_layers, 1)} or fewer"
        )
    bound, _ = _best_cuts(num_layers, num_stages, stage_cost, max)
    if bound == math.inf:
        raise ConfigError(f"no split of {num_layers} layers over {num_stages} stages fits them all")

    def bounded(stage: int, start: int, end: int) -> float:
        cost = stage_cost(stage, start, end)
        return cost**2 if cost <= bound else math.inf

    _, cuts = _best_cuts(num_layers, num_stages, bounded, operator.add)
    return [Shard(start, end) for start, end in itertools.pairwise((0, *cuts, num_layers))]


def _best_cuts(
    num_layers: int, num_stages: int, stage_cost: StageCost, join: Callable[[float, float], float]
) -> tuple[float, list[int]]:
    """The smallest joined cost of any split, and where its later stages start."""
    # best[s][e]: of the first e layers in s + 1 stages; cut[s][e]: where the last of them starts.
    best = [[math.inf] + [stage_cost(0, 0, end) for end in range(1, num_layers + 1)]]
    cut = [[0] * (num_layers + 1)]
    for stage in range(1, num_stages):
        row, starts = [math.inf] * (num_layers + 1), [stage] * (num_layers + 1)
        for end in range(stage + 1, num_layers + 1):
            for start in range(stage, end):
                joined = join(best[stage - 1][start], stage_cost(stage, start, end))
                if joined < row[end]:
                    row[end], starts[end] = joined, start
        best.append(row)
        cut.append(starts)
    cuts: list[int] = []
    end = num_layers
    for stage in range(num_stages - 1, 0, -1):
        end = cut[stage][end]
        cuts.append(end)
    return best[-1][num_layers], cuts[::-1]


def shards_from_counts(counts: Sequence[int], num_layers: int) -> list[Shard]:
    """Shards of the given sizes, in order.

    Raises:
        ConfigError: a count below 1, or counts that do not add up to the model's layers.
    """
    if any(count < 1 for count in counts):
        raise ConfigError(f"cluster.layers = {list(counts)}: every stage needs at least one layer")
    if sum(counts) != num_layers:
        raise ConfigError(
            f"cluster.layers = {list(counts)} adds up to {sum(counts)} layers, the model has {num_layers} "
            "(embedding and output head count as one each)"
        )
    shards, start = [], 0
    for count in counts:
        shards.append(Shard(start, start + count))
        start += count
    return shards


def plan_stages(
    costs: Sequence[float],
    num_ranks: int,
    *,
    tied_values: int | None,
    hidden_values_per_step: int,
    mode: TiedMode = "auto",
    layers: Sequence[int] | None = None,
    tied_bits: float = 32.0,
    hidden_bits: tuple[float, float] = (32.0, 32.0),
) -> StagePlan:
    """Split a model over ranks, and decide where a tied weight's two uses live.

    Colocating them sends every activation over one more link, forward and backward; exchanging sends the weight's gradient
    both ways. `auto` takes what is fewer bytes a step.

    Args:
        costs: cost of each layer, embedding first, output head last.
        num_ranks: machines in the pipeline.
        tied_values: values of the tied weight; None where the model ties none.
        hidden_values_per_step: activations that cross one link in a step, one way.
        mode: the decision by hand.
        layers: layers of each rank by hand; where head and embedding are colocated, rank 0's count includes both.
        tied_bits: bits a value of the exchanged gradient, overheads included.
        hidden_bits: bits a value of activations forward, and of their gradients backward.

    Raises:
        ConfigError: too few layers, or counts that do not fit.
    """
    if layers is not None and len(layers) != num_ranks:
        raise ConfigError(f"cluster.layers = {list(layers)} has {len(layers)} numbers for {num_ranks} workers: give one each")
    if layers is not None:
        shards_from_counts(layers, len(costs))  # what does not add up is said of the counts as they were given
    colocate = tied_values is not None and num_ranks > 1 and mode != "exchange"
    if colocate and mode == "auto":
        assert tied_values is not None
        colocate = hidden_values_per_step * sum(hidden_bits) < 2 * tied_values * tied_bits and _can_colocate(
            len(costs), num_ranks, layers
        )
    if colocate:
        shards = _colocated(costs, num_ranks, layers)
        ranks = (*map(Rank, range(num_ranks)), Rank(0))
        return StagePlan(tuple(shards), ranks, "local")
    shards = partition_layers(costs, num_ranks) if layers is None else shards_from_counts(layers, len(costs))
    where: TiedPlace = "none" if tied_values is None else "local" if num_ranks == 1 else "exchange"
    return StagePlan(tuple(shards), tuple(map(Rank, range(num_ranks))), where)


def _can_colocate(num_layers: int, num_ranks: int, layers: Sequence[int] | None) -> bool:
    return layers[0] > 1 if layers is not None else num_layers > num_ranks


def _colocated(costs: Sequence[float], num_ranks: int, layers: Sequence[int] | None) -> list[Shard]:
    """Everything but the head in `num_ranks` shards, the first lighter by what the head costs its rank; then the head."""
    last = len(costs) - 1
    if layers is None:
        if last < num_ranks:
            raise ConfigError(
                f"{len(costs)} layers cannot be split over {num_ranks} workers with the tied embedding and head both on the "
                f'first: every worker needs a layer besides. Use fewer workers, or cluster.tied_weights = "exchange"'
            )
        shards = partition_layers(costs[:last], num_ranks, first_extra=costs[last])
    else:
        if layers[0] < 2:
            raise ConfigError(
                f"cluster.layers = {list(layers)}: the first worker holds both the embedding and the head that is tied to it, "
                'so its count is at least 2. Raise it, or set cluster.tied_weights = "exchange"'
            )
        shards = shards_from_counts([layers[0] - 1, *layers[1:]], last)
    return [*shards, Shard(last, last + 1)]
