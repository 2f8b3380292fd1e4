"""The benchmark `pipecomp bench peer`: pipecomp against torch.distributed.pipelining on the same blocks, hosts and links. Knows
run files, hosts and commands.

Four hosts are network namespaces of this machine, each sending and receiving at the rate of the row; a fifth, unshaped, has the
coordinator. At each rate the systems take turns, `ROUNDS` times in one run, so that whatever else the machine does falls on all.
A turn starts the processes anew; its figure is the median over its steps, the first ones left out: for the peer one, for
pipecomp the epochs in which kernels are new and messages are first visits. Of what is left, both systems take the same number,
and more without shaped links: there a few percent decide, and a machine is that much faster or slower for seconds on end. What
counts is the median over the turns.

Both systems are given the same number of cores, one thread a stage, the same sizes, AdamW, 1F1B. The labels are random for the
peer and text for pipecomp; neither changes the arithmetic of a step.
"""

from __future__ import annotations

import json as json_text
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pipecomp import results
from pipecomp.config import parse_run_config, resolved_toml
from pipecomp.errors import ConfigError, PipecompError
from pipecomp.experiments.torch_pipeline import Sizes
from pipecomp.testing.hosts import NamespaceHosts, why_not
from pipecomp.testing.shaping import LinkShape
from pipecomp.units import parse_rate

COMMAND, RESULTS = "pipecomp bench peer --json", Path("docs/results/peer.json")
PEER = "torch.distributed.pipelining"
UNSHAPED = "unshaped"
RATES = (UNSHAPED, "100mbit", "20mbit")
ROUNDS = 5
WORLD_SIZE = 4
SIZES = Sizes(
    width=256,
    num_heads=4,
    layers_per_stage=1,
    vocab_size=512,
    length=128,
    batch_size=32,
    num_microbatches=8,
)
_STEPS_AN_EPOCH, _COLD_EPOCHS, _COLD_STEPS_OF_PEER = 3, 2, 1
_WARM_EPOCHS, _WARM_EPOCHS_UNSHAPED = 2, 10
_TURN_S, _POLL_S = 300.0, 0.1
_PORT = 7700

IDENTITY = {"forward": {"codec": "identity"}, "backward": {"codec": "identity"}}
SYSTEMS: Mapping[str, Mapping[str, Any] | None] = {
    PEER: None,
    "identity": IDENTITY,
    "fw3bw6": {"forward": {"codec": "delta", "bits": 3}, "backward": {"codec": "uniform", "bits": 6}},
}
"""What crosses by which codec; None: the peer."""


class Bar(NamedTuple):
    """At most so many times the peer's step at that rate."""

    system: str
    rate: str
    most: float


BARS = (Bar("identity", UNSHAPED, 1.05), Bar("fw3bw6", "100mbit", 0.65), Bar("fw3bw6", "20mbit", 0.18))


def run(
    *, json: bool = False, path: Path = RESULTS, rates: tuple[str, ...] = RATES, rounds: int = ROUNDS
) -> results.Row:
    """Take all turns, print a table, and with `json` write the result to `path` after each rate; return the result.

    Raises:
        ConfigError: this machine cannot have such hosts.
        PipecompError: a process failed, or took longer than five minutes.
    """
    reason = why_not()
    if reason:
        raise ConfigError(f"{COMMAND} lays out hosts as network namespaces: {reason}")
    rows: list[results.Row] = []
    outcome: results.Row = {}
    with tempfile.TemporaryDirectory(prefix="bench-peer-") as name:
        folder = Path(name)
        prepare_text(folder)
        for rate in rates:
            rows += _rate_rows(rate, folder, rounds)
            outcome = results.result(COMMAND, rows, bars_of(rows))
            if json:
                results.write(path, outcome, quiet=True)
    sys.stdout.write("\n".join([*table(rows), *results.verdicts(outcome["bars"])]) + "\n")
    return outcome


def bars_of(rows: list[results.Row]) -> list[results.Row]:
    """One for each of BARS whose row is there."""
    ratios = {(row["system"], row["rate"]): row["ratio_to_peer"] for row in rows}
    return [
        {
            "name": f"{system}, {rate}: step, times that of {PEER}",
            "value": ratios[system, rate],
            "bar": most,
            "holds": ratios[system, rate] <= most,
        }
        for system, rate, most in BARS
        if (system, rate) in ratios
    ]


def table(rows: list[results.Row]) -> list[str]:
    """For a person."""
    lines = [f"{'rate':<10}{'system':<32}{'step':>10}{'of the peer':>14}"]
    return lines + [
        f"{row['rate']:<10}{row['system']:<32}{row['step_s']:>8.3f} s{row['ratio_to_peer']:>14.3f}" for row in rows
    ]


def document_table(rows: list[results.Row]) -> list[str]:
    """For docs/performance.md."""
    lines = ["| links | system | step | of the peer's |", "| --- " * 4 + "|"]
    return lines + [
        f"| {row['rate']} | {row['system']} | {row['step_s']:.3f} s | {row['ratio_to_peer']:.3f} |" for row in rows
    ]


def _rate_rows(rate: str, folder: Path, rounds: int) -> list[results.Row]:
    turns: dict[str, list[list[float]]] = {system: [] for system in SYSTEMS}
    names = list(SYSTEMS)
    for number in range(rounds):
        for system in (*names[number % len(names) :], *names[: number % len(names)]):
            times_s = take_turn(system, rate, folder)
            turns[system].append(times_s)
            sys.stdout.write(f"{rate:<10}{system:<32}{statistics.median(times_s):>8.3f} s\n")
            sys.stdout.flush()
    medians = {system: [statistics.median(times_s) for times_s in turns[system]] for system in SYSTEMS}
    return [
        {
            "rate": rate,
            "system": system,
            "step_s": round(statistics.median(medians[system]), 5),
            "ratio_to_peer": round(statistics.median(medians[system]) / statistics.median(medians[PEER]), 4),
            "turns_s": [[round(t, 5) for t in times_s] for times_s in turns[system]],
        }
        for system in SYSTEMS
    ]


def take_turn(system: str, rate: str, folder: Path) -> list[float]:
    """Start one system on hosts of its own; seconds of each of its warm steps."""
    nbits_per_s = None if rate == UNSHAPED else round(8 * parse_rate(rate, "rate"))
    with NamespaceHosts(WORLD_SIZE + 1, LinkShape(nbits_per_s), unshaped=[WORLD_SIZE]) as hosts:
        compression = SYSTEMS[system]
        num_warm = _WARM_EPOCHS_UNSHAPED if rate == UNSHAPED else _WARM_EPOCHS
        if compression is None:
            num_steps = _COLD_STEPS_OF_PEER + num_warm * _STEPS_AN_EPOCH
            return _turn_of_peer(hosts, folder, num_steps)[_COLD_STEPS_OF_PEER:]
        sections = {**run_sections(folder, _COLD_EPOCHS + num_warm), "compression": dict(compression)}
        return _turn_of_pipecomp(hosts, folder, sections)[_COLD_EPOCHS * _STEPS_AN_EPOCH :]


def _turn_of_peer(hosts: NamespaceHosts, folder: Path, num_steps: int) -> list[float]:
    processes, logs = [], [folder / f"peer-{rank}.log" for rank in range(WORLD_SIZE)]
    for rank in range(WORLD_SIZE):
        given = {
            **SIZES._asdict(), "num_steps": num_steps, "rank": rank, "world_size": WORLD_SIZE,
            "master": f"{hosts.address(0)}:29500", "interface": "eth0",
        }  # fmt: skip
        command = [sys.executable, "-m", "pipecomp.experiments.torch_pipeline", json_text.dumps(given)]
        processes.append(hosts.start(rank, command, log=logs[rank], sees_all=True))
    _wait(PEER, processes, logs)
    times_s: list[float] = json_text.loads(logs[0].read_text().splitlines()[-1])
    return times_s


def _turn_of_pipecomp(hosts: NamespaceHosts, folder: Path, sections: dict[str, Any]) -> list[float]:
    run_file, log = folder / "run.toml", folder / "steps.jsonl"
    run_file.write_text(resolved_toml(parse_run_config(sections)))
    program, meeting = str(Path(sys.executable).with_name("pipecomp")), f"{hosts.address(WORLD_SIZE)}:{_PORT}"
    logs = [folder / f"{name}.log" for name in ("coordinator", *(f"worker-{rank}" for rank in range(WORLD_SIZE)))]
    leader = [program, "coordinator", str(run_file), "--bind", meeting, "--log", str(log)]
    processes = [hosts.start(WORLD_SIZE, leader, log=logs[0], sees_all=True)]
    for rank in range(WORLD_SIZE):
        join = [program, "worker", "--coordinator", meeting, "--name", f"worker-{rank}", "--threads", "1"]
        processes.append(hosts.start(rank, join, log=logs[1 + rank], sees_all=True))
    _wait("pipecomp", processes, logs)
    lines = [json_text.loads(line) for line in log.read_text().splitlines()]
    return [line["step_time_s"] for line in lines if line["event"] == "step"]


def _wait(system: str, processes: list[subprocess.Popen[str]], logs: list[Path]) -> None:
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
                raise PipecompError(f"{system}: {log.stem} {ending}; the end of what it said:\n{log.read_text()[-2000:]}")
            del running[process]
        time.sleep(_POLL_S)


def run_sections(folder: Path, num_epochs: int) -> dict[str, Any]:
    """A run file's sections without [compression]: the peer's model, step and optimizer on a text of the right size."""
    return {
        "model": {
            "config": {
                "model_type": "gpt2", "vocab_size": SIZES.vocab_size, "n_positions": SIZES.length, "n_embd": SIZES.width,
                "n_layer": WORLD_SIZE * SIZES.layers_per_stage, "n_head": SIZES.num_heads, "resid_pdrop": 0.0,
                "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0, "tie_word_embeddings": False,
                "activation_function": "gelu_pytorch_tanh",
            },
            "weights": "random",
        },
        "data": {
            "train": str(folder / "text.jsonl"), "tokenizer": str(folder), "max_length": SIZES.length, "packing": True,
            "max_train_samples": _STEPS_AN_EPOCH * SIZES.batch_size, "max_eval_samples": 1,
        },
        "train": {
            "num_train_epochs": num_epochs, "batch_size": SIZES.batch_size, "num_microbatches": SIZES.num_microbatches,
            "learning_rate": 1e-4, "save_model": False, "max_grad_norm": 0.0,
        },
        "cluster": {"num_stages": WORLD_SIZE, "layers": [2, *[1] * (WORLD_SIZE - 2), 2]},
    }  # fmt: skip


def prepare_text(folder: Path) -> None:
    """The shipped speeches, and a tokenizer of the peer's vocabulary made from them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    text = Path("examples/state-of-the-union.jsonl")
    if not text.exists():
        raise ConfigError(f"{COMMAND} needs {text} in the current folder: run it in pipecomp's repository")
    (folder / "text.jsonl").write_bytes(text.read_bytes())
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=SIZES.vocab_size, special_tokens=["<|endoftext|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    lines = [json_text.loads(line)["text"] for line in text.read_text(encoding="utf-8").splitlines()]
    tokenizer.train_from_iterator(lines, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|endoftext|>",
        "eos_token": "<|endoftext|>",
    }
    (folder / "tokenizer_config.json").write_text(json_text.dumps(settings))
