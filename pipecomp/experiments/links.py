"""The benchmark `pipecomp bench links`: published slow-network settings replayed on one machine, and held against the ideal on
paper. Opens hosts, measures their links, keeps every cell at once, skips what is there. Knows no socket and no training."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from pipecomp.errors import ConfigError, PipecompError
from pipecomp.experiments import links_bars
from pipecomp.experiments.kept import KeptRows
from pipecomp.experiments.links_cells import (
    METHODS,
    PARTS,
    RATES,
    SETTINGS,
    Cell,
    Order,
    Setting,
    cells_of,
    find_setting,
    make_order,
    rate_nbits_per_s,
)
from pipecomp.experiments.links_run import run_cell
from pipecomp.models import model_from_config
from pipecomp.models.base import Batch
from pipecomp.results import Row
from pipecomp.runtime.rehearsal import rehearse_codecs
from pipecomp.runtime.stage import StageRuntime
from pipecomp.testing.goodput import describe, measure_neighbours
from pipecomp.testing.hosts import Hosts, HostsFailed, LocalHosts, NamespaceHosts, why_not
from pipecomp.testing.shaping import JUMBO_MTU, KernelRefused, LinkShape
from pipecomp.types import Shard

RESULTS = Path("docs/results/links.json")
COMMAND = "pipecomp bench links"
HOSTS = ("namespaces", "local")
"""What may stand for machines; the first is what the document is about."""
_TRIES = 20


def run(
    *,
    json: bool = True,
    rates: str | None = None,
    methods: str | None = None,
    setting: str | None = None,
    parts: str | None = None,
    hosts: str = HOSTS[0],
    path: Path = RESULTS,
    settings: Sequence[Setting] = SETTINGS,
) -> Row:
    """Run every cell that has no figures yet, print a table and bars, and return the result.

    Args:
        json: keep each cell's figures in `path` as soon as it ends, and skip cells that are there with the same settings.
        rates, methods: some of them, with commas between; None: all of the grid.
        setting: the key of one; None: all.
        parts: some of PARTS, with commas between; None: all.
        hosts: what stands for machines, see `open_hosts`.

    Raises:
        ConfigError: a name that is not known, or hosts that this machine cannot have.
        PipecompError: cells failed, after all others have ended.
    """
    chosen = settings if setting is None else [find_setting(setting, settings)]
    wanted_rates, wanted_methods, wanted_parts = _split(rates, RATES), _split(methods, tuple(METHODS)), _split(parts, PARTS)
    unknown = [part for part in wanted_parts if part not in PARTS]
    if unknown:
        raise ConfigError(f"--parts: there is no {unknown[0]!r}; there are: {', '.join(PARTS)}")
    orders = [
        make_order(each, cell, hosts=hosts, cluster=open_hosts(hosts, each, cell.rate, cell.delay_ms).cluster_settings())
        for each in chosen
        for cell in cells_of(each, wanted_rates, wanted_methods)
        if cell.part in wanted_parts
    ]
    kept: KeptRows[Cell] = KeptRows(
        path if json else None,
        COMMAND,
        key_of=Cell.of_row,
        order=_place,
        wanted={order.cell: order.settings for order in orders},
        bars=links_bars.bars,
    )
    missing = [order for order in orders if order.cell not in kept.rows]
    _say(f"{len(orders)} cells, {len(orders) - len(missing)} of them there already")
    failures = _run_all(missing, hosts, kept)
    outcome = kept.finish()
    _say(links_bars.report(outcome, settings))
    if failures:
        raise PipecompError("\n".join([f"{len(failures)} cells failed; the figures of the others are kept", *failures]))
    return outcome


def results_of(hosts: str) -> Path:
    """Where figures of this kind of hosts are kept: each kind in a file of its own."""
    return RESULTS if hosts == HOSTS[0] else RESULTS.with_name(f"{RESULTS.stem}-{hosts}.json")


def open_hosts(kind: str, setting: Setting, rate: str, delay_ms: float = 0.0) -> Hosts:
    """Hosts for a setting's stages, and one more, as fast as it goes, for the coordinator. Not entered yet.

    Raises:
        ConfigError: no such kind, or not on this machine.
    """
    shape = LinkShape(rate_nbits_per_s(rate), delay_ms / 1000)
    num_hosts = setting.num_stages + 1
    if kind == "local":
        return LocalHosts(num_hosts, shape)
    if kind != "namespaces":
        raise ConfigError(f"--hosts: there is no {kind!r}; there are: {', '.join(HOSTS)}")
    reason = why_not()
    if reason:
        raise ConfigError(f"--hosts namespaces: {reason}. Anywhere works --hosts local, which slows links down in user space")
    return NamespaceHosts(num_hosts, shape, unshaped=[setting.num_stages], mtu=JUMBO_MTU, congestion="cubic", keeps_windows=True)


def _split(text: str | None, everything: Sequence[str]) -> Sequence[str]:
    return everything if text is None else [word.strip() for word in text.split(",") if word.strip()]


def _place(cell: Cell) -> tuple[int, float, int, float, int]:
    """Settings and methods in their order, the fastest rate first; the grid, delays, whole runs."""
    rate = rate_nbits_per_s(cell.rate)
    keys = [setting.key for setting in SETTINGS]
    setting = keys.index(cell.setting) if cell.setting in keys else len(keys)
    return setting, -(rate or float("inf")), cell.num_epochs, cell.delay_ms, list(METHODS).index(cell.method)


def _run_all(orders: Sequence[Order], kind: str, kept: KeptRows[Cell]) -> list[str]:
    """One rate and delay after another, so that its links are made and measured once."""
    failures: list[str] = []
    groups: dict[tuple[str, str, float], list[Order]] = {}
    for order in orders:
        groups.setdefault((order.cell.setting, order.cell.rate, order.cell.delay_ms), []).append(order)
    for group in groups.values():
        try:
            with open_hosts(kind, group[0].setting, group[0].cell.rate, group[0].cell.delay_ms) as hosts:
                if hosts.missing:
                    failures += [f"{order.cell}: {'; '.join(hosts.missing)}" for order in group]
                    continue
                goodput = measure_neighbours(hosts, group[0].setting.num_stages, **_patience(hosts))
                _say(f"{hosts.shape.describe()}: one connection carries {describe(goodput)}; {hosts.emulation}")
                for order in group:
                    failures += _run_one(hosts, order, goodput, kept)
        except (HostsFailed, KernelRefused) as error:
            raise PipecompError(f"{group[0].cell.rate}: {error}") from error
    return failures


def _patience(hosts: Hosts) -> dict[str, float]:
    """With a delay a connection takes many round trips to its full rate."""
    delay_s = hosts.shape.delay_s
    return {"duration_s": 4.0, "warm_up_s": 0.5 + 60 * delay_s} if delay_s else {}


def _run_one(hosts: Hosts, order: Order, goodput: Sequence[float], kept: KeptRows[Cell]) -> list[str]:
    begun = time.monotonic()
    rehearse_codecs(order.config, order.setting.num_columns)  # kernels are compiled once, here, and not by all workers at once
    with tempfile.TemporaryDirectory(prefix="bench-links-") as folder:
        try:
            figures = run_cell(hosts, order, goodput, Path(folder))
            hosts.check()
        except PipecompError as error:
            _say(f"FAILED  {error}")
            return [str(error)]
    cost = synthetic_cost_ns(order.setting)
    kept.add(order.cell, {**order.cell._asdict(), "settings": order.settings, **figures, "synthetic_ns_per_value": cost})
    _say(
        f"{order.cell}: {figures['sequences_per_s']:.3f} sequences/s, {100 * figures['ratio']:.1f} % of the ideal; "
        f"{figures['cpu_s_per_step']:.1f} s of processors a step, {figures['cpu_kernel_s_per_step']:.1f} s of them the kernel's; "
        f"{figures['cores_used']:.2f} of {figures['num_cores']} cores used, {figures['cores_used_by_others']:.2f} by others; "
        f"{time.monotonic() - begun:.0f} s"
    )
    return []


def synthetic_cost_ns(setting: Setting) -> dict[str, float]:
    """What the synthetic model's own work costs, a value, forward and backward: the best of some tries without sleep."""
    config: dict[str, Any] = {"n_layer": 3, "n_embd": setting.num_columns, "n_positions": setting.num_rows}
    model = model_from_config({"model_type": "synthetic", **config})
    module = model.build(Shard(2, 3))
    model.initialize(module, None, seed=0)
    stage = StageRuntime(module, needs_input_gradient=True, recompute=False, run_seed=0)
    batch = Batch((setting.num_rows,) * setting.samples, None, None)
    values = torch.zeros(setting.samples, setting.num_rows, setting.num_columns)

    def timed(work: Callable[[], object]) -> float:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    best: dict[str, float] = {}
    for step in range(_TRIES):
        times = {
            "forward": timed(lambda: stage.forward(step, 0, batch, values, num_targets=1)),  # noqa: B023 - called at once
            "backward": timed(lambda: stage.backward(step, 0, values, num_targets=1)),  # noqa: B023
        }
        best = {name: min(best.get(name, time_s), time_s) for name, time_s in times.items()}
    return {name: round(1e9 * time_s / values.numel(), 4) for name, time_s in best.items()}


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
