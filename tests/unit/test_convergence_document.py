"""The tables and the plot of `docs/convergence.md` are those of the result that it names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipecomp.experiments import convergence

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "convergence.md").read_text(encoding="utf-8")
RESULT = json.loads((DOCS / "results" / "convergence.json").read_text())


@pytest.mark.parametrize("table", [convergence.slopes_table, convergence.means_table, convergence.bars_table])
def test_a_table_is_that_of_the_result(table):
    lines = table(RESULT)
    assert len(lines) > 4
    assert "\n\n" + "\n".join(lines) + "\n\n" in TEXT


def test_the_result_is_one_of_the_settings_that_are_run():
    assert RESULT["settings"] == convergence.Settings().described()
    assert {(row["method"], row["T"], row["block"]) for row in RESULT["rows"]} == set(convergence.Settings().cells())


def test_the_bars_are_those_that_the_rows_give():
    assert RESULT["bars"] == convergence._bars(RESULT, convergence.Settings())


def test_the_plot_shows_the_slopes_of_the_result():
    plot = (DOCS / "results" / "convergence.svg").read_text(encoding="utf-8")
    for name in RESULT["settings"]["methods"]:
        means = convergence.means_of(RESULT, name).mean(1)
        assert f"{name}: {convergence.slope(RESULT['settings']['ladder'], means):.3f}" in plot.replace("−", "-")


def test_the_text_names_the_problem_that_is_trained():
    settings = convergence.Settings()
    for words in (
        f"{settings.num_inputs} inputs",
        f"{settings.num_hidden} hidden units",
        f"| {settings.num_samples}; x standard normal",
        f"standard deviation {settings.noise}",
        f"{settings.num_hidden * (settings.num_inputs + 1)} weights for {settings.num_samples} noisy labels",
        f"{settings.num_blocks * settings.block} runs",
        f"up to T = {settings.num_measured}",
    ):
        assert words in TEXT, words


def test_the_largest_weight_is_the_measured_one():
    assert f"was {max(row['largest_weight'] for row in RESULT['rows']):.2f}." in TEXT
