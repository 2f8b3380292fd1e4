"""What must stand nowhere in the tree: ways to run foreign bytes as code, and places that only one machine has."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest

# Each of these can run code from what it reads. A letter in brackets keeps this file from finding itself.
RUNS_FOREIGN_CODE = re.compile(
    r"""
      \b(import|from)\ (c?[p]ickle|[m]arshal|[s]helve|[d]ill|[j]oblib)\b
    | torch\.([l]oad|[s]ave)\(
    | (recv|send)_[p]yobj
    | allow_[p]ickle\s*=\s*True
    | yaml\.(unsafe_|full_)?[l]oad\(
    """,
    re.VERBOSE,
)

# Hosts of package registries, and folders of a machine that another one has not.
FOREIGN_PLACES = re.compile(
    r"""
      [p]ypi\.org | [p]ythonhosted\.org | [n]pmjs\.(org|com) | [d]eb\.debian\.org | [d]ownload\.pytorch\.org
    | (?<![\w.])/(work|root|opt/(wheels|pypi))/
    | \.\./[s]hared
    """,
    re.VERBOSE,
)

LARGEST_NBYTES = 2**19

VAGUE_NAMES = re.compile(r"^class \w*(Manager|Helper|Utils?|Handler|Info)\b", re.MULTILINE)


def found(pattern: re.Pattern[str], texts: dict[Path, str]) -> list[str]:
    return [
        f"{path}:{number}: {line.strip()}"
        for path, text in texts.items()
        for number, line in enumerate(text.splitlines(), 1)
        if pattern.search(line)
    ]


def test_nothing_reads_or_writes_what_can_run_as_code(python_files: list[Path]) -> None:
    texts = {path: path.read_text(encoding="utf-8") for path in python_files}
    assert found(RUNS_FOREIGN_CODE, texts) == []


def test_no_file_names_a_place_that_only_one_machine_has(text_files: dict[Path, str]) -> None:
    assert found(FOREIGN_PLACES, text_files) == []


def test_no_file_is_larger_than_a_text_that_ships(root: Path) -> None:
    """What a run or a benchmark has left behind would be fetched by everyone for ever."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git repository")
    paths = [root / name for name in listed.stdout.split("\0") if name]
    assert [str(path) for path in paths if path.exists() and path.stat().st_size > LARGEST_NBYTES] == []


def test_no_class_or_module_has_a_name_that_says_nothing(shipped_modules: list[Path]) -> None:
    texts = {path: path.read_text(encoding="utf-8") for path in shipped_modules}
    assert found(VAGUE_NAMES, texts) == []
    vague = {"manager", "helper", "helpers", "util", "utils", "handler", "handlers", "info", "common", "misc"}
    assert [str(path) for path in shipped_modules if path.stem.strip("_") in vague] == []


def test_every_test_file_has_a_name_of_its_own(python_files: list[Path]) -> None:
    counts = Counter(path.name for path in python_files if path.name.startswith("test_"))
    assert [name for name, count in counts.items() if count > 1] == []


def test_every_shipped_module_says_what_it_is_about(shipped_modules: list[Path]) -> None:
    silent = [str(path) for path in shipped_modules if (text := path.read_text(encoding="utf-8")) and not text.startswith('"""')]
    assert silent == []


@pytest.mark.parametrize(
    "line",
    ["import " + "pickle", "from " + "marshal import loads", "torch." + "load(f)", "s.recv_" + "pyobj()", "yaml." + "load(f)"],
)
def test_the_pattern_for_foreign_code_finds_it(line: str) -> None:
    assert RUNS_FOREIGN_CODE.search(line)


@pytest.mark.parametrize("line", ["https://pypi" + ".org/simple", "cd /" + "work/main", "open('.." + "/shared/data')"])
def test_the_pattern_for_foreign_places_finds_them(line: str) -> None:
    assert FOREIGN_PLACES.search(line)
