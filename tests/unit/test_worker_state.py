"""The worker's machine as scripts: events in, exact effects out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipecomp.errors import LocalProtocolError, RemoteProtocolError
from pipecomp.protocol import messages as m
from workers import events as e
from workers.state import TRANSITIONS, Phase, WorkerState

WELCOME = m.Welcome(
    run="r", worker="w", weights_address="tcp://h:1", heartbeat_interval_s=0.5, heartbeat_timeout_s=5.0
)
STAGES = tuple(
    m.StageAddress(
        stage=i, rank=i, first_layer=i, end_layer=i + 1, worker=f"w{i}", data_address="x", needs_input_gradient=i > 0
    )
    for i in range(2)
)
ASSIGNMENT = m.Assignment(
    run="r",
    epoch=1,
    replica=0,
    rank=1,
    stages=STAGES,
    tied="none",
    config={},
    model_config={},
    random_weights=True,
    tensors=(),
    model_hash="h",
    num_threads=1,
)
REPORT = m.StepReport(compute_s=1.0, peak_memory_nbytes=1, message_nbytes=0, traffic=(), meters=())
LOADED = e.Loaded(num_parameters=5, num_trainable=5, peak_memory_nbytes=7)


def plan(step: int, epoch: int = 1) -> m.StepPlan:
    return m.StepPlan(
        epoch=epoch,
        step=step,
        learning_rate=0.5,
        num_targets=3,
        microbatches=((m.SampleRef(1, 4),),),
        has_input_ids=False,
        has_labels=False,
        buffer_nbytes=(),
    )


def commit(step: int) -> m.Commit:
    return m.Commit(epoch=1, step=step, gradient_norm=2.0, clip_coefficient=0.5)


def told(message: m.Message) -> e.MessageReceived:
    return e.MessageReceived(message=message)


def at(*events: e.Event) -> WorkerState:
    state = WorkerState("w")
    for event in events:
        state.handle(event, now=0.0)
    return state


IDLE = (told(WELCOME), told(ASSIGNMENT), LOADED)
RUNNING = (*IDLE, told(plan(3)))
PREPARED = (*RUNNING, e.StepPrepared(step=3, loss_sums=(), layer_norms=()))


def test_it_loads_its_assignment_and_says_when_it_is_ready() -> None:
    state = WorkerState("w")
    assert state.handle(told(WELCOME), now=0.0) == []
    assert state.handle(told(ASSIGNMENT), now=0.0) == [e.Load(assignment=ASSIGNMENT)]
    ready = m.Ready(epoch=1, num_parameters=5, num_trainable=5, peak_memory_nbytes=7)
    assert state.handle(LOADED, now=0.0) == [e.Send(message=ready)]
    assert state.phase is Phase.IDLE


def test_it_measures_for_a_plan_as_often_as_it_is_told_and_then_may_be_assigned_or_sent_away() -> None:
    state = at(told(WELCOME))
    machine = m.SurveyMachine(config={}, model_config={}, model_hash="h", lengths=(7,), num_threads=0)
    link = m.SurveyLink(worker="w1", data_address="tcp://b:1", duration_s=1.0)
    found = m.MachineSurveyed(layers=(), updates_per_s=1.0, coded_values_per_s=1.0)
    speed = m.LinkSurveyed(worker="w1", sent_nbytes_per_s=1.0, received_nbytes_per_s=2.0, round_trip_s=0.1)
    for order, result in ((machine, found), (link, speed), (link, speed)):
        assert state.handle(told(order), now=0.0) == [e.Survey(order=order)]
        assert state.phase is Phase.SURVEYING
        assert state.handle(e.Surveyed(found=result), now=0.0) == [e.Send(message=result)]
    assert state.handle(told(ASSIGNMENT), now=0.0) == [e.Load(assignment=ASSIGNMENT)]
    with pytest.raises(RemoteProtocolError, match="SurveyLink is not allowed while w is loading"):
        state.handle(told(link), now=0.0)


def test_a_step_is_run_prepared_and_committed_with_its_own_learning_rate() -> None:
    state = at(*IDLE)
    assert state.handle(told(plan(3)), now=0.0) == [e.RunStep(plan=plan(3), buffers=())]
    norms = (m.LayerNorms(1, (2.0,)),)
    prepared = m.Prepared(epoch=1, step=3, loss_sums=(1.5,), layer_norms=norms)
    assert state.handle(e.StepPrepared(step=3, loss_sums=(1.5,), layer_norms=norms), now=0.0) == [e.Send(message=prepared)]
    assert state.handle(told(commit(3)), now=0.0) == [e.ApplyCommit(commit=commit(3), learning_rate=0.5)]
    done = m.Committed(epoch=1, step=3, report=REPORT)
    assert state.handle(e.StepCommitted(step=3, report=REPORT), now=0.0) == [e.Send(message=done)]
    assert state.phase is Phase.IDLE


def test_a_plan_that_comes_during_the_commit_starts_right_after_it() -> None:
    state = at(*PREPARED, told(commit(3)))
    assert state.handle(told(plan(4)), now=0.0) == []
    done = e.Send(message=m.Committed(epoch=1, step=3, report=REPORT))
    assert state.handle(e.StepCommitted(step=3, report=REPORT), now=0.0) == [done, e.RunStep(plan=plan(4), buffers=())]


def test_a_plan_that_is_aborted_during_the_commit_before_it_never_runs() -> None:
    state = at(*PREPARED, told(commit(3)), told(plan(4)))
    assert state.handle(told(m.Abort(epoch=1, step=4, reason="NaN")), now=0.0) == []
    done = e.Send(message=m.Committed(epoch=1, step=3, report=REPORT))
    assert state.handle(e.StepCommitted(step=3, report=REPORT), now=0.0) == [
        done,
        e.ApplyAbort(abort=m.Abort(epoch=1, step=4, reason="NaN")),
    ]
    assert state.handle(e.StepAborted(step=4), now=0.0) == [e.Send(message=m.Aborted(epoch=1, step=4))]
    assert state.handle(told(plan(5)), now=0.0) == [e.RunStep(plan=plan(5), buffers=())]


def test_the_abort_of_a_step_that_is_being_committed_is_the_coordinators_fault() -> None:
    with pytest.raises(RemoteProtocolError, match="Abort is not allowed while w is committing"):
        at(*PREPARED, told(commit(3)), told(m.Abort(epoch=1, step=3, reason="x")))


@pytest.mark.parametrize("before", [RUNNING, PREPARED], ids=["running", "prepared"])
def test_an_abort_ends_the_step_wherever_it_is(before: tuple[e.Event, ...]) -> None:
    state = at(*before)
    abort = m.Abort(epoch=1, step=3, reason="loss is not finite")
    assert state.handle(told(abort), now=0.0) == [e.ApplyAbort(abort=abort)]
    aborted = m.Aborted(epoch=1, step=3)
    assert state.handle(e.StepAborted(step=3), now=0.0) == [e.Send(message=aborted)]


def test_a_step_that_was_prepared_while_the_abort_was_under_way_is_not_announced() -> None:
    state = at(*RUNNING, told(m.Abort(epoch=1, step=3, reason="x")))
    assert state.handle(e.StepPrepared(step=3, loss_sums=(), layer_norms=()), now=0.0) == []


def test_values_that_cannot_be_encoded_are_reported_and_wait_for_the_abort() -> None:
    state = at(*RUNNING)
    refused = m.StepFailed(epoch=1, step=3, stage=1, reason="NaN")
    assert state.handle(e.StepRefused(step=3, stage=1, reason="NaN"), now=0.0) == [e.Send(message=refused)]
    assert state.phase is Phase.PREPARED


def test_a_commit_of_another_step_is_the_coordinators_fault() -> None:
    with pytest.raises(RemoteProtocolError, match="step 4 is not the one running here"):
        at(*PREPARED, told(commit(4)))


def test_a_plan_of_another_epoch_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="epoch 2"):
        at(*IDLE, told(plan(3, epoch=2)))


def test_a_commit_before_the_step_is_prepared_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="Commit is not allowed while w is running a step"):
        at(*RUNNING, told(commit(3)))


def test_a_failure_is_reported_with_its_stages_and_ends_the_worker() -> None:
    state = at(*RUNNING)
    failed = m.Failed(worker="w", stages=(1,), activity="forward of microbatch 0", reason="out of memory")
    assert state.handle(e.WorkFailed(activity="forward of microbatch 0", reason="out of memory"), now=0.0) == [
        e.Send(message=failed),
        e.Finish(exit_code=1, reason="forward of microbatch 0: out of memory"),
    ]
    assert state.handle(told(plan(4)), now=0.0) == []


def test_a_lost_link_is_reported_and_the_coordinator_decides() -> None:
    state = at(*RUNNING)
    lost = m.LinkLost(link="0/0-1", peer_worker="w0", reason="gone")
    assert state.handle(e.LinkFailed(link="0/0-1", peer_worker="w0", reason="gone"), now=0.0) == [e.Send(message=lost)]
    assert state.handle(told(m.Stop(reason="w0 is lost", failed=True)), now=0.0) == [
        e.Send(message=m.Goodbye(worker="w", reason="w0 is lost")),
        e.Finish(exit_code=1, reason="w0 is lost"),
    ]


def test_a_coordinator_that_was_silent_for_too_long_is_told_why_its_worker_left() -> None:
    state = at(*RUNNING)
    assert state.handle(e.CoordinatorGone(reason="nothing heard for 5 s"), now=0.0) == [
        e.Send(message=m.Goodbye(worker="w", reason="nothing heard for 5 s")),
        e.Finish(exit_code=1, reason="nothing heard for 5 s"),
    ]


def test_a_refused_worker_says_why() -> None:
    state = WorkerState("w")
    assert state.handle(told(m.Refused(worker="w", reason="version 2 here, 1 there")), now=0.0) == [
        e.Finish(exit_code=1, reason="the coordinator refused w: version 2 here, 1 there")
    ]


_ANY = st.sampled_from(
    [
        told(WELCOME),
        told(ASSIGNMENT),
        LOADED,
        told(plan(3)),
        told(plan(4)),
        e.StepPrepared(step=3, loss_sums=(), layer_norms=()),
        e.StepRefused(step=3, stage=0, reason="NaN"),
        told(commit(3)),
        told(m.Abort(epoch=1, step=3, reason="x")),
        told(m.Abort(epoch=1, step=4, reason="x")),
        e.StepCommitted(step=3, report=REPORT),
        e.StepAborted(step=3),
        told(m.HeartbeatReply(sent_at_s=0.0)),
        e.LinkFailed(link="l", peer_worker="p", reason="r"),
        told(m.Stop(reason="done", failed=False)),
        e.CoordinatorGone(reason="silent"),
    ]
)


@given(st.lists(_ANY, max_size=40))
def test_whatever_comes_in_whatever_order_is_an_effect_or_a_protocol_error(events: list[e.Event]) -> None:
    state = WorkerState("w")
    committed: set[int] = set()
    for event in events:
        before = state.phase
        try:
            effects = state.handle(event, now=0.0)
        except RemoteProtocolError:
            return
        except LocalProtocolError:
            return
        if before in (Phase.STOPPED, Phase.FAILED):
            assert effects == []
        for effect in effects:
            if isinstance(effect, e.ApplyCommit):
                assert before is Phase.PREPARED, "only a prepared step commits"
                committed.add(effect.commit.step)


def test_every_phase_but_the_last_two_can_be_left() -> None:
    left = {phase for phase, _ in TRANSITIONS}
    assert left == set(Phase) - {Phase.STOPPED, Phase.FAILED}
