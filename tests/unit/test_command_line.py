"""The command line: what it offers, and how it says no."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import pipecomp
from pipecomp import launching

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from pipecomp.cli import main; main()", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "COLUMNS": "200", **environment},
    )


def test_the_version_is_the_packages():
    assert run("--version").stdout == f"pipecomp {pipecomp.__version__}\n"


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        ("launch", {"--set", "--summary", "--log", "--trace", "--plan", "--store-folder", "--quiet"}),
        ("coordinator", {"--bind", "--advertise", "--set", "--summary", "--log", "--trace", "--plan", "--quiet"}),
        ("plan", {"--figures", "--bind", "--apart", "--json", "--set"}),
        (
            "worker",
            {
                *("--coordinator", "--name", "--bind", "--advertise", "--model", "--config-hash", "--threads", "--device"),
                *("--store-folder", "--message-memory", "--message-disk"),
            },
        ),
        ("bench kernels", {"--json"}),
        ("bench convergence", {"--json"}),
        ("bench plots", set()),
        ("bench quality", {"--json", "--only", "--jobs"}),
        ("bench store", {"--json", "--folder"}),
        ("bench plan", {"--json"}),
    ],
)
def test_every_command_has_these_flags_and_no_others(command, flags):
    listed = {word.rstrip(",") for line in run(*command.split(), "--help").stdout.splitlines() for word in line.split()[:2]}
    assert {word for word in listed if word.startswith("--")} - {"--help"} == flags


def test_a_mistake_is_one_line_and_a_failing_exit():
    result = run("launch", "nowhere.toml")
    assert result.returncode == 1
    assert result.stderr == "error: cannot read the run file nowhere.toml: No such file or directory\n"


def test_the_traceback_is_there_for_those_who_ask():
    assert "Traceback" in run("launch", "nowhere.toml", PIPECOMP_DEBUG="1").stderr


def test_a_key_that_does_not_exist_is_named_with_its_neighbour(tmp_path):
    (tmp_path / "run.toml").write_text('[model]\nname = "m"\n[data]\ntrain = "t.txt"\n')
    result = run("launch", str(tmp_path / "run.toml"), "--set", "train.learning_rat=1")
    assert "unknown key 'learning_rat'; did you mean 'learning_rate'?" in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("command", "override", "text"),
    [
        ("launch", 'compression.tied={codec="unifor"}', "compression.tied: unknown codec 'unifor'; did you mean 'uniform'?"),
        ("coordinator", "cluster.schedule=gpip", "cluster.schedule = 'gpip': unknown schedule 'gpip'; did you mean 'gpipe'?"),
    ],
)
def test_a_mistake_in_a_run_file_is_told_with_the_files_name(command, override, text, tmp_path):
    (tmp_path / "run.toml").write_text('[model]\nname = "m"\n[data]\ntrain = "t.txt"\n')
    result = run(command, str(tmp_path / "run.toml"), "--set", override)
    assert result.stderr.startswith(f"error: {tmp_path}/run.toml: {text}")
    assert result.stderr.count("\n") == 1


def test_an_address_that_cannot_be_bound_is_one_line(tmp_path):
    (tmp_path / "run.toml").write_text('[model]\nname = "m"\n[data]\ntrain = "t.txt"\n')
    result = run("coordinator", str(tmp_path / "run.toml"), "--bind", "here")
    assert result.returncode == 1
    assert result.stderr == "error: --bind here: write HOST:PORT, for example 0.0.0.0:7700 (port 0 takes a free one)\n"


@pytest.mark.parametrize(("target", "text"), [("{}", "this is a folder"), ("{}/no/s.json", "there is no folder {}/no")])
def test_a_summary_that_could_not_be_written_is_refused_at_the_start(tmp_path, target, text):
    (tmp_path / "run.toml").write_text('[model]\nname = "m"\n[data]\ntrain = "t.txt"\n')
    result = run("coordinator", str(tmp_path / "run.toml"), "--summary", target.format(tmp_path))
    assert result.returncode == 1
    assert text.format(tmp_path) in result.stderr


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--coordinator", "nohost"), "--coordinator nohost: write HOST:PORT of the coordinator"),
        (("--coordinator", "h:"), "--coordinator h:: write HOST:PORT of the coordinator"),
        (("--coordinator", "127.0.0.1:70000"), "--coordinator 127.0.0.1:70000: write HOST:PORT of the coordinator"),
        (("--coordinator", "127.0.0.1:1", "--advertise", "x:y:z"), "--advertise x:y:z: write HOST, HOST:PORT or [IPV6]:PORT"),
        (("--coordinator", "127.0.0.1:1", "--bind", "here"), "--bind here: write HOST:PORT"),
    ],
)
def test_an_address_that_makes_no_sense_is_refused_before_anything_is_dialled(arguments, text):
    result = run("worker", *arguments)
    assert result.returncode == 1
    assert result.stderr.startswith(f"error: {text}")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("folder", "text"),
    [
        ("", "error: --store-folder '': name a folder (. is the current one), or leave the option out"),
        ("{0}/run.toml", "error: --store-folder {0}/run.toml: this is a file; name a folder"),
        ("{0}/run.toml/x", "error: --store-folder {0}/run.toml/x: Not a directory; choose a folder that can be written"),
        ("/proc/nope/x", "error: --store-folder /proc/nope/x: No such file or directory; choose a folder that can be written"),
    ],
)
def test_a_store_folder_that_cannot_be_used_is_refused_before_anything_is_started(folder, text, tmp_path):
    (tmp_path / "run.toml").write_text('[model]\nname = "m"\n[data]\ntrain = "t.txt"\n[messages]\nstore = "disk"\n')
    result = run("launch", str(tmp_path / "run.toml"), "--store-folder", folder.format(tmp_path))
    assert result.stderr == text.format(tmp_path) + "\n"
    assert result.returncode == 1


def test_a_worker_finds_a_store_folder_that_cannot_be_used_before_it_joins():
    result = run("worker", "--coordinator", "127.0.0.1:1", "--store-folder", "")
    assert result.stderr == "error: --store-folder '': name a folder (. is the current one), or leave the option out\n"
    assert result.stdout == ""


def test_a_store_folder_where_messages_stay_in_memory_is_refused_by_launch(tmp_path):
    (tmp_path / "run.toml").write_text('[model]\nname = "m"\n[data]\ntrain = "t.txt"\n')
    result = run("launch", str(tmp_path / "run.toml"), "--store-folder", str(tmp_path / "kept"))
    assert result.stderr.startswith(f"error: --store-folder {tmp_path}/kept needs messages.store = 'disk' or 'tiered'; with 'mem")
    assert not (tmp_path / "kept").exists()


def test_a_device_that_is_not_supported_is_refused():
    result = run("worker", "--coordinator", "h:1", "--device", "tpu")
    assert result.returncode == 2
    assert "'tpu' is not supported; allowed: cpu, auto" in result.stderr


@pytest.mark.parametrize(
    ("status", "text"),
    [(9, "killed by signal 9 (SIGKILL)"), (3 << 8, "exit code 3"), (0, "exit code 0"), (50, "killed by signal 50")],
)
def test_a_wait_status_is_told_in_words(status, text):
    assert launching.describe_status(status) == text
