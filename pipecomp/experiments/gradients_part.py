"""What a part of `pipecomp bench gradients` is: cells, and what their figures come to. Knows rows; measures nothing.

A part is a module with a function that gives a `Part`; `gradients.PARTS` has its line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from pipecomp.results import Row

Keep = Callable[[str, Row], None]
"""Takes a cell's name and its figures, as soon as they are there."""


class Table(NamedTuple):
    """Lines for people."""

    title: str
    heads: Sequence[str]
    lines: Sequence[Sequence[str]]


class Part(NamedTuple):
    """Cells that are measured alike. `table` and `bars` are given the part's own rows, in the order of the cells."""

    key: str
    cells: Sequence[str]
    """Names of all there are, in the order of rows. Needs no file and no right."""
    settings: Callable[[], Mapping[str, str]]
    """Of cells that can be measured here and now: a hash of what their figures depend on. Tells what it leaves out; raises
    ConfigError where nothing can be measured."""
    measure: Callable[[Sequence[str], Keep], list[str]]
    """Measures some of these cells, in this order, and returns what has failed, a text each."""
    tables: Callable[[Sequence[Row]], Mapping[str, Table]]
    """By the name that documents give them."""
    bars: Callable[[Sequence[Row]], list[Row]]
    """A bar whose rows are not all there is left out."""
