"""Which samples a step sees, as a function of (seed, epoch, batch index). Knows indices only; keeps no state and no generator.

The position in the data is (epoch, batch index): any batch can be planned without planning the ones before it. Every sample
of the data set is in exactly one batch of an epoch; the last batch of an epoch may be smaller than the others.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence, Sized

import numpy as np
import numpy.typing as npt

from pipecomp.errors import ConfigError

Batch = list[list[int]]
"""A batch is a list of microbatches, each one a list of indices into the data set."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def epoch_order(seed: int, epoch: int, num_samples: int) -> npt.NDArray[np.int64]:
    """The permutation of `range(num_samples)` in which an epoch visits the samples (law 12).

    Samples are sorted by SplitMix64 (Steele, Lea, Flood 2014) of their index, started at a hash of seed and epoch. The hash
    is one to one, so there are no ties, and the order does not depend on the version of any random number library.
    """
    indices = np.arange(num_samples, dtype=np.uint64)
    return np.argsort(scramble(indices, seed, epoch), kind="stable").astype(np.int64)


def scramble(values: npt.NDArray[np.uint64], *seeds: int) -> npt.NDArray[np.uint64]:
    """A one-to-one pseudo-random map of 64-bit `values`, another one for each tuple of `seeds`."""
    state = np.zeros(1, dtype=np.uint64)
    for seed in seeds:
        state = _mix((state ^ np.uint64(seed & 0xFFFF_FFFF_FFFF_FFFF)) + _GOLDEN)
    return _mix(state + (values + np.uint64(1)) * _GOLDEN)


def num_batches(num_samples: int, batch_size: int) -> int:
    """Batches in one epoch, the smaller last one counted."""
    return -(-num_samples // batch_size)


def plan_batches(
    dataset: Sized, *, batch_size: int, num_microbatches: int, seed: int, epoch: int, first_batch: int = 0
) -> Iterator[Batch]:
    """The batches of one epoch in shuffled order, from batch `first_batch` on."""
    _check(batch_size, num_microbatches)
    order = epoch_order(seed, epoch, len(dataset)).tolist()
    return _batches(order, batch_size, num_microbatches, first_batch)


def eval_batches(dataset: Sized, *, batch_size: int, num_microbatches: int, first_batch: int = 0) -> Iterator[Batch]:
    """The batches of one pass over the data set in its own order."""
    _check(batch_size, num_microbatches)
    return _batches(range(len(dataset)), batch_size, num_microbatches, first_batch)


def split_batch(indices: Sequence[int], num_microbatches: int) -> Batch:
    """Spread a batch over `min(num_microbatches, len(indices))` microbatches whose sizes differ by one at most."""
    count = min(num_microbatches, len(indices))
    bounds = [len(indices) * part // count for part in range(count + 1)] if count else []
    return [list(indices[start:end]) for start, end in itertools.pairwise(bounds)]


def _batches(order: Sequence[int], batch_size: int, num_microbatches: int, first_batch: int) -> Iterator[Batch]:
    for start in range(first_batch * batch_size, len(order), batch_size):
        yield split_batch(order[start : start + batch_size], num_microbatches)


def _check(batch_size: int, num_microbatches: int) -> None:
    for key, value in (("batch_size", batch_size), ("num_microbatches", num_microbatches)):
        if value < 1:
            raise ConfigError(f"train.{key} is {value}; it must be at least 1")


def _mix(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finalizer of SplitMix64; arithmetic is modulo 2**64."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
