"""When a heartbeat is due and when silence is loss, on a clock that only the test turns."""

from __future__ import annotations

import pytest

from pipecomp.protocol.session import PeerSilent, SendHeartbeat, Session, SessionState


def session() -> Session:
    return Session(interval_s=1.0, timeout_s=5.0, now=100.0)


def test_the_first_heartbeat_is_due_at_once():
    assert session().poll(100.0) == (SendHeartbeat(),)


def test_the_next_heartbeat_is_due_after_the_interval():
    s = session()
    s.poll(100.0)
    assert s.next_deadline() == 101.0
    assert s.poll(100.9) == ()
    assert s.poll(101.0) == (SendHeartbeat(),)


def test_a_late_loop_sends_one_heartbeat_and_not_those_it_missed():
    s = session()
    s.poll(100.0)
    s.heard(104.0)
    assert s.poll(104.5) == (SendHeartbeat(),)
    assert s.poll(104.5) == ()


def test_silence_is_told_once_with_its_length():
    s = session()
    s.heard(101.0)
    for tenth in range(1010, 1060):
        assert s.poll(tenth / 10) in ((), (SendHeartbeat(),))
    assert s.poll(106.5) == (PeerSilent(5.5),)
    assert s.state is SessionState.SILENT
    assert s.poll(200.0) == ()


@pytest.mark.parametrize("pause_s", [2.5, 60.0])
def test_a_process_that_did_not_look_blames_nobody_and_has_its_whole_patience_again(pause_s):
    s = session()
    s.poll(103.0)  # it was there, and heard nothing for three seconds
    back = 103.0 + pause_s
    assert s.poll(back) == (SendHeartbeat(),)
    for second in (1, 2, 3, 4):
        assert s.poll(back + second) == (SendHeartbeat(),)
    assert s.poll(back + 5) == (PeerSilent(5.0),)


def test_a_process_that_looks_seldom_enough_to_be_busy_still_finds_a_loss():
    s = session()
    for second in (102.4, 104.8):
        s.poll(second)
    assert s.poll(107.2) == (PeerSilent(pytest.approx(7.2)),)


def test_patience_may_change_and_begins_then():
    s = Session(interval_s=1.0, timeout_s=30.0, now=0.0)
    for second in range(20):
        s.poll(float(second))
    s.be_patient(5.0, 20.0)
    for second in range(20, 25):
        assert s.poll(float(second)) == (SendHeartbeat(),)
    assert s.poll(25.0) == (PeerSilent(5.0),)


def test_whoever_is_heard_is_not_silent():
    s = session()
    for second in range(101, 150):
        s.heard(float(second))
        assert s.poll(second + 0.5) == (SendHeartbeat(),)


def test_a_session_that_fell_silent_is_not_revived():
    s = session()
    for second in range(101, 106):
        s.poll(float(second))
    s.heard(105.1)
    assert s.state is SessionState.SILENT
    assert s.poll(105.2) == ()
    assert s.next_deadline() == float("inf")


def test_the_deadline_is_the_earlier_of_heartbeat_and_loss():
    s = Session(interval_s=10.0, timeout_s=5.0, now=0.0)
    s.poll(0.0)
    assert s.next_deadline() == 5.0
    s.heard(4.0)
    assert s.next_deadline() == 9.0
