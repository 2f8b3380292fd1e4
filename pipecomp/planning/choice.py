"""Which of several schedules is the fastest in a setting. Pure; knows the schedules that are shipped.

The ideal of a setting is the shortest step that any shipped schedule gives in it, with gradients of weights computed at once or
deferred for as many microbatches as there are stages: with all compute at its nominal speed, all
links at their full goodput, and no time for coding, control or the optimizer. It is what a measured run is held against.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pipecomp.planning.setting import Setting
from pipecomp.planning.step import Step, simulate_step
from pipecomp.schedules import Schedule, peak_in_flight
from pipecomp.schedules.gpipe import GPipe
from pipecomp.schedules.one_f_one_b import OneFOneB


class Candidate(NamedTuple):
    """A schedule and the step it gives."""

    label: str
    schedule: Schedule
    step: Step
    num_in_flight: int
    """The most microbatches that a stage holds between forward and backward."""
    num_deferred: int = 0
    """Of how many more it may hold what their weights' gradients need."""


def shipped_schedules(num_stages: int, num_microbatches: int) -> dict[str, Schedule]:
    """By label: gpipe, 1f1b by its default, and 1f1b from the textbook's depth up to all microbatches."""
    schedules: dict[str, Schedule] = {"1f1b": OneFOneB(), "gpipe": GPipe()}
    depth = num_stages
    while depth < num_microbatches:
        schedules[f"1f1b, {depth} in flight"] = OneFOneB(depth)
        depth += max(1, num_stages // 2)
    schedules[f"1f1b, {num_microbatches} in flight"] = OneFOneB(num_microbatches)
    return schedules


def compare(
    setting: Setting,
    num_microbatches: int,
    schedules: Mapping[str, Schedule] | None = None,
    *,
    deferrals: Sequence[int] | None = None,
) -> list[Candidate]:
    """Every schedule's step, the shortest first; of equal ones the one that holds fewer microbatches.

    Args:
        setting: costs and rates.
        num_microbatches: of a step.
        schedules: by label; None: `shipped_schedules`.
        deferrals: values of `num_deferred` to try; None: none, and, where there is something to defer, the number of stages.
    """
    if deferrals is None:
        deferrals = (0, len(setting.stages)) if any(stage.weights_s for stage in setting.stages) else (0,)
    if schedules is None:
        schedules = shipped_schedules(len(setting.stages), num_microbatches)
    candidates = []
    for label, schedule in schedules.items():
        actions = schedule.actions(setting.ranks, num_microbatches)
        in_flight = max(peak_in_flight(actions).values())
        for num_deferred in deferrals:
            step = simulate_step(actions, setting, num_deferred=num_deferred)
            full_label = f"{label}, {num_deferred} deferred" if num_deferred else label
            candidates.append(Candidate(full_label, schedule, step, in_flight, num_deferred))
    # Twelve digits: sums in another order are no faster schedule.
    return sorted(
        candidates, key=lambda each: (float(f"{each.step.duration_s:.12g}"), each.num_deferred, each.num_in_flight)
    )


def ideal(setting: Setting, num_microbatches: int, schedules: Mapping[str, Schedule] | None = None) -> Candidate:
    """The fastest of `compare`."""
    return compare(setting, num_microbatches, schedules)[0]
