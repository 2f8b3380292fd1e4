"""The benchmark of plans: what it makes of its runs, and that the document tells what was measured."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from pipecomp.experiments import measured_bound as measured_bound_module
from pipecomp.experiments import plan_accuracy
from pipecomp.experiments.measured_bound import (
    Bound,
    ProcessorTime,
    measured_bound,
    measured_loads,
    session_processor_s,
)
from pipecomp.experiments.plan_accuracy import CASES, CODECS, Case, bars_of, case_rows, table
from pipecomp.planning import Host, LinkCost, Processor, StageCost, even_setting, simulate_step
from pipecomp.schedules.gpipe import GPipe
from pipecomp.types import Rank

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "docs" / "results" / "plan.json"


def row(compute: str, error: float, bound: str = "uplink of rank 1", *, agrees: bool = True) -> dict[str, object]:
    return {"compute": compute, "error": error, "bound": bound, "bound_agrees": agrees}


def test_a_bar_is_the_largest_error_either_way():
    bars = bars_of([row("waiting", 0.02), row("waiting", -0.03), row("layers", 0.5)])
    assert [(bar["name"].partition(":")[0], bar["value"], bar["holds"]) for bar in bars[:-1]] == [
        ("waiting", 0.03, True),
        ("layers", 0.5, False),
    ]


def test_one_row_whose_bound_was_not_what_the_run_was_busy_with_fails_the_bar():
    bars = bars_of([row("waiting", 0.0), row("waiting", 0.0, agrees=False)])
    assert (bars[-1]["value"], bars[-1]["bar"], bars[-1]["holds"]) == (1, 2, False)
    assert bars_of([row("waiting", 0.0)])[-1]["holds"]


def summary_of_a_chain(*computing: float) -> dict[str, object]:
    """Of workers, one stage each, that computed for these shares of a step of 1.5 s."""
    shares = computing or (0.4, 0.2, 0.2, 0.2)
    kind = {"payload_bytes": 3 * 2**20, "header_bytes": 0}
    return {
        "traffic": {"forward": kind, "backward": kind},
        "time": {f"worker-{rank}": {"computing": share, "step_s": 1.5} for rank, share in enumerate(shares)},
    }


def test_where_the_shared_processor_rules_no_bar_is_set():
    shared = "processor of ranks 0, 1"
    bars = bars_of([row("layers", -0.5, shared), row("layers", 0.1), row("other", 1.0, shared)])
    assert [(bar["value"], bar["holds"]) for bar in bars[:-1]] == [(0.1, True)]


def test_a_case_is_planned_and_launched_with_the_same_settings_and_read_by_epoch(tmp_path, monkeypatch):
    calls: list[list[str]] = []

    def plan(*arguments: str) -> str:
        calls.append(list(arguments))
        return json.dumps({"prediction": {"first_epoch_step_time_s": 3.0, "step_time_s": 1.5, "bound": "uplink of rank 1"}})

    def launch(arguments: list[str], log: Path, *, waits: bool) -> None:
        calls.append(arguments)
        assert waits
        assert log == Path(arguments[arguments.index("--log") + 1])
        times = [(0, 4.0), (0, 2.0), (0, 2.5), (1, 1.5), (2, 1.4), (2, 9.0)]
        sent = {0: 1_500_000, 1: 1_125_000, 2: 1_125_000}  # on three links of 250,000 bytes a second: 2 s and 1.5 s
        lines = [{"event": "step", "epoch": epoch, "step_time_s": time_s, "sent_bytes": sent[epoch]} for epoch, time_s in times]
        log.write_text("".join(json.dumps(line) + "\n" for line in [{"event": "joined"}, *lines]))
        Path(arguments[arguments.index("--summary") + 1]).write_text(json.dumps(summary_of_a_chain()))

    monkeypatch.setattr(plan_accuracy, "_pipecomp", plan)
    monkeypatch.setattr(plan_accuracy, "_launch", launch)
    rows = case_rows(Case("waiting", "fp32", "2mbit"), tmp_path)
    assert [(each["busiest"], each["busiest_busy"], each["bound_busy"], each["bound_agrees"]) for each in rows] == [
        ("uplink of rank 1", 0.8, 0.8, True),
        ("uplink of rank 1", 1.0, 1.0, True),
    ]
    assert [(each["epoch"], each["planned_s"], each["measured_s"], each["error"]) for each in rows] == [
        ("first", 3.0, 2.5, 0.2),
        ("later", 1.5, 1.5, 0.0),
    ]
    planned, launched = (set(call) for call in calls)
    assert {word for word in planned if "=" in word} == {word for word in launched if "=" in word}
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert [worker["up"] for worker in figures["workers"]] == ["2mbit"] * 4


def test_loads_are_named_as_a_plan_names_them():
    """Whatever the plan names, the run has the same part under the same name."""
    ends = StageCost(0.1, 0.2)
    link, host = LinkCost(1000, 2000), Host(1e4, math.inf)
    shared = Processor(tuple(Rank(rank) for rank in range(4)), 2)
    setting = msgspec.structs.replace(even_setting(4, ends, link, host), processors=(shared,))
    actions = GPipe().actions(setting.ranks, 4)
    named = {str(load) for load in simulate_step(actions, setting).loads if math.isfinite(load.busy_s) and load.busy_s}
    loads = measured_loads(summary_of_a_chain(), 36e3, rate_nbytes_per_s=1e4, processor_s=1.0)
    assert set(loads) == named


def test_loads_are_what_the_run_told():
    loads = measured_loads(summary_of_a_chain(0.9, 0.5, 0.25), 8e6, rate_nbytes_per_s=2e6, processor_s=3.0)
    assert loads == {
        "compute of rank 0": pytest.approx(1.35),
        "compute of rank 1": pytest.approx(0.75),
        "compute of rank 2": pytest.approx(0.375),
        "forward link from rank 0 to rank 1": pytest.approx(1.0),
        "uplink of rank 1": pytest.approx(2.0),
        "backward link from rank 2 to rank 1": pytest.approx(1.0),
        "processor of ranks 0, 1, 2": pytest.approx(3.0 / (os.cpu_count() or 1)),
    }
    apart = measured_loads(summary_of_a_chain(), 1, rate_nbytes_per_s=1, processor_s=None)
    assert not [name for name in apart if "processor" in name]


@pytest.mark.parametrize(
    ("named", "step_s", "expected"),
    [
        ("compute of rank 1", 1.25, Bound("compute of rank 0", 0.8, 0.768, True)),  # as busy, within 5 %
        ("uplink of rank 1", 1.25, Bound("compute of rank 0", 0.8, 0.72, False)),
        ("downlink of rank 1", 1.25, Bound("compute of rank 0", 0.8, 0.0, False)),
        ("compute of rank 0", 2.5, Bound("fill and drain", 0.4, 0.4, False)),
        ("fill and drain", 2.5, Bound("fill and drain", 0.4, 0.4, True)),
        ("fill and drain", 1.25, Bound("compute of rank 0", 0.8, 0.0, False)),
    ],
)
def test_the_right_bound_is_one_as_busy_as_any(named: str, step_s: float, expected: Bound):
    loads = {"compute of rank 0": 1.0, "compute of rank 1": 0.96, "uplink of rank 1": 0.9}
    assert measured_bound(named, loads, step_s) == pytest.approx(expected)


def test_processor_time_a_step_is_that_of_all_processes_of_the_session(monkeypatch):
    used = iter([20.0, 22.0, 26.0, 3.0])  # the last one: after most processes have ended
    monkeypatch.setattr(measured_bound_module, "session_processor_s", lambda session: next(used))
    time = ProcessorTime(1)
    for num_steps in (0, 1, 1, 2, 3, 3, 4):  # only what is read at the end of a step counts
        time.read(num_steps)
    assert time.per_step_s() == pytest.approx(3.0)
    assert ProcessorTime(1).per_step_s() is None


def test_processor_time_of_a_session_is_read_from_the_kernel():
    busy = "import time; end = time.process_time() + 0.3\nwhile time.process_time() < end: pass\nprint(flush=True); input()"
    process = subprocess.Popen(
        [sys.executable, "-c", busy], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    try:
        assert process.stdout is not None
        process.stdout.readline()
        assert 0.29 <= session_processor_s(process.pid) < 5.0
    finally:
        process.kill()
        process.communicate()
    assert session_processor_s(process.pid) == 0.0


def test_every_case_names_a_setting_that_there_is():
    assert {case.setting for case in CASES} <= set(CODECS)


def test_filling_up_makes_a_short_forward_as_long_as_it_says(monkeypatch):
    from pipecomp.runtime.stage import StageRuntime

    slept: list[float] = []
    clock = SimpleNamespace(perf_counter=iter([10.0, 10.02]).__next__, sleep=slept.append)
    monkeypatch.setattr(plan_accuracy, "time", clock)
    monkeypatch.setattr(StageRuntime, "forward", lambda self: "result")
    monkeypatch.setattr(StageRuntime, "backward", StageRuntime.backward)
    plan_accuracy.fill_up()
    assert StageRuntime.forward(object()) == "result"  # type: ignore[call-arg]
    assert slept == [pytest.approx(plan_accuracy.FORWARD_S - 0.02)]


def test_the_document_tells_what_was_measured():
    lines = table(json.loads(RESULT.read_text())["rows"])
    document = (ROOT / "docs" / "planning.md").read_text()
    assert [line for line in lines if line not in document] == []
