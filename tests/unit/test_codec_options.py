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
        ("uniform", {"bits": 2, "group": 0}, "group = 0 is not possible; use a whole number from 1 to 1048576, or 'row'"),
        ("uniform", {"bits": 2, "group": 2**21}, "group = 2097152 is not possible; .* from 1 to 1048576"),
        ("uniform", {"bits": 2, "group": "column"}, "group = 'column'"),
        ("uniform", {"bits": 2, "scale": "fp8"}, "use one of: fp32, bf16, fp16"),
        ("uniform", {"bits": 2, "rounding": "up"}, "use one of: nearest, stochastic"),
        ("uniform", {"bits": 2, "groups": 64}, "no option 'groups'; its options are: bits, group, scale, rounding, fit"),
        ("uniform", {"bits": 2, "fit": "best"}, "use one of: extreme, least_error"),
        ("uniform", {"bits": 2, "fit": "least_error", "rounding": "stochastic"}, "would not be unbiased; use fit = 'extreme'"),
        ("uniform", {"bits": 2, "rotation": "random"}, "use one of: none, hadamard"),
        ("uniform", {"bits": 2, "rotation": "hadamard", "group": "row"}, "group = 'row' cannot be rotated; use one of: 16, 32"),
        ("uniform", {"bits": 2, "rotation": "hadamard", "group": 48}, "group = 48 cannot be rotated"),
        ("uniform", {"bits": 2, "levels": "none"}, "use one of: zero, either"),
        ("uniform", {"bits": 2, "levels": "either", "group": 64}, "needs scale = 'e4m3' and fit = 'least_error'"),
        ("uniform", {"bits": 4, "levels": "either", "fit": "extreme"}, "not 'e4m3' and 'extreme'"),
        ("uniform", {"bits": 2, "levels": "either", "rounding": "stochastic"}, "rounding = 'stochastic'"),
        ("uniform", {"bits": 2, "widths": "any"}, "use one of: equal, mixed"),
        ("uniform", {"bits": 1, "widths": "mixed"}, "widths = 'mixed' needs bits = 2 to 7, not 1"),
        ("uniform", {"bits": 8, "widths": "mixed"}, "widths = 'mixed' needs bits = 2 to 7, not 8"),
        ("uniform", {"bits": 2, "widths": "mixed", "group": 20}, "needs groups of a multiple of 8, not 20"),
        ("uniform", {"bits": 2, "widths": "mixed", "group": "row"}, "needs groups of a multiple of 8, not 'row'"),
        ("uniform", {"bits": 2, "widths": "mixed", "group": 32}, "needs scale = 'e4m3', not 'bf16'"),
        ("uniform", {"bits": 3, "widths": "mixed", "rounding": "stochastic"}, "needs rounding = 'nearest', not 'stochastic'"),
        ("uniform", {"bits": 3, "widths": "mixed", "rotation": "hadamard"}, "needs rotation = 'none', not 'hadamard'"),
        ("cast", {"dtype": "fp8"}, "use one of: bf16, fp16"),
        ("identity", {"bits": 2}, "its options are: none"),
        ("delta", {"bits": 2, "first_visit": "half"}, "first_visit = 'half' is not possible"),
        ("delta", {"bits": 2, "first_visit": {"bits": 8}}, "first_visit"),
        ("delta", {"bits": 2, "first_visit": {"codec": "delta", "bits": 8}}, "first_visit: codec 'delta' has messages"),
        ("delta", {"bits": 2, "first_visit": {"codec": "uniform"}}, "first_visit: codec 'uniform' needs bits"),
        ("delta", {"bits": 2, "first_visit": {"codec": "uniform", "bitz": 4}}, "first_visit: codec 'uniform' has no option"),
        ("delta", {"bits": 2, "first_visit": {"codec": "unifrom"}}, "first_visit: unknown codec 'unifrom'; did you mean 'unif"),
        ("delta", {"bits": 2, "first_visit": {"codec": "zip"}}, "first_visit: unknown codec 'zip'; there are: cast"),
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
    assert list(sizes.values()) == [512, 512, 256, 64 + 1 + 4]


@pytest.mark.parametrize(
    ("options", "bits_per_value", "words"),
    [
        ({"bits": 1}, 1.25, "g32/e4m3/either"),
        ({"bits": 2}, 2.25, "g32/e4m3/either"),
        ({"bits": 3}, 3.25, "g32/e4m3"),
        ({"bits": 4}, 4.25, "g32/e4m3"),
        ({"bits": 8}, 8.25, "g32/e4m3"),
        ({"bits": 2, "rounding": "stochastic"}, 2.25, "g32/e4m3/stochastic"),
        ({"bits": 2, "fit": "extreme"}, 2.25, "g32/e4m3"),
        ({"bits": 2, "group": 64}, 2.25, "g64"),
        ({"bits": 2, "scale": "bf16"}, 2.25, "g64"),
        ({"bits": 2, "group": 32}, 2.5, "g32"),
    ],
)
def test_what_is_left_out_depends_on_the_bits_unless_a_group_or_a_scale_is_named(
    options: dict[str, object], bits_per_value: float, words: str
) -> None:
    codec = build("uniform", **options)
    assert codec.describe() == f"uniform{options['bits']}/{words}"
    assert 8 * codec.encoded_nbytes(TensorSpec(1024, 1024), first_visit=True) // 1024 / 1024 == bits_per_value


def test_a_description_names_what_differs_from_the_defaults() -> None:
    words = [
        build("identity"),
        build("cast", dtype="fp16"),
        build("uniform", bits=4),
        build("delta", bits=3, group="row"),
        build("delta", bits=2, group=32, scale="fp32", rounding="stochastic"),
        build("delta", bits=2, widths="mixed"),
    ]
    assert [codec.describe() for codec in words] == [
        "identity", "fp16", "uniform4/g32/e4m3", "delta3/row", "delta2/g32/fp32/stochastic",
        "delta2/g32/e4m3/either/mixed",
    ]  # fmt: skip


def test_only_delta_has_messages() -> None:
    needed = {"uniform": {"bits": 4}, "delta": {"bits": 4}, "sparse": {"bits": 4, "top": 0.5}}
    names = registry.names("pipecomp.codecs")
    assert [name for name in names if build(name, **needed.get(name, {})).has_messages] == ["delta"]
