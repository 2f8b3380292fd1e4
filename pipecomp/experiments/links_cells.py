"""Which runs `pipecomp bench links` makes: settings, methods, rates. Knows run configurations, codecs and the ideal on paper;
runs nothing.

A setting is a published experiment without its machines: how many stages, what crosses between them, and how long each computes.
Cells come in three parts: a grid of rates and methods; the same with a delay on the way; and whole runs of several epochs whose
messages are kept on disk.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import xxhash

from pipecomp import planning, results
from pipecomp.config import RunConfig, parse_run_config
from pipecomp.errors import ConfigError
from pipecomp.runtime.rehearsal import make_codec
from pipecomp.schedules.one_f_one_b import OneFOneB
from pipecomp.types import Kind, TensorSpec
from pipecomp.units import parse_rate

_VERSION = 2
"""Goes up when the same settings would give other figures; every cell is then run again."""
UNSHAPED = "unshaped"
RATES = (UNSHAPED, "1gbit", "500mbit", "300mbit", "100mbit", "50mbit", "30mbit")
FP32 = "fp32"
METHODS: Mapping[str, tuple[int, int] | None] = {FP32: None, "fw4bw8": (4, 8), "fw3bw6": (3, 6), "fw2bw4": (2, 4)}
"""Bits of changes of activations forward, and of their gradients backward."""
TEXT, TOKENIZER = Path("examples/state-of-the-union.jsonl"), Path("examples/demo-gpt2")
PARTS = ("grid", "delays", "runs")
DELAYS_MS = (10.0, 50.0)
"""One way."""
RUNS = ((FP32, 1), ("fw3bw6", 10))
"""Methods and epochs of whole runs. A step of fp32 is the same in every epoch."""
STEPS_PER_EPOCH = 4
"""Of a whole run: as many as the text is long enough for. The first ones take all memory for the first time, so the median of
several tells how long a step is."""
_CHOSEN = ("gpt2-xl", "fw3bw6", "100mbit")
"""The cell that is run again with delays, and whose setting and rate whole runs have."""
_WARM_UPS, _FP32_WARM_UPS = 4, 1
"""Steps that do not count: first visits, and those in which workers take memory for the first time."""
_MEASURED_S, _FEWEST, _MOST = 40.0, 2, 5
"""About how long a cell's measured steps take together, and how many there are."""
_CARRIED = 0.99
"""Part of a rate that one connection carries, about."""
_NOTABLY = 1.005
"""A schedule is chosen in place of the default if the default's step is so many times as long."""


class Setting(NamedTuple):
    """What is replayed."""

    key: str
    title: str
    num_stages: int
    num_microbatches: int
    samples: int
    """In a microbatch."""
    num_rows: int
    """Tokens of a sample."""
    num_columns: int
    forward_s: float
    """Of one stage and one microbatch."""
    backward_s: float
    """Recomputing the forward pass included."""
    weights_s: float
    """The part of it that gradients of weights take, which may wait: as many multiplications as a forward pass."""
    origin: str
    """Where the times are from."""

    @property
    def batch_size(self) -> int:
        return self.num_microbatches * self.samples

    @property
    def spec(self) -> TensorSpec:
        """One sample's activation."""
        return TensorSpec(self.num_rows, self.num_columns)


SETTINGS = (
    Setting(
        "gpt2-xl", "GPT-2 XL on 8 machines, 32 microbatches of 1 x 1024 x 1600", 8, 32, 1, 1024, 1600, 0.051, 0.154, 0.051,
        "times of an eighth of the model on a V100",
    ),
    Setting(
        "deberta-xxl", "DeBERTa-v2 XXL on 8 machines, 4 microbatches of 8 x 256 x 1536", 8, 4, 8, 256, 1536, 0.094, 0.284, 0.094,
        "times of gpt2-xl, times tokens and squares of widths: 2 x (1536 / 1600)^2",
    ),
)  # fmt: skip


class Cell(NamedTuple):
    """One run."""

    setting: str
    method: str
    rate: str
    """`unshaped`, or a rate such as `100mbit`."""
    delay_ms: float = 0.0
    """One way, of everything between two hosts."""
    num_epochs: int = 0
    """Of a whole run; 0: steps of one batch, again and again."""

    @classmethod
    def of_row(cls, row: results.Row) -> Cell:
        """What a row of the result is of."""
        return cls(**{field: row[field] for field in cls._fields})

    def __str__(self) -> str:
        words = [self.setting, self.method, self.rate]
        words += [f"{self.delay_ms:g}ms"] if self.delay_ms else []
        return " ".join(words + ([f"{self.num_epochs} epochs"] if self.num_epochs else []))

    @property
    def part(self) -> str:
        """One of PARTS."""
        return "runs" if self.num_epochs else "delays" if self.delay_ms else "grid"

    @property
    def nbits_per_s(self) -> float | None:
        """What the links are told; None: they are not slowed down."""
        return rate_nbits_per_s(self.rate)


class Order(NamedTuple):
    """A cell with all that its figures depend on."""

    cell: Cell
    setting: Setting
    num_warm_up: int
    num_measured: int
    schedule: str
    """The fastest on paper at the rate that the links are told."""
    nominal_s: float
    """What a step takes with it on paper."""
    config: RunConfig
    settings: str
    """A hash of all of it."""


def cells_of(setting: Setting, rates: Sequence[str], methods: Sequence[str]) -> list[Cell]:
    """The cells of a setting with these rates and methods, in the order in which they are run."""
    chosen, method, rate = _CHOSEN
    cells = [Cell(setting.key, each, at) for at in rates for each in methods]
    if setting.key == chosen and rate in rates:
        cells += [Cell(chosen, method, rate, delay_ms) for delay_ms in DELAYS_MS if method in methods]
        cells += [Cell(chosen, each, rate, 0.0, num_epochs) for each, num_epochs in RUNS if each in methods]
    return cells


def rate_nbits_per_s(text: str) -> float | None:
    """Of `unshaped` None; of `100mbit` 1e8. Raises ConfigError."""
    return None if text == UNSHAPED else 8 * parse_rate(text, "--rates")


def find_setting(key: str, settings: Sequence[Setting] = SETTINGS) -> Setting:
    """By its key. Raises ConfigError."""
    for setting in settings:
        if setting.key == key:
            return setting
    raise ConfigError(f"--setting: there is no {key!r}; there are: {', '.join(setting.key for setting in settings)}")


def make_order(setting: Setting, cell: Cell, *, hosts: str, cluster: Mapping[str, Any]) -> Order:
    """A cell's run.

    Args:
        setting: that of the cell.
        hosts: what stands for machines, a word.
        cluster: keys of [cluster] that slow links down, where nothing else does.

    Raises:
        ConfigError: no such method, or a file that is not there.
    """
    if cell.method not in METHODS:
        raise ConfigError(f"--methods: there is no {cell.method!r}; there are: {', '.join(METHODS)}")
    for path in (TEXT, TOKENIZER):
        if not path.exists():
            raise ConfigError(f"the benchmark needs {path}: run it in the folder of the source tree")
    nbits = cell.nbits_per_s
    rate = _CARRIED * nbits / 8 if nbits else math.inf
    chosen = _choose_schedule(setting, _config(setting, cell.method, 1, cluster), rate, cell.delay_ms)
    depth = {"num_in_flight": chosen.schedule.num_in_flight} if isinstance(chosen.schedule, OneFOneB) else {}
    cluster = {"schedule": chosen.schedule.name, **depth, "num_deferred": chosen.num_deferred, **cluster}
    if cell.num_epochs:
        num_warm_up = STEPS_PER_EPOCH if cell.num_epochs > 1 else 1
        num_measured = STEPS_PER_EPOCH * cell.num_epochs - num_warm_up
        config = _config(setting, cell.method, cell.num_epochs, cluster, steps_per_epoch=STEPS_PER_EPOCH)
    else:
        num_warm_up = _FP32_WARM_UPS if METHODS[cell.method] is None else _WARM_UPS
        num_measured = min(_MOST, max(_FEWEST, math.ceil(_MEASURED_S / chosen.step.duration_s)))
        config = _config(setting, cell.method, num_warm_up + num_measured, cluster)
    described = [_VERSION, hosts, setting, nbits, num_warm_up, msgspec.to_builtins(config)]
    described[-1]["data"] |= {"train": TEXT.name, "tokenizer": TOKENIZER.name}  # wherever they are
    described += [cell.delay_ms] if cell.delay_ms else []
    settings = xxhash.xxh3_64_hexdigest(json.dumps(described, sort_keys=True).encode())
    return Order(cell, setting, num_warm_up, num_measured, chosen.label, chosen.step.duration_s, config, settings)


def _choose_schedule(setting: Setting, config: RunConfig, rate_nbytes_per_s: float, delay_ms: float) -> planning.Candidate:
    """The default, with as many gradients of weights deferred as the fastest one on paper has, unless that is faster: of equal
    ones it holds more microbatches, which evens out what is not on paper."""
    candidates = on_paper(setting, config, rate_nbytes_per_s, delay_ms=delay_ms)
    fastest = candidates[0]
    usual = [each for each in candidates if isinstance(each.schedule, OneFOneB) and each.schedule.num_in_flight is None]
    default = next(each for each in usual if each.num_deferred == fastest.num_deferred)
    return fastest if default.step.duration_s > _NOTABLY * fastest.step.duration_s else default


def _config(
    setting: Setting, method: str, num_epochs: int, cluster: Mapping[str, Any], *, steps_per_epoch: int | None = None
) -> RunConfig:
    """Without `steps_per_epoch`, every epoch is one step, so that a sample's next visit is in the next step. With it, messages
    are kept on disk."""
    bits = METHODS[method]
    forward = {"codec": "identity"} if bits is None else {"codec": "delta", "bits": bits[0]}
    backward = {"codec": "identity"} if bits is None else {"codec": "uniform", "bits": bits[1]}
    return parse_run_config(
        {
            "model": {
                "config": {
                    "model_type": "synthetic",
                    "n_layer": setting.num_stages,
                    "n_embd": setting.num_columns,
                    "n_positions": setting.num_rows,
                    "forward_s": setting.forward_s,
                    "backward_s": setting.backward_s,
                    "weights_s": setting.weights_s,
                }
            },
            "data": {
                "train": str(TEXT.resolve()),
                "tokenizer": str(TOKENIZER.resolve()),
                "max_length": setting.num_rows,
                "packing": True,
                "max_train_samples": setting.batch_size * (steps_per_epoch or 1),
                "max_eval_samples": 0,
            },
            "train": {
                "num_train_epochs": num_epochs,
                "batch_size": setting.batch_size,
                "num_microbatches": setting.num_microbatches,
                "save_model": False,
            },
            "compression": {"forward": forward, "backward": backward},
            **({"messages": {"store": "disk", "dtype": "bf16"}} if steps_per_epoch else {}),
            # Eight starts at once on a small machine take their time, and a heartbeat late there is no failure.
            "cluster": {"num_stages": setting.num_stages, "heartbeat_timeout_s": 60.0, **cluster},
        },
        f"the setting {setting.key}",
    )


# ----------------------------------------------------------------------------------------------------------- what is expected


def message_nbytes(setting: Setting, config: RunConfig, kind: Kind, *, first_visit: bool = False) -> int:
    """Payload of one microbatch on one link, by the codec's own size."""
    return setting.samples * make_codec(config, kind).encoded_nbytes(setting.spec, first_visit=first_visit)


def expected_payload(order: Order, lengths: Sequence[int]) -> dict[str, int]:
    """Bytes of all links and steps of a cell's run, by kind, if no sample is sent afresh.

    Args:
        order: of the cell.
        lengths: tokens of each sample that is trained on; the last one of a text may be short.
    """
    num_links, num_samples = order.setting.num_stages - 1, (order.num_warm_up + order.num_measured) * order.setting.batch_size
    num_epochs = num_samples // len(lengths)
    expected = {}
    for kind in (Kind.FORWARD, Kind.BACKWARD):
        codec = make_codec(order.config, kind)
        specs = [TensorSpec(length, order.setting.num_columns) for length in lengths]
        first, later = (sum(codec.encoded_nbytes(spec, first_visit=is_first) for spec in specs) for is_first in (True, False))
        expected[kind.value] = num_links * (first + (num_epochs - 1) * later)
    return expected


def on_paper(
    setting: Setting,
    config: RunConfig,
    rate_nbytes_per_s: float,
    *,
    header_nbytes: float = 0.0,
    both_ways: bool = True,
    delay_ms: float = 0.0,
) -> list[planning.Candidate]:
    """Steps on paper, the ideal one first: compute at its nominal speed, links at this goodput, nothing else.

    Args:
        rate_nbytes_per_s: what one host can send, and receive if `both_ways`.
        header_nbytes: of each message, besides its payload.
        delay_ms: of each message on its way.
    """
    link = planning.LinkCost(
        message_nbytes(setting, config, Kind.FORWARD) + header_nbytes,
        message_nbytes(setting, config, Kind.BACKWARD) + header_nbytes,
    )
    host = planning.Host(rate_nbytes_per_s, rate_nbytes_per_s if both_ways else math.inf, delay_ms / 1000)
    stage = planning.StageCost(setting.forward_s, setting.backward_s, setting.weights_s)
    return planning.compare(planning.even_setting(setting.num_stages, stage, link, host), setting.num_microbatches)
