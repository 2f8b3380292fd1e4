"""Write `encodings.json`: what each codec made of fixed samples. Run by hand, and only when the format changes on purpose.

    python tests/golden/encodings.py

Peers of another version read these bytes, so a change needs a new protocol version.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch

from pipecomp import registry
from pipecomp.types import TensorSpec

FILE = Path(__file__).with_suffix(".json")
SEED = 0xFEDCBA9876543210
ROWS, COLUMNS = 3, 50
CODECS = [
    {"codec": "identity"},
    {"codec": "cast", "dtype": "bf16"},
    {"codec": "cast", "dtype": "fp16"},
    *({"codec": "uniform", "bits": bits, "group": 64} for bits in (1, 2, 3, 4, 5, 6, 7, 8)),
    {"codec": "uniform", "bits": 3, "group": "row", "scale": "fp16", "rounding": "stochastic"},
    {"codec": "uniform", "bits": 2, "group": 16, "scale": "fp32", "rounding": "stochastic"},
    {"codec": "delta", "bits": 2, "group": 64, "first_visit": {"codec": "uniform", "bits": 6, "group": 64}},
    {"codec": "delta", "bits": 4, "group": 64, "rounding": "stochastic", "first_visit": "whole"},
    *({"codec": "uniform", "bits": bits} for bits in (1, 2, 4, 5, 8)),
    {"codec": "uniform", "bits": 3, "rounding": "stochastic"},
    {"codec": "uniform", "bits": 3, "group": 32, "scale": "fp32", "fit": "least_error"},
    {"codec": "uniform", "bits": 4, "group": 64, "scale": "e4m3", "fit": "least_error", "rotation": "hadamard"},
    {"codec": "delta", "bits": 2},
    {"codec": "delta", "bits": 4},
    {"codec": "delta", "bits": 3, "rotation": "hadamard", "levels": "either", "first_visit": "whole"},
    *({"codec": "uniform", "bits": bits, "group": 8, "scale": "e4m3", "widths": "mixed"} for bits in (2, 5)),
    {"codec": "delta", "bits": 2, "group": 8, "scale": "e4m3", "levels": "either", "fit": "least_error", "widths": "mixed"},
    {"codec": "delta", "bits": 3, "widths": "mixed"},
    {"codec": "sparse", "bits": 4, "top": 0.25},
    {"codec": "sparse", "bits": 2, "top": 0.05},
    {"codec": "sparse", "bits": 4, "random": 0.3},
    {"codec": "sparse", "bits": 3, "top": 0.1, "random": 0.5, "rounding": "stochastic"},
]


def sample(visit: int) -> torch.Tensor:
    """Made by integers, so that every machine has the same bits."""
    index = np.arange(ROWS * COLUMNS, dtype=np.uint64)
    mixed = (index * np.uint64(2654435761) + np.uint64(97 * visit) * (index + np.uint64(1))) % np.uint64(2**20)
    values = (mixed.astype(np.float32) - np.float32(2**19)) * np.float32(2.0**-18)
    return torch.from_numpy(values.reshape(ROWS, COLUMNS))


def encodings(options: dict[str, object]) -> list[str]:
    """Hexadecimal payloads of three visits of the sample."""
    codec = registry.load("pipecomp.codecs", options["codec"]).from_options(
        {key: value for key, value in options.items() if key != "codec"}
    )
    payloads, message = [], None
    for visit in range(3):
        payload = np.zeros(codec.encoded_nbytes(TensorSpec(ROWS, COLUMNS), first_visit=message is None), np.uint8)
        message = codec.encode(sample(visit), message, seed=SEED + visit, out=payload)
        payloads.append(payload.tobytes().hex())
    return payloads


if __name__ == "__main__":
    stored = [{"options": options, "payloads": encodings(options)} for options in CODECS]
    FILE.write_text(json.dumps(stored, indent=1) + "\n")
