"""A link whose store has a small budget: samples are refused, the run goes on. Whatever the shapes and the tiers."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from pipecomp.buffers import opening
from pipecomp.buffers.base import MessageBuffer
from pipecomp.buffers.opening import StoreSettings, open_buffer
from pipecomp.buffers.retention import Retention
from pipecomp.codecs.delta import Delta
from pipecomp.protocol.messages import SampleRef
from pipecomp.runtime.coding import LinkCoder
from pipecomp.runtime.stores import adopt
from pipecomp.types import Kind

NUM_SAMPLES = 24


@pytest.fixture(autouse=True)
def _any_disk_is_large_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "LEAST_FREE_NBYTES", 0)


def sender(buffer: MessageBuffer, settings: StoreSettings) -> LinkCoder:
    codec = Delta.from_options({"bits": 4, "group": 64})
    retention = Retention(settings.capacity_nbytes)
    adopt(buffer, retention)
    return LinkCoder(codec, buffer, link="0/0-1", kind=Kind.FORWARD, run_seed=0, retention=retention)


def train(coder: LinkCoder, rows: int, columns: int, *, num_epochs: int = 4, batch: int = 4, start: int = 0) -> int:
    """How many visits were kept."""
    num_kept = 0
    chance = torch.Generator().manual_seed(1)
    steps = itertools.count(1)
    for _ in range(num_epochs):
        for first in range(0, NUM_SAMPLES, batch):
            step = next(steps)
            refs = [SampleRef(sample, rows) for sample in range(start + first, start + first + batch)]
            values = torch.randn(batch, rows, columns, generator=chance)
            encoded = coder.encode(values, refs, step=step, metered=False)
            coder.commit(step)
            num_kept += sum(header.is_kept for header in encoded.samples)
    return num_kept


@pytest.mark.parametrize("store", ["disk", "tiered"])
@pytest.mark.parametrize("dtype", ["fp32", "int4"])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (5, 32), (40, 64)])
@pytest.mark.parametrize("disk_nbytes", [100, 2_000, 20_000])
def test_a_small_budget_refuses_samples_and_never_ends_a_run(
    store: str, dtype: str, rows: int, columns: int, disk_nbytes: int, tmp_path: Path
) -> None:
    for folder, memory_nbytes in itertools.product((None, tmp_path), (0, 3_000)):
        settings = StoreSettings(store, dtype, memory_nbytes, disk_nbytes, folder)  # type: ignore[arg-type]
        coder = sender(open_buffer(settings, {}, f"{memory_nbytes}"), settings)
        train(coder, rows, columns)
        coder.close()


def test_headers_count_as_bytes_that_are_kept(tmp_path: Path) -> None:
    """4 bytes of payload take 128 of a disk."""
    settings = StoreSettings("disk", "fp32", 0, 4096, tmp_path)
    coder = sender(open_buffer(settings, {}, "0"), settings)
    assert train(coder, 1, 1, num_epochs=1) == 4096 // 2 // 128
    coder.close()


@pytest.mark.parametrize("store", ["disk", "tiered"])
def test_runs_of_other_data_in_a_kept_folder_take_the_room_of_the_runs_before(store: str, tmp_path: Path) -> None:
    settings = StoreSettings(store, "fp32", 5_000, 50_000, tmp_path)  # type: ignore[arg-type]
    kept = []
    for run in range(4):
        coder = sender(open_buffer(settings, {}, "0"), settings)
        kept.append(train(coder, 4, 64, start=100 * run))
        coder.close()
    assert kept == [kept[0]] * 4
    assert kept[0] > 0


def test_a_folder_opened_with_a_smaller_budget_keeps_what_fits(tmp_path: Path) -> None:
    large = StoreSettings("disk", "fp32", 0, 100_000, tmp_path)
    coder = sender(open_buffer(large, {}, "0"), large)
    train(coder, 4, 64)
    assert len(coder.digest()) == NUM_SAMPLES
    coder.close()
    small = large._replace(disk_nbytes=20_000)
    coder = sender(open_buffer(small, {}, "0"), small)
    assert len(coder.digest()) == 20_000 // 2 // (4 * 64 * 4 + 64)
    train(coder, 4, 64)
    coder.close()
