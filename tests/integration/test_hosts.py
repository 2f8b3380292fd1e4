"""A coordinator and two workers as three hosts that share nothing but a network: own mounts, empty homes (law 11)."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from pipecomp.testing.hosts import NamespaceHosts, why_not

pytestmark = [pytest.mark.netns, pytest.mark.timeout(240)]

ROOT = Path(__file__).parents[2]
PIPECOMP = str(Path(sys.executable).with_name("pipecomp"))
PORT = 7700

RUN_FILE = """
[model]
name = "{root}/examples/demo-gpt2"
weights = "random"
[data]
train = "{root}/examples/state-of-the-union.jsonl"
max_length = 64
packing = true
max_train_samples = 96
max_eval_samples = 16
[train]
num_train_epochs = 2
batch_size = 16
num_microbatches = 4
learning_rate = 1e-3
output_dir = "{folder}/model"
[compression]
forward = {forward}
backward = {backward}
[cluster]
num_stages = 2
"""


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    reason = why_not()
    if reason:
        pytest.skip(reason)
    return tmp_path


def run_on_three_hosts(folder: Path, forward: str, backward: str) -> tuple[dict[str, Any], int]:
    """Train on three hosts; the summary, and the bytes that the hosts' interfaces sent."""
    run_file = folder / "run.toml"
    run_file.write_text(RUN_FILE.format(root=ROOT, folder=folder, forward=forward, backward=backward))
    summary = folder / "summary.json"
    with NamespaceHosts(3, hidden=[ROOT / "examples", folder]) as workers_hosts:
        coordinator = [PIPECOMP, "coordinator", str(run_file), "--bind", f"{workers_hosts.address(0)}:{PORT}"]
        processes = [
            workers_hosts.start(0, [*coordinator, "--summary", str(summary)], log=folder / "0.log", sees_all=True)
        ]
        for host in (1, 2):
            join = ["--coordinator", f"{workers_hosts.address(0)}:{PORT}", "--name", f"host-{host}", "--threads", "1"]
            processes.append(workers_hosts.start(host, [PIPECOMP, "worker", *join], log=folder / f"{host}.log"))
        deadline = time.monotonic() + 200
        codes = [process.wait(timeout=max(1.0, deadline - time.monotonic())) for process in processes]
        logs = "\n".join((folder / f"{i}.log").read_text() for i in range(3))
        assert codes == [0, 0, 0], logs
        nbytes = sum(workers_hosts.nbytes_sent(host) for host in range(3))
    return json.loads(summary.read_text()), nbytes


def counted_nbytes(summary: dict[str, Any]) -> int:
    return sum(kind["payload_bytes"] + kind["header_bytes"] for kind in summary["traffic"].values())


def test_three_hosts_train_and_their_interfaces_agree_with_the_summary(run_folder: Path) -> None:
    identity = '{codec = "identity"}'
    summary, nbytes = run_on_three_hosts(run_folder, identity, identity)
    assert summary["steps"] == 12
    assert summary["eval_loss"] < summary["initial_eval_loss"]
    assert (run_folder / "model" / "config.json").exists()
    counted = counted_nbytes(summary)
    assert counted < nbytes < 1.04 * counted


def test_compressed_traffic_over_three_hosts_has_the_bytes_of_its_codecs(run_folder: Path) -> None:
    uniform = '{codec = "uniform", bits = 4, group = 64}'
    forward = f'{{codec = "delta", bits = 4, group = 64, first_visit = {uniform}}}'
    summary, _ = run_on_three_hosts(run_folder, forward, uniform)
    for kind in ("forward", "backward"):
        traffic = summary["traffic"][kind]
        assert traffic["payload_bytes"] * 8 == traffic["values"] * 4.25  # 4 bits, and a bf16 scale for 64 values
