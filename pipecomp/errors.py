"""Every exception pipecomp raises on purpose. Knows no other module.

PipecompError
├── ConfigError               a run file, flag, model, tokenizer or data file that cannot be used; says what to change
├── ProtocolError
│   ├── LocalProtocolError    this process broke the rules: a bug here
│   └── RemoteProtocolError   the other end did: bytes or messages that the protocol does not allow
├── TransportError
│   ├── AddressError          an address that cannot be parsed, bound or dialled
│   ├── PeerLost              a connection that was open is gone
│   └── TransportClosed       this end closed it
├── CodecError
│   ├── NonFiniteValues       NaN or infinity among the values to encode; says where
│   ├── CorruptPayload        bytes that no encoder writes
│   └── MessageMismatch       the two ends remember different messages for a sample
├── StoreError                a store of messages that cannot be opened, or a disk that cannot take more; says what to do
├── WorkerFailed              a worker stopped the run; names it, its stage, what it was doing and why
├── CoordinatorLost           a worker no longer hears the coordinator
└── TrainingFailed            the run itself cannot go on (loss not finite step after step, ...)
"""

from __future__ import annotations


class PipecompError(Exception):
    """Base of all errors that pipecomp raises on purpose."""


class ConfigError(PipecompError):
    """A user's mistake: the text names the key, the value, what is allowed and what to do."""


class ProtocolError(PipecompError):
    """The rules of the wire protocol were broken."""


class LocalProtocolError(ProtocolError):
    """This process broke the rules: a bug here, never the peer's fault."""


class RemoteProtocolError(ProtocolError):
    """The other end broke the rules."""


class TransportError(PipecompError):
    """The network under a connection failed."""


class AddressError(TransportError):
    """An address cannot be parsed, bound or dialled."""


class PeerLost(TransportError):
    """A connection that was open is gone."""


class TransportClosed(TransportError):
    """The connection was closed by this end."""


class CodecError(PipecompError):
    """A tensor could not be encoded or decoded."""


class NonFiniteValues(CodecError):
    """NaN or infinity among the values to encode."""


class CorruptPayload(CodecError):
    """An encoded payload has the wrong size or content."""


class MessageMismatch(CodecError):
    """The two ends of a link remember different messages for one sample."""


class StoreError(PipecompError):
    """A store of messages cannot be used."""


class WorkerFailed(PipecompError):
    """A worker ended the run."""


class CoordinatorLost(PipecompError):
    """The coordinator cannot be heard any more."""


class TrainingFailed(PipecompError):
    """The run cannot go on."""
