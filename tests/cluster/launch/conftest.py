"""One real launch after another, watched through its step log and its processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
END_S = 10.0
"""Whatever is killed, everything ends within this time."""

RUN = """
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
train = "%(root)s/examples/state-of-the-union.jsonl"
tokenizer = "%(root)s/examples/demo-gpt2"
max_length = 32
max_train_samples = 400
max_eval_samples = 16
[train]
batch_size = 4
num_microbatches = 2
num_train_epochs = 1
output_dir = "%(folder)s/model"
[cluster]
num_stages = 2
heartbeat_interval_s = 0.2
"""


class LaunchServer:
    """Forks launches from one process that has imported everything."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "launch_server.py")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        assert self._process.stdout is not None
        self._process.stdout.readline()  # from here on it looks like what it is to those who list processes

    def ask(self, request: dict[str, object]) -> dict[str, int | None]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer: dict[str, int | None] = json.loads(self._process.stdout.readline())
        return answer

    def close(self) -> None:
        """At any moment: its launches have ended, and it holds nothing."""
        self._process.kill()
        self._process.communicate()


class LaunchedRun:
    """One launch: its processes by name, what it printed, how it ended."""

    def __init__(self, server: LaunchServer, folder: Path, overrides: list[str]) -> None:
        self._server = server
        self.folder = folder
        run_file, self._log, self._output = folder / "run.toml", folder / "steps.jsonl", folder / "output.txt"
        run_file.write_text(RUN % {"root": ROOT, "folder": folder})
        arguments = ["--log", str(self._log), "--summary", str(folder / "summary.json"), "--trace", str(folder / "trace.json")]
        for override in overrides:
            arguments += ["--set", override]
        pid = server.ask({"run": str(run_file), "output": str(self._output), "arguments": arguments})["pid"]
        assert pid is not None
        self.pid = pid
        self.seen: dict[str, int] = {}

    @property
    def output(self) -> str:
        return self._output.read_text()

    @property
    def summary(self) -> dict[str, object]:
        return json.loads((self.folder / "summary.json").read_text())

    @property
    def trace(self) -> dict[str, object]:
        return json.loads((self.folder / "trace.json").read_text())

    def events(self) -> list[dict[str, object]]:
        if not self._log.exists():
            return []
        return [json.loads(line) for line in self._log.read_text().splitlines(keepends=True) if line.endswith("\n")]

    def until(self, condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, self.output
            time.sleep(0.005)

    def until_phase(self, phase: str) -> None:
        self.until(lambda: any(event.get("phase") == phase for event in self.events()))

    def until_step(self, step: int) -> None:
        self.until(lambda: any(event.get("step", 0) >= step for event in self.events()))  # type: ignore[operator]

    def find(self, name: str) -> int:
        """Process id of `launch` or one of its children; every child seen is remembered."""
        if name == "launch":
            self.look()
            return self.pid
        self.until(lambda: self.look() is None and name in self.seen)
        return self.seen[name]

    def look(self) -> None:
        for folder in Path("/proc").iterdir():
            if not folder.name.isdigit():
                continue
            try:
                stat = (folder / "stat").read_text()
            except OSError:
                continue
            name, _, rest = stat.partition("(")[2].rpartition(")")
            if int(rest.split()[1]) == self.pid and name != "python":
                self.seen[name] = int(folder.name)

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        os.kill(self.find(name), number)

    def exit_status(self, timeout_s: float = END_S) -> int:
        status = self._server.ask({"wait": self.pid, "timeout_s": timeout_s})["status"]
        assert status is not None, f"still there after {timeout_s} s:\n{self.output}"
        return status

    def until_nobody_is_left(self, timeout_s: float = END_S) -> None:
        self.until(lambda: not any(is_alive(pid) for pid in self.seen.values()), timeout_s)


def is_alive(pid: int) -> bool:
    """A zombie whose parent is gone counts as dead: only its exit code is left."""
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


@pytest.fixture(scope="session", autouse=True)  # there before a test begins, so that no test is taken for its parent
def launch_server() -> Iterator[LaunchServer]:
    server = LaunchServer()
    yield server
    server.close()


@pytest.fixture
def launched(launch_server: LaunchServer, tmp_path: Path) -> Iterator[Callable[..., LaunchedRun]]:
    runs: list[LaunchedRun] = []

    def start(*overrides: str) -> LaunchedRun:
        runs.append(LaunchedRun(launch_server, tmp_path, list(overrides)))
        for name in ("coordinator", "worker-0", "worker-1"):
            runs[-1].find(name)
        return runs[-1]

    yield start
    for run in runs:
        for pid in (run.pid, *run.seen.values()):
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)
