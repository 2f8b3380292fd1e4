"""The benchmark of memory over many steps: what it makes of its samples, and a short run of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pipecomp.errors import PipecompError
from pipecomp.experiments import steady_memory
from pipecomp.experiments.steady_memory import Sample, bars_of, resident_nbytes, rows_of

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "docs" / "results" / "memory.json"


def samples(nbytes_of_step: dict[int, int], name: str = "worker-0") -> list[Sample]:
    return [Sample(step, {name: nbytes}) for step, nbytes in nbytes_of_step.items()]


def test_the_last_quarter_is_held_against_the_second() -> None:
    rows = rows_of(samples({0: 1, 1: 50, 25: 50, 26: 100, 40: 100, 50: 104, 51: 150, 76: 110, 90: 110, 100: 190, 101: 7}), 100)
    assert rows == [{"process": "worker-0", "quarters_nbytes": [50, 100, 150, 110], "growth": 0.1, "samples": 11}]


def test_a_quarter_that_nobody_saw_is_said_so() -> None:
    with pytest.raises(PipecompError, match="a run of 100 steps is over too soon"):
        rows_of(samples({1: 5, 30: 5, 90: 5}), 100)


def test_a_process_that_has_ended_is_no_sample() -> None:
    late = [*samples({1: 50, 30: 100, 60: 100, 90: 100}), Sample(100, {})]
    assert rows_of(late, 100)[0]["quarters_nbytes"] == [50, 100, 100, 100]


def test_the_bar_is_the_worst_worker_and_not_the_coordinator() -> None:
    growths = {"coordinator": 0.5, "worker-0": -0.1, "worker-1": 0.02}
    rows = [{"process": name, "growth": growth} for name, growth in growths.items()]
    assert [(bar["value"], bar["holds"]) for bar in bars_of(rows)] == [(0.02, False)]


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")
def test_memory_of_children_is_read_by_their_names() -> None:
    script = "import subprocess, sys; subprocess.run(['sleep', '20'])"
    with subprocess.Popen([sys.executable, "-c", script]) as parent:
        try:
            found: dict[str, int] = {}
            while "sleep" not in found:
                assert parent.poll() is None
                found = resident_nbytes(parent.pid)
            assert list(found) == ["sleep"]
        finally:
            subprocess.run(["pkill", "-P", str(parent.pid)], check=False)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_short_run_is_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    outcome = steady_memory.run(json=True, path=tmp_path / "memory.json", num_steps=80)
    assert json.loads((tmp_path / "memory.json").read_text())["rows"] == outcome["rows"]
    assert [row["process"] for row in outcome["rows"]] == ["coordinator", *(f"worker-{i}" for i in range(4))]
    assert outcome["settings"]["steps"] == 80
    assert outcome["settings"]["step_s"] > 8 * 10 * 0.0009  # the slow worker's own work


def test_the_result_is_of_two_thousand_steps_and_its_bar_is_that_of_its_rows() -> None:
    outcome = json.loads(RESULT.read_text())
    assert outcome["settings"]["steps"] == 2000
    assert outcome["settings"]["blocks"] == list(steady_memory.BLOCKS)
    assert outcome["bars"] == bars_of(outcome["rows"])
