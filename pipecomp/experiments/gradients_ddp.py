"""The part `ddp` of `pipecomp bench gradients`: how long replicas talk about gradients, beside DistributedDataParallel over gloo.
Knows hosts, run files and commands; no result file.

Four hosts are network namespaces of this machine, each sending and receiving at the same rate; a fifth, unshaped, has pipecomp's
coordinator. All systems have as many parameters, whose gradients cost next to nothing, and AdamW. The time of communication is a
step's on four hosts less the same step's on one. The systems take turns; a turn starts processes anew, and is a cell.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from pipecomp.config import RunConfig, parse_run_config
from pipecomp.errors import ConfigError, PipecompError
from pipecomp.experiments.gradients_part import Keep, Part, Table
from pipecomp.experiments.hosted_run import HostedRun, run_on_hosts
from pipecomp.results import Row
from pipecomp.testing.goodput import measure_neighbours
from pipecomp.testing.hosts import HostsFailed, NamespaceHosts, why_not
from pipecomp.testing.shaping import JUMBO_MTU, KernelRefused, LinkShape

KEY = "ddp"
_VERSION = 1
"""Goes up when the same settings would give other figures; every cell is then measured again."""
TEXT, TOKENIZER = Path("examples/state-of-the-union.jsonl"), Path("examples/demo-gpt2")
PEER, HOOK, OURS = "DDP, fp32 all-reduce", "DDP with pipecomp's hook, 4 bits", "pipecomp, 4 bits"
CODEC = {"codec": "uniform", "bits": 4}
SYSTEMS: Mapping[str, Mapping[str, Any] | None] = {PEER: None, HOOK: CODEC, OURS: CODEC}
"""What gradients cross by; None: as they are."""
MOST = 1 / 6
"""Of the peer's time of communication."""
HEADS = ("system", "step", "step of one replica", "communication", "of the peer's", "sent by a host a step")
_WIDTH, _LENGTH = 64, 16  # of activations, which cross no link here
_TURN_S, _POLL_S = 900.0, 0.1
_TAIL = 2000


class Setting(NamedTuple):
    """What every system is given."""

    num_blocks: int = 20
    block_values: int = 2_500_000
    num_replicas: int = 4
    rate_nbits_per_s: int = 100_000_000
    num_warm_up: int = 2
    num_measured: int = 5
    num_turns: int = 3

    @property
    def num_steps(self) -> int:
        return self.num_warm_up + self.num_measured

    @property
    def num_values(self) -> int:
        return self.num_blocks * self.block_values


class Turn(NamedTuple):
    """A cell."""

    system: str
    num_replicas: int
    turn: int

    def __str__(self) -> str:
        return f"{self.system}, {self.num_replicas} {'replica' if self.num_replicas == 1 else 'replicas'}, turn {self.turn}"


def part(setting: Setting = Setting()) -> Part:  # noqa: B008 - a frozen value
    """What `pipecomp bench gradients` runs."""
    turns = {str(turn): turn for turn in _turns(setting)}
    return Part(
        KEY,
        list(turns),
        settings=lambda: _settings(setting),
        measure=lambda wanted, keep: _measure(setting, [turns[name] for name in wanted], keep),
        tables=lambda rows: {KEY: _table(setting, rows)},
        bars=lambda rows: list(_bars(setting, rows)),
    )


def _turns(setting: Setting) -> Iterator[Turn]:
    """In the order in which they are taken: the first system is another one in each round."""
    names = list(SYSTEMS)
    for number in range(setting.num_turns):
        for system in (*names[number % len(names) :], *names[: number % len(names)]):
            yield Turn(system, setting.num_replicas, number)
            yield Turn(system, 1, number)


def _settings(setting: Setting) -> dict[str, str]:
    reason = why_not()
    if reason:
        raise ConfigError(f"hosts are network namespaces: {reason}")
    for path in (TEXT, TOKENIZER):
        if not path.exists():
            raise ConfigError(f"it needs {path}: run the command in the folder of the source tree")
    return {
        str(turn): xxhash.xxh3_64_hexdigest(json.dumps([_VERSION, setting, turn, SYSTEMS[turn.system]]).encode())
        for turn in _turns(setting)
    }


# ---------------------------------------------------------------------------------------------------------- one turn


def _measure(setting: Setting, wanted: Sequence[Turn], keep: Keep) -> list[str]:
    failures = []
    for turn in wanted:
        try:
            figures = take_turn(setting, turn)
        except PipecompError as error:
            failures.append(f"{turn}: {error}")
            _say(f"FAILED  {failures[-1]}")
            continue
        keep(str(turn), {**turn._asdict(), **figures})
        _say(f"{turn}: {figures['step_s']:.3f} s a step, {figures['sent_nbytes_per_step'] / 1e6:.1f} MB sent by a host")
    return failures


def take_turn(setting: Setting, turn: Turn) -> Row:
    """Start one system on hosts of its own; its steps, and what one of its hosts has sent for each.

    Raises:
        PipecompError: a process failed, or took too long; says what it printed.
    """
    shape = LinkShape(setting.rate_nbits_per_s)
    leader = turn.num_replicas
    try:
        with (
            NamespaceHosts(
                leader + 1, shape, unshaped=[leader], mtu=JUMBO_MTU, congestion="cubic", keeps_windows=True
            ) as hosts,
            tempfile.TemporaryDirectory(prefix="bench-gradients-") as folder,
        ):
            goodput = measure_neighbours(hosts, min(2, turn.num_replicas))
            before = hosts.nbytes_sent(0)
            system = _pipecomp if turn.system == OURS else _ddp
            times_s, load = system(hosts, setting, turn, Path(folder))
            sent = hosts.nbytes_sent(0) - before
            emulation = hosts.emulation
    except (HostsFailed, KernelRefused) as error:
        raise PipecompError(str(error)) from error
    measured = times_s[setting.num_warm_up :]
    return {
        "step_s": round(statistics.median(measured), 5),
        "times_s": [round(time_s, 5) for time_s in measured],
        "warm_up_times_s": [round(time_s, 5) for time_s in times_s[: setting.num_warm_up]],
        "sent_nbytes_per_step": round(sent / setting.num_steps),
        "goodput_nbits_per_s": round(8 * goodput[0]) if goodput else None,
        "emulation": emulation,
        **load,
    }


def _ddp(hosts: NamespaceHosts, setting: Setting, turn: Turn, folder: Path) -> tuple[list[float], Row]:
    processes, logs = [], [folder / f"rank-{rank}.log" for rank in range(turn.num_replicas)]
    for rank, log in enumerate(logs):
        given = {
            "num_blocks": setting.num_blocks, "block_values": setting.block_values, "num_steps": setting.num_steps,
            "codec": SYSTEMS[turn.system], "rank": rank, "world_size": turn.num_replicas,
            "master": f"{hosts.address(0)}:29500", "interface": "eth0",
        }  # fmt: skip
        command = [sys.executable, "-m", "pipecomp.experiments.gradients_ddp_job", json.dumps(given)]
        processes.append(hosts.start(rank, command, log=log, sees_all=True))
    _wait(processes, logs)
    times_s: list[float] = json.loads(logs[0].read_text(encoding="utf-8").splitlines()[-1])
    return times_s, {}


def _wait(processes: Sequence[subprocess.Popen[str]], logs: Sequence[Path]) -> None:
    """Until all have ended well; the first that has not is named, whichever it is."""
    deadline = time.monotonic() + _TURN_S
    running = dict(zip(processes, logs, strict=True))
    while running:
        for process, log in list(running.items()):
            code = process.poll()
            if code is None and time.monotonic() < deadline:
                continue
            if code != 0:
                ending = f"is not done after {_TURN_S:g} s" if code is None else f"ended with exit code {code}"
                raise PipecompError(f"{log.stem} {ending}; the end of what it said:\n{log.read_text()[-_TAIL:]}")
            del running[process]
        time.sleep(_POLL_S)


def _pipecomp(hosts: NamespaceHosts, setting: Setting, turn: Turn, folder: Path) -> tuple[list[float], Row]:
    config = run_config(setting, turn.num_replicas)
    nominal_s = 8 * 4 * setting.num_values / setting.rate_nbits_per_s
    run = HostedRun(str(turn), config, turn.num_replicas, setting.num_warm_up, setting.num_measured, nominal_s)
    outcome = run_on_hosts(hosts, run, folder)
    return outcome.times_s, outcome.load


def run_config(setting: Setting, num_replicas: int) -> RunConfig:
    """One stage, one sample for each replica and step; every epoch is one step."""
    return parse_run_config(
        {
            "model": {
                "config": {
                    "model_type": "synthetic",
                    "n_layer": setting.num_blocks,
                    "n_embd": _WIDTH,
                    "n_positions": _LENGTH,
                    "block_parameters": setting.block_values,
                }
            },
            "data": {
                "train": str(TEXT.resolve()),
                "tokenizer": str(TOKENIZER.resolve()),
                "max_length": _LENGTH,
                "packing": True,
                "max_train_samples": num_replicas,
                "max_eval_samples": 0,
            },
            "train": {
                "num_train_epochs": setting.num_steps,
                "batch_size": num_replicas,
                "num_microbatches": 1,
                "save_model": False,
            },
            "compression": {"gradients": CODEC},
            # Starting at once on a small machine takes its time, and a heartbeat late there is no failure.
            "cluster": {"num_stages": 1, "num_replicas": num_replicas, "heartbeat_timeout_s": 60.0},
        },
        f"{num_replicas} replicas",
    )


# ------------------------------------------------------------------------------------------------- what figures come to


class _Times(NamedTuple):
    """Of one system: medians over turns."""

    step_s: float
    alone_s: float
    sent_nbytes: float

    @property
    def communication_s(self) -> float:
        return self.step_s - self.alone_s


def _times(setting: Setting, rows: Sequence[Row], system: str) -> _Times | None:
    """None unless all turns are there."""
    own = [row for row in rows if row["system"] == system]
    together = [row for row in own if row["num_replicas"] == setting.num_replicas]
    alone = [row for row in own if row["num_replicas"] == 1]
    if min(len(together), len(alone)) < setting.num_turns:
        return None
    return _Times(
        statistics.median(row["step_s"] for row in together),
        statistics.median(row["step_s"] for row in alone),
        statistics.median(row["sent_nbytes_per_step"] for row in together),
    )


def _bars(setting: Setting, rows: Sequence[Row]) -> Iterator[Row]:
    own, peer = _times(setting, rows, OURS), _times(setting, rows, PEER)
    if own is not None and peer is not None:
        value = round(own.communication_s / peer.communication_s, 4)
        name = f"time of communication: {OURS}, times that of {PEER}"
        yield {"name": name, "value": value, "bar": round(MOST, 4), "holds": value <= round(MOST, 4)}


def _table(setting: Setting, rows: Sequence[Row]) -> Table:
    peer, lines = _times(setting, rows, PEER), []
    for system in SYSTEMS:
        times = _times(setting, rows, system)
        if times is not None:
            lines.append([
                system,
                f"{times.step_s:.3f} s",
                f"{times.alone_s:.3f} s",
                f"{times.communication_s:.3f} s",
                "–" if peer is None else f"{times.communication_s / peer.communication_s:.4f}",
                f"{times.sent_nbytes / 1e6:.1f} MB",
            ])  # fmt: skip
    title = (
        f"{setting.num_replicas} replicas of {setting.num_values:,} parameters, links of "
        f"{setting.rate_nbits_per_s / 1e6:g} Mbit/s: medians over {setting.num_turns} turns of {setting.num_measured} steps each"
    )
    return Table(title, HEADS, lines)


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
