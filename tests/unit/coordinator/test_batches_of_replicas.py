"""Several replicas under one coordinator: places, votes, hashes, whose weights come home."""

from __future__ import annotations

import msgspec

from coordinator import events as e
from pipecomp.protocol import messages as m


def test_workers_take_places_replica_by_replica(make_script):
    script = make_script(4, num_replicas=2)
    effects = script.joined()
    (assign,) = [effect for effect in effects if isinstance(effect, e.Assign)]
    assert [join.worker for join in assign.joins] == ["w0", "w1", "w2", "w3"]


def test_a_step_commits_once_all_replicas_are_prepared(make_script):
    script = make_script(4, num_replicas=2)
    script.ready()
    for worker in range(3):
        assert script.prepared(worker, 1, loss=10.0) == []
    commits = [x for x in script.prepared(3, 1, loss=5.0) if isinstance(x, e.Send)]
    assert [x.peer for x in commits] == [0, 1, 2, 3]
    for worker in range(4):
        script.committed(worker, 1)
    (record,) = [x for x in script.log if isinstance(x, e.StepCommitted)]
    assert record.loss == 15.0 / 10
    assert record.gradient_norm == 8.0**0.5


def test_replicas_that_summed_different_gradients_end_the_run_by_name(make_script):
    script = make_script(4, num_replicas=2)
    script.ready()
    for worker in range(3):
        script.prepared(worker, 1)
    cause = script.cause(script.prepared(3, 1, squared_norm=4.0000001))
    assert "step 1: w3 (replica 1) and w1 (replica 0) have summed different gradients of layer 3" in cause


def test_replicas_whose_parameters_differ_end_the_run_by_name(make_script):
    script = make_script(4, num_replicas=2)
    script.ready()
    for worker in range(4):
        script.prepared(worker, 1)
    for worker in (0, 1, 2):
        script.committed(worker, 1, parameters_hash=f"hash{worker % 2}")
    cause = script.cause(script.committed(3, 1, parameters_hash="other"))
    assert "w3 (replica 1) has parameters of hash other after step 1, w1 (replica 0) of hash hash1" in cause


def test_a_replica_without_samples_reports_no_loss(make_script):
    script = make_script(2, num_replicas=2)
    script.terms = script.terms._replace(num_microbatches=lambda _step: (1, 0))
    script.ready()
    script.prepared(0, 1, loss=20.0)
    vote = m.Prepared(epoch=1, step=1, loss_sums=(), layer_norms=(m.LayerNorms(0, (4.0,)),))
    assert any(isinstance(x, e.Send) and isinstance(x.message, m.Commit) for x in script.say(1, vote))


def test_a_loss_that_nobody_planned_is_an_objection(make_script):
    script = make_script(2, num_replicas=2)
    script.terms = script.terms._replace(num_microbatches=lambda _step: (1, 0))
    script.ready()
    script.prepared(0, 1)
    sent = [x.message for x in script.prepared(1, 1) if isinstance(x, e.Send)]
    assert isinstance(sent[0], m.Abort)
    assert "losses of 1, 1 microbatches were reported; 1, 0 were planned" in sent[0].reason


def test_weights_come_home_from_the_first_replica_alone(make_script):
    script = make_script(4, num_replicas=2, total_steps=1)
    script.ready()
    script.take_step(1)
    assert script.phase == "collecting"
    sent = m.WeightsSent(epoch=1, num_tensors=1, traffic=())
    asked = []
    for worker in (0, 1):
        script.say(worker, sent)
        asked += [x.peer for x in script.do(e.StageStored(e.Peer(worker))) if isinstance(x, e.Send)]
    assert asked == [1]
    assert not any(isinstance(x, e.Send) and isinstance(x.message, m.SendWeights) for x in script.do(e.Tick()))


def test_a_worker_is_described_with_its_replica(make_script):
    script = make_script(4, num_replicas=2)
    script.ready()
    cause = script.cause(script.say(3, m.Failed(worker="w3", stages=(1,), activity="forward", reason="out of memory")))
    assert "w3 (host host-of-w3, process 7, replica 1, stage 1: layers 3-5) failed" in cause


def test_one_replica_is_told_to_nobody(make_script):
    script = make_script(2)
    script.ready()
    report = m.Failed(worker="w1", stages=(1,), activity="forward", reason="out of memory")
    assert "replica" not in script.cause(script.say(1, msgspec.structs.replace(report)))
