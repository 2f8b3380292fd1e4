"""Which replica trains which sample. Knows sample ids and indices; keeps no state, reads no data.

Both ends of a link remember a message for each sample that crossed it, so a sample stays with one replica from epoch to epoch,
and from run to run. Where the number of replicas changes, no more samples move than have to for all replicas to have as many:

    1 replica     0 0 0 0 0 0 0 0 0 0 0 0
    2             0 1 1 0 0 1 0 1 1 0 1 0      half of replica 0's go to the new one
    3             0 2 1 0 2 1 0 1 2 0 1 2      a third of each one's go to the new one; back at 2 it is the row above
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pipecomp.data.batching import Batch, scramble, split_batch
from pipecomp.errors import ConfigError

IntArray = npt.NDArray[np.int64]


def assign_replicas(sample_ids: npt.NDArray[np.uint64], num_replicas: int) -> IntArray:
    """The replica of each sample, (num_samples,): a function of the set of ids and of the number of replicas.

    Replicas' sizes differ by one at most. From n to n + 1 replicas, the new one gets floor(num_samples / (n + 1)) samples, chosen
    by a hash of their ids, and no other sample moves; from n + 1 to n the same samples move back.

    Raises:
        ConfigError: there are fewer samples than replicas.
    """
    if len(sample_ids) < num_replicas:
        raise ConfigError(f"cluster.num_replicas = {num_replicas}, but there are {len(sample_ids)} training samples; lower it")
    replicas = np.zeros(len(sample_ids), np.int64)
    for new in range(1, num_replicas):
        turn = np.argsort(scramble(sample_ids, new), kind="stable")
        base, larger = divmod(len(sample_ids), new + 1)
        for replica in range(new):
            own = turn[replicas[turn] == replica]
            replicas[own[base + (replica < larger) :]] = new
    return replicas


def interleave(order: IntArray, replicas: IntArray) -> IntArray:
    """`order` (a permutation of the samples' indices), rearranged so that any stretch of it has as many samples of each replica
    as can be, and each replica's own stay in their order. With one replica, `order` itself."""
    owners = replicas[order]
    turn = np.empty(len(order), np.float64)
    for replica in np.unique(owners):
        places = np.flatnonzero(owners == replica)
        turn[places] = (np.arange(len(places)) + 0.5) / len(places)
    return order[np.lexsort((owners, turn))]


def share_out(batch: Sequence[int], replicas: IntArray, num_replicas: int, num_microbatches: int) -> list[Batch]:
    """A batch as each replica's microbatches: up to `num_microbatches` of its own samples; none where it has no sample in it."""
    own: list[list[int]] = [[] for _ in range(num_replicas)]
    for index in batch:
        own[replicas[index]].append(index)
    return [split_batch(indices, num_microbatches) for indices in own]


def deal(microbatches: Batch, num_replicas: int) -> list[Batch]:
    """Microbatches that any replica may take (an evaluation's), in even stretches."""
    bounds = [len(microbatches) * replica // num_replicas for replica in range(num_replicas + 1)]
    return [microbatches[start:end] for start, end in itertools.pairwise(bounds)]
