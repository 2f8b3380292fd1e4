"""The container's first process: shapes the link, drops root's rights, becomes pipecomp. Knows the environment, tc(8), ip(8) and
the folders of the container; nothing of training.

    eth0  --- sends ----> netem (LINK_DELAY, LINK_LOSS) -> tbf (LINK_RATE) -> the network
          <-- receives -- tbf (LINK_RATE) on ifb0 <------------------------- the network

What this kernel cannot do is said on standard error, and the rest is done. What the user can change is an error.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

from pipecomp.errors import ConfigError
from pipecomp.testing.shaping import AT_ROOT, BEHIND_DELAY, LinkShape, delay_command, rate_command
from pipecomp.units import parse_rate

DEVICE = "eth0"
MIRROR = "ifb0"  # what comes in is queued here, as if it were sent
IMAGE_USER = 10001
RESULTS = Path("/results")

_DURATION = re.compile(r"(\d+(?:\.\d+)?)ms")
_PERCENT = re.compile(r"(\d+(?:\.\d+)?)%")
_MAX_WORKERS = 256


class Link(NamedTuple):
    """What a container's link shall be like: the rate each way, delay and loss on the way out."""

    rate: str = ""  # as it was written: 100mbit
    shape: LinkShape = LinkShape()

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Link:
        """LINK_RATE, LINK_DELAY, LINK_LOSS; empty is unset. Raises ConfigError."""
        rate = environment.get("LINK_RATE", "").strip().lower()
        nbits_per_s = 8 * parse_rate(rate, "LINK_RATE") if rate else None
        delay_ms = _number(environment, "LINK_DELAY", _DURATION, "milliseconds such as '5ms' or '12.5ms'")
        percent = _number(environment, "LINK_LOSS", _PERCENT, "a part of all packets such as '1%' or '0.1%'")
        if percent >= 100:
            raise ConfigError(f"LINK_LOSS = {environment['LINK_LOSS']!r}: nothing would arrive; write less than '100%'")
        return cls(rate, LinkShape(nbits_per_s, delay_ms / 1e3, percent / 100))

    @property
    def is_shaped(self) -> bool:
        return self.shape != LinkShape()

    @property
    def behind_netem(self) -> list[str]:
        """What netem has to do, as the user would write it."""
        delay = [f"LINK_DELAY={1e3 * self.shape.delay_s:g}ms"] if self.shape.delay_s else []
        return [*delay, *([f"LINK_LOSS={100 * self.shape.loss:g}%"] if self.shape.loss else [])]


def _number(environment: Mapping[str, str], key: str, pattern: re.Pattern[str], allowed: str) -> float:
    text = environment.get(key, "").strip()
    if text in ("", "0"):
        return 0.0
    match = pattern.fullmatch(text.lower())
    if match is None:
        raise ConfigError(f"{key} = {text!r}: write {allowed}, or leave it out")
    return float(match[1])


# ------------------------------------------------------------------------------------------------------------ the link


class NotInKernel(Exception):
    """This kernel lacks what a command asks for."""


def run(command: Sequence[str]) -> None:
    """Run one tc or ip command. Raises NotInKernel, ConfigError."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return
    said = " ".join(done.stderr.split())
    if re.search(r"not permitted|permission denied", said, re.IGNORECASE):
        raise ConfigError(
            "LINK_RATE, LINK_DELAY and LINK_LOSS need the right to shape this container's network: start it as root with "
            "--cap-add NET_ADMIN (compose: cap_add: [NET_ADMIN]), or leave them out"
        )
    if re.search(r"unknown|not found|not supported|no such file", said, re.IGNORECASE):
        raise NotInKernel(said)
    raise ConfigError(f"the link cannot be shaped: {' '.join(command)}: {said}")


def shape(
    link: Link, say: Callable[[str], None], run: Callable[[Sequence[str]], None] = run, *, has_mirror: bool = False
) -> None:
    """Shape both ways, as far as the kernel can, and say what has been set and what has not. Raises ConfigError.

    On the network of a machine that shaped before (`--network host`), the mirror is there already.
    """
    done, parent = [], AT_ROOT
    if wanted := link.behind_netem:
        try:
            run(["tc", *delay_command(DEVICE, link.shape)])
            parent = BEHIND_DELAY
            done += wanted
        except NotInKernel as error:
            say(f"link: {' and '.join(wanted)} not set: this kernel has no netem ({error})")
    if (rate := link.shape.rate_nbits_per_s) is not None:
        try:
            delay_s = link.shape.delay_s if parent == BEHIND_DELAY else 0.0
            run(["tc", *rate_command(DEVICE, rate, parent, delay_s=delay_s)])
            done.append(f"LINK_RATE={link.rate} out")
        except NotInKernel as error:
            say(f"link: LINK_RATE={link.rate} not set: this kernel has no tbf ({error})")
        else:
            try:
                for command in _mirror(rate, has_mirror=has_mirror):
                    run(command)
                done.append(f"LINK_RATE={link.rate} in")
            except NotInKernel as error:
                say(
                    f"link: LINK_RATE={link.rate} not set for what comes in: this kernel has no ifb, or cannot mirror to it "
                    f"({error}). Each sender keeps to its own rate; several at once are not held back here"
                )
    say(f"link: {DEVICE}: {', '.join(done) or 'as it was'}")


def _mirror(rate_nbits_per_s: float, *, has_mirror: bool) -> list[list[str]]:
    """The rate of what comes in: all of it takes a detour over a device that has a queue."""
    redirect = ["u32", "match", "u32", "0", "0", "action", "mirred", "egress", "redirect", "dev", MIRROR]
    added = [] if has_mirror else [["ip", "link", "add", MIRROR, "type", "ifb"]]
    return [
        *added,
        ["ip", "link", "set", MIRROR, "up"],
        ["tc", *rate_command(MIRROR, rate_nbits_per_s)],
        ["tc", "qdisc", "replace", "dev", DEVICE, "handle", "ffff:", "ingress"],
        ["tc", "filter", "replace", "dev", DEVICE, "parent", "ffff:", "protocol", "all", "prio", "1", *redirect],
    ]


# ------------------------------------------------------------------------------------------------- folders and rights


def user_of(results: Path) -> int:
    """Who the container becomes: whoever owns the results, so that they are the user's own; the image's user instead of root."""
    owner = results.stat().st_uid if results.exists() else 0
    return owner or IMAGE_USER


def check_files(arguments: Sequence[str], results: Path, may: Callable[[Path, int], bool], user: int) -> None:
    """Find out now, and in words of containers, what a coordinator would find out later. Raises ConfigError."""
    if not arguments or arguments[0] not in ("coordinator", "launch"):
        return
    for argument in arguments[1:]:
        if argument.endswith(".toml") and not argument.startswith("-"):
            _check_run_file(Path(argument), may, user)
    if not may(results, os.W_OK | os.X_OK):
        raise ConfigError(
            f"the results folder {results} cannot be written by the container's user {user}: give the folder on the host to that "
            f"user (chown {user}) or to one of your own, do not mount it read-only, or mount a volume"
        )


def _check_run_file(path: Path, may: Callable[[Path, int], bool], user: int) -> None:
    if path.is_dir():
        raise ConfigError(f"the run file {path} is a folder: Docker makes an empty one when the file to mount is not on the host")
    if not path.exists():
        raise ConfigError(
            f"there is no run file {path} in this container: mount its folder, for example -v \"$PWD\":/run-folder:ro "
            "(compose: RUN_FOLDER=./folder RUN_FILE=name.toml)"
        )
    if not may(path, os.R_OK):
        raise ConfigError(f"the container's user {user} has no right to read the run file {path}: chmod a+r it on the host")


def may_as(user: int) -> Callable[[Path, int], bool]:
    """Whether a user may, asked of the kernel as that user."""

    def may(path: Path, mode: int) -> bool:
        if os.geteuid() != 0:
            return os.access(path, mode)
        os.setegid(user)
        os.seteuid(user)
        try:
            return os.access(path, mode, effective_ids=True)
        finally:
            os.seteuid(0)
            os.setegid(0)

    return may


# ------------------------------------------------------------------------------------------------------------- the name


def container_name(prefix: str, own_address: str, lookup: Callable[[str], str]) -> str | None:
    """PREFIX-1, PREFIX-2, ...: the one whose address is this container's, as its network's names say."""
    for number in range(1, _MAX_WORKERS + 1):
        name = f"{prefix}-{number}"
        try:
            if lookup(name) == own_address:
                return name
        except OSError:
            continue  # a number that is not used
    return None


def with_name(arguments: list[str], prefix: str) -> list[str]:
    """A worker without a name gets its container's, so that an error names what `docker ps` shows."""
    if not prefix or arguments[:1] != ["worker"] or any(word.split("=")[0] == "--name" for word in arguments):
        return arguments
    own = socket.gethostbyname(socket.gethostname())
    name = container_name(prefix, own, socket.gethostbyname)
    return arguments if name is None else [*arguments, "--name", name]


# ------------------------------------------------------------------------------------------------------------------ main


def become_pipecomp(arguments: Sequence[str], user: int) -> NoReturn:
    command = ["pipecomp", *arguments]
    if os.geteuid() == 0:
        drop = ["--reuid", str(user), "--regid", str(user), "--clear-groups", "--inh-caps=-all", "--bounding-set=-all"]
        command = ["setpriv", *drop, "--no-new-privs", *command]
    os.execvp(command[0], command)  # noqa: S606 - the arguments are the user's own, and no shell reads them


def main(arguments: list[str]) -> int:
    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    try:
        link = Link.from_environment(os.environ)
        user = user_of(RESULTS) if os.geteuid() == 0 else os.geteuid()
        check_files(arguments, RESULTS, may_as(user), user)
        if link.is_shaped:
            shape(link, say, has_mirror=Path("/sys/class/net", MIRROR).exists())
    except ConfigError as error:
        say(f"error: {error}")
        return 1
    become_pipecomp(with_name(arguments, os.environ.get("CONTAINER_PREFIX", "")), user)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
