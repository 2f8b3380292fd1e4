"""Chance as a function (law 12): every seed is a hash of what it is for. Knows indices and names; keeps no state.

There is no shared generator, so a replay and any split of the model draw the same numbers.
"""

from __future__ import annotations

import struct

import xxhash

from pipecomp.models.base import LayerSeeds
from pipecomp.types import SampleId


def derive_seed(purpose: str, *parts: int) -> int:
    """64-bit seed for `purpose` and its integers (each below 2^64)."""
    return xxhash.xxh3_64_intdigest(purpose.encode() + struct.pack(f"<{len(parts)}Q", *parts))


def rounding_seed(run_seed: int, link: str, sample_id: SampleId, version: int, step: int) -> int:
    """Seed of one sample's stochastic rounding on one link. `version` is the message's; a codec without messages has 0
    at every visit, so the step takes part too."""
    return derive_seed(f"rounding/{link}", run_seed, sample_id, version, step)


class DropoutSeeds(LayerSeeds):
    """Dropout seeds of one microbatch of one step."""

    def __init__(self, run_seed: int, step: int, microbatch: int) -> None:
        self._parts = (run_seed, step, microbatch)

    def seed(self, layer: int) -> int:
        return derive_seed("dropout", *self._parts, layer)
