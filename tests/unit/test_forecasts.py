"""Runs on paper against what can be computed by hand, and the advice that follows."""

from __future__ import annotations

import msgspec
import pytest

from pipecomp.errors import ConfigError
from pipecomp.partition import StagePlan
from pipecomp.planning.advice import advise, best_split, choose_width, layer_counts, too_large
from pipecomp.planning.forecast import Cluster, Forecast, forecast
from pipecomp.planning.machines import LayerSeconds, Machine, Way
from pipecomp.planning.work import Evaluations, LayerWork, Width, Work
from pipecomp.schedules.gpipe import GPipe
from pipecomp.types import Kind, Rank, Shard

NO_EVALUATION = Evaluations(0, 0, 1, 0.0)
MBYTE = 1_000_000


def work(num_blocks: int = 4, **changes: object) -> Work:
    """Blocks of 1 s forward and 2 s backward between an embedding and a head that take no time."""
    nothing = LayerWork("embedding", 0.0, 0, 0, 0.0), LayerWork("head", 0.0, 0, 0, 0.0)
    block = LayerWork("block", 1.0, MBYTE, MBYTE, 3.0 * MBYTE)
    whole = Work(
        layers=(nothing[0], *[block] * num_blocks, nothing[1]),
        first_trainable=0,
        num_tokens=8,
        num_microbatches=6,
        steps_per_epoch=10,
        total_steps=30,
        recompute=False,
        evaluations=NO_EVALUATION,
        weight_nbytes=(0.0,) * (num_blocks + 2),
        returned_nbytes=(0.0,) * (num_blocks + 2),
        store="memory",
        store_nbytes=1e12,
    )
    return whole._replace(**changes)


def width(forward: float = 100.0, backward: float = 100.0, **changes: object) -> Width:
    return Width("w", {}, {}, forward, forward, backward, 200.0, 0.0, 0.0)._replace(**changes)


def machines(*speeds: float, **limits: object) -> tuple[Machine, ...]:
    return tuple(Machine(name=f"m{i}", block=LayerSeconds(1 / s, 2 / s), **limits) for i, s in enumerate(speeds))


def split(*counts: int, tied: str = "none") -> StagePlan:
    starts = [sum(counts[:i]) for i in range(len(counts))]
    shards = tuple(Shard(start, start + count) for start, count in zip(starts, counts, strict=True))
    return StagePlan(shards, tuple(map(Rank, range(len(counts)))), tied)


def planned(w: Work, wd: Width, cluster: Cluster, s: StagePlan) -> Forecast:
    return forecast(w, wd, cluster, s, GPipe())


# ------------------------------------------------------------------------------------------------------------------ time


def test_without_links_a_step_is_the_pipeline_alone():
    one = planned(work(), width(), Cluster(machines(1, 1)), split(3, 3))
    assert one.step_s == pytest.approx((6 + 1) * 2 * 3)
    assert one.total_s == pytest.approx(30 * one.step_s)


def test_control_messages_and_the_optimizer_come_on_top():
    slow = machines(1, 1, latency_ms=500, updates_per_s=MBYTE)
    one = planned(work(), width(), Cluster(slow), split(3, 3))
    # Latency once each way, three control messages, two million parameters of a worker at a million a second.
    assert one.step_s == pytest.approx(7 * 6 + 2 * 0.5 + 3 * 0.5 + 2)


def test_every_action_of_a_stage_is_handled_once():
    one = planned(work(), width(), Cluster(machines(1, 1, handling_s=0.25)), split(3, 3))
    assert one.step_s == pytest.approx(7 * (6 + 2 * 0.25))


def test_the_first_epoch_sends_larger_messages_where_the_codec_remembers():
    cluster = Cluster(machines(1, 1, up="8kbit"))  # 1000 bytes/s
    one = planned(work(), width(2000.0, 0.0, first_forward_nbytes=4000.0, message_nbytes=1.0), cluster, split(3, 3))
    # 0F* as fast as messages go: 2 s of forward, then 6 messages, then 2 s and 6 backwards of 4 s, and one more.
    assert (one.first_step_s, one.step_s) == (pytest.approx(2 + 24 + 2 + 24 + 4), pytest.approx(2 + 12 + 2 + 24 + 4))
    assert (one.num_first_steps, one.num_later_steps) == (10, 20)
    assert one.training_s == pytest.approx(10 * one.first_step_s + 20 * one.step_s)
    assert one.median_step_s == one.step_s


def test_messages_that_do_not_fit_are_sent_as_on_a_first_visit():
    cluster = Cluster(machines(1, 1, up="8kbit"))
    codec = width(2000.0, 0.0, first_forward_nbytes=4000.0, message_nbytes=1000.0)
    half = planned(work(store_nbytes=500.0), codec, cluster, split(3, 3))
    assert half.step_s == pytest.approx(2 + 6 * 3 + 2 + 24 + 4)
    assert [(share.message_nbytes, share.kept_nbytes) for share in half.shares] == [(1000, 500), (1000, 500)]


def test_a_way_that_is_slower_than_both_connections_rules_in_its_direction():
    slow = {(Rank(0), Rank(1)): Way(sender="m0", receiver="m1", rate="8kbit", latency_ms=500)}
    codec = width(7000.0, 2000.0)
    one = planned(work(), codec, Cluster(machines(1, 1, up="80kbit", latency_ms=100), ways=slow), split(3, 3))
    # 2 s of forward, 6 messages of 7 s and the latencies of sender and way; 2 s and 6 backwards; one message of 0.2 s and its
    # latency, one backward; three control messages.
    assert one.step_s == pytest.approx(2 + 42 + 0.6 + 2 + 24 + 0.2 + 0.1 + 4 + 0.3)
    assert str(one.step.bound) == "forward link from rank 0 to rank 1"
    tied = planned(work(), codec._replace(tied_nbytes=5000.0), Cluster(machines(1, 1), ways=slow), split(3, 3, tied="exchange"))
    local = planned(work(), codec, Cluster(machines(1, 1), ways=slow), split(3, 3))
    assert tied.step_s - local.step_s == pytest.approx(5.5)


def test_gradients_of_a_tied_weight_are_exchanged_after_the_pipeline():
    cluster = Cluster(machines(1, 1, up="8kbit"))
    codec = width(0.0, 0.0, tied_nbytes=5000.0)
    one, other = (planned(work(), codec, cluster, split(3, 3, tied=where)) for where in ("exchange", "local"))
    assert one.step_s - other.step_s == pytest.approx(5)
    assert (one.traffic[Kind.TIED], other.traffic[Kind.TIED]) == (30 * 2 * 5000, 0)


def test_a_frozen_first_part_gets_no_gradients_and_computes_no_backward():
    frozen = planned(work(first_trainable=3), width(), Cluster(machines(1, 1)), split(3, 3))
    assert frozen.step_s == pytest.approx(2 + 6 * 2 + 6 * 4)
    assert frozen.traffic[Kind.BACKWARD] == 0


def test_an_evaluation_is_forwards_only_and_drains_after_each_plan():
    one = planned(work(evaluations=Evaluations(2, 3, 4, 0.0)), width(), Cluster(machines(1, 1)), split(3, 3))
    assert one.evaluation_s == pytest.approx(3 * (4 + 1) * 2)
    assert one.total_s == pytest.approx(30 * one.step_s + 2 * one.evaluation_s)


def test_workers_that_share_a_processor_take_turns():
    apart, together = (planned(work(), width(), Cluster(machines(1, 1), n), split(3, 3)) for n in (None, 1.0))
    assert apart.step_s == pytest.approx(42)
    assert together.step_s == pytest.approx(2 * 6 * 6)


# ------------------------------------------------------------------------------------------------------ bytes and memory


def test_every_kind_of_traffic_is_summed_over_the_run():
    one = planned(
        work(
            evaluations=Evaluations(2, 3, 4, 7.0),
            weight_nbytes=(0.0, 10.0, 10.0, 10.0, 10.0, 0.0),
            returned_nbytes=(0.0, 20.0, 20.0, 20.0, 20.0, 0.0),
        ),
        width(100.0, 50.0, first_forward_nbytes=150.0, message_nbytes=1.0),
        Cluster(machines(1, 1, 1)),
        split(2, 2, 2),
    )
    assert one.traffic == {
        Kind.FORWARD: 2 * 6 * (10 * 150 + 20 * 100),
        Kind.BACKWARD: 2 * 6 * 30 * 50,
        Kind.GRADIENTS: 0,
        Kind.TIED: 0,
        Kind.EVALUATION: 2 * 2 * 3 * 4 * 7,
        Kind.WEIGHTS: 40 + 80,
    }


def test_a_worker_holds_its_parameters_four_times_its_activations_in_flight_and_its_messages():
    one = planned(work(), width(message_nbytes=5.0 * MBYTE), Cluster(machines(1, 1)), split(2, 4))
    # One block, three blocks: 16 bytes a parameter, 3 MB of activations for each of 6 microbatches.
    assert [share.memory_nbytes for share in one.shares] == [(16 + 6 * 3 + 5) * MBYTE, 3 * (16 + 6 * 3) * MBYTE + 5 * MBYTE]
    assert [share.layers for share in one.shares] == [(0, 1), (2, 3, 4, 5)]


def test_messages_on_a_disk_take_no_memory():
    cluster, codec = Cluster(machines(1, 1)), width(message_nbytes=9.0)
    one, other = (planned(work(store=store), codec, cluster, split(3, 3)) for store in ("memory", "disk"))
    assert one.shares[0].memory_nbytes - other.shares[0].memory_nbytes == 9


# ---------------------------------------------------------------------------------------------------------------- advice


def at_widths(w: Work, cluster: Cluster, s: StagePlan, *sizes: float) -> list[Forecast]:
    return [planned(w, width(size, size, label=str(size)), cluster, s) for size in sizes]


def test_no_more_is_compressed_than_pays():
    fast, slow = Cluster(machines(1, 1)), Cluster(machines(1, 1, up="8kbit"))
    assert choose_width(at_widths(work(), fast, split(3, 3), 8000.0, 4000.0, 2000.0)).width.label == "8000.0"
    assert choose_width(at_widths(work(), slow, split(3, 3), 8000.0, 4000.0, 500.0)).width.label == "500.0"


def num_blocks(s: StagePlan) -> list[int]:
    """Layers of each stage, embedding and head left out."""
    last = s.shards[-1].end_layer - 1
    return [len(shard) - (shard.first_layer == 0) - (shard.end_layer > last) for shard in s.shards]


def test_a_machine_twice_as_fast_gets_twice_the_blocks():
    cluster = Cluster(machines(1, 2, 1))
    found = best_split(work(8), cluster, split(3, 4, 3), GPipe(), [0.0] * 3)
    assert num_blocks(found) == [2, 4, 2]


def test_no_machine_gets_more_than_its_memory_takes():
    small = (*machines(1, 1), *(msgspec.structs.replace(m, memory="40MB") for m in machines(4)))
    found = best_split(work(8), Cluster(small), split(3, 4, 3), GPipe(), [0.0] * 3)
    # A block takes 16 + 6 x 3 MB: two do not fit, fast as the last machine may be.
    assert num_blocks(found)[2] == 1
    with pytest.raises(ConfigError, match="no split"):
        best_split(work(8), Cluster(machines(1, 1, 1, memory="40MB")), split(3, 4, 3), GPipe(), [0.0] * 3)


def test_a_head_beside_the_embedding_stays_there_when_layers_move():
    colocated = StagePlan((Shard(0, 3), Shard(3, 5), Shard(5, 6)), (Rank(0), Rank(1), Rank(0)), "local")
    found = best_split(work(), Cluster(machines(1, 3)), colocated, GPipe(), [0.0] * 2)
    assert found.shards == (Shard(0, 2), Shard(2, 5), Shard(5, 6))
    assert layer_counts(found) == (3, 3)


def test_advice_moves_layers_only_where_a_step_gets_shorter():
    cluster = Cluster(machines(1, 1))
    even = advise(work(), at_widths(work(), cluster, split(3, 3), 100.0), [split(3, 3)], cluster)
    assert even.layers is None
    uneven = advise(work(), at_widths(work(), cluster, split(2, 4), 100.0), [split(2, 4)], cluster)
    assert uneven.layers == (3, 3)
    assert uneven.forecast.step_s == pytest.approx(42)


def test_advice_leaves_layers_where_moving_them_gains_next_to_nothing():
    layers = tuple(LayerWork("block", cost, 0, 0, 0.0) for cost in (1.0, 1.0, 0.015, 0.015, 1.0, 1.0))
    small = work(layers=layers)
    cluster = Cluster((Machine(multiply_adds_per_s=8.0),) * 2)
    before = [planned(small, width(), cluster, split(4, 2))]
    assert best_split(small, cluster, split(4, 2), GPipe(), [0.0] * 2) == split(3, 3)
    assert advise(small, before, [split(4, 2)], cluster).layers is None


def test_advice_holds_no_more_microbatches_than_a_fast_step_needs():
    cluster = Cluster(machines(1, 1))
    found = advise(work(), at_widths(work(), cluster, split(3, 3), 100.0), [split(3, 3)], cluster)
    assert (found.schedule, found.num_in_flight) == ("1f1b", 2)


def test_advice_moves_layers_off_a_machine_that_is_too_small():
    small = (machines(1)[0], *(msgspec.structs.replace(m, name="small", memory="30MB") for m in machines(1)))
    cluster = Cluster(small)
    before = at_widths(work(), cluster, split(3, 3), 100.0)
    assert too_large(before[0], cluster) == (1,)
    found = advise(work(), before, [split(3, 3)], cluster)
    assert found.layers == (4, 2)
    assert found.too_large == ()


def test_advice_holds_fewer_microbatches_before_it_moves_layers_off_a_machine_that_is_too_small():
    # By default all six microbatches would be in flight on the first machine, each keeping 300 MB a block.
    heavy = work(layers=tuple(layer._replace(kept_nbytes=300e6 if layer.kind == "block" else 0) for layer in work().layers))
    cluster = Cluster(machines(1, 1, memory="1.3GB"))
    before = [planned(heavy, width(), cluster, split(3, 3))]
    assert too_large(before[0], cluster) == (0, 1)
    found = advise(heavy, before, [split(3, 3)], cluster)
    assert (found.layers, found.num_in_flight, found.too_large) == (None, 2, ())


def test_advice_says_who_is_too_small_for_any_split():
    cluster = Cluster(machines(1, 1, memory="10MB"))
    found = advise(work(), at_widths(work(), cluster, split(3, 3), 100.0), [split(3, 3)], cluster)
    assert (found.layers, found.too_large) == (None, (0, 1))


def split_machines(*speeds: float, **limits: object) -> tuple[Machine, ...]:
    """Half of a backward is gradients of weights."""
    return tuple(Machine(name=f"m{i}", block=LayerSeconds(1 / s, 2 / s, 1 / s), **limits) for i, s in enumerate(speeds))


def test_gradients_of_weights_wait_in_a_forecast_where_the_run_file_lets_them():
    cluster = Cluster(split_machines(1, 1))
    plain, deferring = (planned(work(num_deferred=num), width(), cluster, split(3, 3)) for num in (0, 2))
    assert plain.step_s == pytest.approx(7 * 6)
    # The first backward's weights no longer keep the first stage waiting; it ends with its own.
    assert deferring.step_s == pytest.approx(7 * 6 - 2)


def test_what_waits_takes_memory():
    held = work(layers=tuple(layer._replace(deferred_nbytes=5e6) for layer in work().layers))
    cluster = Cluster(split_machines(1, 1))
    shares = [planned(held._replace(num_deferred=num), width(), cluster, split(3, 3)).shares for num in (0, 2, 100)]
    more = [share[0].memory_nbytes - shares[0][0].memory_nbytes for share in shares]
    assert more == [0, 3 * 2 * 5e6, 3 * 6 * 5e6]  # of six microbatches no more than six wait


def test_advice_lets_gradients_of_weights_wait_where_that_gains_and_fits():
    cluster = Cluster(split_machines(1, 1))
    found = advise(work(), [planned(work(), width(), cluster, split(3, 3))], [split(3, 3)], cluster)
    # In 1f1b the last stage waits for its first forward, and for nothing else.
    assert (found.num_deferred, found.forecast.step_s) == (2, pytest.approx(38))
    nothing = Cluster(machines(1, 1))
    assert advise(work(), [planned(work(), width(), nothing, split(3, 3))], [split(3, 3)], nothing).num_deferred == 0
    large = work(layers=tuple(layer._replace(deferred_nbytes=1e12) for layer in work().layers))
    small = Cluster(split_machines(1, 1, memory="10GB"))
    assert advise(large, [planned(large, width(), small, split(3, 3))], [split(3, 3)], small).num_deferred == 0


def test_advice_takes_back_a_deferral_that_does_not_fit():
    asked = work(layers=tuple(layer._replace(deferred_nbytes=1e12) for layer in work().layers), num_deferred=3)
    cluster = Cluster(split_machines(1, 1, memory="10GB"))
    found = advise(asked, [planned(asked, width(), cluster, split(3, 3))], [split(3, 3)], cluster)
    assert (found.num_deferred, found.too_large, found.layers) == (0, (), None)
