"""A whole pipeline in one event loop, without coordinator or processes: real stages, codecs and links over the memory
transport. Knows the runtime; starts no process. For tests of the laws and for experiments in one process.

    async with LocalPipeline(config, model_config, num_ranks=3) as pipeline:
        outcome = await pipeline.step(microbatches, learning_rate=1e-3)

With several replicas a step has microbatches for each: `step_of_replicas`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Self, TypeVar

import msgspec
import numpy as np
import torch

from pipecomp.config import RunConfig
from pipecomp.models import model_from_config
from pipecomp.models.base import CLASSIFICATION, StageModule
from pipecomp.partition import StagePlan, plan_stages
from pipecomp.protocol.messages import (
    Assignment,
    EvaluationPlan,
    LayerNorms,
    ReplicaAddress,
    SampleRef,
    StageAddress,
    StepPlan,
    Traffic,
)
from pipecomp.runtime.assembly import PipelineMaker, build_modules, connect
from pipecomp.runtime.channel import CodecThreads
from pipecomp.runtime.compute import ComputeThread
from pipecomp.runtime.engine import Engine
from pipecomp.runtime.link import LinkHub
from pipecomp.runtime.optimizer import Update
from pipecomp.runtime.pipeline import EvaluationSums, Pipeline, PreparedStep
from pipecomp.runtime.stores import StoreHome, count_ends, store_settings
from pipecomp.transport.base import Address
from pipecomp.transport.memory import MemoryNetwork, MemoryTransport
from pipecomp.types import Kind, SampleId, Shard, StageIndex

T = TypeVar("T")
_RUN, _EPOCH = "local", 1


class LocalSample(NamedTuple):
    """One sample of a step."""

    sample_id: int
    input_ids: Sequence[int]
    labels: Sequence[int]  # -100 where no loss, not shifted; for classification one: the class


class StepOutcome(NamedTuple):
    """What the coordinator would know after a step."""

    loss: float
    gradient_norm: float


class Evaluation(NamedTuple):
    """What the coordinator would know after an evaluation."""

    loss: float
    accuracy: float | None  # of a classifier


Microbatches = Sequence[Sequence[LocalSample]]
Plans = Sequence[tuple[StepPlan, list[memoryview]]]
"""One a replica, with its token buffers."""


class LocalPipeline:
    """All ranks of all replicas; `ranks[i]` is the pipeline of rank i of replica 0, and those of the others come behind."""

    def __init__(
        self,
        config: RunConfig,
        model_config: Mapping[str, Any],
        *,
        num_ranks: int,
        weights: Mapping[str, torch.Tensor] | None = None,
        home: StoreHome = StoreHome(),  # noqa: B008 - a frozen value
    ) -> None:
        """`weights`: checkpoint tensors; None for random ones from the run's seed. `home`: of every rank's messages."""
        self.config = config
        self.model = model_from_config(model_config, freeze=config.model.freeze, dropout=config.model.dropout)
        self.plan = self._plan(num_ranks)
        self.modules: list[dict[int, StageModule]] = []
        self.makers: list[PipelineMaker] = []
        self.ranks: list[Pipeline] = []
        self._weights = weights
        self._num_ranks = num_ranks
        self.num_replicas = config.cluster.num_replicas
        self._home = home
        self._compute = ComputeThread(num_threads=1)
        self._threads = CodecThreads()
        self._hubs: list[LinkHub] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._step = 0
        self._evaluation = 0
        self.prepared_norms: list[tuple[LayerNorms, ...]] = []
        """What each worker said of its gradients in the last step."""

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def _start(self) -> None:
        network = MemoryNetwork()
        addresses = []
        credit = self.config.cluster.link_credit_nbytes
        for place in range(self._num_ranks * self.num_replicas):
            hub = LinkHub(MemoryTransport(network), worker=f"worker-{place}", credit_nbytes=credit)
            hub.configure(_RUN, _EPOCH)
            addresses.append(await hub.listen(Address(f"memory://worker-{place}")))
            self._hubs.append(hub)
        assignments = [self._assignment(place, addresses) for place in range(len(addresses))]
        links = await asyncio.gather(
            *(connect(hub, a, timeout_s=10.0) for hub, a in zip(self._hubs, assignments, strict=True))
        )
        for assignment, own in zip(assignments, links, strict=True):
            modules = await self._compute.run(
                build_modules, self.model, assignment, self._weights, self.config.train.seed
            )
            engine = Engine(self._compute, self._threads, self._home)
            maker = PipelineMaker(assignment, self.config, self.model, modules, own, engine)
            self.modules.append(modules)
            self.makers.append(maker)
            self.ranks.append(maker.make())
        for maker in self.makers:
            self._tasks += [asyncio.create_task(inbox.run()) for inbox in maker.inboxes.values()]
            for channel in maker.channels:
                self._tasks += channel.start()

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for hub in self._hubs:
            await hub.close()
        await self._threads.idle()
        for rank in self.ranks:
            await self._threads.run(rank.close)
        self._threads.close()
        self._compute.close()

    # ------------------------------------------------------------ training

    async def step(self, microbatches: Microbatches, *, learning_rate: float, abort: bool = False) -> StepOutcome:
        """One optimizer step by the two-phase rule; `abort` decides against it after all ranks are prepared."""
        return await self.step_of_replicas([microbatches], learning_rate=learning_rate, abort=abort)

    async def step_of_replicas(
        self, shares: Sequence[Microbatches], *, learning_rate: float, abort: bool = False
    ) -> StepOutcome:
        """The same for several replicas, each with microbatches of its own; one may have none."""
        return await self.run_steps(self.plans(shares, learning_rate=learning_rate), abort=abort)

    async def run_step(self, plan: StepPlan, buffers: list[memoryview], *, abort: bool = False) -> StepOutcome:
        """The same for a plan as a coordinator makes it, for assignment epoch 1, with all token buffers."""
        return await self.run_steps([(plan, buffers)], abort=abort)

    async def prepare(self, plans: Plans) -> list[PreparedStep]:
        """The first half of a step: gradients are summed, nothing is decided. By worker."""
        self._step = plans[0][0].step
        return await self._all(rank.run_step(*plans[place // self._num_ranks]) for place, rank in enumerate(self.ranks))

    async def run_steps(
        self, plans: Plans, *, abort: bool = False, freezes: bool = False, averages: bool = False
    ) -> StepOutcome:
        """A step for one plan a replica; `freezes` and `averages` as of an `Update`."""
        plan, prepared = plans[0][0], await self.prepare(plans)
        num_targets = sum(p.num_targets for p, _ in plans) if self._train_apart else plan.num_targets
        loss = sum(s for p in prepared for s in p.loss_sums) / num_targets
        self.prepared_norms = [p.layer_norms for p in prepared]
        norms = [self._norm(prepared[first :][: self._num_ranks]) for first in range(0, len(prepared), self._num_ranks)]
        if abort:
            await self._all(rank.abort(plan.step, averages=averages) for rank in self.ranks)
        else:
            updates = [Update(plan.learning_rate, self._clip(norm), freezes, averages) for norm in norms]
            pairs = enumerate(self.ranks)
            await self._all(rank.commit(plan.step, updates[place // self._num_ranks]) for place, rank in pairs)
        return StepOutcome(loss, max(norms))

    def _norm(self, prepared: Sequence[PreparedStep]) -> float:
        total = 0.0
        for layer in sorted((n for p in prepared for n in p.layer_norms), key=lambda n: n.layer):
            for value in layer.squared_norms:
                total += value
        return math.sqrt(total)

    def _clip(self, norm: float) -> float:
        limit = self.config.train.max_grad_norm
        return min(1.0, limit / (norm + 1e-6)) if limit > 0 else 1.0

    @property
    def _train_apart(self) -> bool:
        return self.num_replicas > 1 and self.config.replicas.local_steps > 0

    async def evaluate(self, microbatches: Microbatches) -> Evaluation:
        """Mean loss without dropout, and of a classifier its accuracy."""
        self._evaluation += 1
        refs, buffers = _refs_and_buffers(microbatches)
        plan = EvaluationPlan(
            epoch=_EPOCH,
            evaluation=self._evaluation,
            microbatches=refs,
            has_input_ids=True,
            has_labels=True,
            buffer_nbytes=tuple(map(len, buffers)),
        )
        sums = await self.run_evaluation(plan, buffers)
        loss = sum(sums.loss_sums) / max(1, self._num_targets(microbatches))
        return Evaluation(loss, sum(sums.num_correct) / sum(map(len, refs)) if sums.num_correct else None)

    async def run_evaluation(self, plan: EvaluationPlan, buffers: list[memoryview]) -> EvaluationSums:
        """The same for a plan as a coordinator makes it, for assignment epoch 1, with all token buffers."""
        self._evaluation = plan.evaluation
        found = await self._all(rank.evaluate(plan, buffers) for rank in self.ranks[: self._num_ranks])
        return EvaluationSums(
            tuple(s for sums in found for s in sums.loss_sums), tuple(n for sums in found for n in sums.num_correct)
        )

    def digests(self) -> list[tuple[dict[SampleId, tuple[int, int]], dict[SampleId, tuple[int, int]]]]:
        """For each forward link, what its sender and what its receiver remember (law 2)."""
        found = []
        for first in range(0, len(self.ranks), self._num_ranks):
            replica = self.ranks[first : first + self._num_ranks]
            ends = {index: stage for rank in replica for index, stage in rank.stages.items()}
            pairs = [(ends[StageIndex(i)].forward_out, ends[StageIndex(i + 1)].forward_in) for i in range(len(ends) - 1)]
            found += [(out.coder.digest(), inlet.coder.digest()) for out, inlet in pairs if out and inlet]
        return found

    def traffic(self) -> dict[Kind, int]:
        """Values sent so far, by kind."""
        totals = dict.fromkeys(Kind, 0)
        for traffic in self.link_traffic():
            totals[traffic.kind] += traffic.values
        return totals

    def link_traffic(self) -> tuple[Traffic, ...]:
        """What every rank has sent so far, by link and kind."""
        return tuple(traffic for hub in self._hubs for traffic in hub.traffic())

    def parameters(self, replica: int = 0) -> dict[str, torch.Tensor]:
        """Every parameter by checkpoint name, a tied weight's alias included, copied."""
        own = self.modules[replica * self._num_ranks :][: self._num_ranks]
        named = (pair for modules in own for m in modules.values() for pair in m.named_checkpoint_parameters())
        return {name: parameter.detach().clone() for name, parameter in named}

    def gradients(self, replica: int = 0) -> dict[str, torch.Tensor]:
        """The same of gradients, once a step is prepared; of parameters that have one."""
        own = self.modules[replica * self._num_ranks :][: self._num_ranks]
        named = (pair for modules in own for m in modules.values() for pair in m.named_checkpoint_parameters())
        return {name: parameter.grad.clone() for name, parameter in named if parameter.grad is not None}

    async def _all(self, coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
        """Wait for all; the first failure, of a rank or of a link, ends the rest."""
        tasks = [asyncio.ensure_future(c) for c in coroutines]
        try:
            waiting = set(tasks)
            while waiting:
                done, _ = await asyncio.wait([*waiting, *self._tasks], return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
                waiting -= done
            return [task.result() for task in tasks]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    # ------------------------------------------------------------ plans

    def _plan(self, num_ranks: int) -> StagePlan:
        plan = self.model.plan
        return plan_stages(
            [layer.cost for layer in plan.layers],
            num_ranks,
            tied_values=None if plan.tied is None else plan.tied.num_values,
            hidden_values_per_step=self.config.train.batch_size * self.config.data.max_length * plan.hidden_size,
            mode=self.config.cluster.tied_weights,
            layers=self.config.cluster.layers,
        )

    def _addresses(self, addresses: Sequence[Address], replica: int) -> tuple[StageAddress, ...]:
        stages, first = [], replica * self._num_ranks
        num_ends = count_ends(self.plan.ranks)
        for index, (shard, rank) in enumerate(zip(self.plan.shards, self.plan.ranks, strict=True)):
            stages.append(
                StageAddress(
                    stage=index,
                    rank=rank,
                    first_layer=shard.first_layer,
                    end_layer=shard.end_layer,
                    worker=f"worker-{first + rank}",
                    data_address=addresses[first + rank],
                    needs_input_gradient=self._trains_before(shard),
                    message_nbytes=store_settings(self.config.messages, self._home, num_ends[rank]).capacity_nbytes,
                )
            )
        return tuple(stages)

    def _trains_before(self, shard: Shard) -> bool:
        return any(p.trainable and p.layer < shard.first_layer for p in self.model.plan.parameters)

    def _assignment(self, place: int, addresses: Sequence[Address]) -> Assignment:
        replica, rank = divmod(place, self._num_ranks)
        own = enumerate(range(rank, len(addresses), self._num_ranks))
        peers = tuple(ReplicaAddress(replica=r, worker=f"worker-{p}", data_address=addresses[p]) for r, p in own)
        return Assignment(
            run=_RUN,
            epoch=_EPOCH,
            replica=replica,
            rank=rank,
            stages=self._addresses(addresses, replica),
            peers=peers if len(peers) > 1 else (),
            tied=self.plan.tied,
            config=msgspec.to_builtins(self.config),
            model_config=self.model.config,
            random_weights=self._weights is None,
            tensors=(),
            model_hash=self.model.hash,
            num_threads=1,
        )

    def plans(self, shares: Sequence[Microbatches], *, learning_rate: float) -> Plans:
        """The next step's, for each replica's microbatches."""
        all_targets = max(1, sum(self._num_targets(share) for share in shares if share))
        plans, first = [], 0
        for share in shares:
            refs, buffers = _refs_and_buffers(share)
            plan = StepPlan(
                epoch=_EPOCH,
                step=self._step + 1,
                learning_rate=learning_rate,
                num_targets=max(1, self._num_targets(share)) if self._train_apart else all_targets,
                microbatches=refs,
                first_microbatch=first,
                has_input_ids=True,
                has_labels=True,
                buffer_nbytes=tuple(map(len, buffers)),
            )
            plans.append((plan, buffers))
            first += len(refs)
        return plans

    def _num_targets(self, microbatches: Microbatches) -> int:
        if self.model.plan.task == CLASSIFICATION:
            return sum(map(len, microbatches))
        return sum(label != -100 for samples in microbatches for s in samples for label in s.labels[1:])


def _refs_and_buffers(microbatches: Microbatches) -> tuple[tuple[tuple[SampleRef, ...], ...], list[memoryview]]:
    refs = tuple(tuple(SampleRef(s.sample_id, len(s.input_ids)) for s in samples) for samples in microbatches)
    samples = [s for samples in microbatches for s in samples]
    columns = ([s.input_ids for s in samples], [s.labels for s in samples])
    return refs, [memoryview(b"".join(np.asarray(x, "<i4").tobytes() for x in c)) for c in columns]
