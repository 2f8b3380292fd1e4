"""The command line: `pipecomp launch | coordinator | worker | plan | bench`. Knows options; heavy modules are imported on use."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from pipecomp.errors import PipecompError

app = typer.Typer(
    name="pipecomp",
    help="Fine-tune language models over machines joined by slow networks.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
bench = typer.Typer(
    name="bench", help="Measure the parts of pipecomp.", no_args_is_help=True, rich_markup_mode=None, add_completion=False
)
app.add_typer(bench)

RunFile = Annotated[Path, typer.Argument(metavar="RUN.toml", help="The run file.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override a key of the run file; may be repeated.")
]
Summary = Annotated[Path | None, typer.Option(metavar="FILE", help="Write the result as one JSON object.")]
Log = Annotated[Path | None, typer.Option(metavar="FILE", help="Write the step log here, one JSON object a line.")]
Trace = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write what every worker did when, for ui.perfetto.dev or chrome://tracing.")
]
PlanFile = Annotated[
    Path | None, typer.Option("--plan", metavar="FILE", help="What `pipecomp plan --json` printed, told beside the outcome.")
]
StoreFolder = Annotated[
    str | None, typer.Option(metavar="FOLDER", help="Keep messages on disk here, and find them again. Default: a temporary one.")
]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print nothing but errors.")]


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False) -> None:
    if version:
        from pipecomp import __version__

        print(f"pipecomp {__version__}")
        raise typer.Exit


@app.command()
def launch(
    run: RunFile,
    overrides: Overrides = None,
    summary: Summary = None,
    log: Log = None,
    trace: Trace = None,
    plan_file: PlanFile = None,
    store_folder: StoreFolder = None,
    quiet: Quiet = False,
) -> None:
    """Train on this machine: a coordinator and all workers as local processes."""
    from pipecomp.config import load_run_config

    config = load_run_config(run, overrides or ())
    from pipecomp.launching import LaunchFiles, launch_run

    files = LaunchFiles(_text(summary), _text(log), _text(trace), _text(plan_file))
    _leave(launch_run(config, files, store_folder=store_folder, quiet=quiet, source=str(run)))


@app.command()
def coordinator(
    run: RunFile,
    bind: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where workers join; weights take the next port.")
    ] = "0.0.0.0:7700",
    advertise: Annotated[
        str | None, typer.Option(metavar="HOST", help="What workers dial for weights, if it is not the bound host.")
    ] = None,
    overrides: Overrides = None,
    summary: Summary = None,
    log: Log = None,
    trace: Trace = None,
    plan_file: PlanFile = None,
    quiet: Quiet = False,
) -> None:
    """Lead a run whose workers are on other machines."""
    from pipecomp.config import load_run_config

    config = load_run_config(run, overrides or ())
    from coordinator.process import CoordinatorOptions, run_coordinator
    from pipecomp.runtime.rehearsal import check_plugins

    check_plugins(config, str(run))
    options = CoordinatorOptions(
        config=config,
        bind=bind,
        advertise=advertise,
        summary=_text(summary),
        log=_text(log),
        trace=_text(trace),
        plan=_text(plan_file),
        quiet=quiet,
    )
    _leave(run_coordinator(options))


@app.command()
def worker(
    coordinator: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where the coordinator listens.")],
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Unique in the run; ranks go by name. Default: host name and process id.")
    ] = None,
    bind: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Data port that neighbours dial; port 0 takes a free one.")
    ] = "0.0.0.0:0",
    advertise: Annotated[
        str | None, typer.Option(metavar="HOST[:PORT]", help="What neighbours dial, if not the address used to join.")
    ] = None,
    model: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Read weights from this folder instead of getting them sent.")
    ] = None,
    config_hash: Annotated[
        str | None, typer.Option(metavar="HASH", help="Take part only in a run of this configuration; the coordinator prints it.")
    ] = None,
    threads: Annotated[int, typer.Option(metavar="N", min=0, help="Torch threads; 0: an even share of this host's cores.")] = 0,
    device: Annotated[str, typer.Option(metavar="cpu|auto", help="Where to compute.")] = "cpu",
    store_folder: StoreFolder = None,
    message_memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Memory for messages, such as 4GB. Default: the run file's.")
    ] = None,
    message_disk: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Disk for messages, such as 64GB. Default: the run file's.")
    ] = None,
) -> None:
    """Hold some of a model's layers and train them."""
    if device not in ("cpu", "auto"):
        raise typer.BadParameter(f"{device!r} is not supported; allowed: cpu, auto", param_hint="--device")
    from pipecomp.units import parse_size
    from workers.service import WorkerOptions, default_name, run_worker

    options = WorkerOptions(
        coordinator=coordinator,
        name=name or default_name(),
        bind=bind,
        advertise=advertise,
        model_folder=_text(model),
        config_hash=config_hash or "",
        num_threads=threads,
        device=device,
        store_folder=store_folder,
        message_memory_nbytes=None if message_memory is None else parse_size(message_memory, "--message-memory"),
        message_disk_nbytes=None if message_disk is None else parse_size(message_disk, "--message-disk"),
    )
    _leave(run_worker(options))


@app.command()
def plan(
    run: RunFile,
    figures: Annotated[
        Path | None, typer.Option(metavar="FILE", help="What the machines can do, as TOML or JSON. Default: measure this one.")
    ] = None,
    bind: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Measure the workers that join here, and the links between them."),
    ] = None,
    apart: Annotated[
        bool, typer.Option("--apart", help="Take each worker to have a machine like this one to itself.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, for --plan and for other programs.")] = False,
    overrides: Overrides = None,
) -> None:
    """Predict time, bytes and memory of a run before it trains, and say what to change."""
    if (figures is not None) + (bind is not None) + apart > 1:
        raise typer.BadParameter("choose one: each says which machines there are", param_hint="--figures, --bind, --apart")
    from pipecomp.config import load_run_config

    config = load_run_config(run, overrides or ())
    from coordinator.planning import Source, run_plan
    from coordinator.process import cache_folder
    from pipecomp.runtime.rehearsal import check_plugins

    check_plugins(config, str(run))
    source = Source(_text(figures), bind, apart)
    _leave(run_plan(config, source, as_json=json, cache_folder=cache_folder()))


@bench.command()
def store(
    json: Annotated[bool, typer.Option("--json", help="Also write the result as JSON.")] = False,
    folder: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="On the disk to measure. Default: where temporary files are.")
    ] = None,
) -> None:
    """What it costs a step to keep messages on disk, against memory."""
    from pipecomp.experiments import store as bench_store

    bench_store.run(json=json, folder=folder)


@bench.command()
def kernels(json: Annotated[bool, typer.Option("--json", help="Also write the result as JSON.")] = False) -> None:
    """Encoding and decoding speed on one thread, against copying and against torch."""
    from pipecomp.codecs import bench_kernels

    bench_kernels.run(json=json)


@bench.command()
def convergence(json: Annotated[bool, typer.Option("--json", help="Also write the result as JSON.")] = False) -> None:
    """How gradients fall with the number of steps, for SGD and AC-SGD on a small problem: about five minutes."""
    from pipecomp.experiments import convergence as experiment

    experiment.run(json=json)


@bench.command()
def plots() -> None:
    """Draw the results of docs/results as SVG files beside them."""
    from pipecomp.experiments import plots as drawings

    drawings.draw_all()


@bench.command()
def quality(
    json: Annotated[
        bool, typer.Option("--json/--no-json", help="Keep every run's figures as JSON, and train only what is not there yet.")
    ] = True,
    only: Annotated[str | None, typer.Option(metavar="a|b|c", help="One workload; all of them when left out.")] = None,
    jobs: Annotated[int | None, typer.Option(metavar="N", min=1, help="Runs at a time; one a core when left out.")] = None,
) -> None:
    """What compression costs in trained quality, against uncompressed and directly quantized runs. Takes hours."""
    from pipecomp.experiments import quality as experiment

    experiment.run(json=json, only=only, jobs=jobs)


@bench.command()
def peer(
    json: Annotated[bool, typer.Option("--json", help="Also write the result as JSON.")] = False,
    rates: Annotated[str | None, typer.Option(metavar="RATE,RATE", help="Such as unshaped,100mbit; all when left out.")] = None,
    rounds: Annotated[int, typer.Option(metavar="N", min=1, help="Turns of each system at each rate.")] = 5,
) -> None:
    """A step over slow links against torch.distributed.pipelining's, on hosts that are network namespaces. Needs root."""
    from pipecomp.experiments import peer as experiment

    experiment.run(json=json, rates=tuple(rates.split(",")) if rates else experiment.RATES, rounds=rounds)


@bench.command("plan")
def plan_accuracy(json: Annotated[bool, typer.Option("--json", help="Also write the result as JSON.")] = False) -> None:
    """The step that `pipecomp plan` says against the step that `pipecomp launch` takes, over several links. About ten minutes."""
    from pipecomp.experiments import plan_accuracy as experiment

    experiment.run(json=json)


@bench.command()
def memory(json: Annotated[bool, typer.Option("--json", help="Also write the result as JSON.")] = False) -> None:
    """Whether workers' memory grows over 2,000 steps with one of them ten times slower than the others. About five minutes."""
    from pipecomp.experiments import steady_memory as experiment

    experiment.run(json=json)


@bench.command()
def links(
    json: Annotated[
        bool, typer.Option("--json/--no-json", help="Keep every cell's figures as JSON, and run only what is not there yet.")
    ] = True,
    rates: Annotated[
        str | None, typer.Option(metavar="RATE,...", help="Some rates (unshaped, 100mbit, 1gbit); the grid when left out.")
    ] = None,
    methods: Annotated[
        str | None, typer.Option(metavar="METHOD,...", help="Some of fp32, fw4bw8, fw3bw6, fw2bw4; all of them when left out.")
    ] = None,
    setting: Annotated[
        str | None, typer.Option(metavar="gpt2-xl|deberta-xxl", help="One setting; all of them when left out.")
    ] = None,
    parts: Annotated[
        str | None, typer.Option(metavar="PART,...", help="Some of grid, delays, runs; all of them when left out.")
    ] = None,
    hosts: Annotated[str, typer.Option(metavar="namespaces|local", help="What stands for machines.")] = "namespaces",
) -> None:
    """Sequences a second over slow links against the ideal, with compute that sleeps. All of it takes about two hours.

    With fw3bw6 and 100mbit among them, also with delays of 10 and 50 ms, and a whole run of ten epochs."""
    from pipecomp.experiments import links as experiment

    path = experiment.results_of(hosts)
    experiment.run(json=json, rates=rates, methods=methods, setting=setting, parts=parts, hosts=hosts, path=path)


@bench.command()
def gradients(
    json: Annotated[
        bool, typer.Option("--json", help="Keep every cell's figures as JSON, and measure only what is not there yet.")
    ] = False,
    parts: Annotated[
        str | None, typer.Option(metavar="PART,...", help="Some of quality, replay, ddp; all of them when left out.")
    ] = None,
) -> None:
    """What compressing the gradients of replicas costs in trained quality, and what it saves over slow links.

    About two hours. The parts replay and ddp need root."""
    from pipecomp.experiments import gradients as experiment

    experiment.run(json=json, parts=parts)


@bench.command()
def errors(json: Annotated[bool, typer.Option("--json", help="Also write the result as JSON.")] = False) -> None:
    """Relative error of each quantizer at 1 to 8 bits, on made and on recorded data."""
    from pipecomp.codecs import bench_errors

    bench_errors.run(json=json)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command; a user's mistake is one line on stderr, unless PIPECOMP_DEBUG=1 asks for the traceback."""
    try:
        app(args=None if arguments is None else list(arguments), prog_name="pipecomp")
    except PipecompError as error:
        if os.environ.get("PIPECOMP_DEBUG") == "1":
            raise
        print(f"error: {error}", file=sys.stderr)
        _leave(1)
    raise AssertionError("a command returns by SystemExit")


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _leave(exit_code: int) -> NoReturn:
    """Without waiting for threads: one that reads a file or a socket would keep the process alive."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)
