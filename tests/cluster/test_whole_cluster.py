"""Coordinator and workers, all real, in one loop over the memory transport: what only the whole can show."""

from __future__ import annotations

import asyncio
import io
import json
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from coordinator import preparation
from coordinator.batches import Wanted
from coordinator.console import PlainConsole
from coordinator.events import Finish
from coordinator.planning import Source, as_tree, make_plan
from coordinator.preparation import prepare_run
from coordinator.saving import ModelSaver
from coordinator.service import CoordinatorService, ServiceOptions, Surroundings
from coordinator.summary import make_summary
from pipecomp import __version__
from pipecomp.config import RunConfig, config_hash, parse_run_config
from pipecomp.errors import StoreError
from pipecomp.runtime import assembly, rehearsal
from pipecomp.runtime.compute import ComputeThread
from pipecomp.runtime.stage import StageRuntime
from pipecomp.runtime.stores import StoreHome
from pipecomp.transport.base import Address
from pipecomp.transport.memory import MemoryNetwork, MemoryTransport
from workers.job import AssignedWork
from workers.service import WorkerOptions, WorkerService

EXAMPLES = Path(__file__).parents[2] / "examples"
IDENTITY = {"codec": "identity"}
DEMO: dict[str, Any] = json.loads((EXAMPLES / "demo-gpt2" / "config.json").read_text())


def make_config(folder: Path, **sections: dict[str, Any]) -> RunConfig:
    tree: dict[str, dict[str, Any]] = {
        "model": {"name": str(EXAMPLES / "demo-gpt2"), "weights": "random"},
        "data": {
            "train": str(EXAMPLES / "state-of-the-union.jsonl"),
            "max_length": 16,
            "packing": True,
            "max_train_samples": 13,
            "max_eval_samples": 5,
        },
        "train": {
            "batch_size": 4,
            "num_microbatches": 2,
            "learning_rate": 1e-3,
            "output_dir": str(folder / "model"),
            "max_grad_norm": 0.0,
        },
        "compression": {"forward": IDENTITY, "backward": IDENTITY, "evaluation": IDENTITY},
        "cluster": {"num_stages": 2, "heartbeat_timeout_s": 60.0},  # one process, and perhaps a busy machine
    }
    for name, values in sections.items():
        tree[name] = tree.get(name, {}) | values
    return parse_run_config(tree)


class Cluster:
    """One run in this loop."""

    def __init__(self, config: RunConfig, home: StoreHome = StoreHome()) -> None:  # noqa: B008 - a frozen value
        self.config = config
        self.home = home
        self.network = MemoryNetwork()
        self.output = io.StringIO()
        self.compute = ComputeThread(num_threads=1)
        self.work, self.disk = ComputeThread(), ComputeThread()
        self.service = CoordinatorService(
            config,
            ServiceOptions(
                run="run", version=__version__, bind=Address("memory://control"), weights_bind=Address("memory://weights")
            ),
            Surroundings(
                transport=MemoryTransport(self.network),
                clock=asyncio.get_running_loop().time,
                sleep=asyncio.sleep,
                prepare=partial(prepare_run, cache_folder=None),
                work=self.work,
                disk=self.disk,
                console=PlainConsole(self.output),
                step_log=None,
            ),
        )
        self.workers: list[WorkerService] = []

    async def run(self, before_start: Callable[[WorkerService], None] | None = None) -> tuple[Finish, dict[str, Any]]:
        ready = asyncio.Event()
        leading = asyncio.create_task(self.service.run(lambda _: ready.set()))
        await ready.wait()
        for rank in range(self.config.cluster.num_stages * self.config.cluster.num_replicas):
            transport = MemoryTransport(self.network)
            name = f"worker-{rank}"
            work = AssignedWork(
                name=name,
                data_address=Address(f"memory://{name}"),
                transport=transport,
                compute=self.compute,
                home=self.home,
            )
            options = WorkerOptions(coordinator="memory://control", name=name)
            self.workers.append(
                WorkerService(options, control=MemoryTransport(self.network), work=work, clock=asyncio.get_running_loop().time)
            )
        if before_start is not None:
            for worker in self.workers:
                before_start(worker)
        try:
            finish, *_ = await asyncio.gather(leading, *(worker.run() for worker in self.workers))
        finally:
            for thread in (self.compute, self.work, self.disk):
                thread.close()
        summary = make_summary(
            self.service.ledger,
            self.service.own_traffic(),
            wall_time_s=1.0,
            stopped_early=finish.stopped_early,
            cause=finish.cause,
        )
        return finish, summary


def plain_loss(folder: Path, config: RunConfig) -> float:
    """Held-out loss of the saved folder in plain transformers."""
    from transformers import AutoModelForCausalLM

    alone = msgspec.structs.replace(config.cluster, num_replicas=1)  # who has all samples
    batches = prepare_run(msgspec.structs.replace(config, cluster=alone), None).batches
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    loss_sum, num_targets = 0.0, 0
    for part, size in enumerate(batches.evaluation_sizes):
        plan, buffers = batches.evaluation_plan(epoch=1, evaluation=1, part=part, wanted=Wanted(True, True))
        num_targets += size.targets
        ids, labels = (np.frombuffer(buffer, "<i4").astype(np.int64) for buffer in buffers)
        ends = np.cumsum([ref.length for refs in plan.microbatches for ref in refs])[:-1]
        for row, row_labels in zip(np.split(ids, ends), np.split(labels, ends), strict=True):
            with torch.no_grad():
                out = model(
                    input_ids=torch.from_numpy(row)[None], labels=torch.from_numpy(row_labels)[None], num_items_in_batch=1
                )
            loss_sum += float(out.loss)
    return loss_sum / num_targets


async def test_a_trained_model_opens_in_plain_transformers_with_the_loss_of_the_summary(tmp_path: Path) -> None:
    config = make_config(tmp_path, model={"freeze": ["transformer.wte.*", "*.h.0.*"]})
    finish, summary = await Cluster(config).run()
    assert finish.exit_code == 0, finish.cause
    assert summary["steps"] == 4
    assert summary["eval_loss"] < summary["initial_eval_loss"]
    assert plain_loss(tmp_path / "model", config) == pytest.approx(summary["eval_loss"], rel=1e-6)


BERT = {
    "model_type": "bert", "num_hidden_layers": 3, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2,
    "max_position_embeddings": 32, "vocab_size": 1024, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip


async def test_a_trained_classifier_opens_in_plain_transformers_with_the_loss_and_accuracy_of_the_summary(
    tmp_path: Path,
) -> None:
    rows = [{"text": f"{word} {n}", "kind": kind} for n in range(12) for kind, word in (("praise", "good"), ("blame", "bad"))]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"train": str(tmp_path / "texts.jsonl"), "label_column": "kind", "tokenizer": str(EXAMPLES / "demo-gpt2")}
    config = make_config(
        tmp_path,
        model={"name": "", "config": BERT, "task": "sequence-classification"},
        data={**data, "packing": False, "max_train_samples": None, "max_eval_samples": 7},
        train={"num_train_epochs": 8, "learning_rate": 1e-2},
        cluster={"num_stages": 3},
    )
    cluster = Cluster(config)
    finish, summary = await cluster.run()
    assert finish.exit_code == 0, finish.cause
    assert summary["eval_loss"] < summary["initial_eval_loss"]
    loss, accuracy = plain_classifier(tmp_path / "model", config)
    assert loss == pytest.approx(summary["eval_loss"], rel=1e-6)
    assert accuracy == summary["eval_accuracy"] == summary["evaluations"][-1]["accuracy"]
    assert f"accuracy {accuracy:.4f}, after 40 steps (7 samples)" in cluster.output.getvalue()


def plain_classifier(folder: Path, config: RunConfig) -> tuple[float, float]:
    """Held-out loss and accuracy of the saved folder in plain transformers, from the names of its classes."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.config.label2id == {"blame": 0, "praise": 1}
    batches = prepare_run(config, None).batches
    plan, (ids, _) = batches.evaluation_plan(epoch=1, evaluation=1, part=0, wanted=Wanted(True, True))
    lengths = [ref.length for refs in plan.microbatches for ref in refs]
    texts = tokenizer.batch_decode(np.split(np.frombuffer(ids, "<i4"), np.cumsum(lengths)[:-1]))
    loss_sum, num_correct = 0.0, 0
    for text in texts:
        label = "praise" if text.startswith("good") else "blame"
        with torch.no_grad():
            out = model(**tokenizer(text, return_tensors="pt"), labels=torch.tensor([model.config.label2id[label]]))
        loss_sum += float(out.loss)
        num_correct += model.config.id2label[int(out.logits.argmax())] == label
    return loss_sum / len(texts), num_correct / len(texts)


TIED = {
    "model": {"name": "", "config": {**DEMO, "tie_word_embeddings": True}},
    "data": {"tokenizer": str(EXAMPLES / "demo-gpt2")},
}


@pytest.mark.parametrize(
    ("num_stages", "num_replicas", "sections"),
    [
        (3, 1, {}),
        (2, 2, {}),
        (1, 3, {"compression": {"gradients": {"codec": "sparse", "bits": 4, "top": 0.1}}}),
        (2, 2, {**TIED, "compression": {"gradients": IDENTITY}, "cluster": {"tied_weights": "exchange"}}),
        (2, 2, {**TIED, "cluster": {"tied_weights": "colocate"}}),
    ],
    ids=str,
)
async def test_a_run_sends_the_bytes_that_its_plan_says(
    tmp_path: Path, num_stages: int, num_replicas: int, sections: dict[str, Any]
) -> None:
    codecs = {"forward": {"codec": "delta", "bits": 4}, "backward": {"codec": "uniform", "bits": 8}}
    config = make_config(
        tmp_path,
        model=sections.get("model", {}),
        data={"packing": False, "max_length": 24, "max_train_samples": 12, **sections.get("data", {})},
        train={"num_train_epochs": 3, "batch_size": 6 if num_replicas == 3 else 4},
        compression={**codecs, **sections.get("compression", {})},
        cluster={"num_stages": num_stages, "num_replicas": num_replicas, **sections.get("cluster", {})},
    )
    figures = tmp_path / "figures.json"
    figures.write_text(json.dumps({"workers": [{"multiply_adds_per_s": 1e9}] * (num_stages * num_replicas)}))
    plan = make_plan(config, Source(figures=str(figures)), cache_folder=None)
    planned = plan.prediction["traffic"]
    _, summary = await Cluster(config).run()
    measured = {kind: row["payload_bytes"] + row["header_bytes"] for kind, row in summary["traffic"].items()}
    assert planned == {kind: pytest.approx(measured[kind], rel=0.01) for kind in planned}
    assert planned["gradients"] == pytest.approx(measured["gradients"], rel=1e-3)
    assert (planned["gradients"] > 0) == (num_replicas > 1)
    kept = sorted(row["message_bytes"] for row in summary["workers"].values())
    [as_written, *_] = as_tree(plan)["settings"]
    found = sorted(row["kept_message_bytes"] for row in as_written["workers"])
    assert sum(found) == pytest.approx(sum(kept), abs=len(kept))  # samples are shared out by number, not by length
    assert num_replicas > 1 or found == kept


async def test_every_kind_of_traffic_is_in_the_summary_and_none_is_left_out(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    cluster = Cluster(config)
    _, summary = await cluster.run()
    assert set(summary["traffic"]) == {"forward", "backward", "gradients", "tied", "evaluation", "weights", "control"}
    hidden, tokens, steps = 128, 13 * 16, 1
    for kind in ("forward", "backward"):
        assert summary["traffic"][kind]["values"] == hidden * tokens * steps
        assert summary["traffic"][kind]["payload_bytes"] == 4 * hidden * tokens * steps
    assert summary["traffic"]["evaluation"]["values"] == 2 * hidden * 5 * 16  # before and after training
    model_nbytes = 4 * sum(p.numel() for p in _parameters(tmp_path / "model"))
    assert summary["traffic"]["weights"]["payload_bytes"] == model_nbytes
    reported = {part.link for parts in cluster.service.ledger._traffic.values() for part in parts}
    assert reported == {"0/0-1", "weights/worker-0", "weights/worker-1"}


async def test_the_gradients_of_a_tied_weight_are_in_the_summary(tmp_path: Path) -> None:
    demo = EXAMPLES / "demo-gpt2"
    tied = {**json.loads((demo / "config.json").read_text()), "tie_word_embeddings": True}
    config = make_config(
        tmp_path,
        model={"name": "", "config": tied},
        data={"tokenizer": str(demo)},
        train={"max_steps": 2},
        compression={"tied": IDENTITY},
        cluster={"tied_weights": "exchange"},
    )
    finish, summary = await Cluster(config).run()
    assert finish.exit_code == 0, finish.cause
    num_values = 2 * 2 * tied["vocab_size"] * tied["n_embd"]  # two ends, two steps
    assert summary["traffic"]["tied"]["values"] == num_values
    assert summary["traffic"]["tied"]["payload_bytes"] == 4 * num_values


def _parameters(folder: Path) -> list[torch.Tensor]:
    from safetensors.torch import load_file

    return [tensor for file in folder.glob("*.safetensors") for tensor in load_file(file).values()]


async def test_heartbeats_survive_a_long_backward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Law 9: the backward below ends only when the coordinator has heard the worker three more times."""
    enough = threading.Event()
    backward = StageRuntime.backward

    def long_backward(self: StageRuntime, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        assert enough.wait(60), "no heartbeat came while the compute thread was busy"
        return backward(self, *args, **kwargs)

    monkeypatch.setattr(StageRuntime, "backward", long_backward)
    config = make_config(tmp_path, train={"max_steps": 1}, cluster={"heartbeat_interval_s": 0.05, "heartbeat_timeout_s": 30.0})
    cluster = Cluster(config)
    heard = 0

    def watch(worker: WorkerService) -> None:
        send = worker._send

        async def counting(message: Any, *buffers: Any) -> None:
            nonlocal heard
            if type(message).__name__ == "Heartbeat" and "backward of microbatch" in message.activity:
                heard += 1
                if heard >= 3:
                    enough.set()
            await send(message, *buffers)

        worker._send = counting  # type: ignore[method-assign]

    finish, _ = await cluster.run(watch)
    assert finish.exit_code == 0, finish.cause
    assert heard >= 3


async def test_the_summary_says_where_each_workers_time_went(tmp_path: Path) -> None:
    cluster = Cluster(make_config(tmp_path))
    finish, summary = await cluster.run()
    assert finish.exit_code == 0, finish.cause
    assert {worker: row["steps"] for worker, row in summary["time"].items()} == {"worker-0": 4, "worker-1": 4}
    for row in summary["time"].values():
        parts = [row[name] for name in ("computing", "link", "store", "coding", "bubble", "other")]
        assert sum(parts) == pytest.approx(1.0)
        assert min(parts) > -1e-9
        assert row["computing"] > 0
    assert {link["from"] for link in summary["time"]["worker-1"]["links"]} == {"worker-0"}


async def test_clocks_are_compared_by_heartbeats(tmp_path: Path) -> None:
    """All of them read one clock here, so the offset that is found is all error."""
    cluster = Cluster(make_config(tmp_path, cluster={"heartbeat_interval_s": 0.02, "heartbeat_timeout_s": 60.0}))
    finish, _ = await cluster.run()
    assert finish.exit_code == 0, finish.cause
    clocks = cluster.service.timeline.clocks
    assert set(clocks) == {"worker-0", "worker-1"}
    now = asyncio.get_running_loop().time()
    for clock in clocks.values():
        assert abs(clock.offset_s(now)) <= clock.error_s(now) < 60


async def test_reading_building_and_saving_run_beside_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, set[threading.Thread]] = {}

    def watch(owner: Any, name: str) -> None:
        inner = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            seen.setdefault(name, set()).add(threading.current_thread())
            return inner(*args, **kwargs)

        monkeypatch.setattr(owner, name, watched)

    watch(preparation, "open_model")
    watch(assembly, "build_modules")
    watch(rehearsal, "rehearse_codecs")
    for name in ("add", "finish"):
        watch(ModelSaver, name)
    finish, _ = await Cluster(make_config(tmp_path, train={"max_steps": 1})).run()
    assert finish.exit_code == 0, finish.cause
    in_the_loop = [name for name, threads in seen.items() if threading.current_thread() in threads]
    assert sorted(seen) == ["add", "build_modules", "finish", "open_model", "rehearse_codecs"]
    assert not in_the_loop


async def test_a_step_whose_values_are_not_finite_is_aborted_everywhere_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = StageRuntime.forward

    def broken_forward(self: StageRuntime, step: int, *args: Any, **kwargs: Any) -> Any:
        result = forward(self, step, *args, **kwargs)
        if step == 2 and result.hidden is not None:
            return result._replace(hidden=result.hidden * float("inf"))
        return result

    monkeypatch.setattr(StageRuntime, "forward", broken_forward)
    compression = {"forward": {"codec": "delta", "bits": 4}, "backward": {"codec": "uniform", "bits": 8}}
    finish, summary = await Cluster(make_config(tmp_path, compression=compression)).run()
    assert finish.exit_code == 0, finish.cause
    assert [a["step"] for a in summary["aborted_steps"]] == [2]
    assert summary["steps"] == 3


async def test_a_worker_that_wants_another_configuration_is_refused_by_name(tmp_path: Path) -> None:
    cluster = Cluster(make_config(tmp_path, cluster={"join_timeout_s": 0.5}))
    wanted = {"worker-0": config_hash(cluster.config), "worker-1": "0" * 16}

    def want(worker: WorkerService) -> None:
        worker.options = msgspec.structs.replace(worker.options, config_hash=wanted[worker.options.name])

    finish, _ = await cluster.run(want)
    assert "1 of 2 workers joined within 0.5 s (worker-0)" in finish.cause
    assert f"configuration hash {wanted['worker-0']}\n" in cluster.output.getvalue()
    refusal = f"refused: worker 'worker-1' has configuration hash {'0' * 16}, this coordinator has {wanted['worker-0']}"
    assert refusal in cluster.output.getvalue()


async def test_one_worker_alone_trains_the_whole_model(tmp_path: Path) -> None:
    finish, summary = await Cluster(make_config(tmp_path, cluster={"num_stages": 1})).run()
    assert finish.exit_code == 0, finish.cause
    assert summary["eval_loss"] < summary["initial_eval_loss"]
    assert summary["traffic"]["forward"]["values"] == 0


async def test_a_run_of_steps_that_are_not_finite_ends_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = StageRuntime.forward

    def broken_forward(self: StageRuntime, step: int, *args: Any, **kwargs: Any) -> Any:
        result = forward(self, step, *args, **kwargs)
        return result if result.hidden is None else result._replace(hidden=result.hidden * float("nan"))

    monkeypatch.setattr(StageRuntime, "forward", broken_forward)
    config = make_config(
        tmp_path, compression={"forward": {"codec": "uniform", "bits": 4}}, train={"max_aborted_steps": 1}
    )
    finish, _ = await Cluster(config).run()
    assert finish.exit_code == 1
    assert "2 steps in a row had to be aborted" in finish.cause
    assert "NaN" in finish.cause or "not finite" in finish.cause


async def test_a_worker_that_fails_is_named_with_its_stage_and_what_it_was_doing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken_backward(self: StageRuntime, *_: Any, **__: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(StageRuntime, "backward", broken_backward)
    finish, _ = await Cluster(make_config(tmp_path)).run()
    assert finish.exit_code == 1
    assert "worker-1" in finish.cause
    assert "backward of microbatch 0 on stage 1" in finish.cause
    assert "out of memory" in finish.cause


@pytest.fixture
def no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    def open_store(*_: Any, **__: Any) -> None:
        raise StoreError("message store kept: No space left on device")

    monkeypatch.setattr(assembly, "open_store", open_store)


async def test_a_store_that_cannot_be_opened_is_told_as_that(tmp_path: Path, no_store: None) -> None:
    finish, _ = await Cluster(make_config(tmp_path, compression={"forward": {"codec": "delta", "bits": 4}})).run()
    assert "last heard opening message stores: message store kept: No space left on device" in finish.cause


async def test_a_budget_that_is_too_small_is_told_before_training(tmp_path: Path, no_store: None) -> None:
    config = make_config(
        tmp_path,
        compression={"forward": {"codec": "delta", "bits": 4}},
        messages={"memory_budget": "50kB"},
        train={"num_train_epochs": 2},
    )
    cluster = Cluster(config)
    await cluster.run()
    assert "messages: link 0-1 has room for 47% of them (50.0 kB of 106.5 kB at each end)" in cluster.output.getvalue()


async def test_where_the_number_of_replicas_changes_only_samples_that_must_move_are_sent_as_on_a_first_visit(
    tmp_path: Path,
) -> None:
    found = []
    for num_replicas in (2, 3, 2):
        config = make_config(
            tmp_path,
            data={"max_train_samples": 26, "max_eval_samples": 0},
            train={"batch_size": 7, "num_microbatches": 2, "num_train_epochs": 2, "learning_rate": 1e-5, "save_model": False},
            compression={"forward": {"codec": "delta", "bits": 4}},
            cluster={"num_stages": 3, "num_replicas": num_replicas},
            messages={"store": "disk"},
        )
        finish, summary = await Cluster(config, StoreHome(tmp_path)).run()
        assert finish.exit_code == 0, finish.cause
        links = {name: kinds["forward"] for name, kinds in summary["links"].items() if "forward" in kinds}
        assert len(links) == 2 * num_replicas
        assert sum(meter["samples"] for meter in links.values()) == 2 * 2 * 26
        found.append({name: (meter["first_visits"], meter["fallbacks"]) for name, meter in sorted(links.items())})
    assert found[0] == {"0/0-1": (13, 0), "0/1-2": (13, 0), "1/0-1": (13, 0), "1/1-2": (13, 0)}
    assert found[1] == {  # a third of all samples are new to the third replica; the other two know theirs
        **{f"{replica}/{link}": (0, 0) for replica in (0, 1) for link in ("0-1", "1-2")},
        **{f"2/{link}": (26 // 3, 0) for link in ("0-1", "1-2")},
    }
    assert set(found[2].values()) == {(0, 0)}  # those that come back are known from before


async def test_replicas_that_train_apart_exchange_parameters_every_few_steps_and_end_with_one_model(tmp_path: Path) -> None:
    config = make_config(
        tmp_path,
        data={"max_train_samples": 26},
        train={"num_train_epochs": 2, "eval_steps": 5},  # 14 steps: averages after 4, 5, 9, 10, 14
        cluster={"num_replicas": 2},
        replicas={"local_steps": 4, "check_steps": 1},
    )
    cluster = Cluster(config)
    finish, summary = await cluster.run()
    assert finish.exit_code == 0, finish.cause
    values = {name: sum(p.numel() for p in _trained(worker)) for name, worker in zip("ab", cluster.workers[:2], strict=True)}
    assert summary["steps"] == 14
    # Each parameter crosses to its owner and back as a sum, from either side one of the two.
    assert summary["traffic"]["gradients"]["values"] == 5 * 2 * sum(values.values())
    assert summary["eval_loss"] == pytest.approx(plain_loss(tmp_path / "model", config), rel=1e-4)
    assert summary["eval_loss"] < summary["initial_eval_loss"]


def _trained(worker: WorkerService) -> list[torch.nn.Parameter]:
    return [owned.parameter for owned in worker._work._ready.optimizer.owned]


@pytest.mark.parametrize("ways", [{}, {"overlap": True}], ids=str)
async def test_replicas_by_quantized_adam_or_a_step_late_train_and_stay_the_same(tmp_path: Path, ways: dict[str, Any]) -> None:
    optim = {} if ways else {"optim": "quantized_adam"}
    config = make_config(
        tmp_path,
        data={"max_train_samples": 26 if ways else 240},
        train={"num_train_epochs": 2, **optim},
        cluster={"num_replicas": 2},
        replicas={"check_steps": 1, **ways},
    )
    cluster = Cluster(config)
    finish, summary = await cluster.run()
    assert finish.exit_code == 0, finish.cause
    assert summary["eval_loss"] == pytest.approx(plain_loss(tmp_path / "model", config), rel=1e-4)
    assert summary["eval_loss"] < summary["initial_eval_loss"]
    frozen = summary["second_moments_frozen_after_step"]
    if ways:
        assert frozen is None
    else:
        assert 18 + 6 < frozen < 120  # 15 % of 120 steps, a window of 5 %, and then until they are steady
        assert f"second moments stay as after step {frozen}" in cluster.output.getvalue()
