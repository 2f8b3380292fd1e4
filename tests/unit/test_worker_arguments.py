"""`python -m workers`: what its arguments become. The same as those of `pipecomp worker`."""

from __future__ import annotations

import re

import pytest
import typer.main

from pipecomp.cli import app
from workers import service
from workers.__main__ import main


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[service.WorkerOptions]:
    """Workers that would have been run."""
    workers: list[service.WorkerOptions] = []

    def run_worker(options: service.WorkerOptions) -> int:
        workers.append(options)
        return 0

    monkeypatch.setattr(service, "run_worker", run_worker)
    return workers


def test_sizes_and_device_reach_the_worker(started: list[service.WorkerOptions]) -> None:
    arguments = ["--coordinator", "c:1", "--device", "auto", "--message-memory", "0B", "--message-disk", "2kB"]
    assert main(arguments) == 0
    options = started[0]
    assert (options.device, options.message_memory_nbytes, options.message_disk_nbytes) == ("auto", 0, 2000)


@pytest.mark.parametrize("flag", ["--message-memory", "--message-disk"])
def test_an_empty_size_is_refused_and_not_taken_for_the_run_files(
    flag: str, started: list[service.WorkerOptions], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--coordinator", "c:1", flag, ""]) == 1
    assert started == []
    assert capsys.readouterr().err.startswith(f"error: {flag} = '': write a size such as '500MB'")


def test_it_takes_what_the_command_takes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    flags = set(re.findall(r"--[a-z-]+", capsys.readouterr().out)) - {"--help"}
    command = typer.main.get_command(app).commands["worker"]  # type: ignore[attr-defined]
    assert flags == {option for parameter in command.params for option in parameter.opts}
