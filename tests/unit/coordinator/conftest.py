"""Scripts for the coordinator's machine: what a worker says, what time it is, what came out."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from coordinator import events as e
from coordinator.roster import Identity
from coordinator.state import ASSIGNMENT_EPOCH, CoordinatorState
from pipecomp.config import RunConfig, parse_run_config
from pipecomp.protocol import messages as m

EPOCH = ASSIGNMENT_EPOCH
REPORT = m.StepReport(compute_s=0.0, peak_memory_nbytes=0, message_nbytes=0, traffic=(), meters=())


def make_config(
    num_workers: int = 2,
    train: dict[str, object] | None = None,
    store: str = "memory",
    num_replicas: int = 1,
    local_steps: int = 0,
) -> RunConfig:
    return parse_run_config(
        {
            "model": {"name": "m"},
            "data": {"train": "t.jsonl"},
            "train": {"learning_rate": 1.0, "max_grad_norm": 0.0, "lr_scheduler_type": "constant", **(train or {})},
            "messages": {"store": store},
            "cluster": {"num_stages": num_workers // num_replicas, "num_replicas": num_replicas},
            "replicas": {"local_steps": local_steps},
        }
    )


def make_terms(
    num_workers: int = 2, *, total_steps: int = 3, evaluations: int = 0, num_replicas: int = 1
) -> e.RunTerms:
    return e.RunTerms(
        config_hash="c0",
        model_hash="m0",
        tokenizer_hash="t0",
        stages=tuple(e.StageSplit(i, i, 3 * i, 3 * i + 3) for i in range(num_workers // num_replicas)),
        steps_per_epoch=2,
        total_steps=total_steps,
        batch_size=lambda _step: e.BatchSize(samples=4, tokens=40, targets=10),
        num_microbatches=lambda _step: (1,) * num_replicas,
        evaluation_sizes=(e.BatchSize(2, 20, 5),) * evaluations,
        num_replicas=num_replicas,
    )


def make_join(worker: str, **changes: object) -> m.Join:
    fields: dict[str, object] = {
        "protocol_version": m.PROTOCOL_VERSION,
        "version": "1.0",
        "worker": worker,
        "host": f"host-of-{worker}",
        "process_id": 7,
        "data_address": f"memory://{worker}",
        "device": "cpu",
        "num_cores": 1,
        "memory_nbytes": 1,
    }
    return m.Join(**{**fields, **changes})  # type: ignore[arg-type]


class Script:
    """A coordinator and what it did last. Worker i is peer i and is called w<i>."""

    def __init__(
        self,
        num_workers: int = 2,
        train: dict[str, object] | None = None,
        store: str = "memory",
        *,
        local_steps: int = 0,
        **terms: int,
    ) -> None:
        self.num_workers = num_workers
        self.num_ranks = num_workers // terms.get("num_replicas", 1)
        config = make_config(num_workers, train, store, terms.get("num_replicas", 1), local_steps)
        self.state = CoordinatorState(config, Identity("run1", "1.0", "memory://weights"))
        self.terms = make_terms(num_workers, **terms)
        self.now = 0.0
        self.log: list[e.Record] = []

    @property
    def phase(self) -> str:
        return self.state.phase.value

    def do(self, event: e.Event) -> list[e.Effect]:
        """The effects of one event without the log records, which are collected."""
        effects = self.state.handle(event, now=self.now)
        self.log += [effect.record for effect in effects if isinstance(effect, e.Log)]
        return [effect for effect in effects if not isinstance(effect, e.Log)]

    def say(self, worker: int, message: m.ControlMessage) -> list[e.Effect]:
        return self.do(e.MessageReceived(e.Peer(worker), message))

    def wait(self, seconds: float, *, tick_s: float = 0.25) -> list[e.Effect]:
        """Time passes, with a tick every so often and one at its end; their effects."""
        end, effects = self.now + seconds, []
        while self.now < end:
            self.now = min(self.now + tick_s, end)
            effects += self.do(e.Tick())
        return effects

    def joined(self) -> list[e.Effect]:
        self.do(e.TermsReady(self.terms))
        return [effect for i in range(self.num_workers) for effect in self.say(i, make_join(f"w{i}"))]

    def ready(self) -> list[e.Effect]:
        """Everyone has joined and loaded; the effects of the last Ready."""
        self.joined()
        ready = m.Ready(epoch=EPOCH, num_parameters=1, num_trainable=1, peak_memory_nbytes=1)
        return [self.say(i, ready) for i in range(self.num_workers)][-1]

    def prepared(self, worker: int, step: int, loss: float = 20.0, squared_norm: float = 4.0) -> list[e.Effect]:
        rank = worker % self.num_ranks
        losses = (loss,) if rank == self.num_ranks - 1 else ()
        norms = (m.LayerNorms(3 * rank, (squared_norm,)),)
        return self.say(worker, m.Prepared(epoch=EPOCH, step=step, loss_sums=losses, layer_norms=norms))

    def committed(
        self, worker: int, step: int, parameters_hash: str = "", second_moment: float = 0.0
    ) -> list[e.Effect]:
        report = msgspec.structs.replace(REPORT, parameters_hash=parameters_hash, second_moment=second_moment)
        return self.say(worker, m.Committed(epoch=EPOCH, step=step, report=report))

    def failed(self, worker: int, step: int, reason: str = "NaN") -> list[e.Effect]:
        return self.say(worker, m.StepFailed(epoch=EPOCH, step=step, stage=worker, reason=reason))

    def aborted(self, worker: int, step: int) -> list[e.Effect]:
        return self.say(worker, m.Aborted(epoch=EPOCH, step=step))

    def evaluated(
        self, worker: int, number: int, loss: float = 10.0, num_correct: tuple[int, ...] = ()
    ) -> list[e.Effect]:
        """`num_correct`: from a classifier's head, one number for the one loss."""
        is_head = worker % self.num_ranks == self.num_ranks - 1
        losses, correct = ((loss,), num_correct) if is_head else ((), ())
        message = m.Evaluated(epoch=EPOCH, evaluation=number, loss_sums=losses, num_correct=correct, traffic=())
        return self.say(worker, message)

    def take_step(self, step: int) -> list[e.Effect]:
        """Everyone prepares and commits; the effects of the last Committed."""
        for worker in range(self.num_workers):
            self.prepared(worker, step)
        return [self.committed(worker, step) for worker in range(self.num_workers)][-1]

    def cause(self, effects: list[e.Effect]) -> str:
        """Why the run failed; it must have."""
        finish = effects[-1]
        assert isinstance(finish, e.Finish), effects
        assert finish.exit_code == 1
        return finish.cause


@pytest.fixture(scope="session")
def make_script() -> type[Script]:
    return Script


@pytest.fixture(scope="session")
def join() -> object:
    return make_join


@pytest.fixture(scope="session")
def terms() -> Callable[..., e.RunTerms]:
    return make_terms
