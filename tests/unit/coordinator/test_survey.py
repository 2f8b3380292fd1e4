"""Measuring machines that are elsewhere, as scripts over the pure machine."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence

import msgspec
import pytest

from coordinator import events as e
from coordinator.survey import LINK_S, TRANSITIONS, Phase, Surveyed, SurveyState
from coordinator.surveying import SurveyFailed, cluster_of, pairs_of
from pipecomp.config import ClusterConfig
from pipecomp.errors import LocalProtocolError
from pipecomp.partition import StagePlan
from pipecomp.planning.machines import LayerSeconds, Way, parse_figures, parse_ways
from pipecomp.protocol import messages as m
from pipecomp.types import Rank, Shard

FOUND = m.MachineSurveyed(
    layers=(
        m.LayerFigures(kind="embedding", forward_s=0.001, backward_s=0.002, weights_s=0.0),
        m.LayerFigures(kind="block", forward_s=0.05, backward_s=0.15, weights_s=0.05),
        m.LayerFigures(kind="head", forward_s=0.02, backward_s=0.04, weights_s=0.01),
    ),
    updates_per_s=3e8,
    coded_values_per_s=2e8,
)
UNSOUND = m.LayerFigures(kind="block", forward_s=0.05, backward_s=0.15, weights_s=9.0)
Join = Callable[..., m.Join]


def order_of(joins: Sequence[m.Join], rank: int) -> m.SurveyMachine:
    return m.SurveyMachine(config={}, model_config={}, model_hash=joins[rank].worker, lengths=(7,), num_threads=rank)


def link(worker: str, sent: float, received: float, round_trip_s: float) -> m.LinkSurveyed:
    return m.LinkSurveyed(worker=worker, sent_nbytes_per_s=sent, received_nbytes_per_s=received, round_trip_s=round_trip_s)


class Script:
    """Worker i is peer i and is called w<i>."""

    def __init__(
        self, terms: e.RunTerms, num_workers: int, join: Join, pairs: Sequence[tuple[int, int]], *, num_replicas: int = 1
    ) -> None:
        self.said: list[str] = []
        cluster = ClusterConfig(num_stages=num_workers // num_replicas, num_replicas=num_replicas, join_timeout_s=60.0)
        self.state = SurveyState(cluster, terms, "1.0", pairs=pairs, order=order_of, say=self.said.append)
        self.now = 0.0
        self.join = join
        self.num_workers = num_workers

    def do(self, event: e.Event) -> list[e.Effect]:
        return self.state.handle(event, now=self.now)

    def say(self, worker: int, message: m.ControlMessage) -> list[e.Effect]:
        return self.do(e.MessageReceived(e.Peer(worker), message))

    def gather(self) -> list[e.Effect]:
        for worker in range(self.num_workers - 1):
            self.say(worker, self.join(f"w{worker}"))
        return self.say(self.num_workers - 1, self.join(f"w{self.num_workers - 1}"))

    def measure_machines(self) -> list[e.Effect]:
        self.gather()
        for worker in range(self.num_workers - 1):
            assert self.say(worker, FOUND) == []
        return self.say(self.num_workers - 1, FOUND)


@pytest.fixture
def make(terms: Callable[..., e.RunTerms], join: Join) -> Callable[..., Script]:
    def make_script(num_workers: int = 2) -> Script:
        pairs = [(rank, rank + 1) for rank in range(num_workers - 1)]
        return Script(terms(num_workers), num_workers, join, pairs)

    return make_script


def dial(worker: int, other: int) -> list[e.Effect]:
    order = m.SurveyLink(worker=f"w{other}", data_address=f"memory://w{other}", duration_s=LINK_S)
    return [e.Send(e.Peer(worker), order)]


def test_once_all_have_joined_each_measures_its_own_machine(make: Callable[..., Script]) -> None:
    script = make(3)
    (welcome,) = script.say(0, script.join("w0"))
    assert isinstance(welcome, e.Send) and isinstance(welcome.message, m.Welcome)
    script.say(1, script.join("w1"))
    _, *orders = script.say(2, script.join("w2"))
    joins = [script.join(f"w{rank}") for rank in range(3)]
    assert orders == [e.Send(e.Peer(rank), order_of(joins, rank)) for rank in range(3)]
    assert script.said == [f"w{rank} joined from host-of-w{rank} ({rank + 1} of 3)" for rank in range(3)]


def test_links_are_measured_one_after_another_by_who_dials_them(make: Callable[..., Script]) -> None:
    script = make(3)
    assert script.measure_machines() == dial(0, 1)
    assert script.say(0, link("w1", 1e6, 2e6, 0.02)) == dial(1, 2)
    stop = m.Stop(reason="the plan is made; start the worker again to train", failed=False)
    assert script.say(1, link("w2", 3e6, 4e6, 0.06)) == [e.Send(e.Peer(rank), stop) for rank in range(3)]
    with pytest.raises(LocalProtocolError):
        script.state.results()
    for worker in range(2):
        assert script.say(worker, m.Goodbye(worker=f"w{worker}", reason="")) == []
    assert script.say(2, m.Goodbye(worker="w2", reason="")) == [e.Finish(0, "", stopped_early=False)]
    assert script.state.results() == Surveyed(
        tuple(script.join(f"w{rank}") for rank in range(3)),
        (FOUND,) * 3,
        {(0, 1): link("w1", 1e6, 2e6, 0.02), (1, 2): link("w2", 3e6, 4e6, 0.06)},
    )


@pytest.mark.parametrize(
    ("ranks", "tied", "pairs"),
    [
        ([0, 1, 2], "none", [(0, 1), (1, 2)]),
        ([0, 1, 2, 0], "local", [(0, 1), (1, 2), (2, 0)]),  # the head lies beside the embedding
        ([0, 1, 2], "exchange", [(0, 1), (1, 2), (0, 2)]),
        ([0, 1, 0], "local", [(0, 1)]),
        ([0, 1], "exchange", [(0, 1)]),
        ([0], "none", []),
    ],
)
def test_pairs_are_those_that_exchange_tensors_each_once(
    ranks: list[int], tied: str, pairs: list[tuple[int, int]]
) -> None:
    shards = tuple(Shard(i, i + 1) for i in range(len(ranks)))
    assert pairs_of(StagePlan(shards, tuple(map(Rank, ranks)), tied)) == pairs


def test_pairs_of_replicas_are_those_within_each_and_those_between_workers_of_one_rank() -> None:
    shards = (Shard(0, 1), Shard(1, 2))
    plan = StagePlan(shards, (Rank(0), Rank(1)), "none")
    assert pairs_of(plan, 3) == [(0, 1), (2, 3), (4, 5), (0, 2), (0, 4), (2, 4), (1, 3), (1, 5), (3, 5)]
    assert pairs_of(StagePlan(shards[:1], (Rank(0),), "none"), 2) == [(0, 1)]


def test_all_replicas_are_waited_for_and_measured(terms: Callable[..., e.RunTerms], join: Join) -> None:
    pairs = [(0, 1), (2, 3), (0, 2), (1, 3)]
    script = Script(terms(4, num_replicas=2), 4, join, pairs, num_replicas=2)
    assert script.measure_machines() == dial(0, 1)
    assert [member.replica for member in script.state._roster.members] == [0, 0, 1, 1]
    for pair, after in zip(pairs, [*pairs[1:], None], strict=True):
        effects = script.say(pair[0], link(f"w{pair[1]}", 1e6, 1e6, 0.02))
        assert after is None or effects == dial(*after)
    for worker in range(4):
        script.say(worker, m.Goodbye(worker=f"w{worker}", reason=""))
    cluster = cluster_of(script.state.results())
    assert [machine.name for machine in cluster.machines] == ["w0", "w1", "w2", "w3"]
    assert set(cluster.ways) == {*pairs, *((other, one) for one, other in pairs)}


def test_one_machine_has_no_link(make: Callable[..., Script]) -> None:
    script = make(1)
    script.measure_machines()
    script.do(e.PeerDisconnected(e.Peer(0), "closed"))
    cluster = cluster_of(script.state.results())
    (machine,) = cluster.machines
    assert (machine.up, machine.down, machine.latency_ms, cluster.ways) == (None, None, 0.0, {})


def two_sites(join: Join, **found: object) -> Surveyed:
    """a and b in one house, c and d in another, 20 Mbit/s and 30 ms between them; c and d are one machine."""
    joins = (join("a", memory_nbytes=2**34), join("b"), join("c", host="h", memory_nbytes=2**33), join("d", host="h"))
    links = {
        (0, 1): link("b", 1.25e7, 1.2e7, 0.0),
        (1, 2): link("c", 2.5e6, 2.4e6, 0.06),
        (2, 3): link("d", 1e9, 1e9, 0.001),
    }
    return Surveyed(joins, (FOUND,) * 4, links)._replace(**found)  # type: ignore[arg-type]


def test_machines_and_the_ways_between_them_are_written_as_figures_have_them(join: Join) -> None:
    cluster = cluster_of(two_sites(join))
    a, b, c, _ = cluster.machines
    assert (a.name, a.block, a.head) == ("a", LayerSeconds(0.05, 0.15, 0.05), LayerSeconds(0.02, 0.04, 0.01))
    assert (b.up, b.down, b.latency_ms) == ("96000kbit", None, 0.0)  # its best link's; c sends far more than b receives of it,
    assert (c.up, c.down, c.latency_ms) == ("8000000kbit", None, 0.5)  # but a sends to b all that it can
    assert (a.memory_nbytes, c.memory_nbytes) == (2**34, 2**32)  # shared by two
    way = cluster.ways[Rank(1), Rank(2)]
    assert way == Way(sender="b", receiver="c", rate="20000kbit", latency_ms=30.0)
    assert cluster.ways[Rank(2), Rank(1)] == Way(sender="c", receiver="b", rate="19200kbit", latency_ms=29.5)
    tree = {"workers": [msgspec.to_builtins(each) for each in cluster.machines]}
    tree["links"] = [msgspec.to_builtins(each) for each in cluster.ways.values()]
    machines = parse_figures(tree, 4, "f")
    assert (machines, parse_ways(tree, machines, "f")) == (cluster.machines, cluster.ways)


def test_what_a_machine_can_receive_is_told_where_its_senders_could_send_more(join: Join) -> None:
    links = {(0, 1): link("b", 1e8, 1e8, 0.0), (1, 2): link("c", 2e7, 9e7, 0.0), (2, 3): link("d", 1e8, 1e8, 0.0)}
    cluster = cluster_of(two_sites(join, links=links))
    assert [machine.down for machine in cluster.machines] == [None, None, None, None]
    slow = {(0, 1): link("b", 1e8, 1e8, 0.0), (1, 2): link("c", 2e7, 9e7, 0.0), (2, 3): link("d", 9e7, 2.1e7, 0.0)}
    receiving = cluster_of(two_sites(join, links={**slow, (1, 2): link("c", 2e7, 9e7, 0.0), (3, 0): link("a", 1e8, 1e8, 0.0)}))
    assert receiving.machines[2].down == "168000kbit"  # 20 and 21 MB/s of senders that send 100 MB/s elsewhere


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"links": {(0, 1): link("b", 0.0, 1.0, 0.0)}}, "a measured a link that cannot be"),
        ({"links": {(0, 1): link("b", 1.0, math.inf, 0.0)}}, "a measured a link that cannot be"),
        ({"links": {(0, 1): link("b", 1.0, 1.0, math.nan)}}, "a measured a link that cannot be"),
        ({"machines": (msgspec.structs.replace(FOUND, layers=()),) * 4}, "a measured what cannot be: no block"),
        ({"machines": (msgspec.structs.replace(FOUND, updates_per_s=0.0),) * 4}, "a measured what cannot be"),
        ({"machines": (msgspec.structs.replace(FOUND, coded_values_per_s=math.nan),) * 4}, "> 0"),
        ({"machines": (msgspec.structs.replace(FOUND, layers=(UNSOUND,)),) * 4}, "longer than the backward pass"),
    ],
)
def test_a_worker_that_finds_what_cannot_be_is_named(join: Join, changes: dict[str, object], words: str) -> None:
    with pytest.raises(SurveyFailed, match=words):
        cluster_of(two_sites(join, **changes))


def test_ctrl_c_is_told_to_all(make: Callable[..., Script]) -> None:
    script = make()
    script.gather()
    stop = m.Stop(reason="interrupted", failed=True)
    told = [e.Send(e.Peer(rank), stop) for rank in range(2)]
    assert script.do(e.StopRequested(urgent=True)) == [*told, e.Finish(130, "interrupted", stopped_early=True)]


def test_once_all_is_found_nothing_that_a_worker_says_takes_it_away(make: Callable[..., Script]) -> None:
    script = make()
    script.measure_machines()
    script.say(0, link("w1", 1.0, 1.0, 0.0))
    assert script.say(0, m.Failed(worker="w0", stages=(), activity="", reason="out of memory")) == []
    assert script.say(1, FOUND) == [e.Finish(0, "", stopped_early=False)]
    assert len(script.state.results().machines) == 2


def test_heartbeats_are_answered_before_and_after_joining(make: Callable[..., Script]) -> None:
    script = make()
    beat = m.Heartbeat(sent_at_s=1.5, activity="", step=0, memory_nbytes=0)
    answer = [e.Send(e.Peer(0), m.HeartbeatReply(sent_at_s=1.5, answered_at_s=0.0))]
    assert script.say(0, beat) == answer
    script.say(0, script.join("w0"))
    assert script.say(0, beat) == answer


def test_a_worker_that_differs_is_refused_and_the_others_are_waited_for(make: Callable[..., Script]) -> None:
    script = make()
    refused, disconnect = script.say(0, script.join("w0", version="0.9"))
    assert isinstance(refused, e.Send) and isinstance(refused.message, m.Refused)
    assert "0.9" in refused.message.reason and disconnect == e.Disconnect(e.Peer(0))
    assert script.state.phase is Phase.GATHERING


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (e.MessageReceived(e.Peer(0), m.Failed(worker="w0", stages=(), activity="", reason="out of memory")), "out of memory"),
        (e.MessageReceived(e.Peer(0), m.Goodbye(worker="w0", reason="stopped by SIGINT")), "stopped by SIGINT"),
        (e.PeerDisconnected(e.Peer(0), "reset"), r"its connection ended \(reset\)"),
        (e.MessageReceived(e.Peer(0), link("w1", 1.0, 1.0, 0.0)), "it sent LinkSurveyed while the plan is measuring machines"),
    ],
)
def test_a_worker_that_fails_is_named_and_the_others_are_told(
    make: Callable[..., Script], event: e.Event, words: str
) -> None:
    script = make()
    script.gather()
    told, finish = script.do(event)
    assert isinstance(finish, e.Finish) and finish.exit_code == 1
    assert finish.cause.startswith("w0 (host host-of-w0, process 7, stage 0: layers 0-2) failed while the plan was measuring")
    assert told == e.Send(e.Peer(1), m.Stop(reason=finish.cause, failed=True))
    assert re.search(words, finish.cause)
    assert script.do(e.Tick()) == []


def test_a_result_that_came_twice_or_from_another_worker_ends_it(make: Callable[..., Script]) -> None:
    script = make()
    script.gather()
    script.say(0, FOUND)
    assert "it sent MachineSurveyed" in script.say(0, FOUND)[-1].cause  # type: ignore[union-attr]
    other = make()
    other.measure_machines()
    assert "w1" in other.say(1, link("w0", 1.0, 1.0, 0.0))[-1].cause  # type: ignore[union-attr]


def test_who_does_not_come_or_falls_silent_is_told(make: Callable[..., Script]) -> None:
    script = make()
    script.do(e.Tick())
    script.say(0, script.join("w0"))
    script.now = 61.0
    assert script.do(e.Tick())[-1].cause.startswith("1 of 2 workers joined within 60 s (w0)")  # type: ignore[union-attr]
    script = make()
    script.gather()
    for now in range(1, 40):
        script.now = float(now)
        script.say(0, m.Heartbeat(sent_at_s=0.0, activity="", step=0, memory_nbytes=0))
        effects = script.do(e.Tick())
        if effects:
            break
    assert "w1" in effects[-1].cause and "no heartbeat for 30" in effects[-1].cause  # type: ignore[union-attr]


def test_workers_that_do_not_say_goodbye_are_not_waited_for_long(make: Callable[..., Script]) -> None:
    script = make(1)
    script.measure_machines()
    assert script.do(e.Tick()) == []
    script.now = 6.0
    assert script.do(e.Tick()) == [e.Finish(0, "", stopped_early=False)]


def test_every_phase_has_its_transitions() -> None:
    assert set(TRANSITIONS) == set(Phase)
