"""The plot of `pipecomp bench quality`: what each way of compressing costs, by bits and epochs. Knows rows and matplotlib's
figures; trains nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipecomp.experiments.quality_bars import Group, Medians
from pipecomp.experiments.quality_cells import ACSGD, ACSGD_WHOLE, DIRECT, WORKLOADS, Workload

_LOOKS = {DIRECT: ("direct quantization", "s--"), ACSGD_WHOLE: ("AC-SGD, first visits whole", "^:"), ACSGD: ("AC-SGD", "o-")}


def draw_quality(result: dict[str, Any], figure: Any, workloads: Sequence[Workload] = WORKLOADS) -> None:  # noqa: ANN401 - untyped
    """A panel for each workload and number of epochs: percent by which the median held-out loss is above that of fp32."""
    medians = Medians(result["rows"], workloads)
    panels = [(workload, epochs) for workload in workloads for epochs, _ in workload.grid if _lines(medians, workload, epochs)]
    for index, (workload, epochs) in enumerate(panels):
        axes = figure.add_subplot(1, len(panels), index + 1)
        for method, (bits, excess) in _lines(medians, workload, epochs).items():
            label, look = _LOOKS[method]
            axes.plot(bits, excess, look, markersize=4, linewidth=1, label=label)
        axes.axhline(0, color="black", linewidth=0.8)
        axes.set_title(f"({workload.key}) {epochs} ep.", fontsize=8)
        axes.tick_params(axis="x", labelrotation=45)
        if not index:
            axes.set_ylabel("held-out loss above that of fp32, %")
            axes.legend(fontsize=7)


def _lines(medians: Medians, workload: Workload, epochs: int) -> dict[str, tuple[list[str], list[float]]]:
    lines = {}
    for method in _LOOKS:
        found = {bits: medians.excess(Group(workload.key, method, bits, epochs)) for bits in workload.bits}
        points = {bits: excess for bits, excess in found.items() if excess is not None}
        if points:
            lines[method] = (list(points), list(points.values()))
    return lines
