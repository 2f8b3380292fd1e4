"""When a heartbeat is due and when silence is loss, on a clock that only the test turns."""

from __future__ import annotations

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
    assert PeerSilent(5.0) not in s.poll(105.9)
    assert s.poll(106.5) == (PeerSilent(5.5),)
    assert s.state is SessionState.SILENT
    assert s.poll(200.0) == ()


def test_whoever_is_heard_is_not_silent():
    s = session()
    for second in range(101, 150):
        s.heard(float(second))
        assert s.poll(second + 0.5) == (SendHeartbeat(),)


def test_a_session_that_fell_silent_is_not_revived():
    s = session()
    s.poll(105.0)
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
