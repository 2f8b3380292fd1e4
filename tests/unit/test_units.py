"""Sizes and rates as people write them, and what they are told when nobody can read them."""

from __future__ import annotations

import pytest

from pipecomp.errors import ConfigError
from pipecomp.units import LARGEST, parse_rate, parse_size


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("0B", 0), ("500MB", 500_000_000), (" 1.5 tb ", 1_500_000_000_000), ("4GB", 4_000_000_000), (f"{LARGEST}B", LARGEST)],
)
def test_a_size_is_so_many_bytes(text: str, nbytes: int) -> None:
    assert parse_size(text, "key") == nbytes


@pytest.mark.parametrize("text", ["99999999999999TB", "9" * 400 + "GB", "4611687TB"])
def test_a_size_that_no_message_can_carry_is_refused_with_the_largest(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--message-memory = '.{1,59}': the largest size is 4611686TB; write a size such as"):
        parse_size(text, "--message-memory")


def test_two_of_the_largest_sizes_fit_a_message_together() -> None:
    assert 2 * LARGEST - 1 <= 2**63 - 1


@pytest.mark.parametrize("text", ["", "4", "four GB", "-1GB", "٤GB", "4\N{KELVIN SIGN}B", "1e3MB", "nanGB"])
def test_what_is_no_size_is_refused_with_its_key(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^messages.disk_budget = '.*': write a size such as '500MB', '16GB' or '1.5TB'$"):
        parse_size(text, "messages.disk_budget")


def test_a_rate_is_so_many_bytes_a_second() -> None:
    assert [parse_rate(text, "key") for text in ("500kbit", "20 Mbit/s", "1gbit")] == [62_500.0, 2_500_000.0, 125_000_000.0]


@pytest.mark.parametrize("text", ["", "0mbit", "20", "٢٠mbit", "20mb", "9" * 400 + "gbit"])
def test_what_is_no_rate_is_refused_with_its_key(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^LINK_RATE = '.*': write a rate above zero such as '500kbit'"):
        parse_rate(text, "LINK_RATE")
