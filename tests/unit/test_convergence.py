"""`pipecomp bench convergence`: the problem's gradients, its link, the ladder's slopes, and a run that was stopped."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from pipecomp.errors import ConfigError, MessageMismatch
from pipecomp.experiments import _two_machines as machines
from pipecomp.experiments import convergence

SMALL = {"num_samples": 64, "num_inputs": 4, "num_hidden": 16}
TINY = convergence.Settings(ladder=(20, 60, 200), num_blocks=2, block=2, num_measured=20, **SMALL)


@pytest.fixture
def problem():
    return machines.make_problem(**SMALL)


def link_for(name, num_runs=4, kind=machines.Link):
    method = convergence.METHODS[name]
    codecs = machines.make_codec(method.forward), machines.make_codec(method.backward)
    return kind(*codecs, (num_runs, SMALL["num_samples"], SMALL["num_hidden"]), "test")


class KeepsFirst(machines.Link):
    """A fault: messages are never brought up to date."""

    def _remember(self, at, sent, received):
        new = ~self.sent[at].any(axis=1)
        super()._remember((at[0][new], at[1][new]), sent[new], received[new])


class ForgetsOne(machines.Link):
    """A fault: machine b misses the change of run 1."""

    def _remember(self, at, sent, received):
        received[1] = self.received[at][1]
        super()._remember(at, sent, received)


# --------------------------------------------------------------------------------------------------------- the problem


def torch_loss(problem, first, second, sample=slice(None)):
    residual = torch.tanh(torch.from_numpy(problem.inputs[sample]) @ first.T) @ second - torch.from_numpy(
        problem.targets[sample]
    )
    return torch.log(torch.cosh(residual)).mean()


def test_the_full_gradient_is_that_of_autograd(problem):
    weights = machines.start(problem, range(2))
    squares, losses = machines.full_gradient(problem, weights)
    for run in range(2):
        first, second = (torch.from_numpy(part[run]).requires_grad_() for part in weights)
        loss = torch_loss(problem, first, second)
        loss.backward()
        loss = loss.detach()
        expected = float(first.grad.square().sum() + second.grad.square().sum())
        assert losses[run] == pytest.approx(float(loss), rel=1e-12)
        assert squares[run] == pytest.approx(expected, rel=1e-12)


def test_a_step_goes_down_the_gradient_of_its_sample(problem):
    weights = machines.start(problem, range(1))
    first, second = (torch.from_numpy(part[0].copy()).requires_grad_() for part in weights)
    torch_loss(problem, first, second, slice(5, 6)).backward()
    machines._step(problem, weights, np.array([5]), 0.1, None, 0, is_measured=False)
    np.testing.assert_allclose(weights.first[0], (first - 0.1 * first.grad).detach().numpy(), rtol=1e-12)
    np.testing.assert_allclose(weights.second[0], (second - 0.1 * second.grad).detach().numpy(), rtol=1e-12)


def test_the_objective_is_not_convex(problem):
    weights = machines.start(problem, range(1))
    for step in range(500):
        machines._step(problem, weights, np.array([step % 64]), 0.1, None, step, is_measured=False)
    here, mirrored, between = (
        machines.full_gradient(problem, machines.Weights(*(sign * part for part in weights)))[1][0] for sign in (1, -1, 0)
    )
    assert here == pytest.approx(mirrored)
    assert between > 1.5 * here


def test_labels_cannot_all_be_fitted():
    settings = convergence.Settings()
    assert settings.num_hidden * (settings.num_inputs + 1) < settings.num_samples
    assert settings.noise > 0


def test_the_steps_looked_at_stand_for_all_steps():
    steps, stands_for = machines.measured_steps(3162, 1000)
    edges = np.concatenate([[0], np.cumsum(stands_for)])
    assert edges[-1] == 3162
    assert ((edges[:-1] <= steps) & (steps < edges[1:])).all()


def test_a_short_run_is_looked_at_in_every_step():
    steps, stands_for = machines.measured_steps(100, 1000)
    assert steps.tolist() == list(range(100))
    assert set(stands_for.tolist()) == {1}


# ------------------------------------------------------------------------------------------------------------ the link


def final_losses(problem, link):
    return machines.train(problem, range(4), 4000, 4000**-0.5, link, num_measured=10).final_loss.mean()


def test_two_bits_lead_where_sgd_leads(problem):
    ratio = final_losses(problem, link_for("AC-SGD 2/4")) / final_losses(problem, None)
    assert ratio == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize(("name", "kind"), [("AC-SGD 2/4", KeepsFirst), ("direct 2/4", machines.Link)])
def test_without_messages_that_follow_two_bits_lead_elsewhere(problem, name, kind):
    assert final_losses(problem, link_for(name, kind=kind)) > 1.05 * final_losses(problem, None)


def test_both_machines_hold_the_same_messages_after_training(problem):
    link = link_for("AC-SGD 2/4, first visit in 6 bits")
    machines.train(problem, range(4), 500, 0.05, link)
    assert link.is_known.all()
    assert link.sent.tobytes() == link.received.tobytes()


def test_machines_that_disagree_are_found_out(problem):
    with pytest.raises(MessageMismatch, match="of run 1"):
        machines.train(problem, range(4), 500, 0.05, link_for("AC-SGD 2/4", kind=ForgetsOne))


def test_a_first_visit_crosses_whole(problem):
    link = link_for("AC-SGD 2/4")
    activations = np.random.default_rng(0).standard_normal((4, SMALL["num_hidden"]))
    seen = link.send_forward(0, np.array([3, 1, 4, 1]), activations, is_measured=True)
    np.testing.assert_array_equal(seen, activations.astype(np.float32))
    assert link.forward_error.value is None


def test_a_run_does_not_feel_those_beside_it(problem):
    name = "AC-SGD 2/4, nearest"
    alone = machines.train(problem, range(1), 300, 0.05, link_for(name, num_runs=1))
    beside = machines.train(problem, range(3), 300, 0.05, link_for(name, num_runs=3))
    assert alone.mean_squared_gradient[0] == pytest.approx(beside.mean_squared_gradient[0], rel=1e-9)


@pytest.mark.parametrize("name", list(convergence.METHODS)[1:])
def test_no_group_holds_two_runs(name):
    method = convergence.METHODS[name]
    tables = [method.forward, method.backward, method.forward.get("first_visit", "whole")]
    groups = [table["group"] for table in tables if table != "whole"]
    assert [convergence.Settings().num_hidden % group for group in groups] == [0] * len(groups)


def test_c_q_is_the_relative_error_of_a_vector():
    error = machines.RelativeError()
    error.add(np.array([[3, 4], [0, 0], [0, 2]], np.float32), np.array([[3, 3], [0, 0], [0, 0]], np.float32))
    assert error.value == pytest.approx(np.sqrt((1 / 25 + 1) / 2))


# ---------------------------------------------------------------------------------------------------------- the slopes


@pytest.mark.parametrize("exponent", [-0.5, -0.37, 0.0])
def test_a_power_law_has_its_exponent_for_a_slope(exponent):
    ladder = (100, 316, 1000, 100_000)
    assert convergence.slope(ladder, 3 * np.array(ladder, float) ** exponent) == pytest.approx(exponent, abs=1e-12)


def test_methods_that_move_together_have_no_error_in_their_distance():
    means = np.random.default_rng(0).uniform(1, 2, (3, 8))
    assert convergence.jackknife((1, 10, 100), means, means) == 0
    assert convergence.jackknife((1, 10, 100), means, means[:, ::-1]) > 0


def made_outcome(**exponents):
    settings = TINY._replace(methods={name: convergence.METHODS[name] for name in (convergence.SGD, "AC-SGD 2/4")})
    by_method = {convergence.SGD: exponents["sgd"], "AC-SGD 2/4": exponents["ac_sgd"]}
    rows = [
        {"method": name, "T": t, "block": block, "runs": [float(t) ** by_method[name]] * settings.block}
        for name, t, block in settings.cells()
    ]
    return convergence._outcome(rows, settings)


@pytest.mark.parametrize(
    ("sgd", "ac_sgd", "holds"),
    [
        (-0.5, -0.5, [True, True]),
        (-0.5, -0.46, [True, True]),
        (-0.5, -0.44, [True, False]),
        (-0.5, -0.56, [True, False]),
        (-0.3, -0.3, [False, True]),
        (-0.7, -0.7, [False, True]),
    ],
)
def test_a_bar_holds_where_the_slope_is_what_the_analysis_says(sgd, ac_sgd, holds):
    assert [bar["holds"] for bar in made_outcome(sgd=sgd, ac_sgd=ac_sgd)["bars"]] == holds


def test_the_slopes_of_two_three_and_four_bits_are_asked_for():
    asked_for = [name for name, method in convergence.METHODS.items() if method.is_asked_for]
    assert asked_for == ["AC-SGD 2/4", "AC-SGD 3/6", "AC-SGD 4/8"]
    assert {convergence.METHODS[name].forward["rounding"] for name in asked_for} == {"stochastic"}


# --------------------------------------------------------------------------------------------------- a run that stopped


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    path = tmp_path_factory.mktemp("results") / "convergence.json"
    convergence.run(json=True, path=path, settings=TINY)
    return json.loads(path.read_text())


def test_a_result_has_every_cell_and_every_bar(finished):
    assert len(finished["rows"]) == 3 * 2 * len(convergence.METHODS)
    assert {len(row["runs"]) for row in finished["rows"]} == {2}
    assert len(finished["bars"]) == 4


def test_only_what_is_missing_is_trained_again_and_comes_out_the_same(finished, tmp_path, monkeypatch):
    path = tmp_path / "convergence.json"
    missing = finished["rows"][3], finished["rows"][20]
    path.write_text(json.dumps({**finished, "rows": [row for row in finished["rows"] if row not in missing], "bars": []}))
    trained = []
    train = convergence._train
    monkeypatch.setattr(convergence, "_train", lambda *cell: trained.append(cell[1:]) or train(*cell))
    outcome = convergence.run(json=True, path=path, settings=TINY)
    assert trained == [(row["method"], row["T"], row["block"]) for row in missing]
    assert outcome["rows"] == finished["rows"]
    assert outcome["bars"] == finished["bars"]


def test_a_run_that_is_stopped_has_kept_the_cells_that_it_finished(tmp_path, monkeypatch):
    path = tmp_path / "convergence.json"
    train, cells = convergence._train, iter(range(2))

    def train_two(*cell):
        if next(cells, None) is None:
            raise KeyboardInterrupt
        return train(*cell)

    monkeypatch.setattr(convergence, "_train", train_two)
    with pytest.raises(KeyboardInterrupt):
        convergence.run(json=True, path=path, settings=TINY)
    kept = json.loads(path.read_text())
    assert len(kept["rows"]) == 2
    assert kept["bars"] == []


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (lambda result: {**result, "settings": {**result["settings"], "noise": 0.25}}, "other settings"),
        (lambda result: {**result, "rows": [{**result["rows"][0], "T": 7}]}, "other settings"),
        (lambda result: {"rows": []}, "not a result"),
        (lambda result: [], "not a result"),
    ],
)
def test_a_file_of_something_else_is_refused_and_left_alone(finished, tmp_path, spoil, complaint):
    path = tmp_path / "convergence.json"
    path.write_text(json.dumps(spoil(finished)))
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=complaint):
        convergence.run(json=True, path=path, settings=TINY)
    assert path.read_bytes() == before
