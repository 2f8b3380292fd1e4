"""One kind of tensors on its way into a stage: taken from the inbox, checked, decoded, healed. Knows links, coders and the event
loop; runs no torch layers.

    receiver                                         sender
             <---- TensorMessage(version 7) ------   coded against the message that step 7 left
    holds none, or another one
             ----- Resend(sample) -------------->
             <---- Resent(version 7, whole) -----    its own message, as its store keeps it
    decodes against that one; once the step commits, both ends agree again
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from pipecomp.buffers.base import SampleMessage
from pipecomp.protocol.checks import check_tensor_message
from pipecomp.protocol.messages import Resend, Resent, SampleHeader, SampleRef, TensorMessage
from pipecomp.protocol.spans import Doing, Subject
from pipecomp.runtime.channel import CodecThreads, Destination, Inbox
from pipecomp.runtime.coding import CheckedMicrobatch, LinkCoder

_log = logging.getLogger(__name__)


class Inlet(NamedTuple):
    """Where one kind of tensors for a stage comes from."""

    inbox: Inbox
    coder: LinkCoder
    expected: Destination
    threads: CodecThreads

    async def decode(self, step: int, microbatch: int, refs: Sequence[SampleRef]) -> torch.Tensor:
        """The microbatch as (B, T, H) fp32, once it is here; its new messages are staged for `step`.

        Raises:
            RemoteProtocolError: the message is about something else than the plan says.
            CodecError: it cannot be decoded; the step must be aborted.
        """
        to = self.expected
        received = await self.inbox.take(to.kind, step, microbatch)
        message, buffers, is_taken = received.message, received.buffers, False
        assert isinstance(message, TensorMessage)
        about = Subject(to.kind, self.inbox.link.name, step, to.stage, microbatch)
        timed = functools.partial(self.inbox.link.recorder.timed, Doing.DECODE, about)

        def decode_with(messages: Mapping[int, SampleMessage]) -> torch.Tensor:
            return self.coder.decode(
                message.samples, buffers, num_columns=to.num_columns, step=step, evicted=message.evicted, messages=messages
            )

        def decode_or_check() -> torch.Tensor | CheckedMicrobatch:
            checked = self.coder.check(message.samples, num_columns=to.num_columns)
            return checked if checked.missing else decode_with(checked.messages)

        try:
            check_tensor_message(
                message,
                run=to.run,
                epoch=to.epoch,
                replica=to.replica,
                kind=to.kind,
                stage=to.stage,
                codec=self.coder.codec.name,
                num_columns=to.num_columns,
                samples=[(ref.sample_id, ref.length) for ref in refs],
            )
            outcome = await self.threads.run(timed(decode_or_check))
            if isinstance(outcome, torch.Tensor):
                return outcome
            self._tell(step, outcome)
            # The answer needs the credit that this message holds: give it back first.
            buffers = tuple(memoryview(bytes(b)) for b in buffers)
            self.inbox.link.taken(received)
            is_taken = True
            healed = await asyncio.gather(
                *(
                    self._heal(step, microbatch, header, outcome.missing[header.sample_id])
                    for header in message.samples
                    if header.sample_id in outcome.missing
                )
            )
            return await self.threads.run(timed(lambda: decode_with({**outcome.messages, **dict(healed)})))
        finally:  # an aborted step's credit goes back too
            if not is_taken:
                self.inbox.link.taken(received)

    def _tell(self, step: int, checked: CheckedMicrobatch) -> None:
        """One line a microbatch: a store that is gone would fill the log with its samples."""
        sample_id, reason = next(iter(checked.missing.items()))
        _log.warning(
            "link %s, step %d: asking for %d messages of %d samples that have one; the first is sample %016x: %s",
            self.inbox.link.name,
            step,
            len(checked.missing),
            len(checked.missing) + len(checked.messages),
            sample_id,
            reason,
        )

    async def _heal(self, step: int, microbatch: int, header: SampleHeader, reason: str) -> tuple[int, SampleMessage]:
        link, sample_id = self.inbox.link, header.sample_id
        request = Resend(
            sequence=0, step=step, microbatch=microbatch, kind=self.expected.kind, sample_id=sample_id, reason=reason
        )
        await link.send(request)
        received = await self.inbox.take_resent(self.expected.kind, step, sample_id)
        try:
            answer = received.message
            assert isinstance(answer, Resent)
            message = await self.threads.run(
                lambda: self.coder.heal(header, answer, received.buffers, num_columns=self.expected.num_columns)
            )
        finally:
            link.taken(received)
        return sample_id, message
