"""Every message buffer against the public checks, and against a plain dictionary over any sequence of calls."""

from __future__ import annotations

import itertools
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pipecomp.buffers.base import MessageBuffer
from pipecomp.buffers.disk import DiskBuffer, DiskLimits
from pipecomp.buffers.formats import MessageFormat
from pipecomp.buffers.memory import MemoryBuffer
from pipecomp.buffers.tiered import TieredBuffer
from pipecomp.errors import LocalProtocolError
from pipecomp.testing.buffer_checks import BUFFER_CHECKS, BufferCheck, MakeBuffer, check_buffer, values
from pipecomp.types import SampleId

# Small enough that every check crosses segments, compacts, and waits for its writer.
TIGHT = DiskLimits(write_behind_nbytes=256, read_ahead_nbytes=512, segment_nbytes=1024)


def memory(path: Path) -> MakeBuffer:
    return MemoryBuffer


def disk(path: Path) -> MakeBuffer:
    folders = (path / str(i) for i in itertools.count())
    return lambda message_format: DiskBuffer(message_format, next(folders), {})


def tight_disk(path: Path) -> MakeBuffer:
    folders = (path / str(i) for i in itertools.count())
    return lambda message_format: DiskBuffer(message_format, next(folders), {}, limits=TIGHT)


def direct_disk(path: Path) -> MakeBuffer:
    folders = (path / str(i) for i in itertools.count())
    return lambda message_format: DiskBuffer(message_format, next(folders), {}, direct=True)


def tiered(path: Path) -> MakeBuffer:
    """Most messages of the checks fit in memory."""
    folders = (path / str(i) for i in itertools.count())
    return lambda message_format: TieredBuffer(5000, DiskBuffer(message_format, next(folders), {}))


def tight_tiered(path: Path) -> MakeBuffer:
    """A single small message does."""
    folders = (path / str(i) for i in itertools.count())
    return lambda message_format: TieredBuffer(100, DiskBuffer(message_format, next(folders), {}, limits=TIGHT))


def disk_behind_no_memory(path: Path) -> MakeBuffer:
    """No message does."""
    folders = (path / str(i) for i in itertools.count())
    return lambda message_format: TieredBuffer(0, DiskBuffer(message_format, next(folders), {}, is_kept=False))


KINDS: list[Callable[[Path], MakeBuffer]] = [memory, disk, tight_disk, direct_disk, tiered, tight_tiered, disk_behind_no_memory]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("check", BUFFER_CHECKS, ids=lambda check: check.__name__)
def test_a_buffer_keeps_the_contract(check: BufferCheck, kind: Callable[[Path], MakeBuffer], tmp_path: Path) -> None:
    check(kind(tmp_path))


class ShowsWhatIsStaged(MemoryBuffer):
    def stage(self, step: int, sample_id: SampleId, values: torch.Tensor) -> None:
        super().stage(step, sample_id, values)
        self._committed[sample_id] = self._staged[step][sample_id]


class KeepsWhatIsAborted(MemoryBuffer):
    def abort(self, step: int) -> None:
        self.commit(step)


class ForgetsDrops(MemoryBuffer):
    def drop(self, step: int, sample_id: SampleId) -> None:
        pass


class DropsWhatIsStaged(MemoryBuffer):
    def drop(self, step: int, sample_id: SampleId) -> None:
        self._staged.setdefault(step, {})[sample_id] = None


class CountsVersions(MemoryBuffer):
    def stage(self, step: int, sample_id: SampleId, values: torch.Tensor) -> None:
        super().stage(step, sample_id, values)
        old = self._committed.get(sample_id)
        self._staged[step][sample_id] = self._staged[step][sample_id]._replace(version=old.version + 1 if old else 1)


class RoundsValues(MemoryBuffer):
    def stage(self, step: int, sample_id: SampleId, values: torch.Tensor) -> None:
        super().stage(step, sample_id, values.bfloat16().float())


class EndsEveryStep(MemoryBuffer):
    def commit(self, step: int) -> None:
        for each in list(self._staged):
            super().commit(each)


@pytest.mark.parametrize(
    ("kind", "failing"),
    [
        (ShowsWhatIsStaged, "what_is_staged_is_not_seen_before_its_commit"),
        (KeepsWhatIsAborted, "an_aborted_step_leaves_no_trace"),
        (ForgetsDrops, "a_dropped_message_goes_with_its_step"),
        (DropsWhatIsStaged, "what_is_staged_outlasts_a_drop_in_the_same_step"),
        (CountsVersions, "what_is_staged_is_not_seen_before_its_commit"),
        (RoundsValues, "every_dtype_and_shape_comes_back_bit_for_bit"),
        (EndsEveryStep, "steps_end_independently_of_each_other"),
    ],
)
def test_the_checks_fail_for(kind: type[MemoryBuffer], failing: str) -> None:
    check = next(check for check in BUFFER_CHECKS if check.__name__ == failing)
    with pytest.raises(AssertionError):
        check(kind)
    with pytest.raises(AssertionError):
        check_buffer(kind)


# ---------------------------------------------------------------------------------------------- against a plain dictionary

samples = st.integers(0, 5).map(SampleId)
shapes = st.sampled_from([(1, 4), (2, 4), (0, 4), (5, 8)])


class AgainstADictionary(RuleBasedStateMachine):
    """Any calls in any order, several steps open at once, the store closed and opened in between, steps counted anew."""

    def open(self, folder: Path) -> MessageBuffer:
        raise NotImplementedError

    can_reopen = True

    @initialize()
    def begin(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.buffer = self.open(self.folder / "store")
        self.committed: dict[SampleId, tuple[int, torch.Tensor]] = {}
        self.staged: dict[int, dict[SampleId, torch.Tensor | None]] = {1: {}, 2: {}}
        self.seed = 0

    @rule(which=st.integers(0, 1), sample=samples, shape=shapes)
    def stage(self, which: int, sample: SampleId, shape: tuple[int, int]) -> None:
        step = sorted(self.staged)[which]
        self.seed += 1
        row = values(self.seed, shape)
        if self.staged[step].get(sample) is not None:
            with pytest.raises(LocalProtocolError):
                self.buffer.stage(step, sample, row)
        else:
            self.buffer.stage(step, sample, row)
            self.staged[step][sample] = row

    @rule(which=st.integers(0, 1), sample=samples)
    def drop(self, which: int, sample: SampleId) -> None:
        step = sorted(self.staged)[which]
        self.buffer.drop(step, sample)
        self.staged[step].setdefault(sample, None)

    @rule(which=st.integers(0, 1), is_committed=st.booleans())
    def end(self, which: int, is_committed: bool) -> None:
        step = sorted(self.staged)[which]
        (self.buffer.commit if is_committed else self.buffer.abort)(step)
        for sample, row in self.staged.pop(step).items():
            if is_committed:
                self.committed.pop(sample, None)
                if row is not None:
                    self.committed[sample] = step, row
        self.staged[max([step, *self.staged]) + 1] = {}

    @rule(wanted=st.lists(samples, max_size=8))
    def prefetch(self, wanted: list[SampleId]) -> None:
        self.buffer.prefetch(wanted)

    @rule(sample=samples)
    def get(self, sample: SampleId) -> None:
        message = self.buffer.get(sample)
        if sample not in self.committed:
            assert message is None
            return
        version, row = self.committed[sample]
        assert message is not None
        assert message.version == version
        assert torch.equal(message.values, self.buffer.format.unpack(self.buffer.format.pack(version, row)))

    @precondition(lambda self: self.can_reopen)
    @rule(loses_snapshots=st.booleans())
    def reopen(self, loses_snapshots: bool) -> None:
        self.buffer.close()
        lost = self.buffer.counts().lost
        if loses_snapshots and not self.compacted():
            for path in (self.folder / "store").glob("*.index"):
                path.unlink()
        self.buffer = self.open(self.folder / "store")
        assert lost == 0
        self.staged = {1: {}, 2: {}}

    def compacted(self) -> bool:
        """Whether records are gone that a log without snapshots would need."""
        numbers = sorted(int(path.stem, 16) for path in (self.folder / "store").glob("*.segment"))
        return numbers != list(range(1, len(numbers) + 1))

    @invariant()
    def digests_agree(self) -> None:
        if hasattr(self, "buffer"):
            packed = {sample: self.buffer.format.pack(*entry) for sample, entry in self.committed.items()}
            assert self.buffer.digest() == {sample: (each.version, each.checksum) for sample, each in packed.items()}
            assert self.buffer.counts().lost == 0

    def teardown(self) -> None:
        if hasattr(self, "buffer"):
            self.buffer.close()
            shutil.rmtree(self.folder)


class MemoryAgainstADictionary(AgainstADictionary):
    can_reopen = False

    def open(self, folder: Path) -> MessageBuffer:
        return MemoryBuffer(MessageFormat("int8"))


class DiskAgainstADictionary(AgainstADictionary):
    def open(self, folder: Path) -> MessageBuffer:
        limits = DiskLimits(write_behind_nbytes=300, read_ahead_nbytes=200, segment_nbytes=512)
        return DiskBuffer(MessageFormat("fp32"), folder, {"run": 1}, limits=limits)


class TieredAgainstADictionary(AgainstADictionary):
    def open(self, folder: Path) -> MessageBuffer:
        limits = DiskLimits(write_behind_nbytes=300, read_ahead_nbytes=200, segment_nbytes=1024)
        return TieredBuffer(120, DiskBuffer(MessageFormat("bf16"), folder, {"run": 1}, limits=limits))


for _machine in (MemoryAgainstADictionary, DiskAgainstADictionary, TieredAgainstADictionary):
    _machine.TestCase.settings = settings(max_examples=40, stateful_step_count=40)
TestMemoryAgainstADictionary = MemoryAgainstADictionary.TestCase
TestDiskAgainstADictionary = DiskAgainstADictionary.TestCase
TestTieredAgainstADictionary = TieredAgainstADictionary.TestCase
