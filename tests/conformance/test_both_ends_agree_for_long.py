"""Law 2 over ten thousand random steps in which everything happens: evictions, refused samples, damaged and foreign messages at
either end, samples that jump or change their length, aborted steps, stores in memory, on disk and in both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from pipecomp.buffers.base import MessageBuffer
from pipecomp.buffers.formats import MessageDtype
from pipecomp.buffers.opening import StoreSettings, open_buffer
from pipecomp.buffers.retention import Retention
from pipecomp.codecs.delta import Delta
from pipecomp.protocol import wire
from pipecomp.protocol.messages import Resent, SampleHeader, SampleRef, TensorMessage
from pipecomp.runtime.coding import LinkCoder
from pipecomp.types import Kind, SampleId

COLUMNS, NUM_SAMPLES, NUM_STEPS = 24, 40, 10_000
LONG_AGO = 10**9  # steps of their own for the damage that a test does


class Link(NamedTuple):
    """What a link of this test is made of."""

    options: Mapping[str, object]
    sender_store: str = "memory"
    receiver_store: str = "memory"
    dtype: MessageDtype = "fp32"
    num_kept: int = NUM_SAMPLES  # roughly


LINKS = (
    Link({"bits": 2, "group": 64}),
    Link({"bits": 2, "group": 64, "rounding": "stochastic"}, num_kept=20),
    Link({"bits": 3, "group": "row", "first_visit": "whole"}, "disk", "memory"),
    Link({"bits": 4, "group": 64}, "memory", "disk", num_kept=15),
    Link({"bits": 4, "group": 64}, "tiered", "tiered", dtype="bf16"),
    Link({"bits": 3, "group": 64}, "tiered", "disk", dtype="int8", num_kept=25),
    Link({"bits": 4, "group": 64}, "memory", "tiered", dtype="int4"),
    Link({"bits": 8, "group": 64, "scale": "fp16"}, num_kept=10),
)


class Ends:
    """Both coders of one link; only frames go from one to the other."""

    def __init__(self, link: Link, folder: Path) -> None:
        row_nbytes = 5 * COLUMNS * 4
        self.buffers = [self._open(link, kind, folder, end) for end, kind in enumerate((link.sender_store, link.receiver_store))]
        capacity = link.num_kept * self.buffers[0].format.nbytes(_spec(5))
        assert capacity <= link.num_kept * row_nbytes
        self.sender, self.receiver = (
            LinkCoder(
                Delta.from_options(link.options),
                buffer,
                link="0/0-1",
                kind=Kind.FORWARD,
                run_seed=3,
                retention=Retention(capacity) if end == 0 else None,
            )
            for end, buffer in enumerate(self.buffers)
        )
        self.seen: Counter[str] = Counter()

    def cross(self, step: int, part: Mapping[int, torch.Tensor], *, is_decoded: bool) -> None:
        longest = max(len(values) for values in part.values())
        padded = torch.full((len(part), longest, COLUMNS), float("nan"))
        for row, values in zip(padded, part.values(), strict=True):
            row[: len(values)] = values
        refs = [SampleRef(sample, len(values)) for sample, values in part.items()]
        encoded = self.sender.encode(padded, refs, step=step, metered=False)
        self.seen["fallbacks"] += encoded.meter.fallbacks
        self.seen["first visits"] += encoded.meter.first_visits
        self.seen["evictions"] += len(encoded.evicted)
        self.seen["refused"] += sum(not header.is_kept for header in encoded.samples)
        message = TensorMessage(
            sequence=0, run="r", epoch=1, replica=0, kind=Kind.FORWARD, step=step, microbatch=0, stage=1, codec="delta",
            num_columns=COLUMNS, samples=encoded.samples, evicted=encoded.evicted,
            buffer_nbytes=tuple(len(buffer) for buffer in encoded.buffers),
        )  # fmt: skip
        received, buffers, _ = wire.decode([bytes(frame) for frame in wire.encode(message, encoded.buffers)])
        assert isinstance(received, TensorMessage)
        if is_decoded:
            self._decode(step, received, buffers)

    def _decode(self, step: int, message: TensorMessage, buffers: tuple[memoryview, ...]) -> None:
        checked = self.receiver.check(message.samples, num_columns=COLUMNS)
        headers = {header.sample_id: header for header in message.samples}
        healed = {sample: self._heal(step, headers[sample]) for sample in checked.missing}
        self.receiver.decode(
            message.samples,
            buffers,
            num_columns=COLUMNS,
            step=step,
            evicted=message.evicted,
            messages={**checked.messages, **healed},
        )

    def _heal(self, step: int, header: SampleHeader) -> Any:
        stored = self.sender.resend(header.sample_id)
        assert stored is not None
        answer = Resent(
            sequence=0, step=step, microbatch=0, kind=Kind.FORWARD, sample_id=header.sample_id, version=stored.version,
            checksum=stored.checksum, dtype=self.sender.message_dtype, num_rows=stored.spec.num_rows,
            num_columns=COLUMNS, reason="", buffer_nbytes=(stored.payload.size,),
        )  # fmt: skip
        resent, buffers, _ = wire.decode([bytes(frame) for frame in wire.encode(answer, [stored.payload.data])])
        assert isinstance(resent, Resent)
        self.seen["heals"] += 1
        return self.receiver.heal(header, resent, buffers, num_columns=COLUMNS)

    def damage(self, end: int, sample: int, step: int, foreign: torch.Tensor | None) -> None:
        """An end loses a sample's message, or holds another one."""
        buffer, when = self.buffers[end], LONG_AGO + step
        if foreign is None:
            buffer.drop(when, SampleId(sample))
        else:
            buffer.stage(when, SampleId(sample), foreign)
        buffer.commit(when)

    def end(self, step: int, *, commit: bool) -> None:
        for coder in (self.sender, self.receiver):
            (coder.commit if commit else coder.abort)(step)

    def close(self) -> None:
        for coder in (self.sender, self.receiver):
            coder.close()

    @staticmethod
    def _open(link: Link, kind: str, folder: Path, end: int) -> MessageBuffer:
        settings = StoreSettings(
            store=kind, dtype=link.dtype, memory_nbytes=6000, disk_nbytes=2**28, folder=folder / str(end), direct=False
        )  # type: ignore[arg-type]
        return open_buffer(settings, {"test": "law 2"}, "messages")


def _spec(rows: int) -> Any:
    from pipecomp.types import TensorSpec

    return TensorSpec(rows, COLUMNS)


def train(link: Link, num_steps: int, seed: int, folder: Path) -> Counter[str]:
    """Random steps; after each, both ends hold the same but for what was damaged since a sample's last committed visit."""
    chance = np.random.default_rng(seed)
    ends = Ends(link, folder)

    def values(rows: int) -> torch.Tensor:
        return torch.from_numpy(chance.standard_normal((rows, COLUMNS)).astype(np.float32))

    samples = {sample: values(int(chance.integers(1, 6))) for sample in range(NUM_SAMPLES)}
    damaged: set[int] = set()
    for step in range(1, num_steps + 1):
        moved_on = NUM_SAMPLES // 2 if step > num_steps // 2 else 0  # half of the samples come no more
        visited = chance.permutation(np.arange(moved_on, NUM_SAMPLES))[: int(chance.integers(1, 7))]
        for sample in visited.tolist():
            kind = chance.integers(0, 40)
            if kind == 0:
                samples[sample] = values(int(chance.integers(1, 6)))  # another length, perhaps
            elif kind == 1:
                samples[sample] = values(len(samples[sample]))  # nothing like before
            else:
                samples[sample] = samples[sample] + 0.1 * values(len(samples[sample]))
        if chance.integers(0, 10) == 0:
            end, sample = int(chance.integers(0, 2)), int(chance.integers(0, NUM_SAMPLES))
            held = dict(ends.buffers[end].digest())
            if SampleId(sample) in held:
                foreign = values(len(samples[sample])) if chance.integers(0, 2) else None
                ends.damage(end, sample, step, foreign)
                damaged.add(sample)
                ends.seen["damaged"] += 1
        commit = bool(chance.integers(0, 5))
        parts = [visited[i : i + 2].tolist() for i in range(0, len(visited), 2)]
        for index, part in enumerate(parts):
            ends.cross(step, {s: samples[s] for s in part}, is_decoded=commit or index < len(parts) // 2)
        ends.end(step, commit=commit)
        if commit:
            damaged -= set(visited.tolist())
        ends.seen["aborted" if not commit else "committed"] += 1
        sent, received = ends.sender.digest(), ends.receiver.digest()
        assert {s: d for s, d in sent.items() if s not in damaged} == {s: d for s, d in received.items() if s not in damaged}
    ends.close()
    return ends.seen


@pytest.mark.timeout(600)
def test_both_ends_agree_over_ten_thousand_steps_of_every_kind(tmp_path: Path) -> None:
    seen: Counter[str] = Counter()
    each = NUM_STEPS // len(LINKS)
    for index, link in enumerate(LINKS):
        seen += train(link, each, index, tmp_path / str(index))
    assert seen["committed"] + seen["aborted"] == NUM_STEPS
    for what in ("aborted", "first visits", "fallbacks", "heals", "refused", "evictions", "damaged"):
        assert seen[what] >= 50, f"{what}: {seen}"
