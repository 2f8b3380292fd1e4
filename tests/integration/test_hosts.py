"""A coordinator and two workers as three hosts that share nothing but a network: own mounts, empty homes (law 11)."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from pipecomp.testing.goodput import measure_neighbours
from pipecomp.testing.hosts import HostsFailed, NamespaceHosts, wait_until_ready, why_not
from pipecomp.testing.packet_delay import why_no_delay
from pipecomp.testing.shaping import LinkShape

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


def test_a_shaped_link_carries_less_than_its_label_and_nearly_all_of_it(run_folder: Path) -> None:
    with NamespaceHosts(3, LinkShape(40e6), unshaped=[2]) as hosts:
        shaped, one_end = measure_neighbours(hosts, 3, duration_s=0.5)
    assert 0.8 * 5e6 < shaped < 5e6  # headers take their part
    assert 0.8 * 5e6 < one_end < 5e6  # the sender's end is slow; the receiver's is not


def test_hosts_have_the_frames_and_the_congestion_control_that_they_are_given(run_folder: Path) -> None:
    code = """
import socket
connection = socket.create_connection(({0!r}, 7691))
print(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 4).decode())
print(open("/sys/class/net/eth0/mtu").read())
"""
    with NamespaceHosts(2, mtu=9000, congestion="reno") as hosts:
        server = f"import socket; s = socket.create_server(({hosts.address(1)!r}, 7691)); print('ready', flush=True); s.accept()"
        wait_until_ready(hosts.start(1, [sys.executable, "-c", server], log=run_folder / "server"), run_folder / "server")
        dialled = hosts.start(0, [sys.executable, "-c", code.format(hosts.address(1))], log=run_folder / "client")
        assert dialled.wait(timeout=60) == 0
    assert (run_folder / "client").read_text().split() == ["reno", "9000"]


@pytest.mark.skipif(bool(why_no_delay()), reason=why_no_delay())
def test_what_a_host_receives_is_delayed_with_netem_or_without(run_folder: Path) -> None:
    code = "import socket, time; t = time.monotonic(); socket.create_connection(({0!r}, {1}), 20); print(time.monotonic() - t)"
    with NamespaceHosts(2, LinkShape(delay_s=0.05)) as hosts:
        assert hosts.missing == ()
        server = f"import socket; s = socket.create_server(({hosts.address(1)!r}, 7691)); print('ready', flush=True); s.accept()"
        listening = hosts.start(1, [sys.executable, "-c", server], log=run_folder / "server")
        wait_until_ready(listening, run_folder / "server")
        dialled = hosts.start(0, [sys.executable, "-c", code.format(hosts.address(1), 7691)], log=run_folder / "client")
        assert dialled.wait(timeout=60) == 0
        hosts.check()
        for process in hosts._delays.values():
            hosts.end(process)
        if hosts._delays:  # no netem: a program delays packets
            with pytest.raises(HostsFailed, match="packets are not delayed any more"):
                hosts.check()
    assert float((run_folder / "client").read_text()) >= 0.1  # there and back


def test_a_plan_measures_hosts_and_links_where_they_are_and_its_output_is_a_file_of_figures(run_folder: Path) -> None:
    run_file, figures = run_folder / "run.toml", run_folder / "plan.json"
    identity = '{codec = "identity"}'
    run_file.write_text(RUN_FILE.format(root=ROOT, folder=run_folder, forward=identity, backward=identity))
    with NamespaceHosts(3, LinkShape(20e6), unshaped=[0], hidden=[ROOT / "examples", run_folder]) as hosts:
        meeting = f"{hosts.address(0)}:{PORT}"
        command = [PIPECOMP, "plan", str(run_file), "--bind", meeting, "--json"]
        into_file = ["sh", "-c", f"exec {' '.join(command)} > {figures}"]
        processes = [hosts.start(0, into_file, log=run_folder / "0.log", sees_all=True)]
        for host in (1, 2):
            join = ["worker", "--coordinator", meeting, "--name", f"host-{host}", "--threads", "1"]
            processes.append(hosts.start(host, [PIPECOMP, *join], log=run_folder / f"{host}.log"))
        deadline = time.monotonic() + 120
        codes = [process.wait(timeout=max(1.0, deadline - time.monotonic())) for process in processes]
    logs = [(run_folder / f"{i}.log").read_text() for i in range(3)]
    assert codes == [0, 0, 0], logs
    assert "measuring the link between host-1 and host-2" in logs[0]
    assert "done, the plan is made" in logs[1]
    made = json.loads(figures.read_text())
    assert [worker["name"] for worker in made["workers"]] == ["host-1", "host-2"]
    assert [(link["sender"], link["receiver"]) for link in made["links"]] == [("host-1", "host-2"), ("host-2", "host-1")]
    for worker in made["workers"]:
        # TCP may lose time repairing losses, and then make some of it good at once.
        assert 0.2 * 20_000 < float(worker["up"].removesuffix("kbit")) < 1.15 * 20_000
    again = subprocess.run(
        [PIPECOMP, "plan", str(run_file), "--figures", str(figures), "--json"], capture_output=True, text=True, check=True
    )
    assert json.loads(again.stdout)["prediction"] == made["prediction"]
