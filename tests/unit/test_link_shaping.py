"""What the kernel is told about a slow link, and what its queue says of packets."""

from __future__ import annotations

import socket
import struct
import threading

import pytest

from pipecomp.testing import goodput
from pipecomp.testing.hosts import LocalHosts
from pipecomp.testing.packet_delay import packet_number
from pipecomp.testing.shaping import LinkShape, receiving_commands, sending_commands

SLOW = LinkShape(100e6)
FAR = LinkShape(1e9, delay_s=0.005, loss=0.01)


def lines(commands: list[list[str]]) -> list[str]:
    return [" ".join(command) for command in commands]


def test_a_rate_is_a_token_bucket_at_both_ends() -> None:
    expected = ["qdisc replace dev eth0 root handle 10: tbf rate 100000000bit burst 25000 latency 50ms"]
    assert lines(sending_commands("eth0", SLOW, has_netem=False)) == expected
    assert lines(receiving_commands("eth0", SLOW)) == expected


def test_a_burst_is_never_less_than_ten_frames() -> None:
    assert "burst 16000" in lines(receiving_commands("p1", LinkShape(20e6)))[0]
    assert "burst 91000" in lines(receiving_commands("p1", LinkShape(20e6), mtu=9000))[0]
    assert "burst 91000" in lines(sending_commands("eth0", LinkShape(20e6), has_netem=False, mtu=9000))[0]


def test_delay_and_loss_stand_before_the_rate_where_the_kernel_has_netem() -> None:
    assert lines(sending_commands("eth0", FAR, has_netem=True)) == [
        "qdisc replace dev eth0 root handle 1: netem delay 5ms loss 1% limit 9082",
        "qdisc replace dev eth0 parent 1:1 handle 10: tbf rate 1000000000bit burst 250000 latency 60ms",
    ]


def test_without_netem_the_rate_alone_is_set() -> None:
    assert len(sending_commands("eth0", FAR, has_netem=False)) == 1
    assert sending_commands("eth0", LinkShape(delay_s=0.005), has_netem=False) == []


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        (LinkShape(), "unshaped"),
        (SLOW, "100 Mbit/s"),
        (FAR, "1000 Mbit/s, 5 ms, 1 % lost"),
        (LinkShape(delay_s=0.01), "unshaped, 10 ms"),
    ],
)
def test_a_shape_says_what_it_is(shape: LinkShape, words: str) -> None:
    assert shape.describe() == words


def test_local_hosts_have_their_rate_and_delay_from_the_run_file_and_say_that_nothing_is_lost() -> None:
    with LocalHosts(2, FAR) as hosts:
        assert hosts.cluster_settings() == {"link_rate": "1000000kbit", "link_latency_ms": 5.0}
        assert hosts.missing == ("loss: user space cannot lose packets of a connection",)
    with LocalHosts(2) as hosts:
        assert hosts.cluster_settings() == {}


def test_a_packets_number_is_found_in_the_queues_message_and_in_no_other() -> None:
    attributes = struct.pack("=HH", 11, 1) + struct.pack(">IHB", 513, 0x0800, 0) + b"\0"
    packet = struct.pack("=IHHII", 20 + len(attributes), 3 << 8, 0, 0, 0) + struct.pack(">BBH", 0, 0, 77) + attributes
    answer = struct.pack("=IHHII", 36, 2, 0, 0, 0) + bytes(20)
    assert packet_number(packet) == struct.pack(">I", 513)
    assert packet_number(answer) is None
    assert packet_number(packet[:20]) is None


def test_a_connection_that_ends_at_once_has_no_rate() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    sender = threading.Thread(target=goodput.send, args=("127.0.0.1", port, 0.0))
    sender.start()
    assert goodput.receive("127.0.0.1", port) == 0.0
    sender.join()


def test_measured_rates_are_told_by_their_median_and_range() -> None:
    assert goodput.describe([12.5e6, 11.25e6, 12e6]) == "96.0 Mbit/s (90.0 to 100.0)"
    assert goodput.describe([12.5e6]) == "100.0 Mbit/s"
