"""What the figures of `pipecomp bench links` come to: tables, and the bars they are held to. Knows rows; runs nothing."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from pipecomp import results
from pipecomp.experiments.links_cells import FP32, METHODS, STEPS_PER_EPOCH, UNSHAPED, Cell, Setting, rate_nbits_per_s
from pipecomp.results import Row

LEAST_RATIO, LEAST_FAST_FP32_RATIO = 0.93, 0.85
"""Of the ideal: every cell, but for fp32 over fast links, where the messages of eight machines are copied by one."""
_FAST_NBITS_PER_S = 300e6
LEAST_DELAYED_RATIO = 0.97
"""Of the ideal with the same delay."""
MOST_FIRST_TO_LAST = 1.1
"""A step of a whole run's first epoch, in which whole values cross, over one of its last."""
PUBLISHED_FP32_PER_S = 0.5
"""Sequences a second that were published of fp32 in the setting, over links of 100 Mbit/s."""
RUN_EPOCHS = (1, 3, 10)
MOST_SYNTHETIC_NS = 0.5
HEADLINE_SETTING, HEADLINE_METHOD, HEADLINE_RATE = "gpt2-xl", "fw3bw6", "100mbit"
LEAST_SEQUENCES_PER_S, LEAST_OF_UNSHAPED = 3.25, 0.81
HEAD = (
    *("rate", "one connection", "method", "sequences/s", "ideal", "of ideal"),
    *("times fp32", "what rules", "coding, other", "cores used"),
)
DELAY_HEAD = ("delay each way", "one connection", "sequences/s", "ideal", "of ideal", "what rules", "coding, other")
RUN_HEAD = ("method", *(f"{num} epoch{'s' if num > 1 else ''}" for num in RUN_EPOCHS), "first epoch's step", "last epoch's step")


def bars(rows: Sequence[Row]) -> list[Row]:
    """What is asked of the figures that are there."""
    grid = [row for row in rows if Cell.of_row(row).part == "grid"]
    return [*_ratios(grid), *_headline(grid), *_delays(rows), *_whole_runs(rows), *_soundness(rows)]


def _ratios(rows: Sequence[Row]) -> Iterator[Row]:
    for row in rows:
        rate = rate_nbits_per_s(row["rate"])
        is_fast_fp32 = row["method"] == FP32 and (rate is None or rate > _FAST_NBITS_PER_S)
        name = f"{row['setting']}, {row['method']}, {row['rate']}: part of the ideal"
        yield _at_least(name, row["ratio"], LEAST_FAST_FP32_RATIO if is_fast_fp32 else LEAST_RATIO)


def _headline(rows: Sequence[Row]) -> Iterator[Row]:
    there = {(row["setting"], row["method"], row["rate"]): row["sequences_per_s"] for row in rows}
    slow = there.get((HEADLINE_SETTING, HEADLINE_METHOD, HEADLINE_RATE))
    fast = there.get((HEADLINE_SETTING, HEADLINE_METHOD, UNSHAPED))
    where = f"{HEADLINE_SETTING}, {HEADLINE_METHOD}, {HEADLINE_RATE}"
    if slow is not None:
        yield _at_least(f"{where}: sequences a second", slow, LEAST_SEQUENCES_PER_S)
    if slow is not None and fast is not None:
        yield _at_least(f"{where}: part of its unshaped rate", round(slow / fast, 4), LEAST_OF_UNSHAPED)


def _delays(rows: Sequence[Row]) -> Iterator[Row]:
    for row in rows:
        if row["delay_ms"]:
            yield _at_least(f"{Cell.of_row(row)}: part of the ideal with that delay", row["ratio"], LEAST_DELAYED_RATIO)


def _whole_runs(rows: Sequence[Row]) -> Iterator[Row]:
    for row in rows:
        if row["num_epochs"] > 1:
            first, last = step_of_epochs(row)
            name = f"{Cell.of_row(row)}: a step of the first epoch over one of the last"
            yield _at_most(name, round(first / last, 4), MOST_FIRST_TO_LAST)


def step_of_epochs(row: Row) -> tuple[float, float]:
    """Median step of a whole run's first epoch, and of its last, in seconds."""
    times = [*row["warm_up_times_s"], *row["times_s"]]
    return statistics.median(times[:STEPS_PER_EPOCH]), statistics.median(times[-STEPS_PER_EPOCH:])


def _soundness(rows: Sequence[Row]) -> Iterator[Row]:
    if not rows:
        return
    differs = sum(row["payload_differs_nbytes"] for row in rows)
    yield _at_most("bytes by which what was sent differs from what the codecs say, all cells", differs, 0)
    cost = max(max(row["synthetic_ns_per_value"].values()) for row in rows)
    yield _at_most("the synthetic model's own work, ns a value, the dearest cell", cost, MOST_SYNTHETIC_NS)


def _at_least(name: str, value: float, bar: float) -> Row:
    return {"name": name, "value": value, "bar": bar, "holds": value >= bar}


def _at_most(name: str, value: float, bar: float) -> Row:
    return {"name": name, "value": value, "bar": bar, "holds": value <= bar}


# ------------------------------------------------------------------------------------------------------------- tables


def table(rows: Sequence[Row], setting: Setting) -> list[list[str]]:
    """A line for each cell of a setting, in the order of the rows."""
    own = [row for row in rows if row["setting"] == setting.key and Cell.of_row(row).part == "grid"]
    fp32 = {row["rate"]: row["sequences_per_s"] for row in own if row["method"] == FP32}
    return [_line(row, fp32.get(row["rate"])) for row in own]


def _line(row: Row, fp32: float | None) -> list[str]:
    others = f", {row['cores_used_by_others']:.1f} by others" if row["cores_used_by_others"] > 0.1 else ""
    return [
        row["rate"],
        f"{row['goodput_nbits_per_s'] / 1e6:,.1f} Mbit/s",
        row["method"],
        f"{row['sequences_per_s']:.3f}",
        f"{row['ideal_sequences_per_s']:.3f}",
        f"{100 * row['ratio']:.1f} %",
        "–" if fp32 is None or row["method"] == FP32 else f"{row['sequences_per_s'] / fp32:.2f}",
        row["bound"],
        f"{100 * row['time']['coding']:.1f} %, {100 * row['time']['other']:.1f} %",
        f"{row['cores_used']:.2f} of {row['num_cores']}{others}",
    ]


def delay_table(rows: Sequence[Row]) -> list[list[str]]:
    """A line for each delay, none first."""
    cells = {Cell.of_row(row): row for row in rows}
    delayed = [cell for cell in cells if cell.delay_ms]
    undelayed = [cell for cell in dict.fromkeys(cell._replace(delay_ms=0.0) for cell in delayed) if cell in cells]
    return [_delay_line(cells[cell]) for cell in (*undelayed, *delayed)]


def _delay_line(row: Row) -> list[str]:
    return [
        f"{row['delay_ms']:g} ms" if row["delay_ms"] else "none",
        f"{row['goodput_nbits_per_s'] / 1e6:,.1f} Mbit/s",
        f"{row['sequences_per_s']:.3f}",
        f"{row['ideal_sequences_per_s']:.3f}",
        f"{100 * row['ratio']:.1f} %",
        row["bound"],
        f"{100 * row['time']['coding']:.1f} %, {100 * row['time']['other']:.1f} %",
    ]


def run_table(rows: Sequence[Row], setting: Setting) -> list[list[str]]:
    """Whole runs of a setting: how long they take, then what was published of fp32. Times that were not waited for, but are
    an epoch's as many times, stand in brackets."""
    runs = [row for row in rows if row["num_epochs"] and row["setting"] == setting.key]
    if not runs:
        return []
    published_s = STEPS_PER_EPOCH * setting.batch_size / PUBLISHED_FP32_PER_S
    step = f"({published_s / STEPS_PER_EPOCH:.1f} s)"
    published = ["fp32, as published", *(f"({num * published_s:.0f} s)" for num in RUN_EPOCHS), step, step]
    return [*map(_run_line, runs), published]


def _run_line(row: Row) -> list[str]:
    ends = row["epoch_ends_s"]
    times = [f"{ends[num - 1]:.1f} s" if num <= len(ends) else f"({num * ends[-1] / len(ends):.0f} s)" for num in RUN_EPOCHS]
    first, last = step_of_epochs(row)
    return [row["method"], *times, f"{first:.2f} s", f"{last:.2f} s"]


def curves(rows: Sequence[Row], setting: str) -> dict[str, list[tuple[float, float]]]:
    """By method, (measured goodput in Mbit/s, sequences a second), the slowest link first."""
    points: dict[str, list[tuple[float, float]]] = {method: [] for method in METHODS}
    for row in rows:
        if row["setting"] == setting and Cell.of_row(row).part == "grid":
            points[row["method"]].append((row["goodput_nbits_per_s"] / 1e6, row["sequences_per_s"]))
    return {method: sorted(found) for method, found in points.items() if found}


def report(outcome: Row, settings: Sequence[Setting]) -> str:
    """Tables and bars for a console."""
    lines = []
    rows = outcome["rows"]
    for setting in settings:
        lines += _for_console(setting.title, HEAD, table(rows, setting))
        lines += _for_console(f"Whole runs, {STEPS_PER_EPOCH} steps an epoch", RUN_HEAD, run_table(rows, setting))
    lines += _for_console("With a delay", DELAY_HEAD, delay_table(rows))
    return "\n".join([*lines, "", *results.verdicts(outcome["bars"])])


def _for_console(title: str, head: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    if not body:
        return []
    widths = [max(map(len, column)) for column in zip(head, *body, strict=True)]
    rows = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in (head, *body)]
    return ["", title, *rows]
