"""Where messages are kept changes no figure: memory, disk and both train to the same bits; budgets and restarts hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pipecomp.buffers.formats import MessageDtype, MessageFormat
from pipecomp.errors import StoreError
from pipecomp.experiments import store as bench_store
from pipecomp.runtime.stores import StoreHome
from pipecomp.testing.local_pipeline import LocalPipeline
from pipecomp.testing.tiny_runs import MODEL, NUM_SAMPLES, WIDTH, tiny_batch, tiny_run
from pipecomp.types import TensorSpec

ROWS = 8
MESSAGE_NBYTES = 4 * WIDTH * ROWS


def pipeline(home: StoreHome = StoreHome(), **messages: Any) -> LocalPipeline:  # noqa: B008
    return LocalPipeline(tiny_run(messages=messages), MODEL, num_ranks=3, home=home)


async def train(three: LocalPipeline, num_epochs: int = 3) -> None:
    for epoch in range(num_epochs):
        for first in (0, 6):
            await three.step(tiny_batch(first, num_rows=ROWS), learning_rate=1e-3, abort=(epoch, first) == (1, 6))


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8", "int4"])
@pytest.mark.parametrize("store", ["disk", "tiered"])
async def test_a_store_on_disk_trains_to_the_bits_of_one_in_memory(store: str, dtype: MessageDtype, tmp_path: Path) -> None:
    row_nbytes = MessageFormat(dtype).nbytes(TensorSpec(ROWS, WIDTH))
    tier = StoreHome(tmp_path, 2 * 5 * row_nbytes, 10**6)  # five of twelve samples for each end of the middle stage, else ten
    async with pipeline(dtype=dtype) as expected, pipeline(tier, store=store, dtype=dtype) as found:
        await train(expected)
        await train(found)
        assert found.digests() == expected.digests()
        mine, theirs = expected.parameters(), found.parameters()
        assert all(torch.equal(theirs[name], mine[name]) for name in mine)
        meters = [meter for rank in found.ranks for meter in rank.store_meters()]
        assert all(meter.disk_reads for meter in meters)
        assert all(meter.disk_reads < meter.hits for meter in meters) is (store == "tiered")


async def test_a_coarser_message_is_coarse_at_both_ends_and_smaller() -> None:
    nbytes = {}
    for dtype in ("fp32", "bf16", "int8", "int4"):
        async with pipeline(dtype=dtype) as three:
            await train(three, 2)
            assert all(sender == receiver for sender, receiver in three.digests())
            nbytes[dtype] = three.ranks[0].message_nbytes
    assert nbytes["fp32"] == 2 * NUM_SAMPLES * MESSAGE_NBYTES
    assert nbytes["bf16"] == nbytes["fp32"] // 2
    assert nbytes["int8"] == nbytes["fp32"] * (8 + 16 / 64) / 32
    assert nbytes["int4"] == nbytes["fp32"] * (4 + 16 / 64) / 32


async def test_samples_without_room_are_sent_as_on_a_first_visit_and_nothing_grows() -> None:
    home = StoreHome(None, 2 * 5 * MESSAGE_NBYTES, 0)  # of two ends of a middle stage, five messages each
    async with pipeline(home) as three:
        await train(three)
        for sender, receiver in three.digests():
            assert sender == receiver
            assert len(sender) == 5  # what the end of the middle stage can, though the other end could keep ten
        assert max(rank.message_nbytes for rank in three.ranks) <= 2 * 5 * MESSAGE_NBYTES


async def test_a_kept_folder_opens_again_and_another_run_is_refused(tmp_path: Path) -> None:
    home = StoreHome(tmp_path, 10**6, 10**6)
    async with pipeline(home, store="disk") as first:
        await train(first)
        before = first.digests()
    async with pipeline(home, store="disk") as second:
        assert second.digests() == before
        second.ranks[0].take_meters()
        await second.step(tiny_batch(num_rows=ROWS), learning_rate=1e-3)
        meters = [meter for meter in second.ranks[0].take_meters() if meter.kind == "forward"]
        assert sum(meter.first_visits for meter in meters) == 0
        assert all(sender == receiver for sender, receiver in second.digests())
    with pytest.raises(StoreError, match="delete"):
        async with pipeline(home, store="disk", dtype="bf16"):
            pass


def test_the_benchmark_of_stores_compares_three_that_train_to_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = {**bench_store.RUN["model"]["config"], "n_embd": 32, "n_layer": 2, "n_head": 2}
    run = {
        **bench_store.RUN,
        "model": {"config": small, "weights": "random"},
        "data": {**bench_store.RUN["data"], "max_train_samples": 16, "max_eval_samples": 1, "max_length": 16},
        "train": {**bench_store.RUN["train"], "batch_size": 8, "num_microbatches": 2, "num_train_epochs": 3},
    }
    monkeypatch.setattr(bench_store, "RUN", run)
    outcome = bench_store.run(json=True, path=tmp_path / "store.json", folder=tmp_path)
    rows = {row["store"]: row for row in outcome["rows"]}
    assert [rows[store]["misses"] for store in bench_store.STORES] == [2 * 16] * 3  # two senders, every first visit
    assert rows["memory"]["disk_reads"] == 0 < rows["tiered"]["disk_reads"] < rows["disk"]["disk_reads"]
    assert outcome["bars"][-1]["value"] == 0
    assert (tmp_path / "store.json").exists()
