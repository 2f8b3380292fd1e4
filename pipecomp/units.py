"""Sizes and rates as people write them: `4GB`, `20mbit`. Knows numbers and units; not what they are of."""

from __future__ import annotations

import re

from pipecomp.errors import ConfigError

LARGEST = 2**62
"""Bytes, or bytes a second: the sum of two still fits a message."""
HOW_TO_WRITE_A_SIZE = "write a size such as '500MB', '16GB' or '1.5TB'"
HOW_TO_WRITE_A_RATE = "write a rate above zero such as '500kbit', '20mbit' or '1gbit'"
_RATE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(kbit|mbit|gbit)(?:/s)?", re.IGNORECASE | re.ASCII)
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?)b", re.IGNORECASE | re.ASCII)


def parse_rate(text: str, key: str) -> float:
    """Bytes per second of a rate such as `100mbit`. Raises ConfigError naming `key`."""
    match = _RATE.fullmatch(text.strip())
    rate = float(match[1]) * {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}[match[2].lower()] / 8 if match else 0.0
    if not 0 < rate <= LARGEST:
        raise ConfigError(f"{key} = {_shown(text)}: {HOW_TO_WRITE_A_RATE}")
    return rate


def parse_size(text: str, key: str) -> int:
    """Bytes of a size such as `4GB` (decimal units). Raises ConfigError naming `key`."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"{key} = {_shown(text)}: {HOW_TO_WRITE_A_SIZE}")
    nbytes = float(match[1]) * {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}[match[2].lower()]
    if nbytes > LARGEST:
        raise ConfigError(f"{key} = {_shown(text)}: the largest size is {LARGEST // 10**12}TB; {HOW_TO_WRITE_A_SIZE}")
    return int(nbytes)


def _shown(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:50]}...{text[-6:]}")
