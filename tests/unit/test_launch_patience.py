"""How long `launch` waits for workers that still write once the coordinator has ended."""

from __future__ import annotations

import pytest

from pipecomp.config import parse_run_config
from pipecomp.launching import LEAVE_S, WRITE_S, Launch, LaunchFiles

CONFIG = parse_run_config({"model": {"name": "unused"}, "data": {"train": "unused.txt"}})


@pytest.mark.parametrize(
    ("store_folder", "exit_code", "patience_s"), [(None, 0, LEAVE_S), ("kept", 0, WRITE_S), ("kept", 1, LEAVE_S)]
)
def test_workers_get_to_write_the_messages_that_a_good_run_keeps(
    store_folder: str | None, exit_code: int, patience_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    monkeypatch.setattr(Launch, "_end_workers", lambda _, seconds: waited.append(seconds))
    launch = Launch(CONFIG, LaunchFiles(), quiet=True, store_folder=store_folder)
    assert launch._conclude(exit_code << 8) == exit_code
    launch._close(*launch._open_ends)
    assert waited == [patience_s]
