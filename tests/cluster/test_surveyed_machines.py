"""Workers that join a plan, all real, in one loop over the memory transport: what they measure, and how they leave."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from coordinator.preparation import read_run
from coordinator.surveying import SurveyFailed, survey
from pipecomp.config import RunConfig, parse_run_config
from pipecomp.planning.forecast import Cluster
from pipecomp.runtime.compute import ComputeThread
from pipecomp.transport.base import Address
from pipecomp.transport.memory import MemoryNetwork, MemoryTransport
from workers import events as e
from workers.job import AssignedWork
from workers.service import WorkerOptions, WorkerService

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = ("attic", "cellar", "hall")


def make_config(**cluster: Any) -> RunConfig:
    return parse_run_config(
        {
            "model": {"name": str(EXAMPLES / "demo-gpt2"), "weights": "random"},
            "data": {
                "train": str(EXAMPLES / "state-of-the-union.jsonl"), "max_length": 16, "packing": True, "max_train_samples": 8,
                "max_eval_samples": 0,
            },
            "train": {"batch_size": 4, "num_microbatches": 2},
            "cluster": {"num_stages": len(NAMES), "heartbeat_timeout_s": 60.0, **cluster},
        }
    )  # fmt: skip


class Survey:
    """A plan's coordinator and its workers."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self.network = MemoryNetwork()
        self.said: list[str] = []
        self._compute = ComputeThread(num_threads=1)

    def worker(self, name: str, data_address: str = "") -> WorkerService:
        work = AssignedWork(
            name=name,
            data_address=Address(data_address or f"memory://{name}"),
            transport=MemoryTransport(self.network),
            compute=self._compute,
        )
        return WorkerService(
            WorkerOptions(coordinator="memory://plan", name=name),
            control=MemoryTransport(self.network),
            work=work,
            clock=asyncio.get_running_loop().time,
        )

    async def run(self, *workers: WorkerService) -> tuple[Cluster, list[e.Finish]]:
        listening = asyncio.Event()
        leading = asyncio.create_task(
            survey(
                self._config,
                partial(read_run, self._config, None),
                Address("memory://plan"),
                transport=MemoryTransport(self.network),
                say=self.said.append,
                on_listening=lambda _: listening.set(),
            )
        )
        try:
            async with asyncio.timeout(120):
                await listening.wait()
                working = [asyncio.create_task(worker.run()) for worker in workers]
                _, cluster = await leading
                return cluster, list(await asyncio.gather(*working))
        finally:
            leading.cancel()
            await asyncio.gather(leading, *working, return_exceptions=True)
            self._compute.close()


@pytest.mark.timeout(150)
async def test_machines_and_links_are_measured_where_they_are_and_workers_leave_in_peace() -> None:
    plan = Survey(make_config(link_rate="40mbit", link_latency_ms=10.0))
    cluster, finishes = await plan.run(*(plan.worker(name) for name in reversed(NAMES)))
    machines = cluster.machines
    assert [finish.exit_code for finish in finishes] == [0, 0, 0]
    assert finishes[0].reason == "the plan is made; start the worker again to train"
    assert [machine.name for machine in machines] == list(NAMES)
    for machine in machines:
        assert machine.block is not None and machine.head is not None and machine.embedding is not None
        assert 0 < machine.block.weights_s <= machine.block.backward_s
        assert machine.updates_per_s is not None and machine.coded_values_per_s is not None
        assert machine.up_nbytes_per_s == pytest.approx(5e6, rel=0.15)
        assert machine.down is None  # as fast as the others send
        assert 10.0 <= machine.latency_ms < 40.0
    assert set(cluster.ways) == {(0, 1), (1, 0), (1, 2), (2, 1)}
    assert [line for line in plan.said if "link" in line] == [
        "measuring the link between attic and cellar",
        "measuring the link between cellar and hall",
    ]


@pytest.mark.timeout(150)
async def test_replicas_of_one_rank_measure_the_way_between_them() -> None:
    plan = Survey(make_config(num_stages=1, num_replicas=2, link_rate="40mbit"))
    cluster, _ = await plan.run(*(plan.worker(name) for name in ("hall", "attic")))
    assert [machine.name for machine in cluster.machines] == ["attic", "hall"]
    assert [machine.up_nbytes_per_s for machine in cluster.machines] == [pytest.approx(5e6, rel=0.15)] * 2
    assert set(cluster.ways) == {(0, 1), (1, 0)}
    assert [line for line in plan.said if "link" in line] == ["measuring the link between attic and hall"]
    assert plan.said[0].endswith("start 2 workers with: pipecomp worker --coordinator HOST:PORT")


@pytest.mark.timeout(150)
async def test_a_neighbour_that_cannot_be_dialled_is_named_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.survey._DIAL_S", 0.3)
    plan = Survey(make_config())
    workers = [plan.worker(name) for name in NAMES]
    listen = workers[1]._work.listen

    async def told_wrong() -> Address:
        await listen()
        return Address("memory://nowhere")

    monkeypatch.setattr(workers[1]._work, "listen", told_wrong)
    with pytest.raises(SurveyFailed, match=r"attic .* failed while the plan was measuring links: cellar cannot be dialled at"):
        await plan.run(*workers)

