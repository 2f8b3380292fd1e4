"""The plot of `pipecomp bench links`: sequences a second over what a link carries. Knows rows and matplotlib's figures; runs
nothing."""

from __future__ import annotations

from typing import Any

from pipecomp.experiments.links_bars import curves
from pipecomp.experiments.links_cells import SETTINGS

_LOOKS = {"fp32": "ks--", "fw4bw8": "o-", "fw3bw6": "^-", "fw2bw4": "v-"}


def draw_links(result: dict[str, Any], figure: Any) -> None:  # noqa: ANN401 - matplotlib has no types
    """A panel for each setting, measured points, links on a logarithmic axis."""
    panels = [setting for setting in SETTINGS if curves(result["rows"], setting.key)]
    for index, setting in enumerate(panels):
        axes = figure.add_subplot(1, len(panels), index + 1)
        for method, points in curves(result["rows"], setting.key).items():
            axes.plot(*zip(*points, strict=True), _LOOKS[method], markersize=4, linewidth=1, label=method)
        axes.set(xscale="log", xlabel="one connection carries, Mbit/s", ylim=(0, None))
        axes.set_title(setting.key, fontsize=8)
        if not index:
            axes.set_ylabel("sequences/s")
            axes.legend(fontsize=7)
