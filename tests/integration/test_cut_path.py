"""Three hosts, and the path between two of them cut while the coordinator still hears both."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pipecomp.testing.hosts import NamespaceHosts, why_not

pytestmark = [pytest.mark.netns, pytest.mark.timeout(240)]

ROOT = Path(__file__).parents[2]
PIPECOMP = str(Path(sys.executable).with_name("pipecomp"))
PORT = 7700
NAMED_S = 20.0
"""Five seconds without an acknowledgement, three of dialling again, six in which silence may name the other end; and room."""

RUN_FILE = """
[model.config]
model_type = "gpt2"
n_layer = 2
n_embd = 32
n_head = 2
vocab_size = 1024
n_positions = 64
bos_token_id = 0
eos_token_id = 0
[data]
train = "{root}/examples/state-of-the-union.jsonl"
tokenizer = "{root}/examples/demo-gpt2"
max_length = 32
max_eval_samples = 4
[train]
num_train_epochs = 50
batch_size = 4
num_microbatches = 2
save_model = false
[cluster]
num_stages = 2
link_rate = "1mbit"
"""


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    reason = why_not()
    if reason:
        pytest.skip(reason)
    return tmp_path


class Run:
    """A coordinator on host 0, workers on hosts 1 and 2."""

    def __init__(self, hosts: NamespaceHosts, folder: Path) -> None:
        (folder / "run.toml").write_text(RUN_FILE.format(root=ROOT, folder=folder))
        self._hosts, self._folder = hosts, folder
        where = f"{hosts.address(0)}:{PORT}"
        lead = [PIPECOMP, "coordinator", str(folder / "run.toml"), "--bind", where, "--log", str(folder / "steps.jsonl")]
        self.processes = [hosts.start(0, lead, log=folder / "0.log", sees_all=True)]
        for host in (1, 2):
            join = [PIPECOMP, "worker", "--coordinator", where, "--name", f"host-{host}", "--threads", "1"]
            self.processes.append(hosts.start(host, join, log=folder / f"{host}.log"))

    @property
    def output(self) -> str:
        return (self._folder / "0.log").read_text()

    def num_steps(self) -> int:
        log = self._folder / "steps.jsonl"
        lines = log.read_text().splitlines(keepends=True) if log.exists() else []
        return sum(json.loads(line)["event"] == "step" for line in lines if line.endswith("\n"))

    def until(self, condition: Callable[[], bool], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, self.output
            time.sleep(0.05)


def test_a_path_that_is_cut_for_a_second_costs_a_second(run_folder: Path) -> None:
    with NamespaceHosts(3) as hosts:
        run = Run(hosts, run_folder)
        run.until(lambda: run.num_steps() >= 3, 60)
        hosts.cut(1, 2)
        time.sleep(1)
        hosts.mend(1, 2)
        before = run.num_steps()
        run.until(lambda: run.num_steps() >= before + 5, NAMED_S)
        assert all(process.poll() is None for process in run.processes)


def test_a_path_that_is_cut_for_good_ends_the_run_and_is_named(run_folder: Path) -> None:
    with NamespaceHosts(3) as hosts:
        run = Run(hosts, run_folder)
        run.until(lambda: run.num_steps() >= 3, 60)
        hosts.cut(1, 2)
        run.until(lambda: all(process.poll() is not None for process in run.processes), NAMED_S)
        assert [process.returncode for process in run.processes] == [1, 1, 1]
        (error,) = [line for line in run.output.splitlines() if line.startswith("error: ")]
        # Each holds two stages, so two links are cut, and either may be missed first.
        assert re.search(r"cannot reach it over link (0/0-1|0/1-2): link \1 to host-", error)
