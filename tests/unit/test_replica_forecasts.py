"""Runs of several replicas on paper, against what can be computed by hand."""

from __future__ import annotations

import functools

import pytest

from pipecomp.errors import ConfigError
from pipecomp.partition import StagePlan
from pipecomp.planning import Host, LinkCost, StageCost, even_setting, simulate_step, with_exchange_s
from pipecomp.planning.advice import advise, best_split, choose_width, too_large
from pipecomp.planning.forecast import Cluster, Forecast, exchanges_of, forecast, rows_of
from pipecomp.planning.machines import LayerSeconds, Machine, Way
from pipecomp.planning.replicas import Exchanging, with_exchanges
from pipecomp.planning.work import Evaluations, Exchange, Gradients, LayerWork, Width, Work
from pipecomp.schedules.gpipe import GPipe
from pipecomp.types import Kind, Rank, Shard

MBYTE = 1_000_000


def work(num_replicas: int = 2, num_blocks: int = 4, **changes: object) -> Work:
    """Blocks of 1 s forward, 2 s backward and 1000 values between an embedding and a head that take no time."""
    nothing = LayerWork("embedding", 0.0, 0, 0, 0.0), LayerWork("head", 0.0, 0, 0, 0.0)
    block = LayerWork("block", 1.0, 1000, 1000, 0.0)
    whole = Work(
        layers=(nothing[0], *[block] * num_blocks, nothing[1]),
        first_trainable=0,
        num_tokens=8,
        num_microbatches=6,
        steps_per_epoch=10,
        total_steps=30,
        recompute=False,
        evaluations=Evaluations(0, 0, 1, 0.0),
        weight_nbytes=(0.0,) * (num_blocks + 2),
        returned_nbytes=(0.0,) * (num_blocks + 2),
        store="memory",
        store_nbytes=1e12,
        num_replicas=num_replicas,
    )
    return whole._replace(**changes)


def exchange(num_replicas: int, nbytes_per_value: float, num_values: int) -> Exchange:
    """Every worker sends its part of what others own, and its own sums to them."""
    nbytes = 2 * (num_replicas - 1) / num_replicas * num_values * nbytes_per_value
    return Exchange(num_values, (nbytes,) * num_replicas, 1 if num_values else 0)


def width(num_replicas: int = 2, *, nbytes_per_value: float = 1.0, keeps_errors: bool = False, **changes: object) -> Width:
    gradients = Gradients(
        {"codec": "g"}, functools.partial(exchange, num_replicas, nbytes_per_value), 8 * nbytes_per_value, keeps_errors
    )
    return Width("w", {}, {}, 100.0, 100.0, 100.0, 200.0, 0.0, 0.0, gradients)._replace(**changes)


def machines(*speeds: float, **limits: object) -> tuple[Machine, ...]:
    return tuple(Machine(name=f"m{i}", block=LayerSeconds(1 / s, 2 / s), **limits) for i, s in enumerate(speeds))


def split(*counts: int, tied: str = "none") -> StagePlan:
    starts = [sum(counts[:i]) for i in range(len(counts))]
    shards = tuple(Shard(start, start + count) for start, count in zip(starts, counts, strict=True))
    return StagePlan(shards, tuple(map(Rank, range(len(counts)))), tied)


def planned(w: Work, wd: Width, cluster: Cluster, s: StagePlan) -> Forecast:
    return forecast(w, wd, cluster, s, GPipe())


# ------------------------------------------------------------------------------------------------------------------ time

PIPELINE_S = (6 + 1) * 2 * 3
"""Six microbatches through two stages of two blocks each."""


def test_the_exchange_comes_after_the_last_backward():
    cluster = Cluster(machines(1, 1, 1, 1, up="8kbit"))  # 1000 bytes a second
    one = planned(work(), width(forward_nbytes=0.0, backward_nbytes=0.0), cluster, split(3, 3))
    # Two blocks' 2000 values, half of them as parts and half as sums. The first stage ends last.
    assert one.step_s == pytest.approx(PIPELINE_S + 2)
    assert one.step.exchange_s == pytest.approx(2)
    assert (len(one.steps), one.replica, one.steps[0]) == (2, 0, one.steps[1])


def test_machines_that_are_alike_exchange_as_one_step_with_an_exchange_says():
    setting = even_setting(3, StageCost(1, 2), LinkCost(1500, 500), Host(1000, 900, 0.0))
    step = simulate_step(GPipe().actions(setting.ranks, 4), setting)
    exchanging = [Exchanging(Exchange(0, (nbytes, nbytes), 1), (0.0, 0.0), {}) for nbytes in (5000.0, 0.0, 40_000.0)]
    for each in with_exchanges([step] * 2, [setting] * 2, exchanging):
        assert each.duration_s == pytest.approx(with_exchange_s(step, setting, [5000.0, 0.0, 40_000.0]))


def test_a_word_goes_there_and_back():
    near, far = (Cluster(machines(1, 1, 1, 1, latency_ms=ms)) for ms in (0, 500))
    nothing = width(forward_nbytes=0.0, backward_nbytes=0.0)
    # Once each way through the pipeline, three control messages, parts there and sums back.
    late_s = planned(work(), nothing, far, split(3, 3)).step_s - planned(work(), nothing, near, split(3, 3)).step_s
    assert late_s == pytest.approx((2 + 3 + 2) * 0.5)


def test_coding_takes_its_time_before_what_is_sent_in_one_piece():
    cluster = Cluster(machines(1, 1, 1, 1, up="8kbit", coded_values_per_s=500.0))
    one = planned(work(), width(forward_nbytes=0.0, backward_nbytes=0.0, num_values=0.0), cluster, split(3, 3))
    # 2000 values: all are encoded once; decoded are others' parts and all sums, 3000.
    assert one.step.exchange_s == pytest.approx(2 + 5000 / (2 * 500))


def test_coding_of_many_pieces_goes_on_beside_sending():
    setting = even_setting(1, StageCost(1, 2), LinkCost(0, 0), Host(1000, 1000))
    step = simulate_step(GPipe().actions(setting.ranks, 4), setting)
    for coding_s, expected in ((4.0, 10.0 + 4.0 / 8), (24.0, 24.0 + 10.0 / 8)):
        exchanging = [Exchanging(Exchange(0, (10_000.0,) * 2, 8), (coding_s,) * 2, {})]
        assert with_exchanges([step] * 2, [setting] * 2, exchanging)[0].exchange_s == pytest.approx(expected)


def test_a_step_is_as_long_as_that_of_the_slowest_replica():
    one = planned(work(), width(), Cluster(machines(1, 1, 0.5, 1)), split(3, 3))
    alone = planned(work(1), width(gradients=None), Cluster(machines(0.5, 1)), split(3, 3))
    assert one.step_s == pytest.approx(alone.step_s)
    assert (one.replica, str(one.step.bound)) == (1, "compute of rank 0")
    assert one.steps[0].duration_s == one.steps[1].duration_s  # the fast one waits for the other's part


def test_no_sum_is_sent_before_the_slowest_part_is_there():
    fast, slow = machines(1), machines(0.5)
    limited = tuple(Machine(name="limited", block=each.block, up="8kbit") for each in fast)
    one = planned(work(), width(nbytes_per_value=2.0), Cluster((*limited, *slow)), split(6))
    # The fast one has sent its parts by then; half of 8000 bytes are sums.
    assert one.step_s == pytest.approx(6 * 4 * 3 * 2 + 4)


def test_the_exchange_of_a_rank_takes_the_ways_between_its_machines():
    slow = Way(sender="m1", receiver="m3", rate="4kbit", latency_ms=500)  # of the second stage
    nothing = width(forward_nbytes=0.0, backward_nbytes=0.0, nbytes_per_value=20.0)
    cluster = Cluster(machines(1, 1, 1, 1), ways={(Rank(1), Rank(3)): slow})
    one = planned(work(), nothing, cluster, split(3, 3))
    # It begins with the end of the second stage, 4 s before the first one's.
    assert one.step_s == pytest.approx(PIPELINE_S - 4 + 40_000 / 500 + 0.5)
    assert str(one.step.bound) == "exchange of gradients of rank 1"
    other = Way(sender="m0", receiver="m3", rate="4kbit")  # between no two that exchange anything
    assert planned(work(), nothing, Cluster(cluster.machines, ways={(Rank(0), Rank(3)): other}), split(3, 3)).step_s == PIPELINE_S


def test_what_carries_mostly_gradients_is_named_so():
    cluster = Cluster(machines(10, 10, 10, 10, up="8kbit"))
    mostly, hardly = (
        planned(work(), width(nbytes_per_value=n, forward_nbytes=2000.0, backward_nbytes=0.0), cluster, split(3, 3))
        for n in (20.0, 2.0)
    )
    assert str(mostly.step.bound) == "exchange of gradients of rank 0"
    assert mostly.step.bound.busy_s == pytest.approx(6 * 2 + 40)  # of activations and gradients together
    assert str(hardly.step.bound) == "uplink of rank 0"
    assert hardly.step.bound.busy_s == pytest.approx(6 * 2 + 4)


def test_replicas_share_one_machine():
    whole = Cluster(machines(1, 1, 1, 1), 2.0)
    alone = Cluster(machines(1, 1), 1.0)
    one = planned(work(), width(), whole, split(3, 3))
    assert one.step_s == planned(work(1), width(gradients=None), alone, split(3, 3)).step_s
    enough = planned(work(), width(), Cluster(machines(1, 1, 1, 1), 4.0), split(3, 3))
    assert enough.step_s == pytest.approx(PIPELINE_S)
    rates = {"coded_values_per_s": 500.0, "updates_per_s": 1000.0}
    busy = planned(work(), width(num_values=0.0), Cluster(machines(1, 1, 1, 1, **rates), 2.0), split(3, 3))
    assert busy.step_s == pytest.approx(one.step_s + 2 * 5000 / (2 * 500) + 2 * 2000 / 1000)


def test_an_evaluation_is_shared_out():
    one = planned(work(evaluations=Evaluations(2, 3, 7, 0.0)), width(), Cluster(machines(1, 1, 1, 1)), split(3, 3))
    assert one.evaluation_s == pytest.approx(3 * (4 + 1) * 2)


def test_weights_go_to_all_replicas_and_come_back_from_the_first():
    w = work(weight_nbytes=(0.0, *[1000.0] * 4, 0.0), returned_nbytes=(0.0, *[1000.0] * 4, 0.0))
    slow, fast = machines(1, 1, up="8kbit", down="8kbit"), machines(1, 1)
    assert planned(w, width(), Cluster((*slow, *fast)), split(3, 3)).weights_s == pytest.approx(4)
    assert planned(w, width(), Cluster((*fast, *slow)), split(3, 3)).weights_s == pytest.approx(2)


# ------------------------------------------------------------------------------------------------------ bytes and memory


@pytest.mark.parametrize("num_replicas", [2, 3])
def test_every_kind_of_traffic_is_that_of_all_replicas(num_replicas: int):
    one = planned(
        work(
            num_replicas,
            evaluations=Evaluations(2, 3, 4, 7.0),
            weight_nbytes=(0.0, 10.0, 10.0, 10.0, 10.0, 0.0),
            returned_nbytes=(0.0, 20.0, 20.0, 20.0, 20.0, 0.0),
        ),
        width(num_replicas, first_forward_nbytes=150.0, backward_nbytes=50.0, message_nbytes=1.0, tied_nbytes=3.0),
        Cluster(machines(*[1] * (2 * num_replicas))),
        split(3, 3, tied="exchange"),
    )
    assert one.traffic == {
        Kind.FORWARD: num_replicas * 6 * (10 * 150 + 20 * 100),
        Kind.BACKWARD: num_replicas * 6 * 30 * 50,
        Kind.GRADIENTS: pytest.approx(30 * 2 * (num_replicas - 1) * 4000),
        Kind.TIED: num_replicas * 30 * 2 * 3,
        Kind.EVALUATION: 2 * 3 * 4 * 7,  # each held-out sample crosses in one of them
        Kind.WEIGHTS: num_replicas * 40 + 80,
    }


def test_a_tied_weight_is_a_row_of_its_own_at_both_its_ends():
    embedding = LayerWork("embedding", 0.0, 700, 700, 0.0)
    w = work(tied_values=500)
    w = w._replace(layers=(embedding, *w.layers[1:]))
    assert [rows_of(w, split(2, 2, 2, tied="exchange"), rank) for rank in range(3)] == [(1200, 500), (2000,), (1000, 500)]
    assert [rows_of(w, split(3, 3, tied="local"), rank) for rank in range(2)] == [(2700,), (2000,)]
    assert [each.num_values for each in exchanges_of(w, width(), split(2, 2, 2, tied="exchange"))] == [1700, 2000, 1500]
    assert exchanges_of(w, width(gradients=None), split(3, 3)) == []


def test_errors_that_are_fed_back_take_a_value_for_each_that_is_trained():
    plain, feeding = (
        planned(work(), width(keeps_errors=keeps), Cluster(machines(1, 1, 1, 1)), split(2, 4)) for keeps in (False, True)
    )
    more = [b.memory_nbytes - a.memory_nbytes for a, b in zip(plain.shares, feeding.shares, strict=True)]
    assert more == [4 * 1000, 4 * 3000] * 2
    assert [share.layers for share in feeding.shares] == [(0, 1), (2, 3, 4, 5)] * 2


# ---------------------------------------------------------------------------------------------------------------- advice


def test_layers_are_shared_out_by_the_slowest_machine_of_each_rank():
    even = best_split(work(1, 8), Cluster(machines(1, 1, 1)), split(3, 4, 3), GPipe(), [0.0] * 3)
    mixed = Cluster(machines(2, 1, 1, 1, 2, 1))  # no rank is fast in both replicas
    assert best_split(work(2, 8), mixed, split(3, 4, 3), GPipe(), [0.0] * 3) == even
    found = best_split(work(2, 8), Cluster(machines(1, 2, 1, 1, 2, 1)), split(3, 4, 3), GPipe(), [0.0] * 3)
    assert [len(shard) for shard in found.shards] == [3, 4, 3]


def test_errors_count_where_layers_have_to_fit():
    cluster = Cluster((*machines(1, 1), *machines(1, 1, memory="34kB")))
    assert best_split(work(), cluster, split(3, 3), GPipe(), [0.0] * 2) == split(3, 3)  # 16 bytes a value
    with pytest.raises(ConfigError, match="no split"):
        best_split(work(), cluster, split(3, 3), GPipe(), [0.0] * 2, keeps_errors=True)


def test_advice_is_for_all_replicas():
    cluster = Cluster((*machines(1, 1), *machines(1, 1, memory="34kB")))
    before = [planned(work(), width(keeps_errors=True), cluster, split(3, 3))]
    assert too_large(before[0], cluster) == (2, 3)
    assert advise(work(), before, [split(3, 3)], cluster).too_large == (2, 3)
    even = Cluster(machines(1, 1, 1, 1))
    found = advise(work(), [planned(work(), width(), even, split(2, 4))], [split(2, 4)], even)
    assert (found.layers, len(found.forecast.steps)) == ((3, 3), 2)


def test_gradients_are_compressed_no_more_than_pays():
    fast, slow = Cluster(machines(1, 1)), Cluster(machines(1, 1, up="8kbit"))
    for cluster, expected in ((fast, 32.0), (slow, 4.0)):
        ways = [planned(work(), width(nbytes_per_value=bits / 8), cluster, split(6)) for bits in (4.0, 32.0)]
        assert choose_width(ways).width.gradient_bits == expected
