"""How a codec reads its options from a run file. Knows keys and what they may hold; knows no tensor.

Modules whose name starts with an underscore are no plugins.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from pipecomp.errors import ConfigError


def check_keys(codec: str, options: Mapping[str, object], allowed: Collection[str]) -> None:
    """Raise ConfigError for a key that the codec does not have; a typo must not pass for a default."""
    unknown = sorted(set(options) - set(allowed))
    if unknown:
        known = ", ".join(allowed) if allowed else "none"
        raise ConfigError(f"codec {codec!r} has no option {unknown[0]!r}; its options are: {known}")


def choice(codec: str, options: Mapping[str, object], key: str, allowed: Collection[str], default: str) -> str:
    """The string under `key`, one of `allowed`."""
    value = options.get(key, default)
    if not isinstance(value, str) or value not in allowed:
        raise ConfigError(f"codec {codec!r}: {key} = {value!r} is not possible; use one of: {', '.join(allowed)}")
    return value


def integer(codec: str, options: Mapping[str, object], key: str, low: int, high: int, default: int | None) -> int:
    """The whole number under `key`, low .. high; required if `default` is None."""
    value = options.get(key, default)
    if value is None:
        raise ConfigError(f"codec {codec!r} needs {key}, a whole number from {low} to {high}")
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ConfigError(
            f"codec {codec!r}: {key} = {value!r} is not possible; use a whole number from {low} to {high}"
        )
    return value
