"""A plan for a person who is no network engineer: what each setting takes, what rules, what to write. Pure text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from coordinator.summary import format_duration, format_grid, format_nbytes
from coordinator.work import UNCOMPRESSED
from pipecomp.config import toml_value
from pipecomp.planning.advice import layer_counts, too_large
from pipecomp.planning.forecast import Forecast
from pipecomp.planning.step import BoundKind, Step

if TYPE_CHECKING:
    from coordinator.planning import Plan


def format_plan(plan: Plan) -> str:
    """All of it."""
    parts = [
        _describe(plan),
        _settings_table(plan),
        _rules(plan),
        _workers_table(plan, plan.forecasts[0]),
        _traffic(plan.forecasts[0]),
        _recommended(plan),
    ]
    return "\n\n".join(part for part in parts if part)


def _describe(plan: Plan) -> str:
    work, train, num_replicas = plan.work, plan.config.train, plan.work.num_replicas
    num_workers = len(plan.cluster.machines)
    where = (
        f"{num_workers} workers on this machine, as `pipecomp launch` starts them"
        if plan.cluster.is_one
        else f"{num_workers} workers on machines of their own"
    )
    if num_replicas > 1:
        where += f": {num_replicas} replicas of {num_workers // num_replicas}"
    links = [
        f"{machine.name}: {_rate(machine.up)} up, {_rate(machine.down)} down, {machine.latency_ms:g} ms"
        for machine in plan.cluster.machines
    ]
    links += [
        f"{way.sender} to {way.receiver}: {_rate(way.rate)}, {way.latency_ms:g} ms more" for way in plan.cluster.ways.values()
    ]
    same = {line.partition(": ")[2] for line in links}
    told = [f"links: {same.pop()}"] if len(same) == 1 else links
    model = f"{plan.run.model.plan.family}, {len(work.layers)} layers"
    steps = f"{work.total_steps} steps of {train.batch_size} samples in {work.num_microbatches} microbatches"
    if num_replicas > 1:
        steps += " of each replica"
    return "\n".join([f"{model}; {len(plan.run.train)} samples, {steps}", where, *told])


def _rate(text: str | None) -> str:
    return "unlimited" if text is None else text


def _settings_table(plan: Plan) -> str:
    uncompressed = next((each for each in plan.forecasts if each.width.label.startswith(UNCOMPRESSED)), plan.forecasts[0])
    has_replicas = plan.work.num_replicas > 1
    gradients = ["gradients"] if has_replicas else []
    rows = [["setting", "bits forward", "backward", *gradients, "step", "gain", "whole run", "sent"]]
    rows += [
        [
            each.width.label,
            f"{each.width.forward_bits:.2f}",
            f"{each.width.backward_bits:.2f}",
            *([f"{each.width.gradient_bits:.2f}"] if has_replicas else []),
            _seconds(each.step_s),
            f"{uncompressed.step_s / each.step_s:.1f}x" if each.step_s else "-",
            format_duration(each.total_s),
            format_nbytes(sum(each.traffic.values())),
        ]
        for each in plan.forecasts
    ]
    first = plan.forecasts[0]
    notes = []
    if first.num_first_steps and abs(first.first_step_s - first.step_s) > 0.005 * first.step_s:
        notes.append(f"A step of the first epoch, as written, takes {_seconds(first.first_step_s)}: first visits are larger.")
    return "\n".join([format_grid(rows, align="<" + ">" * (len(rows[0]) - 1)), *notes])


def _rules(plan: Plan) -> str:
    as_written, advised = plan.forecasts[0], plan.advice.forecast
    told = {as_written.width.label: as_written}
    if str(advised.step.bound) != str(as_written.step.bound):
        told["as recommended"] = advised
    return "\n".join(f"{label}: {explain(each.step, _names(plan, each))}" for label, each in told.items())


def _names(plan: Plan, each: Forecast) -> list[str]:
    """By rank, of the replica whose step is told."""
    num_ranks = len(plan.cluster.machines) // plan.work.num_replicas
    return [machine.name for machine in plan.cluster.machines[each.replica * num_ranks :][:num_ranks]]


def explain(step: Step, names: Sequence[str]) -> str:
    """What rules a step, and what would help; `names`: of the workers by rank."""
    bound = step.bound
    workers = [names[rank] for rank in bound.ranks]
    whole = _seconds(step.duration_s)
    busy = f"busy for {_seconds(bound.busy_s)} of {whole}"
    match bound.kind:
        case BoundKind.COMPUTE:
            return f"the computing of {workers[0]} rules: {busy}. A faster machine or fewer layers there help, fewer bits do not."
        case BoundKind.PROCESSOR:
            return f"the processor that all workers share rules: {busy}. More machines help, fewer bits do not."
        case BoundKind.FORWARD_LINK:
            return f"the link from {workers[0]} to {workers[1]} rules: activations keep it {busy}. Fewer bits forward help."
        case BoundKind.BACKWARD_LINK:
            return f"the link from {workers[0]} to {workers[1]} rules: gradients keep it {busy}. Fewer bits backward help."
        case BoundKind.UPLINK:
            return f"what {workers[0]} can send rules: activations and gradients share it, {busy}. Fewer bits help."
        case BoundKind.DOWNLINK:
            return f"what {workers[0]} can receive rules: activations and gradients share it, {busy}. Fewer bits help."
        case BoundKind.PATH:
            return f"the way from {workers[0]} to {workers[1]} rules: {busy}. Fewer bits help."
        case BoundKind.EXCHANGE:
            return (
                f"the exchange of gradients between replicas rules: it keeps what {workers[0]} sends and receives {busy}. "
                "Fewer bits in compression.gradients, larger batches or fewer replicas help."
            )
        case BoundKind.FILL_AND_DRAIN:
            return (
                f"waiting rules: no machine or link is busy for half of {whole}, since microbatches have to come through all "
                "workers and back. More microbatches (train.num_microbatches), a larger batch or fewer workers help."
            )


def _workers_table(plan: Plan, each: Forecast) -> str:
    counts = layer_counts(plan.ways[0].split)
    has_replicas = len(each.steps) > 1
    rows = [["worker", *(["replica"] if has_replicas else []), "layers", "computes", "memory", "of", "messages kept", "of"]]
    for place, (machine, share) in enumerate(zip(plan.cluster.machines, each.shares, strict=True)):
        replica, rank = divmod(place, len(counts))
        loads = each.steps[replica].loads
        busy = next(load.busy_s for load in loads if load.kind is BoundKind.COMPUTE and load.ranks == (rank,))
        rows.append(
            [
                machine.name,
                *([str(replica)] if has_replicas else []),
                str(counts[rank]),
                _seconds(busy),
                format_nbytes(share.memory_nbytes),
                "-" if machine.memory_nbytes == math.inf else format_nbytes(machine.memory_nbytes),
                format_nbytes(share.kept_nbytes),
                format_nbytes(share.message_nbytes),
            ]
        )
    on_top = "memory: layers, optimizer, activations, messages; Python and torch come on top"
    if each.width.gradients is not None and each.width.gradients.keeps_errors:
        on_top = on_top.replace("messages;", "messages, errors of gradients;")
    lines = [format_grid(rows, align="<" + ">" * (len(rows[0]) - 1)), on_top]
    if any(share.kept_nbytes < share.message_nbytes for share in each.shares):
        lines.append(
            "Not all messages fit: the others travel as on a first visit, every time. Raise messages.memory_budget (or "
            'disk_budget), or keep them smaller with messages.dtype = "bf16", "int8" or "int4".'
        )
    names = [plan.cluster.machines[place].name for place in too_large(each, plan.cluster)]
    lines += [f"{name} has too little memory for its layers." for name in names]
    if names and not plan.config.train.gradient_checkpointing:
        lines.append("train.gradient_checkpointing = true keeps far less of each microbatch, and computes a third more.")
    return "\n".join(lines)


def _traffic(each: Forecast) -> str:
    kinds = [f"{kind.value} {format_nbytes(nbytes)}" for kind, nbytes in each.traffic.items() if nbytes]
    return "sent in the whole run, as written: " + ", ".join(kinds)


def _recommended(plan: Plan) -> str:
    advice, as_written = plan.advice, plan.forecasts[0]
    width = advice.forecast.width
    cluster = [f'schedule = "{advice.schedule}"']
    if advice.num_in_flight is not None:
        cluster.append(f"num_in_flight = {advice.num_in_flight}")
    elif plan.config.cluster.num_in_flight is not None:
        cluster.append("# without num_in_flight")
    if advice.num_deferred:
        cluster.append(f"num_deferred = {advice.num_deferred}")
    elif plan.config.cluster.num_deferred:
        cluster.append("# without num_deferred")
    layers = advice.layers if advice.layers is not None else plan.config.cluster.layers
    if layers is not None:
        cluster.append(f"layers = [{', '.join(map(str, layers))}]")
    compression = [f"forward = {_inline(width.forward)}", f"backward = {_inline(width.backward)}"]
    if width.gradients is not None:
        compression.append(f"gradients = {_inline(width.gradients.options)}")
    was = f"{_seconds(as_written.step_s)}, {format_duration(as_written.total_s)}"
    outcome = f"planned: {_seconds(advice.forecast.step_s)} a step, {format_duration(advice.forecast.total_s)} in all"
    lines = ["recommended:", "", "[compression]", *compression, "", "[cluster]", *cluster, "", f"{outcome} (as written: {was})"]
    if width.label.startswith(UNCOMPRESSED):
        lines.append("The links are no bottleneck here: compression gains less than a twentieth.")
    lines += [
        f"No split was found that fits {plan.cluster.machines[place].name}: make microbatches smaller, set "
        "train.gradient_checkpointing = true, or add a worker."
        for place in advice.too_large
    ]
    return "\n".join(lines)


def _inline(options: Mapping[str, object]) -> str:
    """A table of a run file on one line."""
    return "{ " + ", ".join(f"{key} = {toml_value(value)}" for key, value in options.items()) + " }"


def _seconds(seconds: float) -> str:
    return f"{seconds:.3f} s" if seconds < 10 else f"{seconds:.1f} s"
