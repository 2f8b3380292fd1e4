"""Transports, chosen by the scheme of an address. Imports none of them before one is asked for."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Mapping
from types import MappingProxyType

from pipecomp.errors import AddressError
from pipecomp.transport.base import Address, Transport

_BUILT_IN: Mapping[str, str] = MappingProxyType(
    {"memory": "pipecomp.transport.memory", "tcp": "pipecomp.transport.zeromq"}
)
_GROUP = "pipecomp.transport"


def schemes() -> list[str]:
    """Schemes that `open_transport` knows, those of other packages' entry points included."""
    return sorted({*_BUILT_IN, *(e.name for e in importlib.metadata.entry_points(group=_GROUP))})


def open_transport(address: Address) -> Transport:
    """A new transport for the scheme of `address`.

    A transport of another package is an entry point in the group `pipecomp.transport`: its name is the scheme, and it
    refers to a callable without arguments that returns a Transport.

    Raises:
        AddressError: no transport has that scheme; the text lists those there are.
    """
    scheme, separator, _ = address.partition("://")
    if not separator or scheme not in schemes():
        raise AddressError(f"{address!r}: an address is SCHEME://..., and the schemes are {', '.join(schemes())}")
    for entry in importlib.metadata.entry_points(group=_GROUP, name=scheme):
        outside: Transport = entry.load()()
        return outside
    transport: Transport = importlib.import_module(_BUILT_IN[scheme]).PLUGIN()
    return transport
