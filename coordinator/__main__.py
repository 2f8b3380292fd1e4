"""`python -m coordinator`: one coordinator process. Knows its arguments; heavy modules are imported once they are parsed."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from pipecomp.config import load_run_config
from pipecomp.errors import PipecompError


def main(arguments: list[str] | None = None) -> int:
    """Parse, run, and say in one line what went wrong."""
    parser = argparse.ArgumentParser(prog="python -m coordinator", description="Lead a training run.")
    parser.add_argument("run", metavar="RUN.toml")
    parser.add_argument("--bind", default="127.0.0.1:0", metavar="HOST:PORT", help="control port; weights take the next one")
    parser.add_argument("--advertise", metavar="HOST", help="what workers dial for weights, if it is not the bound host")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--summary", metavar="FILE")
    parser.add_argument("--log", metavar="FILE")
    parser.add_argument("--trace", metavar="FILE")
    parser.add_argument("--plan", metavar="FILE")
    parser.add_argument("--quiet", action="store_true")
    options = parser.parse_args(arguments)
    try:
        config = load_run_config(Path(options.run), options.overrides)
        from coordinator.process import CoordinatorOptions, run_coordinator
        from pipecomp.runtime.rehearsal import check_plugins

        check_plugins(config, options.run)
        return run_coordinator(
            CoordinatorOptions(
                config=config,
                bind=options.bind,
                advertise=options.advertise,
                summary=options.summary,
                log=options.log,
                trace=options.trace,
                plan=options.plan,
                quiet=options.quiet,
            )
        )
    except PipecompError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a thread that still reads would keep the process alive
