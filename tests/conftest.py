"""What holds for every test: one torch thread, and nothing left running behind. Imports no part of pipecomp and no torch."""

from __future__ import annotations

import asyncio
import inspect
import os
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import hypothesis
import pytest

_GRACE_S = 2.0
"""How long what is about to end may take to do so; only a test that leaks waits for it."""

# A slow machine is no bug (no deadline). On CI the same examples every time: what fails there fails here too.
hypothesis.settings.register_profile("pipecomp", deadline=None, derandomize="CI" in os.environ, print_blob=True)
hypothesis.settings.load_profile("pipecomp")


@pytest.fixture(autouse=True)
def one_torch_thread() -> None:
    """Parity is promised bit for bit with one thread; a test that does not import torch does not pay for it here."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def nothing_left_running(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a thread, a child process or an asyncio task behind. Set up first, so torn down last."""
    if inspect.iscoroutinefunction(getattr(request.node, "obj", None)):
        request.getfixturevalue("no_task_left")
    threads, children = set(threading.enumerate()), _children()
    yield
    left = [thread for thread in threading.enumerate() if thread not in threads and not thread.daemon]
    for thread in left:
        thread.join(_GRACE_S)
    names = [thread.name for thread in left if thread.is_alive()]
    assert not names, f"the test left threads running: {', '.join(names)}"
    processes = {pid: command for pid, command in _children().items() if pid not in children}
    assert not processes, f"the test left processes running: {processes}"


@pytest.fixture
async def no_task_left() -> AsyncIterator[None]:
    before = asyncio.all_tasks()
    yield
    left = asyncio.all_tasks() - before - {asyncio.current_task()}
    if left:
        _, left = await asyncio.wait(left, timeout=_GRACE_S)
    assert not left, f"the test left tasks running: {', '.join(str(task.get_coro()) for task in left)}"


def _children() -> dict[int, str]:
    """Command lines of this process's children, but for those that multiprocessing keeps for as long as Python runs."""
    found = {}
    for path in Path("/proc/self/task").glob("*/children"):
        try:
            pids = path.read_text().split()
        except OSError:  # the thread ended between being listed and being asked
            continue
        for pid in pids:
            command = _command(int(pid))
            if command and "resource_tracker" not in command and "forkserver" not in command:
                found[int(pid)] = command
    return found


def _command(pid: int) -> str:
    """Empty for one that has ended, waited for or not."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""
