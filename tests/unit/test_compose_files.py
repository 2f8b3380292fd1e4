"""compose.yaml, and compose.replicas.yaml laid over it: what they start fits together. Needs no engine."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from pipecomp.cli import app
from pipecomp.config import RunConfig, load_run_config

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
REPLICAS = "compose.replicas.yaml"
FILES = ("compose.yaml", REPLICAS)


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def services_of(name: str) -> dict[str, Any]:
    services: dict[str, Any] = yaml.safe_load(text_of(name))["services"]
    return services


def filled_in(text: str, **environment: str) -> str:
    """`${NAME:-default}` as compose reads it."""
    return re.sub(r"\$\{(\w+):-([^{}]*)\}", lambda found: environment.get(found[1]) or found[2], text)


def run_of(name: str, **environment: str) -> RunConfig:
    """The run that the coordinator of a compose file trains."""
    command, path, *options = [filled_in(word, **environment) for word in services_of(name)["coordinator"]["command"]]
    assert command == "coordinator"
    settings = [option.removeprefix("--set=") for option in options if option.startswith("--set=")]
    return load_run_config(EXAMPLES / Path(path).name, settings)


def num_workers(**environment: str) -> int:
    return int(filled_in(str(services_of("compose.yaml")["worker"]["deploy"]["replicas"]), **environment))


def test_an_override_changes_nothing_but_the_coordinators_command() -> None:
    assert {name: list(service) for name, service in services_of(REPLICAS).items()} == {"coordinator": ["command"]}
    assert yaml.safe_load(text_of(REPLICAS)).keys() == {"services"}


def test_each_file_waits_for_as_many_workers_as_there_are() -> None:
    for name, shape in ((FILES[0], (1, 4)), (REPLICAS, (2, 2))):
        cluster = run_of(name).cluster
        assert (cluster.num_replicas, cluster.num_stages) == shape
        assert cluster.num_replicas * cluster.num_stages == num_workers()


def test_the_command_that_an_override_names_starts_all_its_workers() -> None:
    [line] = [line for line in text_of(REPLICAS).splitlines() if "WORKERS=" in line]
    environment = dict(re.findall(r"(\w+)=(\d+)", line))
    cluster = run_of(REPLICAS, **environment).cluster
    assert cluster.num_replicas * cluster.num_stages == num_workers(**environment) == 8


@pytest.mark.parametrize("name", FILES)
def test_every_option_of_a_coordinator_is_one_that_it_has(name: str) -> None:
    command: Any = typer.main.get_command(app)
    known = {option for parameter in command.commands["coordinator"].params for option in parameter.opts}
    words = services_of(name)["coordinator"]["command"]
    assert {word.partition("=")[0] for word in words if word.startswith("--")} <= known
    assert "--summary=/results/summary.json" in words


def test_every_variable_is_documented() -> None:
    used = {name for file in FILES for name in re.findall(r"\$\{(\w+)[:}]", text_of(file))} - {"COMPOSE_PROJECT_NAME"}
    table = set(re.findall(r"^\| `(\w+)`|, `(\w+)` \|", text_of("docs/docker.md"), re.MULTILINE))
    assert used <= {name for pair in table for name in pair if name}


def test_compose_itself_lays_one_file_over_the_other() -> None:
    """`docker compose config` needs no engine."""
    command = ["docker", "compose", *(word for name in FILES for word in ("-f", name)), "config"]
    if shutil.which("docker") is None or subprocess.run([*command[:2], "version"], capture_output=True, check=False).returncode:
        pytest.skip("docker compose is not installed")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    services = yaml.safe_load(done.stdout)["services"]
    assert "--set=cluster.num_replicas=2" in services["coordinator"]["command"]
    assert services["coordinator"]["cap_add"] == services["worker"]["cap_add"] == ["NET_ADMIN"]
    assert services["coordinator"]["environment"]["LINK_RATE"] == services["worker"]["environment"]["LINK_RATE"] == "100mbit"
    assert services["worker"]["deploy"]["replicas"] == 4
