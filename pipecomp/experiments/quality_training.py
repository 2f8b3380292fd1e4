"""One run of `pipecomp bench quality`, in a process and a thread of its own: all stages in one event loop. Knows a run's
configuration; knows no grid, no other run and no result file.

    python -m pipecomp.experiments.quality_training < order.json      {"config": {...}, "train": true}

The last line of its output is the figures as JSON. Batches, held-out data and learning rates are those of a coordinator, so
`pipecomp launch` trains to the same figures.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import defaultdict
from typing import Any

import torch

from coordinator.batches import Wanted
from coordinator.preparation import PreparedRun, prepare_run
from coordinator.rates import learning_rate
from pipecomp.config import RunConfig, parse_run_config
from pipecomp.errors import ConfigError
from pipecomp.runtime.rehearsal import rehearse_codecs
from pipecomp.testing.local_pipeline import LocalPipeline
from pipecomp.types import Kind

_EPOCH = 1  # of assignment; nobody joins or leaves
_ALL = Wanted(input_ids=True, labels=True)
Figures = dict[str, Any]
Traffic = dict[str, dict[str, int]]


async def train_cell(config: RunConfig, *, train: bool = True) -> Figures:
    """Train, evaluate once at the end, and tell what it came to; without `train`, evaluate the model as it begins.

    Losses are means a prediction, in nats. Bytes and values are of all ranks' sending, the final evaluation included.
    """
    run = prepare_run(config, None)
    if not run.num_held_out:
        raise ConfigError("a run without held-out samples says nothing of quality: set data.max_eval_samples")
    rehearse_codecs(config, run.model.plan.hidden_size)
    async with LocalPipeline(
        config, run.model.config, num_ranks=config.cluster.num_stages, weights=run.model.weights
    ) as pipeline:
        wall, cpu = time.perf_counter(), time.process_time()
        train_losses, first_epoch = await _train(pipeline, run) if train else ([], {})
        held_out = await _evaluate(pipeline, run)
        traffic = _traffic(pipeline)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return {
        "num_train": run.num_samples,
        "num_held_out": run.num_held_out,
        **held_out,
        "train_loss": train_losses,
        "bits_per_value": _bits_per_value(first_epoch, traffic),
        "traffic": traffic,
        "wall_s": round(wall, 2),
        "cpu_s": round(cpu, 2),
    }


async def _train(pipeline: LocalPipeline, run: PreparedRun) -> tuple[list[float], Traffic]:
    """Training loss by epoch, and what the first epoch (every sample's first visit) has sent."""
    batches, losses = run.batches, []
    first_epoch: Traffic = {}
    loss_sum, num_targets = 0.0, 0
    for step in range(1, batches.total_steps + 1):
        rate = learning_rate(run.config.train, step, batches.total_steps)
        plan, buffers = batches.step_plan(epoch=_EPOCH, step=step, learning_rate=rate, wanted=_ALL)
        outcome = await pipeline.run_step(plan, buffers)
        loss_sum, num_targets = loss_sum + outcome.loss * plan.num_targets, num_targets + plan.num_targets
        if step % batches.steps_per_epoch == 0 or step == batches.total_steps:
            losses.append(loss_sum / num_targets)
            loss_sum, num_targets = 0.0, 0
            first_epoch = first_epoch or _traffic(pipeline)
    return losses, first_epoch


async def _evaluate(pipeline: LocalPipeline, run: PreparedRun) -> Figures:
    loss_sum, num_correct, num_targets, num_samples = 0.0, 0, 0, 0
    for part, size in enumerate(run.batches.evaluation_sizes):
        plan, buffers = run.batches.evaluation_plan(epoch=_EPOCH, evaluation=part + 1, part=part, wanted=_ALL)
        sums = await pipeline.run_evaluation(plan, buffers)
        loss_sum, num_correct = loss_sum + sum(sums.loss_sums), num_correct + sum(sums.num_correct)
        num_targets, num_samples = num_targets + size.targets, num_samples + size.samples
    accuracy = num_correct / num_samples if run.config.model.task == "sequence-classification" else None
    return {"held_out_loss": loss_sum / max(1, num_targets), "accuracy": accuracy}


def _traffic(pipeline: LocalPipeline) -> Traffic:
    totals: Traffic = defaultdict(lambda: {"values": 0, "payload_nbytes": 0, "header_nbytes": 0})
    for sent in pipeline.link_traffic():
        for name, total in totals[sent.kind.value].items():
            totals[sent.kind.value][name] = total + getattr(sent, name)
    return {kind: dict(totals[kind]) for kind in sorted(totals)}


def _bits_per_value(first_epoch: Traffic, traffic: Traffic) -> dict[str, float]:
    """Payload bits a value by kind, all metadata of the codec counted; forward also by first and later visits."""
    parts = dict(traffic)
    if first_epoch:
        first = parts["forward, first visits"] = first_epoch[Kind.FORWARD.value]
        parts["forward, later visits"] = {name: total - first[name] for name, total in traffic[Kind.FORWARD.value].items()}
    return {name: round(8 * part["payload_nbytes"] / part["values"], 4) for name, part in parts.items() if part["values"]}


def main() -> int:
    """Read an order, train it, write the figures."""
    torch.set_num_threads(1)
    order = json.load(sys.stdin)
    figures = asyncio.run(train_cell(parse_run_config(order["config"], "the order"), train=order["train"]))
    sys.stdout.write("\n" + json.dumps(figures) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
