"""The project's own files, for the tests of its shape."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("pipecomp", "coordinator", "workers")
# What .gitignore names, and git itself.
NOT_OURS = frozenset({
    ".git", ".venv", "__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache", ".hypothesis", ".import_linter_cache",
    "build", "dist", "cache", "outputs", "demo-output",
})  # fmt: skip


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def shipped_modules() -> list[Path]:
    """Every module that an install brings."""
    return sorted(path for package in PACKAGES for path in _walk(ROOT / package) if path.suffix == ".py")


@pytest.fixture(scope="session")
def python_files() -> list[Path]:
    """Every Python file of the project, tests and examples too."""
    return sorted(path for path in _walk(ROOT) if path.suffix == ".py")


@pytest.fixture(scope="session")
def text_files() -> dict[Path, str]:
    """Every file of the project that is text, with its text."""
    texts = {}
    for path in _walk(ROOT):
        content = path.read_bytes()
        if b"\0" not in content:
            texts[path] = content.decode("utf-8", errors="replace")
    return texts


def _walk(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        if path.name in NOT_OURS or path.name.endswith(".egg-info"):
            continue
        if path.is_dir():
            yield from _walk(path)
        elif path.is_file():
            yield path
