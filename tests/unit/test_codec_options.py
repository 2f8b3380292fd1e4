"""What a run file may say about a codec, and what it is told when it says something else."""

from __future__ import annotations

import pytest

from pipecomp import registry
from pipecomp.codecs.base import Codec
from pipecomp.errors import ConfigError
from pipecomp.types import TensorSpec


def build(name: str, **options: object) -> Codec:
    return registry.load("pipecomp.codecs", name).from_options(options)


@pytest.mark.parametrize(
    ("name", "options", "told"),
    [
        ("uniform", {}, "needs bits"),
        ("uniform", {"bits": 0}, "bits = 0 is not possible; use a whole number from 1 to 8"),
        ("uniform", {"bits": 9}, "bits = 9"),
        ("uniform", {"bits": 2.0}, "bits = 2.0"),
        ("uniform", {"bits": True}, "bits = True"),
        ("uniform", {"bits": 2, "group": 0}, "group = 0 is not possible"),
        ("uniform", {"bits": 2, "group": "column"}, "group = 'column'"),
        ("uniform", {"bits": 2, "scale": "fp8"}, "use one of: fp32, bf16, fp16"),
        ("uniform", {"bits": 2, "rounding": "up"}, "use one of: nearest, stochastic"),
        ("uniform", {"bits": 2, "groups": 64}, "no option 'groups'; its options are: bits, group, scale, rounding"),
        ("cast", {"dtype": "fp8"}, "use one of: bf16, fp16"),
        ("identity", {"bits": 2}, "its options are: none"),
        ("delta", {"bits": 2, "first_visit": "half"}, "first_visit = 'half' is not possible"),
        ("delta", {"bits": 2, "first_visit": {"bits": 8}}, "first_visit"),
        ("delta", {"bits": 2, "first_visit": {"codec": "delta", "bits": 8}}, "a codec without messages"),
        ("delta", {"bits": 2, "first_visit": {"codec": "uniform"}}, "needs bits"),
        ("delta", {"bits": 2, "first_visit": {"codec": "unknown"}}, "unknown codecs plugin 'unknown'"),
    ],
)
def test_an_impossible_option_is_named_with_what_is_allowed(name: str, options: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        build(name, **options)


def test_a_first_visit_can_go_whole_or_through_any_stateless_codec() -> None:
    spec = TensorSpec(2, 64)
    sizes = {
        str(first): build("delta", bits=2, first_visit=first).encoded_nbytes(spec, first_visit=True)
        for first in ("whole", {"codec": "identity"}, {"codec": "cast"}, {"codec": "uniform", "bits": 4})
    }
    assert list(sizes.values()) == [512, 512, 256, 64 + 4]


def test_a_description_names_what_differs_from_the_defaults() -> None:
    words = [
        build("identity"),
        build("cast", dtype="fp16"),
        build("uniform", bits=4),
        build("delta", bits=3, group="row"),
        build("delta", bits=2, group=32, scale="fp32", rounding="stochastic"),
    ]
    assert [codec.describe() for codec in words] == [
        "identity", "fp16", "uniform4/g64", "delta3/row", "delta2/g32/fp32/stochastic",
    ]  # fmt: skip


def test_only_delta_has_messages() -> None:
    needed = {"uniform": {"bits": 4}, "delta": {"bits": 4}}
    names = registry.names("pipecomp.codecs")
    assert [name for name in names if build(name, **needed.get(name, {})).has_messages] == ["delta"]
