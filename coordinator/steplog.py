"""The step log: one JSON object a line for each thing that happened. Knows records and one file."""

from __future__ import annotations

import contextlib
import json
import logging
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from coordinator import events as e
from coordinator.ledger import Ledger
from coordinator.summary import links_of, stores_of
from pipecomp.errors import ConfigError

logger = logging.getLogger(__name__)


class StepLog:
    """Appends to a file that is emptied at the start; every line is whole on disk before the next step.

    A disk that refuses ends the log with a warning, not the run: the model is worth more.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file: IO[str] = path.open("w", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write the step log {path}: {error.strerror or error}") from error

    def write(self, record: e.Record, ledger: Ledger, now: float) -> None:
        """`ledger` has taken the record already; `now` is seconds since the run began."""
        line = _line(record, ledger)
        if not line or self._file.closed:
            return
        try:
            self._file.write(json.dumps({"time_s": round(now, 6), **line}) + "\n")
            self._file.flush()
        except OSError as error:
            logger.warning("the step log %s ends here: %s", self.path, error.strerror or error)
            self.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):  # what could not be written above
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _line(record: e.Record, ledger: Ledger) -> dict[str, Any]:
    match record:
        case e.StepCommitted():
            return {
                "event": "step",
                "step": record.step,
                "epoch": record.train_epoch,
                "loss": record.loss,
                "learning_rate": record.learning_rate,
                "gradient_norm": record.gradient_norm,
                "clip_coefficient": record.clip_coefficient,
                "samples": record.size.samples,
                "tokens": record.size.tokens,
                "step_time_s": record.step_time_s,
                "sent_bytes": ledger.step_nbytes,
                "message_bytes": sum(ledger.message_nbytes.values()),
                "links": links_of(ledger.step_links),
                "stores": stores_of(ledger.stores),
            }
        case e.MomentsFrozen(step, change):
            return {"event": "frozen", "step": step, "change": change}
        case e.StepAborted():
            return {"event": "aborted", "step": record.step, "reason": record.reason}
        case e.EvaluationEnded():
            accuracy = {} if record.accuracy is None else {"accuracy": record.accuracy}
            return {"event": "evaluation", "step": record.step, "loss": record.loss, **accuracy, "eval_time_s": record.time_s}
        case e.WorkerJoined():
            return {"event": "joined", "worker": record.worker, "host": record.host}
        case e.WorkerTurnedAway():
            return {"event": "refused", "worker": record.worker, "reason": record.reason}
        case e.StopNoted():
            return {"event": "stop"}
        case e.PhaseEntered():
            return {"event": "phase", "phase": record.phase}
        case e.ModelStored():
            return {"event": "saved", "folder": record.folder}
        case _:
            return {}
