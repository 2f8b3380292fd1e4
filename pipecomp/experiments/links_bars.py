"""What the figures of `pipecomp bench links` come to: tables, and the bars they are held to. Knows rows; runs nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipecomp import results
from pipecomp.experiments.links_cells import FP32, METHODS, UNSHAPED, Setting, rate_nbits_per_s
from pipecomp.results import Row

LEAST_RATIO, LEAST_FAST_FP32_RATIO = 0.93, 0.85
"""Of the ideal: every cell, but for fp32 over fast links, where the messages of eight machines are copied by one."""
_FAST_NBITS_PER_S = 300e6
MOST_SYNTHETIC_NS = 0.5
HEADLINE_SETTING, HEADLINE_METHOD, HEADLINE_RATE = "gpt2-xl", "fw3bw6", "100mbit"
LEAST_SEQUENCES_PER_S, LEAST_OF_UNSHAPED = 3.25, 0.81
HEAD = (
    *("rate", "one connection", "method", "sequences/s", "ideal", "of ideal"),
    *("times fp32", "what rules", "coding, other", "cores used"),
)


def bars(rows: Sequence[Row]) -> list[Row]:
    """What is asked of the figures that are there."""
    return [*_ratios(rows), *_headline(rows), *_soundness(rows)]


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
    own = [row for row in rows if row["setting"] == setting.key]
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


def curves(rows: Sequence[Row], setting: str) -> dict[str, list[tuple[float, float]]]:
    """By method, (measured goodput in Mbit/s, sequences a second), the slowest link first."""
    points: dict[str, list[tuple[float, float]]] = {method: [] for method in METHODS}
    for row in rows:
        if row["setting"] == setting:
            points[row["method"]].append((row["goodput_nbits_per_s"] / 1e6, row["sequences_per_s"]))
    return {method: sorted(found) for method, found in points.items() if found}


def report(outcome: Row, settings: Sequence[Setting]) -> str:
    """Tables and bars for a console."""
    lines = []
    for setting in settings:
        body = table(outcome["rows"], setting)
        if body:
            widths = [max(map(len, column)) for column in zip(HEAD, *body, strict=True)]
            lines += ["", setting.title]
            lines += [
                "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in (HEAD, *body)
            ]
    return "\n".join([*lines, "", *results.verdicts(outcome["bars"])])
