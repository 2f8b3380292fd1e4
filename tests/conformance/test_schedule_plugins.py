"""Every schedule that the registry finds passes the public suite."""

from __future__ import annotations

import pytest

from pipecomp import registry
from pipecomp.schedules import Schedule
from pipecomp.testing.schedule_checks import check_schedule

PACKAGE = "pipecomp.schedules"


@pytest.mark.parametrize("name", registry.names(PACKAGE))
def test_schedule_keeps_the_rules(name: str) -> None:
    schedule = registry.load(PACKAGE, name).from_options({})
    assert isinstance(schedule, Schedule)
    assert schedule.name == name
    check_schedule(schedule)


@pytest.mark.parametrize("num_in_flight", [1, 2, 3, 7])
def test_1f1b_keeps_the_rules_at_any_depth(num_in_flight: int) -> None:
    check_schedule(registry.load(PACKAGE, "1f1b").from_options({"num_in_flight": num_in_flight}), max_microbatches=8)
