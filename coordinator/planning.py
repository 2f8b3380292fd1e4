"""`pipecomp plan`: a run on paper, before anything is trained. Reads the run's files, and measures this machine or reads figures.

    figures of a file        each worker on a machine of its own, as the file says
    workers that join        each measures its machine and its links, and is sent away again
    apart                    each worker on a machine of its own that is like this one; links as the run file throttles them
    else                     all workers on this machine, as `pipecomp launch` starts them; links likewise
"""

from __future__ import annotations

import json
import os
import sys
import tomllib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from coordinator.plan_text import format_plan
from coordinator.preparation import ReadRun, read_run
from coordinator.surveying import survey_machines
from coordinator.work import Way, ways_of, work_of
from pipecomp.config import RunConfig, config_hash
from pipecomp.errors import ConfigError
from pipecomp.planning.advice import Advice, advise, too_large
from pipecomp.planning.forecast import Cluster, Forecast, forecast
from pipecomp.planning.machines import LayerSeconds, Machine, parse_figures, parse_ways
from pipecomp.planning.work import Work
from pipecomp.runtime.probe import HANDLING_S, deferred_nbytes, kept_nbytes, probe_machine
from pipecomp.runtime.rehearsal import make_schedule


class Plan(NamedTuple):
    """A run on paper, several ways."""

    config: RunConfig
    run: ReadRun
    work: Work
    cluster: Cluster
    ways: tuple[Way, ...]
    """The first is as the run file has it."""
    forecasts: tuple[Forecast, ...]
    advice: Advice

    @property
    def prediction(self) -> dict[str, Any]:
        """Of the run as its file has it; `--plan` puts it beside the outcome."""
        as_written = self.forecasts[0]
        return {
            "step_time_s": as_written.median_step_s,
            "first_epoch_step_time_s": as_written.first_step_s,
            "wall_time_s": as_written.total_s,
            "traffic": {kind.value: round(nbytes) for kind, nbytes in as_written.traffic.items()},
            "bound": bound_of(as_written),
        }


def bound_of(each: Forecast) -> str:
    """What rules, and in which replica where it is busier than what is busiest in others by more than a hundredth."""
    differ = any(1.01 * step.loads[0].busy_s < each.step.loads[0].busy_s for step in each.steps)
    return str(each.step.bound) + (f" of replica {each.replica}" if differ else "")


class Source(NamedTuple):
    """Where the machines' speeds are from; nothing: this machine, which all workers share."""

    figures: str | None = None
    """A file."""
    bind: str | None = None
    """HOST:PORT where workers join, to be measured."""
    apart: bool = False
    """As many machines like this one."""


def run_plan(config: RunConfig, source: Source, *, as_json: bool, cache_folder: Path | None) -> int:
    """Plan, and print it for a person or as JSON.

    Raises:
        ConfigError: the run file or the figures cannot be used.
        AddressError, SurveyFailed: workers that join were to be measured, and could not be.
    """
    plan = make_plan(config, source, cache_folder=cache_folder)
    sys.stdout.write((json.dumps(as_tree(plan), indent=2) if as_json else format_plan(plan)) + "\n")
    return 0


def make_plan(config: RunConfig, source: Source, *, cache_folder: Path | None) -> Plan:
    """Read, measure and compare."""
    run, cluster = _read_and_measure(config, source, partial(read_run, config, cache_folder))
    lengths = run.batches.usual_lengths()
    work = work_of(config, run, kept_nbytes(config, run.model, lengths), deferred_nbytes(config, run.model, lengths))
    ways = ways_of(config, run)
    schedule = make_schedule(config)
    forecasts = [forecast(work, way.width, cluster, way.split, schedule) for way in ways]
    advice = advise(work, forecasts, [way.split for way in ways], cluster)
    return Plan(config, run, work, cluster, tuple(ways), tuple(forecasts), advice)


def _read_and_measure(config: RunConfig, source: Source, read: Callable[[], ReadRun]) -> tuple[ReadRun, Cluster]:
    """What can be refused at once is, before anything is read."""
    if source.bind is not None:
        return survey_machines(config, read, source.bind)
    if source.figures is not None:
        tree = _read(source.figures)
        cluster_config = config.cluster
        machines = parse_figures(
            tree, cluster_config.num_stages, source.figures, num_replicas=cluster_config.num_replicas
        )
        cluster = Cluster(machines, ways=parse_ways(tree, machines, source.figures))
        return read(), cluster
    run = read()
    return run, _probed_cluster(config, run, apart=source.apart)


def as_tree(plan: Plan) -> dict[str, Any]:
    """For `--json`. `workers` and `links` are what `--figures` takes."""
    workers = [{k: v for k, v in msgspec.to_builtins(machine).items() if v is not None} for machine in plan.cluster.machines]
    advice = plan.advice
    gradients = advice.forecast.width.gradients
    return {
        "config_hash": config_hash(plan.config),
        "workers": workers,
        "links": [msgspec.to_builtins(way) for way in plan.cluster.ways.values()],
        "on_one_machine": plan.cluster.is_one,
        "prediction": plan.prediction,
        "settings": [_setting_tree(each, plan.cluster) for each in plan.forecasts],
        "advice": {
            "compression": {
                "forward": advice.forecast.width.forward,
                "backward": advice.forecast.width.backward,
                **({} if gradients is None else {"gradients": gradients.options}),
            },
            "cluster": {
                "schedule": advice.schedule,
                "num_in_flight": advice.num_in_flight,
                "num_deferred": advice.num_deferred,
                "layers": None if advice.layers is None else list(advice.layers),
            },
            **_setting_tree(advice.forecast, plan.cluster),
        },
    }


def _setting_tree(each: Forecast, cluster: Cluster) -> dict[str, Any]:
    return {
        "setting": each.width.label,
        "forward_bits": each.width.forward_bits,
        "backward_bits": each.width.backward_bits,
        **({} if each.width.gradients is None else {"gradient_bits": each.width.gradient_bits}),
        "step_time_s": each.step_s,
        "first_epoch_step_time_s": each.first_step_s,
        "evaluation_time_s": each.evaluation_s,
        "wall_time_s": each.total_s,
        "bound": bound_of(each),
        "traffic": {kind.value: round(nbytes) for kind, nbytes in each.traffic.items()},
        "workers": [
            {
                "name": machine.name,
                **({"replica": place // (len(each.shares) // len(each.steps))} if len(each.steps) > 1 else {}),
                "num_layers": len(share.layers),
                "memory_bytes": round(share.memory_nbytes),
                "message_bytes": round(share.message_nbytes),
                "kept_message_bytes": round(share.kept_nbytes),
            }
            for place, (machine, share) in enumerate(zip(cluster.machines, each.shares, strict=True))
        ],
        "too_large_for": [cluster.machines[place].name for place in too_large(each, cluster)],
    }


def _probed_cluster(config: RunConfig, run: ReadRun, *, apart: bool) -> Cluster:
    num_workers = config.cluster.num_stages * config.cluster.num_replicas
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = cores if apart else max(1, cores // num_workers)
    memory_nbytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // (1 if apart else num_workers)
    probe = probe_machine(config, run.model, run.batches.usual_lengths(), num_threads=threads)
    seconds = {kind: LayerSeconds(*layer) for kind, layer in probe.layers.items()}
    machine = Machine(
        block=seconds["block"],
        head=seconds["head"],
        embedding=seconds["embedding"],
        updates_per_s=probe.updates_per_s,
        coded_values_per_s=probe.coded_values_per_s,
        handling_s=HANDLING_S,
        memory=f"{memory_nbytes}B",
        up=config.cluster.link_rate,
        latency_ms=config.cluster.link_latency_ms,
    )
    machines = tuple(msgspec.structs.replace(machine, name=f"worker-{place}") for place in range(num_workers))
    return Cluster(machines, None if apart else cores / threads)


def _read(figures: str) -> dict[str, Any]:
    path = Path(figures)
    try:
        text = path.read_text(encoding="utf-8")
        tree: dict[str, Any] = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as e:
        raise ConfigError(f"cannot read --figures {figures}: {e.strerror or e}") from e
    except (tomllib.TOMLDecodeError, json.JSONDecodeError, UnicodeDecodeError) as e:
        kind = "JSON" if path.suffix == ".json" else "TOML (its name does not end in .json)"
        raise ConfigError(f"--figures {figures} is not valid {kind}: {e}") from e
    return tree
