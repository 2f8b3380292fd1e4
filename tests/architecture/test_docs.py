"""The documents say what the code does: keys, options, messages, files, links."""

from __future__ import annotations

import ast
import importlib
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer.main
from msgspec import inspect

from pipecomp import registry
from pipecomp.config import RunConfig
from pipecomp.errors import ConfigError

SECTIONS = [field.name for field in msgspec.structs.fields(RunConfig)]
COMMANDS = [
    *("launch RUN.toml", "coordinator RUN.toml", "worker", "plan RUN.toml"),
    *("bench kernels", "bench convergence", "bench plots", "bench quality", "bench store", "bench errors"),
    "bench peer",
    "bench plan",
    "bench links",
    "bench gradients",
    "bench memory",
]
NO_DEFAULT = "–"


@pytest.fixture(scope="module")
def running(root: Path) -> str:
    return (root / "docs" / "running.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def readme(root: Path) -> str:
    return (root / "README.md").read_text(encoding="utf-8")


def section(text: str, heading: str) -> str:
    """What stands under a heading, up to the next one of its level or above."""
    start = text.index(f"\n{heading}\n") + len(heading) + 2
    level = heading.count("#")
    end = re.search(rf"^#{{1,{level}}} ", text[start:], re.MULTILINE)
    return text[start : start + end.start()] if end else text[start:]


def rows(text: str) -> list[list[str]]:
    """Cells of the first table in `text`, without its head."""
    lines = [line for line in text.split("\n") if line.startswith("|")]
    cells = [[cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    end = next((i for i, row in enumerate(cells[2:], 2) if set("".join(row)) <= set("- ")), len(cells) + 1)
    return cells[2 : end - 1] if end <= len(cells) else cells[2:]


# ------------------------------------------------------------------------------------------------------------ run file


@pytest.mark.parametrize("name", SECTIONS)
def test_every_key_of_a_section_is_documented_with_its_type_and_default(running: str, name: str) -> None:
    fields = msgspec.structs.fields(dict(config_sections())[name])
    expected = {field.name: (set(kind_of(field).split(" / ")), default_of(field)) for field in fields}
    found = {
        key.strip("`"): (set(kind.split(" / ")), documented_value(default))
        for key, kind, default, _ in rows(section(running, f"### [{name}]"))
    }
    assert found == expected
    assert list(found) == list(expected)


def config_sections() -> Iterator[tuple[str, Any]]:
    for field in msgspec.structs.fields(RunConfig):
        yield field.name, field.type


def kind_of(field: msgspec.structs.FieldInfo) -> str:
    return describe(inspect.type_info(field.type))


def describe(kind: inspect.Type) -> str:
    match kind:
        case inspect.UnionType(types=types):
            return describe(next(each for each in types if not isinstance(each, inspect.NoneType)))
        case inspect.LiteralType(values=values):
            return " / ".join(f'`"{value}"`' if isinstance(value, str) else f"`{value}`" for value in values)
        case inspect.BoolType():
            return "`true` / `false`"
        case inspect.StrType():
            return "text"
        case inspect.DictType():
            return "table"
        case inspect.IntType():
            return "whole number" + bounds(kind)
        case inspect.FloatType():
            return "number" + bounds(kind)
        case inspect.VarTupleType(item_type=item):
            return f"list: {describe(item)}"
    raise AssertionError(f"no word for {kind}")


_NO_BOUND = 1e18  # what a key is held under only so that it stays a finite number


def bounds(kind: inspect.IntType | inspect.FloatType) -> str:
    named = (">", kind.gt), ("≥", kind.ge), ("<", kind.lt), ("≤", kind.le)
    return ",".join(f" {sign} {value:g}" for sign, value in named if value is not None and value < _NO_BOUND)


def default_of(field: msgspec.structs.FieldInfo) -> Any:
    value = field.default_factory() if field.default is msgspec.NODEFAULT else field.default
    return None if value == "" else list(value) if isinstance(value, tuple) else value


def documented_value(cell: str) -> Any:
    return None if cell == NO_DEFAULT else tomllib.loads(f"value = {cell.strip('`')}")["value"]


@pytest.mark.parametrize("name", registry.names("pipecomp.codecs"))
def test_the_options_of_every_codec_are_documented(running: str, name: str) -> None:
    documented = {row[0].strip("`"): re.findall(r"`(\w+)`", row[1]) for row in rows(section(running, "## Codecs"))}
    with pytest.raises(ConfigError, match="has no option 'nonsense'") as refused:
        registry.load("pipecomp.codecs", name).from_options({"nonsense": 1})
    allowed = str(refused.value).partition("its options are: ")[2]
    assert documented[name] == ([] if allowed == "none" else allowed.split(", "))


def test_every_model_family_is_named(running: str, readme: str) -> None:
    families = registry.names("pipecomp.models")
    listed = re.search(r"^Families: (.*?), by", running, re.MULTILINE)
    assert listed is not None
    assert re.findall(r"`(\w+)`", listed[1]) == families
    plain = readme.lower().replace("-", "")
    assert [name for name in families if name not in plain] == []


def test_every_schedule_is_named(running: str) -> None:
    row = next(row for row in rows(section(running, "### [cluster]")) if row[0] == "`schedule`")
    assert [name for name in registry.names("pipecomp.schedules") if f'"{name}"' not in row[3]] == []


# -------------------------------------------------------------------------------------------------------- command line


@pytest.mark.parametrize("usage", COMMANDS)
def test_every_option_of_a_command_is_documented(running: str, usage: str) -> None:
    from pipecomp.cli import app

    command: Any = typer.main.get_command(app)
    for word in usage.removesuffix(" RUN.toml").split():
        command = command.commands[word]
    expected = {option_usage(p): p for p in command.params if p.param_type_name == "option"}
    documented = {row[0].strip("`"): row[1] for row in rows(section(running, f"### pipecomp {usage}"))}
    assert list(documented) == list(expected)
    for option, parameter in expected.items():
        if parameter.required:
            assert documented[option] == "required"
        elif parameter.default not in (None, False):
            assert documented[option] == f"`{parameter.default}`"


def option_usage(parameter: Any) -> str:
    name = next(opt for opt in parameter.opts if opt.startswith("--"))
    return name if parameter.is_flag else f"{name} {parameter.metavar}"


def test_no_command_is_left_out() -> None:
    from pipecomp.cli import app

    command: Any = typer.main.get_command(app)
    leaves = {
        f"{name} {inner}".strip() for name, one in command.commands.items() for inner in getattr(one, "commands", {"": None})
    }
    assert leaves == {usage.removesuffix(" RUN.toml") for usage in COMMANDS}


# ------------------------------------------------------------------------------------------------------ what is written


def test_every_key_of_the_summary_is_documented(running: str) -> None:
    from coordinator.ledger import Ledger
    from coordinator.summary import make_summary

    summary = make_summary(Ledger(), (), wall_time_s=0.0, stopped_early=False, cause="")
    table = rows(section(running, "## Files written").partition("**The summary**")[2])
    assert [key for row in table for key in re.findall(r"`(\w+)`", row[0])] == list(summary)
    traffic = next(row[1] for row in table if row[0] == "`traffic`")
    assert re.findall(r"`(\w+)`", traffic) == [*summary["traffic"], *summary["traffic"]["forward"]]


def test_every_event_of_the_step_log_is_documented(running: str, root: Path) -> None:
    written = set()
    for node in ast.walk(ast.parse((root / "coordinator" / "steplog.py").read_text(encoding="utf-8"))):
        if isinstance(node, ast.Dict):
            keys = [key.value for key in node.keys if isinstance(key, ast.Constant)]
            events = [
                value.value for key, value in zip(node.keys, node.values, strict=True)
                if isinstance(key, ast.Constant) and key.value == "event" and isinstance(value, ast.Constant)
            ]  # fmt: skip
            written |= {*events, *(keys if events == ["step"] else [])}
    text = section(running, "## Files written").partition("**The step log**")[2]
    assert written
    assert [word for word in sorted(written) if f"`{word}`" not in text] == []


def test_every_quoted_error_message_is_one_that_the_code_gives(running: str, shipped_modules: list[Path]) -> None:
    literals = [text for path in shipped_modules for text in texts_of(path)]
    quoted = [message for row in rows(section(running, "## Error messages")) for message in re.findall(r"`([^`]+)`", row[0])]
    assert len(quoted) > 30
    assert [message for message in quoted if not any(is_said(message, literal) for literal in literals)] == []


def texts_of(path: Path) -> Iterator[str]:
    """Every string in a module, … where an f-string has a value."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def is_said(message: str, literal: str) -> bool:
    return re.search(".+?".join(map(re.escape, message.split("…"))), literal, re.DOTALL) is not None


def test_a_message_that_nobody_gives_is_seen() -> None:
    assert is_said("worker … is one too many", "worker … is one too many: all … places")
    assert not is_said("worker … is one too few", "worker … is one too many: all … places")


# ---------------------------------------------------------------------------------------------- links, paths, packages


def test_every_link_between_documents_leads_somewhere(text_files: dict[Path, str]) -> None:
    documents = {path: text for path, text in text_files.items() if path.suffix == ".md"}
    broken = []
    for path, text in documents.items():
        for target in re.findall(r"\]\(([^)\s]+)\)", without_code(text)):
            if "://" in target:
                continue
            file, _, anchor = target.partition("#")
            there = path if not file else (path.parent / file).resolve()
            if not there.exists() or (anchor and anchor not in anchors(there.read_text(encoding="utf-8"))):
                broken.append(f"{path.name}: {target}")
    assert broken == []


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", without_code(text), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_file_that_a_document_names_is_there(root: Path, text_files: dict[Path, str]) -> None:
    named = re.compile(r"(?<![\w./-])(?:docs|pipecomp|coordinator|workers|tests|scripts|examples)/[\w/.-]*\w\.(?:py|md|toml)\b")
    missing = {
        f"{path.relative_to(root)}: {name}"
        for path, text in text_files.items()
        if path == root / "README.md" or (path.suffix == ".md" and path.parent == root / "docs")
        for name in named.findall(text)
        if not (root / name).exists() and not re.search(r"/[A-Z_]+\.py$", name)  # NAME.py is yours to name
    }
    assert missing == set()


@pytest.mark.parametrize("name", ["README.md", "docs/architecture.md"])
def test_a_file_tree_has_every_folder_of_the_package(root: Path, name: str) -> None:
    text = (root / name).read_text(encoding="utf-8")
    folders = {path.parent.name for path in (root / "pipecomp").glob("*/__init__.py")}
    assert {folder for folder in folders if not re.search(rf"^  {folder}/ ", text, re.MULTILINE)} == set()


def test_every_module_of_the_package_root_and_the_apps_is_on_the_map(root: Path) -> None:
    text = (root / "docs" / "architecture.md").read_text(encoding="utf-8")
    tree = section(text, "## The tree")
    modules = {
        path.name
        for folder in ("pipecomp", "coordinator", "workers", "pipecomp/runtime", "pipecomp/testing")
        for path in (root / folder).glob("*.py")
        if path.name not in ("__init__.py", "__main__.py")
    }
    assert {module for module in modules if module not in tree} == set()


def test_every_dependency_has_its_reason(root: Path) -> None:
    declared = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    names = {re.match(r"[\w.-]+", requirement)[0] for requirement in declared}
    text = (root / "docs" / "architecture.md").read_text(encoding="utf-8")
    documented = {name for row in rows(section(text, "## Dependencies")) for name in row[0].split(", ")}
    assert documented == names


def test_what_the_readme_names_from_python_can_be_imported(readme: str) -> None:
    names = set(re.findall(r"`(pipecomp(?:\.\w+)+)", readme))
    assert names
    for name in names:
        module, _, attribute = name.rpartition(".")
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            assert hasattr(importlib.import_module(module), attribute), name
