"""Hold samples out of training for evaluation. Knows sample ids and a seed; knows no file and no batch."""

from __future__ import annotations

import numpy as np

from pipecomp.data.batching import scramble
from pipecomp.data.samples import Dataset
from pipecomp.errors import ConfigError


def hold_out(dataset: Dataset, size: float, seed: int) -> tuple[Dataset, Dataset]:
    """Split into (train, eval), both in the order of the file; every sample is in exactly one of them.

    Args:
        size: a number of samples (int) or a fraction of them (float between 0 and 1, rounded to a whole number, at least 1).
        seed: which samples; they are those with the smallest hash of (seed, sample id), whatever their order in the file.

    Raises:
        ConfigError: `size` leaves one of the two sides empty.
    """
    num_held = size if isinstance(size, int) else max(1, round(size * len(dataset)))
    if not 0 < num_held < len(dataset):
        raise ConfigError(
            f"cannot hold out {size} of {len(dataset)} samples; data.max_eval_samples must leave at least one sample to train on "
            "and one to evaluate"
        )
    held = np.zeros(len(dataset), dtype=np.bool_)
    held[np.argsort(scramble(dataset.table.ids, seed), kind="stable")[:num_held]] = True
    return dataset.select(np.flatnonzero(~held)), dataset.select(np.flatnonzero(held))


def default_num_held(num_samples: int) -> int:
    """How many samples to hold out when nobody said: a twentieth, at least 1 and at most 256."""
    return max(1, min(256, num_samples // 20))
