"""What a person watches: a progress bar on a terminal, plain lines elsewhere. Knows records and text; no sockets and no files."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, TextIO

from coordinator import events as e
from coordinator.ledger import Ledger
from coordinator.summary import format_duration, format_nbytes

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class Console(Protocol):
    """Where a run is shown."""

    def say(self, text: str) -> None:
        """Print some lines for good."""

    def begin(self, total_steps: int, logging_steps: int) -> None:
        """Training is about to start."""

    def show(self, record: e.Record, ledger: Ledger) -> None:
        """`ledger` has taken the record already."""

    def close(self) -> None:
        """Leave the terminal as it was."""


class PlainConsole:
    """One line for each thing that is worth one. Goes on in silence once nobody reads (`| head`): the run is worth more."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream if stream is not None else sys.stdout
        self._total_steps = 0
        self._logging_steps = 1

    def say(self, text: str) -> None:
        try:
            print(text, file=self._stream, flush=True)
        except OSError:
            silence = os.open(os.devnull, os.O_WRONLY)
            os.dup2(silence, self._stream.fileno())  # so that neither what is buffered nor anybody else fails again
            os.close(silence)

    def begin(self, total_steps: int, logging_steps: int) -> None:
        self._total_steps, self._logging_steps = total_steps, logging_steps

    def show(self, record: e.Record, ledger: Ledger) -> None:
        if isinstance(record, e.StepCommitted):
            if record.step % self._logging_steps == 0 or record.step == self._total_steps:
                self.say(step_line(record, ledger, self._total_steps))
        elif text := record_line(record):
            self.say(text)

    def close(self) -> None:
        self._stream.flush()


class QuietConsole:
    """Shows nothing; errors are told by whoever started the run."""

    def say(self, text: str) -> None:
        pass

    def begin(self, total_steps: int, logging_steps: int) -> None:
        pass

    def show(self, record: e.Record, ledger: Ledger) -> None:
        pass

    def close(self) -> None:
        pass


class BarConsole:
    """A progress bar under the lines."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self._progress: Progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=10),  # all of it fits into 80 columns
            TextColumn("{task.description}", markup=False),
            transient=True,
        )
        self._task: TaskID | None = None
        self._total_steps = 0

    def say(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def begin(self, total_steps: int, logging_steps: int) -> None:
        self._total_steps = total_steps
        self._progress.start()
        self._task = self._progress.add_task("", total=total_steps)

    def show(self, record: e.Record, ledger: Ledger) -> None:
        if isinstance(record, e.StepCommitted) and self._task is not None:
            text = "  ".join(_measures(record, ledger, self._total_steps)[index] for index in _ON_BAR)
            self._progress.update(self._task, completed=record.step, description=text)
        elif text := record_line(record):
            self.say(text)

    def close(self) -> None:
        self._progress.stop()


def open_console(*, quiet: bool) -> Console:
    """The console that fits where standard output goes."""
    if quiet:
        return QuietConsole()
    return BarConsole() if sys.stdout.isatty() else PlainConsole()


def step_line(record: e.StepCommitted, ledger: Ledger, total_steps: int) -> str:
    """One step in one line."""
    return f"step {record.step}/{total_steps}  " + "  ".join(_measures(record, ledger, total_steps))


_ON_BAR = (0, 3, 4, 5)
"""Loss, speed, bytes and time left; the rest is in the step log."""


def _measures(record: e.StepCommitted, ledger: Ledger, total_steps: int) -> Sequence[str]:
    return (
        f"loss {record.loss:.4f}",
        f"lr {record.learning_rate:.2e}",
        f"norm {record.gradient_norm:.3f}",
        f"{ledger.tokens_per_s:.0f} tokens/s",
        f"{format_nbytes(ledger.step_nbytes)}/step",
        f"ETA {format_duration(ledger.eta_s(total_steps, record.step))}",
    )


_PHASES = {
    "waiting": "waiting for workers",
    "loading": "workers load their weights",
    "collecting": "collecting the trained weights",
}


def record_line(record: e.Record) -> str:
    """One line for people; empty for what is not worth one."""
    match record:
        case e.WorkerJoined():
            return f"{record.worker} joined from {record.host} ({record.num_joined} of {record.num_workers})"
        case e.WorkerTurnedAway():
            return f"refused: {record.reason}"
        case e.MomentsFrozen(step, change):
            why = "as train.optim_warmup_steps says" if change is None else f"they changed by {change:.1%} lately"
            return f"warm-up of quantized_adam: second moments stay as after step {step} ({why})"
        case e.StepAborted():
            return f"step {record.step} aborted: {record.reason}"
        case e.EvaluationEnded():
            accuracy = "" if record.accuracy is None else f", accuracy {record.accuracy:.4f},"
            return f"held-out loss {record.loss:.4f}{accuracy} after {record.step} steps ({record.size.samples} samples)"
        case e.ModelStored():
            return f"model saved to {record.folder}"
        case e.StopNoted():
            return "stopping after the step under way; Ctrl-C again stops at once and saves nothing"
        case e.PhaseEntered():
            return _PHASES.get(record.phase, "")
        case _:
            return ""
