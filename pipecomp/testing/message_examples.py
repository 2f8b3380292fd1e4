"""One or more examples of every protocol message, with buffers that fit. Knows message types; no network."""

from __future__ import annotations

from typing import NamedTuple

from pipecomp.protocol.messages import (
    Abort,
    Aborted,
    Ack,
    Assignment,
    Commit,
    Committed,
    Echo,
    Evaluated,
    EvaluationPlan,
    Failed,
    Goodbye,
    GradientMessage,
    Heartbeat,
    HeartbeatReply,
    Join,
    LayerFigures,
    LayerNorms,
    LinkHello,
    LinkLost,
    LinkMeter,
    LinkSurveyed,
    MachineSurveyed,
    Message,
    Prepared,
    Ready,
    Refused,
    Resend,
    Resent,
    RoundTrip,
    SampleHeader,
    SampleRef,
    SendWeights,
    Spans,
    SpeedChunk,
    SpeedProbe,
    SpeedTaken,
    SpeedTold,
    SpeedTurn,
    StageAddress,
    StepFailed,
    StepPlan,
    StepReport,
    Stop,
    StoreMeter,
    SurveyLink,
    SurveyMachine,
    TensorEntry,
    TensorMessage,
    Traffic,
    WeightsChunk,
    WeightsRequest,
    WeightsSent,
    Welcome,
)
from pipecomp.types import Kind


class Example(NamedTuple):
    message: Message
    buffers: tuple[bytes, ...]


_SAMPLES = ((2**64 - 1, 7), (0, 1), (12_345_678_901_234_567_890, 256))
_TRAFFIC = (Traffic(link="0/0-1", kind=Kind.FORWARD, values=2**40, payload_nbytes=7, header_nbytes=200, messages=1),)
_METERS = (
    LinkMeter(
        link="0/0-1",
        kind=Kind.FORWARD,
        squared_error=1e-9,
        squared_delta=float("nan"),
        squared_delta_values=float("inf"),
        squared_values=-0.0,
        first_visits=3,
        fallbacks=1,
        samples=8,
    ),
)
_STORES = (
    StoreMeter(
        link="0/0-1",
        end="receiver",
        hits=7,
        misses=3,
        lost=1,
        healed=2,
        disk_reads=4,
        wait_s=0.25,
        memory_nbytes=2**40,
        disk_nbytes=0,
    ),
)
_STAGE = StageAddress(
    stage=0, rank=0, first_layer=0, end_layer=3, worker="a", data_address="tcp://a:1", needs_input_gradient=False
)
_REFS = (tuple(SampleRef(sample_id, length) for sample_id, length in _SAMPLES), (SampleRef(5, 1),))
_HEADERS = tuple(
    SampleHeader(sample_id, version, length, version * (2**63 - 1), version > 0)
    for version, (sample_id, length) in enumerate(_SAMPLES)
)


def examples() -> tuple[Example, ...]:
    """At least one of every type."""
    return tuple(Example(m, _buffers(m)) for m in (*_joining(), *_steps(), *_life(), *_links(), *_survey()))


def _buffers(message: Message) -> tuple[bytes, ...]:
    lengths = getattr(message, "buffer_nbytes", ())
    return tuple(bytes((i + 17 * j) % 256 for j in range(nbytes)) for i, nbytes in enumerate(lengths))


def _joining() -> tuple[Message, ...]:
    return (
        Join(
            protocol_version=1,
            version="0.1.0",
            worker="worker-ä",
            host="h",
            process_id=77,
            data_address="tcp://10.0.0.1:5555",
            device="cpu",
            num_cores=2,
            memory_nbytes=2**40,
            config_hash="c0ffee",
        ),
        Refused(worker="a", reason="version 0.1.0 here, 0.2.0 there"),
        Welcome(run="beef", worker="a", weights_address="tcp://c:1", heartbeat_interval_s=0.5, heartbeat_timeout_s=5.0),
        Assignment(
            run="beef",
            epoch=1,
            replica=0,
            rank=0,
            stages=(_STAGE,),
            tied="none",
            config={"train": {"learning_rate": 5e-5, "seed": -1, "freeze": ["a", None, True]}},
            model_config={"model_type": "gpt2", "layers": [[-100, 2.5], {}]},
            random_weights=False,
            tensors=(TensorEntry(name="w", dtype="F32", shape=(2, 3), nbytes=24, content_hash="ab"),),
            model_hash="12",
            num_threads=0,
        ),
        Ready(epoch=1, num_parameters=10, num_trainable=9, peak_memory_nbytes=2**31),
    )


def _steps() -> tuple[Message, ...]:
    report = StepReport(compute_s=0.5, peak_memory_nbytes=1, message_nbytes=2, traffic=_TRAFFIC, meters=_METERS, stores=_STORES)
    return (
        StepPlan(
            epoch=1,
            step=3,
            learning_rate=1e-4,
            num_targets=260,
            microbatches=_REFS,
            has_input_ids=True,
            has_labels=True,
            buffer_nbytes=(1060, 1060),
        ),
        Prepared(epoch=1, step=3, loss_sums=(1.5, float("nan")), layer_norms=(LayerNorms(0, (0.5, 1e300)),)),
        StepFailed(epoch=1, step=3, stage=2, reason="loss is nan"),
        Commit(epoch=1, step=3, gradient_norm=2.0, clip_coefficient=0.5),
        Abort(epoch=1, step=3, reason="x" * 300),
        Committed(epoch=1, step=3, report=report),
        Aborted(epoch=1, step=3),
        EvaluationPlan(
            epoch=1, evaluation=0, microbatches=_REFS[1:], has_input_ids=True, has_labels=False, buffer_nbytes=(4,)
        ),
        Evaluated(epoch=1, evaluation=0, loss_sums=(3.25,), traffic=_TRAFFIC),
        Evaluated(epoch=1, evaluation=1, loss_sums=(3.25, 0.5), num_correct=(2, 0), traffic=()),
    )


def _life() -> tuple[Message, ...]:
    return (
        Heartbeat(sent_at_s=12.5, activity="forward of microbatch 3", step=17, memory_nbytes=5),
        Heartbeat(sent_at_s=13.0, activity="", step=0, memory_nbytes=0, round_trips=(RoundTrip(12.5, -3.5, 12.625),)),
        HeartbeatReply(sent_at_s=12.5, answered_at_s=-3.5),
        Spans(names=("compute", "0/0-1"), num_dropped=0, buffer_nbytes=(40,)),
        SendWeights(epoch=1),
        WeightsSent(epoch=1, num_tensors=12, traffic=()),
        Failed(worker="a", stages=(0, 3), activity="backward", reason="out of memory"),
        LinkLost(link="0/0-1", peer_worker="b", reason="no connection for 3 s"),
        Stop(reason="done", failed=False),
        Goodbye(worker="a", reason=""),
    )


def _links() -> tuple[Message, ...]:
    return (
        LinkHello(run="beef", epoch=1, link="0/0-1", worker="a", next_sequence=0),
        Ack(sequence=4),
        Resent(
            sequence=6,
            step=3,
            microbatch=0,
            kind=Kind.FORWARD,
            sample_id=2**64 - 1,
            version=2,
            checksum=2**64 - 2,
            dtype="bf16",
            num_rows=1,
            num_columns=3,
            reason="",
            buffer_nbytes=(6,),
        ),
        Resend(sequence=5, step=3, microbatch=0, kind=Kind.FORWARD, sample_id=2**64 - 1, reason="no message"),
        TensorMessage(
            sequence=6,
            run="beef",
            epoch=1,
            replica=0,
            kind=Kind.BACKWARD,
            step=3,
            microbatch=1,
            stage=2,
            codec="delta",
            num_columns=64,
            samples=_HEADERS,
            evicted=(5, 2**64 - 1),
            buffer_nbytes=(33, 0, 5),
        ),
        GradientMessage(
            sequence=7,
            run="beef",
            epoch=1,
            replica=0,
            kind=Kind.TIED,
            step=3,
            stage=0,
            codec="identity",
            name="transformer.wte.weight",
            offset=2**33,
            num_values=25,
            buffer_nbytes=(100,),
        ),
        WeightsRequest(sequence=8, name="w", offset=0, nbytes=2**30),
        WeightsChunk(sequence=9, name="w", dtype="BF16", shape=(3,), offset=2, total_nbytes=6, buffer_nbytes=(4,)),
    )


def _survey() -> tuple[Message, ...]:
    return (
        SurveyMachine(
            config={"train": {"seed": -1}}, model_config={"model_type": "gpt2"}, model_hash="12", lengths=(7, 128), num_threads=2
        ),
        MachineSurveyed(
            layers=(LayerFigures(kind="block", forward_s=0.05, backward_s=0.15, weights_s=0.05),),
            updates_per_s=3e8,
            coded_values_per_s=2.5e8,
        ),
        SurveyLink(worker="b", data_address="tcp://10.0.0.2:7702", duration_s=2.0),
        LinkSurveyed(worker="b", sent_nbytes_per_s=2.5e6, received_nbytes_per_s=1.25e7, round_trip_s=0.03),
        SpeedProbe(worker="a", to="b", duration_s=2.0),
        Echo(number=3),
        SpeedChunk(buffer_nbytes=(300,)),
        SpeedTaken(),
        SpeedTurn(),
        SpeedTold(nbytes_per_s=1.25e7),
    )
