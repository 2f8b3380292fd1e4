"""From an assignment to a pipeline ready to run: modules, weights, coders, channels, optimizer. Joins every layer below the
apps; knows no control session.

    build_stages     meta modules -> weights (sent, own folder or random) -> parameters
    dial and accept  the worker of stage s dials the worker of stage s + 1; embedding dials head where gradients are tied;
                     of two replicas' workers of one rank, the one of the lower replica dials
    make_pipeline    one coder and one channel for each kind of traffic and direction of each link
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping

import torch

from pipecomp.buffers.base import MessageBuffer
from pipecomp.buffers.retention import Retention
from pipecomp.config import RunConfig
from pipecomp.errors import CodecError, PeerLost, TransportError
from pipecomp.models.base import Model, StageModule, TiedWeight
from pipecomp.protocol.messages import (
    Assignment,
    ReplicaAddress,
    StageAddress,
    gradients_link,
    stage_link,
    tied_link,
)
from pipecomp.runtime.actions import StageEnds
from pipecomp.runtime.channel import Destination, Inbox, OutChannel
from pipecomp.runtime.coding import LinkCoder
from pipecomp.runtime.engine import Engine
from pipecomp.runtime.gradient_row import GradientRow
from pipecomp.runtime.gradients import GradientSums, Tied
from pipecomp.runtime.inlet import Inlet
from pipecomp.runtime.link import Link, LinkHub
from pipecomp.runtime.local_steps import LocalSteps
from pipecomp.runtime.optimizer import OwnedParameter, ShardOptimizer
from pipecomp.runtime.pipeline import Pipeline, check_layout
from pipecomp.runtime.rehearsal import make_codec, make_schedule
from pipecomp.runtime.replicas import Coding, Peers, ReplicaExchange
from pipecomp.runtime.stage import StageRuntime
from pipecomp.runtime.stale import StaleSums
from pipecomp.runtime.stores import adopt, link_capacity_nbytes, open_store
from pipecomp.runtime.tied import TiedExchange
from pipecomp.transport.base import Address
from pipecomp.types import Kind, Rank, Shard, StageIndex


def own_stages(assignment: Assignment) -> list[StageAddress]:
    """The stages of this worker, in order."""
    return [s for s in assignment.stages if s.rank == assignment.rank]


def build_modules(
    model: Model, assignment: Assignment, weights: Mapping[str, torch.Tensor] | None, seed: int
) -> dict[int, StageModule]:
    """Materialize this worker's shards; runs in the compute thread."""
    modules: dict[int, StageModule] = {}
    for stage in own_stages(assignment):
        module = model.build(Shard(stage.first_layer, stage.end_layer))
        model.initialize(module, weights, seed=seed)
        modules[stage.stage] = module
    if assignment.tied == "local" and len(modules) > 1:
        model.share_tied_storage(modules[min(modules)], modules[max(modules)])
    return modules


async def connect(hub: LinkHub, assignment: Assignment, *, timeout_s: float) -> dict[str, Link]:
    """Every data link of this worker, dialled and accepted side by side. Who dials gives up first and so says what address
    it could not reach; who waits to be dialled can only say that nobody came."""
    wanted: dict[str, StageAddress | ReplicaAddress | None] = {}
    for here, there in itertools.pairwise(assignment.stages):
        name = stage_link(assignment.replica, here.stage)
        if here.rank == assignment.rank:
            wanted[name] = there
        elif there.rank == assignment.rank:
            wanted[name] = None
    if assignment.tied == "exchange":
        first, last = assignment.stages[0], assignment.stages[-1]
        if first.rank == assignment.rank:
            wanted[tied_link(assignment.replica)] = last
        elif last.rank == assignment.rank:
            wanted[tied_link(assignment.replica)] = None

    for peer in assignment.peers:
        if peer.replica != assignment.replica:
            name = gradients_link(assignment.rank, assignment.replica, peer.replica)
            wanted[name] = peer if assignment.replica < peer.replica else None

    async def open_one(name: str, there: StageAddress | ReplicaAddress | None) -> Link:
        if there is None:
            return await hub.accept(name, timeout_s=2 * timeout_s)
        try:
            return await hub.dial(Address(there.data_address), name, timeout_s=timeout_s)
        except TransportError as e:
            raise PeerLost(
                f"cannot dial {there.worker} at {there.data_address.rpartition('/')[2]} ({e}). Start {there.worker} with "
                "--advertise HOST[:PORT], an address of it that the other machines can reach, and let its port through firewalls"
            ) from e

    links = await asyncio.gather(*(open_one(name, there) for name, there in wanted.items()))
    return dict(zip(wanted, links, strict=True))


class PipelineMaker:
    """Builds one worker's pipeline out of its modules and links."""

    def __init__(
        self,
        assignment: Assignment,
        config: RunConfig,
        model: Model,
        modules: Mapping[int, StageModule],
        links: Mapping[str, Link],
        engine: Engine,
    ) -> None:
        self._assignment = assignment
        self._config = config
        self._model = model
        self._modules = modules
        self._links = links
        self._engine = engine
        self.inboxes = {name: Inbox(link) for name, link in links.items()}
        self.channels: list[OutChannel] = []
        self._stores: list[MessageBuffer] = []
        self._refuse: Callable[[int, int, CodecError], None] = _unheard
        self._sums: GradientSums

    def make(self) -> Pipeline:
        """The pipeline; its channels and inboxes still have to be started (`channels`, `inboxes`)."""
        ranks = tuple(Rank(s.rank) for s in self._assignment.stages)
        check_layout(ranks)
        optimizer = ShardOptimizer(self._owned(), self._config.train)
        self._sums = self._make_sums(optimizer)
        try:
            stages = [self._stage_ends(stage) for stage in own_stages(self._assignment)]
        except BaseException:
            for store in self._stores:  # nobody else knows of them: temporary folders and locks would stay
                store.close()
            raise
        pipeline = Pipeline(
            stages,
            ranks,
            make_schedule(self._config),
            optimizer,
            rank=Rank(self._assignment.rank),
            sums=self._sums,
            engine=self._engine,
            num_deferred=self._config.cluster.num_deferred,
        )
        self._refuse = pipeline.refuse
        return pipeline

    def _stage_ends(self, here: StageAddress) -> StageEnds:
        stages, replica = self._assignment.stages, self._assignment.replica
        runtime = StageRuntime(
            self._modules[here.stage],
            needs_input_gradient=here.needs_input_gradient,
            recompute=self._config.train.gradient_checkpointing,
            run_seed=self._config.train.seed,
            split_backward=self._config.cluster.num_deferred > 0,
            on_gradient=self._sums.on_gradient if self._assignment.peers else None,
        )
        below = stages[here.stage - 1] if here.stage > 0 else None
        above = stages[here.stage + 1] if here.stage + 1 < len(stages) else None
        up = stage_link(replica, here.stage)
        down = stage_link(replica, here.stage - 1)
        returns = above is not None and above.needs_input_gradient
        return StageEnds(
            StageIndex(here.stage),
            runtime,
            forward_in=None if below is None else self._inlet(down, Kind.FORWARD, here.stage),
            forward_out=None if above is None else self._channel(up, Kind.FORWARD, above.stage, here.stage),
            backward_in=self._inlet(up, Kind.BACKWARD, here.stage) if returns else None,
            backward_out=self._channel(down, Kind.BACKWARD, here.stage - 1, here.stage) if here.needs_input_gradient else None,
            evaluation_in=None if below is None else self._inlet(down, Kind.EVALUATION, here.stage),
            evaluation_out=None if above is None else self._channel(up, Kind.EVALUATION, above.stage, here.stage),
        )

    def _inlet(self, link: str, kind: Kind, stage: int) -> Inlet:
        coder = self._coder(link, kind, "receiver", stage - 1)
        return Inlet(self.inboxes[link], coder, self._destination(kind, stage), self._engine.threads)

    def _channel(self, link: str, kind: Kind, to_stage: int, from_stage: int) -> OutChannel:
        channel = OutChannel(
            self._links[link],
            self._coder(link, kind, "sender", from_stage),
            self._engine.threads,
            self._destination(kind, to_stage),
            on_refused=lambda step, error: self._refuse(from_stage, step, error),
        )
        self.channels.append(channel)
        if channel.coder.codec.has_messages:
            self.inboxes[link].on_resend(kind, channel.answer)
        return channel

    def _coder(self, link: str, kind: Kind, end: str, lower_stage: int) -> LinkCoder:
        """`lower_stage`: the one before the link. Only forward traffic, from it to the next one, has messages."""
        codec, seed = make_codec(self._config, kind), self._config.train.seed
        if not codec.has_messages:
            return LinkCoder(codec, None, link=link, kind=kind, run_seed=seed)
        buffer = open_store(
            self._assignment,
            self._config,
            self._engine.home,
            stage=lower_stage,
            end=end,
            on_wait=self._engine.recorder.waited_for_store,
        )
        capacity = link_capacity_nbytes(self._assignment, lower_stage)
        self._stores.append(buffer)
        retention = Retention(capacity)
        adopt(buffer, retention)
        kept = retention if end == "sender" else None  # the receiver follows
        return LinkCoder(codec, buffer, link=link, kind=kind, run_seed=seed, retention=kept)

    def _destination(self, kind: Kind, stage: int, replica: int | None = None) -> Destination:
        """`replica`: None is this one."""
        a = self._assignment
        to = a.replica if replica is None else replica
        return Destination(a.run, a.epoch, to, kind, stage, self._model.plan.hidden_size)

    def _owned(self) -> list[OwnedParameter]:
        """Trainable parameters in layer order; a tied alias only where the embedding is on another worker."""
        tied = self._model.plan.tied
        layers = {p.name: p.layer for p in self._model.plan.parameters}
        owned: list[OwnedParameter] = []
        for stage in sorted(self._modules):
            for name, parameter in self._modules[stage].named_checkpoint_parameters():
                is_alias = tied is not None and name == tied.alias
                if not parameter.requires_grad or (is_alias and self._assignment.tied != "exchange"):
                    continue
                layer = tied.last_layer if tied is not None and is_alias else layers[name]
                owned.append(OwnedParameter(layer, name, parameter, counts_in_norm=not is_alias))
        return owned

    def _make_sums(self, optimizer: ShardOptimizer) -> GradientSums:
        a, tied, how = self._assignment, self._tied(), self._config.replicas
        if not a.peers:
            return GradientSums(self._engine, optimizer, tied)
        stage = own_stages(a)[0].stage
        others = [peer.replica for peer in a.peers if peer.replica != a.replica]
        inboxes = {other: self.inboxes[gradients_link(a.rank, a.replica, other)] for other in others}
        peers = Peers(a.replica, inboxes, {other: self._destination(Kind.GRADIENTS, stage, other) for other in others})
        coding = Coding(make_codec(self._config, Kind.GRADIENTS), how.error_feedback, self._config.train.seed)
        threads = self._engine.threads
        apart = tied.parameter if isinstance(tied, TiedExchange) else None
        row = GradientRow([o.parameter for o in optimizer.owned if o.parameter is not apart])
        exchanges = [ReplicaExchange(f"{a.rank}", row, peers, coding, threads)]
        if apart is not None:  # both ends of a tied weight must come to the same bits: they cut it alike and name it alike
            start = exchanges[0].last_offset
            exchanges.append(ReplicaExchange("tied", GradientRow([apart]), peers, coding, threads, first_offset=start))
        links = list(inboxes.values())
        if how.local_steps:
            return LocalSteps(self._engine, optimizer, tied, exchanges, links, how)
        return (StaleSums if how.overlap else GradientSums)(self._engine, optimizer, tied, exchanges, links)

    def _tied(self) -> Tied:
        tied = self._model.plan.tied
        if tied is None:
            return None
        named = (n for module in self._modules.values() for n in module.named_checkpoint_parameters())
        mine = {name: p for name, p in named if name in (tied.name, tied.alias)}
        if not mine or not all(p.requires_grad for p in mine.values()):
            return None
        if len(mine) == 2:
            return mine[tied.name], mine[tied.alias]
        return self._exchange(tied, mine)

    def _exchange(self, tied: TiedWeight, mine: Mapping[str, torch.nn.Parameter]) -> TiedExchange:
        is_embedding = tied.name in mine
        replica, stages = self._assignment.replica, self._assignment.stages
        return TiedExchange(
            self.inboxes[tied_link(replica)],
            make_codec(self._config, Kind.TIED),
            self._engine.threads,
            self._destination(Kind.TIED, stages[-1].stage if is_embedding else stages[0].stage),
            own_stage=stages[0].stage if is_embedding else stages[-1].stage,
            name=tied.name,
            parameter=mine[tied.name if is_embedding else tied.alias],
            run_seed=self._config.train.seed,
        )


def _unheard(_stage: int, _step: int, error: CodecError) -> None:
    raise error
