"""From settings to a buffer, and what is left of it at the end."""

from __future__ import annotations

import logging
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pipecomp.buffers import opening
from pipecomp.buffers.disk import DiskBuffer
from pipecomp.buffers.memory import MemoryBuffer
from pipecomp.buffers.opening import StoreSettings, open_buffer
from pipecomp.buffers.tiered import TieredBuffer
from pipecomp.errors import StoreError
from pipecomp.types import SampleId

MIB = 1 << 20


def settings(store: str, folder: Path | None, **options: object) -> StoreSettings:
    return StoreSettings(store, "bf16", 64 * MIB, 64 * MIB, folder)._replace(**options)


@pytest.mark.parametrize(("store", "kind"), [("memory", MemoryBuffer), ("disk", DiskBuffer), ("tiered", TieredBuffer)])
def test_settings_choose_the_buffer_and_its_format(store: str, kind: type, tmp_path: Path) -> None:
    buffer = open_buffer(settings(store, tmp_path), {"run": "a"}, "link 0 sender")
    assert type(buffer) is kind
    assert buffer.format.dtype == "bf16"
    buffer.close()


@pytest.mark.parametrize("store", ["disk", "tiered"])
def test_a_kept_folder_opens_again_with_every_message(store: str, tmp_path: Path) -> None:
    digests = []
    for step in (1, 2):
        buffer = open_buffer(settings(store, tmp_path), {"run": "a"}, "0/sender")
        if step == 1:
            for i in range(5):
                buffer.stage(1, SampleId(i), torch.full((2, 3), float(i)))
            buffer.commit(1)
        digests.append(buffer.digest())
        buffer.close()
    assert digests[0] == digests[1]
    assert len(digests[0]) == 5
    assert [path.name for path in tmp_path.iterdir()] == ["0%2Fsender"]


@pytest.mark.parametrize("store", ["disk", "tiered"])
def test_without_a_folder_nothing_is_left(store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening.tempfile, "tempdir", str(tmp_path))
    buffer = open_buffer(settings(store, None), {"run": "a"}, "0")
    buffer.stage(1, SampleId(1), torch.ones(2, 3))
    buffer.commit(1)
    assert len(list(tmp_path.iterdir())) == 1
    buffer.close()
    assert list(tmp_path.iterdir()) == []


def test_two_ends_on_one_machine_have_a_folder_each(tmp_path: Path) -> None:
    ends = [open_buffer(settings("disk", tmp_path), {"run": "a"}, name) for name in ("sender", "receiver")]
    for end in ends:
        end.close()


def test_another_run_another_end_or_another_dtype_is_refused(tmp_path: Path) -> None:
    open_buffer(settings("disk", tmp_path), {"run": "a"}, "0").close()
    with pytest.raises(StoreError, match="run is 'a' there and 'b' here"):
        open_buffer(settings("disk", tmp_path), {"run": "b"}, "0")
    with pytest.raises(StoreError, match="dtype is 'bf16' there and 'int4' here"):
        open_buffer(settings("disk", tmp_path, dtype="int4"), {"run": "a"}, "0")
    (tmp_path / "0").rename(tmp_path / "1")
    with pytest.raises(StoreError, match="buffer is '0' there and '1' here"):
        open_buffer(settings("disk", tmp_path), {"run": "a"}, "1")


def test_a_disk_that_is_nearly_full_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening.shutil, "disk_usage", lambda path: SimpleNamespace(free=63 * MIB))
    monkeypatch.setattr(opening.tempfile, "tempdir", str(tmp_path))
    for folder in (tmp_path / "store", None):
        with pytest.raises(StoreError, match="has 63 MiB free and 64 MiB are the least; free space or choose another folder"):
            open_buffer(settings("disk", folder), {}, "0")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_told_as_that_and_not_as_a_full_disk() -> None:
    with pytest.raises(StoreError, match=r"^message store /proc/nope/x/0: No such file .*; choose .* \(--store-folder\)$"):
        open_buffer(settings("disk", Path("/proc/nope/x")), {}, "0")


def test_a_disk_with_less_than_the_budget_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(opening.shutil, "disk_usage", lambda path: SimpleNamespace(free=100 * MIB))
    with caplog.at_level(logging.WARNING):
        open_buffer(settings("disk", tmp_path, disk_nbytes=100 * MIB), {}, "0").close()
        assert caplog.messages == []
        open_buffer(settings("disk", tmp_path, disk_nbytes=101 * MIB + 100), {}, "0").close()
    assert [message.split(" may ")[1] for message in caplog.messages] == ["take 101 MiB and its disk has 100 MiB free"]


def test_the_capacity_is_what_the_tiers_hold(tmp_path: Path) -> None:
    assert settings("memory", None).capacity_nbytes == 64 * MIB
    assert settings("disk", None).capacity_nbytes == 32 * MIB
    assert settings("tiered", None).capacity_nbytes == 64 * MIB + 32 * MIB
    assert settings("tiered", tmp_path).capacity_nbytes == 32 * MIB  # all of it is on disk at the end


@pytest.mark.parametrize("store", ["disk", "tiered"])
def test_a_store_at_its_capacity_is_used_spilled_and_used_again(store: str, tmp_path: Path) -> None:
    small = settings(store, tmp_path, memory_nbytes=40_000, disk_nbytes=200_000)
    num_samples = small.capacity_nbytes // 1024
    order = random.Random(1)
    for _ in range(3):
        buffer = open_buffer(small, {}, "0")
        for step in range(1, 80):
            for i in order.sample(range(num_samples), 10):
                buffer.stage(step, SampleId(i), torch.full((8, 64), float(step)))
            buffer.commit(step)
            assert buffer.counts().disk_nbytes <= 200_000
        before = buffer.digest()
        buffer.close()
        assert buffer.counts().disk_nbytes <= 200_000
        buffer = open_buffer(small, {}, "0")
        assert buffer.digest() == before
        assert len(before) == num_samples
        buffer.close()
