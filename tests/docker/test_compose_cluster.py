"""The image and the compose files with a real engine: sizes, rights, links as they measure, whole runs, a lost machine."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = [pytest.mark.docker, pytest.mark.timeout(1200)]

ROOT = Path(__file__).parents[2]
IMAGE = "pipecomp-tested"
MAX_IMAGE_NBYTES = 1_800_000_000
PAYLOAD_PART = 0.956  # of a full frame: 1,448 of 1,514 bytes
LINK_MBIT = 100
GOODPUT = ("python", "-m", "pipecomp.testing.goodput")
PORT = "5201"
REPLICAS = "compose.yaml:compose.replicas.yaml"


def why_not() -> str:
    """Why there is no engine to test with; empty if there is one."""
    if shutil.which("docker") is None:
        return "docker is not installed"
    for command in (["docker", "version"], ["docker", "compose", "version"]):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            return f"{' '.join(command)}: {' '.join(done.stderr.split()) or 'failed'}"
    return ""


def docker(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["docker", *arguments], capture_output=True, text=True, check=False, cwd=ROOT, env=os.environ | environment
    )


def answer(*arguments: str, **environment: str) -> str:
    done = docker(*arguments, **environment)
    assert done.returncode == 0, f"{arguments}: {done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def image() -> str:
    reason = why_not()
    if reason:
        pytest.skip(reason)
    answer("compose", "--progress=plain", "build", IMAGE=IMAGE)
    return IMAGE


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """Readable by everybody, as a clone is: the demo's model and text, and a short run."""
    shutil.copytree(ROOT / "examples" / "demo-gpt2", tmp_path / "demo-gpt2")
    shutil.copyfile(ROOT / "examples" / "state-of-the-union.jsonl", tmp_path / "state-of-the-union.jsonl")
    shutil.copyfile(ROOT / "examples" / "docker.toml", tmp_path / "long.toml")
    text = (tmp_path / "long.toml").read_text()
    (tmp_path / "short.toml").write_text(re.sub("num_train_epochs = .*", "max_steps = 6", text))
    (tmp_path / "long.toml").write_text(re.sub("num_train_epochs = .*", "num_train_epochs = 1000", text))
    tmp_path.chmod(0o755)
    return tmp_path


class Cluster:
    """One compose project of this test's own."""

    def __init__(self, folder: Path, **environment: str) -> None:
        self.project = f"pipecomp-test-{secrets.token_hex(3)}"
        self.environment = {
            "IMAGE": IMAGE, "RUN_FOLDER": str(folder), "LINK_RATE": f"{LINK_MBIT}mbit",
            "COMPOSE_PROJECT_NAME": self.project, **environment,
        }  # fmt: skip

    def compose(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return docker("compose", "--progress=plain", *arguments, **self.environment)

    def up(self, *arguments: str) -> None:
        done = self.compose("up", "--no-build", "--detach", *arguments)
        assert done.returncode == 0, done.stderr + self.compose("logs").stdout

    def container(self, service: str, number: int = 1) -> str:
        return f"{self.project}-{service}-{number}"

    def down(self) -> None:
        docker("rm", "--force", f"{self.project}-peer")
        self.compose("down", "--volumes", "--timeout=1")


def goodput(sender: str, receiver: str) -> float:
    """Mbit/s of one TCP connection between two containers, measured in the second one."""
    command = ["docker", "exec", receiver, *GOODPUT, "receive", "0.0.0.0", PORT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as receiving:
        answer("exec", sender, *GOODPUT, "send", receiver, PORT, "2.5")
        printed, _ = receiving.communicate()
    return 8e-6 * float(json.loads(printed)["nbytes_per_s"])


# ----------------------------------------------------------------------------------------------------------- the image


def test_the_image_is_small(image: str) -> None:
    version = answer("run", "--rm", "--entrypoint=python", image, "-c", "import torch; print(torch.__version__)")
    if not version.strip().endswith("+cpu") and os.uname().machine == "x86_64":
        pytest.skip(f"its torch is no CPU build but {version.strip()}: none is in docker/wheels")
    assert int(answer("image", "inspect", "--format={{.Size}}", image)) < MAX_IMAGE_NBYTES


def test_no_build_tools_are_in_the_image(image: str) -> None:
    found = answer("run", "--rm", "--entrypoint=sh", image, "-c", "command -v pip gcc cc make git debootstrap; true")
    assert found == ""


def test_training_runs_as_a_user_without_any_rights(image: str, tmp_path: Path) -> None:
    status = "import sys; sys.stdout.write(open('/proc/self/status').read())"
    fake = tmp_path / "pipecomp"
    fake.write_text(f'#!/bin/sh\nexec python -c "{status}"\n')
    fake.chmod(0o755)
    printed = answer("run", "--rm", "--cap-add=NET_ADMIN", f"--volume={fake}:/opt/pipecomp/bin/pipecomp:ro", image)
    fields = dict(line.split(":\t") for line in printed.splitlines())
    assert fields["Uid"].split() == ["10001"] * 4
    assert fields["Groups"].strip() == ""
    assert {int(fields[f"Cap{kind}"], 16) for kind in ("Eff", "Prm", "Bnd", "Inh")} == {0}
    assert fields["NoNewPrivs"] == "1"


def test_what_the_kernel_cannot_do_is_said_and_the_rest_is_done(image: str) -> None:
    settings = "--env=LINK_RATE=20mbit", "--env=LINK_DELAY=5ms"
    done = docker("run", "--rm", "--cap-add=NET_ADMIN", *settings, image, "--version")
    assert done.returncode == 0
    *missing, last = done.stderr.splitlines()
    assert "LINK_RATE=20mbit out" in last
    assert ("LINK_DELAY=5ms, " in last) != any("LINK_DELAY=5ms not set: this kernel has no netem" in line for line in missing)


# -------------------------------------------------------------------------------------------------------- users' faults


def refused(image: str, *arguments: str) -> str:
    """The one line on standard error of a container that does not start."""
    done = docker("run", "--rm", *arguments)
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout == ""
    [line] = done.stderr.splitlines()
    assert line.startswith("error: ")
    return line


def test_a_rate_that_is_none_is_refused(image: str) -> None:
    assert "LINK_RATE = 'fast': write a rate" in refused(image, "--env=LINK_RATE=fast", image, "worker")


def test_a_container_without_the_right_to_shape_says_which_it_needs(image: str) -> None:
    assert "--cap-add NET_ADMIN" in refused(image, "--env=LINK_RATE=100mbit", image, "worker")


def test_a_run_file_that_is_not_mounted_is_named(image: str) -> None:
    assert "there is no run file /run-folder/run.toml" in refused(image, image, "coordinator", "/run-folder/run.toml")


def test_a_run_file_that_is_not_on_the_host_is_told_from_one_that_is(image: str, tmp_path: Path) -> None:
    volume = f"--volume={tmp_path}/none.toml:/run.toml"
    assert "the run file /run.toml is a folder" in refused(image, volume, image, "coordinator", "/run.toml")


def test_results_that_cannot_be_written_are_told_with_what_to_do(image: str, run_folder: Path, tmp_path: Path) -> None:
    volumes = f"--volume={run_folder}:/run-folder:ro", f"--volume={run_folder}:/results:ro"
    line = refused(image, *volumes, image, "coordinator", "/run-folder/short.toml")
    assert "the results folder /results cannot be written by the container's user" in line


def test_compose_names_a_run_folder_that_is_not_there(image: str, tmp_path: Path) -> None:
    cluster = Cluster(tmp_path / "none")
    try:
        done = cluster.compose("up", "--no-build")
        assert done.returncode != 0
        assert f"{tmp_path}/none" in done.stderr
    finally:
        cluster.down()


# ------------------------------------------------------------------------------------------------------------ launching


def test_launch_runs_in_one_container_and_the_model_is_its_folders_owners(image: str, run_folder: Path) -> None:
    results = run_folder / "results"
    results.mkdir()
    owner = 4321 if os.geteuid() == 0 else os.geteuid()
    os.chown(results, owner, -1)
    volumes = f"--volume={run_folder}:/run-folder:ro", f"--volume={results}:/results"
    few = "--set=cluster.num_stages=2", "--set=train.max_steps=2", "--set=data.max_eval_samples=4"
    answer("run", "--rm", *volumes, image, "launch", "/run-folder/short.toml", *few, "--quiet")
    assert (results / "model" / "config.json").stat().st_uid == owner


# ----------------------------------------------------------------------------------------------------------- a whole run


@pytest.fixture
def cluster(image: str, run_folder: Path, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    cluster = Cluster(run_folder, **request.param)
    yield cluster
    cluster.down()


@pytest.mark.parametrize("cluster", [{"RUN_FILE": "short.toml"}], indirect=True)
def test_compose_up_trains_ends_with_the_table_and_leaves_the_model(cluster: Cluster, tmp_path: Path) -> None:
    done = cluster.compose("up", "--no-color", "--build")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"coordinator-1 +\| step 6/6 ", done.stdout)
    assert re.search(r"coordinator-1 +\| traffic +values +payload ", done.stdout)
    names = [cluster.container("worker", number) for number in range(1, 5)]
    assert all(re.search(rf"coordinator-1 +\| {name} +[\d,]+ ", done.stdout) for name in names)
    codes = answer("inspect", "--format={{.State.ExitCode}}", cluster.container("coordinator"), *names)
    assert codes.split() == ["0"] * 5
    cluster.compose("cp", "coordinator:/results/.", str(tmp_path / "out"))
    assert (tmp_path / "out" / "model" / "config.json").exists()
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["steps"] == 6


@pytest.mark.parametrize("cluster", [{"RUN_FILE": "short.toml", "COMPOSE_FILE": REPLICAS}], indirect=True)
def test_replicas_train_side_by_side_and_exchange_gradients_of_four_bits(cluster: Cluster, tmp_path: Path) -> None:
    done = cluster.compose("up", "--no-color", "--no-build")
    assert done.returncode == 0, done.stdout + done.stderr
    names = [cluster.container("worker", number) for number in range(1, 5)]
    codes = answer("inspect", "--format={{.State.ExitCode}}", cluster.container("coordinator"), *names)
    assert codes.split() == ["0"] * 5, done.stdout
    for place, name in enumerate(names):  # the first two are one replica's stages, the others the other's
        replica, stage = divmod(place, 2)
        assert re.search(rf"coordinator-1 +\| {name} +\w+ +{replica} +{stage} ", done.stdout), name
    assert done.stderr.count(f"link: eth0: LINK_RATE={LINK_MBIT}mbit out, LINK_RATE={LINK_MBIT}mbit in") == 5

    cluster.compose("cp", "coordinator:/results/.", str(tmp_path / "out"))
    assert (tmp_path / "out" / "model" / "config.json").exists()
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["steps"] == 6
    trained = {replica: summary["links"][f"{replica}/0-1"]["forward"]["samples"] for replica in (0, 1)}
    assert sum(trained.values()) == summary["samples"] == 6 * 16
    assert min(trained.values()) >= 6 * 7
    assert all("gradients" in summary["links"][f"gradients/{rank}/0-1"] for rank in (0, 1))
    sent = summary["traffic"]["gradients"]
    num_parameters = sum(worker["num_trainable"] for worker in summary["workers"].values())
    assert sent["values"] == summary["steps"] * num_parameters  # half of them as parts, half as sums
    assert 8 * sent["payload_bytes"] / sent["values"] == pytest.approx(4.25, abs=0.01)


@pytest.mark.parametrize("cluster", [{"RUN_FILE": "long.toml", "WORKERS": "5"}], indirect=True)
def test_every_link_has_its_rate_and_a_machine_that_is_lost_is_named(cluster: Cluster) -> None:
    # One worker is missing: the others have joined and wait, so that nothing else is on the links.
    cluster.up("--wait", "--scale=worker=4")
    peer = f"{cluster.project}-peer"
    answer(
        "run", "--detach", "--rm", f"--name={peer}", f"--network={cluster.project}_cluster", "--entrypoint=sleep", IMAGE, "900"
    )
    machines = [cluster.container("coordinator"), *(cluster.container("worker", number) for number in range(1, 5))]
    rates = {name: (goodput(name, peer), goodput(peer, name)) for name in machines}
    print(rates)
    for name, (sent, received) in rates.items():
        assert sent == pytest.approx(PAYLOAD_PART * LINK_MBIT, rel=0.05), name
        assert received == pytest.approx(PAYLOAD_PART * LINK_MBIT, rel=0.05), name

    cluster.up("--no-recreate", "--scale=worker=5")
    log = ["docker", "logs", "--follow", machines[0]]
    with subprocess.Popen(log, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as following:
        assert following.stdout is not None
        seen = []
        for line in following.stdout:
            seen.append(line)
            if line.startswith("step "):
                break
        answer("kill", machines[3])
        last = following.stdout.read()
    assert answer("wait", machines[0]).strip() == "1", "".join(seen) + last
    [error] = [line for line in last.splitlines() if line.startswith("error: ")]
    assert machines[3] in error
    others = [*machines[1:3], machines[4], cluster.container("worker", 5)]
    assert answer("wait", *others).split() == ["1"] * 4
