"""Sizes and rates as people write them: `4GB`, `20mbit`. Knows numbers and units; not what they are of."""

from __future__ import annotations

import re

from pipecomp.errors import ConfigError

_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*(kbit|mbit|gbit)(?:/s)?", re.IGNORECASE)
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)b", re.IGNORECASE)


def parse_rate(text: str, key: str) -> float:
    """Bytes per second of a rate such as `100mbit`. Raises ConfigError naming `key`."""
    match = _RATE.fullmatch(text.strip())
    if match is None or float(match[1]) == 0:
        raise ConfigError(f"{key} = {text!r}: write a rate above zero such as '500kbit', '20mbit' or '1gbit'")
    return float(match[1]) * {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}[match[2].lower()] / 8


def parse_size(text: str, key: str) -> int:
    """Bytes of a size such as `4GB` (decimal units). Raises ConfigError naming `key`."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"{key} = {text!r}: write a size such as '500MB', '16GB' or '1.5TB'")
    return int(float(match[1]) * {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}[match[2].lower()])
