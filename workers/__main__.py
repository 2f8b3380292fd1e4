"""`python -m workers`: one worker process. Knows its arguments; heavy modules are imported once they are parsed."""

from __future__ import annotations

import argparse
import sys


def main(arguments: list[str] | None = None) -> int:
    """Parse, run, and say in one line what went wrong."""
    parser = argparse.ArgumentParser(prog="python -m workers", description="Hold some layers of a model and train them.")
    parser.add_argument("--coordinator", required=True, metavar="HOST:PORT")
    parser.add_argument("--name", default="")
    parser.add_argument("--bind", default="0.0.0.0:0", metavar="HOST:PORT", help="data port that neighbours dial")
    parser.add_argument("--advertise", metavar="HOST[:PORT]", help="what neighbours dial, if not the address used to join")
    parser.add_argument("--model", metavar="FOLDER", help="read weights from here instead of getting them sent")
    parser.add_argument("--config-hash", default="", metavar="HASH", help="take part only in a run of this configuration")
    parser.add_argument("--threads", type=int, default=0, metavar="N", help="torch threads; 0: as many as there are cores")
    parser.add_argument("--device", choices=("cpu", "auto"), default="cpu", help="where to compute")
    parser.add_argument("--store-folder", metavar="FOLDER", help="keep messages here; default: a temporary folder")
    parser.add_argument("--message-memory", metavar="SIZE", help="memory for messages, such as 4GB; default: the run file's")
    parser.add_argument("--message-disk", metavar="SIZE", help="disk for messages; default: the run file's")
    options = parser.parse_args(arguments)

    from pipecomp.errors import PipecompError
    from workers.service import WorkerOptions, default_name, run_worker

    try:
        return run_worker(
            WorkerOptions(
                coordinator=options.coordinator,
                name=options.name or default_name(),
                bind=options.bind,
                advertise=options.advertise,
                model_folder=options.model,
                config_hash=options.config_hash,
                num_threads=options.threads,
                device=options.device,
                store_folder=options.store_folder,
                message_memory_nbytes=_size(options.message_memory, "--message-memory"),
                message_disk_nbytes=_size(options.message_disk, "--message-disk"),
            )
        )
    except PipecompError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1


def _size(text: str | None, flag: str) -> int | None:
    from pipecomp.units import parse_size

    return None if text is None else parse_size(text, flag)


if __name__ == "__main__":
    sys.exit(main())
