"""Several replicas: with `identity` they train what one process trains; with any codec they stay bit-identical to each other."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from pipecomp.errors import RemoteProtocolError
from pipecomp.protocol.messages import LayerNorms
from pipecomp.runtime.optimizer import Update
from pipecomp.runtime.pipeline import StepRefused
from pipecomp.testing.local_pipeline import LocalPipeline
from pipecomp.testing.replica_runs import IDENTITY, one_process, replica_model, replica_run, shares_of_step
from pipecomp.types import Kind


def largest_difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).abs().max()) / max(float(theirs.abs().max()), 1e-30)


WAYS = [(r, s, t) for r, s in itertools.product((1, 2, 4), (1, 2, 3)) for t in (("colocate", "exchange") if s > 1 else ("auto",))]


@pytest.mark.parametrize(("replicas", "stages", "tied"), WAYS)
async def test_averaged_gradients_and_parameters_are_those_of_one_process(replicas: int, stages: int, tied: str) -> None:
    cut = max(2, replicas)
    deferred = 2 if stages == 2 else 0
    many = LocalPipeline(
        replica_run(replicas, stages, dropout=0.1, cluster={"tied_weights": tied, "num_deferred": deferred}),
        replica_model(0.1),
        num_ranks=stages,
    )
    one = LocalPipeline(replica_run(1, 1, dropout=0.1), replica_model(0.1), num_ranks=1)
    async with many, one:
        for step in range(1, 21):
            shares = shares_of_step(step, cut)
            ours = shares if replicas == cut else one_process(shares)
            reference = one_process(shares)
            if step == 1:
                await many.prepare(many.plans(ours, learning_rate=1e-2))
                await one.prepare(one.plans(reference, learning_rate=1e-2))
                found, expected = many.gradients(), one.gradients()
                assert found.keys() == expected.keys() | {"lm_head.weight"} & found.keys()
                for name, gradient in expected.items():
                    if not name.endswith("attn.c_attn.bias"):
                        assert largest_difference(found[name], gradient) <= 2**-21, name
                # The key's part of the bias has a gradient that is zero on paper: what is there is rounding.
                for name in (name for name in expected if name.endswith("attn.c_attn.bias")):
                    for part in (0, 2):
                        a, b = (x[name].view(3, -1)[part] for x in (found, expected))
                        assert largest_difference(a, b) <= 2**-21, name
                for rank in (*many.ranks, *one.ranks):
                    await rank.abort(step)
            ours_outcome = await many.step_of_replicas(ours, learning_rate=1e-2)
            outcome = await one.step_of_replicas(reference, learning_rate=1e-2)
            assert ours_outcome.loss == pytest.approx(outcome.loss, rel=1e-5)
            assert ours_outcome.gradient_norm == pytest.approx(outcome.gradient_norm, rel=1e-4)
        gap, size = 0.0, 0.0
        for name, parameter in one.parameters().items():
            difference = (many.parameters()[name] - parameter).double()
            if name.endswith("attn.c_attn.bias"):
                difference.view(3, -1)[1] = 0.0
            gap += float(difference.square().sum())
            size += float(parameter.double().square().sum())
        assert (gap / size) ** 0.5 <= 1e-5
        assert_same_replicas(many)


def assert_same_replicas(pipeline: LocalPipeline) -> None:
    first = pipeline.parameters(0)
    for replica in range(1, pipeline.num_replicas):
        for name, parameter in pipeline.parameters(replica).items():
            assert torch.equal(parameter.view(torch.int32), first[name].view(torch.int32)), (replica, name)
    ranks = len(pipeline.ranks) // pipeline.num_replicas
    norms: list[tuple[LayerNorms, ...]] = pipeline.prepared_norms
    assert all(norms[place] == norms[place % ranks] for place in range(len(norms)))
    if "lm_head.weight" in first and "transformer.wte.weight" in first:
        assert torch.equal(first["lm_head.weight"], first["transformer.wte.weight"])


CODECS = [
    {"codec": "uniform", "bits": 4},
    {"codec": "uniform", "bits": 2, "rounding": "stochastic"},
    {"codec": "uniform", "bits": 1},
    {"codec": "sparse", "bits": 4, "top": 0.1},
    {"codec": "sparse", "bits": 4, "top": 0.3, "random": 0.5},
    {"codec": "cast", "dtype": "bf16"},
]


@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("gradients", CODECS, ids=str)
async def test_replicas_stay_bit_identical_with_any_codec_aborted_steps_among_them(
    replicas: int, gradients: dict[str, Any]
) -> None:
    await train_and_compare(replicas, gradients, num_steps=11)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("gradients", CODECS, ids=str)
async def test_replicas_stay_bit_identical_over_five_hundred_steps(gradients: dict[str, Any]) -> None:
    await train_and_compare(2, gradients, num_steps=500)


async def train_and_compare(replicas: int, gradients: dict[str, Any], *, num_steps: int) -> None:
    """After every step; every fifth is aborted, once after all are prepared and once before."""
    run = replica_run(
        replicas,
        2,
        gradients=gradients,
        activations={"codec": "delta", "bits": 3},
        cluster={"tied_weights": "exchange"},
        dropout=0.1,
    )
    async with LocalPipeline(run, replica_model(0.1), num_ranks=2) as pipeline:
        for step in range(1, num_steps + 1):
            before = pipeline.parameters()
            aborts = step % 5 == 0
            await pipeline.step_of_replicas(shares_of_step(step, replicas), learning_rate=1e-3, abort=aborts)
            assert_same_replicas(pipeline)
            for sender, receiver in pipeline.digests():
                assert sender == receiver
            if aborts:
                assert all(torch.equal(before[name], value) for name, value in pipeline.parameters().items())


async def test_an_aborted_step_leaves_no_error_behind() -> None:
    run = replica_run(2, 1, gradients={"codec": "uniform", "bits": 2})
    parameters = []
    for aborted in (False, True):
        async with LocalPipeline(run, replica_model(), num_ranks=1) as pipeline:
            await pipeline.step_of_replicas(shares_of_step(1, 2), learning_rate=1e-3)
            if aborted:
                await pipeline.step_of_replicas(shares_of_step(2, 2), learning_rate=1e-3, abort=True)
                pipeline._step -= 1  # the same step again, for the same seeds
                for exchange in (e for rank in pipeline.ranks for e in rank._sums._inboxes):
                    exchange._finished.clear()
            await pipeline.step_of_replicas(shares_of_step(3, 2), learning_rate=1e-3)
            parameters.append(pipeline.parameters())
    assert all(torch.equal(parameters[0][name], value) for name, value in parameters[1].items())


async def test_one_replica_s_bad_gradient_refuses_the_step_and_the_run_goes_on() -> None:
    run = replica_run(2, 1, gradients={"codec": "uniform", "bits": 4})
    async with LocalPipeline(run, replica_model(), num_ranks=1) as pipeline:
        weight = pipeline.modules[1][0].get_parameter(next(n for n, _ in pipeline.modules[1][0].named_parameters()))
        kept = weight.detach().clone()
        with torch.no_grad():
            weight.view(-1)[0] = float("nan")
        text = r"(gradients of replica 1|sums of gradients), from value [0-9]+ of the row on: value"
        with pytest.raises(StepRefused, match=text):
            await pipeline.step_of_replicas(shares_of_step(1, 2), learning_rate=1e-3)
        for rank in pipeline.ranks:
            await rank.abort(1)
        with torch.no_grad():
            weight.copy_(kept)
        await pipeline.step_of_replicas(shares_of_step(2, 2), learning_rate=1e-3)
        assert_same_replicas(pipeline)


@pytest.mark.parametrize("replicas", [2, 3, 4])
@pytest.mark.parametrize("gradients", [IDENTITY, CODECS[0], CODECS[3]], ids=str)
async def test_bytes_of_the_exchange_are_those_of_the_codec_over_all_pieces(
    replicas: int, gradients: dict[str, Any]
) -> None:
    from pipecomp.runtime.replicas import planned_nbytes

    run = replica_run(replicas, 2, gradients=gradients, cluster={"tied_weights": "exchange"})
    async with LocalPipeline(run, replica_model(), num_ranks=2) as pipeline:
        for step in (1, 2, 3):
            await pipeline.step_of_replicas(shares_of_step(step, replicas), learning_rate=1e-3)
        planned = sum(
            planned_nbytes(exchange._buckets, exchange._coding.codec, exchange._peers.replica, replicas)
            for rank in pipeline.ranks
            for exchange in rank._sums._replicas
        )
        sent = [t for t in pipeline.link_traffic() if t.kind is Kind.GRADIENTS]
        values = sum(p.numel() for p in pipeline.parameters().values())
        assert sum(t.payload_nbytes for t in sent) == 3 * planned
        assert sum(t.values for t in sent) == 3 * 2 * (replicas - 1) * values  # a part from each, a sum to each
        assert {t.link for t in sent} == {
            f"gradients/{rank}/{a}-{b}" for rank in (0, 1) for a, b in itertools.combinations(range(replicas), 2)
        }


async def test_feedback_is_what_makes_two_bits_add_up() -> None:
    """Over many steps of the same gradient, what is applied adds up to it with feedback, and does not without."""
    gaps = []
    for feedback in (True, False):
        run = replica_run(2, 1, gradients={"codec": "uniform", "bits": 1}, replicas={"error_feedback": feedback})
        async with LocalPipeline(run, replica_model(), num_ranks=1) as pipeline:
            total: dict[str, torch.Tensor] = {}
            for _ in range(30):
                await pipeline.prepare(pipeline.plans(shares_of_step(1, 2), learning_rate=0.0))
                found = pipeline.gradients()
                total = {name: total.get(name, torch.zeros_like(g)) + g / 30 for name, g in found.items()}
                for rank in pipeline.ranks:
                    await rank.commit(pipeline._step, Update(0.0, 1.0))
        async with LocalPipeline(replica_run(2, 1), replica_model(), num_ranks=1) as exact:
            await exact.prepare(exact.plans(shares_of_step(1, 2), learning_rate=0.0))
            true = exact.gradients()
        gaps.append(sum(float((total[n] - g).square().sum()) for n, g in true.items()))
    assert gaps[0] < 0.05 * gaps[1]


async def test_a_piece_of_another_codec_is_refused_by_name() -> None:
    run = replica_run(2, 1, gradients={"codec": "uniform", "bits": 4})
    async with LocalPipeline(run, replica_model(), num_ranks=1) as pipeline:
        exchange = pipeline.ranks[1]._sums._replicas[0]
        from pipecomp.codecs.cast import Cast

        exchange._coding = exchange._coding._replace(codec=Cast.from_options({"dtype": "bf16"}))
        with pytest.raises(RemoteProtocolError, match=r"has codec '(uniform|cast)', expected '(cast|uniform)'"):
            await pipeline.step_of_replicas(shares_of_step(1, 2), learning_rate=1e-3)
