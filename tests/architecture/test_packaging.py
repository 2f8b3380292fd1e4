"""What is declared to be installed agrees with what is pinned and with what is imported."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

# Where the name to import is not the name to install.
IMPORT_NAMES = {"pyzmq": "zmq"}
# numba's own back end, released with it and never without it.
BROUGHT_ALONG = {"llvmlite"}


@pytest.fixture(scope="module")
def project(root: Path) -> dict[str, object]:
    return tomllib.loads((root / "pyproject.toml").read_text())["project"]


def name_of(requirement: str) -> str:
    return re.match(r"[A-Za-z0-9_.-]+", requirement).group().lower().replace("_", "-")


def test_every_declared_dependency_is_pinned(root: Path, project: dict[str, object]) -> None:
    lines = [line for line in (root / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    pins = dict(line.split("==") for line in lines)
    declared = [*project["dependencies"], *(r for extra in project["optional-dependencies"].values() for r in extra)]
    assert {name_of(r) for r in declared} - {name_of(name) for name in pins} == set()


def test_a_pin_is_a_plain_version_that_any_machine_can_find(root: Path) -> None:
    text = (root / "constraints.txt").read_text()
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert [line for line in lines if not re.fullmatch(r"[A-Za-z0-9_.-]+==[0-9][0-9A-Za-z.]*", line)] == []


def test_what_ships_imports_only_what_is_declared(shipped_modules: list[Path], project: dict[str, object]) -> None:
    declared = {IMPORT_NAMES.get(name_of(r), name_of(r).replace("-", "_")) for r in project["dependencies"]}
    allowed = declared | {"pipecomp", "coordinator", "workers"} | BROUGHT_ALONG | sys.stdlib_module_names
    foreign = {
        f"{path}: {name}"
        for path in shipped_modules
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        for name in imported(node)
        if name.partition(".")[0] not in allowed
    }
    assert foreign == set()


def imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
        return [node.module]
    return []
