"""The benchmark `pipecomp bench plan`: the step that a plan says against the step that `launch` then takes. Knows commands.

The demo's model on four workers of this machine, over links of several rates and latencies, with several settings of the codecs.
Compute comes in two kinds:

    waiting   each forward and backward of a worker is filled up by waiting to a given length, as if on a device of its own; the
              plan is given these lengths as figures. What is checked is the plan's own arithmetic: order, links, bytes.
    layers    the demo's layers as they are; the plan measures this machine, and the workers then share its cores. What else the
              machine does in the meantime makes steps longer, and no plan knows of it.

Beside the bound that the plan names stands the part of the cluster that the run was busiest with (`measured_bound`).
"""

from __future__ import annotations

import functools
import json as json_text
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from pipecomp import results
from pipecomp.errors import ConfigError, PipecompError
from pipecomp.experiments.measured_bound import Bound, ProcessorTime, measured_bound, measured_loads
from pipecomp.units import parse_rate

COMMAND, RESULTS = "pipecomp bench plan --json", Path("docs/results/plan.json")
RUN_FILE = Path("examples/demo.toml")
NUM_WORKERS, BLOCKS_EACH = 4, 2
FORWARD_S, BACKWARD_S = 0.05, 0.15
"""Of a waiting worker, one microbatch; well above what the demo's layers take."""
MOST_ERROR = 0.15
_RUN_S = 600.0
_POLL_S = 0.05
_FIXED = (
    "data.max_train_samples=64",  # four steps an epoch
    "data.max_eval_samples=0",
    "train.num_train_epochs=3",
    "train.save_model=false",
)
CODECS: Final = {
    "fp32": ('compression.forward={codec="identity"}', 'compression.backward={codec="identity"}'),
    "4/8 bits": ('compression.forward={codec="delta",bits=4}', 'compression.backward={codec="uniform",bits=8}'),
    "2/4 bits": ('compression.forward={codec="delta",bits=2}', 'compression.backward={codec="uniform",bits=4}'),
}


class Case(NamedTuple):
    """One run."""

    compute: Literal["waiting", "layers"]
    setting: str
    link_rate: str
    latency_ms: float = 5.0

    def settings(self, folder: Path) -> list[str]:
        """What it sets of the run file, as arguments."""
        links = (f"cluster.link_rate={self.link_rate}", f"cluster.link_latency_ms={self.latency_ms}")
        chosen = [*_FIXED, *CODECS[self.setting], *links, f"train.output_dir={folder / 'model'}"]
        return [word for each in chosen for word in ("--set", each)]


CASES: Final = (
    Case("waiting", "2/4 bits", "100mbit"),
    Case("waiting", "fp32", "8mbit"),
    Case("waiting", "fp32", "2mbit"),
    Case("waiting", "4/8 bits", "1mbit"),
    Case("waiting", "2/4 bits", "2mbit", 50.0),
    Case("layers", "fp32", "8mbit"),
    Case("layers", "fp32", "2mbit"),
    Case("layers", "2/4 bits", "8mbit"),
    Case("layers", "2/4 bits", "1mbit"),
)


def run(*, json: bool = False, path: Path = RESULTS, cases: Sequence[Case] = CASES) -> results.Row:
    """Plan and launch each case, print a table, and with `json` write the result; return it.

    Raises:
        ConfigError: the demo is not here.
        PipecompError: a command failed.
    """
    if not RUN_FILE.exists():
        raise ConfigError(f"{COMMAND} needs {RUN_FILE} in the current folder: run it in pipecomp's repository")
    rows: list[results.Row] = []
    for case in cases:
        with tempfile.TemporaryDirectory(prefix="bench-plan-") as name:
            rows += case_rows(case, Path(name))
    outcome = results.result(COMMAND, rows, bars_of(rows))
    if json:
        results.write(path, outcome, quiet=True)
    sys.stdout.write("\n".join([*table(rows), *results.verdicts(outcome["bars"])]) + "\n")
    return outcome


def case_rows(case: Case, folder: Path) -> list[results.Row]:
    """One row for steps of the first epoch and one for later ones."""
    plan, log = folder / "plan.json", folder / "steps.jsonl"
    arguments = [str(RUN_FILE), *case.settings(folder)]
    figures: list[str] = []
    if case.compute == "waiting":
        (folder / "figures.json").write_text(json_text.dumps({"workers": [_figures(case)] * NUM_WORKERS}))
        figures = ["--figures", str(folder / "figures.json")]
    plan.write_text(_pipecomp("plan", *arguments, "--json", *figures))
    waits = case.compute == "waiting"
    summary = folder / "summary.json"
    outputs = ["--plan", str(plan), "--log", str(log), "--summary", str(summary)]
    processor_s = _launch([*arguments, "--quiet", *outputs], log, waits=waits)
    prediction = json_text.loads(plan.read_text())["prediction"]
    rows = []
    for epoch, key in (("first", "first_epoch_step_time_s"), ("later", "step_time_s")):
        steps = [step for step in _steps(log) if (step["epoch"] == 0) == (epoch == "first")]
        times_s = [step["step_time_s"] for step in steps]
        loads = measured_loads(
            json_text.loads(summary.read_text()),
            statistics.median(step["sent_bytes"] for step in steps),
            rate_nbytes_per_s=parse_rate(case.link_rate, "link_rate"),
            processor_s=None if waits else processor_s,
        )
        bound = measured_bound(prediction["bound"], loads, statistics.median(times_s))
        rows.append(_row(case, epoch, prediction[key], prediction["bound"], times_s, bound))
    return rows


def _row(
    case: Case, epoch: str, planned_s: float, named: str, times_s: Sequence[float], measured: Bound
) -> results.Row:
    measured_s = statistics.median(times_s)
    return {
        **case._asdict(),
        "epoch": epoch,
        "planned_s": round(planned_s, 4),
        "measured_s": round(measured_s, 4),
        "error": round(planned_s / measured_s - 1, 4),
        "bound": named,
        "bound_busy": round(measured.named_busy, 4),
        "busiest": measured.name,
        "busiest_busy": round(measured.busy, 4),
        "bound_agrees": measured.agrees,
        "steps_s": [round(time_s, 4) for time_s in times_s],
    }


def bars_of(rows: Sequence[results.Row]) -> list[results.Row]:
    """The largest error of each kind of compute. Rows in which the shared processor rules have no bar: what else it does
    while they run decides."""
    bars = []
    for compute in dict.fromkeys(row["compute"] for row in rows):
        errors = [abs(row["error"]) for row in rows if row["compute"] == compute and not row["bound"].startswith("processor")]
        if errors:
            name = f"{compute}: largest error of a planned step, where the processor that workers share does not rule"
            bars.append({"name": name, "value": max(errors), "bar": MOST_ERROR, "holds": max(errors) <= MOST_ERROR})
    right = sum(row["bound_agrees"] for row in rows)
    name = "rows in which the run was as busy with the bound that the plan named as with anything"
    return [*bars, {"name": name, "value": right, "bar": len(rows), "holds": right == len(rows)}]


def table(rows: Sequence[results.Row]) -> list[str]:
    """For a person, and for docs/planning.md."""
    lines = [
        "| compute | setting | link | latency | epoch | planned | measured | error | planned bound, busy | busiest part, busy |",
        "| --- " * 10 + "|",
    ]
    return lines + [
        f"| {row['compute']} | {row['setting']} | {row['link_rate']} | {row['latency_ms']:g} ms | {row['epoch']} "
        f"| {row['planned_s']:.3f} s | {row['measured_s']:.3f} s | {row['error']:+.1%} "
        f"| {row['bound']}, {row['bound_busy']:.0%} | {row['busiest']}, {row['busiest_busy']:.0%} |"
        for row in rows
    ]


def _figures(case: Case) -> dict[str, Any]:
    """Of a worker that waits."""
    nothing = {"forward_s": 0.0, "backward_s": 0.0}
    block = {"forward_s": FORWARD_S / BLOCKS_EACH, "backward_s": BACKWARD_S / BLOCKS_EACH}
    return {
        "block": block,
        "head": nothing,
        "embedding": nothing,
        "up": case.link_rate,
        "latency_ms": case.latency_ms,
        "handling_s": 0.0015,
    }


def fill_up() -> None:
    """Make every forward and backward in this process, and in those it forks, as long as a waiting worker's."""
    from pipecomp.runtime.stage import StageRuntime

    def lasting(function: Callable[..., Any], length_s: float) -> Callable[..., Any]:
        @functools.wraps(function)
        def longer(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - whatever it was
            end = time.perf_counter() + length_s
            result = function(*args, **kwargs)
            time.sleep(max(0.0, end - time.perf_counter()))
            return result

        return longer

    StageRuntime.forward = lasting(StageRuntime.forward, FORWARD_S)  # type: ignore[method-assign]
    StageRuntime.backward = lasting(StageRuntime.backward, BACKWARD_S)  # type: ignore[method-assign]


def _steps(log: Path) -> list[dict[str, Any]]:
    """Of a log that may still be written."""
    lines = log.read_text(encoding="utf-8").splitlines(keepends=True) if log.exists() else []
    events = [json_text.loads(line) for line in lines if line.endswith("\n")]
    return [event for event in events if event["event"] == "step"]


def _launch(arguments: Sequence[str], log: Path, *, waits: bool) -> float | None:
    """Run `pipecomp launch` to its end; processor time of all its processes, a step, None if none was read."""
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            _command("launch", *arguments, waits=waits), stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True
        )
        used = ProcessorTime(process.pid)
        deadline = time.monotonic() + _RUN_S
        try:
            while process.poll() is None:
                if time.monotonic() > deadline:
                    raise PipecompError(f"pipecomp launch {' '.join(arguments)} took more than {_RUN_S:g} s")
                used.read(len(_steps(log)))
                time.sleep(_POLL_S)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if process.returncode:
            errors.seek(0)
            raise PipecompError(f"pipecomp launch {' '.join(arguments)} failed: {errors.read().strip()}")
    return used.per_step_s()


def _pipecomp(*arguments: str) -> str:
    done = subprocess.run(_command(*arguments), capture_output=True, text=True, timeout=_RUN_S, check=False)
    if done.returncode:
        raise PipecompError(f"pipecomp {' '.join(arguments)} failed: {done.stderr.strip()}")
    return done.stdout


def _command(*arguments: str, waits: bool = False) -> list[str]:
    fill = f"from {__name__} import fill_up; fill_up(); " if waits else ""
    return [sys.executable, "-c", f"{fill}from pipecomp.cli import main; main()", *arguments]
