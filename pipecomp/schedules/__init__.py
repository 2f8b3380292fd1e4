"""The order of a step's forwards and backwards on every rank. One plugin a module; what they share is exported here."""

from pipecomp.schedules._grid import Span, format_grid, format_orders
from pipecomp.schedules._rules import peak_in_flight, validate, without_backward
from pipecomp.schedules._simulate import UNIT_COSTS, Costs, Timeline, needs, simulate
from pipecomp.schedules.base import Action, ActionKind, Schedule

__all__ = [
    "UNIT_COSTS",
    "Action",
    "ActionKind",
    "Costs",
    "Schedule",
    "Span",
    "Timeline",
    "format_grid",
    "format_orders",
    "needs",
    "peak_in_flight",
    "simulate",
    "validate",
    "without_backward",
]
