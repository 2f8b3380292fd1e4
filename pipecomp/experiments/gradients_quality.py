"""The part `quality` of `pipecomp bench gradients`: what compressing the gradients that replicas exchange costs in quality.
Knows runs, and how one is trained in one event loop; knows no result file.

Data, sizes and optimizer are those of `pipecomp bench quality`, on two replicas of two stages. Its microbatches have as many
samples too, so each replica has half as many of them.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash

from coordinator.batches import Wanted
from coordinator.preparation import PreparedRun, prepare_run
from coordinator.rates import learning_rate
from pipecomp.config import RunConfig, parse_run_config
from pipecomp.errors import ConfigError, PipecompError
from pipecomp.experiments import quality_cells
from pipecomp.experiments.gradients_part import Keep, Part, Table
from pipecomp.experiments.quality_bars import spread
from pipecomp.results import Row
from pipecomp.runtime.rehearsal import rehearse_codecs
from pipecomp.testing.local_pipeline import LocalPipeline

KEY = "quality"
_VERSION = 1
"""Goes up when the same settings would train to other figures; every cell is then trained again."""
_EPOCH = 1  # of assignment; nobody joins or leaves
_ALL = Wanted(input_ids=True, labels=True)
_EXACT = {"forward": {"codec": "identity"}, "backward": {"codec": "identity"}}
_FW3BW6 = {"forward": {"codec": "delta", "bits": 3}, "backward": {"codec": "uniform", "bits": 6}}
_CLUSTER = {"num_stages": 2, "num_replicas": 2}
_NUM_MICROBATCHES = 2  # of each replica
SEEDS = (0, 1, 2)
MORE_SEEDS = (3, 4, 5, 6, 7, 8)
"""For what feedback changes, which at 2 bits is little beside what a seed does."""
EXCESS = {"a": ("fw3bw6", 1.0), "b": ("fp32", 2.0)}
"""Most percent by which the loss with gradients of 4 bits may exceed another method's, by workload."""
FOUR_BITS = "gradients in 4 bits"
TWO_BITS, TWO_BITS_ALONE = "gradients in 2 bits", "gradients in 2 bits, no feedback"


class Method(NamedTuple):
    """What crosses how."""

    compression: Mapping[str, Mapping[str, Any]]
    has_feedback: bool = True


def _gradients(has_feedback: bool = True, **codec: object) -> Method:
    return Method({**_FW3BW6, "gradients": codec}, has_feedback)


METHODS: Mapping[str, Method] = {
    "fp32": Method({**_EXACT, "gradients": {"codec": "identity"}}),
    "fw3bw6": _gradients(codec="identity"),
    FOUR_BITS: _gradients(codec="uniform", bits=4),
    TWO_BITS: _gradients(codec="uniform", bits=2),
    TWO_BITS_ALONE: _gradients(codec="uniform", bits=2, has_feedback=False),
    "gradients in 1 bit": _gradients(codec="uniform", bits=1),
    "gradients in 1 bit, no feedback": _gradients(codec="uniform", bits=1, has_feedback=False),
    "a tenth of gradients, in 4 bits": _gradients(codec="sparse", bits=4, top=0.1),
}
"""All but fp32 have activations in 3 bits forward, as changes, and their gradients in 6 bits backward."""


class Workload(NamedTuple):
    """A model, its data and how it is trained; methods differ in [compression] and in feedback only."""

    key: str
    title: str
    run: Mapping[str, Any]
    """A run file's sections without [compression]; paths from the folder that the command is run in."""
    methods: Sequence[str]
    needs: str = ""
    """What scripts/fetch_examples.py has to fetch first."""
    more: Sequence[str] = ()
    """Methods that are trained with MORE_SEEDS too."""


class Cell(NamedTuple):
    """One run."""

    workload: str
    method: str
    seed: int

    def __str__(self) -> str:
        return f"({self.workload}) {self.method}, seed {self.seed}"


def _workload(key: str, title: str, methods: Sequence[str], more: Sequence[str] = ()) -> Workload:
    """That of `pipecomp bench quality` with this key."""
    (original,) = [each for each in quality_cells.WORKLOADS if each.key == key]
    train = {**original.run["train"], "num_microbatches": _NUM_MICROBATCHES, "num_train_epochs": 3}
    return Workload(key, title, {**original.run, "train": train, "cluster": _CLUSTER}, methods, original.needs, more)


WORKLOADS = (
    _workload("a", "a GPT-2 of 4 layers from scratch on speeches", tuple(METHODS), (TWO_BITS, TWO_BITS_ALONE)),
    _workload("b", "MiniLM learning to tell good reviews from bad ones", ("fp32", "fw3bw6", FOUR_BITS)),
)


def part(workloads: Sequence[Workload] = WORKLOADS) -> Part:
    """What `pipecomp bench gradients` runs."""
    cells = {str(cell): (workload, cell) for workload in workloads for cell in _cells(workload)}
    return Part(
        KEY,
        list(cells),
        settings=lambda: {str(cell): _settings(workload, cell) for workload in _usable(workloads) for cell in _cells(workload)},
        measure=lambda wanted, keep: _measure([cells[name] for name in wanted], keep),
        tables=lambda rows: {f"{KEY}-{workload.key}": _table(workload, rows) for workload in workloads},
        bars=lambda rows: list(_bars(rows)),
    )


def _cells(workload: Workload) -> Iterator[Cell]:
    for seeds, methods in ((SEEDS, workload.methods), (MORE_SEEDS, workload.more)):
        yield from (Cell(workload.key, method, seed) for seed in seeds for method in methods)


def run_config(workload: Workload, cell: Cell) -> RunConfig:
    """The run that trains a cell."""
    return parse_run_config(_sections(workload, cell), f"workload {workload.key}")


def _sections(workload: Workload, cell: Cell) -> dict[str, Any]:
    method = METHODS[cell.method]
    sections = {name: dict(section) for name, section in workload.run.items()}
    sections["train"] |= {"seed": cell.seed, "save_model": False}
    compression = {kind: dict(codec) for kind, codec in method.compression.items()}
    return {**sections, "compression": compression, "replicas": {"error_feedback": method.has_feedback}}


def _settings(workload: Workload, cell: Cell) -> str:
    """A hash of the run as it is written, of what its codecs make of a sample, and of the files that are read. What is a
    default counts as written nowhere, so that a new key changes nothing."""
    config = run_config(workload, cell)
    folders = [Path(name) for name in (config.model.name, config.data.tokenizer) if name]
    files = [Path(config.data.train), *(folder / name for folder in folders for name in ("config.json", "tokenizer.json"))]
    digests = [xxhash.xxh3_64_hexdigest(path.read_bytes()) for path in files if path.exists()]
    described = [_VERSION, _sections(workload, cell), quality_cells.described_codecs(config), digests]
    return xxhash.xxh3_64_hexdigest(json.dumps(described, sort_keys=True).encode())


def _usable(workloads: Sequence[Workload]) -> list[Workload]:
    """Those whose files are there."""
    usable = []
    for workload in workloads:
        missing = quality_cells.missing_files(run_config(workload, next(_cells(workload))))
        if not missing:
            usable.append(workload)
            continue
        fetch = f"; python scripts/fetch_examples.py {workload.needs} gets what is fetched" if workload.needs else ""
        _say(f"left out: ({workload.key}) needs {', '.join(missing)} in the current folder{fetch}")
    if not usable:
        raise ConfigError("there is nothing to train on: run the command in the folder of the source tree")
    return usable


# ----------------------------------------------------------------------------------------------------------- one run


def _measure(wanted: Sequence[tuple[Workload, Cell]], keep: Keep) -> list[str]:
    failures = []
    for workload, cell in wanted:
        config = run_config(workload, cell)
        try:
            figures = asyncio.run(train_cell(config))
        except PipecompError as error:
            failures.append(f"{cell}: {error}")
            _say(f"FAILED  {failures[-1]}")
            continue
        codecs = quality_cells.described_codecs(config)
        keep(str(cell), {**cell._asdict(), "has_feedback": METHODS[cell.method].has_feedback, "codecs": codecs, **figures})
        _say(f"{cell}: held-out loss {figures['held_out_loss']:.4f}, {figures['wall_s']:.0f} s")
    return failures


async def train_cell(config: RunConfig) -> Row:
    """Train all replicas in this process, evaluate once at the end, and tell what it came to.

    Losses are means a prediction, in nats. Bytes and values are of all workers' sending, the final evaluation included.

    Raises:
        PipecompError: the replicas' models are not the same, bit for bit.
    """
    run = prepare_run(config, None)
    rehearse_codecs(config, run.model.plan.hidden_size)
    async with LocalPipeline(
        config, run.model.config, num_ranks=config.cluster.num_stages, weights=run.model.weights
    ) as pipeline:
        begun = time.perf_counter()
        train_losses = await _train(pipeline, run)
        _check_equal(pipeline)
        held_out = await _evaluate(pipeline, run)
        traffic = _traffic(pipeline)
        wall_s = time.perf_counter() - begun
    bits = {kind: round(8 * sent["payload_nbytes"] / sent["values"], 4) for kind, sent in traffic.items() if sent["values"]}
    return {
        "num_train": run.num_samples,
        "num_held_out": run.num_held_out,
        **held_out,
        "train_loss": train_losses,
        "bits_per_value": bits,
        "traffic": traffic,
        "wall_s": round(wall_s, 2),
    }


async def _train(pipeline: LocalPipeline, run: PreparedRun) -> list[float]:
    """Training loss by epoch."""
    batches, replicas, losses = run.batches, range(pipeline.num_replicas), []
    loss_sum, num_targets = 0.0, 0
    for step in range(1, batches.total_steps + 1):
        rate = learning_rate(run.config.train, step, batches.total_steps)
        plans = [
            batches.step_plan(epoch=_EPOCH, step=step, learning_rate=rate, wanted=_ALL, replica=replica) for replica in replicas
        ]
        outcome, targets = await pipeline.run_steps(plans), plans[0][0].num_targets
        loss_sum, num_targets = loss_sum + outcome.loss * targets, num_targets + targets
        if step % batches.steps_per_epoch == 0 or step == batches.total_steps:
            losses.append(loss_sum / num_targets)
            loss_sum, num_targets = 0.0, 0
    return losses


async def _evaluate(pipeline: LocalPipeline, run: PreparedRun) -> Row:
    """All replicas' parts of the held-out data, by the first one: they are all the same model."""
    loss_sum, num_correct, num_evaluations = 0.0, 0, 0
    for index, _ in enumerate(run.batches.evaluation_sizes):
        for replica in range(pipeline.num_replicas):
            num_evaluations += 1
            plan, buffers = run.batches.evaluation_plan(
                epoch=_EPOCH, evaluation=num_evaluations, part=index, wanted=_ALL, replica=replica
            )
            sums = await pipeline.run_evaluation(plan, buffers)
            loss_sum, num_correct = loss_sum + sum(sums.loss_sums), num_correct + sum(sums.num_correct)
    num_targets = sum(size.targets for size in run.batches.evaluation_sizes)
    accuracy = num_correct / run.num_held_out if run.config.model.task == "sequence-classification" else None
    return {"held_out_loss": loss_sum / max(1, num_targets), "accuracy": accuracy}


def _check_equal(pipeline: LocalPipeline) -> None:
    first = pipeline.parameters(0)
    for replica in range(1, pipeline.num_replicas):
        other = pipeline.parameters(replica)
        differing = [name for name, values in first.items() if not torch.equal(values, other[name])]
        if differing:
            raise PipecompError(f"replicas 0 and {replica} have trained to other values of {', '.join(differing[:3])}")


def _traffic(pipeline: LocalPipeline) -> dict[str, dict[str, int]]:
    totals: dict[str, dict[str, int]] = defaultdict(lambda: {"values": 0, "payload_nbytes": 0, "header_nbytes": 0})
    for sent in pipeline.link_traffic():
        for name, total in totals[sent.kind.value].items():
            totals[sent.kind.value][name] = total + getattr(sent, name)
    return {kind: dict(totals[kind]) for kind in sorted(totals)}


# ------------------------------------------------------------------------------------------------- what figures come to


def _losses(rows: Sequence[Row], workload: str, method: str, seeds: Sequence[int] = SEEDS) -> list[float] | None:
    """By seed; None unless all are there."""
    found = {row["seed"]: row["held_out_loss"] for row in rows if (row["workload"], row["method"]) == (workload, method)}
    return [found[seed] for seed in seeds] if set(found) >= set(seeds) else None


def _excess(rows: Sequence[Row], workload: str, method: str, other: str) -> float | None:
    """By how many percent a method's loss is above another's with the same seed: the median over seeds."""
    own, others = _losses(rows, workload, method), _losses(rows, workload, other)
    if own is None or others is None:
        return None
    return statistics.median(100 * (mine / its - 1) for mine, its in zip(own, others, strict=True))


def _bars(rows: Sequence[Row]) -> Iterator[Row]:
    for workload, (other, most) in EXCESS.items():
        excess = _excess(rows, workload, FOUR_BITS, other)
        if excess is not None:
            value = round(excess, 4)  # what is shown is what is judged
            name = f"({workload}), {FOUR_BITS}: held-out loss above {other}'s, percent"
            yield {"name": name, "value": value, "bar": most, "holds": value <= most}
    for seeds in (SEEDS, (*SEEDS, *MORE_SEEDS)):
        fed, alone = (_losses(rows, "a", method, seeds) for method in (TWO_BITS, TWO_BITS_ALONE))
        if fed is not None and alone is not None:
            value = round(statistics.median(alone) - statistics.median(fed), 4)
            worse = sum(without > with_it for with_it, without in zip(fed, alone, strict=True))
            name = (
                f"(a), {TWO_BITS}: by how much held-out loss is higher without feedback, medians of {len(seeds)} seeds "
                f"({worse} of them higher; more than)"
            )
            yield {"name": name, "value": value, "bar": 0.0, "holds": value > 0}


def _table(workload: Workload, rows: Sequence[Row]) -> Table:
    """Medians over seeds, and the range."""
    own = [row for row in rows if row["workload"] == workload.key and row["seed"] in SEEDS]
    has_accuracy = any(row["accuracy"] is not None for row in own)
    heads = ["method", "held-out loss", *(["accuracy"] if has_accuracy else []), "over fp32", "over fw3bw6"]
    lines = []
    for method in workload.methods:
        group = [row for row in own if row["method"] == method]
        if not group:
            continue
        accuracy = [spread(group, "accuracy", percent=True)] if has_accuracy else []
        excess = [_percent(own, workload.key, method, other) for other in ("fp32", "fw3bw6")]
        bits = f"{group[0]['bits_per_value']['gradients']:.2f}"
        sent = [f"{_nbytes(group, kinds):,.0f}" for kinds in (("gradients",), ("forward", "backward"))]
        lines.append([method, spread(group, "held_out_loss"), *accuracy, *excess, bits, *sent])
    return Table(
        f"({workload.key}) {workload.title}",
        [*heads, "bits/value of gradients", "bytes of gradients", "bytes of activations, both ways"],
        lines,
    )


def _percent(rows: Sequence[Row], workload: str, method: str, other: str) -> str:
    excess = _excess(rows, workload, method, other)
    return "–" if excess is None or method == other else f"{excess:+.2f} %"


def _nbytes(rows: Sequence[Row], kinds: Sequence[str]) -> float:
    """Payload and headers: the median over seeds."""
    sums = [sum(row["traffic"][kind][name] for kind in kinds for name in ("payload_nbytes", "header_nbytes")) for row in rows]
    return float(statistics.median(sums))


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
