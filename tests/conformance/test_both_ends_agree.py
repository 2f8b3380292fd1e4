"""Law 2: after every step both ends of a link remember the same messages, bit for bit; and the check sees when they do not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from pipecomp.buffers.memory import MemoryBuffer
from pipecomp.codecs.base import Decoded
from pipecomp.codecs.delta import Delta
from pipecomp.errors import CodecError
from pipecomp.protocol import wire
from pipecomp.protocol.messages import SampleRef, TensorMessage
from pipecomp.runtime.coding import LinkCoder
from pipecomp.testing.codec_checks import LinkEnds, same_bits
from pipecomp.types import Kind, SampleId, TensorSpec

EXAMPLES, STEPS = 25, 40  # 1,000 steps in all

# Few kernels (bits x group constant or not x scale x rounding), so that a cold cache does not make the test slow.
OPTIONS: list[Mapping[str, object]] = [
    {"bits": 1, "group": 64},
    {"bits": 2, "group": 64},
    {"bits": 2, "group": 64, "rounding": "stochastic"},
    {"bits": 3, "group": "row", "first_visit": "whole"},
    {"bits": 3, "group": 5, "first_visit": {"codec": "cast", "dtype": "fp16"}},
    {"bits": 4, "group": 48, "first_visit": {"codec": "uniform", "bits": 3, "group": 10}},
    {"bits": 4, "group": 32, "scale": "fp32", "rounding": "stochastic"},
    {"bits": 7, "group": 7},
    {"bits": 8, "group": 64, "scale": "fp16"},
    {"bits": 2},
    {"bits": 4, "rotation": "hadamard"},
]


def link(options: Mapping[str, object], receiver: Delta | None = None, buffer: MemoryBuffer | None = None) -> LinkEnds:
    sender = Delta.from_options(options)
    return LinkEnds((sender, MemoryBuffer()), (receiver or Delta.from_options(options), buffer or MemoryBuffer()))


class CoderEnds:
    """The coders of a link's two ends, as the runtime makes them; only the frames of a message go from one to the other."""

    def __init__(self, options: Mapping[str, object], num_columns: int) -> None:
        self.num_columns = num_columns
        self.sender, self.receiver = (
            LinkCoder(Delta.from_options(options), MemoryBuffer(), link="0/0-1", kind=Kind.FORWARD, run_seed=11)
            for _ in range(2)
        )

    def encode(self, step: int, microbatch: Mapping[int, torch.Tensor]) -> list[wire.Buffer]:
        """The frames of one microbatch; what lies in its padding must not matter."""
        longest = max(len(values) for values in microbatch.values())
        padded = torch.full((len(microbatch), longest, self.num_columns), float("nan"))
        for row, values in zip(padded, microbatch.values(), strict=True):
            row[: len(values)] = values
        refs = [SampleRef(sample, len(values)) for sample, values in microbatch.items()]
        encoded = self.sender.encode(padded, refs, step=step, metered=False)
        message = TensorMessage(
            sequence=0,
            run="r",
            epoch=1,
            replica=0,
            kind=Kind.FORWARD,
            step=step,
            microbatch=0,
            stage=1,
            codec="delta",
            num_columns=self.num_columns,
            samples=encoded.samples,
            evicted=encoded.evicted,
            buffer_nbytes=tuple(len(buffer) for buffer in encoded.buffers),
        )
        return wire.encode(message, encoded.buffers)

    def decode(self, step: int, frames: list[wire.Buffer]) -> dict[SampleId, torch.Tensor]:
        """Each sample as the receiver computes on it."""
        message, buffers, _ = wire.decode([bytes(frame) for frame in frames])
        assert isinstance(message, TensorMessage)
        padded = self.receiver.decode(
            message.samples, buffers, num_columns=message.num_columns, step=step, evicted=message.evicted
        )
        for row, sample in zip(padded, message.samples, strict=True):
            assert not row[sample.num_rows :].any(), "padding is zeros"
        return {SampleId(s.sample_id): row[: s.num_rows] for row, s in zip(padded, message.samples, strict=True)}

    def end(self, step: int, *, commit: bool) -> None:
        for coder in (self.sender, self.receiver):
            (coder.commit if commit else coder.abort)(step)

    def check(self) -> dict[SampleId, tuple[int, int]]:
        sent, received = self.sender.digest(), self.receiver.digest()
        assert sent == received, "the ends remember different messages"
        return sent


class RandomStep(NamedTuple):
    """Microbatches of sample indices, each sample at most once. An aborted step ends with some of them not encoded any more,
    and some of the encoded ones not decoded."""

    microbatches: list[list[int]]
    commits: bool
    num_encoded: int
    num_decoded: int


@st.composite
def some_steps(draw: st.DrawFn, num_samples: int) -> list[RandomStep]:
    drawn = []
    for _ in range(STEPS):
        order = draw(st.permutations(range(num_samples)))
        taken = order[: draw(st.integers(1, num_samples))]
        size = draw(st.integers(1, 3))
        microbatches = [taken[i : i + size] for i in range(0, len(taken), size)]
        commits = draw(st.integers(0, 3)) > 0
        num_encoded = len(microbatches) if commits else draw(st.integers(0, len(microbatches)))
        num_decoded = num_encoded if commits else draw(st.integers(0, num_encoded))
        drawn.append(RandomStep(microbatches, commits, num_encoded, num_decoded))
    return drawn


def take_step(ends: CoderEnds, step: int, plan: RandomStep, samples: list[torch.Tensor]) -> None:
    """One step; afterwards what the receiver computed on is what both ends remember, or both remember what they did before."""
    before = ends.check()
    frames = [ends.encode(step, {i: samples[i] for i in part}) for part in plan.microbatches[: plan.num_encoded]]
    received: dict[SampleId, torch.Tensor] = {}
    for part in reversed(frames[: plan.num_decoded]):  # in another order than they were encoded in
        received |= ends.decode(step, part)
    assert ends.check() == before, "nothing is remembered before the step commits"
    ends.end(step, commit=plan.commits)
    after = ends.check()
    assert {s: v for s, (v, _) in after.items()} == versions_after(before, set(received) if plan.commits else set(), step)
    for sample, values in received.items():
        assert not plan.commits or after[sample][1] == xxhash.xxh3_64_intdigest(values.contiguous().numpy().data)
    assert plan.commits or after == before


def test_both_ends_agree_over_a_thousand_random_steps_aborted_ones_among_them() -> None:
    num_steps, num_aborted = 0, 0

    # A failure is not made smaller: forty steps have many parts to leave out, and that takes minutes.
    @given(st.data())
    @settings(max_examples=EXAMPLES, deadline=None, database=None, phases=[Phase.generate])
    def train(data: st.DataObject) -> None:
        nonlocal num_steps, num_aborted
        columns = data.draw(st.sampled_from([1, 3, 16, 33, 64, 100]))
        ends = CoderEnds(data.draw(st.sampled_from(OPTIONS)), columns)
        rows = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=5))
        chance = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
        size = 10.0 ** data.draw(st.integers(-6, 3))  # fp16, which one first visit goes by, refuses values from 65520 on
        samples = [torch.from_numpy((size * chance.standard_normal((r, columns))).astype(np.float32)) for r in rows]
        for step, plan in enumerate(data.draw(some_steps(len(rows))), 1):
            for index in {index for part in plan.microbatches for index in part}:
                moved = 0.2 * size * torch.from_numpy(chance.standard_normal(samples[index].shape).astype(np.float32))
                samples[index] = samples[index] + moved
            take_step(ends, step, plan, samples)
            num_steps += 1
            num_aborted += not plan.commits

    train()
    assert num_steps >= EXAMPLES * STEPS
    assert num_aborted > 0


def versions_after(before: Mapping[SampleId, tuple[int, int]], visited: set[SampleId], step: int) -> dict[SampleId, int]:
    return {sample: version for sample, (version, _) in before.items()} | dict.fromkeys(visited, step)


def test_the_composition_of_microbatches_changes_no_message() -> None:
    values = [torch.randn(4, 33, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    digests = []
    for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
        ends = link({"bits": 2, "group": 64, "rounding": "stochastic"})
        for step in range(1, 4):
            for index in order:
                ends.cross(step, SampleId(index), values[index] * (1 + step), seed=1000 * step + index)
            ends.end(step, commit=True)
        digests.append(ends.check())
    assert digests[0] == digests[1]


def test_a_sample_that_does_not_move_keeps_its_message() -> None:
    ends = link({"bits": 2, "first_visit": "whole"})
    values = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    for step in range(3):
        received = ends.cross(step, SampleId(1), values, seed=step)
        ends.end(step, commit=True)
        assert same_bits(received, values)


class AddsInAnotherOrder(Delta):
    """Decodes step * code + (step * centre + m) instead of m + (code + centre) * step: the same value but for rounding."""

    def decode(self, buffer: np.ndarray, message_in: torch.Tensor | None, spec: TensorSpec) -> Decoded:
        decoded = super().decode(buffer, message_in, spec)
        if message_in is None:
            return decoded
        change = super().decode(buffer, torch.zeros_like(message_in), spec).values
        values = 0.75 * change + (0.25 * change + message_in)
        return Decoded(values, values)


class DecodesInDouble(Delta):
    """Adds in fp64 and rounds once more: right to a last bit, and so not the same."""

    def decode(self, buffer: np.ndarray, message_in: torch.Tensor | None, spec: TensorSpec) -> Decoded:
        decoded = super().decode(buffer, message_in, spec)
        if message_in is None:
            return decoded
        change = super().decode(buffer, torch.zeros_like(message_in), spec).values
        values = (message_in.double() + change.double() * (1 + 2.0**-30)).float()
        return Decoded(values, values)


class ForgetsToAbort(MemoryBuffer):
    def abort(self, step: int) -> None:
        self.commit(step)


class ForgetsToCommit(MemoryBuffer):
    def commit(self, step: int) -> None:
        self.abort(step)


def run_steps(ends: LinkEnds, num_steps: int = 6) -> None:
    chance = torch.Generator().manual_seed(3)
    values = torch.randn(8, 100, generator=chance)
    for step in range(num_steps):
        values = values + 0.1 * torch.randn(8, 100, generator=chance)
        ends.cross(step, SampleId(5), values, seed=step)
        ends.end(step, commit=step % 3 != 1)
        ends.check()


def test_the_steps_that_find_faults_pass_without_one() -> None:
    run_steps(link({"bits": 4, "group": 64}))


@pytest.mark.parametrize("fault", [AddsInAnotherOrder, DecodesInDouble])
def test_a_decoder_with_other_rounding_is_found(fault: type[Delta]) -> None:
    options = {"bits": 4, "group": 64, "scale": "fp32"}
    with pytest.raises(AssertionError, match="disagree about sample 5"):
        run_steps(link(options, receiver=fault.from_options(options)))


@pytest.mark.parametrize("fault", [ForgetsToAbort, ForgetsToCommit])
def test_an_end_that_ends_a_step_otherwise_is_found(fault: type[MemoryBuffer]) -> None:
    # Sometimes a codec notices first: the payload of a later visit has another size than that of a first visit.
    with pytest.raises((AssertionError, CodecError)):
        run_steps(link({"bits": 4, "group": 64}, buffer=fault()))


def test_an_end_with_other_options_is_found() -> None:
    other = Delta.from_options({"bits": 4, "group": 64, "first_visit": {"codec": "uniform", "bits": 6, "group": 32}})
    with pytest.raises((AssertionError, CodecError)):
        run_steps(link({"bits": 4, "group": 64}, receiver=other))
