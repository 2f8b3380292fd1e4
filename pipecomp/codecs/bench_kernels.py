"""The benchmark `pipecomp bench kernels`: kernels of one thread against copying and against eager torch, in one run. No sample.

Others may use the machine meanwhile, so processor time is taken, of all in turn, round by round; what counts is the median
over the rounds of the ratio within a round. The torch version does the same arithmetic; that it makes the same bytes is checked
first. There is one for steps that follow from the extreme, in bf16; what else the defaults are is held against copying alone.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from pipecomp import results
from pipecomp.codecs._quantizer import Quantizer
from pipecomp.codecs.delta import DEFAULT_FIRST_VISIT
from pipecomp.errors import CodecError
from pipecomp.native import ops
from pipecomp.native.ops import Layout
from pipecomp.types import TensorSpec

RESULTS = Path("docs/results/kernels.json")
NUM_VALUES = 1 << 24  # 64 MiB of fp32, beyond the caches
ROUNDS, TORCH_ROUNDS = 31, 5


class Case(NamedTuple):
    """One layout on one array."""

    layout: Layout
    num_values: int
    shape: str
    role: str = ""  # "default": what `delta` and `uniform` do if only the bits are named; "first visit": that of `delta`
    has_message: bool = True  # as for `delta`: a message goes in and comes out; without, as for `uniform`

    @property
    def is_eager(self) -> bool:
        """Whether there is a torch version of it."""
        return self.layout == Layout(self.layout.bits, self.layout.group) and self.has_message


class Bar(NamedTuple):
    """What is asked of a rate: (role, bits or 0 for all, operation, other, least ratio), for messages and none alike."""

    role: str
    bits: int
    op: str
    other: str
    least: float


def _default(bits: int, role: str = "default", *, has_message: bool) -> Case:
    layout = Quantizer.from_options("uniform", {"bits": bits}).layout(TensorSpec(1, 1))
    return Case(layout, NUM_VALUES, "64 MiB", role, has_message)


_FIRST_BITS = int(str(DEFAULT_FIRST_VISIT["bits"]))
CASES = (
    *(Case(Layout(bits, 64), NUM_VALUES, "64 MiB") for bits in (2, 4)),
    *(Case(Layout(bits, 32), NUM_VALUES, "64 MiB") for bits in (2, 4)),
    *(Case(Layout(bits, 64), 1024 * 1600, "1024 x 1600") for bits in (2, 4)),
    *(Case(Layout(bits, 1600), 1024 * 1600, "1024 x 1600") for bits in (2, 4)),
    *(_default(bits, has_message=has_message) for bits in (2, 3, 4, 6, 8) for has_message in (True, False)),
    _default(_FIRST_BITS, "first visit", has_message=False),
    *(Case(_default(bits, has_message=True).layout._replace(widths="mixed"), NUM_VALUES, "64 MiB") for bits in (2, 3)),
    Case(Layout(4, 64, "e4m3", "nearest", "least_error", "hadamard", "either"), NUM_VALUES, "64 MiB"),
    Case(Layout(4, 32, "e4m3", "stochastic"), NUM_VALUES, "64 MiB"),
)
BARS = (
    Bar("", 0, "encode", "copy", 0.35),
    Bar("", 0, "decode", "copy", 1.0),
    Bar("", 0, "encode", "torch", 5.0),
    Bar("", 0, "decode", "torch", 5.0),
    Bar("default", 4, "encode", "copy", 0.3),
    Bar("first visit", 0, "encode", "copy", 0.2),
)


def run(
    *, json: bool = False, path: Path = RESULTS, cases: tuple[Case, ...] = CASES, rounds: int = ROUNDS
) -> dict[str, Any]:
    """Time every case, print a table, and with `json` write the result to `path`; return the result."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rows = [row for case in cases for row in _measure(case, rounds)]
    finally:
        torch.set_num_threads(threads)
    bars = [_judge(row, bar) for row in rows for bar in BARS if _is_judged(row, bar)]
    result = results.result("pipecomp bench kernels --json", rows, bars)
    _print(result)
    if json:
        results.write(path, result)
    return result


def _measure(case: Case, rounds: int) -> list[dict[str, Any]]:
    layout = case.layout
    chance = np.random.default_rng(0)
    values = chance.standard_normal(case.num_values, dtype=np.float32)
    message = values + np.float32(0.1) * chance.standard_normal(case.num_values, dtype=np.float32)
    after, copied = np.zeros_like(values), np.zeros_like(values)
    payload = np.zeros(ops.payload_nbytes(case.num_values, layout), np.uint8)
    before, seen = (message, after) if case.has_message else (None, None)
    eager = _Eager(layout, torch.from_numpy(values), torch.from_numpy(message)) if case.is_eager else None

    calls: dict[str, Callable[[], object]] = {
        "copy": lambda: np.copyto(copied, values),
        "encode": lambda: ops.encode(values, layout, out=payload, message_in=before, message_out=seen),
        "decode": lambda: ops.decode(payload, layout, out=copied, message_in=before),
    }
    slow: dict[str, Callable[[], object]] = {"encode": eager.encode, "decode": eager.decode} if eager else {}
    for call in (*calls.values(), *slow.values()):
        call()
    if eager and not eager.agrees(payload, after):
        raise CodecError(f"torch and the kernels disagree on {layout}: they would not do the same work")
    times: dict[str, list[float]] = {name: [] for name in calls}
    torch_times: dict[str, list[float]] = {name: [] for name in slow}
    for index in range(rounds):
        for name, call in calls.items():
            times[name].append(_time(call))
        if index < TORCH_ROUNDS:
            for name, call in slow.items():
                torch_times[name].append(_time(call))
    return [_row(name, case, times, torch_times.get(name, [])) for name in ("encode", "decode")]


def _row(op: str, case: Case, times: dict[str, list[float]], torch_times: list[float]) -> dict[str, Any]:
    ratios = [copy / own for copy, own in zip(times["copy"], times[op], strict=True)]
    against_torch = [other / own for other, own in zip(torch_times, times[op], strict=False)]
    return {
        "op": op,
        "codec": "delta" if case.has_message else "uniform",
        "role": case.role,
        **case.layout._asdict(),
        "backend": "cpu",
        "shape": case.shape,
        "threads": 1,
        "values_per_s": round(case.num_values / statistics.median(times[op])),
        "copy_values_per_s": round(case.num_values / statistics.median(times["copy"])),
        "ratio_to_copy": round(statistics.median(ratios), 3),
        "ratio_to_copy_of_best": round(min(times["copy"]) / min(times[op]), 3),
        "ratio_to_torch": round(statistics.median(against_torch), 1) if against_torch else None,
        "times_s": [round(t, 6) for t in times[op]],
        "copy_times_s": [round(t, 6) for t in times["copy"]],
        "torch_times_s": [round(t, 6) for t in torch_times],
    }


class _Eager:
    """The same arithmetic in torch operations, one after the other; block = 128 values, groups that divide it or are rows."""

    def __init__(self, layout: Layout, values: torch.Tensor, message: torch.Tensor) -> None:
        self.layout, self.values, self.message = layout, values, message
        self.grid = ops.grid(layout)
        self.steps = self.packed = self.after = values

    def encode(self) -> None:
        bits, group, half = self.layout.bits, self.layout.group, self.grid.half
        differences = (self.values - self.message).view(-1, group)
        above, below = differences.amax(1, keepdim=True).clamp(0), (-differences.amin(1, keepdim=True)).clamp(0)
        steps = torch.maximum(above, below) * float(self.grid.near_factor)
        self.steps = torch.where(above > below, -steps, steps).to(torch.bfloat16)
        step = self.steps.float()
        inverse = torch.where(step != 0, 1 / step, 0)
        codes = (differences * inverse + (half + 0.5)).clamp(0, 2**bits - 1).to(torch.uint8)
        parts = codes.view(-1, 8 // bits, ops.block_length(group) * bits // 8)
        packed = parts[:, 0].clone()
        for part in range(1, 8 // bits):
            packed |= parts[:, part] << (bits * part)
        self.packed = packed
        self.after = (self.message.view(-1, group) + (codes.float() - half) * step).view(-1)

    def decode(self) -> torch.Tensor:
        bits, group = self.layout.bits, self.layout.group
        parts = [(self.packed >> (bits * part)) & (2**bits - 1) for part in range(8 // bits)]
        codes = torch.stack(parts, 1).view(-1, group)
        return (self.message.view(-1, group) + (codes.float() - self.grid.half) * self.steps.float()).view(-1)

    def agrees(self, payload: np.ndarray, after: np.ndarray) -> bool:
        scales = self.steps.contiguous().view(torch.int16).numpy().view(np.uint8).reshape(-1)
        mine = np.concatenate([scales, self.packed.numpy().reshape(-1)])
        same = np.array_equal(mine, payload) and np.array_equal(self.after.numpy(), after)
        return same and np.array_equal(self.decode().numpy(), after)


def _time(call: Callable[[], object]) -> float:
    """Processor time of this thread, in which all of the work is done: waiting for others' turns is no part of a rate."""
    start = time.thread_time()
    call()
    return time.thread_time() - start


def _is_judged(row: dict[str, Any], bar: Bar) -> bool:
    if row["op"] != bar.op or row["role"] != bar.role or row["shape"] != "64 MiB" or bar.bits not in (0, row["bits"]):
        return False
    return bar.role != "" or (row["group"] == 64 and row["ratio_to_torch"] is not None)


def _judge(row: dict[str, Any], bar: Bar) -> dict[str, Any]:
    value = row[f"ratio_to_{bar.other}"]
    kind = f"{row['role']} of {row['codec']}" if row["role"] else f"groups of {row['group']}"
    name = f"{row['op']}, {row['bits']} bits, {kind}, times the rate of {bar.other}"
    return {"name": name, "value": value, "bar": bar.least, "holds": value >= bar.least}


def _print(result: dict[str, Any]) -> None:
    lines = ["op      codec    bits  group  array        10^9 values/s   of copyto   of eager torch  what"]
    lines += [
        f"{row['op']:<8}{row['codec']:<8}{row['bits']:>5}{row['group']:>7}  {row['shape']:<13}"
        f"{row['values_per_s'] / 1e9:>13.2f}{row['ratio_to_copy']:>12.2f}{row['ratio_to_torch'] or '-':>17}  {_what(row)}"
        for row in result["rows"]
    ]
    sys.stdout.write("\n".join([*lines, *results.verdicts(result["bars"])]) + "\n")


def _what(row: dict[str, Any]) -> str:
    usual = Layout(row["bits"], row["group"])._asdict()
    return " ".join([row["role"], *(str(row[key]) for key in usual if row[key] != usual[key])]).strip()
