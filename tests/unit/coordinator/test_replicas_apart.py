"""Replicas that train apart, and the warm-up of quantized Adam: what the coordinator decides of them."""

from __future__ import annotations

import pytest

from coordinator import events as e
from coordinator.console import record_line
from pipecomp.protocol import messages as m


def decided(effects: list[e.Effect], kind: type = m.Commit) -> list[m.Commit]:
    return [x.message for x in effects if isinstance(x, e.Send) and isinstance(x.message, kind)]


def last_vote(script, step: int, norms: tuple[float, ...] = (4.0, 4.0)) -> list[e.Effect]:
    """Everyone prepares; the effects of the last one. `norms`: squared, of each worker."""
    return [script.prepared(worker, step, squared_norm=norm) for worker, norm in enumerate(norms)][-1]


def test_replicas_that_train_apart_have_norms_and_clips_of_their_own(make_script):
    script = make_script(2, {"max_grad_norm": 3.0}, num_replicas=2, local_steps=10)
    script.ready()
    ours, theirs = decided(last_vote(script, 1, (4.0, 36.0)))
    assert (ours.gradient_norm, ours.clip_coefficient) == (2.0, 1.0)
    assert theirs.gradient_norm == 6.0
    assert theirs.clip_coefficient == pytest.approx(0.5, rel=1e-6)
    for worker in range(2):
        script.committed(worker, 1)
    (record,) = [x for x in script.log if isinstance(x, e.StepCommitted)]
    assert record.gradient_norm == 6.0  # the largest
    assert record.clip_coefficient == theirs.clip_coefficient  # the smallest


def test_replicas_average_every_so_many_steps_and_at_the_end(make_script):
    script = make_script(2, num_replicas=2, local_steps=2, total_steps=5)
    script.ready()
    found = []
    for step in range(1, 6):
        found.append([commit.average for commit in decided(last_vote(script, step))])
        for worker in range(2):
            script.committed(worker, step)
    assert found == [[False] * 2, [True] * 2, [False] * 2, [True] * 2, [True] * 2]


def test_replicas_average_before_an_evaluation(make_script):
    script = make_script(2, {"eval_steps": 3}, num_replicas=2, local_steps=100, total_steps=4, evaluations=1)
    script.ready()
    for worker in range(2):
        script.evaluated(worker, 1)
    found = []
    for step in range(1, 5):
        found.append(decided(last_vote(script, step))[0].average)
        for worker in range(2):
            script.committed(worker, step)
        if step == 3:
            for worker in range(2):
                script.evaluated(worker, 2)
    assert found == [False, False, True, True]


def test_replicas_average_where_the_run_is_to_stop_early(make_script):
    script = make_script(2, num_replicas=2, local_steps=100, total_steps=50)
    script.ready()
    script.take_step(1)
    script.do(e.StopRequested(urgent=False))
    assert decided(last_vote(script, 2))[0].average


@pytest.mark.parametrize(("total_steps", "averages"), [(2, True), (9, False)])
def test_an_aborted_last_step_still_averages_what_was_trained_before_it(make_script, total_steps, averages):
    script = make_script(2, num_replicas=2, local_steps=100, total_steps=total_steps)
    script.ready()
    script.take_step(1)
    aborts = decided(script.failed(0, 2), m.Abort)
    assert [abort.average for abort in aborts] == [averages] * 2


def test_an_aborted_step_counts_for_no_average(make_script):
    script = make_script(2, num_replicas=2, local_steps=2, total_steps=50)
    script.ready()
    script.take_step(1)
    assert not decided(script.failed(0, 2), m.Abort)[0].average
    for worker in range(2):
        script.aborted(worker, 2)
    assert decided(last_vote(script, 3))[0].average
    assert not decided(script.failed(0, 4), m.Abort)[0].average  # nothing was trained since


def test_one_replica_has_nobody_to_average_with(make_script):
    script = make_script(2, local_steps=1)
    script.ready()
    assert not decided(last_vote(script, 1))[0].average


# ---------------------------------------------------------------- quantized Adam


def test_the_warm_up_of_given_length_ends_with_its_last_step_and_is_told(make_script):
    script = make_script(2, {"optim": "quantized_adam", "optim_warmup_steps": 2}, total_steps=9)
    script.ready()
    found = []
    for step in range(1, 5):
        found.append(decided(last_vote(script, step))[0].freeze)
        for worker in range(2):
            script.committed(worker, step)
    assert found == [False, True, False, False]
    (record,) = [x for x in script.log if isinstance(x, e.MomentsFrozen)]
    assert record == e.MomentsFrozen(2, None)
    assert record_line(record) == (
        "warm-up of quantized_adam: second moments stay as after step 2 (as train.optim_warmup_steps says)"
    )


def test_the_warm_up_ends_by_what_the_first_replica_says_of_its_second_moments(make_script):
    script = make_script(4, {"optim": "quantized_adam"}, num_replicas=2, total_steps=20)
    script.ready()
    frozen = None
    for step in range(1, 13):
        commits = decided(last_vote(script, step, (4.0,) * 4))
        if commits[0].freeze:
            frozen = step
        assert {commit.freeze for commit in commits} == {commits[0].freeze}
        for worker in range(4):
            moment = (100.0 if step < 7 else 1000.0) if worker < 2 else 1e9 * step
            script.committed(worker, step, second_moment=moment)
    # 3 steps at least (15 %) and a window of 1: steady from step 2 on, so that step 5 is the last of AdamW.
    assert frozen == 5
    (record,) = [x for x in script.log if isinstance(x, e.MomentsFrozen)]
    assert record == e.MomentsFrozen(5, 0.0)
    assert "second moments stay as after step 5 (they changed by 0.0% lately)" in record_line(record)


def test_plain_adamw_has_no_warm_up(make_script):
    script = make_script(2, total_steps=9)
    script.ready()
    assert not any(commit.freeze for commit in decided(last_vote(script, 1)))
