"""The actions of one step on one rank, in the schedule's order. Knows stages, channels and the compute thread; decides no step.

    event loop        | input of k+1 is here: queue it | hand k's output on, for encoding |
    compute thread    |<--------- action k ----------->|<----------- action k + 1 ----------->|

While an action computes, the next one is queued behind it as soon as its input is here, so the thread goes from one to the next
without asking the event loop. Where nothing is ready and nothing computes, gradients of weights that were deferred are computed.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch

from pipecomp.errors import LocalProtocolError
from pipecomp.models.base import Batch
from pipecomp.protocol.messages import EvaluationPlan, SampleRef, StepPlan
from pipecomp.protocol.spans import Doing, Subject
from pipecomp.runtime.channel import OutChannel
from pipecomp.runtime.compute import ComputeThread
from pipecomp.runtime.engine import Engine
from pipecomp.runtime.inlet import Inlet
from pipecomp.runtime.stage import ForwardResult, StageRuntime
from pipecomp.runtime.trace import COMPUTE
from pipecomp.schedules.base import Action, ActionKind
from pipecomp.types import Kind, StageIndex

T = TypeVar("T")
_WORDS: Mapping[Kind, str] = {Kind.FORWARD: "activations", Kind.BACKWARD: "gradients", Kind.EVALUATION: "activations"}


class StageEnds(NamedTuple):
    """One stage with all that enters and leaves it. None where nothing does."""

    stage: StageIndex
    runtime: StageRuntime
    forward_in: Inlet | None
    forward_out: OutChannel | None
    backward_in: Inlet | None
    backward_out: OutChannel | None
    evaluation_in: Inlet | None
    evaluation_out: OutChannel | None

    def inlet(self, kind: Kind) -> Inlet | None:
        """Where values of one kind come in."""
        return {Kind.FORWARD: self.forward_in, Kind.BACKWARD: self.backward_in, Kind.EVALUATION: self.evaluation_in}[kind]


class Lane:
    """Calls in the compute thread, in order, and what is done with their results: one runs, one more may be queued behind it."""

    def __init__(self, compute: ComputeThread, note: Callable[[str], None]) -> None:
        self._compute = compute
        self._note = note
        self._calls: deque[asyncio.Task[None]] = deque()
        self._has_failed = False

    def put(self, what: str, function: Callable[[], T], then: Callable[[T], None]) -> None:
        """Queue a call; `then` gets its result, in the event loop. `what` it does, in words, is noted when its turn comes. After
        a call that failed none is run: its own words stay the last."""

        def call() -> T:
            if self._has_failed:
                raise LocalProtocolError(f"no {what}: what came before it failed")
            self._note(what)
            try:
                return function()
            except BaseException:
                self._has_failed = True
                raise

        future = self._compute.start(call)

        async def finish() -> None:
            then(await future)

        task = asyncio.create_task(finish())
        task.add_done_callback(lambda _: future.cancel())  # a task that is cancelled before it begins awaits nothing
        self._calls.append(task)

    async def room(self) -> None:
        """Wait until no more than one call is left. Raises what a call or its `then` has raised; so do the others here."""
        await self._until(1)

    async def idle(self) -> None:
        """Wait until no call is left."""
        await self._until(0)

    def is_idle(self) -> bool:
        """Whether no call is left."""
        while self._calls and self._calls[0].done():
            self._calls.popleft().result()
        return not self._calls

    async def either(self, task: asyncio.Task[T]) -> None:
        """Wait until `task` is done, or the call that runs."""
        await asyncio.wait([task, *list(self._calls)[:1]], return_when=asyncio.FIRST_COMPLETED)

    async def close(self) -> None:
        """Forget all calls; one that runs ends by itself."""
        await cancel(self._calls)
        self._calls.clear()

    async def _until(self, num_left: int) -> None:
        while len(self._calls) > num_left:
            await self._calls[0]
            self._calls.popleft()


class Actions:
    """One step's, or one evaluation's."""

    def __init__(
        self,
        stages: Mapping[StageIndex, StageEnds],
        engine: Engine,
        inputs: dict[Action, asyncio.Task[torch.Tensor]],
        *,
        num_deferred: int,
        note: Callable[[str], None],
    ) -> None:
        """`inputs`: of each action whose input comes over a link. `note` is told what is being done, in words, here or in the
        compute thread."""
        self._stages = stages
        self._recorder = engine.recorder
        self._lane = Lane(engine.compute, note)
        self._inputs = inputs
        self._num_deferred = num_deferred
        self._deferred = dict.fromkeys(stages, 0)  # backwards that were queued, less gradients of weights that were
        self._num_backwards = dict.fromkeys(stages, 0)
        self._note = note

    async def train(self, plan: StepPlan, actions: Iterable[Action], batches: Sequence[Batch]) -> list[float]:
        """Run all; the loss of each microbatch, where the head is."""
        losses: list[float] = []
        try:
            for action in actions:
                if action.kind is ActionKind.FORWARD:
                    await self._forward(plan, action, batches[action.microbatch], losses)
                elif self._stages[action.stage].runtime.has_backward:
                    await self._backward(plan, action)
                    await self._weights(action.stage, plan.step, leave=self._num_deferred)
            for stage in self._stages:
                await self._weights(stage, plan.step, leave=0)
            await self._lane.idle()
        finally:
            await self._lane.close()
        return losses

    async def evaluate(
        self, plan: EvaluationPlan, actions: Iterable[Action], batches: Sequence[Batch]
    ) -> list[ForwardResult]:
        """Run the forwards without dropout; what each gives but its values."""
        results: list[ForwardResult] = []
        try:
            for action in actions:
                if action.kind is ActionKind.FORWARD:
                    await self._evaluate_one(plan, action, batches[action.microbatch], results)
            await self._lane.idle()
        finally:
            await self._lane.close()
        return results

    async def _forward(self, plan: StepPlan, action: Action, batch: Batch, losses: list[float]) -> None:
        stage, about = self._stages[action.stage], _subject(action, Kind.FORWARD, plan.step)
        hidden = await self._input(action, about)
        forward = self._recorder.timed(Doing.FORWARD, about, stage.runtime.forward, lane=COMPUTE)

        def then(result: ForwardResult) -> None:
            if result.loss_sum is not None:
                losses.append(result.loss_sum)
            if stage.forward_out is not None:
                assert result.hidden is not None
                _submit(stage.forward_out, plan, action, result.hidden)

        self._lane.put(
            f"forward of microbatch {action.microbatch} on stage {action.stage}",
            lambda: forward(
                plan.step,
                action.microbatch,
                batch,
                hidden,
                num_targets=plan.num_targets,
                first_microbatch=plan.first_microbatch,
            ),
            then,
        )

    async def _backward(self, plan: StepPlan, action: Action) -> None:
        stage, about = self._stages[action.stage], _subject(action, Kind.BACKWARD, plan.step)
        gradient = await self._input(action, about)
        backward = self._recorder.timed(Doing.BACKWARD, about, stage.runtime.backward, lane=COMPUTE)
        self._num_backwards[action.stage] += 1
        is_last = self._num_backwards[action.stage] == len(plan.microbatches)

        def then(below: torch.Tensor | None) -> None:
            if stage.backward_out is not None:
                assert below is not None
                _submit(stage.backward_out, plan, action, below)

        self._lane.put(
            f"backward of microbatch {action.microbatch} on stage {action.stage}",
            lambda: backward(plan.step, action.microbatch, gradient, num_targets=plan.num_targets, is_last=is_last),
            then,
        )
        if self._num_deferred:
            self._deferred[action.stage] += 1

    async def _weights(self, stage: StageIndex, step: int, *, leave: int) -> None:
        """Gradients of weights that were deferred, until so many microbatches are left."""
        while self._deferred[stage] > leave:
            await self._lane.room()
            self._put_weights(stage, step)

    def _put_weights(self, stage: StageIndex, step: int) -> None:
        about = Subject(Kind.BACKWARD, step=step, stage=stage)
        weights = self._recorder.timed(Doing.WEIGHTS, about, self._stages[stage].runtime.weights, lane=COMPUTE)
        self._lane.put(f"gradients of weights on stage {stage}", weights, _nothing)
        self._deferred[stage] -= 1

    async def _evaluate_one(
        self, plan: EvaluationPlan, action: Action, batch: Batch, results: list[ForwardResult]
    ) -> None:
        stage, about = self._stages[action.stage], _subject(action, Kind.EVALUATION, plan.evaluation)
        hidden = await self._input(action, about)
        evaluate = self._recorder.timed(Doing.EVALUATE, about, stage.runtime.evaluate, lane=COMPUTE)

        def then(result: ForwardResult) -> None:
            results.append(result._replace(hidden=None))
            if stage.evaluation_out is not None:
                assert result.hidden is not None
                refs = plan.microbatches[action.microbatch]
                stage.evaluation_out.submit(plan.evaluation, action.microbatch, refs, result.hidden, metered=False)

        what = f"evaluation of microbatch {action.microbatch} on stage {action.stage}"
        self._lane.put(what, lambda: evaluate(batch, hidden), then)

    async def _input(self, action: Action, about: Subject) -> torch.Tensor | None:
        """An action's input, once it is here and there is room to queue the action."""
        task = self._inputs.get(action)
        if task is None:
            await self._lane.room()
            return None
        await self._until_here(task, action, about)
        await self._lane.room()
        del self._inputs[action]  # nothing but the action keeps the tensor alive
        return task.result()

    async def _until_here(self, task: asyncio.Task[torch.Tensor], action: Action, about: Subject) -> None:
        while not task.done():
            if not self._lane.is_idle():
                await self._lane.either(task)
                continue
            stage = next((stage for stage, number in self._deferred.items() if number), None)
            if stage is None:
                break
            self._put_weights(stage, about.step)
        if not task.done():
            self._note(f"waiting for {_WORDS[about.kind]} of microbatch {action.microbatch} at stage {action.stage}")
            inlet = self._stages[action.stage].inlet(about.kind)
            awaited = about._replace(link="" if inlet is None else inlet.inbox.link.name)
            with self._recorder.during(Doing.WAIT, COMPUTE, awaited):
                await asyncio.wait([task])


def _submit(channel: OutChannel, plan: StepPlan, action: Action, tensor: torch.Tensor) -> None:
    refs: Sequence[SampleRef] = plan.microbatches[action.microbatch]
    metered = action.microbatch == plan.step % len(plan.microbatches)
    channel.submit(plan.step, action.microbatch, refs, tensor, metered=metered)


def _subject(action: Action, kind: Kind, step: int) -> Subject:
    return Subject(kind, step=step, stage=action.stage, part=action.microbatch)


def _nothing(_: None) -> None:
    pass


async def cancel(tasks: Iterable[asyncio.Task[T]]) -> None:
    """Cancel tasks and wait for their end; whatever they raise is no news."""
    pending = list(tasks)
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
