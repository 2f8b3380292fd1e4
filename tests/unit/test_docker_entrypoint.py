"""What the container does before it becomes pipecomp, with kernels that have more or less. Needs no engine."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import pytest

from pipecomp.errors import ConfigError

ROOT = Path(__file__).parents[2]


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"docker_{name}", ROOT / "docker" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


entrypoint = load("entrypoint")
NETEM = "tc qdisc replace dev eth0 root handle 1: netem"
OUT = "handle 10: tbf rate 100000000bit burst 25000 latency 50ms"
IN = f"tc qdisc replace dev ifb0 root {OUT}"


def shaped(link: object, lacks: str = "nothing") -> tuple[list[str], list[str]]:
    """The commands that a kernel without `lacks` took, and what was said."""
    taken: list[str] = []
    said: list[str] = []

    def run(command: Sequence[str]) -> None:
        line = " ".join(command)
        if lacks in line:
            raise entrypoint.NotInKernel("Specified qdisc kind is unknown.")
        taken.append(line)

    entrypoint.shape(link, said.append, run)
    return taken, said


def link(**environment: str) -> object:
    return entrypoint.Link.from_environment(environment)


def test_a_link_without_settings_is_not_shaped() -> None:
    assert not link(LINK_RATE="", LINK_DELAY="0", LINK_LOSS="").is_shaped


def test_a_rate_shapes_both_ways() -> None:
    taken, said = shaped(link(LINK_RATE="100mbit"))
    assert taken[0] == f"tc qdisc replace dev eth0 root {OUT}"
    assert IN in taken
    assert taken[-1].endswith("action mirred egress redirect dev ifb0")
    assert said == ["link: eth0: LINK_RATE=100mbit out, LINK_RATE=100mbit in"]


@pytest.mark.parametrize(
    ("rate", "nbits_per_s", "burst"),
    [("1mbit", 10**6, 16000), ("64mbit", 64 * 10**6, 16000), ("80mbit", 80 * 10**6, 20000), ("1gbit", 10**9, 250000)],
)
def test_a_burst_is_two_milliseconds_of_the_rate_and_no_less_than_ten_frames(rate: str, nbits_per_s: int, burst: int) -> None:
    taken, _ = shaped(link(LINK_RATE=rate))
    assert f"rate {nbits_per_s}bit burst {burst} " in taken[0]


def test_delay_and_loss_come_before_the_rate() -> None:
    taken, said = shaped(link(LINK_RATE="100mbit", LINK_DELAY="5ms", LINK_LOSS="0.1%"))
    assert taken[0] == f"{NETEM} delay 5ms loss 0.1% limit 1000"
    assert taken[1] == f"tc qdisc replace dev eth0 parent 1:1 {OUT}".replace("50ms", "60ms")  # what is under way fits in too
    assert said == ["link: eth0: LINK_DELAY=5ms, LINK_LOSS=0.1%, LINK_RATE=100mbit out, LINK_RATE=100mbit in"]


def test_a_queue_holds_what_a_long_fast_link_has_under_way() -> None:
    taken, _ = shaped(link(LINK_RATE="1gbit", LINK_DELAY="150ms"))
    assert taken[0] == f"{NETEM} delay 150ms limit {round(2 * 125e6 * 0.2 / 1514)}"


def test_a_kernel_without_netem_keeps_the_rate_and_says_what_is_missing() -> None:
    taken, said = shaped(link(LINK_RATE="100mbit", LINK_DELAY="5ms", LINK_LOSS="1%"), lacks="netem")
    assert taken[0] == f"tc qdisc replace dev eth0 root {OUT}"
    assert said[0].startswith("link: LINK_DELAY=5ms and LINK_LOSS=1% not set: this kernel has no netem")
    assert said[1] == "link: eth0: LINK_RATE=100mbit out, LINK_RATE=100mbit in"


def test_a_kernel_without_ifb_shapes_what_goes_out_and_says_so() -> None:
    taken, said = shaped(link(LINK_RATE="100mbit"), lacks="type ifb")
    assert taken == [f"tc qdisc replace dev eth0 root {OUT}"]
    assert said[0].startswith("link: LINK_RATE=100mbit not set for what comes in")
    assert said[1] == "link: eth0: LINK_RATE=100mbit out"


def test_a_kernel_without_any_of_it_leaves_the_link_as_it_was() -> None:
    taken, said = shaped(link(LINK_RATE="100mbit", LINK_DELAY="5ms"), lacks="tc ")
    assert taken == []
    assert said[-1] == "link: eth0: as it was"


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"LINK_RATE": "fast"}, "LINK_RATE = 'fast': write a rate above zero such as '500kbit', '20mbit' or '1gbit'"),
        ({"LINK_RATE": "100"}, "LINK_RATE = '100': write a rate"),
        ({"LINK_DELAY": "5"}, "LINK_DELAY = '5': write milliseconds such as '5ms'"),
        ({"LINK_LOSS": "0.1"}, "LINK_LOSS = '0.1': write a part of all packets such as '1%'"),
        ({"LINK_LOSS": "100%"}, "LINK_LOSS = '100%': nothing would arrive"),
    ],
)
def test_a_setting_that_is_none_is_refused_by_name(environment: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        link(**environment)
    assert message in str(refused.value)


def program(folder: Path, says: str) -> list[str]:
    """A program that fails as tc does."""
    path = folder / "tc"
    path.write_text(f"#!/bin/sh\necho '{says}' >&2\nexit 2\n")
    path.chmod(0o755)
    return [str(path), "qdisc"]


def test_missing_rights_are_told_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--cap-add NET_ADMIN \(compose: cap_add: \[NET_ADMIN\]\)"):
        entrypoint.run(program(tmp_path, "RTNETLINK answers: Operation not permitted"))


@pytest.mark.parametrize("says", ["Error: Specified qdisc kind is unknown.", "RTNETLINK answers: Operation not supported"])
def test_what_a_kernel_lacks_is_told_apart_from_missing_rights(tmp_path: Path, says: str) -> None:
    with pytest.raises(entrypoint.NotInKernel):
        entrypoint.run(program(tmp_path, says))


def test_any_other_failure_of_tc_is_told_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Cannot find device"):
        entrypoint.run(program(tmp_path, 'Cannot find device "eth0"'))


# ------------------------------------------------------------------------------------------------------------- folders


def allow(*paths: Path) -> Callable[[Path, int], bool]:
    return lambda path, _: path in paths


def check(arguments: list[str], may: Callable[[Path, int], bool]) -> None:
    entrypoint.check_files(arguments, Path("/results"), may, 1000)


def test_a_coordinator_with_its_files_passes(tmp_path: Path) -> None:
    run_file = tmp_path / "run.toml"
    run_file.touch()
    check(["coordinator", str(run_file), "--set", "a.b=c"], allow(run_file, Path("/results")))


def test_a_run_file_that_is_not_mounted_is_told_with_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"no run file /nowhere/run.toml in this container: mount its folder, .* -v"):
        check(["coordinator", "/nowhere/run.toml"], allow(Path("/results")))


def test_a_folder_in_the_place_of_the_run_file_is_told(tmp_path: Path) -> None:
    folder = tmp_path / "run.toml"
    folder.mkdir()
    with pytest.raises(ConfigError, match="is a folder: Docker makes an empty one"):
        check(["launch", str(folder)], allow(folder, Path("/results")))


def test_a_run_file_that_may_not_be_read_is_told(tmp_path: Path) -> None:
    run_file = tmp_path / "run.toml"
    run_file.touch()
    with pytest.raises(ConfigError, match=r"user 1000 has no right to read the run file .*: chmod a\+r"):
        check(["coordinator", str(run_file)], allow(Path("/results")))


def test_results_that_may_not_be_written_are_told(tmp_path: Path) -> None:
    run_file = tmp_path / "run.toml"
    run_file.touch()
    with pytest.raises(ConfigError, match="the results folder /results cannot be written by the container's user 1000"):
        check(["coordinator", str(run_file)], allow(run_file))


def test_a_worker_needs_no_files() -> None:
    check(["worker", "--coordinator", "here:7700"], allow())


def test_results_are_written_by_whoever_owns_their_folder_but_root(tmp_path: Path) -> None:
    assert entrypoint.user_of(tmp_path / "none") == entrypoint.IMAGE_USER
    assert entrypoint.user_of(Path("/")) == entrypoint.IMAGE_USER  # root's
    if os.geteuid() == 0:
        os.chown(tmp_path, 4321, 4321)
        assert entrypoint.user_of(tmp_path) == 4321


# --------------------------------------------------------------------------------------------------------------- names


def test_a_worker_is_called_what_its_network_calls_its_address() -> None:
    def lookup(name: str) -> str:
        return {"p-worker-1": "10.0.0.2", "p-worker-3": "10.0.0.4"}[name]

    def lookup_or_fail(name: str) -> str:
        try:
            return lookup(name)
        except KeyError as error:
            raise OSError(name) from error

    assert entrypoint.container_name("p-worker", "10.0.0.4", lookup_or_fail) == "p-worker-3"
    assert entrypoint.container_name("p-worker", "10.0.0.9", lookup_or_fail) is None


@pytest.mark.parametrize("arguments", [["worker", "--name", "a"], ["worker", "--name=a"], ["coordinator", "run.toml"]])
def test_a_name_that_was_given_stays(arguments: list[str]) -> None:
    assert entrypoint.with_name(list(arguments), "p-worker") == arguments
    assert entrypoint.with_name(["worker"], "") == ["worker"]
