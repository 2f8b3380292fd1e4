"""A run from the first join to the last goodbye, as scripts over the pure machine."""

from __future__ import annotations

import pytest

from coordinator import events as e
from coordinator.state import TRANSITIONS, Phase
from pipecomp.protocol import messages as m
from pipecomp.protocol.spans import Doing, Span, Subject, pack
from pipecomp.types import Kind

EPOCH = 1
STOP_WELL = m.Stop(reason="training is complete", failed=False)


def step(number: int) -> e.SendStep:
    return e.SendStep(EPOCH, number, 1.0)


def to_all(message: m.ControlMessage, num_workers: int = 2) -> list[e.Effect]:
    return [e.Send(e.Peer(i), message) for i in range(num_workers)]


def commit(number: int, norm: float = 8.0**0.5, clip: float = 1.0) -> m.Commit:
    return m.Commit(epoch=EPOCH, step=number, gradient_norm=norm, clip_coefficient=clip)


def test_a_worker_that_joins_is_welcomed(make_script, join):
    script = make_script()
    script.do(e.TermsReady(script.terms))
    welcome = m.Welcome(
        run="run1", worker="w0", weights_address="memory://weights", heartbeat_interval_s=0.5, heartbeat_timeout_s=5.0
    )
    assert script.say(0, join("w0")) == [e.Send(e.Peer(0), welcome)]


def test_a_worker_that_joins_before_the_model_is_read_is_welcomed_afterwards(make_script, join):
    script = make_script()
    assert script.say(0, join("w0")) == []
    (sent,) = script.do(e.TermsReady(script.terms))
    assert isinstance(sent, e.Send)
    assert isinstance(sent.message, m.Welcome)


def test_the_last_join_assigns_ranks_by_name_with_numbers_in_order(make_script, join):
    script = make_script(num_workers=3)
    script.do(e.TermsReady(script.terms))
    script.say(0, join("w10"))
    script.say(1, join("w9"))
    effects = script.say(2, join("w1"))
    assert effects[-1] == e.Assign(EPOCH, (e.Peer(2), e.Peer(1), e.Peer(0)), (join("w1"), join("w9"), join("w10")))
    assert script.phase == "loading"


@pytest.mark.parametrize(
    ("changes", "both_values"),
    [
        ({"protocol_version": 9}, ("version 9", "speaks 1")),
        ({"version": "0.9"}, ("0.9", "1.0")),
        ({"model_hash": "m1"}, ("m1", "m0")),
        ({"tokenizer_hash": "t1"}, ("t1", "t0")),
        ({"config_hash": "c1"}, ("c1", "c0")),
    ],
)
def test_a_worker_that_differs_is_refused_with_both_values(make_script, join, changes, both_values):
    script = make_script()
    script.do(e.TermsReady(script.terms))
    refused, disconnect = script.say(0, join("w0", **changes))
    assert isinstance(refused.message, m.Refused)
    assert all(value in refused.message.reason for value in ("'w0'", *both_values))
    assert disconnect == e.Disconnect(e.Peer(0))


def test_a_worker_with_equal_hashes_is_let_in(make_script, join):
    script = make_script()
    script.do(e.TermsReady(script.terms))
    (sent,) = script.say(0, join("w0", model_hash="m0", tokenizer_hash="t0", config_hash="c0"))
    assert isinstance(sent.message, m.Welcome)


def test_a_second_worker_of_one_name_is_refused_naming_both_hosts(make_script, join):
    script = make_script()
    script.do(e.TermsReady(script.terms))
    script.say(0, join("w0"))
    refused, _ = script.say(1, join("w0", host="elsewhere"))
    assert "host-of-w0" in refused.message.reason
    assert "elsewhere" in refused.message.reason


def test_a_worker_too_many_is_refused(make_script, join):
    script = make_script()
    script.joined()
    refused, _ = script.say(2, join("w2"))
    assert "all 2 places" in refused.message.reason


def test_a_name_that_cannot_stand_in_a_link_is_refused(make_script, join):
    script = make_script()
    script.do(e.TermsReady(script.terms))
    refused, _ = script.say(0, join("a/b"))
    assert "'a/b'" in refused.message.reason


def test_a_worker_with_a_folder_is_refused_where_messages_stay_in_memory(make_script, join):
    script = make_script(store="memory")
    script.do(e.TermsReady(script.terms))
    refused, _ = script.say(0, join("w0", keeps_messages=True))
    assert refused.message.reason.startswith("worker 'w0' has --store-folder, and messages.store = 'memory' keeps nothing")


@pytest.mark.parametrize("store", ["disk", "tiered"])
def test_a_worker_with_a_folder_is_let_in_where_messages_are_on_disk(make_script, join, store):
    script = make_script(store=store)
    script.do(e.TermsReady(script.terms))
    (sent,) = script.say(0, join("w0", keeps_messages=True))
    assert isinstance(sent.message, m.Welcome)


def test_training_starts_once_everyone_is_ready(make_script):
    assert make_script().ready() == [step(1)]


def test_the_held_out_loss_is_measured_before_the_first_step(make_script):
    script = make_script(evaluations=2)
    assert script.ready() == [e.SendEvaluation(EPOCH, 1, 0)]
    script.evaluated(0, 1)
    assert script.evaluated(1, 1) == [e.SendEvaluation(EPOCH, 2, 1)]
    script.evaluated(1, 2)
    assert script.evaluated(0, 2) == [step(1)]
    (ended,) = [record for record in script.log if isinstance(record, e.EvaluationEnded)]
    assert (ended.step, ended.loss) == (0, 2.0)


def test_the_next_plan_leaves_with_the_commit(make_script):
    script = make_script()
    script.ready()
    assert script.prepared(0, 1) == []
    assert script.prepared(1, 1) == [*to_all(commit(1)), step(2)]


def test_nothing_is_committed_while_the_last_commit_is_not_everywhere(make_script):
    script = make_script()
    script.ready()
    script.prepared(0, 1)
    script.prepared(1, 1)
    script.committed(1, 1)
    assert script.prepared(1, 2) == []
    assert script.prepared(0, 2) == []
    assert script.committed(0, 1) == [*to_all(commit(2)), step(3)]


def test_the_last_commit_is_followed_by_no_plan(make_script):
    script = make_script(total_steps=1)
    script.ready()
    script.prepared(0, 1)
    assert script.prepared(1, 1) == to_all(commit(1))


def test_the_accuracy_of_an_evaluation_is_over_the_samples_of_all_its_parts(make_script):
    script = make_script(evaluations=2)  # of two samples each
    script.ready()
    script.evaluated(0, 1)
    script.evaluated(1, 1, num_correct=(2,))
    script.evaluated(0, 2)
    script.evaluated(1, 2, num_correct=(1,))
    (ended,) = [record for record in script.log if isinstance(record, e.EvaluationEnded)]
    assert ended.accuracy == 3 / 4


def test_a_count_of_right_classes_without_its_loss_ends_the_run(make_script):
    script = make_script(evaluations=1)
    script.ready()
    cause = script.cause(script.evaluated(1, 1, num_correct=(1, 1)))
    assert "said Evaluated for plan 1 with 2 counts of right classes beside 1 losses" in cause


def test_an_evaluation_of_tokens_has_no_accuracy(make_script):
    script = make_script(evaluations=1)
    script.ready()
    script.evaluated(0, 1)
    script.evaluated(1, 1)
    (ended,) = [record for record in script.log if isinstance(record, e.EvaluationEnded)]
    assert ended.accuracy is None


def test_the_traffic_of_an_evaluation_is_reported_with_it(make_script):
    """A run may end with an evaluation, and no step reports it then."""
    script = make_script(evaluations=1)
    script.ready()
    sent = m.Traffic(link="0/0-1", kind=Kind.EVALUATION, values=8, payload_nbytes=16, header_nbytes=4, messages=1)
    script.say(0, m.Evaluated(epoch=EPOCH, evaluation=1, loss_sums=(), traffic=(sent,)))
    assert e.TrafficReported("w0", (sent,)) in script.log


def test_no_plan_runs_ahead_of_an_evaluation(make_script):
    script = make_script(evaluations=1, train={"eval_steps": 2})
    script.ready()
    script.evaluated(0, 1)
    script.evaluated(1, 1)
    script.take_step(1)
    script.prepared(0, 2)
    assert script.prepared(1, 2) == to_all(commit(2))
    script.committed(0, 2)
    assert script.committed(1, 2) == [e.SendEvaluation(EPOCH, 2, 0)]
    script.evaluated(0, 2)
    assert script.evaluated(1, 2) == [step(3)]


def test_after_the_last_step_the_weights_come_home_in_rank_order(make_script):
    script = make_script(total_steps=1)
    script.ready()
    send = m.SendWeights(epoch=EPOCH)
    assert script.take_step(1) == [e.Send(e.Peer(0), send)]
    sent = m.WeightsSent(epoch=EPOCH, num_tensors=5, traffic=())
    assert script.say(0, sent) == [e.StoreStage(e.Peer(0), "w0", 5)]
    assert script.do(e.StageStored(e.Peer(0))) == [e.Send(e.Peer(1), send)]
    script.say(1, sent)
    assert script.do(e.StageStored(e.Peer(1))) == [e.SaveModel()]
    assert script.do(e.ModelSaved("out")) == to_all(STOP_WELL)


def test_the_run_is_done_when_the_last_worker_said_goodbye(make_script):
    script = make_script(total_steps=1, train={"save_model": False})
    script.ready()
    assert script.take_step(1) == to_all(STOP_WELL)
    assert script.say(0, m.Goodbye(worker="w0", reason="")) == []
    assert script.say(1, m.Goodbye(worker="w1", reason="")) == [e.Finish(0, "", stopped_early=False)]


def test_a_worker_that_does_not_say_goodbye_does_not_spoil_a_good_end(make_script):
    script = make_script(total_steps=1, train={"save_model": False})
    script.ready()
    script.take_step(1)
    script.say(0, m.Goodbye(worker="w0", reason=""))
    assert script.wait(4.9) == []
    assert script.wait(0.2) == [e.Finish(0, "", stopped_early=False)]


def test_a_worker_process_that_ends_after_stop_counts_as_a_goodbye(make_script):
    script = make_script(total_steps=1, train={"save_model": False})
    script.ready()
    script.take_step(1)
    script.do(e.ProcessDied("w0", "exit code 0", by_signal=False))
    assert script.do(e.PeerDisconnected(e.Peer(1), "closed")) == [e.Finish(0, "", stopped_early=False)]


def test_a_stop_finishes_the_step_and_saves(make_script):
    script = make_script(total_steps=9, evaluations=1)
    script.ready()
    script.evaluated(0, 1)
    script.evaluated(1, 1)
    script.take_step(1)
    assert script.do(e.StopRequested(urgent=False)) == []
    assert script.take_step(2) == [e.Send(e.Peer(0), m.SendWeights(epoch=EPOCH))]


def test_a_run_that_was_stopped_ends_with_zero_and_says_so(make_script):
    script = make_script(total_steps=9, train={"save_model": False})
    script.ready()
    script.do(e.StopRequested(urgent=False))
    script.take_step(1)
    script.do(e.PeerDisconnected(e.Peer(0), ""))
    assert script.do(e.PeerDisconnected(e.Peer(1), "")) == [e.Finish(0, "", stopped_early=True)]


def test_a_stop_during_an_evaluation_leaves_its_other_parts_out(make_script):
    script = make_script(total_steps=9, evaluations=3, train={"eval_steps": 1, "save_model": False})
    script.ready()
    for number in (1, 2, 3):
        script.evaluated(0, number)
        script.evaluated(1, number)
    script.take_step(1)
    script.do(e.StopRequested(urgent=False))
    script.evaluated(0, 4)
    assert script.evaluated(1, 4) == to_all(m.Stop(reason="the person stopped the run", failed=False))


def test_a_second_stop_ends_the_run_at_once(make_script):
    script = make_script()
    script.ready()
    script.do(e.StopRequested(urgent=False))
    effects = script.do(e.StopRequested(urgent=True))
    assert effects[:2] == to_all(m.Stop(reason="the person stopped the run", failed=True))
    assert effects[2].exit_code == 130


def test_a_first_stop_is_confirmed_once(make_script):
    script = make_script(total_steps=9)
    script.ready()
    script.do(e.StopRequested(urgent=False))
    script.do(e.StopRequested(urgent=False))
    assert script.log.count(e.StopNoted()) == 1


def test_a_second_stop_after_everything_is_saved_waits_for_no_goodbye(make_script):
    script = make_script(total_steps=1, train={"save_model": False})
    script.ready()
    script.take_step(1)
    assert script.do(e.StopRequested(urgent=True)) == [e.Finish(0, "", stopped_early=False)]


def test_a_stop_before_any_step_saves_nothing(make_script):
    script = make_script()
    script.joined()
    assert script.do(e.StopRequested(urgent=False))[-1].exit_code == 130


def test_a_stop_while_saving_changes_nothing(make_script):
    script = make_script(total_steps=1)
    script.ready()
    script.take_step(1)
    assert script.do(e.StopRequested(urgent=False)) == []
    assert script.phase == "collecting"


def test_heartbeats_are_answered_before_and_after_joining(make_script, join):
    script = make_script()
    beat = m.Heartbeat(sent_at_s=3.5, activity="", step=0, memory_nbytes=0)
    script.now = 40.25
    answer = [e.Send(e.Peer(0), m.HeartbeatReply(sent_at_s=3.5, answered_at_s=40.25))]
    script.say(0, join("w0"))
    assert script.say(0, beat) == answer
    script.do(e.TermsReady(script.terms))
    assert script.say(0, beat) == answer


def test_what_a_heartbeat_says_of_clocks_is_recorded_with_its_worker(make_script):
    script = make_script()
    script.ready()
    trips = (m.RoundTrip(1.0, 40.0, 1.5),)
    script.say(1, m.Heartbeat(sent_at_s=2.0, activity="", step=0, memory_nbytes=0, round_trips=trips))
    assert script.log[-1] == e.ClockRead("w1", trips)


def test_spans_are_recorded_with_their_worker(make_script):
    script = make_script()
    script.ready()
    batch = pack([Span(Doing.IDLE, "compute", Subject(step=1), 5, 7)])
    message = m.Spans(names=batch.names, num_dropped=3, buffer_nbytes=(len(batch.deflated),))
    assert script.do(e.MessageReceived(e.Peer(1), message, (memoryview(batch.deflated),))) == []
    assert script.log[-1] == e.SpansReported("w1", batch, 3)


def test_a_worker_that_sends_what_are_no_spans_is_the_cause(make_script):
    script = make_script()
    script.ready()
    message = m.Spans(names=(), num_dropped=0, buffer_nbytes=(5,))
    cause = script.cause(script.do(e.MessageReceived(e.Peer(1), message, (memoryview(b"12345"),))))
    assert "w1" in cause
    assert "it broke the protocol: it sent spans that cannot be inflated" in cause


def test_an_ended_run_hears_nothing(make_script):
    script = make_script()
    script.ready()
    script.do(e.StopRequested(urgent=True))
    assert script.prepared(0, 1) == []


def test_every_phase_can_fail_and_ends_are_final():
    ends = {Phase.DONE, Phase.FAILED}
    assert all(Phase.FAILED in after for phase, after in TRANSITIONS.items() if phase not in ends)
    assert all(TRANSITIONS[phase] == frozenset() for phase in ends)


def test_the_transition_table_cannot_be_changed():
    with pytest.raises(TypeError):
        TRANSITIONS[Phase.DONE] = frozenset()  # type: ignore[index]
