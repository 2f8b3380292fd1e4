"""The other ways of replicas to one model: quantized Adam, gradients that are a step late, local steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pipecomp.errors import NonFiniteValues
from pipecomp.runtime.optimizer import Update
from pipecomp.runtime.replicas import planned_nbytes
from pipecomp.testing.local_pipeline import LocalPipeline
from pipecomp.testing.replica_runs import one_process, replica_model, replica_run, shares_of_step
from pipecomp.types import Kind

FOUR_BITS, TWO_BITS = {"codec": "uniform", "bits": 4}, {"codec": "uniform", "bits": 2}
CODECS = [FOUR_BITS, TWO_BITS, {"codec": "sparse", "bits": 4, "top": 0.1}, {"codec": "cast", "dtype": "bf16"}]
DELTA = {"codec": "delta", "bits": 3}
NO_CLIPPING = {"max_grad_norm": 0.0}
RATE = 1e-2


def assert_close(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], bound: float) -> None:
    """Normwise over all parameters, but the key's bias, whose gradient is rounding."""
    gap = size = 0.0
    for name, expected in theirs.items():
        difference = (ours[name] - expected).double()
        if name.endswith("attn.c_attn.bias"):
            difference.view(3, -1)[1] = 0.0
        gap += float(difference.square().sum())
        size += float(expected.double().square().sum())
    assert (gap / size) ** 0.5 <= bound


def assert_same_parameters(pipeline: LocalPipeline) -> None:
    """Bit for bit, in all replicas."""
    first = pipeline.parameters(0)
    for replica in range(1, pipeline.num_replicas):
        for name, parameter in pipeline.parameters(replica).items():
            assert torch.equal(parameter.view(torch.int32), first[name].view(torch.int32)), (replica, name)


# ---------------------------------------------------------------- quantized Adam


@pytest.mark.parametrize("tied", ["colocate", "exchange"])
async def test_quantized_adam_of_replicas_is_that_of_one_process(tied: str) -> None:
    train = {"optim": "quantized_adam", "max_grad_norm": 0.5}
    many = LocalPipeline(replica_run(2, 2, train=train, cluster={"tied_weights": tied}), replica_model(), num_ranks=2)
    one = LocalPipeline(replica_run(1, 1, train=train), replica_model(), num_ranks=1)
    async with many, one:
        for step in range(1, 16):
            shares = shares_of_step(step, 2)
            plans = many.plans(shares, learning_rate=RATE), one.plans(one_process(shares), learning_rate=RATE)
            ours = await many.run_steps(plans[0], freezes=step == 4)
            theirs = await one.run_steps(plans[1], freezes=step == 4)
            assert ours.gradient_norm == pytest.approx(theirs.gradient_norm, rel=1e-4)
            assert_same_parameters(many)
        assert_close(many.parameters(), one.parameters(), 1e-5)
        assert all(rank.optimizer.is_frozen for rank in many.ranks)


@pytest.mark.parametrize("gradients", CODECS, ids=str)
async def test_replicas_with_quantized_adam_stay_bit_identical_aborted_steps_among_them(gradients: dict[str, Any]) -> None:
    run = replica_run(
        2, 2, gradients=gradients, train={"optim": "quantized_adam"}, activations=DELTA, cluster={"tied_weights": "exchange"}
    )
    async with LocalPipeline(run, replica_model(), num_ranks=2) as pipeline:
        for step in range(1, 13):
            before = pipeline.parameters()
            plans = pipeline.plans(shares_of_step(step, 2), learning_rate=1e-3)
            await pipeline.run_steps(plans, abort=step % 5 == 0, freezes=step == 3)
            assert_same_parameters(pipeline)
            if step % 5 == 0:
                assert all(torch.equal(before[name], value) for name, value in pipeline.parameters().items())


async def test_errors_of_gradients_count_in_momenta_as_gradients_do() -> None:
    run = replica_run(2, 1, gradients=TWO_BITS, train={"optim": "quantized_adam"})
    async with LocalPipeline(run, replica_model(), num_ranks=1) as pipeline:
        await pipeline.step_of_replicas(shares_of_step(1, 2), learning_rate=1e-3)
        exchange = pipeline.ranks[0]._sums._replicas[0]
        before = {key: error.clone() for key, error in exchange._errors.items()}
        pipeline.ranks[0].optimizer.freeze()
        pipeline.ranks[0]._sums.freeze()
        assert before
        for key, error in exchange._errors.items():
            assert torch.allclose(error, before[key] * (1 - run.train.adam_beta1))


# ---------------------------------------------------------------- a step late


@pytest.mark.parametrize(("stages", "tied"), [(1, "auto"), (2, "colocate"), (2, "exchange")])
async def test_with_overlap_each_gradient_is_applied_one_step_late(stages: int, tied: str) -> None:
    many = LocalPipeline(
        replica_run(2, stages, replicas={"overlap": True}, cluster={"tied_weights": tied}, train=NO_CLIPPING),
        replica_model(),
        num_ranks=stages,
    )
    one = LocalPipeline(replica_run(1, 1, train=NO_CLIPPING), replica_model(), num_ranks=1)
    async with many, one:
        late: dict[str, torch.Tensor] = {}
        for step in range(1, 13):
            shares = shares_of_step(step, 2)
            await many.step_of_replicas(shares, learning_rate=RATE)
            assert_same_parameters(many)
            await one.prepare(one.plans(one_process(shares), learning_rate=RATE))
            found = {o.name: o.parameter.grad.clone() for o in one.ranks[0].optimizer.owned}
            if not late:
                await one.ranks[0].abort(step)
            else:
                for owned in one.ranks[0].optimizer.owned:
                    owned.parameter.grad = late[owned.name]
                await one.ranks[0].commit(step, Update(RATE, 1.0))
            late = found
            assert_close(many.parameters(), one.parameters(), 1e-5)


@pytest.mark.parametrize("gradients", [FOUR_BITS, TWO_BITS, CODECS[2]], ids=str)
async def test_with_overlap_an_aborted_step_takes_what_was_under_way_with_it_and_replicas_stay_the_same(
    gradients: dict[str, Any],
) -> None:
    run = replica_run(2, 2, gradients=gradients, replicas={"overlap": True}, activations=DELTA)
    async with LocalPipeline(run, replica_model(), num_ranks=2) as pipeline:
        for step in range(1, 14):
            before = pipeline.parameters()
            aborts = step in (1, 5, 6, 11)
            await pipeline.step_of_replicas(shares_of_step(step, 2), learning_rate=1e-3, abort=aborts)
            assert_same_parameters(pipeline)
            same = all(torch.equal(before[name], value) for name, value in pipeline.parameters().items())
            # Nothing was under way at the start and after an aborted step.
            assert same == (aborts or step in (2, 7, 12)), step
        sent = sum(t.payload_nbytes for t in pipeline.link_traffic() if t.kind is Kind.GRADIENTS)
        exchanges = [e for rank in pipeline.ranks for e in rank._sums._replicas]
        planned = sum(planned_nbytes(e._buckets, e._coding.codec, e._peers.replica, 2) for e in exchanges)
        # 13 steps; in those after the first and after aborted ones nothing is exchanged.
        assert sent == (13 - len({1, 2, 6, 7, 12})) * planned


# ---------------------------------------------------------------- local steps


async def test_local_steps_are_each_replica_s_own_adam_and_then_the_mean() -> None:
    ways = {"local_steps": 3, "outer_learning_rate": 1.0, "outer_momentum": 0.0}
    train = {"max_grad_norm": 0.3}
    many = LocalPipeline(replica_run(2, 2, replicas=ways, train=train), replica_model(), num_ranks=2)
    ones = [LocalPipeline(replica_run(1, 1, train=train), replica_model(), num_ranks=1) for _ in range(2)]
    async with many, ones[0], ones[1]:
        for step in range(1, 4):
            shares = [share[:1] for share in shares_of_step(step if step != 2 else 5, 2)]
            await many.run_steps(many.plans(shares, learning_rate=RATE), averages=step == 3)
            for one, share in zip(ones, shares, strict=True):
                await one.step(share, learning_rate=RATE)
            if step < 3:
                for replica, one in enumerate(ones):
                    assert_close(many.parameters(replica), one.parameters(), 1e-5)
        assert_same_parameters(many)
        mean = {name: (value + ones[1].parameters()[name]) / 2 for name, value in ones[0].parameters().items()}
        assert_close(many.parameters(), mean, 1e-5)


async def test_the_outer_step_is_nesterov_s_on_the_mean_change() -> None:
    rate, momentum = 0.7, 0.9
    ways = {"local_steps": 2, "outer_learning_rate": rate, "outer_momentum": momentum}
    run = replica_run(2, 1, replicas=ways, train=NO_CLIPPING)
    async with LocalPipeline(run, replica_model(), num_ranks=1) as pipeline:
        common = pipeline.parameters()
        velocity = {name: torch.zeros_like(value) for name, value in common.items()}
        for step in range(1, 9):
            plans = pipeline.plans(shares_of_step(4 * step + 1, 2), learning_rate=RATE if step % 2 else 0.0)
            await pipeline.run_steps(plans, averages=step % 2 == 0)
            if step % 2:
                own = pipeline.parameters(0), pipeline.parameters(1)
                continue
            for name, value in common.items():  # at a rate of 0 the second step moved nothing: the average is of what was there
                change = value - (own[0][name] + own[1][name]) / 2
                velocity[name] = momentum * velocity[name] + change
                common[name] = value - rate * (change + momentum * velocity[name])
            assert_close(pipeline.parameters(), common, 1e-5)
            assert_same_parameters(pipeline)


@pytest.mark.parametrize("tied", ["colocate", "exchange"])
@pytest.mark.parametrize("gradients", [FOUR_BITS, TWO_BITS, CODECS[2]], ids=str)
async def test_after_an_average_replicas_are_bit_identical_with_any_codec(gradients: dict[str, Any], tied: str) -> None:
    """Aborted steps among them, one of which ends with the average that was due; in every fourth step a replica has no sample."""
    run = replica_run(
        3, 2, gradients=gradients, replicas={"local_steps": 4}, activations=DELTA, cluster={"tied_weights": tied}, dropout=0.1
    )
    async with LocalPipeline(run, replica_model(0.1), num_ranks=2) as pipeline:
        for step in range(1, 17):
            plans = pipeline.plans(shares_of_step(step, 3), learning_rate=1e-3)
            before = pipeline.parameters(1)
            averages, aborts = step % 4 == 0, step in (3, 12)
            await pipeline.run_steps(plans, averages=averages, abort=aborts)
            after = pipeline.parameters(1)
            if aborts and not averages:
                assert all(torch.equal(before[name], value) for name, value in after.items())
            if averages:
                assert_same_parameters(pipeline)
                assert any(not torch.equal(before[name], value) for name, value in after.items())
            elif step % 4 != 3 or not aborts:
                others = pipeline.parameters(0)
                assert any(not torch.equal(others[name], value) for name, value in after.items())
        exchanges = [e for rank in pipeline.ranks for e in rank._sums._replicas]
        planned = sum(planned_nbytes(e._buckets, e._coding.codec, e._peers.replica, 3) for e in exchanges)
        assert sum(t.payload_nbytes for t in pipeline.link_traffic() if t.kind is Kind.GRADIENTS) == 4 * planned


async def test_a_replica_without_samples_takes_no_step() -> None:
    async with LocalPipeline(replica_run(3, 1, replicas={"local_steps": 9}), replica_model(), num_ranks=1) as pipeline:
        shares = shares_of_step(4, 3)
        assert [len(share) for share in shares].count(0) == 1
        before = [pipeline.parameters(replica) for replica in range(3)]
        await pipeline.step_of_replicas(shares, learning_rate=RATE)
        for replica, share in enumerate(shares):
            same = all(torch.equal(value, before[replica][name]) for name, value in pipeline.parameters(replica).items())
            assert same == (not share)


async def test_an_average_of_what_is_not_finite_says_so_and_changes_nothing() -> None:
    run = replica_run(2, 1, gradients=TWO_BITS, replicas={"local_steps": 1})
    async with LocalPipeline(run, replica_model(), num_ranks=1) as pipeline:
        plans = pipeline.plans(shares_of_step(1, 2), learning_rate=1e-3)
        await pipeline.prepare(plans)
        with torch.no_grad():
            pipeline.ranks[1].optimizer.owned[0].parameter.view(-1)[0] = float("inf")
        text = "what replicas have trained apart until step 1: (sums of gradients|gradients of replica 1)"
        with pytest.raises(NonFiniteValues, match=text):
            await pipeline._all(rank.commit(1, Update(1e-3, 1.0, averages=True)) for rank in pipeline.ranks)
