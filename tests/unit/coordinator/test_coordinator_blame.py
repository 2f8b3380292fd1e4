"""Whom a failure is laid on, when one dead worker makes many cries."""

from __future__ import annotations

import pytest

from coordinator import events as e
from pipecomp.protocol import messages as m
from pipecomp.protocol.session import loading_timeout_s

KILLED = "killed by signal 9 (SIGKILL)"


def beat(activity: str = "") -> m.Heartbeat:
    return m.Heartbeat(sent_at_s=0.0, activity=activity, step=1, memory_nbytes=0)


def lost(peer: str) -> m.LinkLost:
    return m.LinkLost(link="0/0-1", peer_worker=peer, reason="connection reset")


def test_a_killed_worker_is_named_with_host_stage_activity_and_cause(make_script):
    script = make_script()
    script.ready()
    script.say(1, beat("backward of microbatch 3 on stage 1"))
    cause = script.cause(script.do(e.ProcessDied("w1", KILLED, by_signal=True)))
    for part in ("w1", "host-of-w1", "stage 1: layers 3-5", "backward of microbatch 3 on stage 1", KILLED):
        assert part in cause


def test_everyone_else_is_told_to_stop(make_script):
    script = make_script(num_workers=3)
    script.ready()
    effects = script.do(e.ProcessDied("w1", KILLED, by_signal=True))
    told = [effect.peer for effect in effects if isinstance(effect, e.Send)]
    assert told == [0, 2]
    assert all(effect.message.failed for effect in effects if isinstance(effect, e.Send))


def test_workers_that_came_early_are_told_why_the_run_never_began(make_script, join):
    script = make_script()
    script.say(0, join("w0"))
    effects = script.do(e.WorkFailed("data.train: no such file"))
    assert effects[0] == e.Send(e.Peer(0), m.Stop(reason="data.train: no such file", failed=True))
    assert script.cause(effects) == "data.train: no such file"


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_held_out_loss_that_is_not_finite_ends_the_run(make_script, bad):
    script = make_script(total_steps=1, evaluations=1)
    script.ready()
    script.evaluated(0, 1)
    script.evaluated(1, 1)
    script.take_step(1)
    script.evaluated(0, 2)
    assert f"the held-out loss after 1 steps is {bad}" in script.cause(script.evaluated(1, 2, loss=bad))


def test_a_neighbours_cry_does_not_hide_the_killed_worker(make_script):
    script = make_script()
    script.ready()
    assert script.say(0, lost("w1")) == []
    assert "w1" in script.cause(script.do(e.ProcessDied("w1", KILLED, by_signal=True)))


def test_a_cry_against_the_wrong_end_gives_way_to_the_silent_one(make_script):
    script = make_script()
    script.ready()
    script.say(1, lost("w0"))
    for _ in range(19):
        assert script.wait(0.25) == []
        script.say(0, beat())
    cause = script.cause(script.wait(0.3))
    assert cause.startswith("w1 ")
    assert "no heartbeat for 5.0 s" in cause


def test_a_lost_link_between_two_living_workers_names_the_one_that_cannot_be_reached(make_script):
    script = make_script()
    script.ready()
    script.say(0, lost("w1"))
    for _ in range(11):
        script.now += 0.5
        assert script.say(0, beat())[0].peer == 0
        script.say(1, beat())
    cause = script.cause(script.wait(0.6))
    assert cause.startswith("w1 ")
    assert "w0 cannot reach it over link 0/0-1: connection reset" in cause


def test_a_broken_connection_waits_a_moment_for_last_words(make_script):
    script = make_script()
    script.ready()
    assert script.do(e.PeerDisconnected(e.Peer(1), "reset")) == []
    cause = script.cause(script.do(e.ProcessDied("w1", KILLED, by_signal=True)))
    assert KILLED in cause


def test_a_broken_connection_without_last_words_is_the_cause(make_script):
    script = make_script()
    script.ready()
    script.do(e.PeerDisconnected(e.Peer(1), "reset"))
    assert script.wait(0.9) == []
    assert "its connection ended without a goodbye (reset)" in script.cause(script.wait(0.2))


def test_an_exit_code_waits_for_the_workers_own_words(make_script):
    script = make_script()
    script.ready()
    script.do(e.ProcessDied("w1", "exit code 1", by_signal=False))
    failed = m.Failed(worker="w1", stages=(1,), activity="optimizer step", reason="out of memory")
    cause = script.cause(script.say(1, failed))
    assert "optimizer step" in cause
    assert "out of memory" in cause


def test_an_exit_code_alone_is_the_cause_after_a_moment(make_script):
    script = make_script()
    script.ready()
    script.do(e.ProcessDied("w1", "exit code 3", by_signal=False))
    assert "exit code 3" in script.cause(script.wait(1.1))


def test_the_first_failure_is_named_not_the_one_it_caused(make_script):
    script = make_script()
    script.ready()
    script.do(e.PeerDisconnected(e.Peer(1), "reset"))
    failed = m.Failed(worker="w0", stages=(0,), activity="forward", reason="link lost")
    assert script.say(0, failed) == []
    assert script.cause(script.wait(1.1)).startswith("w1 ")


def test_a_silent_worker_is_named_with_its_silence(make_script):
    script = make_script()
    script.ready()
    script.wait(3.0)
    script.say(0, beat())
    cause = script.cause(script.wait(2.5))
    assert cause.startswith("w1 ")
    assert "no heartbeat for 5.0 s" in cause


def test_nobody_is_blamed_for_a_pause_of_the_coordinator_itself(make_script):
    script = make_script()
    script.ready()
    assert script.wait(60.0, tick_s=60.0) == []
    script.wait(1.0)
    script.say(0, beat())
    assert script.wait(3.9) == []
    assert script.cause(script.wait(0.1)).startswith("w1 ")


def test_a_worker_has_more_patience_to_expect_until_all_are_ready(make_script):
    script = make_script()
    script.joined()
    ready = m.Ready(epoch=1, num_parameters=1, num_trainable=1, peak_memory_nbytes=1)
    assert script.wait(20.0) == []
    script.say(0, ready)
    assert script.wait(9.9) == []
    assert "w1 (" in script.cause(script.wait(0.1))


def test_a_run_that_is_to_have_more_patience_has_it_while_loading_too(make_script):
    assert loading_timeout_s(5.0) == 30.0
    assert loading_timeout_s(120.0) == 120.0


def test_any_message_is_a_sign_of_life(make_script):
    script = make_script()
    script.ready()
    script.now = 4.0
    script.prepared(0, 1)
    script.say(1, beat())
    assert script.wait(4.0) == []


def test_a_worker_that_dies_before_it_joins_is_named(make_script):
    script = make_script()
    cause = script.cause(script.do(e.ProcessDied("worker-2", KILLED, by_signal=True)))
    assert cause == f"worker-2 failed before it joined: {KILLED}"


def test_a_worker_that_leaves_by_itself_ends_the_run(make_script):
    script = make_script()
    script.ready()
    cause = script.cause(script.say(0, m.Goodbye(worker="w0", reason="stopped by SIGINT")))
    assert "left the run: stopped by SIGINT" in cause


def test_a_worker_that_dies_while_others_are_awaited_ends_the_run(make_script, join):
    script = make_script()
    script.do(e.TermsReady(script.terms))
    script.say(0, join("w0"))
    cause = script.cause(script.do(e.ProcessDied("w0", KILLED, by_signal=True)))
    assert "waiting for the other workers" in cause


def test_workers_that_never_come_end_the_wait(make_script, join):
    script = make_script()
    script.do(e.TermsReady(script.terms))
    script.say(0, join("w0"))
    for _ in range(1200):
        script.now += 0.5
        script.say(0, beat())
    cause = script.cause(script.wait(0.5))
    assert "1 of 2 workers joined within 600 s (w0)" in cause


def test_a_broken_weights_link_names_its_worker(make_script):
    script = make_script()
    script.ready()
    script.do(e.WeightsLinkFailed("w1", "its weights link was lost: reset"))
    assert "w1" in script.cause(script.wait(1.1))


def test_work_of_the_coordinator_that_fails_ends_the_run_with_its_reason(make_script):
    script = make_script()
    assert script.cause(script.do(e.WorkFailed("no such file"))) == "no such file"


@pytest.mark.parametrize("message", [m.Stop(reason="", failed=False), m.HeartbeatReply(sent_at_s=0.0)])
def test_what_no_worker_may_say_ends_the_run(make_script, message):
    script = make_script()
    script.ready()
    assert "no worker may send" in script.cause(script.say(0, message))


def test_a_stranger_that_does_not_join_is_shown_the_door(make_script):
    script = make_script()
    script.ready()
    assert script.say(9, m.Aborted(epoch=1, step=1)) == [e.Disconnect(e.Peer(9))]
