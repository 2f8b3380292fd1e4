"""Two ends of a link over connections that die at any moment, driven by chance (law 10, and law 7: nothing is lost).

The model of the network: end 0 dials, end 1 accepts what was dialled, later and perhaps never. A connection that is cut still
brings what had already arrived, and each end notices by itself, only once it has read that.
"""

from __future__ import annotations

import random
from collections import deque

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pipecomp.protocol import wire
from pipecomp.protocol.link import (
    Acknowledge,
    Arrived,
    Connected,
    Deliver,
    Disconnected,
    Drop,
    Greet,
    LinkEnd,
    LinkIdentity,
    Submitted,
    Taken,
    Transmit,
)
from pipecomp.protocol.messages import LinkHello, WeightsChunk

CREDIT_NBYTES = 1000
SIDES = st.sampled_from((0, 1))


class Line:
    """One connection: what travels towards each end."""

    def __init__(self) -> None:
        self.alive = True
        self.towards: tuple[deque[list], deque[list]] = (deque(), deque())

    def cut(self, num_kept: int) -> None:
        self.alive = False
        for queue in self.towards:
            while len(queue) > num_kept:
                queue.pop()


class Side:
    """An end and all that was asked of it and came out of it."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.end = LinkEnd(LinkIdentity("r", 1, "0/0-1", "ab"[index]), CREDIT_NBYTES)
        self.line: Line | None = None
        self.connection = 0
        self.wants: deque[int] = deque()  # lengths of what is still to be sent
        self.sent: list[bytes] = []
        self.delivered: list[bytes] = []
        self.untaken: dict[int, int] = {}  # sequence: bytes
        self.late: list[Arrived] = []

    def attach(self, line: Line) -> None:
        if self.line is not None:  # was replaced; what it had brought is read too late
            self.late += [Arrived(self.connection, wire.decode(f)) for f in self.line.towards[self.index]]
            self.line.cut(0)
        self.line = line
        self.connection += 1
        self.apply(self.end.handle(Connected(self.connection)))

    def arrive(self) -> None:
        while self.late:
            assert self.end.handle(self.late.pop(0)) == []
        if self.line is not None and self.line.towards[self.index]:
            received = wire.decode(self.line.towards[self.index].popleft())
            self.apply(self.end.handle(Arrived(self.connection, received)))

    def notice(self) -> None:
        if self.line is not None and not self.line.alive and not self.line.towards[self.index]:
            self.line = None
            self.apply(self.end.handle(Disconnected(self.connection)))

    def take(self, which: int) -> None:
        if self.untaken:
            sequence = list(self.untaken)[which % len(self.untaken)]
            del self.untaken[sequence]
            self.apply(self.end.handle(Taken(sequence)))

    def send_what_may(self) -> None:
        while self.wants:
            payload = len(self.sent).to_bytes(4) + bytes(self.wants[0])
            message = WeightsChunk(
                sequence=0, name="w", dtype="F32", shape=(), offset=0, total_nbytes=0, buffer_nbytes=(len(payload),)
            )
            outgoing = self.end.number(message, [payload])
            if not self.end.has_credit_for(outgoing):
                return
            self.wants.popleft()
            self.sent.append(payload)
            self.apply(self.end.handle(Submitted(outgoing)))

    def apply(self, effects: list) -> None:
        for effect in effects:
            match effect:
                case Greet(_, hello):
                    self.carry(wire.encode(hello))
                case Transmit(outgoing):
                    self.carry(outgoing.frames)
                case Acknowledge(ack):
                    self.carry(wire.encode(ack), overtake=True)
                case Drop(connection) if connection == self.connection and self.line is not None:
                    self.line.cut(0)
                case Deliver(received):
                    self.delivered.append(bytes(received.buffers[0]))
                    self.untaken[received.message.sequence] = received.header_nbytes + received.payload_nbytes
        if effects:
            self.send_what_may()

    def carry(self, frames: list, *, overtake: bool = False) -> None:
        if self.line is None or not self.line.alive:
            return
        queue = self.line.towards[1 - self.index]
        if not overtake:
            queue.append(frames)
        else:  # anything but the hello
            queue.insert(1 if queue and isinstance(wire.decode(queue[0]).message, LinkHello) else 0, frames)


class LinkPair(RuleBasedStateMachine):
    """What may happen to a link, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.sides = (Side(0), Side(1))
        self.dialled: deque[Line] = deque()

    @rule(side=SIDES, nbytes=st.integers(0, 1500))
    def send(self, side: int, nbytes: int) -> None:
        self.sides[side].wants.append(nbytes)
        self.sides[side].send_what_may()

    @rule()
    def dial(self) -> None:
        self.sides[0].notice()
        if self.sides[0].line is None:
            line = Line()
            self.dialled.append(line)
            self.sides[0].attach(line)

    @rule(num_kept=st.integers(0, 3), accepted=st.booleans())
    def redial(self, num_kept: int, accepted: bool) -> None:
        """The dialling end sees the connection go at once, the other end not yet."""
        line = self.sides[0].line
        if line is not None:
            line.cut(num_kept)
            line.towards[0].clear()
        self.dial()
        if accepted:
            self.accept()

    @rule()
    def accept(self) -> None:
        """Only what has brought its hello; the newest, while the older one may still seem to be well."""
        while self.dialled:
            line = self.dialled.popleft()
            if line.towards[1]:
                self.sides[1].attach(line)
                self.sides[1].arrive()
                return

    @rule(side=SIDES, num_kept=st.integers(0, 3))
    def cut(self, side: int, num_kept: int) -> None:
        line = self.sides[side].line
        if line is not None:
            line.cut(num_kept)

    @rule(side=SIDES)
    def notice(self, side: int) -> None:
        self.sides[side].notice()

    @rule(side=SIDES, count=st.integers(1, 5))
    def arrive(self, side: int, count: int) -> None:
        for _ in range(count):
            self.sides[side].arrive()

    @rule(side=SIDES, which=st.integers(0, 5))
    def take(self, side: int, which: int) -> None:
        self.sides[side].take(which)

    @invariant()
    def all_is_delivered_once_and_in_order(self) -> None:
        for here, there in (self.sides, self.sides[::-1]):
            assert there.delivered == here.sent[: len(there.delivered)]

    @invariant()
    def no_more_than_the_credit_is_under_way(self) -> None:
        for here, there in (self.sides, self.sides[::-1]):
            assert here.end.in_flight_nbytes <= CREDIT_NBYTES or here.end.unacknowledged == 1
            assert sum(there.untaken.values()) <= CREDIT_NBYTES or len(there.untaken) == 1

    def teardown(self) -> None:
        """Once the network is well again, everything gets there."""
        for side in self.sides:
            if side.line is not None:
                side.line.cut(0)
            side.notice()
        self.dialled.clear()
        self.dial()
        self.accept()
        for _ in range(10_000):
            for side in self.sides:
                side.arrive()
                side.take(0)
            if not any(side.wants or side.untaken or any(side.line.towards) for side in self.sides):
                break
        for here, there in (self.sides, self.sides[::-1]):
            assert there.delivered == here.sent
            assert here.end.in_flight_nbytes == 0


TestLinkPair = LinkPair.TestCase
TestLinkPair.settings = settings(max_examples=60, stateful_step_count=60)


def test_links_keep_their_promises_through_long_random_histories():
    """Longer than those above, with more sending and less idling, so that a connection is replaced while it still speaks."""
    for seed in range(200):
        chance = random.Random(seed)
        pair = LinkPair()
        for _ in range(120):
            happening = chance.choice(("send", "send", "arrive", "arrive", "take", "redial", "accept", "cut", "notice"))
            side = chance.randrange(2)
            match happening:
                case "send":
                    pair.send(side=side, nbytes=chance.randrange(500))
                case "arrive":
                    pair.arrive(side=side, count=chance.randrange(1, 6))
                case "take":
                    pair.take(side=side, which=chance.randrange(6))
                case "redial":
                    pair.redial(num_kept=chance.randrange(4), accepted=chance.random() < 0.7)
                case "cut":
                    pair.cut(side=side, num_kept=chance.randrange(4))
                case "accept":
                    pair.accept()
                case "notice":
                    pair.notice(side=side)
            pair.all_is_delivered_once_and_in_order()
            pair.no_more_than_the_credit_is_under_way()
        pair.teardown()
