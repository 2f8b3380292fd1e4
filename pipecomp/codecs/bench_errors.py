"""The benchmark `python -m pipecomp.codecs.bench_errors`: relative error of each grid on three kinds of data. No time is taken.

c_Q = RMS error / RMS value, which the analysis of AC-SGD asks to be below sqrt(1/2); bits as scales and codes really take them.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from itertools import product
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pipecomp import results
from pipecomp.native import ops
from pipecomp.native.ops import Layout

RESULTS = Path("docs/results/errors.json")
ROWS, COLUMNS = 512, 1024
GROUPS = (32, 64, 128, COLUMNS)
ROUNDINGS: tuple[ops.Rounding, ...] = ("nearest", "stochastic")
_HEADER = "data      bits  rounding    " + "".join(f"{f'g{g}' if g != COLUMNS else 'row':>8}" for g in GROUPS)


def run(*, json: bool = False, path: Path = RESULTS) -> results.Row:
    """Measure, print a table, and with `json` write the result to `path`; return the result."""
    rows = [
        _measure(name, values, bits, group, rounding)
        for (name, values), bits, rounding, group in product(_data().items(), range(1, 9), ROUNDINGS, GROUPS)
    ]
    outcome = results.result("python -m pipecomp.codecs.bench_errors", rows, [])
    sys.stdout.write("\n".join([_HEADER, *_table(rows)]) + "\n")
    if json:
        results.write(path, outcome)
    return outcome


def _data() -> Mapping[str, npt.NDArray[np.float32]]:
    chance = np.random.default_rng(0)
    shape = (ROWS, COLUMNS)
    outliers = chance.standard_normal(shape)
    outliers[:, chance.choice(COLUMNS, 6, replace=False)] *= 40
    kinds = {"normal": chance.standard_normal(shape), "t3": chance.standard_t(3, shape), "outliers": outliers}
    return {name: values.astype(np.float32).reshape(-1) for name, values in kinds.items()}


def _measure(name: str, values: npt.NDArray[np.float32], bits: int, group: int, rounding: ops.Rounding) -> results.Row:
    layout = Layout(bits, group, "bf16", rounding)
    payload, seen = np.zeros(ops.payload_nbytes(values.size, layout), np.uint8), np.zeros_like(values)
    ops.encode(values, layout, out=payload, message_out=seen, seed=1)
    error, _, size = ops.squared_norms(values, None, seen)
    return {
        "data": name,
        "bits": bits,
        "group": group,
        "scale": layout.scale,
        "rounding": rounding,
        "bits_per_value": 8 * payload.size / values.size,
        "c_q": round(float(np.sqrt(error / size)), 5),
    }


def _table(rows: list[results.Row]) -> list[str]:
    lines = []
    for start in range(0, len(rows), len(GROUPS)):
        first = rows[start]
        errors = "".join(f"{row['c_q']:>8.3f}" for row in rows[start : start + len(GROUPS)])
        lines.append(f"{first['data']:<10}{first['bits']:>4}  {first['rounding']:<12}{errors}")
    return lines


if __name__ == "__main__":
    run(json=True)
