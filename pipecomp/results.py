"""How a benchmark's result is kept: one JSON file with what was run, when, where, the rows and the bars. Knows no benchmark."""

from __future__ import annotations

import datetime as dt
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def result(command: str, rows: Sequence[Row], bars: Sequence[Row]) -> Row:
    """`rows`: the raw figures. `bars`: {name, value, bar, holds} for each figure that is asked for."""
    date = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
    return {"command": command, "date": date, "machine": machine(), "rows": list(rows), "bars": list(bars)}


def write(path: Path, outcome: Row, *, quiet: bool = False) -> None:
    """One row a line, so that a later result can be compared by eye. A reader sees the whole file, the old or the new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    parts = [
        f"{json.dumps(key)}: {_lines(value) if key in ('rows', 'bars') else json.dumps(value)}"
        for key, value in outcome.items()
    ]
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text("{\n" + ",\n".join(parts) + "\n}\n")
    beside.replace(path)
    if not quiet:
        sys.stdout.write(f"written to {path}\n")


def verdicts(bars: Sequence[Row]) -> list[str]:
    """A line for a person for each bar."""
    return [f"{'holds' if bar['holds'] else 'FAILS'}  {bar['value']:>8} against {bar['bar']:<5} {bar['name']}" for bar in bars]


def machine() -> Row:
    """What figures depend on."""
    cpu = platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [
            line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")
        ]
        cpu = names[0] if names else cpu
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cores": os.cpu_count(),
        "memory_nbytes": memory,
        "cpu": cpu,
        "numpy": importlib.metadata.version("numpy"),
        "torch": importlib.metadata.version("torch"),
    }


def _lines(rows: Sequence[Row]) -> str:
    return "[\n" + ",\n".join(f"  {json.dumps(row)}" for row in rows) + "\n]"
