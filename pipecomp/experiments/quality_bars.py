"""What the figures of `pipecomp bench quality` come to: medians, tables, and the bars they are held to. Knows rows; trains
nothing."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pipecomp import results
from pipecomp.experiments.quality_cells import (
    ACSGD,
    ACSGD_WHOLE,
    DIRECT,
    FP32,
    UNTRAINED,
    Cell,
    Workload,
    cells,
    count_epochs,
)

Row = dict[str, Any]
EXCESS = {("a", "fw4bw8"): 1.0, ("b", "fw4bw8"): 2.0, ("a", "fw3bw6"): 3.0, ("b", "fw3bw6"): 2.0, ("c", "fw3bw6"): 0.6}
"""Most percent by which AC-SGD's held-out loss may exceed fp32's."""
GAP_BITS, LEAST_CLOSED, MOST_FIRST_VISIT = "fw2bw4", 0.75, 0.1
"""Where direct quantization loses much: which part of that AC-SGD has to win back, and what compressing first visits may cost."""
ONE_EPOCH_BITS, LEAST_RATIO = "fw3bw6", 5.0
"""One epoch, all first visits: how many times less than fp32 it sends, evaluation and all other kinds counted."""
_NOT_COUNTED = ("weights", "control")  # the same in every method


class Group(NamedTuple):
    """The runs that differ in their seed only."""

    workload: str
    method: str
    bits: str
    epochs: int


class Medians:
    """Medians over seeds; a group counts only when all of its seeds are there."""

    def __init__(self, rows: Sequence[Row], workloads: Sequence[Workload]) -> None:
        self.workloads = workloads
        there = {Cell(*(row[field] for field in Cell._fields)): row for row in rows}
        wanted: dict[Group, list[Cell]] = {}
        for workload in workloads:
            for cell in cells(workload):
                wanted.setdefault(Group(*cell[:4]), []).append(cell)
        self.groups = {
            group: [there[cell] for cell in members]
            for group, members in wanted.items()
            if all(cell in there for cell in members)
        }
        self.num_missing = sum(cell not in there for members in wanted.values() for cell in members)

    def nbytes(self, group: Group) -> float | None:
        """Median of all bytes that a run has sent, headers and evaluation included."""
        return self.median(group, sent_nbytes)

    def median(self, group: Group, of: Callable[[Row], float]) -> float | None:
        rows = self.groups.get(group)
        return None if rows is None else statistics.median(of(row) for row in rows)

    def excess(self, group: Group) -> float | None:
        """By how many percent a group's loss is above that of fp32 with the same seed, as median over seeds.

        Seeds differ in what is held out, and so in loss, by more than methods do: runs of two seeds say nothing of each other.
        """
        own, fp32 = self._losses(group, group.method), self._losses(group, FP32)
        if own is None or fp32 is None:
            return None
        return statistics.median(100 * (own[seed] / fp32[seed] - 1) for seed in own)

    def gap(self, group: Group, above: str, below: str) -> float | None:
        """How far the loss of method `above` is over that of `below`, as a part of direct quantization's distance to fp32,
        seed by seed; the median over seeds.

        None where a run is missing or where direct quantization is no worse than fp32 with one of the seeds.
        """
        fp32, direct, high, low = (self._losses(group, method) for method in (FP32, DIRECT, above, below))
        if fp32 is None or direct is None or high is None or low is None or any(direct[seed] <= fp32[seed] for seed in fp32):
            return None
        return statistics.median((high[seed] - low[seed]) / (direct[seed] - fp32[seed]) for seed in fp32)

    def _losses(self, group: Group, method: str) -> dict[int, float] | None:
        """Held-out loss by seed of another method on the same."""
        rows = self.groups.get(group._replace(method=method, bits="" if method == FP32 else group.bits))
        return None if rows is None else {row["seed"]: row["held_out_loss"] for row in rows}

    def ratio(self, group: Group) -> float | None:
        """How many times more fp32 sends."""
        own, fp32 = self.nbytes(group), self.nbytes(group._replace(method=FP32, bits=""))
        return None if own is None or fp32 is None else fp32 / own


def sent_nbytes(row: Row) -> int:
    """Payload and headers of every kind of traffic between stages."""
    return sum(
        part["payload_nbytes"] + part["header_nbytes"] for kind, part in row["traffic"].items() if kind not in _NOT_COUNTED
    )


def bars(rows: Sequence[Row], workloads: Sequence[Workload]) -> list[Row]:
    """What is asked of the figures; a bar whose runs are not all there is left out.

    For one epoch nothing is asked of how much of direct quantization's loss is won back: every visit is a first visit, which has
    bits of its own, so that the figure would tell the bits of first visits and not what coding changes is worth.
    """
    medians = Medians(rows, workloads)
    return [bar for workload in workloads for epochs, _ in workload.grid for bar in _of(medians, workload, epochs)]


def _of(medians: Medians, workload: Workload, epochs: int) -> Iterator[Row]:
    where = f"({workload.key}), {count_epochs(epochs)}"
    for bits in workload.bits:
        group = Group(workload.key, ACSGD, bits, epochs)
        most = EXCESS.get((workload.key, bits))
        excess = medians.excess(group)
        if most is not None and excess is not None:
            yield _at_most(f"{where}, {bits}: held-out loss above fp32's, percent", excess, most)
        if workload.key == "a" and bits == GAP_BITS:
            yield from _of_gap(medians, group, where)
        ratio = medians.ratio(group)
        if workload.key == "a" and epochs == 1 and bits == ONE_EPOCH_BITS and ratio is not None:
            name = f"{where}, {bits}: times fewer bytes than fp32, all kinds of traffic"
            yield _at_least(name, ratio, LEAST_RATIO)


def _of_gap(medians: Medians, group: Group, where: str) -> Iterator[Row]:
    left, first_visit = medians.gap(group, ACSGD, FP32), medians.gap(group, ACSGD, ACSGD_WHOLE)
    if left is not None and group.epochs > 1:
        name = f"{where}, {group.bits}: part of direct quantization's loss that is won back"
        yield _at_least(name, 1 - left, LEAST_CLOSED)
    if first_visit is not None:
        name = f"{where}, {group.bits}: what a compressed first visit costs, as part of direct quantization's loss"
        yield _at_most(name, first_visit, MOST_FIRST_VISIT)


def _at_most(name: str, value: float, bar: float) -> Row:
    value = round(value, 4)  # what is shown is what is judged
    return {"name": name, "value": value, "bar": bar, "holds": value <= bar}


def _at_least(name: str, value: float, bar: float) -> Row:
    value = round(value, 4)
    return {"name": name, "value": value, "bar": bar, "holds": value >= bar}


# ------------------------------------------------------------------------------------------------------------- tables


HEAD = ("epochs", "method", "bits", "held-out loss", "over fp32", "won back", "bits/value forward, backward", "sent")


def table(medians: Medians, workload: Workload) -> list[list[str]]:
    """A line for each method at each number of epochs: medians over seeds, and the range where there are several."""
    lines = []
    groups = dict.fromkeys(Group(*cell[:4]) for cell in cells(workload))
    with_accuracy = has_accuracy(medians, workload)
    for group in groups:
        rows = medians.groups.get(group)
        if rows is None:
            continue
        line = [str(group.epochs), group.method, group.bits or "–", spread(rows, "held_out_loss")]
        if with_accuracy:
            line.append(spread(rows, "accuracy", percent=True))
        lines.append(line + _against_fp32(medians, group) + [_bits(rows[0]), f"{medians.nbytes(group) or 0:,.0f}"])
    return lines


def has_accuracy(medians: Medians, workload: Workload) -> bool:
    """Whether the workload's task has one."""
    rows = [row for group, rows in medians.groups.items() if group.workload == workload.key for row in rows]
    return any(row["accuracy"] is not None for row in rows)


def head(medians: Medians, workload: Workload) -> list[str]:
    """The heads of `table`'s columns."""
    names = list(HEAD)
    return [*names[:4], "accuracy", *names[4:]] if has_accuracy(medians, workload) else names


def spread(rows: Sequence[Mapping[str, Any]], field: str, *, percent: bool = False) -> str:
    """The median, and least and largest where there are several."""
    values = [row[field] for row in rows if row[field] is not None]
    if not values:
        return "–"

    def text(value: float) -> str:
        return f"{100 * value:.1f} %" if percent else f"{value:.4f}"

    middle = text(statistics.median(values))
    return middle if len(values) == 1 else f"{middle} ({text(min(values))} to {text(max(values))})"


def report(outcome: Row, workloads: Sequence[Workload]) -> str:
    """Tables and bars for a console."""
    medians = Medians(outcome["rows"], workloads)
    lines = []
    for workload in workloads:
        body = table(medians, workload)
        if body:
            lines += ["", f"({workload.key}) {workload.title}", *_aligned([head(medians, workload), *body])]
    lines += ["", *results.verdicts(outcome["bars"])]
    if medians.num_missing:
        lines.append(f"{medians.num_missing} runs have no figures yet; bars that need them are left out")
    return "\n".join(lines)


def _against_fp32(medians: Medians, group: Group) -> list[str]:
    if group.method in (FP32, UNTRAINED):
        return ["–", "–"]
    excess, left = medians.excess(group), medians.gap(group, group.method, FP32)
    closed = "–" if left is None or group.method == DIRECT else f"{100 * (1 - left):.0f} %"
    return ["–" if excess is None else f"{excess:+.2f} %", closed]


def _bits(row: Row) -> str:
    measured = row["bits_per_value"]
    if "forward" not in measured:
        return "–"
    return f"{measured['forward']:.2f}, {measured['backward']:.2f}"


def _aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
