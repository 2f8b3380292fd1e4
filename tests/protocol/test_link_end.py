"""One end of a link by itself: events in, effects out."""

from __future__ import annotations

import msgspec
import pytest

from pipecomp.errors import LocalProtocolError, RemoteProtocolError
from pipecomp.protocol import wire
from pipecomp.protocol.link import (
    TRANSITIONS,
    Acknowledge,
    Arrived,
    Close,
    Connected,
    CreditFreed,
    Deliver,
    Disconnected,
    Drop,
    Ended,
    Greet,
    LinkEnd,
    LinkIdentity,
    LinkState,
    Opened,
    PeerGone,
    Submitted,
    Taken,
    Transmit,
    kind_of,
)
from pipecomp.protocol.messages import Ack, LinkHello, Refused, Stop, TensorMessage, WeightsChunk
from pipecomp.testing.message_examples import examples
from pipecomp.types import Kind

HELLO = LinkHello(run="r", epoch=1, link="0/0-1", worker="there", next_sequence=0)
ME = LinkIdentity("r", 1, "0/0-1", "here")


def chunk(nbytes: int = 4, sequence: int = 0) -> WeightsChunk:
    return WeightsChunk(
        sequence=sequence, name="w", dtype="F32", shape=(1,), offset=0, total_nbytes=4, buffer_nbytes=(nbytes,)
    )


def arrived(message, *buffers: bytes, connection: int = 1) -> Arrived:
    return Arrived(connection, wire.Received(message, tuple(map(memoryview, buffers)), 1))


def end(credit_nbytes: int = 10_000) -> LinkEnd:
    return LinkEnd(ME, credit_nbytes)


def open_end(credit_nbytes: int = 10_000) -> LinkEnd:
    e = end(credit_nbytes)
    e.handle(Connected(1))
    e.handle(arrived(HELLO))
    return e


def submit(e: LinkEnd, nbytes: int = 4) -> list:
    return e.handle(Submitted(e.number(chunk(nbytes), [bytes(nbytes)])))


# ---------------------------------------------------------------- connections


def test_a_connection_begins_with_this_ends_hello():
    hello = LinkHello(run="r", epoch=1, link="0/0-1", worker="here", next_sequence=0)
    assert end().handle(Connected(1)) == [Greet(1, hello)]


def test_the_link_is_open_once_the_other_end_has_said_hello():
    e = end()
    e.handle(Connected(1))
    assert e.state is LinkState.GREETING
    assert e.handle(arrived(HELLO)) == [Opened()]
    assert (e.state, e.peer_worker) == (LinkState.OPEN, "there")


def test_what_is_sent_before_the_link_is_open_goes_out_when_it_is():
    e = end()
    assert submit(e) == []
    e.handle(Connected(1))
    assert submit(e) == []
    effects = e.handle(arrived(HELLO))
    assert [x.outgoing.sequence for x in effects if isinstance(x, Transmit)] == [0, 1]


def test_a_newer_connection_takes_the_place_of_the_older():
    e = open_end()
    effects = e.handle(Connected(2))
    assert effects[0] == Drop(1)
    assert e.handle(arrived(chunk(), b"1234", connection=1)) == []
    assert e.handle(Disconnected(1)) == []
    assert e.state is LinkState.GREETING


def test_only_what_the_other_end_has_not_got_is_sent_again():
    e = open_end()
    for _ in range(4):
        submit(e)
    e.handle(arrived(Ack(sequence=0)))
    e.handle(Disconnected(1))
    e.handle(Connected(2))
    effects = e.handle(arrived(msgspec.structs.replace(HELLO, next_sequence=2), connection=2))
    assert [x.outgoing.sequence for x in effects if isinstance(x, Transmit)] == [2, 3]


def test_an_acknowledgement_that_may_be_lost_is_given_again():
    e = open_end()
    e.handle(arrived(chunk(), b"1234"))
    e.handle(Disconnected(1))
    assert e.handle(Taken(0)) == []
    assert e.handle(Connected(2))[0].hello.next_sequence == 1
    assert Acknowledge(Ack(sequence=0)) in e.handle(arrived(HELLO, connection=2))


def test_a_peer_that_is_gone_ends_the_link():
    e = open_end()
    e.handle(Disconnected(1))
    effects = e.handle(PeerGone())
    assert isinstance(effects[0], Ended)
    assert e.state is LinkState.LOST
    assert e.handle(PeerGone()) == []


def test_closing_drops_the_connection():
    e = open_end()
    assert e.handle(Close()) == [Drop(1)]
    assert e.handle(Close()) == []
    with pytest.raises(LocalProtocolError, match="link 0/0-1 to there is closed: Submitted is not allowed"):
        submit(e)


def test_a_refusal_ends_the_link_with_its_reason():
    e = end()
    e.handle(Connected(1))
    effects = e.handle(arrived(Refused(worker="there", reason="of another run")))
    assert effects == [Drop(1), Ended("the other end refused it: of another run")]


# ---------------------------------------------------------------- hellos


@pytest.mark.parametrize(("field", "value"), [("run", "other"), ("epoch", 2), ("link", "0/1-2"), ("next_sequence", 1)])
def test_a_hello_of_something_else_is_refused_with_both_values(field, value):
    e = end()
    e.handle(Connected(1))
    with pytest.raises(RemoteProtocolError, match=str(value)):
        e.handle(arrived(msgspec.structs.replace(HELLO, **{field: value})))
    assert e.state is LinkState.LOST


def test_another_worker_cannot_go_on_with_the_link():
    e = open_end()
    e.handle(Connected(2))
    with pytest.raises(RemoteProtocolError, match="worker 'thief', expected 'there'"):
        e.handle(arrived(msgspec.structs.replace(HELLO, worker="thief"), connection=2))


def test_a_hello_cannot_ask_for_what_is_no_longer_kept():
    e = open_end()
    submit(e)
    submit(e)
    e.handle(arrived(Ack(sequence=0)))
    e.handle(Connected(2))
    with pytest.raises(RemoteProtocolError, match="asks to go on from 0, but only 1 to 2 can be next"):
        e.handle(arrived(HELLO, connection=2))


@pytest.mark.parametrize("message", [chunk(), Ack(sequence=0), Stop(reason="", failed=False)])
def test_nothing_comes_before_the_hello(message):
    e = end()
    e.handle(Connected(1))
    with pytest.raises(RemoteProtocolError, match=f"greeting: {type(message).__name__} is not allowed"):
        e.handle(arrived(message))


def test_nobody_says_hello_twice():
    with pytest.raises(RemoteProtocolError, match="open: LinkHello is not allowed"):
        open_end().handle(arrived(HELLO))


# ---------------------------------------------------------------- numbers


def test_messages_are_delivered_in_order_and_duplicates_are_dropped():
    e = open_end()
    first, second = arrived(chunk(), b"1111"), arrived(chunk(sequence=1), b"2222")
    assert e.handle(first) == [Deliver(first.received)]
    assert e.handle(first) == []
    assert e.handle(second) == [Deliver(second.received)]


def test_a_gap_is_refused_with_its_numbers():
    with pytest.raises(RemoteProtocolError, match="message 2 came where 0 was next: 2 are missing"):
        open_end().handle(arrived(chunk(sequence=2), b"1234"))


def test_an_acknowledgement_of_what_was_not_sent_is_refused():
    e = open_end()
    submit(e)
    with pytest.raises(RemoteProtocolError, match="an acknowledgement of 1, but 1 is the next to be sent"):
        e.handle(arrived(Ack(sequence=1)))


@pytest.mark.parametrize(("field", "value"), [("run", "other"), ("epoch", 2)])
def test_a_message_of_another_run_or_epoch_is_refused(field, value):
    message = next(e.message for e in examples() if isinstance(e.message, TensorMessage))
    message = msgspec.structs.replace(message, sequence=0, run="r", epoch=1)
    e = open_end()
    e.handle(arrived(message))
    with pytest.raises(RemoteProtocolError, match=f"a message of {field} {value!r}"):
        e.handle(arrived(msgspec.structs.replace(message, sequence=1, **{field: value})))


def test_only_numbered_messages_are_sent_over_a_link():
    with pytest.raises(LocalProtocolError, match="a link does not send Stop"):
        end().number(Stop(reason="", failed=False))


def test_numbering_alone_uses_up_no_number():
    e = open_end()
    e.number(chunk(), [b"1234"])
    assert submit(e)[0].outgoing.sequence == 0


# ---------------------------------------------------------------- credit


def test_credit_is_header_and_payload_of_all_that_is_not_taken():
    e = open_end()
    frames = e.number(chunk(), [b"1234"]).frames
    submit(e)
    submit(e)
    assert e.in_flight_nbytes == 2 * (len(frames[0]) + 4)
    assert e.handle(arrived(Ack(sequence=0))) == [CreditFreed()]
    assert e.in_flight_nbytes == len(frames[0]) + 4
    assert e.handle(arrived(Ack(sequence=0))) == []


def test_more_than_the_credit_is_not_sent():
    e = open_end(credit_nbytes=300)
    submit(e, 100)
    big = e.number(chunk(200), [bytes(200)])
    assert not e.has_credit_for(big)
    with pytest.raises(LocalProtocolError, match="a credit of 300"):
        e.handle(Submitted(big))


def test_one_message_may_be_larger_than_the_credit():
    e = open_end(credit_nbytes=10)
    assert len(submit(e, 1000)) == 1
    assert not e.has_credit_for(e.number(chunk(0), [b""]))


def test_credit_is_not_freed_by_a_lost_connection():
    e = open_end()
    submit(e)
    before = e.in_flight_nbytes
    e.handle(Disconnected(1))
    assert e.in_flight_nbytes == before


def test_an_acknowledgement_waits_for_all_before_it():
    e = open_end()
    for i in range(3):
        e.handle(arrived(chunk(sequence=i), b"1234"))
    assert e.handle(Taken(1)) == []
    assert e.handle(Taken(0)) == [Acknowledge(Ack(sequence=1))]
    assert e.handle(Taken(2)) == [Acknowledge(Ack(sequence=2))]


@pytest.mark.parametrize("sequence", [0, 1])
def test_nothing_is_taken_twice_or_before_it_came(sequence):
    e = open_end()
    e.handle(arrived(chunk(), b"1234"))
    e.handle(Taken(0))
    with pytest.raises(LocalProtocolError, match=f"message {sequence} is not there to be taken"):
        e.handle(Taken(sequence))


# ---------------------------------------------------------------- the table


def test_every_state_can_be_reached_and_an_ended_link_stays_so():
    assert set(TRANSITIONS.values()) == set(LinkState)
    for (state, event), following in TRANSITIONS.items():
        if state in (LinkState.LOST, LinkState.CLOSED):
            assert following in (state, LinkState.CLOSED), (state, event)


def test_every_message_has_one_kind_of_traffic():
    kinds = {type(e.message).__name__: kind_of(e.message) for e in examples()}
    assert kinds["TensorMessage"] is Kind.BACKWARD
    assert kinds["GradientMessage"] is Kind.TIED
    assert {name for name, kind in kinds.items() if kind is Kind.WEIGHTS} == {"WeightsRequest", "WeightsChunk"}
    assert {name for name, kind in kinds.items() if kind is Kind.CONTROL}.isdisjoint(
        {"TensorMessage", "GradientMessage"}
    )
