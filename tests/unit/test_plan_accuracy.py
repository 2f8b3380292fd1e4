"""The benchmark of plans: what it makes of its runs, and that the document tells what was measured."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipecomp.experiments import plan_accuracy
from pipecomp.experiments.plan_accuracy import CASES, CODECS, Case, bars_of, case_rows, table

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "docs" / "results" / "plan.json"


def row(compute: str, error: float, bound: str = "uplink of rank 1") -> dict[str, object]:
    return {"compute": compute, "error": error, "bound": bound}


def test_a_bar_is_the_largest_error_either_way():
    bars = bars_of([row("waiting", 0.02), row("waiting", -0.03), row("layers", 0.5)])
    assert [(bar["name"].partition(":")[0], bar["value"], bar["holds"]) for bar in bars] == [
        ("waiting", 0.03, True),
        ("layers", 0.5, False),
    ]


def test_where_the_shared_processor_rules_no_bar_is_set():
    shared = "processor of ranks 0, 1"
    bars = bars_of([row("layers", -0.5, shared), row("layers", 0.1), row("other", 1.0, shared)])
    assert [(bar["value"], bar["holds"]) for bar in bars] == [(0.1, True)]


def test_a_case_is_planned_and_launched_with_the_same_settings_and_read_by_epoch(tmp_path, monkeypatch):
    calls: list[tuple[str, ...]] = []

    def fake(*arguments: str, waits: bool = False) -> str:
        calls.append(arguments)
        if arguments[0] == "plan":
            return json.dumps({"prediction": {"first_epoch_step_time_s": 3.0, "step_time_s": 1.5, "bound": "uplink of rank 1"}})
        log = Path(arguments[arguments.index("--log") + 1])
        times = [(0, 4.0), (0, 2.0), (0, 2.5), (1, 1.5), (2, 1.4), (2, 9.0)]
        lines = [{"event": "step", "epoch": epoch, "step_time_s": time_s} for epoch, time_s in times]
        log.write_text("".join(json.dumps(line) + "\n" for line in [{"event": "joined"}, *lines]))
        assert waits
        return ""

    monkeypatch.setattr(plan_accuracy, "_pipecomp", fake)
    rows = case_rows(Case("waiting", "fp32", "2mbit"), tmp_path)
    assert [(each["epoch"], each["planned_s"], each["measured_s"], each["error"]) for each in rows] == [
        ("first", 3.0, 2.5, 0.2),
        ("later", 1.5, 1.5, 0.0),
    ]
    planned, launched = (set(call) for call in calls)
    assert {word for word in planned if "=" in word} == {word for word in launched if "=" in word}
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert [worker["up"] for worker in figures["workers"]] == ["2mbit"] * 4


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
