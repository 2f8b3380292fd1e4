"""Imports what `pipecomp launch` imports, once, then forks one launch for each line it reads: a case takes a second, not ten.

    {"run": FILE, "output": FILE, "arguments": [...]}  ->  {"pid": 123}
    {"wait": 123, "timeout_s": 10}                     ->  {"status": 256} or {"status": null}
"""

from __future__ import annotations

import json
import os
import sys
import time

from pipecomp import launching
from pipecomp.config import DataConfig, ModelConfig, RunConfig


def serve() -> None:
    print("{}", flush=True)
    launching.preload(RunConfig(model=ModelConfig(config={"model_type": "gpt2"}), data=DataConfig()))
    for line in sys.stdin:
        request = json.loads(line)
        reply = {"status": wait(request["wait"], request["timeout_s"])} if "wait" in request else {"pid": start(request)}
        print(json.dumps(reply), flush=True)


def start(request: dict) -> int:
    pid = os.fork()
    if pid:
        return pid
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.argv = ["pipecomp", "launch", request["run"], *request["arguments"]]
    from pipecomp.cli import main

    main()
    raise AssertionError("main never returns")


def wait(pid: int, timeout_s: float) -> int | None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return status
        time.sleep(0.02)
    return None


if __name__ == "__main__":
    serve()
