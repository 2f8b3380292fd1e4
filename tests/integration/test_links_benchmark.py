"""`pipecomp bench links` on a setting of two stages and tiny tensors: real processes on the loopback interface."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipecomp.errors import PipecompError
from pipecomp.experiments import links
from pipecomp.experiments.links_cells import Setting
from pipecomp.testing.hosts import LocalHosts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
ROOT = Path(__file__).parents[2]
TINY = Setting("tiny", "two stages", 2, 2, 2, 16, 64, 0.001, 0.002, 0.001, "made up")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a second for each link, from the folder of the source tree."""
    monkeypatch.chdir(ROOT)
    measure = links.measure_neighbours
    monkeypatch.setattr(links, "measure_neighbours", lambda hosts, num_hosts: measure(hosts, num_hosts, duration_s=0.2))


def run(path: Path, methods: str) -> dict[str, Any]:
    return links.run(path=path, rates="100mbit", methods=methods, hosts="local", settings=[TINY])


def test_cells_are_run_kept_and_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "links.json"
    run(path, "fw3bw6")
    outcome = run(path, "fp32,fw3bw6")
    assert json.loads(path.read_text())["rows"] == outcome["rows"]
    fp32, packed = outcome["rows"]
    assert [row["method"] for row in (fp32, packed)] == ["fp32", "fw3bw6"]
    assert [row["payload_differs_nbytes"] for row in (fp32, packed)] == [0, 0]
    assert len(packed["times_s"]) == 5
    assert packed["change"] == pytest.approx(0.1, rel=0.5)  # few visits of few tensors
    monkeypatch.setattr(links, "run_cell", None)  # nothing is left to run
    assert run(path, "fp32,fw3bw6")["rows"] == outcome["rows"]


def test_a_worker_that_fails_is_told_with_its_last_words_and_nothing_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = LocalHosts.start

    def start_badly(self: LocalHosts, host: int, command: list[str], **options: Any) -> subprocess.Popen[str]:
        if "host-1" in command:
            command = [sys.executable, "-c", "raise SystemExit('no memory')"]
        return start(self, host, command, **options)

    monkeypatch.setattr(LocalHosts, "start", start_badly)
    path = tmp_path / "links.json"
    with pytest.raises(PipecompError, match=r"1 cells failed(.|\n)*tiny fw3bw6 100mbit: no step 4(.|\n)*no memory"):
        run(path, "fw3bw6")
    assert not path.exists()
