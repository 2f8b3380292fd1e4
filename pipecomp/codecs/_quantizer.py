"""The options that `uniform` and `delta` share, and the buffer they make: scales, then codes. Knows arrays and kernels.

buffer = [ one scale for each group | packed codes ]        both at any byte, sizes from `native.ops`
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Self, cast, get_args

import numpy as np
import numpy.typing as npt

from pipecomp.codecs._options import choice, integer
from pipecomp.errors import ConfigError
from pipecomp.native import ops
from pipecomp.types import TensorSpec

OPTIONS = ("bits", "group", "scale", "rounding", "fit", "rotation", "levels", "widths")
DEFAULT_GROUP, DEFAULT_SCALE = 32, "e4m3"
"""Where a run file names neither: what trained best at equal bits; docs/numerics.md has the evidence."""
OTHER_GROUP, OTHER_SCALE = 64, "bf16"
"""The one that is left out where it names the other, as it always was."""
EITHER_UP_TO = 2
"""Bits up to which a group has, by default, a zero level or levels at half steps, whichever errs less; it takes more time."""
MAX_GROUP = 1 << 20


class Quantizer(NamedTuple):
    """Options that `uniform` and `delta` share, and the calls of the kernels with them."""

    bits: int
    group: int | None  # None: one scale for each row of the sample
    scale: ops.Scale
    rounding: ops.Rounding
    fit: ops.Fit
    rotation: ops.Rotation
    levels: ops.Levels
    widths: ops.Widths

    @classmethod
    def from_options(cls, codec: str, options: Mapping[str, object]) -> Self:
        """Read these options; the other keys are the caller's. Raises ConfigError naming the option."""
        is_default = "group" not in options and "scale" not in options
        group = options.get("group", DEFAULT_GROUP if is_default else OTHER_GROUP)
        if isinstance(group, bool) or not (group == "row" or (isinstance(group, int) and 1 <= group <= MAX_GROUP)):
            raise ConfigError(
                f"codec {codec!r}: group = {group!r} is not possible; use a whole number from 1 to {MAX_GROUP}, or 'row'"
            )

        def word(key: str, allowed: object, default: str) -> str:
            return choice(codec, options, key, get_args(allowed), default)

        bits = integer(codec, options, "bits", 1, 8, None)
        rounding = word("rounding", ops.Rounding, "nearest")
        may_choose = is_default and bits <= EITHER_UP_TO and rounding == "nearest" and options.get("fit") != "extreme"
        levels = word("levels", ops.Levels, "either" if may_choose else "zero")
        chosen = cls(
            bits=bits,
            group=cast("int", group) if group != "row" else None,
            scale=cast("ops.Scale", word("scale", ops.Scale, DEFAULT_SCALE if is_default else OTHER_SCALE)),
            rounding=cast("ops.Rounding", rounding),
            fit=cast("ops.Fit", word("fit", ops.Fit, "least_error" if levels == "either" else "extreme")),
            rotation=cast("ops.Rotation", word("rotation", ops.Rotation, "none")),
            levels=cast("ops.Levels", levels),
            widths=cast("ops.Widths", word("widths", ops.Widths, "equal")),
        )
        chosen._check(codec)
        return chosen

    def _check(self, codec: str) -> None:
        """What the kernels do not do together, told in the words of a run file."""
        if self.fit == "least_error" and self.rounding == "stochastic":
            raise ConfigError(
                f"codec {codec!r}: fit = 'least_error' clips, so rounding = 'stochastic' would not be unbiased; "
                "use fit = 'extreme'"
            )
        if self.levels == "either" and (self.scale, self.fit) != ("e4m3", "least_error"):
            raise ConfigError(
                f"codec {codec!r}: levels = 'either' needs scale = 'e4m3' and fit = 'least_error', "
                f"not {self.scale!r} and {self.fit!r}"
            )
        if self.rotation == "hadamard" and self.group not in ops.ROTATED_GROUPS:
            raise ConfigError(
                f"codec {codec!r}: group = {self.group or 'row'!r} cannot be rotated; "
                f"use one of: {', '.join(map(str, ops.ROTATED_GROUPS))}"
            )
        if self.widths == "mixed":
            self._check_mixed(codec)

    def _check_mixed(self, codec: str) -> None:
        least, most = ops.MIXED_BITS[0], ops.MIXED_BITS[-1]
        if self.bits not in ops.MIXED_BITS:
            raise ConfigError(f"codec {codec!r}: widths = 'mixed' needs bits = {least} to {most}, not {self.bits}")
        if self.group is None or self.group % ops.MIXED_GROUP:
            raise ConfigError(
                f"codec {codec!r}: widths = 'mixed' needs groups of a multiple of {ops.MIXED_GROUP}, not {self.group or 'row'!r}"
            )
        needed: dict[str, str] = {"scale": "e4m3", "rounding": "nearest", "rotation": "none"}
        for key, value in needed.items():
            if getattr(self, key) != value:
                raise ConfigError(
                    f"codec {codec!r}: widths = 'mixed' needs {key} = {value!r}, not {getattr(self, key)!r}"
                )

    def layout(self, spec: TensorSpec) -> ops.Layout:
        """Of the kernels, for a sample of this shape."""
        group = max(spec.num_columns, 1) if self.group is None else self.group
        return ops.Layout(self.bits, group, self.scale, self.rounding, self.fit, self.rotation, self.levels, self.widths)

    def nbytes(self, spec: TensorSpec) -> int:
        """Exact size of the buffer."""
        return ops.payload_nbytes(spec.num_values, self.layout(spec))

    def encode(
        self,
        values: npt.NDArray[np.float32],
        message_in: npt.NDArray[np.float32] | None,
        message_out: npt.NDArray[np.float32] | None,
        spec: TensorSpec,
        seed: int,
        out: npt.NDArray[np.uint8],
    ) -> None:
        """See `ops.encode`; flat arrays, `out` of `nbytes(spec)`."""
        ops.encode(
            values,
            self.layout(spec),
            out=out,
            message_in=message_in,
            message_out=message_out,
            seed=seed,
        )

    def decode(
        self,
        buffer: npt.NDArray[np.uint8],
        message_in: npt.NDArray[np.float32] | None,
        spec: TensorSpec,
        out: npt.NDArray[np.float32],
    ) -> None:
        """See `ops.decode`; flat arrays. Raises CorruptPayload if `buffer` is not of `nbytes(spec)`."""
        ops.decode(buffer, self.layout(spec), out=out, message_in=message_in)

    def warm_up(self, num_columns: int, *, has_message: bool) -> None:
        """Compile, or load, the kernels that `encode` and `decode` call."""
        ops.warm_up(self.layout(TensorSpec(1, num_columns)), has_message=has_message)

    def __str__(self) -> str:
        parts = [str(self.bits), f"/{'row' if self.group is None else f'g{self.group}'}"]
        parts += [f"/{self.scale}"] if self.scale != "bf16" else []
        parts += [f"/{self.rounding}"] if self.rounding != "nearest" else []
        parts += [f"/{self.fit}"] if self.fit != "extreme" and self.levels == "zero" else []
        parts += [f"/{self.levels}"] if self.levels != "zero" else []
        parts += [f"/{self.rotation}"] if self.rotation != "none" else []
        parts += [f"/{self.widths}"] if self.widths != "equal" else []
        return "".join(parts)
