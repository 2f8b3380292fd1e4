"""The coordinator's service with workers that speak the protocol and compute nothing, in one loop over the memory transport."""

from __future__ import annotations

import asyncio
import io
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Self

import numpy as np
import pytest
import torch

from coordinator.batches import Batches
from coordinator.console import PlainConsole
from coordinator.events import Finish, RunTerms, StageSplit
from coordinator.preparation import PreparedRun
from coordinator.service import CoordinatorService, ServiceOptions, Surroundings
from coordinator.steplog import StepLog
from coordinator.summary import make_summary
from pipecomp.config import RunConfig, parse_run_config
from pipecomp.data.samples import Counts, Dataset, Tokenized, assemble
from pipecomp.errors import ConfigError, TransportError
from pipecomp.models import model_from_config
from pipecomp.partition import plan_stages
from pipecomp.protocol import messages as m
from pipecomp.protocol import wire
from pipecomp.runtime.compute import ComputeThread
from pipecomp.runtime.link import LinkHub
from pipecomp.runtime.weights import send_tensors
from pipecomp.transport.base import Address
from pipecomp.transport.memory import MemoryNetwork, MemoryTransport

GPT2 = {
    "model_type": "gpt2", "n_layer": 2, "n_embd": 8, "n_head": 2, "n_positions": 16, "vocab_size": 32,
    "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
REPORT = m.StepReport(compute_s=0.1, peak_memory_nbytes=1000, message_nbytes=10, traffic=(), meters=())


def make_config(folder: Path) -> RunConfig:
    return parse_run_config(
        {
            "model": {"config": GPT2},
            "data": {"train": "t.txt", "tokenizer": "t", "max_length": 16},
            "train": {"batch_size": 3, "num_microbatches": 2, "output_dir": str(folder / "model")},
            "cluster": {"num_stages": 2, "tied_weights": "exchange"},
        }
    )


def make_samples(count: int) -> Dataset:
    """Sample i is i + 1 tokens of number i."""
    sequences = [Tokenized(np.full(i + 1, i, np.int32), np.ones(i + 1, np.bool_)) for i in range(count)]
    return assemble(sequences, "test", Counts())


def prepare(config: RunConfig, num_samples: int = 7) -> PreparedRun:
    model = model_from_config(GPT2)
    plan = plan_stages(
        [layer.cost for layer in model.plan.layers], 2, tied_values=1, hidden_values_per_step=1, mode="exchange"
    )
    batches = Batches(make_samples(num_samples), make_samples(4), config.train)
    terms = RunTerms(
        config_hash="c",
        model_hash=model.hash,
        tokenizer_hash="t",
        stages=tuple(
            StageSplit(i, rank, shard.first_layer, shard.end_layer)
            for i, (shard, rank) in enumerate(zip(plan.shards, plan.ranks, strict=True))
        ),
        steps_per_epoch=batches.steps_per_epoch,
        total_steps=batches.total_steps,
        batch_size=batches.size,
        num_microbatches=batches.num_microbatches,
        evaluation_sizes=batches.evaluation_sizes,
    )
    return PreparedRun(config, model, plan, batches, num_samples, 4, {}, {"tokenizer.json": b"{}"}, terms)


class FakeWorker:
    """Answers every plan; keeps what it was sent."""

    def __init__(self, network: MemoryNetwork, coordinator: Address, name: str, silent_from_step: int = 99) -> None:
        self.name = name
        self.plans: list[tuple[m.StepPlan | m.EvaluationPlan, tuple[memoryview, ...]]] = []
        self.assignment: m.Assignment | None = None
        self.refused = ""
        self.stop: m.Stop | None = None
        self.replies: asyncio.Queue[m.HeartbeatReply] = asyncio.Queue()
        self.connected = asyncio.Event()
        self.arrived = asyncio.Event()
        self._network = network
        self._coordinator = coordinator
        self._silent_from_step = silent_from_step
        self._weights = Address("")
        self.hub: LinkHub | None = None

    async def run(self) -> None:
        self.transport = MemoryTransport(self._network)
        self.connection = await self.transport.dial(self._coordinator, timeout_s=5)
        await self.send(self.join())
        self.connected.set()
        try:
            while self.stop is None and not self.refused:
                received = wire.decode(await self.connection.receive())
                await self.answer(received.message, received.buffers)
        except TransportError:
            return
        finally:
            if self.hub is not None:
                await self.hub.close()
            await self.transport.close()

    def join(self) -> m.Join:
        return m.Join(
            protocol_version=m.PROTOCOL_VERSION,
            version="test",
            worker=self.name,
            host="here",
            process_id=1,
            data_address=f"memory://{self.name}",
            device="cpu",
            num_cores=1,
            memory_nbytes=1,
        )

    async def send(self, message: m.ControlMessage) -> None:
        await self.connection.send(wire.encode(message))

    async def answer(self, message: m.Message, buffers: tuple[memoryview, ...]) -> None:
        match message:
            case m.Refused():
                self.refused = message.reason
            case m.Welcome():
                self._weights = Address(message.weights_address)
            case m.HeartbeatReply():
                self.replies.put_nowait(message)
            case m.Assignment():
                await self.load(message)
            case m.StepPlan() if message.step >= self._silent_from_step:
                self.arrived.set()
            case m.StepPlan():
                self.plans.append((message, buffers))
                losses = (2.0,) * len(message.microbatches) if message.has_labels else ()
                norms = (m.LayerNorms(self.first_layer, (4.0,)),)
                await self.send(m.Prepared(epoch=1, step=message.step, loss_sums=losses, layer_norms=norms))
            case m.Commit():
                await self.send(m.Committed(epoch=1, step=message.step, report=REPORT))
            case m.EvaluationPlan():
                self.plans.append((message, buffers))
                losses = (3.0,) * len(message.microbatches) if message.has_labels else ()
                await self.send(m.Evaluated(epoch=1, evaluation=message.evaluation, loss_sums=losses, traffic=()))
            case m.SendWeights():
                await self.upload()
            case m.Stop():
                self.stop = message
                await self.send(m.Goodbye(worker=self.name, reason=""))

    @property
    def first_layer(self) -> int:
        assert self.assignment is not None
        return self.assignment.stages[self.assignment.rank].first_layer

    async def load(self, assignment: m.Assignment) -> None:
        self.assignment = assignment
        self.hub = LinkHub(self.transport, worker=self.name, run=assignment.run, epoch=assignment.epoch)
        self.link = await self.hub.dial(self._weights, m.weights_link(self.name), timeout_s=5)
        await self.send(m.Ready(epoch=1, num_parameters=5, num_trainable=5, peak_memory_nbytes=7))

    async def upload(self) -> None:
        assert self.assignment is not None
        plan = model_from_config(self.assignment.model_config).plan
        mine = self.assignment.stages[self.assignment.rank]
        held = [p for p in plan.parameters if mine.first_layer <= p.layer < mine.end_layer]
        count = await send_tensors(self.link, ((p.name, torch.full(p.shape, float(p.layer))) for p in held))
        await self.send(m.WeightsSent(epoch=1, num_tensors=count, traffic=()))


class Cluster:
    """A service and its workers, run as tasks of the test's loop."""

    def __init__(self, folder: Path, preparing: Callable[[RunConfig], PreparedRun] = prepare) -> None:
        self.network = MemoryNetwork()
        self.text = io.StringIO()
        self.step_log = StepLog(folder / "steps.jsonl")
        self.threads = [ComputeThread(), ComputeThread()]
        self.now = 0.0
        self.time_passed = asyncio.Condition()
        self.transport = MemoryTransport(self.network)
        self.service = CoordinatorService(
            make_config(folder),
            ServiceOptions(
                run="run1", version="test", bind=Address("memory://c"), weights_bind=Address("memory://w"), num_worker_threads=3
            ),
            Surroundings(
                transport=self.transport,
                clock=lambda: self.now,
                sleep=self.sleep,
                prepare=preparing,
                work=self.threads[0],
                disk=self.threads[1],
                console=PlainConsole(self.text),
                step_log=self.step_log,
            ),
        )
        self.workers: list[FakeWorker] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._listening = asyncio.Event()

    async def sleep(self, seconds: float) -> None:
        until = self.now + seconds
        async with self.time_passed:
            await self.time_passed.wait_for(lambda: self.now >= until)

    async def pass_time(self, seconds: float) -> None:
        """In steps of a tenth of a second, so that nobody oversleeps."""
        for _ in range(round(10 * seconds)):
            self.now += 0.1
            async with self.time_passed:
                self.time_passed.notify_all()
            for _ in range(10):
                await asyncio.sleep(0)

    async def __aenter__(self) -> Self:
        self.running = asyncio.create_task(self.service.run(lambda _address: self._listening.set()))
        await self._listening.wait()
        return self

    def start(self, *names: str, **options: int) -> None:
        for name in names:
            self.workers.append(FakeWorker(self.network, self.service.address, name, **options))
            self._tasks.append(asyncio.create_task(self.workers[-1].run()))

    async def finish(self) -> Finish:
        finish = await asyncio.wait_for(self.running, 30)
        await asyncio.wait_for(asyncio.gather(*self._tasks), 30)
        return finish

    async def __aexit__(self, *_: object) -> None:
        self.running.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(self.running, *self._tasks, return_exceptions=True)
        await self.transport.close()
        self.step_log.close()
        for thread in self.threads:
            thread.close()


async def test_a_whole_run_ends_well_and_saves_the_model(tmp_path):
    async with Cluster(tmp_path) as cluster:
        cluster.start("a", "b")
        assert await cluster.finish() == Finish(0, "", stopped_early=False)
    assert all(worker.stop is not None and not worker.stop.failed for worker in cluster.workers)
    files = {path.name for path in (tmp_path / "model").iterdir()}
    assert {"config.json", "model.safetensors.index.json", "tokenizer.json", "run.toml", "steps.jsonl"} <= files


async def test_what_is_saved_is_what_the_workers_sent(tmp_path):
    from transformers import AutoModelForCausalLM

    async with Cluster(tmp_path) as cluster:
        cluster.start("a", "b")
        await cluster.finish()
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    plan = model_from_config(GPT2).plan
    assert all(bool((saved[p.name] == p.layer).all()) for p in plan.parameters)


async def test_tokens_go_to_the_embedding_and_labels_to_the_head_only(tmp_path):
    async with Cluster(tmp_path) as cluster:
        cluster.start("a", "b")
        await cluster.finish()
    first, last = cluster.workers
    assert all((plan.has_input_ids, plan.has_labels, len(buffers)) == (True, False, 1) for plan, buffers in first.plans)
    assert all((plan.has_input_ids, plan.has_labels, len(buffers)) == (False, True, 1) for plan, buffers in last.plans)


async def test_every_sample_is_trained_once_an_epoch(tmp_path):
    async with Cluster(tmp_path) as cluster:
        cluster.start("a", "b")
        await cluster.finish()
    steps = [plan for plan, _ in cluster.workers[0].plans if isinstance(plan, m.StepPlan)]
    seen = [ref.sample_id for plan in steps for refs in plan.microbatches for ref in refs]
    assert sorted(seen) == sorted(sample.id for sample in make_samples(7))
    assert [len([ref for refs in plan.microbatches for ref in refs]) for plan in steps] == [3, 3, 1]


async def test_token_buffers_hold_the_samples_in_order_of_microbatches(tmp_path):
    async with Cluster(tmp_path) as cluster:
        cluster.start("a", "b")
        await cluster.finish()
    tokens = {sample.id: sample.input_ids for sample in make_samples(7)}
    for plan, buffers in cluster.workers[0].plans:
        if isinstance(plan, m.StepPlan):
            expected = np.concatenate([tokens[ref.sample_id] for refs in plan.microbatches for ref in refs])
            np.testing.assert_array_equal(np.frombuffer(buffers[0], "<i4"), expected)


async def test_the_summary_counts_control_and_weights_too(tmp_path):
    async with Cluster(tmp_path) as cluster:
        cluster.start("a", "b")
        finish = await cluster.finish()
        summary = make_summary(
            cluster.service.ledger, cluster.service.own_traffic(), wall_time_s=1.0, stopped_early=finish.stopped_early, cause=""
        )
    num_values = sum(int(np.prod(p.shape)) for p in model_from_config(GPT2).plan.parameters)
    assert summary["traffic"]["weights"]["values"] == num_values
    assert summary["traffic"]["weights"]["payload_bytes"] == 4 * num_values
    assert summary["traffic"]["control"]["payload_bytes"] > 0
    assert summary["steps"] == 3
    assert summary["samples"] == 7
    assert summary["initial_eval_loss"] == summary["eval_loss"]


async def test_ranks_do_not_depend_on_who_came_first(tmp_path):
    async with Cluster(tmp_path) as cluster:
        cluster.start("b")
        cluster.start("a")
        await cluster.finish()
    ranks = {worker.name: worker.assignment.rank for worker in cluster.workers if worker.assignment}
    assert ranks == {"a": 0, "b": 1}


async def test_the_split_and_the_resolved_configuration_are_shown(tmp_path):
    async with Cluster(tmp_path) as cluster:
        cluster.start("a", "b")
        await cluster.finish()
    text = cluster.text.getvalue()
    assert "[compression]" in text
    assert "worker  host  stages  layers" in text
    assert "step 3/3" in text


async def test_a_worker_too_many_is_told_why_and_the_run_goes_on(tmp_path):
    async with Cluster(tmp_path) as cluster:
        cluster.start("a", "b", "c")
        assert (await cluster.finish()).exit_code == 0
    assert sorted(bool(worker.refused) for worker in cluster.workers) == [False, False, True]


async def test_garbage_on_a_control_connection_closes_it_and_nothing_else(tmp_path):
    async with Cluster(tmp_path) as cluster:
        stranger = MemoryTransport(cluster.network)
        connection = await stranger.dial(cluster.service.address, timeout_s=5)
        await connection.send([b"not a message"])
        with pytest.raises(TransportError):
            await asyncio.wait_for(connection.receive(), 10)
        cluster.start("a", "b")
        assert (await cluster.finish()).exit_code == 0
        await stranger.close()


async def test_a_worker_whose_connection_breaks_is_named(tmp_path):
    async with Cluster(tmp_path) as cluster:
        cluster.start("a")
        cluster.start("b", silent_from_step=2)
        await asyncio.wait_for(cluster.workers[1].arrived.wait(), 30)
        await cluster.workers[1].transport.close()
        await cluster.pass_time(2.0)
        finish = await cluster.finish()
    assert finish.exit_code == 1
    assert finish.cause.startswith("b (host here, process 1, stage 1")
    assert cluster.workers[0].stop is not None
    assert cluster.workers[0].stop.failed


async def test_a_worker_that_falls_silent_is_named(tmp_path):
    async with Cluster(tmp_path) as cluster:
        cluster.start("a")
        cluster.start("b", silent_from_step=2)
        await asyncio.wait_for(cluster.workers[1].arrived.wait(), 30)
        for _ in range(8):
            await cluster.pass_time(1.0)
            if not cluster.running.done():
                await cluster.workers[0].send(m.Heartbeat(sent_at_s=0.0, activity="", step=2, memory_nbytes=1))
        finish = await cluster.finish()
    assert finish.cause.startswith("b ")
    assert "no heartbeat for 5." in finish.cause


async def test_heartbeats_are_answered_while_the_model_is_read(tmp_path):
    may_end = threading.Event()

    def slow(config: RunConfig) -> PreparedRun:
        may_end.wait()
        return prepare(config)

    async with Cluster(tmp_path, slow) as cluster:
        try:
            cluster.start("a")
            worker = cluster.workers[0]
            await asyncio.wait_for(worker.connected.wait(), 10)
            await worker.send(m.Heartbeat(sent_at_s=4.0, activity="", step=0, memory_nbytes=1))
            assert (await asyncio.wait_for(worker.replies.get(), 10)).sent_at_s == 4.0
        finally:
            may_end.set()
        cluster.start("b")
        assert (await cluster.finish()).exit_code == 0


async def test_a_mistake_in_the_run_file_ends_the_run_with_its_text(tmp_path):
    def refuse(config: RunConfig) -> PreparedRun:
        raise ConfigError("data.train: no such file")

    async with Cluster(tmp_path, refuse) as cluster:
        assert await cluster.finish() == Finish(1, "data.train: no such file", stopped_early=True)


async def test_a_weights_link_that_sends_what_was_not_asked_for_ends_the_run(tmp_path):
    async with Cluster(tmp_path) as cluster:
        cluster.start("a")
        cluster.start("b", silent_from_step=1)
        await asyncio.wait_for(cluster.workers[1].arrived.wait(), 30)
        await send_tensors(cluster.workers[1].link, [("nobody.weight", torch.zeros(3))])
        for _ in range(5):
            await cluster.pass_time(0.5)
        finish = await cluster.finish()
    assert "nobody.weight" in finish.cause
    assert finish.cause.startswith("b ")


def test_a_step_is_the_same_whatever_was_planned_before(tmp_path):
    config = make_config(tmp_path).train
    fresh = partial(Batches, make_samples(7), None, config)
    walked = fresh()
    sizes = [walked.size(step) for step in range(1, 4)]
    assert [fresh().size(step) for step in (3, 1, 2)] == [sizes[2], sizes[0], sizes[1]]
