"""One end of one data link: numbers, credit, acknowledgements, sending again. Knows messages; no sockets, time or tensors.

A link outlives its connections. Each direction numbers its messages from 0. What was sent is kept until the other end has
taken it, and its bytes count against the credit until then. On each new connection both ends say hello with the number they
want next, and what the other end has not got is sent again:

    dialling end                                listening end
    LinkHello(next_sequence=0)        ->
                                      <-        LinkHello(next_sequence=0)
    TensorMessage(sequence=0)         ->
    TensorMessage(sequence=1)         ->  lost with the connection
    ------------------------------------------- a new connection
    LinkHello(next_sequence=0)        ->
                                      <-        LinkHello(next_sequence=1)
    TensorMessage(sequence=1)         ->        once more
                                      <-        Ack(sequence=1)   0 and 1 are taken

Credit: a message may leave when the bytes under way, its own included, do not pass the credit; or when nothing is under way,
however large it is. So at most max(credit, one message) bytes wait at the receiver.

    states    UNCONNECTED --Connected--> GREETING --HelloArrived--> OPEN
              GREETING, OPEN --Disconnected--> UNCONNECTED      any --Connected--> GREETING (the older connection is dropped)
              any --PeerGone | Refused--> LOST                  any --Close--> CLOSED
"""

from __future__ import annotations

import collections
import enum
import types
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from pipecomp.errors import LocalProtocolError, RemoteProtocolError
from pipecomp.protocol import wire
from pipecomp.protocol.checks import check_tensor_message as check_tensor_message  # noqa: PLC0414 - part of a link's rules
from pipecomp.protocol.messages import (
    Ack,
    GradientMessage,
    LinkHello,
    Message,
    Refused,
    Resent,
    SequencedMessage,
    TensorMessage,
    WeightsChunk,
    WeightsRequest,
)
from pipecomp.types import Kind

_SEQUENCED = SequencedMessage.__args__


class LinkState(enum.Enum):
    UNCONNECTED = "unconnected"
    GREETING = "greeting"
    OPEN = "open"
    LOST = "lost"
    CLOSED = "closed"


class LinkIdentity(NamedTuple):
    """What both ends must agree on, and who this end is."""

    run: str
    epoch: int
    link: str
    worker: str


class Outgoing(NamedTuple):
    """A numbered message, and encoded; `frames[0]` is its header."""

    message: SequencedMessage
    sequence: int
    kind: Kind
    values: int
    frames: list[wire.Buffer]
    header_nbytes: int
    payload_nbytes: int

    @property
    def nbytes(self) -> int:
        return self.header_nbytes + self.payload_nbytes


# ---------------------------------------------------------------- events


class Connected(NamedTuple):
    """A new connection; numbers of connections only grow."""

    connection: int


class Disconnected(NamedTuple):
    connection: int


class Arrived(NamedTuple):
    """A message came over a connection."""

    connection: int
    received: wire.Received


class Submitted(NamedTuple):
    """This end wants to send what `LinkEnd.number` made."""

    outgoing: Outgoing


class Taken(NamedTuple):
    """This end is done with the message of that number."""

    sequence: int


class PeerGone(NamedTuple):
    """The peer was away for too long."""


class Close(NamedTuple):
    """This end wants no more of it."""


LinkEvent = Connected | Disconnected | Arrived | Submitted | Taken | PeerGone | Close

# ---------------------------------------------------------------- effects


class Greet(NamedTuple):
    """Send this hello, before anything else on the connection."""

    connection: int
    hello: LinkHello


class Transmit(NamedTuple):
    """Send over the present connection, in order. Not sent if that connection goes first: `Transmit` comes again."""

    outgoing: Outgoing


class Acknowledge(NamedTuple):
    """Send an acknowledgement. A later one stands for all earlier ones, and none needs to queue behind a message."""

    ack: Ack


class Deliver(NamedTuple):
    """The next message in order, for this end to use."""

    received: wire.Received


class CreditFreed(NamedTuple):
    """There may be room to send again."""


class Opened(NamedTuple):
    """Both ends have said hello on the present connection."""


class Drop(NamedTuple):
    """Close that connection: a newer one has taken its place, or the link has ended."""

    connection: int


class Ended(NamedTuple):
    """The link is lost, for this reason."""

    reason: str


LinkEffect = Greet | Transmit | Acknowledge | Deliver | CreditFreed | Opened | Drop | Ended

# ---------------------------------------------------------------- transitions

_U, _G, _O, _L, _C = LinkState
TRANSITIONS: Mapping[tuple[LinkState, str], LinkState] = types.MappingProxyType(
    {
        (_U, "Connected"): _G,
        (_G, "Connected"): _G,
        (_O, "Connected"): _G,
        (_G, "Disconnected"): _U,
        (_O, "Disconnected"): _U,
        (_G, "LinkHello"): _O,
        (_G, "Refused"): _L,
        (_O, "Message"): _O,
        (_O, "Ack"): _O,
        **{(state, "Submitted"): state for state in (_U, _G, _O)},
        **{(state, "Taken"): state for state in LinkState},
        **{(state, "PeerGone"): _L for state in (_U, _G, _O)},
        (_L, "PeerGone"): _L,
        **{(state, "Close"): _C for state in LinkState},
    }
)
"""(state, event) -> state. A message that arrives is an event by its own name, every sequenced one by `Message`. An event
that is not here is refused: our own with LocalProtocolError, a message with RemoteProtocolError."""


def kind_of(message: Message) -> Kind:
    """What the bytes of a message count as (law 13)."""
    if isinstance(message, (TensorMessage, GradientMessage, Resent)):
        return message.kind
    if isinstance(message, (WeightsRequest, WeightsChunk)):
        return Kind.WEIGHTS
    return Kind.CONTROL


class LinkEnd:
    """One end of one link. `handle` is the only method that changes anything."""

    def __init__(self, identity: LinkIdentity, credit_nbytes: int) -> None:
        self.identity = identity
        self.state = LinkState.UNCONNECTED
        self.peer_worker = ""
        """Known from the first hello on, and the same ever after."""
        self._credit_nbytes = credit_nbytes
        self._connection = -1
        self._next_out = 0
        self._next_in = 0
        self._unacknowledged: collections.deque[Outgoing] = collections.deque()
        self._in_flight_nbytes = 0
        self._taken_out_of_order: set[int] = set()
        self._next_taken = 0

    @property
    def in_flight_nbytes(self) -> int:
        """Bytes sent, or about to be, that the other end has not taken yet."""
        return self._in_flight_nbytes

    @property
    def unacknowledged(self) -> int:
        """Messages that the other end has not taken yet."""
        return len(self._unacknowledged)

    def number(self, message: Message, buffers: Sequence[wire.Buffer] = (), *, values: int = 0) -> Outgoing:
        """Give `message` the next number and encode it. It counts only once it is submitted.

        Raises:
            LocalProtocolError: the message is not one that a link numbers, or cannot be encoded.
        """
        if not isinstance(message, _SEQUENCED):
            raise LocalProtocolError(f"a link does not send {type(message).__name__}: it has no sequence")
        numbered = msgspec.structs.replace(message, sequence=self._next_out)
        frames = wire.encode(numbered, buffers)
        payload_nbytes = sum(getattr(numbered, "buffer_nbytes", ()))
        return Outgoing(numbered, self._next_out, kind_of(numbered), values, frames, len(frames[0]), payload_nbytes)

    def has_credit_for(self, outgoing: Outgoing) -> bool:
        """Whether `outgoing` may be submitted now."""
        return self._in_flight_nbytes == 0 or self._in_flight_nbytes + outgoing.nbytes <= self._credit_nbytes

    def handle(self, event: LinkEvent) -> list[LinkEffect]:
        """Take one event.

        Raises:
            LocalProtocolError: this end did what its state does not allow; nothing has changed.
            RemoteProtocolError: the other end did; the link is lost.
        """
        if isinstance(event, Arrived):
            # What a connection that was replaced still brings was asked for again on the newer one.
            return self._arrived(event.received) if event.connection == self._connection else []
        if isinstance(event, Disconnected) and event.connection != self._connection:
            return []
        following = TRANSITIONS.get((self.state, type(event).__name__))
        if following is None:
            raise LocalProtocolError(f"{self._name()} is {self.state.value}: {type(event).__name__} is not allowed")
        effects = self._do(event)
        self.state = following
        return effects

    def _do(self, event: Connected | Disconnected | Submitted | Taken | PeerGone | Close) -> list[LinkEffect]:
        match event:
            case Connected(connection):
                return self._connect(connection)
            case Submitted(outgoing):
                return self._submit(outgoing)
            case Taken(sequence):
                return self._take(sequence)
            case PeerGone():
                return [] if self.state is _L else [*self._drop(), Ended("it was away for too long")]
            case Close():
                return self._drop()
            case Disconnected():
                return []

    def _arrived(self, received: wire.Received) -> list[LinkEffect]:
        message = received.message
        name = "Message" if isinstance(message, _SEQUENCED) else type(message).__name__
        try:
            following = TRANSITIONS.get((self.state, name))
            if following is None:
                raise RemoteProtocolError(
                    f"{self._name()} is {self.state.value}: {type(message).__name__} is not allowed"
                )
            match message:
                case LinkHello():
                    effects = self._greeted(message)
                case Ack():
                    effects = self._acknowledged(message)
                case Refused():
                    effects = [*self._drop(), Ended(f"the other end refused it: {message.reason}")]
                case _:
                    effects = self._received(received)
        except RemoteProtocolError:
            self.state = _L
            raise
        self.state = following
        return effects

    def _drop(self) -> list[LinkEffect]:
        return [Drop(self._connection)] if self.state in (_G, _O) else []

    # -------------------------------------------------------- connections

    def _connect(self, connection: int) -> list[LinkEffect]:
        if connection <= self._connection:
            raise LocalProtocolError(f"{self._name()}: connection {connection} after {self._connection}")
        older = self._drop()
        self._connection = connection
        me = self.identity
        hello = LinkHello(run=me.run, epoch=me.epoch, link=me.link, worker=me.worker, next_sequence=self._next_in)
        return [*older, Greet(connection, hello)]

    def _greeted(self, hello: LinkHello) -> list[LinkEffect]:
        me = self.identity
        for field, expected in (("run", me.run), ("epoch", me.epoch), ("link", me.link), ("worker", self.peer_worker)):
            got = getattr(hello, field)
            if expected not in (got, ""):
                raise RemoteProtocolError(f"{self._name()}: a hello with {field} {got!r}, expected {expected!r}")
        first_kept = self._unacknowledged[0].sequence if self._unacknowledged else self._next_out
        if not first_kept <= hello.next_sequence <= self._next_out:
            raise RemoteProtocolError(
                f"{self._name()}: the other end asks to go on from {hello.next_sequence}, "
                f"but only {first_kept} to {self._next_out} can be next"
            )
        self.peer_worker = hello.worker
        again: list[LinkEffect] = [Transmit(o) for o in self._unacknowledged if o.sequence >= hello.next_sequence]
        # An acknowledgement may have been lost with the last connection.
        acks: list[LinkEffect] = [Acknowledge(Ack(sequence=self._next_taken - 1))] if self._next_taken else []
        return [Opened(), *acks, *again]

    # -------------------------------------------------------- messages

    def _submit(self, outgoing: Outgoing) -> list[LinkEffect]:
        if outgoing.sequence != self._next_out:
            raise LocalProtocolError(f"{self._name()}: message {outgoing.sequence} submitted, {self._next_out} is next")
        if not self.has_credit_for(outgoing):
            raise LocalProtocolError(
                f"{self._name()}: {outgoing.nbytes} bytes submitted with {self._in_flight_nbytes} under way "
                f"and a credit of {self._credit_nbytes}"
            )
        self._next_out += 1
        self._in_flight_nbytes += outgoing.nbytes
        self._unacknowledged.append(outgoing)
        return [Transmit(outgoing)] if self.state is _O else []

    def _acknowledged(self, ack: Ack) -> list[LinkEffect]:
        if ack.sequence >= self._next_out:
            raise RemoteProtocolError(
                f"{self._name()}: an acknowledgement of {ack.sequence}, but {self._next_out} is the next to be sent"
            )
        freed = False
        while self._unacknowledged and self._unacknowledged[0].sequence <= ack.sequence:
            self._in_flight_nbytes -= self._unacknowledged.popleft().nbytes
            freed = True
        return [CreditFreed()] if freed else []

    def _received(self, received: wire.Received) -> list[LinkEffect]:
        message = received.message
        assert isinstance(message, _SEQUENCED)
        if message.sequence > self._next_in:
            raise RemoteProtocolError(
                f"{self._name()}: message {message.sequence} came where {self._next_in} was next: "
                f"{message.sequence - self._next_in} are missing"
            )
        if isinstance(message, (TensorMessage, GradientMessage)):
            for field, expected in (("run", self.identity.run), ("epoch", self.identity.epoch)):
                got = getattr(message, field)
                if got != expected:
                    raise RemoteProtocolError(f"{self._name()}: a message of {field} {got!r}, expected {expected!r}")
        if message.sequence < self._next_in:
            return []
        self._next_in += 1
        return [Deliver(received)]

    def _take(self, sequence: int) -> list[LinkEffect]:
        if not self._next_taken <= sequence < self._next_in or sequence in self._taken_out_of_order:
            raise LocalProtocolError(f"{self._name()}: message {sequence} is not there to be taken")
        self._taken_out_of_order.add(sequence)
        before = self._next_taken
        while self._next_taken in self._taken_out_of_order:
            self._taken_out_of_order.remove(self._next_taken)
            self._next_taken += 1
        if self._next_taken == before or self.state is not _O:
            return []
        return [Acknowledge(Ack(sequence=self._next_taken - 1))]

    def _name(self) -> str:
        peer = f" to {self.peer_worker}" if self.peer_worker else ""
        return f"link {self.identity.link}{peer}"
