"""The benchmark `pipecomp bench errors`: relative error of each quantizer at 1 to 8 bits, on made and on recorded data.

c_Q = RMS error / RMS value; the bits are those that scales and codes really take. A Gaussian source at R bits a value has no
code with c_Q below 2^-R, so each figure stands beside its multiple of that. By the plain kernels: the others have the same bits.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pipecomp import results
from pipecomp.codecs import _recorded
from pipecomp.native import ops, reference
from pipecomp.native.ops import Layout

RESULTS = Path("docs/results/errors.json")
NUM_ROWS, WIDTHS, BITS = 256, (576, 768), range(1, 9)
FORMS: Mapping[str, Layout] = {
    "g64 bf16": Layout(1, 64, "bf16"),
    "g32 bf16": Layout(1, 32, "bf16"),
    "g64 e4m3": Layout(1, 64, "e4m3"),
    "g32 e4m3": Layout(1, 32, "e4m3"),
    "g16 e4m3": Layout(1, 16, "e4m3"),
    "g32 e4m3 fit": Layout(1, 32, "e4m3", fit="least_error"),
    "g32 e4m3 rotated": Layout(1, 32, "e4m3", rotation="hadamard"),
    "g128 e4m3 fit rotated": Layout(1, 128, "e4m3", fit="least_error", rotation="hadamard"),
    "g32 e4m3 either": Layout(1, 32, "e4m3", fit="least_error", levels="either"),
    "g64 e4m3 either": Layout(1, 64, "e4m3", fit="least_error", levels="either"),
    "g64 e4m3 either rotated": Layout(1, 64, "e4m3", fit="least_error", rotation="hadamard", levels="either"),
    "g32 e4m3 mixed": Layout(1, 32, "e4m3", widths="mixed"),
    "g32 e4m3 either mixed": Layout(1, 32, "e4m3", fit="least_error", levels="either", widths="mixed"),
    "g32 e4m3 stochastic": Layout(1, 32, "e4m3", rounding="stochastic"),
    "row bf16": Layout(1, 0, "bf16"),
}
"""By the name of a row: groups (0: a row), scale, and what differs from the default."""

ROBUST = "g64 e4m3 either rotated"
MOST_TIMES_BOUND = {2: 1.6, 3: 1.75, 4: 1.75}
MOST_FOR_OUTLIERS = 1.3


class Data(NamedTuple):
    """Rows that are quantized one after the other, as the rows of a sample are."""

    name: str
    values: npt.NDArray[np.float32]  # (rows, columns)


def run(*, json: bool = False, path: Path = RESULTS, bits: Sequence[int] = BITS, recorded: bool = True) -> results.Row:
    """Measure, print a table, and with `json` write the result to `path`; return the result."""
    recordings, missing = _recorded.recordings() if recorded else ({}, [])
    data = [*_made(), *(Data(name, values) for name, values in recordings.items())]
    rows = [_measure(each, form, num_bits) for form, num_bits, each in product(FORMS, bits, data) if _exists(form, num_bits)]
    outcome = results.result("pipecomp bench errors --json", rows, _bars(rows))
    _print(outcome, data)
    for name in missing:
        sys.stdout.write(f"nothing recorded from {name}: its weights or its text are not there; see scripts/fetch_examples.py\n")
    if json:
        results.write(path, outcome)
    return outcome


def _made() -> list[Data]:
    """Gaussian, heavy-tailed, and Gaussian with six columns forty times larger, in rows of two widths."""
    made = []
    for width in WIDTHS:
        chance = np.random.default_rng(width)
        outliers = chance.standard_normal((NUM_ROWS, width))
        outliers[:, chance.choice(width, 6, replace=False)] *= 40
        kinds = {
            "normal": chance.standard_normal((NUM_ROWS, width)),
            "t3": chance.standard_t(3, (NUM_ROWS, width)),
            "outliers": outliers,
        }
        made += [Data(f"{name} {width}", values.astype(np.float32)) for name, values in kinds.items()]
    return made


def _exists(form: str, bits: int) -> bool:
    return FORMS[form].widths == "equal" or bits in ops.MIXED_BITS


def _measure(data: Data, form: str, bits: int) -> results.Row:
    columns = data.values.shape[1]
    layout = FORMS[form]._replace(bits=bits, group=FORMS[form].group or columns)
    flat = data.values.reshape(-1)
    seen = reference.seen(flat, layout, seed=1)
    error, size = np.linalg.norm(flat.astype(np.float64) - seen), np.linalg.norm(flat.astype(np.float64))
    bits_per_value = 8 * ops.payload_nbytes(flat.size, layout) / flat.size
    c_q = float(error / size)
    return {
        "data": data.name,
        "columns": columns,
        "form": form,
        "bits": bits,
        "bits_per_value": round(bits_per_value, 3),
        "c_q": round(c_q, 5),
        "bound": round(2.0**-bits_per_value, 5),
        "times_bound": round(c_q * 2.0**bits_per_value, 3),
    }


def _bars(rows: list[results.Row]) -> list[results.Row]:
    """What is asked of the quantizer for data of any kind."""
    by_key = {(row["data"], row["bits"]): row for row in rows if row["form"] == ROBUST}
    bars = []
    for (bits, most), width in product(MOST_TIMES_BOUND.items(), WIDTHS):
        normal, outliers = by_key.get((f"normal {width}", bits)), by_key.get((f"outliers {width}", bits))
        if normal is None or outliers is None:
            continue
        above = round(outliers["c_q"] / normal["c_q"], 3)
        wanted = (
            (f"c_Q times 2^{normal['bits_per_value']:.2f}, normal", normal["times_bound"], most),
            ("c_Q of outliers over that of normal values", above, MOST_FOR_OUTLIERS),
        )
        bars += [
            {"name": f"{ROBUST}, {bits} bits, rows of {width}: {name}", "value": value, "bar": bar, "holds": value <= bar}
            for name, value, bar in wanted
        ]
    return bars


def _print(outcome: results.Row, data: list[Data]) -> None:
    names = [each.name for each in data]
    lines = [f"{name:>3}  {chr(97 + index)}" for index, name in enumerate(names)]
    lines.append(f"{'c_Q (times 2^-R)':<24}{'bits':>5}{'R':>7}" + "".join(f"{chr(97 + i):>14}" for i in range(len(names))))
    for start in range(0, len(outcome["rows"]), len(names)):
        part = outcome["rows"][start : start + len(names)]
        cells = "".join(f"{row['c_q']:>7.3f} ({row['times_bound']:.2f})" for row in part)
        lines.append(f"{part[0]['form']:<24}{part[0]['bits']:>5}{part[0]['bits_per_value']:>7.3f}{cells}")
    sys.stdout.write("\n".join([*lines, *results.verdicts(outcome["bars"])]) + "\n")


if __name__ == "__main__":
    run(json=True)
