"""Compile the kernels of the settings that most runs have, while the image is built. Knows codecs' names and their bits."""

from __future__ import annotations

from pipecomp import registry

SETTINGS = [("delta", bits) for bits in (2, 3, 4)] + [("uniform", bits) for bits in (4, 6, 8)]
NUM_COLUMNS = 128  # any whole number of groups: it is no part of a kernel

for codec, bits in SETTINGS:
    registry.load("pipecomp.codecs", codec).from_options({"bits": bits}).warm_up(NUM_COLUMNS)
