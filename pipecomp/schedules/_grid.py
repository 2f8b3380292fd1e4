"""Draw a schedule as text, a row for each rank and a column for each stretch of time. Knows actions; knows no rules.

    rank 0  0F0 0F1 0F2 .   0B0 .   0B1 0B2
    rank 1  .   1F0 1B0 1F1 1B1 1F2 1B2

A dot is an idle rank; an action that takes more than one column goes on as dashes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pipecomp.schedules.base import Action
from pipecomp.types import Rank

_IDLE = "."
_GOES_ON = "--"
_MAX_COLUMNS = 200


class Span(NamedTuple):
    """One action with its place and time."""

    rank: Rank
    action: Action
    start: float
    end: float


def format_grid(spans: Iterable[Span], num_ranks: int) -> str:
    """Draw what ran. A column is as long as the shortest action; times between two columns fall into the earlier one."""
    spans = list(spans)
    column_s = min((span.end - span.start for span in spans if span.end > span.start), default=1)
    rows: list[list[str]] = [[] for _ in range(num_ranks)]
    for span in sorted(spans, key=lambda span: span.start):
        row = rows[span.rank]
        row.extend([_IDLE] * (_column(span.start, column_s) - len(row)))
        row.append(str(span.action))
        row.extend([_GOES_ON] * (_column(span.end, column_s) - len(row)))
    return _draw(rows)


def format_orders(orders: Sequence[Sequence[Action]]) -> str:
    """Draw what stands in each rank's order, without time."""
    return _draw([[str(action) for action in order] for order in orders])


def _column(time: float, column_s: float) -> int:
    return int(time / column_s + 1e-6)


def _draw(rows: Sequence[Sequence[str]]) -> str:
    num_columns = max((len(row) for row in rows), default=0)
    num_hidden = max(0, num_columns - _MAX_COLUMNS)
    width = max((len(cell) for row in rows for cell in row[num_hidden:]), default=0)
    lines = []
    for rank, row in enumerate(rows):
        cells = ["...", *row[num_hidden:]] if num_hidden else row
        lines.append(f"rank {rank}  " + " ".join(cell.ljust(width) for cell in cells))
    return "\n".join(line.rstrip() for line in lines)
