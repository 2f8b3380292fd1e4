"""Every codec that the registry finds passes the public suite, with its defaults and with its options."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from pipecomp import registry
from pipecomp.codecs.base import Codec
from pipecomp.errors import ConfigError
from pipecomp.testing.codec_checks import check_codec

PACKAGE = "pipecomp.codecs"
NEEDED: Mapping[str, Mapping[str, object]] = {
    "uniform": {"bits": 4},
    "delta": {"bits": 4},
    "sparse": {"bits": 4, "top": 0.25},
}
OPTIONS: list[tuple[str, Mapping[str, object]]] = [
    ("cast", {"dtype": "fp16"}),
    ("uniform", {"bits": 3, "group": "row", "scale": "fp16", "rounding": "stochastic"}),
    ("uniform", {"bits": 8, "group": 32, "scale": "fp32"}),
    ("uniform", {"bits": 2, "rotation": "hadamard"}),
    ("uniform", {"bits": 3, "group": 16, "scale": "e4m3", "rounding": "stochastic"}),
    ("uniform", {"bits": 3, "group": 16, "scale": "e4m3", "widths": "mixed"}),
    ("delta", {"bits": 2, "widths": "mixed"}),
    ("delta", {"bits": 3, "group": 16, "scale": "fp16", "fit": "least_error", "rotation": "hadamard"}),
    ("delta", {"bits": 2, "group": 24, "first_visit": "whole"}),
    ("delta", {"bits": 2, "rounding": "stochastic", "first_visit": {"codec": "cast", "dtype": "bf16"}}),
    ("sparse", {"bits": 4, "random": 0.3}),
    ("sparse", {"bits": 3, "top": 0.1, "random": 0.5, "rounding": "stochastic"}),
    ("sparse", {"bits": 2, "top": 0.05}),
    ("sparse", {"bits": 8, "top": 0.999, "group": "row", "scale": "fp32"}),
]


def build(name: str, options: Mapping[str, object]) -> Codec:
    codec = registry.load(PACKAGE, name).from_options(options)
    assert isinstance(codec, Codec)
    assert codec.name == name
    return codec


@pytest.mark.parametrize("name", registry.names(PACKAGE))
def test_codec_keeps_its_promises(name: str) -> None:
    check_codec(build(name, NEEDED.get(name, {})))


@pytest.mark.parametrize(("name", "options"), OPTIONS, ids=str)
def test_codec_with_options_keeps_its_promises(name: str, options: Mapping[str, object]) -> None:
    check_codec(build(name, options))


@pytest.mark.parametrize("name", registry.names(PACKAGE))
def test_an_unknown_option_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match="bitz"):
        registry.load(PACKAGE, name).from_options({**NEEDED.get(name, {}), "bitz": 3})
