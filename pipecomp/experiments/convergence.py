"""The experiment `pipecomp bench convergence`: how |grad f|^2 falls with the number of steps. Knows the ladder, cells and bars.

The analysis of AC-SGD gives, for a step size of order 1 / sqrt(T), a mean of |grad f|^2 over T steps that is O(1 / sqrt(T)), as
for plain SGD. Here each T is a run of its own; slopes are fitted over the whole ladder. The problem and the link between its
two machines are in `_two_machines`; the codecs are those of run files.
"""

from __future__ import annotations

import json as json_text
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pipecomp import results
from pipecomp.errors import ConfigError

Array = npt.NDArray[np.float64]

COMMAND = "pipecomp bench convergence --json"
RESULTS = Path("docs/results/convergence.json")
SGD = "SGD"
SGD_SLOPE = (-0.65, -0.4)
SLOPE_DISTANCE = 0.05

Options = Mapping[str, object]


class Method(NamedTuple):
    """What crosses the link, as tables of a run file; both empty: nothing is compressed."""

    forward: Options
    backward: Options
    is_asked_for: bool = False  # whether its slope has a bar


def _method(bits: int, codec: str = "delta", rounding: str = "stochastic", group: int = 16, **options: object) -> Method:
    """`bits` forward, twice as many backward."""
    quantizer = {"bits": bits, "group": group, "rounding": rounding}
    first_visit = {"first_visit": "whole"} if codec == "delta" else {}
    forward = {"codec": codec, **quantizer, **first_visit, **options}
    is_asked_for = forward == {"codec": "delta", "bits": bits, "group": 16, "rounding": "stochastic", "first_visit": "whole"}
    return Method(forward, {"codec": "uniform", **quantizer, "bits": 2 * bits}, is_asked_for)


METHODS: Mapping[str, Method] = {
    SGD: Method({}, {}),
    "AC-SGD 2/4": _method(2),
    "AC-SGD 3/6": _method(3),
    "AC-SGD 4/8": _method(4),
    "AC-SGD 2/4, groups of 32": _method(2, group=32),
    "AC-SGD 2/4, nearest": _method(2, rounding="nearest"),
    "AC-SGD 2/4, first visit in 6 bits": _method(
        2, first_visit={"codec": "uniform", "bits": 6, "group": 16, "rounding": "stochastic"}
    ),
    "direct 2/4": _method(2, codec="uniform"),
}


class Settings(NamedTuple):
    """What the figures depend on. Each T of `ladder` is trained `num_blocks * block` times, with steps of `step / sqrt(T)`."""

    ladder: tuple[int, ...] = (100, 316, 1000, 3162, 10000, 31623, 100000)
    step: float = 1.0
    num_blocks: int = 1
    block: int = 16
    num_measured: int = 1000  # steps of a run at which the full gradient is computed; all of them, if there are no more
    num_samples: int = 512
    num_inputs: int = 8
    num_hidden: int = 32
    noise: float = 0.5
    methods: Mapping[str, Method] = METHODS

    def described(self) -> results.Row:
        """As JSON has it; a result is continued only by the same settings."""
        methods = {name: {"forward": dict(m.forward), "backward": dict(m.backward)} for name, m in self.methods.items()}
        plain: results.Row = json_text.loads(json_text.dumps({**self._asdict(), "methods": methods}))
        return plain

    def cells(self) -> list[tuple[str, int, int]]:
        """(method, T, block) in the order in which they are trained: the cheap ones of all methods first."""
        return [(name, t, block) for t in self.ladder for block in range(self.num_blocks) for name in self.methods]


def run(*, json: bool = False, path: Path = RESULTS, settings: Settings = Settings()) -> results.Row:  # noqa: B008 - frozen
    """Train every cell that `path` does not hold, print tables, and with `json` write each cell to `path` as it ends.

    A run that was stopped goes on where it was; to measure a cell anew, delete its row, or the file. Without `json` no file is
    read.

    Raises:
        ConfigError: `path` is no result, or one of other settings.
    """
    rows = _finished(path, settings) if json else []
    outcome = _outcome(rows, settings)
    done = {_cell_of(row) for row in rows}
    for cell in settings.cells():
        if cell not in done:
            rows.append(_train(settings, *cell))
            sys.stdout.write(f"{cell[0]}, T = {cell[1]}, block {cell[2]}: {rows[-1]['mean_squared_gradient']}\n")
            outcome = _outcome(rows, settings)
            if json:
                results.write(path, outcome)
    sys.stdout.write("\n".join(["", *slopes_table(outcome), "", *means_table(outcome), "", *bars_table(outcome)]) + "\n")
    return outcome


def _finished(path: Path, settings: Settings) -> list[results.Row]:
    if not path.exists():
        return []
    try:
        found = json_text.loads(path.read_text())
        rows, before = list(found["rows"]), found["settings"]
        cells = {_cell_of(row) for row in rows}
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is not a result of {COMMAND}; delete it, and run again") from error
    if before != settings.described() or not cells <= set(settings.cells()):
        raise ConfigError(f"{path} was measured with other settings; delete it to measure anew")
    return rows


def _cell_of(row: results.Row) -> tuple[str, int, int]:
    return row["method"], row["T"], row["block"]


def _outcome(rows: Sequence[results.Row], settings: Settings) -> results.Row:
    order = {cell: place for place, cell in enumerate(settings.cells())}
    outcome = results.result(COMMAND, sorted(rows, key=lambda row: order[_cell_of(row)]), [])
    outcome["settings"] = settings.described()
    outcome["bars"] = _bars(outcome, settings) if len(rows) == len(order) else []
    return outcome


def _train(settings: Settings, name: str, num_steps: int, block: int) -> results.Row:
    from pipecomp.experiments import _two_machines as machines

    problem = machines.make_problem(settings.num_samples, settings.num_inputs, settings.num_hidden, settings.noise)
    runs = range(block * settings.block, (block + 1) * settings.block)
    method, link = settings.methods[name], None
    if method.forward:
        codecs = machines.make_codec(method.forward), machines.make_codec(method.backward)
        shape = (len(runs), settings.num_samples, settings.num_hidden)
        link = machines.Link(*codecs, shape, f"rounding/{name}/{num_steps}/{block}")
    step_size = settings.step / math.sqrt(num_steps)
    found = machines.train(problem, runs, num_steps, step_size, link, settings.num_measured)
    return {
        "method": name,
        "T": num_steps,
        "block": block,
        "step_size": _rounded(step_size),
        "mean_squared_gradient": _rounded(found.mean_squared_gradient.mean()),
        "final_loss": _rounded(found.final_loss.mean()),
        "c_q": _rounded(link.forward_error.value) if link else None,
        "c_q_backward": _rounded(link.backward_error.value) if link else None,
        "largest_weight": _rounded(found.largest_weight),
        "runs": [_rounded(value) for value in found.mean_squared_gradient],
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")


# ---------------------------------------------------------------------------------------------------------------- slopes


def slope(ladder: Sequence[int], means: Array) -> float:
    """Least-squares slope of log(means) over log(ladder)."""
    return float(np.polyfit(np.log(np.asarray(ladder, np.float64)), np.log(means), 1)[0])


def means_of(outcome: results.Row, method: str) -> Array:
    """(T's, runs): each run's mean of |grad f|^2, for the T's of the ladder that the method has finished."""
    rows = [row for row in outcome["rows"] if row["method"] == method]
    ladder = sorted({row["T"] for row in rows})
    whole = [[value for row in rows if row["T"] == t for value in row["runs"]] for t in ladder]
    num_runs = outcome["settings"]["num_blocks"] * outcome["settings"]["block"]
    return np.array([values for values in whole if len(values) == num_runs]).reshape(-1, num_runs)


def jackknife(ladder: Sequence[int], means: Array, baseline: Array) -> float:
    """Standard error of the slope's distance from the baseline's, from leaving out one run of both at a time."""
    num_runs = means.shape[1]
    kept = [np.arange(num_runs) != out for out in range(num_runs)]
    left = np.array([slope(ladder, means[:, k].mean(1)) - slope(ladder, baseline[:, k].mean(1)) for k in kept])
    return float(np.sqrt((num_runs - 1) * left.var()))


def _bars(outcome: results.Row, settings: Settings) -> list[results.Row]:
    slopes = {name: slope(settings.ladder, means_of(outcome, name).mean(1)) for name in settings.methods}
    low, high = SGD_SLOPE
    bars: list[results.Row] = [
        {
            "name": "slope of SGD",
            "value": round(slopes[SGD], 4),
            "bar": f"{low} to {high}",
            "holds": low <= slopes[SGD] <= high,
        }
    ]
    for name, method in settings.methods.items():
        if method.is_asked_for:
            distance = slopes[name] - slopes[SGD]
            bars.append(
                {
                    "name": f"slope of {name} minus that of SGD",
                    "value": round(distance, 4),
                    "bar": f"-{SLOPE_DISTANCE} to {SLOPE_DISTANCE}",
                    "holds": abs(distance) <= SLOPE_DISTANCE,
                }
            )
    return bars


# ---------------------------------------------------------------------------------------------------------------- tables


def slopes_table(outcome: results.Row) -> list[str]:
    """Markdown, one row a method; ± is a standard error over runs; the loss and c_Q are those of the largest T."""
    ladder = outcome["settings"]["ladder"]
    baseline = means_of(outcome, SGD)
    lines = [
        f"| method | slope | minus SGD's | loss after {ladder[-1]:,} steps | of SGD's | c_Q forward | c_Q backward |",
        "| --- " * 7 + "|",
    ]
    for name in outcome["settings"]["methods"]:
        means = means_of(outcome, name)
        if len(means) < len(ladder) or len(baseline) < len(ladder):
            continue
        last, sgd = ([row for row in outcome["rows"] if (row["method"], row["T"]) == (m, ladder[-1])] for m in (name, SGD))
        found, loss = slope(ladder, means.mean(1)), _mean(last, "final_loss")
        compared = ["–"] * 4
        if name != SGD:
            distance = found - slope(ladder, baseline.mean(1))
            compared = [f"{distance:+.4f} ± {jackknife(ladder, means, baseline):.4f}", f"{loss / _mean(sgd, 'final_loss'):.3f}"]
            compared += [f"{c_q(last, key):.3f}" for key in ("c_q", "c_q_backward")]
        lines.append(f"| {name} | {found:.3f} | {compared[0]} | {loss:.4f} | {' | '.join(compared[1:])} |")
    return lines


def means_table(outcome: results.Row) -> list[str]:
    """Markdown, one row a method, one column a T: the mean of |grad f|^2 over steps and runs."""
    ladder = outcome["settings"]["ladder"]
    lines = ["| method | " + " | ".join(f"{t:,}" for t in ladder) + " |", "| --- " * (len(ladder) + 1) + "|"]
    for name in outcome["settings"]["methods"]:
        means = means_of(outcome, name)
        if len(means) == len(ladder):
            lines.append(f"| {name} | " + " | ".join(f"{value:.4f}" for value in means.mean(1)) + " |")
    return lines


def bars_table(outcome: results.Row) -> list[str]:
    """Markdown, one row a bar."""
    lines = ["| asked for | found | bar | holds |", "| --- | --- | --- | --- |"]
    return lines + [
        f"| {bar['name']} | {bar['value']:.4f} | {bar['bar']} | {'yes' if bar['holds'] else 'no'} |" for bar in outcome["bars"]
    ]


def c_q(rows: Sequence[results.Row], key: str) -> float:
    """Root mean square over blocks, which hold equally many vectors."""
    return math.sqrt(_mean([{key: row[key] ** 2} for row in rows], key))


def _mean(rows: Sequence[Mapping[str, Any]], key: str) -> float:
    return float(sum(row[key] for row in rows) / len(rows))
