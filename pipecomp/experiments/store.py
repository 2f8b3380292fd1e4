"""The benchmark `pipecomp bench store`: what it costs a step to keep messages on disk. Knows runs and stores; knows no codec.

Three pipelines train the same model on the same text, their messages in memory, on disk, and in both. They take turns step by
step, so that whatever else the machine does falls on all three; what counts is the median over the steps of the ratio to memory
within a turn. Reads go past the operating system's cache, so the disk is really read. At the end, messages and parameters of the
three must be the same, bit for bit.

All stages of a pipeline share one compute thread here, and so one core computes and another one is free for codecs and disk, as
on a machine of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from coordinator.batches import Wanted
from coordinator.preparation import PreparedRun, prepare_run
from coordinator.rates import learning_rate
from pipecomp import results
from pipecomp.config import RunConfig, parse_run_config
from pipecomp.runtime.rehearsal import rehearse_codecs
from pipecomp.runtime.stores import StoreHome
from pipecomp.testing.local_pipeline import LocalPipeline

RESULTS = Path("docs/results/store.json")
STORES = ("memory", "disk", "tiered")
MOST = 1.03
"""Times the step of messages in memory."""
_ALL = Wanted(input_ids=True, labels=True)

RUN: Mapping[str, Any] = {
    "model": {
        "config": {
            "model_type": "gpt2", "vocab_size": 1024, "n_positions": 128, "n_embd": 512, "n_layer": 6, "n_head": 8,
            "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0,
            "tie_word_embeddings": False,
        },
        "weights": "random",
    },
    "data": {
        "train": "examples/state-of-the-union.jsonl", "tokenizer": "examples/demo-gpt2", "max_length": 64, "packing": True,
        "max_train_samples": 256, "max_eval_samples": 8,
    },
    "train": {"num_train_epochs": 4, "batch_size": 16, "num_microbatches": 8, "learning_rate": 3e-4},
    "compression": {"forward": {"codec": "delta", "bits": 4}, "backward": {"codec": "uniform", "bits": 8}},
    "cluster": {"num_stages": 3},
}  # fmt: skip


class Turn(NamedTuple):
    """One step of each pipeline."""

    step: int
    times_s: dict[str, float]


def run(*, json: bool = False, path: Path = RESULTS, folder: Path | None = None, max_steps: int | None = None) -> results.Row:
    """Train, print a table, and with `json` write the result to `path`; return the result.

    `folder`: on the disk to measure; None: where temporary files are.
    """
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=folder, prefix="bench-store-") as root:
        turns, ends, differences = asyncio.run(_train(Path(root), max_steps))
    num_first = RUN["data"]["max_train_samples"] // RUN["train"]["batch_size"]
    revisits = [turn for turn in turns if turn.step > num_first] or turns
    rows = [
        {
            "store": store,
            "step_s": round(statistics.median(turn.times_s[store] for turn in revisits), 5),
            "ratio_to_memory": round(
                statistics.median(turn.times_s[store] / turn.times_s["memory"] for turn in revisits), 4
            ),
            **ends[store],
            "times_s": [round(turn.times_s[store], 5) for turn in turns],
        }
        for store in STORES
    ]
    bars = [
        {
            "name": f"step with messages {'on disk' if row['store'] == 'disk' else row['store']}, times that in memory",
            "value": row["ratio_to_memory"],
            "bar": MOST,
            "holds": row["ratio_to_memory"] <= MOST,
        }
        for row in rows[1:]
    ]
    bars.append(
        {
            "name": "tensors and messages that differ between the three stores",
            "value": differences,
            "bar": 0,
            "holds": differences == 0,
        }
    )
    outcome = results.result("pipecomp bench store --json", rows, bars)
    _print(outcome)
    if json:
        results.write(path, outcome)
    return outcome


async def _train(root: Path, max_steps: int | None) -> tuple[list[Turn], dict[str, dict[str, Any]], int]:
    async with contextlib.AsyncExitStack() as stack:
        run_, pipelines = None, {}
        for store in STORES:
            config = _config(store)
            run_ = await asyncio.to_thread(prepare_run, config, None)
            rehearse_codecs(config, run_.model.plan.hidden_size)
            home = StoreHome(root / store, *_budgets(run_, store))
            pipeline = LocalPipeline(config, run_.model.config, num_ranks=config.cluster.num_stages, home=home)
            pipelines[store] = await stack.enter_async_context(pipeline)
        assert run_ is not None
        turns = []
        total = run_.batches.total_steps if max_steps is None else max_steps
        for step in range(1, total + 1):
            times = {}
            for store in (*STORES[step % 3 :], *STORES[: step % 3]):
                plan, buffers = run_.batches.step_plan(
                    epoch=1, step=step, learning_rate=learning_rate(run_.config.train, step, total), wanted=_ALL
                )
                start = time.perf_counter()
                await pipelines[store].run_step(plan, buffers)
                times[store] = time.perf_counter() - start
            turns.append(Turn(step, times))
        ends = {store: _counts(pipeline) for store, pipeline in pipelines.items()}
        return turns, ends, _count_differences(pipelines)


def _config(store: str) -> RunConfig:
    return parse_run_config({**RUN, "messages": {"store": store, "direct_io": True}}, "the benchmark")


def _budgets(run_: PreparedRun, store: str) -> tuple[int, int]:
    """Memory that takes all messages, or a quarter of them where a disk is behind it."""
    plan = run_.config
    nbytes = 4 * run_.num_samples * plan.data.max_length * run_.model.plan.hidden_size
    ends = 2  # of a middle stage
    return (2 * ends * nbytes if store == "memory" else ends * nbytes // 4), 16 * ends * nbytes


def _counts(pipeline: LocalPipeline) -> dict[str, Any]:
    meters = [meter for rank in pipeline.ranks for meter in rank.store_meters()]
    names = ("hits", "misses", "lost", "disk_reads", "wait_s", "memory_nbytes", "disk_nbytes")
    return {name: round(sum(getattr(meter, name) for meter in meters), 4) for name in names}


def _count_differences(pipelines: Mapping[str, LocalPipeline]) -> int:
    expected = pipelines["memory"]
    parameters, digests = expected.parameters(), expected.digests()
    count = 0
    for store in STORES[1:]:
        found = pipelines[store].parameters()
        count += sum(not torch.equal(found[name], parameters[name]) for name in parameters)
        for pair, other in zip(digests, pipelines[store].digests(), strict=True):
            for mine, theirs in zip(pair, other, strict=True):
                count += sum(theirs.get(sample) != held for sample, held in mine.items()) + len(theirs.keys() - mine.keys())
    return count


def _print(outcome: results.Row) -> None:
    lines = ["store    step, median   of memory   read from disk   waited for it   in memory   on disk"]
    lines += [
        f"{row['store']:<9}{row['step_s']:>10.4f} s{row['ratio_to_memory']:>12.3f}{row['disk_reads']:>17}"
        f"{row['wait_s']:>14.3f} s{row['memory_nbytes'] / 1e6:>9.1f} MB{row['disk_nbytes'] / 1e6:>7.1f} MB"
        for row in outcome["rows"]
    ]
    sys.stdout.write("\n".join([*lines, *results.verdicts(outcome["bars"])]) + "\n")
