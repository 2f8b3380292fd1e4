"""Which classes a classifier has, and in which order. Knows data sets and names; no model and no file."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipecomp.data.samples import Dataset
from pipecomp.errors import ConfigError


def choose_classes(train: Dataset, own: Sequence[str], *, is_trained: bool, source: str) -> tuple[str, ...]:
    """The names of the classes, by number.

    Args:
        train: all samples of the training file.
        own: the classes that the model's configuration names.
        is_trained: the model has a classifier already; then its classes stay, and the data may lack some of them.
        source: the training file, for error messages.

    Raises:
        ConfigError: fewer than two classes, or numbers with gaps between them.
    """
    if is_trained:
        return tuple(own)
    if train.class_names:
        names = train.class_names
    else:
        used = np.unique(train.table.classes)
        num_classes = int(used[-1]) + 1
        if len(used) < num_classes:
            gap = next(number for number, found in enumerate(used) if number != found)
            raise ConfigError(
                f"{source}: the largest label is {num_classes - 1}, but no record has label {gap}; number the classes from 0 "
                "without gaps, or give them names"
            )
        names = tuple(own) if len(own) == num_classes else tuple(f"LABEL_{number}" for number in range(num_classes))
    if len(names) < 2:
        raise ConfigError(f"{source}: all records have the same label; a classifier needs at least two classes")
    return tuple(names)


def number_classes(dataset: Dataset, names: Sequence[str], source: str) -> Dataset:
    """The data set with classes numbered as in `names`.

    Raises:
        ConfigError: a label that is none of them.
    """
    if dataset.class_names:
        numbers = {name: number for number, name in enumerate(names)}
        unknown = [name for name in dataset.class_names if name not in numbers]
        if unknown:
            raise ConfigError(f"{source}: label {unknown[0]!r} is none of the model's classes: {', '.join(names)}")
        order = np.array([numbers[name] for name in dataset.class_names], dtype=np.int64)
        return dataset.with_classes(order[dataset.table.classes], names)
    largest = int(dataset.table.classes.max(initial=-1))
    if largest >= len(names):
        raise ConfigError(f"{source}: label {largest}, but there are {len(names)} classes, 0 to {len(names) - 1}")
    return dataset
