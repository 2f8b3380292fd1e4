"""What every message is: a frozen value with its type's name as tag. Knows no message."""

from __future__ import annotations

import msgspec


class Tagged(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag=True):
    """Base of all messages."""
