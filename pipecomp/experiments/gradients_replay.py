"""The part `replay` of `pipecomp bench gradients`: published data-parallel settings over slow links, with all three kinds of
traffic compressed, held against the ideal on paper. Knows settings, runs on hosts and their figures; keeps no file.

The ideal: compute at its nominal speed, links at the rate that was measured, the exchange as soon as each stage has its
gradients; and, since a few cores here stand in for a machine for each worker, the processor time of optimizers and of gradients'
codecs, measured apart on those cores, all of them at work.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import torch
import xxhash

from pipecomp import planning
from pipecomp.config import RunConfig, parse_run_config
from pipecomp.errors import ConfigError, PipecompError
from pipecomp.experiments.gradients_part import Keep, Part, Table
from pipecomp.experiments.hosted_run import HostedRun, run_on_hosts
from pipecomp.experiments.links_cells import TEXT, TOKENIZER, rate_nbits_per_s
from pipecomp.results import Row
from pipecomp.runtime.channel import CodecThreads, Destination, Inbox
from pipecomp.runtime.gradient_row import GradientRow, make_readable
from pipecomp.runtime.optimizer import OwnedParameter, ShardOptimizer, Update
from pipecomp.runtime.rehearsal import make_codec, rehearse_codecs
from pipecomp.runtime.replicas import Coding, Peers, ReplicaExchange, planned_nbytes
from pipecomp.testing.goodput import measure_neighbours
from pipecomp.testing.hosts import HostsFailed, NamespaceHosts, why_not
from pipecomp.testing.shaping import JUMBO_MTU, KernelRefused, LinkShape
from pipecomp.types import Kind, TensorSpec

KEY = "replay"
RATES = ("1gbit", "100mbit", "30mbit")
METHODS: Mapping[str, tuple[int, int, int] | None] = {"fp32": None, "fw3bw6 g4": (3, 6, 4), "fw2bw4 g2": (2, 4, 2)}
"""Bits of changes of activations, of their gradients, and of model gradients."""
_VERSION = 1
_WARM_UPS, _FP32_WARM_UPS = 3, 1
_MEASURED_S, _FEWEST, _MOST = 60.0, 2, 5
_CARRIED = 0.99
_LEAST_RATIO = 0.9
_LEAST_SPEEDUPS: Mapping[str, float] = {"fw3bw6 g4": 6.3, "fw2bw4 g2": 8.5}
_SLOWEST = RATES[-1]


class Setting(NamedTuple):
    """What is replayed."""

    title: str
    num_stages: int
    num_replicas: int
    num_microbatches: int
    """Of each replica, one sample each."""
    num_rows: int
    num_columns: int
    forward_s: float
    """Of one stage and one microbatch."""
    backward_s: float
    weights_s: float
    num_parameters: int
    """Of one stage."""

    @property
    def num_workers(self) -> int:
        return self.num_stages * self.num_replicas

    @property
    def batch_size(self) -> int:
        return self.num_microbatches * self.num_replicas


SETTING = Setting(
    "GPT-2 XL's activations and compute, 4 stages x 2 replicas, 16 microbatches each, 50 M parameters a stage",
    4, 2, 16, 1024, 1600, 0.102, 0.308, 0.102, 50_000_000,
)  # fmt: skip
"""A quarter of the model a stage: twice the times of an eighth, as `bench links` has them."""


class Order(NamedTuple):
    """One cell and all that its figures depend on."""

    method: str
    rate: str
    num_warm_up: int
    num_measured: int
    config: RunConfig
    best: planning.Candidate
    settings: str
    """A hash of all of it."""


def part(setting: Setting = SETTING) -> Part:
    """What `pipecomp bench gradients` runs."""
    return Part(
        KEY,
        [f"{method}, {rate}" for rate in RATES for method in METHODS],
        settings=lambda: {name: order.settings for name, order in _orders(setting).items()},
        measure=lambda wanted, keep: _measure(setting, wanted, keep),
        tables=lambda rows: {KEY: _table(setting, rows)},
        bars=bars,
    )


def _orders(setting: Setting) -> dict[str, Order]:
    reason = why_not()
    if reason:
        raise ConfigError(f"hosts are network namespaces: {reason}")
    for path in (TEXT, TOKENIZER):
        if not path.exists():
            raise ConfigError(f"the benchmark needs {path}: run it in the folder of the source tree")
    return {f"{method}, {rate}": _make_order(setting, method, rate) for rate in RATES for method in METHODS}


def _measure(setting: Setting, wanted: Sequence[str], keep: Keep) -> list[str]:
    failures, all_orders = [], _orders(setting)
    for name in wanted:
        try:
            row = run(all_orders[name], setting)
        except (PipecompError, HostsFailed, KernelRefused) as error:
            failures.append(f"replay, {name}: {error}")
            continue
        keep(name, row)
        sys.stdout.write(f"replay, {name}: {row['step_s']:.2f} s a step, {100 * row['ratio']:.1f} % of the ideal\n")
        sys.stdout.flush()
    return failures


def _table(setting: Setting, rows: Sequence[Row]) -> Table:
    heads = ("links", "traffic", "step", "ideal", "of it for processors", "of the ideal", "sequences/s", "of fp32")
    fp32 = {row["rate"]: row["step_s"] for row in rows if row["method"] == "fp32"}
    lines = [
        (
            row["rate"],
            row["method"],
            f"{row['step_s']:.2f} s",
            f"{row['ideal_s']:.2f} s",
            f"{row['processors_s']:.2f} s",
            f"{100 * row['ratio']:.1f} %",
            f"{row['sequences_per_s']:.3f}",
            f"{fp32[row['rate']] / row['step_s']:.2f} x" if row["rate"] in fp32 else "-",
        )
        for row in rows
    ]
    return Table(f"{setting.title}:", heads, lines)


def run(order: Order, setting: Setting = SETTING) -> Row:
    """Run one cell on hosts; its figures.

    Raises:
        PipecompError: a process failed; says what it printed.
    """
    rehearse_codecs(order.config, setting.num_columns)
    shape = LinkShape(rate_nbits_per_s(order.rate), 0.0)
    hosts = NamespaceHosts(
        setting.num_workers + 1, shape, unshaped=[setting.num_workers], mtu=JUMBO_MTU, congestion="cubic", keeps_windows=True
    )
    processor_s = processor_seconds(setting, order.config)
    with hosts, tempfile.TemporaryDirectory(prefix="bench-gradients-") as folder:
        goodput = statistics.median(measure_neighbours(hosts, 3))
        nominal_s = order.best.step.duration_s + exchange_nbytes(setting, order.config) / goodput
        label = f"replay {order.method} {order.rate}"
        asked = HostedRun(label, order.config, setting.num_workers, order.num_warm_up, order.num_measured, nominal_s + 10)
        outcome = run_on_hosts(hosts, asked, Path(folder))
        hosts.check()
        emulation = hosts.emulation
    times = outcome.times_s[order.num_warm_up :]
    step_s, network_s = statistics.median(times), _network_s(setting, order, goodput)
    shared_s = sum(processor_s.values()) * setting.num_workers / (os.cpu_count() or 1)
    traffic = outcome.summary["traffic"]
    planned = setting.num_workers * len(outcome.times_s) * exchange_nbytes(setting, order.config)
    return {
        "method": order.method,
        "rate": order.rate,
        "emulation": emulation,
        "goodput_nbits_per_s": round(8 * goodput),
        "times_s": [round(time_s, 3) for time_s in times],
        "warm_up_times_s": [round(time_s, 3) for time_s in outcome.times_s[: order.num_warm_up]],
        "step_s": round(step_s, 4),
        "sequences_per_s": round(setting.batch_size / step_s, 4),
        "network_ideal_s": round(network_s, 4),
        "processor_s_of_a_worker": {name: round(seconds, 4) for name, seconds in processor_s.items()},
        "processors_s": round(shared_s, 4),
        "ideal_s": round(network_s + shared_s, 4),
        "ratio": round((network_s + shared_s) / step_s, 4),
        "ratio_to_network_ideal": round(network_s / step_s, 4),
        "schedule": order.best.label,
        **outcome.load,
        "payload_nbytes": {kind: traffic[kind]["payload_bytes"] for kind in ("forward", "backward", "gradients")},
        "header_nbytes": {kind: traffic[kind]["header_bytes"] for kind in ("forward", "backward", "gradients")},
        "gradients_differ_nbytes": traffic["gradients"]["payload_bytes"] - planned,
    }


def bars(rows: Sequence[Row]) -> list[Row]:
    """What is asked of the rows of this part."""
    found = [_at_least(f"replay, {row['method']}, {row['rate']}: part of the ideal", row["ratio"], _LEAST_RATIO) for row in rows]
    at = {row["method"]: row for row in rows if row["rate"] == _SLOWEST}
    for method, least in _LEAST_SPEEDUPS.items():
        if method in at and "fp32" in at:
            speedup = round(at["fp32"]["step_s"] / at[method]["step_s"], 4)
            found.append(_at_least(f"replay, {method}, {_SLOWEST}: times the throughput of fp32", speedup, least))
    if rows:
        worst = max(abs(row["gradients_differ_nbytes"]) for row in rows)
        name = "replay: bytes of gradients that differ from what the codec says, all cells"
        found.append({"name": name, "value": worst, "bar": 0, "holds": worst == 0})
    return found


def _at_least(name: str, value: float, bar: float) -> Row:
    return {"name": name, "value": value, "bar": bar, "holds": value >= bar}


# ------------------------------------------------------------------------------------------------------------- configurations


def _make_order(setting: Setting, method: str, rate: str) -> Order:
    nbits = rate_nbits_per_s(rate)
    goodput = _CARRIED * nbits / 8 if nbits else math.inf
    best = _on_paper(setting, _config(setting, method, 1, {}), goodput)
    num_deferred = best.num_deferred
    nominal_s = best.step.duration_s + exchange_nbytes(setting, _config(setting, method, 1, {})) / goodput
    num_warm_up = _FP32_WARM_UPS if METHODS[method] is None else _WARM_UPS
    num_measured = min(_MOST, max(_FEWEST, math.ceil(_MEASURED_S / nominal_s)))
    config = _config(setting, method, num_warm_up + num_measured, {"num_deferred": num_deferred})
    described: list[Any] = [_VERSION, setting, nbits, num_warm_up, num_measured, METHODS[method], num_deferred]
    settings = xxhash.xxh3_64_hexdigest(json.dumps(described, sort_keys=True).encode())
    return Order(method, rate, num_warm_up, num_measured, config, best, settings)


def _config(setting: Setting, method: str, num_steps: int, cluster: Mapping[str, Any]) -> RunConfig:
    """Every epoch is one step, so that a sample's next visit is in the next step."""
    bits = METHODS[method]
    identity = {"codec": "identity"}
    codecs: list[dict[str, Any]] = [identity, identity, identity]
    if bits is not None:
        names = ("delta", "uniform", "uniform")
        codecs = [{"codec": name, "bits": number} for name, number in zip(names, bits, strict=True)]
    return parse_run_config(
        {
            "model": {
                "config": {
                    "model_type": "synthetic",
                    "n_layer": setting.num_stages,
                    "n_embd": setting.num_columns,
                    "n_positions": setting.num_rows,
                    "forward_s": setting.forward_s,
                    "backward_s": setting.backward_s,
                    "weights_s": setting.weights_s,
                    "block_parameters": setting.num_parameters,
                }
            },
            "data": {
                "train": str(TEXT.resolve()),
                "tokenizer": str(TOKENIZER.resolve()),
                "max_length": setting.num_rows,
                "packing": True,
                "max_train_samples": setting.batch_size,
                "max_eval_samples": 0,
            },
            "train": {
                "num_train_epochs": num_steps,
                "batch_size": setting.batch_size,
                "num_microbatches": setting.num_microbatches,
                "save_model": False,
            },
            "compression": dict(zip(("forward", "backward", "gradients"), codecs, strict=True)),
            "cluster": {
                "num_stages": setting.num_stages,
                "num_replicas": setting.num_replicas,
                "heartbeat_timeout_s": 60.0,
                **cluster,
            },
            "replicas": {"check_steps": 0},
        },
        "the replayed setting",
    )


# ----------------------------------------------------------------------------------------------------------- what is expected


def _rows(setting: Setting) -> list[GradientRow]:
    """Of each rank, as workers have them; meta tensors."""
    sizes = [[setting.num_parameters] for _ in range(setting.num_stages)]
    sizes[0].insert(0, setting.num_columns)
    sizes[-1].append(setting.num_columns)
    return [GradientRow([torch.nn.Parameter(torch.empty(n, device="meta")) for n in own]) for own in sizes]


def exchange_nbytes(setting: Setting, config: RunConfig) -> float:
    """Payload that a worker sends to other replicas in a step, the mean of all workers."""
    codec, replicas = make_codec(config, Kind.GRADIENTS), setting.num_replicas
    return statistics.fmean(
        planned_nbytes(list(row.buckets(replicas)), codec, replica, replicas)
        for row in _rows(setting)
        for replica in range(replicas)
    )


def _on_paper(setting: Setting, config: RunConfig, goodput: float) -> planning.Candidate:
    return planning.compare(_paper_setting(setting, config, goodput), setting.num_microbatches)[0]


def _paper_setting(setting: Setting, config: RunConfig, goodput: float) -> planning.Setting:
    spec = TensorSpec(setting.num_rows, setting.num_columns)
    forward, backward = (
        make_codec(config, kind).encoded_nbytes(spec, first_visit=False) for kind in (Kind.FORWARD, Kind.BACKWARD)
    )
    stage = planning.StageCost(setting.forward_s, setting.backward_s, setting.weights_s)
    host = planning.Host(goodput, goodput)
    return planning.even_setting(setting.num_stages, stage, planning.LinkCost(forward, backward), host)


def _network_s(setting: Setting, order: Order, goodput: float) -> float:
    """The shortest step of any shipped schedule with the exchange at its end, at the rate that was measured."""
    paper = _paper_setting(setting, order.config, goodput)
    nbytes = [exchange_nbytes(setting, order.config)] * setting.num_stages
    candidates = planning.compare(paper, setting.num_microbatches)
    return min(planning.with_exchange_s(each.step, paper, nbytes) for each in candidates)


def processor_seconds(setting: Setting, config: RunConfig) -> dict[str, float]:
    """What one worker's optimizer, norms and gradients' codecs take of a processor in a step, by thread time, while every
    processor of this machine does the same."""
    found: list[dict[str, float]] = []
    workers = [threading.Thread(target=lambda: found.append(_one_worker_s(setting, config))) for _ in range(os.cpu_count() or 1)]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    torch.set_num_threads(threads)
    return {name: statistics.fmean(each[name] for each in found) for name in found[0]}


def _one_worker_s(setting: Setting, config: RunConfig) -> dict[str, float]:
    parameter = torch.nn.Parameter(torch.randn(setting.num_parameters) * 0.02)
    gradient = torch.randn(setting.num_columns).repeat(-(-parameter.numel() // setting.num_columns))[: parameter.numel()]
    row = GradientRow([parameter])
    coding = Coding(make_codec(config, Kind.GRADIENTS), config.replicas.error_feedback, 0)
    inbox = cast("Inbox", SimpleNamespace(link=SimpleNamespace(name="")))  # of which only the name is asked
    to = Destination("", 1, 1, Kind.GRADIENTS, 0, 0)
    exchange = ReplicaExchange("0", row, Peers(0, {1: inbox}, {1: to}), coding, cast("CodecThreads", None))
    optimizer = ShardOptimizer([OwnedParameter(0, "weight", parameter, counts_in_norm=True)], config.train)
    times: dict[str, list[float]] = {"codecs": [], "norms": [], "optimizer": []}
    for step in range(3):  # the first takes all memory for the first time
        parameter.grad = gradient.clone()
        make_readable(parameter)
        for name, work in (
            ("codecs", lambda: exchange.rehearse(step)),  # noqa: B023 - called at once
            ("norms", optimizer.layer_norms),
            ("optimizer", lambda: optimizer.step(Update(1e-6, 1.0))),
        ):
            begun = time.thread_time()
            work()
            times[name].append(time.thread_time() - begun)
    return {name: min(seconds[1:]) for name, seconds in times.items()}
