"""Modules, functions and constructors stay small. The aim is 350 and 35 lines; this holds the tail."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

MAX_MODULE_LINES = 450
MAX_FUNCTION_LINES = 70
MAX_CONSTRUCTOR_PARAMETERS = 8  # without self

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(path: Path) -> Iterator[Function]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, Function):
            yield node


def num_parameters(function: Function) -> int:
    arguments = function.args
    return len(arguments.posonlyargs) + len(arguments.args) + len(arguments.kwonlyargs) - 1


def test_no_module_is_longer_than_450_lines(shipped_modules: list[Path]) -> None:
    sizes = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in shipped_modules}
    assert {str(path): size for path, size in sizes.items() if size > MAX_MODULE_LINES} == {}


def test_no_function_is_longer_than_70_lines(shipped_modules: list[Path]) -> None:
    # Kernels are one loop each that may not call anything the compiler cannot inline; they are as long as they are.
    long = [
        f"{path}:{function.lineno} {function.name}"
        for path in shipped_modules
        if path.parent.name != "native"
        for function in functions(path)
        if function.end_lineno is not None and function.end_lineno - function.lineno + 1 > MAX_FUNCTION_LINES
    ]
    assert long == []


def test_no_constructor_takes_more_than_eight_parameters(shipped_modules: list[Path]) -> None:
    wide = [
        f"{path}:{function.lineno} takes {num_parameters(function)}"
        for path in shipped_modules
        for function in functions(path)
        if function.name == "__init__" and num_parameters(function) > MAX_CONSTRUCTOR_PARAMETERS
    ]
    assert wide == []
