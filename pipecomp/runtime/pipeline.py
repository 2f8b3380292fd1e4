"""One rank's side of a pipeline: runs the schedule's actions of a step, then commits or aborts it. Joins stages, channels and
the optimizer; knows no coordinator, no processes and no run files.

    run_step    actions in order (actions.py): wait (in the event loop) for an action's input, compute it (in the compute
                thread), hand its output to the channel, which encodes and sends beside the next action
    commit      optimizer step, staged messages become current            abort     forget both

Nothing but `commit` changes weights, optimizer state or messages (law 3).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from pipecomp.errors import CodecError, LocalProtocolError, MessageMismatch, NonFiniteValues
from pipecomp.models.base import Batch
from pipecomp.protocol.messages import EvaluationPlan, LayerNorms, LinkMeter, SampleRef, StepPlan, StoreMeter
from pipecomp.protocol.spans import Doing, Subject
from pipecomp.runtime.actions import Actions, StageEnds, cancel
from pipecomp.runtime.batches import check_refs, make_batches
from pipecomp.runtime.coding import LinkCoder
from pipecomp.runtime.engine import Engine
from pipecomp.runtime.gradients import GradientSums
from pipecomp.runtime.inlet import Inlet
from pipecomp.runtime.optimizer import ShardOptimizer, Update
from pipecomp.runtime.trace import COMPUTE, StepNotes
from pipecomp.schedules.base import Action, ActionKind, Schedule
from pipecomp.types import Kind, Rank

T = TypeVar("T")


class PreparedStep(NamedTuple):
    """What the coordinator needs before it decides."""

    loss_sums: tuple[float, ...]  # one a microbatch, from the head's stage
    layer_norms: tuple[LayerNorms, ...]


class EvaluationSums(NamedTuple):
    """What one evaluation plan gives, one number a microbatch, from the head's stage."""

    loss_sums: tuple[float, ...]
    num_correct: tuple[int, ...]  # samples classified rightly; empty where labels are tokens


class StepRefused(CodecError):
    """Values of this step cannot be encoded; the step must be aborted, the run can go on."""

    def __init__(self, stage: int, reason: str) -> None:
        super().__init__(reason)
        self.stage = stage


class Activity:
    """What this worker is doing, in words; read by heartbeats and error messages."""

    def __init__(self) -> None:
        self.text = "starting"
        self.step = 0


class Pipeline:
    """The stages of one rank, ready to train."""

    def __init__(
        self,
        stages: Sequence[StageEnds],
        ranks: Sequence[Rank],
        schedule: Schedule,
        optimizer: ShardOptimizer,
        *,
        rank: Rank,
        sums: GradientSums,
        engine: Engine,
        num_deferred: int = 0,
    ) -> None:
        """`num_deferred`: of so many microbatches a stage may leave gradients of weights for later."""
        self.stages = {s.stage: s for s in stages}
        self.activity = Activity()
        self.optimizer = optimizer
        self._ranks = tuple(ranks)
        self._schedule = schedule
        self._rank = rank
        self._orders: dict[int, list[Action]] = {}
        self._num_deferred = num_deferred
        self._sums = sums
        self._engine = engine
        self.compute = engine.compute
        self.threads = engine.threads
        self._recorder = engine.recorder
        self._notes = StepNotes(engine.recorder)
        self._refused: asyncio.Future[None] | None = None
        self._labels_are_classes = any(s.runtime.module.labels_are_classes for s in stages)

    # ------------------------------------------------------------ a step

    async def run_step(self, plan: StepPlan, buffers: Sequence[memoryview]) -> PreparedStep:
        """All actions of this rank; returns once gradients are complete and every message is staged.

        Raises:
            StepRefused: values that are not finite; the coordinator should abort the step.
            PipecompError: a link or the protocol failed; the run cannot go on.
        """
        check_refs(plan.microbatches)
        self._notes.begin(Subject(step=plan.step))
        order = [ref.sample_id for refs in plan.microbatches for ref in refs]
        for coder in self._coders():
            coder.prefetch(order)
        self._sums.begin(plan.step, has_samples=bool(plan.microbatches))
        try:
            prepared = await self._until_refused(self._run_actions(plan, self._batches(plan, buffers)))
        finally:
            await self._sums.stop()
        self._notes.prepared()
        return prepared

    async def _until_refused(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, or StepRefused once a channel cannot encode: who waits for its output would wait forever."""
        self._refused = asyncio.get_running_loop().create_future()
        running = asyncio.ensure_future(work)
        try:
            running.add_done_callback(lambda _: self._refused and self._refused.cancel())
            await asyncio.wait([self._refused])
            if not self._refused.cancelled():
                self._refused.result()
            return await running
        finally:
            running.cancel()
            self._refused.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def commit(self, step: int, update: Update) -> None:
        """Apply a prepared step: weights, then messages, then what replicas are to have in common.

        Raises:
            NonFiniteValues: an average of parameters was due, and one is not finite.
        """
        self._note("commit", step)
        self._notes.decided(step)
        if self._sums.has_update:
            optimize = self._recorder.timed(Doing.OPTIMIZER, Subject(step=step), self.optimizer.step, lane=COMPUTE)
            await self.compute.run(optimize, update)
        else:
            self.optimizer.forget()
        if update.freezes:
            await self.compute.run(self.optimizer.freeze)
            self._sums.freeze()
        for coder in self._coders():
            coder.commit(step)
        await self._average(step, update.averages)
        self._finish(step, is_committed=True)
        self._notes.end(Doing.STEP, step)
        self._note("waiting for the next step", step)

    async def _average(self, step: int, is_due: bool) -> None:
        if is_due:
            self._note("average of replicas", step)
            await self._sums.average(step)

    async def abort(self, step: int, *, averages: bool = False) -> None:
        """Forget a step, at whatever point it was. `averages`: as of an `Update`."""
        self._note("abort", step)
        for stage in self.stages.values():
            for channel in (stage.forward_out, stage.backward_out):
                if channel is not None:
                    channel.forget()
        await self.threads.idle()
        await self.compute.run(self._forget)
        for coder in self._coders():
            coder.abort(step)
        await self._average(step, averages)
        self._finish(step, is_committed=False)
        self.take_meters()  # of a step that never was
        self._notes.end(Doing.ABORTED, step)
        self._note("waiting for the next step", step)

    async def evaluate(self, plan: EvaluationPlan, buffers: Sequence[memoryview]) -> EvaluationSums:
        """Forward only, without dropout; no message, weight or gradient is touched. Sums where the head is.

        Raises:
            CodecError: values that are not finite, or too large for the codec; nothing is to be aborted.
            PipecompError: a link or the protocol failed; the run cannot go on.
        """
        check_refs(plan.microbatches)
        self._notes.begin(Subject(Kind.EVALUATION, step=plan.evaluation))
        try:
            return await self._until_refused(self._evaluate_all(plan, self._batches(plan, buffers)))
        except StepRefused as refused:
            raise CodecError(f"the model cannot be evaluated: {refused.__cause__}") from refused
        finally:
            self._notes.idle()

    async def _evaluate_all(self, plan: EvaluationPlan, batches: list[Batch]) -> EvaluationSums:
        inputs = self._start_decoding(plan.evaluation, plan.microbatches, evaluation=True)
        try:
            note = self._noting(self.activity.step)
            actions = Actions(self.stages, self._engine, inputs, num_deferred=0, note=note)
            results = await actions.evaluate(plan, self._actions(len(batches)), batches)
            for stage in self.stages.values():
                if stage.evaluation_out is not None:
                    await stage.evaluation_out.encoded()
        finally:
            await cancel(inputs.values())
        for stage in self.stages.values():
            if stage.evaluation_in is not None:
                stage.evaluation_in.inbox.finish(Kind.EVALUATION, plan.evaluation)
        self._note("waiting for the next step", self.activity.step)
        return EvaluationSums(
            tuple(r.loss_sum for r in results if r.loss_sum is not None),
            tuple(r.num_correct for r in results if r.num_correct is not None),
        )

    def refuse(self, stage: int, step: int, error: CodecError) -> None:
        """A channel could not encode; ends the running step or evaluation."""
        if self._refused is not None and not self._refused.done():
            refused = StepRefused(stage, f"step {step}: {error}")
            refused.__cause__ = error
            self._refused.set_exception(refused)

    def take_meters(self) -> tuple[LinkMeter, ...]:
        channels = [c for s in self.stages.values() for c in (s.forward_out, s.backward_out) if c is not None]
        return (*(meter for channel in channels for meter in channel.take_meters()), *self._sums.take_meters())

    def store_meters(self) -> tuple[StoreMeter, ...]:
        """One for each end of a link whose codec has messages."""
        senders = [c.coder for s in self.stages.values() for c in (s.forward_out, s.backward_out) if c is not None]
        meters = [(coder.store_meter("sender" if coder in senders else "receiver")) for coder in self._coders()]
        return tuple(meter for meter in meters if meter is not None)

    def close(self) -> None:
        """Close the stores; may wait for a disk. All are closed, whatever one of them raises."""
        with contextlib.ExitStack() as stack:
            for coder in self._coders():
                stack.callback(coder.close)

    @property
    def message_nbytes(self) -> int:
        return sum(coder.message_nbytes for coder in self._coders())

    # ------------------------------------------------------------ the actions

    async def _run_actions(self, plan: StepPlan, batches: list[Batch]) -> PreparedStep:
        inputs = self._start_decoding(plan.step, plan.microbatches, evaluation=False)
        try:
            actions = Actions(self.stages, self._engine, inputs, num_deferred=self._num_deferred, note=self._noting(plan.step))
            loss_sums = await actions.train(plan, self._actions(len(batches)), batches)
            with self._recorder.during(Doing.WAIT_ENCODED, COMPUTE, Subject(step=plan.step)):
                await self._all_encoded(plan.step)
        finally:
            await cancel(inputs.values())
        await self._sum_gradients(plan.step)
        self._note("gradient norms", plan.step)
        measure = self._recorder.timed(Doing.NORMS, Subject(step=plan.step), self.optimizer.layer_norms, lane=COMPUTE)
        norms = await self.compute.run(measure)
        self._note("waiting for commit", plan.step)
        return PreparedStep(tuple(loss_sums), norms)

    async def _all_encoded(self, step: int) -> None:
        for stage in self.stages.values():
            for channel in (stage.forward_out, stage.backward_out):
                if channel is not None:
                    self._note(f"encoding the last values of stage {stage.stage}", step)
                    await channel.encoded()

    async def _sum_gradients(self, step: int) -> None:
        self._note("sums of gradients", step)
        try:
            await self._sums.finish(step)
        except NonFiniteValues as error:
            raise StepRefused(min(self.stages), f"step {step}: {error}") from error

    # ------------------------------------------------------------ inputs and outputs

    def _batches(self, plan: StepPlan | EvaluationPlan, buffers: Sequence[memoryview]) -> list[Batch]:
        return make_batches(plan, buffers, labels_are_classes=self._labels_are_classes)

    def _actions(self, num_microbatches: int) -> list[Action]:
        """This rank's order; of no microbatches none. Made once for each number: playing all ranks takes milliseconds."""
        if not num_microbatches:
            return []
        if num_microbatches not in self._orders:
            self._orders[num_microbatches] = self._schedule.actions(self._ranks, num_microbatches)[self._rank]
        return self._orders[num_microbatches]

    def _start_decoding(
        self, step: int, microbatches: Sequence[Sequence[SampleRef]], *, evaluation: bool
    ) -> dict[Action, asyncio.Task[torch.Tensor]]:
        """A task for every input that will come over a link; it decodes as soon as the message is here."""
        tasks: dict[Action, asyncio.Task[torch.Tensor]] = {}
        for stage in self.stages.values():
            forward_in = stage.evaluation_in if evaluation else stage.forward_in
            backward_in = stage.backward_in if stage.runtime.has_backward and not evaluation else None
            for kind, inlet in ((ActionKind.FORWARD, forward_in), (ActionKind.BACKWARD, backward_in)):
                if inlet is None:
                    continue
                for index, refs in enumerate(microbatches):
                    action = Action(stage.stage, kind, index)  # type: ignore[arg-type]
                    tasks[action] = asyncio.create_task(self._decode(inlet, stage.stage, step, index, refs))
        return tasks

    async def _decode(
        self, inlet: Inlet, stage: int, step: int, microbatch: int, refs: Sequence[SampleRef]
    ) -> torch.Tensor:
        try:
            return await inlet.decode(step, microbatch, refs)
        except MessageMismatch as error:  # both ends have lost it: at the next try the sample is sent afresh
            raise StepRefused(stage, f"step {step}: {error}") from error

    def _coders(self) -> list[LinkCoder]:
        coders = []
        for stage in self.stages.values():
            coders += [c.coder for c in (stage.forward_out, stage.backward_out) if c is not None]
            coders += [c.coder for c in (stage.forward_in, stage.backward_in) if c is not None]
        return coders

    def _finish(self, step: int, *, is_committed: bool) -> None:
        for stage in self.stages.values():
            for inlet in (stage.forward_in, stage.backward_in):
                if inlet is not None:
                    inlet.inbox.finish(inlet.expected.kind, step)
        self._sums.end(step, is_committed=is_committed)

    def _forget(self) -> None:
        self.optimizer.forget()
        for stage in self.stages.values():
            stage.runtime.forget()
            for parameter in stage.runtime.module.parameters():
                parameter.grad = None

    def _noting(self, step: int) -> Callable[[str], None]:
        return lambda text: self._note(text, step)

    def _note(self, text: str, step: int) -> None:
        self.activity.text = text
        self.activity.step = step


def check_layout(ranks: Sequence[Rank]) -> None:
    """Raise LocalProtocolError where two neighbouring stages share a rank: no link joins them."""
    for stage, (here, there) in enumerate(itertools.pairwise(ranks)):
        if here == there:
            raise LocalProtocolError(f"stages {stage} and {stage + 1} are both on rank {here}; join them into one shard")
