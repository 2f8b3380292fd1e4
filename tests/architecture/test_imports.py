"""What an import must not load, seen in a fresh interpreter. The contracts on who may import whom are in pyproject.toml."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

HEAVY = ("torch", "numba", "zmq", "transformers")

LIGHT_MODULES = [
    "pipecomp",
    "pipecomp.config",
    "pipecomp.registry",
    "pipecomp.protocol",
    "pipecomp.protocol.messages",
    "pipecomp.protocol.wire",
    "pipecomp.schedules.gpipe",
    "pipecomp.schedules.one_f_one_b",
    "pipecomp.partition",
    "coordinator.state",
    "workers.state",
]

# Loaded by hand, so that the list is right even if the program ends in SystemExit, as --help does.
PROGRAM = """
import contextlib, io, json, sys
with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
    exec(sys.argv[1])
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""


def loaded_by(code: str) -> set[str]:
    """Top-level names of all that a fresh interpreter has loaded after running `code`."""
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, code], capture_output=True, text=True, timeout=60, check=False
    )
    assert run.returncode == 0, run.stderr
    return set(json.loads(run.stdout))


@pytest.mark.parametrize("module", LIGHT_MODULES)
def test_importing_a_light_module_loads_nothing_heavy(module: str) -> None:
    assert loaded_by(f"import {module}").isdisjoint(HEAVY)


def test_the_check_for_heavy_imports_sees_one() -> None:
    assert "zmq" in loaded_by("import zmq")


def test_importing_the_command_line_loads_nothing_heavy() -> None:
    assert loaded_by("import pipecomp.cli").isdisjoint({*HEAVY, "rich"})


def test_help_loads_nothing_heavy() -> None:
    # `pipecomp --help` is to answer in half a second; what it loads decides that, whatever the machine.
    loaded = loaded_by("import sys; sys.argv = ['pipecomp', '--help']; from pipecomp.cli import main; main()")
    assert loaded.isdisjoint({*HEAVY, "tokenizers", "safetensors", "huggingface_hub", "numpy"})


def test_every_module_of_pipecomp_has_its_layer(root: Path) -> None:
    settings = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = next(contract["layers"] for contract in settings["contracts"] if contract["type"] == "layers")
    placed = {name.strip(" ()") for layer in layers for name in layer.split("|")}
    modules = {f"pipecomp.{path.stem}" for path in (root / "pipecomp").iterdir() if is_module(path)}
    assert modules <= placed
    assert {"coordinator", "workers"} <= placed


def is_module(path: Path) -> bool:
    if path.is_dir():
        return (path / "__init__.py").exists()
    return path.suffix == ".py" and path.stem != "__init__"


def test_the_tools_see_the_same_package_as_this_test(root: Path) -> None:
    spec = importlib.util.find_spec("pipecomp")
    assert spec is not None
    assert Path(str(spec.origin)) == root / "pipecomp" / "__init__.py"
