"""How many torch threads a worker gets when its user names none."""

from __future__ import annotations

from coordinator.split import threads_share
from pipecomp.protocol.messages import PROTOCOL_VERSION, Join


def join(host: str, num_cores: int) -> Join:
    return Join(
        protocol_version=PROTOCOL_VERSION,
        version="1",
        worker="w",
        host=host,
        process_id=1,
        data_address="tcp://h:1",
        device="cpu",
        num_cores=num_cores,
        memory_nbytes=1,
    )


def test_workers_of_one_host_share_its_cores_and_one_alone_has_them_all() -> None:
    joins = [join("a", 8), join("a", 8), join("b", 4), join("a", 8)]
    assert [threads_share(joins, rank) for rank in range(4)] == [2, 2, 0, 2]


def test_no_worker_gets_less_than_one_thread() -> None:
    assert threads_share([join("a", 2)] * 3, 0) == 1
