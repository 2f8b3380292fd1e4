"""`kill -9` of anything at any moment: everything ends within ten seconds, the cause is named, no process is left."""

from __future__ import annotations

import os
import signal
import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")

SLOW_LINKS = ("cluster.link_rate=1mbit",)
MOMENTS = ("waiting", "loading", "evaluating", "training", "step 3", "collecting")


def reach(run, moment: str) -> None:
    if moment.startswith("step"):
        run.until_step(int(moment.split()[1]))
    else:
        run.until_phase(moment)


def overrides_for(moment: str) -> tuple[str, ...]:
    """Slow links stretch a step's forwards and backwards, and the way home, to where a kill lands in them."""
    return (*SLOW_LINKS, "train.max_steps=1") if moment == "collecting" else SLOW_LINKS


def check_worker_is_named(run, worker: str, moment: str) -> None:
    errors = [line for line in run.output.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, run.output
    assert worker in errors[0]
    assert "killed by signal 9 (SIGKILL)" in errors[0]
    if moment not in ("waiting", "loading"):
        assert f"stage {worker[-1]}" in errors[0]
        assert "last heard " in errors[0]


@pytest.mark.parametrize("moment", ["waiting", "training", "evaluating"])
def test_a_killed_worker_ends_the_run_and_is_named(launched, moment):
    run = launched(*overrides_for(moment))
    reach(run, moment)
    run.kill("worker-1")
    assert os.waitstatus_to_exitcode(run.exit_status()) == 1
    run.until_nobody_is_left()
    check_worker_is_named(run, "worker-1", moment)


def test_a_killed_coordinator_ends_the_run_and_is_named(launched):
    run = launched(*SLOW_LINKS)
    run.until_step(1)
    run.kill("coordinator")
    assert os.waitstatus_to_exitcode(run.exit_status()) == 1
    run.until_nobody_is_left()
    assert "the coordinator was killed by signal 9 (SIGKILL)" in run.output


def test_a_killed_launch_leaves_no_process(launched):
    run = launched(*SLOW_LINKS)
    run.until_step(1)
    run.kill("launch")
    run.exit_status()
    run.until_nobody_is_left()
    assert "error: launch was killed" in run.output


def test_a_stopped_worker_is_named_by_its_silence(launched):
    run = launched(*SLOW_LINKS)
    run.until_step(1)
    run.kill("worker-0", signal.SIGSTOP)
    assert os.waitstatus_to_exitcode(run.exit_status()) == 1
    run.until_nobody_is_left()
    assert "error: worker-0 " in run.output
    assert "no heartbeat for " in run.output


def test_a_stopped_coordinator_is_ended_and_named(launched):
    run = launched(*SLOW_LINKS, "cluster.heartbeat_timeout_s=2.0")
    run.until_step(1)
    run.kill("coordinator", signal.SIGSTOP)
    assert os.waitstatus_to_exitcode(run.exit_status()) == 1
    run.until_nobody_is_left()
    assert "error: all workers have ended and the coordinator has not 4 s later" in run.output


def test_ctrl_c_once_finishes_the_step_and_saves_the_model(launched):
    run = launched(*SLOW_LINKS)
    run.until_step(1)
    run.kill("launch", signal.SIGINT)
    assert os.waitstatus_to_exitcode(run.exit_status()) == 0
    run.until_nobody_is_left()
    assert run.summary["stopped_early"] is True
    assert (run.folder / "model" / "model.safetensors.index.json").exists()


def test_ctrl_c_twice_stops_at_once(launched):
    run = launched(*SLOW_LINKS)
    run.until_step(1)
    run.kill("launch", signal.SIGINT)
    run.until(lambda: any(event["event"] == "stop" for event in run.events()))  # two signals at once may be one
    run.kill("launch", signal.SIGINT)
    assert os.waitstatus_to_exitcode(run.exit_status()) == 130
    run.until_nobody_is_left()
    assert not (run.folder / "model").exists()


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("victim", ["worker-0", "worker-1", "coordinator", "launch"])
def test_whatever_is_killed_whenever_everything_ends(launched, victim, moment):
    run = launched(*overrides_for(moment))
    reach(run, moment)
    run.kill(victim)
    status = run.exit_status()
    run.until_nobody_is_left()
    if victim == "launch":
        assert "error: launch was killed" in run.output
        return
    assert os.waitstatus_to_exitcode(status) == 1
    if victim == "coordinator":
        assert "the coordinator was killed by signal 9 (SIGKILL)" in run.output
    else:
        check_worker_is_named(run, victim, moment)
