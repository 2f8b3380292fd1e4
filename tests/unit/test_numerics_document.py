"""The tables of `docs/numerics.md` are those of the results that it names, and of the code."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from pipecomp.experiments.quantizers import losses_table
from pipecomp.native.ops import PLANES

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "numerics.md").read_text(encoding="utf-8")


def table(first_cell: str) -> list[list[str]]:
    """Rows of the table whose head starts so."""
    start = TEXT.index(f"| {first_cell} |")
    lines = TEXT[start:].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def results(name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((DOCS / "results" / f"{name}.json").read_text())["rows"]
    return rows


COLUMNS = ["normal 768", "t3 768", "outliers 768"] + [
    f"{model}, {what}" for model in ("SmolLM2-135M", "MiniLM") for what in ("activation", "change", "gradient")
]


def test_the_errors_are_the_measured_ones() -> None:
    measured = {(row["form"], row["bits"], row["data"]): row for row in results("errors")}
    rows = table("quantizer")
    assert len(rows) > 15
    for form, bits, width, bound, *cells in rows:
        found = [measured[form, int(bits), data] for data in COLUMNS]
        assert (width, bound) == (f"{found[0]['bits_per_value']:.2f}", f"{found[0]['bound']:.3f}")
        assert cells == [f"{row['c_q']:.3f} ({row['times_bound']:.2f})" for row in found], form


def test_what_is_asked_of_the_errors_holds() -> None:
    bars = json.loads((DOCS / "results" / "errors.json").read_text())["bars"]
    assert len(bars) == 12
    assert [bar["name"] for bar in bars if not bar["holds"]] == []


def test_the_losses_are_the_measured_ones() -> None:
    expected = losses_table(json.loads((DOCS / "results" / "quantizers.json").read_text()))
    start = TEXT.index(expected[0])
    assert TEXT[start:].split("\n\n")[0].splitlines() == expected


@pytest.mark.parametrize("bits", range(1, 9))
def test_the_planes_are_those_of_the_code(bits: int) -> None:
    found = re.search(rf"\b{bits}: ([\d,]+?)(?:,? {{2}}|$)", TEXT[TEXT.index("widths") :])
    assert found
    assert tuple(int(width) for width in found.group(1).split(",")) == PLANES[bits]
