"""The command `pipecomp bench plots`: results drawn beside their files. Knows results and matplotlib; measures nothing.

A plot is a function of its result alone: the same result gives the same bytes, without dates or random names.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from pipecomp import results
from pipecomp.errors import ConfigError

FOLDER = Path("docs/results")
_STYLE: Final = {"svg.hashsalt": "pipecomp", "svg.fonttype": "none", "font.size": 9, "axes.grid": True, "grid.alpha": 0.3}

Drawing = Callable[[results.Row, Any], None]
"""Takes a result and an empty matplotlib figure."""


def draw_all(folder: Path = FOLDER) -> list[Path]:
    """Draw NAME.svg for every NAME.json of the folder that has a drawing; tell and return what was written.

    Raises:
        ConfigError: matplotlib is missing, or there is nothing to draw.
    """
    names = [name for name in DRAWINGS if (folder / f"{name}.json").exists()]
    if not names:
        raise ConfigError(f"no results to draw in {folder}; there could be: {', '.join(f'{name}.json' for name in DRAWINGS)}")
    matplotlib = _matplotlib()
    written = []
    for name in names:
        with matplotlib.rc_context(_STYLE):
            figure = importlib.import_module("matplotlib.figure").Figure(figsize=(6.4, 4.2), layout="constrained")
            DRAWINGS[name](json.loads((folder / f"{name}.json").read_text()), figure)
            path = folder / f"{name}.svg"
            figure.savefig(path, metadata={"Date": None, "Creator": None})
        sys.stdout.write(f"written to {path}\n")
        written.append(path)
    return written


def _matplotlib() -> Any:  # noqa: ANN401 - it has no types
    try:
        return importlib.import_module("matplotlib")
    except ImportError as error:
        raise ConfigError("plots need matplotlib, which is not installed; pip install 'pipecomp[plots]'") from error


def draw_convergence(result: results.Row, figure: Any) -> None:  # noqa: ANN401 - matplotlib has no types
    """Means of |grad f|^2 over the number of steps, both logarithmic, and a line of slope -1/2 to compare with."""
    from pipecomp.experiments import convergence

    axes = figure.add_subplot()
    ladder = result["settings"]["ladder"]
    for name, marker in zip(result["settings"]["methods"], "o^vs<>xD*+p", strict=False):
        means = convergence.means_of(result, name)
        if len(means) == len(ladder):
            found = convergence.slope(ladder, means.mean(1))
            axes.plot(ladder, means.mean(1), marker=marker, markersize=4, linewidth=1, label=f"{name}: {found:.3f}")
    first = convergence.means_of(result, convergence.SGD).mean(1)[0]
    axes.plot(ladder, [first * 0.6 * (t / ladder[0]) ** -0.5 for t in ladder], "k--", linewidth=0.8, label="slope -0.5")
    axes.set(xscale="log", yscale="log", xlabel="steps T, each of size 1 / √T", ylabel="mean of |∇f|² over the T steps")
    axes.legend(title="method: fitted slope", fontsize=8)


def draw_quality(result: results.Row, figure: Any) -> None:  # noqa: ANN401 - matplotlib has no types
    """See `quality_plot`."""
    from pipecomp.experiments import quality_plot

    quality_plot.draw_quality(result, figure)


def draw_links(result: results.Row, figure: Any) -> None:  # noqa: ANN401 - matplotlib has no types
    """See `links_plot`."""
    from pipecomp.experiments import links_plot

    links_plot.draw_links(result, figure)


DRAWINGS: Final[Mapping[str, Drawing]] = {"convergence": draw_convergence, "links": draw_links, "quality": draw_quality}
"""Result name -> what draws it."""
