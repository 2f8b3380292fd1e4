"""`make demo`: four local workers fine-tune a model over throttled links, three times, and one table says what it saved.

The three runs differ in nothing but what crosses between the workers: fp32 as it is; direct quantization; AC-SGD (the
change since a sample's last visit) at the same bits. Exits with 1 unless AC-SGD is at least twice as fast as uncompressed
and its held-out loss is below direct quantization's.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

from pipecomp.config import load_run_config

RUN_FILE = Path(__file__).with_name("demo.toml")
OUTPUT = Path("demo-output")
SPEED_UP = 2.0

_IDENTITY = '{codec = "identity"}'
METHODS = {
    "uncompressed": (_IDENTITY, _IDENTITY),
    "direct 2/4 bits": ('{codec = "uniform", bits = 2}', '{codec = "uniform", bits = 4}'),
    "AC-SGD 2/4 bits": ('{codec = "delta", bits = 2}', '{codec = "uniform", bits = 4}'),
}


class Row(NamedTuple):
    """One line of the table."""

    method: str
    nbytes: int  # forward and backward, payload and headers, all links
    bits_per_value: float
    step_time_s: float
    eval_loss: float


def main() -> int:
    """Run the three, print the table, judge."""
    from pipecomp.launching import LaunchFiles, launch_run

    OUTPUT.mkdir(exist_ok=True)
    rows = []
    for method, (forward, backward) in METHODS.items():
        print(f"\n=== {method} ===", flush=True)
        overrides = [
            f"compression.forward={forward}",
            f"compression.backward={backward}",
            f"train.output_dir={OUTPUT / method.split()[0].lower()}",
        ]
        summary = OUTPUT / f"{method.split()[0].lower()}.json"
        exit_code = launch_run(load_run_config(RUN_FILE, overrides), LaunchFiles(summary=str(summary)))
        if exit_code:
            print(f"the run {method!r} ended with exit code {exit_code}", file=sys.stderr)
            return exit_code
        rows.append(read_row(method, json.loads(summary.read_text())))
    print_table(rows)
    return judge(rows)


def read_row(method: str, summary: dict[str, Any]) -> Row:
    """What the table shows of a summary."""
    kinds = [summary["traffic"][kind] for kind in ("forward", "backward")]
    nbytes = sum(kind["payload_bytes"] + kind["header_bytes"] for kind in kinds)
    values = sum(kind["values"] for kind in kinds)
    return Row(method, nbytes, 8 * nbytes / values, summary["step_time_s"], summary["eval_loss"])


def print_table(rows: list[Row]) -> None:
    """Bytes, bits a value (headers counted), seconds a step, speed-up, held-out loss."""
    print(f"\n{'method':18}{'sent':>12}{'bits/value':>12}{'s/step':>9}{'speed-up':>10}{'held-out loss':>15}")
    for row in rows:
        speed_up = rows[0].step_time_s / row.step_time_s
        print(
            f"{row.method:18}{row.nbytes / 1e6:>9.1f} MB{row.bits_per_value:>12.2f}{row.step_time_s:>9.2f}"
            f"{speed_up:>9.1f}x{row.eval_loss:>15.3f}"
        )
    print("\nsent: activations and their gradients over all links, headers included; all kinds of traffic: demo-output/*.json")


def judge(rows: list[Row]) -> int:
    """0 if the claim holds on this machine."""
    uncompressed, direct, acsgd = rows
    speed_up = uncompressed.step_time_s / acsgd.step_time_s
    faults = []
    if speed_up < SPEED_UP:
        faults.append(f"AC-SGD is {speed_up:.2f} times as fast as uncompressed, expected at least {SPEED_UP}")
    if not acsgd.eval_loss < direct.eval_loss:
        faults.append(f"AC-SGD's loss {acsgd.eval_loss:.3f} is not below direct quantization's {direct.eval_loss:.3f}")
    for fault in faults:
        print(f"FAILED: {fault}", file=sys.stderr)
    if not faults:
        print(f"AC-SGD trained {speed_up:.1f} times as fast as uncompressed, with a lower loss than direct quantization.")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
