"""The benchmark `pipecomp bench memory`: whether workers' memory grows while one of them is ten times slower than the others.

    worker-0   worker-1   worker-2   worker-3        launched on this machine; compute sleeps (the model `synthetic`)
    1 block    10 blocks  1 block    1 block

Whatever a fast worker could pile up, it would: messages that its slow neighbour has not taken yet, credit, acknowledgements,
timers. Every worker's resident memory is read again and again from outside, and its last quarter is held against its second.
"""

from __future__ import annotations

import contextlib
import json as json_text
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pipecomp import results
from pipecomp.config import parse_run_config, resolved_toml
from pipecomp.errors import ConfigError, PipecompError

COMMAND, RESULTS = "pipecomp bench memory --json", Path("docs/results/memory.json")
TEXT, TOKENIZER = Path("examples/state-of-the-union.jsonl"), Path("examples/demo-gpt2")
BLOCKS = (1, 10, 1, 1)
"""Of each worker; the time of a block is the same."""
NUM_STEPS = 2000
STEPS_PER_EPOCH = 4
"""So that the last quarter is far from first visits, whose messages are new memory."""
MOST_GROWTH = 0.01
"""Of resident memory, from the second quarter of the steps to the last: what allocators do, and no more."""
_BATCH, _ROWS, _COLUMNS = 8, 128, 512
_FORWARD_S, _BACKWARD_S = 0.0003, 0.0006
_POLL_S = 0.25
_START_S, _STEP_S = 120.0, 5.0
_PAGE_NBYTES = os.sysconf("SC_PAGE_SIZE")


class Sample(NamedTuple):
    """Resident memory at one moment."""

    step: int
    nbytes: Mapping[str, int]
    """By process: workers and `coordinator`."""


def run(*, json: bool = False, path: Path = RESULTS, num_steps: int = NUM_STEPS) -> results.Row:
    """Train, watch, print a line a process, and with `json` write the result; return it.

    Raises:
        ConfigError: the text is not here, or this is not Linux.
        PipecompError: the run failed.
    """
    if not TEXT.exists() or not Path("/proc/self/statm").exists():
        raise ConfigError(f"{COMMAND} needs Linux and {TEXT}: run it in the folder of the source tree")
    with tempfile.TemporaryDirectory(prefix="bench-memory-") as folder:
        samples, summary = _watched_run(Path(folder), num_steps)
    rows = rows_of(samples, summary["steps"])
    outcome = results.result(COMMAND, rows, bars_of(rows))
    outcome["settings"] = {"blocks": BLOCKS, "steps": summary["steps"], "step_s": round(summary["step_time_s"], 5)}
    if json:
        results.write(path, outcome, quiet=True)
    sys.stdout.write("\n".join([*lines(rows), *results.verdicts(outcome["bars"])]) + "\n")
    return outcome


def rows_of(samples: Sequence[Sample], num_steps: int) -> list[results.Row]:
    """Medians of each process in every quarter of the steps.

    Raises:
        PipecompError: no process was seen in every quarter: the run was too short to be watched.
    """
    quarters: list[list[Sample]] = [[], [], [], []]
    for sample in samples:
        if 0 < sample.step <= num_steps:
            quarters[min(3, 4 * (sample.step - 1) // num_steps)].append(sample)
    seen = [{name for sample in quarter for name in sample.nbytes} for quarter in quarters]
    names = sorted(set.intersection(*seen))
    if not names:
        raise PipecompError(f"a run of {num_steps} steps is over too soon to read its memory in each quarter")
    rows = []
    for name in names:
        middle = [round(statistics.median(s.nbytes[name] for s in quarter if name in s.nbytes)) for quarter in quarters]
        rows.append(
            {"process": name, "quarters_nbytes": middle, "growth": round(middle[3] / middle[1] - 1, 5), "samples": len(samples)}
        )
    return rows


def bars_of(rows: Sequence[results.Row]) -> list[results.Row]:
    """The worker that grew most. The coordinator keeps every step's time and loss, and has no bar."""
    growth = max(row["growth"] for row in rows if row["process"].startswith("worker"))
    name = f"growth of a worker's memory from the second to the last quarter, one worker {max(BLOCKS)} times slower"
    return [{"name": name, "value": growth, "bar": MOST_GROWTH, "holds": growth <= MOST_GROWTH}]


def lines(rows: Sequence[results.Row]) -> list[str]:
    """For a person."""
    return [
        f"{row['process']:<12} {' '.join(f'{nbytes / 1e6:9.2f}' for nbytes in row['quarters_nbytes'])} MB by quarter, "
        f"{row['growth']:+.3%} from the second to the last"
        for row in rows
    ]


def _watched_run(folder: Path, num_steps: int) -> tuple[list[Sample], dict[str, Any]]:
    run_file, log, summary = folder / "run.toml", folder / "steps.jsonl", folder / "summary.json"
    run_file.write_text(resolved_toml(_config(num_steps)), encoding="utf-8")
    command = [sys.executable, "-c", "from pipecomp.cli import main; main()", "launch", str(run_file), "--quiet"]
    command += ["--log", str(log), "--summary", str(summary)]
    with (folder / "output").open("w") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
    try:
        samples = _watch(process, log, time.monotonic() + _START_S + _STEP_S * num_steps)
    finally:
        process.terminate()
        code = process.wait()
    if code:
        raise PipecompError(f"the run failed: {(folder / 'output').read_text().strip()}")
    return samples, json_text.loads(summary.read_text())


def _watch(process: subprocess.Popen[bytes], log: Path, deadline: float) -> list[Sample]:
    samples = []
    step, position = 0, 0
    while process.poll() is None:
        if time.monotonic() > deadline:
            raise PipecompError(f"the run takes too long; it is at step {step}")
        time.sleep(_POLL_S)
        if not log.exists():
            continue
        with log.open("rb") as file:
            file.seek(position)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                position += len(line)
                step = json_text.loads(line).get("step", step)
        samples.append(Sample(step, resident_nbytes(process.pid)))
    return samples


def resident_nbytes(parent: int) -> dict[str, int]:
    """Resident memory of a process's children, by the name that each has given itself."""
    found = {}
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # not a process, or one that has just ended
            if folder.name.isdigit():
                name, _, rest = (folder / "stat").read_text().partition("(")[2].rpartition(")")
                if int(rest.split()[1]) == parent:
                    found[name] = _PAGE_NBYTES * int((folder / "statm").read_text().split()[1])
    return found


def _config(num_steps: int) -> Any:  # noqa: ANN401 - a RunConfig
    layers = list(BLOCKS)
    layers[0] += 1  # the embedding
    layers[-1] += 1  # the head
    model = {"n_layer": sum(BLOCKS), "n_embd": _COLUMNS, "n_positions": _ROWS, "forward_s": _FORWARD_S, "backward_s": _BACKWARD_S}
    return parse_run_config(
        {
            "model": {"config": {"model_type": "synthetic", **model}},
            "data": {
                "train": str(TEXT.resolve()),
                "tokenizer": str(TOKENIZER.resolve()),
                "max_length": _ROWS,
                "packing": True,
                "max_train_samples": STEPS_PER_EPOCH * _BATCH,
                "max_eval_samples": 0,
            },
            "train": {
                "num_train_epochs": -(-num_steps // STEPS_PER_EPOCH),
                "batch_size": _BATCH,
                "num_microbatches": _BATCH,
                "save_model": False,
            },
            "compression": {"forward": {"codec": "delta", "bits": 3}, "backward": {"codec": "uniform", "bits": 6}},
            "cluster": {"num_stages": len(BLOCKS), "layers": layers},
        },
        COMMAND,
    )
