"""Two-phase commit: the numbers of a commit, the abort path, messages that cross on the wire."""

from __future__ import annotations

import math
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator import events as e
from coordinator.rates import learning_rate
from coordinator.vote import clip_coefficient, count_votes, global_norm, mean_loss
from pipecomp.config import TrainConfig
from pipecomp.protocol import messages as m

EPOCH = 1


def abort_to_all(step: int, reason: str) -> list[e.Effect]:
    return [e.Send(e.Peer(i), m.Abort(epoch=EPOCH, step=step, reason=reason)) for i in range(2)]


def test_the_norm_sums_in_layer_order_whatever_the_order_of_workers():
    squares = [2.0**53, *[1.0] * 16]  # one by one the ones are lost; from the other end they count
    layers = [m.LayerNorms(i, (value,)) for i, value in enumerate(squares)]
    assert global_norm(reversed(layers)) == global_norm(layers) == math.sqrt(2.0**53)


def test_losses_are_summed_in_order_and_divided_once():
    sums = [0.1, 0.7, 1e15, 0.3]
    assert mean_loss(sums, 7) == (((0.0 + 0.1) + 0.7) + 1e15 + 0.3) / 7


def test_a_batch_without_targets_has_no_loss():
    assert mean_loss([0.0], 0) == 0.0


def test_gradients_under_the_limit_are_not_scaled():
    assert clip_coefficient(0.5, 1.0) == 1.0


def test_gradients_over_the_limit_are_scaled_as_torch_does():
    assert clip_coefficient(4.0, 1.0) == 1.0 / (4.0 + 1e-6)


def test_zero_turns_clipping_off():
    assert clip_coefficient(1e9, 0.0) == 1.0


def prepared(losses: tuple[float, ...], *norms: m.LayerNorms) -> m.Prepared:
    return m.Prepared(epoch=1, step=1, loss_sums=losses, layer_norms=norms)


def test_a_layer_counted_twice_is_an_objection():
    votes = {"w0": prepared((1.0,), m.LayerNorms(0, (1.0,))), "w1": prepared((), m.LayerNorms(0, (1.0,)))}
    assert "same layer" in count_votes(votes, (1,), num_targets=1, max_grad_norm=1.0).objection


def test_two_losses_are_an_objection():
    votes = {"w0": prepared((1.0,)), "w1": prepared((1.0,))}
    assert "losses of 1, 1 microbatches were reported; 1 were planned" in (
        count_votes(votes, (1,), num_targets=1, max_grad_norm=1.0).objection
    )


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_step_whose_loss_is_not_finite_is_aborted_everywhere(make_script, bad):
    script = make_script()
    script.ready()
    script.prepared(0, 1)
    assert script.prepared(1, 1, loss=bad) == abort_to_all(1, f"the loss is {bad}")


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_step_whose_norm_is_not_finite_is_aborted_everywhere(make_script, bad):
    script = make_script()
    script.ready()
    script.prepared(1, 1)
    assert script.prepared(0, 1, squared_norm=bad) == abort_to_all(1, f"the gradient norm is {bad}")


def test_one_failed_stage_aborts_the_step_on_all(make_script):
    script = make_script()
    script.ready()
    script.prepared(0, 1)
    assert script.failed(1, 1, "NaN in sample 3") == abort_to_all(1, "w1, stage 1: NaN in sample 3")


def test_the_next_step_follows_an_abort_once_everyone_has_forgotten(make_script):
    script = make_script()
    script.ready()
    script.failed(0, 1)
    assert script.aborted(0, 1) == []
    assert script.aborted(1, 1) == [e.SendStep(EPOCH, 2, 1.0)]


def test_a_prepared_that_crossed_with_the_abort_is_ignored(make_script):
    script = make_script()
    script.ready()
    script.failed(0, 1)
    script.aborted(0, 1)
    assert script.prepared(1, 1) == []
    assert script.aborted(1, 1) == [e.SendStep(EPOCH, 2, 1.0)]


def test_a_second_failure_of_the_same_step_aborts_it_once(make_script):
    script = make_script()
    script.ready()
    script.failed(0, 1)
    assert script.failed(1, 1) == []


def test_an_abort_while_the_last_commit_is_under_way_loses_neither(make_script):
    script = make_script(total_steps=9)
    script.ready()
    script.prepared(0, 1)
    script.prepared(1, 1)
    script.committed(0, 1)
    script.failed(0, 2)
    script.aborted(0, 2)
    script.committed(1, 1)
    assert script.aborted(1, 2) == [e.SendStep(EPOCH, 3, 1.0)]
    committed = [record.step for record in script.log if isinstance(record, e.StepCommitted)]
    assert committed == [1]


def test_too_many_aborts_in_a_row_end_the_run_with_advice(make_script):
    script = make_script(total_steps=9, train={"max_aborted_steps": 1})
    script.ready()
    script.failed(0, 1)
    script.aborted(0, 1)
    script.aborted(1, 1)
    script.failed(0, 2)
    script.aborted(0, 2)
    cause = script.cause(script.aborted(1, 2))
    assert "2 steps in a row" in cause
    assert "train.max_aborted_steps" in cause


def test_a_committed_step_between_aborts_starts_the_count_anew(make_script):
    script = make_script(total_steps=9, train={"max_aborted_steps": 1})
    script.ready()
    for number in (1, 3):
        script.failed(0, number)
        script.aborted(0, number)
        script.aborted(1, number)
        script.take_step(number + 1)
    assert script.phase == "training"


def test_an_aborted_last_step_still_ends_the_run_well(make_script):
    script = make_script(total_steps=2, train={"save_model": False})
    script.ready()
    script.take_step(1)
    script.failed(0, 2)
    script.aborted(0, 2)
    script.aborted(1, 2)
    assert script.phase == "stopping"


def test_the_step_record_has_the_numbers_of_the_step(make_script):
    script = make_script()
    script.ready()
    script.now = 2.5
    script.take_step(1)
    (record,) = [record for record in script.log if isinstance(record, e.StepCommitted)]
    assert (record.step, record.train_epoch, record.loss, record.gradient_norm) == (1, 0, 2.0, 8.0**0.5)
    assert record.step_time_s == 2.5
    assert set(record.reports) == {"w0", "w1"}


def test_two_prepared_from_one_worker_break_the_protocol(make_script):
    script = make_script()
    script.ready()
    script.prepared(0, 1)
    assert "Prepared twice for step 1" in script.cause(script.prepared(0, 1))


def test_a_prepared_of_another_step_breaks_the_protocol(make_script):
    script = make_script()
    script.ready()
    cause = script.cause(script.prepared(1, 7))
    assert "w1" in cause
    assert "step 7" in cause


def test_an_answer_for_another_assignment_breaks_the_protocol(make_script):
    script = make_script()
    script.ready()
    cause = script.cause(script.say(0, m.Aborted(epoch=2, step=1)))
    assert "epoch 2; this is 1" in cause


class QueuedWorker:
    """Answers plans as a worker does, one queue in each direction, failing the steps it is told to."""

    def __init__(self, index: int, is_head: bool, bad_steps: set[int]) -> None:
        self.index = index
        self.is_head = is_head
        self.bad_steps = bad_steps
        self.inbox: deque[object] = deque()
        self.outbox: deque[m.ControlMessage] = deque()
        self.open_step = 0
        self.committed: list[int] = []

    def take(self) -> None:
        message = self.inbox.popleft()
        match message:
            case e.SendStep(_, step, _) if step in self.bad_steps:
                self.open_step = step
                self.outbox.append(m.StepFailed(epoch=1, step=step, stage=self.index, reason="bad"))
            case e.SendStep(_, step, _):
                self.open_step = step
                losses = (1.0,) if self.is_head else ()
                norms = (m.LayerNorms(self.index, (1.0,)),)
                self.outbox.append(m.Prepared(epoch=1, step=step, loss_sums=losses, layer_norms=norms))
            case m.Commit():
                assert message.step == self.open_step
                self.committed.append(message.step)
                report = m.StepReport(compute_s=0, peak_memory_nbytes=0, message_nbytes=0, traffic=(), meters=())
                self.outbox.append(m.Committed(epoch=1, step=message.step, report=report))
            case m.Abort():
                assert message.step == self.open_step
                self.outbox.append(m.Aborted(epoch=1, step=message.step))
            case m.Stop():
                self.outbox.append(m.Goodbye(worker=f"w{self.index}", reason=""))


@given(data=st.data(), num_workers=st.integers(1, 4), total_steps=st.integers(1, 6))
def test_whatever_crosses_on_the_wire_a_step_commits_everywhere_or_nowhere(make_script, data, num_workers, total_steps):
    bad = {i: data.draw(st.sets(st.integers(1, total_steps), max_size=2)) for i in range(num_workers)}
    script = make_script(
        num_workers, {"save_model": False, "max_aborted_steps": total_steps}, total_steps=total_steps
    )
    workers = [QueuedWorker(i, i == num_workers - 1, bad[i]) for i in range(num_workers)]
    deliver(workers, script.ready())
    finished: list[e.Effect] = []
    while not finished:
        busy = [(w, "in") for w in workers if w.inbox] + [(w, "out") for w in workers if w.outbox]
        assert busy, f"stuck in {script.phase}"
        worker, direction = data.draw(st.sampled_from(busy))
        if direction == "in":
            worker.take()
        else:
            effects = script.say(worker.index, worker.outbox.popleft())
            deliver(workers, effects)
            finished = [effect for effect in effects if isinstance(effect, e.Finish)]
    good = [step for step in range(1, total_steps + 1) if not any(step in steps for steps in bad.values())]
    assert all(worker.committed == good for worker in workers)
    assert finished == [e.Finish(0, "", stopped_early=False)]


def deliver(workers: list[QueuedWorker], effects: list[e.Effect]) -> None:
    for effect in effects:
        match effect:
            case e.SendStep():
                for worker in workers:
                    worker.inbox.append(effect)
            case e.Send(peer, message):
                workers[peer].inbox.append(message)


# ---------------------------------------------------------------- learning rates


@pytest.mark.parametrize("kind", ["linear", "cosine", "constant"])
@pytest.mark.parametrize("warmup", [0, 3])
def test_learning_rates_are_those_of_transformers(kind, warmup):
    torch = pytest.importorskip("torch")
    from transformers import get_scheduler

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.3)
    name = "constant_with_warmup" if kind == "constant" else kind
    scheduler = get_scheduler(name, optimizer, num_warmup_steps=warmup, num_training_steps=10)
    train = TrainConfig(learning_rate=0.3, lr_scheduler_type=kind, warmup_steps=warmup)
    for step in range(1, 11):
        assert learning_rate(train, step, 10) == pytest.approx(scheduler.get_last_lr()[0], rel=1e-12, abs=1e-15)
        optimizer.step()
        scheduler.step()


def test_a_warmup_ratio_is_rounded_up_to_whole_steps():
    train = TrainConfig(learning_rate=1.0, lr_scheduler_type="constant", warmup_ratio=0.25)
    assert [learning_rate(train, step, 5) for step in range(1, 6)] == [0.0, 0.5, 1.0, 1.0, 1.0]
