"""Codecs and schedule of a run file, and kernels made ready before the first step, so that compiling or loading them
delays no step and no heartbeat. Knows the run's settings; no links."""

from __future__ import annotations

import numpy as np
import torch

from pipecomp import registry
from pipecomp.buffers.formats import MessageFormat
from pipecomp.codecs.base import Codec
from pipecomp.config import RunConfig
from pipecomp.errors import ConfigError
from pipecomp.native import ops
from pipecomp.schedules.base import Schedule
from pipecomp.types import Kind, TensorSpec

CODED_KINDS = (Kind.FORWARD, Kind.BACKWARD, Kind.EVALUATION, Kind.TIED, Kind.GRADIENTS)
"""Kinds of traffic whose codec the run file names."""


def make_codec(config: RunConfig, kind: Kind) -> Codec:
    """The codec that the run file gives a kind of traffic. Raises ConfigError for a name or option that is not known."""
    options = dict(getattr(config.compression, kind.value))
    try:
        codec: Codec = registry.load("pipecomp.codecs", options.pop("codec")).from_options(options)
    except ConfigError as e:
        raise ConfigError(f"compression.{kind.value}: {e}") from e
    if codec.has_messages and kind is not Kind.FORWARD:  # nothing commits or aborts messages of other kinds
        raise ConfigError(
            f"compression.{kind.value}: codec {codec.name!r} remembers messages, which only forward activations have; "
            "choose a codec without them"
        )
    return codec


def make_schedule(config: RunConfig) -> Schedule:
    """The schedule that the run file names. Raises ConfigError for a name or option that is not known."""
    cluster = config.cluster
    options = {} if cluster.num_in_flight is None else {"num_in_flight": cluster.num_in_flight}
    try:
        schedule: Schedule = registry.load("pipecomp.schedules", cluster.schedule).from_options(options)
    except ConfigError as e:
        raise ConfigError(f"cluster.schedule = {cluster.schedule!r}: {e}") from e
    return schedule


def check_plugins(config: RunConfig, source: str) -> None:
    """See that the run file `source` names codecs and a schedule that there are. Raises ConfigError that begins with it."""
    try:
        make_schedule(config)
        for kind in CODED_KINDS:
            make_codec(config, kind)
    except ConfigError as e:
        raise ConfigError(f"{source}: {e}") from e


def rehearse_codecs(config: RunConfig, num_columns: int) -> None:
    """Compile, or load, every kernel that the run will call on samples of `num_columns` features."""
    for kind in CODED_KINDS:
        codec = make_codec(config, kind)
        if kind is not Kind.GRADIENTS:
            codec.warm_up(num_columns)
        elif config.cluster.num_replicas > 1:
            _rehearse_feedback(codec)
    MessageFormat(config.messages.dtype).warm_up()
    values = np.ones(num_columns, np.float32)
    for message in (None, values):
        ops.squared_norms(values, message, values)


def _rehearse_feedback(codec: Codec) -> None:
    """A first and a second time: only the second has an error to feed back."""
    gradients, error = torch.ones(1, 1024), None
    out = np.empty(codec.encoded_nbytes(TensorSpec(1, 1024), first_visit=True), np.uint8)
    for _ in range(2):
        error = codec.encode_with_feedback(gradients, error, seed=0, out=out)
    codec.encode(gradients, None, seed=0, out=out)
    codec.decode(out, None, TensorSpec(1, 1024))
