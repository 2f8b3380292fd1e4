"""Tensors that look like activations or gradients, made once and taken as views. Knows torch and numbers; no layers, no samples.

    elements    a_0 ... a_{K-1}                          each (rows, columns); all are one base plus noise of their own
    storage     a_0 ... a_{K-1} a_0 a_1 ...              as long as it takes for B elements in a row to be one view
    take(i, B)  a_{i mod K} ... a_{(i + B - 1) mod K}    no value is copied

Any two elements differ by the same relative change, so whichever a sample had at its last visit, its change since is the one
that was asked for, unless it is the same element again (one visit in K; the change asked for is the mean over all visits).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import xxhash

_OUTLIERS_EVERY = 64
"""One column in so many is an outlier, as a few channels of transformers' hidden states are."""
_OUTLIER_SCALE = 20.0


class RingSpec(NamedTuple):
    """What the elements of a ring are."""

    purpose: str  # what its chance is for
    num_elements: int  # K, at least 2
    num_rows: int
    num_columns: int
    change: float  # |a - b| / |b| for elements a, b taken at random, root of the mean square; from 0 to 1
    scale: float  # standard deviation of a usual value
    row_spread: float  # standard deviation of the logarithm of a row's own scale; 0: all rows are alike


class TensorRing:
    """K tensors alike but for a set change. Made on first use, from the spec alone; calls come from one thread."""

    def __init__(self, spec: RingSpec) -> None:
        self._spec = spec
        self._storage = torch.empty(0)

    def take(self, first: int, num_samples: int, num_rows: int) -> torch.Tensor:
        """(num_samples, num_rows, columns) fp32, a view that nobody may write to: consecutive elements from `first` modulo K,
        the leading rows of each. `num_rows` is at most the spec's."""
        spec = self._spec
        first %= spec.num_elements
        if len(self._storage) < spec.num_elements + num_samples - 1:
            elements = self._storage[: spec.num_elements] if len(self._storage) else make_elements(spec)
            num_turns = math.ceil((spec.num_elements + num_samples - 1) / spec.num_elements)
            self._storage = elements.repeat(num_turns, 1, 1)[: spec.num_elements + num_samples - 1]
        return self._storage[first : first + num_samples, :num_rows]


def make_elements(spec: RingSpec) -> torch.Tensor:
    """(K, rows, columns) fp32. Columns have scales of their own, some are outliers far from zero, and single values have heavy
    tails; the noise that tells elements apart has the columns' scales too. The same spec gives the same bits."""
    chance = torch.Generator().manual_seed(xxhash.xxh3_64_intdigest(f"ring {spec.purpose}".encode()) >> 1)
    shape = (spec.num_rows, spec.num_columns)
    columns = torch.randn(spec.num_columns, generator=chance).mul_(0.5).exp_()
    center = torch.randn(spec.num_columns, generator=chance).mul_(0.5)
    columns[::_OUTLIERS_EVERY] *= _OUTLIER_SCALE
    rows = torch.randn(spec.num_rows, 1, generator=chance).mul_(spec.row_spread).exp_()
    tails = torch.randn(shape, generator=chance).mul_(0.4).exp_()
    base = torch.randn(shape, generator=chance).mul_(tails).add_(center).mul_(columns).mul_(rows).mul_(spec.scale)
    # |a - b|^2 is 2 |noise|^2 for two elements and 0 for one and the same; |b|^2 is |base|^2 + |noise|^2.
    squared = spec.change**2
    ratio = squared / (2 * (1 - 1 / spec.num_elements) - squared)
    noise_norm = float(base.norm()) * math.sqrt(ratio)
    elements = torch.empty(spec.num_elements, *shape)
    for element in elements:
        torch.randn(shape, generator=chance, out=element)
        element.mul_(columns).mul_(rows)
        element.mul_(noise_norm / max(float(element.norm()), 1e-30)).add_(base)
    return elements
