"""Find plugins by name: plugin name = module name. Knows packages and entry points, not what a plugin does.

A built-in codec `uniform` is the module `pipecomp.codecs.uniform`; an outside package adds one through the entry point
group `pipecomp.codecs`. Each plugin module exports `PLUGIN`, the object to use. A module whose name starts with a digit
cannot be imported by statement, so a module may be listed under another name by `NAME`.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import pkgutil
from typing import Any

from pipecomp.errors import ConfigError

_NOT_PLUGINS = frozenset({"base", "bench_errors", "bench_kernels"})
_ALIASES = {"pipecomp.schedules": {"1f1b": "one_f_one_b"}}


def names(package: str) -> list[str]:
    """Names of all plugins of `package` (`pipecomp.codecs`, `pipecomp.schedules`, ...), built-in and from entry points."""
    aliases = {module: name for name, module in _ALIASES.get(package, {}).items()}
    folder = importlib.import_module(package).__path__
    built_in = {
        aliases.get(m.name, m.name)
        for m in pkgutil.iter_modules(folder)
        if m.name not in _NOT_PLUGINS and not m.name.startswith("_")
    }
    return sorted(built_in | {e.name for e in importlib.metadata.entry_points(group=package)})


def load(package: str, name: str) -> Any:  # noqa: ANN401 - each package documents the type of its PLUGIN
    """The `PLUGIN` of the module that `name` stands for.

    Raises:
        ConfigError: no plugin has that name; the text lists those there are.
    """
    known = names(package)
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ConfigError(f"unknown {package.rpartition('.')[2].removesuffix('s')} {name!r}; {hint}there are: {', '.join(known)}")
    for entry in importlib.metadata.entry_points(group=package, name=name):
        return entry.load()
    module = _ALIASES.get(package, {}).get(name, name)
    return importlib.import_module(f"{package}.{module}").PLUGIN
