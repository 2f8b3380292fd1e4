"""The work behind an assignment: load, step, commit, abort, evaluate, send weights. Joins the runtime; knows no control
session and decides nothing. Every method ends in the event that the state machine waits for.
"""

from __future__ import annotations

import asyncio
import functools
from pathlib import Path
from typing import Any

import torch

from pipecomp.config import ModelConfig, RunConfig, parse_run_config
from pipecomp.errors import ConfigError, PeerLost, PipecompError, RemoteProtocolError
from pipecomp.models.base import Model, StageModule
from pipecomp.protocol import messages as m
from pipecomp.runtime.channel import CodecThreads
from pipecomp.runtime.compute import ComputeThread
from pipecomp.runtime.memory import peak_memory_nbytes
from pipecomp.runtime.optimizer import Update
from pipecomp.runtime.pipeline import Activity, Pipeline
from pipecomp.runtime.pipeline import StepRefused as PipelineRefused
from pipecomp.runtime.stores import StoreHome
from pipecomp.runtime.trace import Recorder
from pipecomp.transport.base import Address, Transport
from pipecomp.units import parse_rate
from workers import events as e
from workers.survey import describe_survey, survey_link, survey_machine

_CONNECT_S = 60.0
_UPLOAD_S = 24 * 3600.0


class ReplicaChecks:
    """After which steps all replicas' parameters are compared."""

    def __init__(self, every: int, *, only_averages: bool) -> None:
        """`every`: steps from one to the next at least; 0: never. `only_averages`: between averages they differ."""
        self._every = every
        self._only_averages = only_averages
        self._last = 0

    def are_due(self, commit: m.Commit) -> bool:
        """Asked once a step. All workers of a run come to the same answer."""
        is_due = 0 < self._every <= commit.step - self._last and (commit.average or not self._only_averages)
        if is_due:
            self._last = commit.step
        return is_due


class LinkDown(PipecompError):
    """A data link failed."""

    def __init__(self, link: str, peer_worker: str, reason: str) -> None:
        super().__init__(reason)
        self.link = link
        self.peer_worker = peer_worker


class StepCannotBePrepared(PipecompError):
    """A step must be aborted; the run can go on."""

    def __init__(self, step: int, stage: int, reason: str) -> None:
        super().__init__(reason)
        self.step = step
        self.stage = stage


class AssignedWork:
    """What one worker holds and runs. `load` comes first, everything else after it."""

    def __init__(
        self,
        *,
        name: str,
        data_address: Address,
        advertise: str | None = None,
        model_folder: str | None = None,
        num_threads: int = 0,
        transport: Transport | None = None,
        compute: ComputeThread | None = None,
        home: StoreHome = StoreHome(),  # noqa: B008 - a frozen value
    ) -> None:
        """`transport` and `compute` are for clusters inside one process; the default is ZeroMQ and a thread of its own."""
        self.activity = Activity()
        self.recorder = Recorder()
        """What this worker does from when to when."""
        self._name = name
        self._data_address = data_address
        self._advertise = advertise
        self._model_folder = model_folder
        self._num_threads = num_threads
        self._compute = compute
        self._home = home
        self._owns_compute = compute is None
        self._transport = transport
        self._hub: Any = None
        self._links: dict[str, Any] = {}
        self._weights_link: Any = None
        self._pipeline: Pipeline | None = None
        self._codec_threads: CodecThreads | None = None
        self._modules: dict[int, StageModule] = {}
        self._aliases: dict[str, str] = {}
        self._own_model: Any = None
        self._background: list[asyncio.Task[None]] = []
        self._loaded = asyncio.Event()
        self._random = False
        self._checks = ReplicaChecks(0, only_averages=False)
        self._warms_up = False  # whether second moments are reported until they are frozen
        if model_folder is not None:
            from pipecomp.models import open_model

            self._own_model = open_model(ModelConfig(name=str(Path(model_folder).resolve())))

    @property
    def model_hash(self) -> str:
        """Hash of this machine's own model folder; empty without one."""
        return "" if self._own_model is None else str(self._own_model.hash)

    @property
    def tokenizer_hash(self) -> str:
        """Hash of the own folder's tokenizer; empty where there is none."""
        if self._model_folder is None or not (Path(self._model_folder) / "tokenizer.json").exists():
            return ""
        from pipecomp.data.tokenizer import load_tokenizer, tokenizer_hash

        return tokenizer_hash(load_tokenizer(self._model_folder))

    # ------------------------------------------------------------ measuring

    async def survey(self, order: m.SurveyMachine | m.SurveyLink) -> e.Event:
        """Measure for a plan: the model's layers here, or the way to a neighbour."""
        self._note(describe_survey(order))
        if isinstance(order, m.SurveyLink):
            return e.Surveyed(found=await survey_link(order, self._shaped, self._name))
        config = parse_run_config(order.config, "the coordinator's configuration")
        self._shape(config)
        threads = self._num_threads or order.num_threads or torch.get_num_threads()
        self._compute = self._compute or ComputeThread(num_threads=threads)
        model = await self._compute.run(self._model, order.model_config, config, order.model_hash)
        return e.Surveyed(found=await self._compute.run(survey_machine, order, config, model, threads))

    # ------------------------------------------------------------ loading

    async def listen(self) -> Address:
        """Bind the data port; the address that neighbours dial."""
        from pipecomp.runtime.link import LinkHub
        from pipecomp.runtime.link_speed import serve
        from pipecomp.transport.shaped import ShapedTransport

        if self._transport is None:
            from pipecomp.transport.zeromq import ZeromqTransport

            self._transport = ZeromqTransport()
        self._shaped = ShapedTransport(self._transport, rate_nbytes_per_s=None, latency_s=0.0)
        self._hub = LinkHub(self._shaped, worker=self._name, recorder=self.recorder, guests={m.SpeedProbe: serve})
        bound: Address = await self._hub.listen(self._data_address)
        return _advertised(bound, self._advertise)

    async def load(self, assignment: m.Assignment, weights_address: Address) -> e.Event:
        """Build the shards, fetch their weights, open every link."""
        from pipecomp.runtime.assembly import PipelineMaker, build_modules, connect, own_stages
        from pipecomp.runtime.engine import Engine
        from pipecomp.runtime.rehearsal import rehearse_codecs

        config = parse_run_config(assignment.config, "the coordinator's configuration")
        self._shape(config)
        self._hub.configure(assignment.run, assignment.epoch, credit_nbytes=config.cluster.link_credit_nbytes)
        threads = self._num_threads or assignment.num_threads
        self._compute = self._compute or ComputeThread(num_threads=threads)
        self._note(f"building {', '.join(str(s.stage) for s in own_stages(assignment))}")
        model = await self._compute.run(self._model, assignment.model_config, config, assignment.model_hash)
        if model.plan.tied is not None:
            self._aliases = {model.plan.tied.alias: model.plan.tied.name}
        self._codec_threads = CodecThreads()
        await self._codec_threads.run(functools.partial(rehearse_codecs, config, model.plan.hidden_size))
        self._note("fetching weights")
        self._random = assignment.random_weights
        if assignment.peers:
            self._checks = ReplicaChecks(config.replicas.check_steps, only_averages=config.replicas.local_steps > 0)
        self._warms_up = config.train.optim == "quantized_adam" and config.train.optim_warmup_steps is None
        self._weights_link = await self._hub.dial(weights_address, m.weights_link(self._name), timeout_s=_CONNECT_S)
        weights = None if assignment.random_weights else await self._fetch(assignment)
        self._note("materializing weights")
        self._modules = await self._compute.run(build_modules, model, assignment, weights, config.train.seed)
        del weights
        self._note("connecting to neighbours")
        self._links = await connect(self._hub, assignment, timeout_s=_CONNECT_S)
        maker = PipelineMaker(
            assignment,
            config,
            model,
            self._modules,
            self._links,
            Engine(self._compute, self._codec_threads, self._home, self.recorder),
        )
        self._note("opening message stores")
        self._pipeline = await self._codec_threads.run(maker.make)  # which reads their folders
        self._pipeline.activity = self.activity
        for inbox in maker.inboxes.values():
            self._background.append(asyncio.create_task(inbox.run(), name=inbox.link.name))
        for channel in maker.channels:
            self._background += channel.start()
        self._loaded.set()
        self._note("waiting for the first step")
        trained = [o.parameter for o in self._pipeline.optimizer.owned if o.counts_in_norm]
        return e.Loaded(
            num_parameters=sum(p.numel() for mod in self._modules.values() for n, p in self._named(mod)),
            num_trainable=sum(p.numel() for p in trained),
            peak_memory_nbytes=peak_memory_nbytes(),
        )

    def _model(self, model_config: dict[str, Any], config: RunConfig, expected_hash: str) -> Model:
        from pipecomp.models import model_from_config

        model = model_from_config(model_config, freeze=config.model.freeze, dropout=config.model.dropout)
        if model.hash != expected_hash:
            raise ConfigError(
                f"the model built here has hash {model.hash}, the coordinator's has {expected_hash}: install the same "
                "transformers version on both"
            )
        return model

    async def _fetch(self, assignment: m.Assignment) -> dict[str, torch.Tensor]:
        from pipecomp.runtime.weights import fetch_tensors, read_own_tensors

        if self._own_model is None:
            return await fetch_tensors(self._weights_link, assignment.tensors)
        assert self._compute is not None
        return await self._compute.run(
            read_own_tensors, self._own_model.weights, assignment.tensors, str(self._model_folder)
        )

    def _shape(self, config: RunConfig) -> None:
        rate = config.cluster.link_rate
        self._shaped.limit(
            rate_nbytes_per_s=None if rate is None else parse_rate(rate, "cluster.link_rate"),
            latency_s=config.cluster.link_latency_ms / 1000,
        )

    # ------------------------------------------------------------ steps

    async def run_step(self, plan: m.StepPlan, buffers: tuple[memoryview, ...]) -> e.Event:
        try:
            prepared = await self._ready.run_step(plan, buffers)
        except PipelineRefused as error:
            raise StepCannotBePrepared(plan.step, error.stage, str(error)) from error
        return e.StepPrepared(step=plan.step, loss_sums=prepared.loss_sums, layer_norms=prepared.layer_norms)

    async def commit(self, commit: m.Commit, learning_rate: float) -> e.Event:
        pipeline = self._ready
        update = Update(learning_rate, commit.clip_coefficient, freezes=commit.freeze, averages=commit.average)
        await pipeline.commit(commit.step, update)
        assert self._compute is not None
        digest, second_moment = "", 0.0
        if self._checks.are_due(commit):
            digest = await self._compute.run(pipeline.optimizer.parameters_hash)
        if self._warms_up and not pipeline.optimizer.is_frozen:
            second_moment = await self._compute.run(pipeline.optimizer.second_moment)
        report = m.StepReport(
            compute_s=self._compute.busy_s,
            peak_memory_nbytes=peak_memory_nbytes(),
            message_nbytes=pipeline.message_nbytes,
            traffic=self._traffic(),
            meters=pipeline.take_meters(),
            stores=pipeline.store_meters(),
            parameters_hash=digest,
            second_moment=second_moment,
        )
        return e.StepCommitted(step=commit.step, report=report)

    async def abort(self, abort: m.Abort) -> e.Event:
        await self._ready.abort(abort.step, averages=abort.average)
        return e.StepAborted(step=abort.step)

    async def evaluate(self, plan: m.EvaluationPlan, buffers: tuple[memoryview, ...]) -> e.Event:
        sums = await self._ready.evaluate(plan, buffers)
        return e.EvaluationFinished(
            evaluation=plan.evaluation, loss_sums=sums.loss_sums, num_correct=sums.num_correct, traffic=self._traffic()
        )

    async def upload(self) -> e.Event:
        from pipecomp.runtime.weights import send_tensors, trained_tensors

        self._note("sending weights to the coordinator")
        named = [pair for module in self._modules.values() for pair in module.named_checkpoint_parameters()]
        count = await send_tensors(self._weights_link, trained_tensors(named, self._aliases, frozen_too=self._random))
        await self._weights_link.drain(timeout_s=_UPLOAD_S)
        self._note("weights are sent")
        return e.WeightsUploaded(num_tensors=count, traffic=self._traffic())

    async def failed(self) -> e.Event:
        """Waits for the first background task that ends; they never end well. A worker without neighbours has none."""
        await self._loaded.wait()
        if not self._background:
            await asyncio.Event().wait()
        done, _ = await asyncio.wait(self._background, return_when=asyncio.FIRST_COMPLETED)
        task = done.pop()
        error = task.exception()
        if isinstance(error, PeerLost):
            name = task.get_name()
            link = next((x for key, x in self._links.items() if key in name), None)
            raise LinkDown(name, "" if link is None else link.peer_worker, str(error)) from error
        raise error if error is not None else RemoteProtocolError(f"{task.get_name()} ended")

    async def close(self) -> None:
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        if self._hub is not None:
            await self._hub.close()
        try:
            if self._codec_threads is not None:
                await self._codec_threads.idle()
                if self._pipeline is not None:
                    await self._codec_threads.run(self._pipeline.close)
        finally:  # a store may have failed
            if self._codec_threads is not None:
                self._codec_threads.close()
            if self._compute is not None and self._owns_compute:
                self._compute.close()
            if self._transport is not None:
                await self._transport.close()

    # ------------------------------------------------------------

    @property
    def _ready(self) -> Pipeline:
        assert self._pipeline is not None, "load comes first"
        return self._pipeline

    def _traffic(self) -> tuple[m.Traffic, ...]:
        links = [*self._links.values(), self._weights_link]
        return tuple(traffic for link in links for traffic in link.traffic())

    def _named(self, module: StageModule) -> list[tuple[str, torch.nn.Parameter]]:
        return [(n, p) for n, p in module.named_checkpoint_parameters() if n not in self._aliases]

    def _note(self, text: str) -> None:
        self.activity.text = text


def _advertised(bound: Address, advertise: str | None) -> Address:
    """Replace the host (and the port where one is given) of the bound address by what neighbours can dial."""
    scheme, _, rest = bound.partition("://")
    if advertise is None or scheme != "tcp":
        return bound
    port = rest.rpartition(":")[2]
    has_port = ":" in advertise.rpartition("]")[2] if advertise.startswith("[") else ":" in advertise
    return Address(f"{scheme}://{advertise}" if has_port else f"{scheme}://{advertise}:{port}")

