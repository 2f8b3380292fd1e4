"""Whether the workers' budgets hold the messages of all samples, and what is said where they do not."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from coordinator.budgets import describe_budget
from pipecomp.buffers.opening import StoreSettings, kept_nbytes, open_buffer
from pipecomp.config import parse_run_config
from pipecomp.protocol.messages import Join
from pipecomp.types import TensorSpec

WORKERS = ("w0", "w1", "w2")


def make_run(num_samples: int, *, messages: dict[str, str] | None = None, codec: str = "delta", num_epochs: int = 3) -> Any:
    """Samples of 256 tokens, hidden size 576, three stages."""
    config = parse_run_config(
        {
            "model": {"name": "m"},
            "data": {"train": "t.txt"},
            "messages": messages or {},
            "compression": {"forward": {"codec": codec, "bits": 4}},
            "cluster": {"num_stages": 3},
        }
    )
    return SimpleNamespace(
        config=config,
        stage_plan=SimpleNamespace(ranks=(0, 1, 2)),
        terms=SimpleNamespace(steps_per_epoch=10, total_steps=10 * num_epochs, num_replicas=1),
        batches=SimpleNamespace(lengths=np.full(num_samples, 256)),
        model=SimpleNamespace(plan=SimpleNamespace(hidden_size=576)),
    )


def joins(**changes: int) -> list[Join]:
    """The inner worker has `changes`."""
    return [
        Join(
            protocol_version=1, version="1", worker=worker, host="h", process_id=1, data_address="memory://w", device="cpu",
            num_cores=1, memory_nbytes=1, **(changes if worker == "w1" else {}),
        )
        for worker in WORKERS
    ]  # fmt: skip


def test_an_inner_worker_with_two_ends_decides_what_is_kept_and_what_to_set() -> None:
    assert describe_budget(make_run(20_000), joins()) == (
        "messages: link 0-1 has room for 17% of them (2.00 GB of 11.80 GB at each end); the other samples are sent as on a first "
        'visit each time. To keep all: messages.memory_budget = "23.6GB", or messages.store = "tiered"'
    )


def test_a_coarser_dtype_is_proposed_where_all_fits_then() -> None:
    assert describe_budget(make_run(6_000), joins()).endswith('or messages.dtype = "bf16"')
    assert describe_budget(make_run(12_000), joins()).endswith('or messages.dtype = "int8"')
    assert "dtype" not in describe_budget(make_run(12_000, messages={"dtype": "bf16"}), joins())


def test_a_workers_own_budget_is_named_as_what_is_too_small() -> None:
    own = joins(message_memory_nbytes=1_000_000)
    assert 'To keep all: w1 --message-memory "11.8MB", or' in describe_budget(make_run(10), own)


@pytest.mark.parametrize(("store", "dtype"), [("disk", "int8"), ("tiered", "bf16")])
def test_on_disk_the_disks_budget_is_what_to_set(store: str, dtype: str) -> None:
    told = describe_budget(make_run(60_000, messages={"store": store}), joins())
    assert told.endswith(f'To keep all: messages.disk_budget = "141.6GB", or messages.dtype = "{dtype}"')


def test_what_is_proposed_is_enough() -> None:
    for messages in ({"memory_budget": "23.6GB"}, {"store": "tiered"}):
        assert describe_budget(make_run(20_000, messages=messages), joins()) == ""
    assert describe_budget(make_run(60_000, messages={"store": "disk", "disk_budget": "141.6GB"}), joins()) == ""
    assert describe_budget(make_run(6_000, messages={"dtype": "bf16"}), joins()) == ""


def test_nothing_is_said_where_no_message_is_used() -> None:
    assert describe_budget(make_run(20_000, num_epochs=1), joins()) == ""
    assert describe_budget(make_run(20_000, codec="uniform"), joins()) == ""


@pytest.mark.parametrize("store", ["memory", "disk", "tiered"])
@pytest.mark.parametrize("dtype", ["fp32", "int8"])
def test_a_message_is_counted_as_the_buffer_counts_it(store: Any, dtype: Any, tmp_path: Path) -> None:
    buffer = open_buffer(StoreSettings(store, dtype, 1 << 20, 1 << 26, tmp_path), {}, "0")
    spec = TensorSpec(*torch.zeros(3, 7).shape)
    assert kept_nbytes(store, dtype, spec) == buffer.kept_nbytes(spec)
    buffer.close()
