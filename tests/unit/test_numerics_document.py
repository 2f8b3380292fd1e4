"""The tables of `docs/numerics.md` are those of the results that it names, and of the code."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from pipecomp.native.ops import PLANES

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "numerics.md").read_text(encoding="utf-8")


def table(first_cell: str) -> list[list[str]]:
    """Rows of the table whose head starts so."""
    start = TEXT.index(f"| {first_cell} |")
    lines = TEXT[start:].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_errors_are_the_measured_ones() -> None:
    measured = json.loads((DOCS / "results" / "errors.json").read_text())["rows"]
    errors = {(row["data"], row["bits"], row["rounding"], row["group"]): row["c_q"] for row in measured}
    rows = table("data, bits, rounding")
    assert len(rows) > 10
    for name, *cells in rows:
        data, bits, rounding = name.split(", ")
        expected = [f"{errors[data, int(bits), rounding, group]:.3f}" for group in (32, 64, 128, 1024)]
        assert cells == expected, name


@pytest.mark.parametrize("bits", range(1, 9))
def test_the_planes_are_those_of_the_code(bits: int) -> None:
    found = re.search(rf"\b{bits}: ([\d,]+?)(?:,? {{2}}|$)", TEXT[TEXT.index("widths") :])
    assert found
    assert tuple(int(width) for width in found.group(1).split(",")) == PLANES[bits]
