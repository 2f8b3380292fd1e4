"""The gradient hook under torch's own DistributedDataParallel: real processes, gloo on the loopback interface.

Each launch starts one process a rank, which runs this file: the scenarios that it is told, in turn, each in a few steps. Tests
look at what the ranks report.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import xxhash
from torch.nn.parallel import DistributedDataParallel

from pipecomp.ddp import CompressionState, compressed_allreduce
from pipecomp.errors import ConfigError, NonFiniteValues, PeerLost, WorkerFailed

TEXT = Path(__file__).parents[2] / "examples" / "state-of-the-union.jsonl"
FOUR_BITS = {"codec": "uniform", "bits": 4}
BY_CHANCE = {"codec": "uniform", "bits": 3, "rounding": "stochastic"}
BY_FEW = {"codec": "uniform", "bits": 2}
GPT2_STEPS = 120
LAUNCH_S = 100

QUICK = ["exact", "ragged", "feedback", "resumable", "unused", "overlap", "bf16", "settings", "states", "refused", "nan"]


# ------------------------------------------------------------------------------------------------ what happens in one rank


def small_model(width: int = 90) -> torch.nn.Module:
    """Layers of many shapes: parameters smaller than a piece, of an odd number of values, of several pieces."""
    torch.manual_seed(5)
    relu = torch.nn.ReLU()
    return torch.nn.Sequential(
        torch.nn.Linear(7, width), relu, torch.nn.Linear(width, width), torch.nn.LayerNorm(width), relu, torch.nn.Linear(width, 3)
    )


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of another size on each rank and in each step; one sample at least."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(1 + (3 * rank + 5 * step) % 7, 7, generator=generator)
    return inputs, torch.stack([inputs.sum(1), inputs[:, 0] * inputs[:, 1], inputs[:, 2].abs()], 1)


def wrapped(model: torch.nn.Module, state: CompressionState, **options: Any) -> DistributedDataParallel:
    model = DistributedDataParallel(model, **{"bucket_cap_mb": 0.001, **options})
    model.register_comm_hook(state, compressed_allreduce)
    return model


def train(model: DistributedDataParallel, rank: int, steps: range, learning_rate: float = 0.05) -> Iterator[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), learning_rate)
    for step in steps:
        inputs, targets = batch(rank, step)
        loss = (model(inputs) - targets).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.detach()


def digest(model: torch.nn.Module) -> str:
    hashed = xxhash.xxh3_128()
    for parameter in model.parameters():
        hashed.update(parameter.detach().reshape(-1).view(torch.uint8).numpy())
    return hashed.hexdigest()


def raised_by(call: Any) -> list[str]:
    try:
        call()
    except Exception as error:  # noqa: BLE001 - to be reported
        return [type(error).__name__, str(error)]
    return []


def exact(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    state = CompressionState({"codec": "identity"})
    model, plain = wrapped(small_model(), state), DistributedDataParallel(small_model())
    gap = 0.0
    for step, _ in enumerate(train(model, rank, range(5))):
        inputs, targets = batch(rank, step)
        plain.zero_grad()
        (plain(inputs) - targets).square().mean().backward()
        for own, torchs in zip(model.parameters(), plain.parameters(), strict=True):
            gap = max(gap, float((own.grad - torchs.grad).abs().max() / torchs.grad.abs().max()))
        plain.load_state_dict(model.state_dict())
    return {"gap": gap, "digest": digest(model), "errors": len(state.state_dict()["errors"])}


def ragged(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    state = CompressionState(FOUR_BITS, warmup_steps=1)
    model = DistributedDataParallel(small_model(), bucket_cap_mb=0.001)
    seen: list[tuple[int, int]] = []

    def noting(state, bucket):  # DDP takes no annotation but its own
        seen.append((state.step, bucket.index()))
        return compressed_allreduce(state, bucket)

    model.register_comm_hook(state, noting)
    digests, nbytes = [], []
    for _ in train(model, rank, range(30)):
        digests.append(digest(model))
        nbytes.append(state.step_nbytes_sent)
    buckets = [len({index for step, index in seen if step == at}) for at in (0, 1, 29)]
    sizes = [parameter.numel() for parameter in model.parameters()]  # the first step's bucket holds all, in this order
    expected = [state.expected_nbytes(), state.expected_nbytes(sizes)]
    told = {"nbytes": nbytes, "total": state.nbytes_sent, "expected": expected, "sizes": sizes}
    return {"digests": digests, "buckets": buckets, **told}


def gpt2(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    """Held-out losses of a small GPT-2 on bytes of text: by torch's own means, and at four bits."""
    from transformers import GPT2Config, GPT2LMHeadModel

    text = " ".join(json.loads(line)["text"] for line in TEXT.read_text(encoding="utf-8").splitlines())
    tokens = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()[: 64 * 2048].view(-1, 64)
    held_out, tokens = tokens[-32:], tokens[:-32]

    def run(state: CompressionState | None) -> float:
        torch.manual_seed(3)
        shape = {"n_layer": 2, "n_embd": 64, "n_head": 4, "n_positions": 64, "vocab_size": 256}
        others = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
        # With the usual 0.02 so narrow a model stays on a plateau that rounding alone decides when to leave.
        config = GPT2Config(**shape, **others, initializer_range=0.1)
        model = DistributedDataParallel(GPT2LMHeadModel(config), bucket_cap_mb=0.1)
        if state is not None:
            model.register_comm_hook(state, compressed_allreduce)
        optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
        for step in range(GPT2_STEPS):
            at = (step * world_size + rank) * 8 % (len(tokens) - 8)
            rows = tokens[at : at + 8]
            optimizer.param_groups[0]["lr"] = 3e-3 * min(1.0, (step + 1) / 10) * (1 - step / GPT2_STEPS)
            optimizer.zero_grad()
            model(input_ids=rows, labels=rows).loss.backward()
            optimizer.step()
        with torch.no_grad():
            return float(model.module(input_ids=held_out, labels=held_out).loss)

    return {"plain": run(None), "four_bits": run(CompressionState(FOUR_BITS))}


def feedback(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    """Sixteen steps with the same gradients: how far sums of averages are from the true ones, with feedback and without."""
    gradients = torch.randn(world_size, 3000, generator=torch.Generator().manual_seed(4))

    def gap(state: CompressionState) -> float:
        inner = torch.nn.Linear(3000, 1, bias=False)
        model, arrived = wrapped(inner, state), torch.zeros(3000)
        for _ in range(16):
            model.zero_grad()
            model(gradients[rank]).sum().backward()
            arrived += inner.weight.grad[0]
        return float((arrived - 16 * gradients.mean(0)).square().mean().sqrt())

    return {"with": gap(CompressionState(BY_FEW)), "without": gap(CompressionState(BY_FEW, error_feedback=False))}


def resumable(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    """Twenty steps; what is there after ten is left in the folder."""
    state = CompressionState(BY_CHANCE, seed=9)
    model = wrapped(small_model(), state)
    for _ in train(model, rank, range(10)):
        pass
    saved = state.state_dict()
    errors = {f"error.{number}": error for number, error in enumerate(saved["errors"])}
    safetensors.torch.save_file({**model.module.state_dict(), **errors}, folder / f"{rank}.safetensors")
    (folder / f"{rank}.json").write_text(json.dumps({**saved, "errors": len(errors)}))
    for _ in train(model, rank, range(10, 20)):
        pass
    return {"digest": digest(model), "kinds": sorted(kinds(saved)), "step": state.step}


def kinds(value: Any) -> set[str]:
    """Names of all types in a nest of lists and dicts."""
    inner = [*value.values(), *value] if isinstance(value, dict) else value if isinstance(value, list) else []
    return {type(value).__name__}.union(*map(kinds, inner))


def load(rank: int, folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    tensors = safetensors.torch.load_file(folder / f"{rank}.safetensors")
    saved = json.loads((folder / f"{rank}.json").read_text())
    saved["errors"] = [tensors.pop(f"error.{number}") for number in range(saved["errors"])]
    return tensors, saved


def resumed(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    """The second ten steps of `resumable`, from its files; and a model that these errors are not of."""
    tensors, saved = load(rank, folder)
    state, other = CompressionState(BY_CHANCE, seed=9), CompressionState(BY_CHANCE, seed=9)
    state.load_state_dict(saved)
    other.load_state_dict(saved)
    again = state.state_dict()
    same = all(torch.equal(one, two) for one, two in zip(again["errors"], saved["errors"], strict=True))
    inner = small_model()
    inner.load_state_dict(tensors)
    model = wrapped(inner, state)
    for _ in train(model, rank, range(10, 20)):
        pass
    refused = raised_by(lambda: list(train(wrapped(small_model(91), other), rank, range(1))))
    return {"digest": digest(model), "same": same, "step": state.step, "refused": refused}


def unused(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    """A branch that no rank uses, and one that rank 0 alone does."""

    class Branches(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(6)
            self.always, self.sometimes, self.never = torch.nn.Linear(7, 3), torch.nn.Linear(7, 3), torch.nn.Linear(7, 3)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.always(inputs) + (self.sometimes(inputs) if rank == 0 else 0.0)

    inner = Branches()
    before = digest(inner.never)
    model = wrapped(inner, CompressionState(FOUR_BITS), find_unused_parameters=True)
    losses = [float(loss) for loss in train(model, rank, range(4))]
    return {"digest": digest(model), "finite": all(map(bool, losses)), "untouched": digest(inner.never) == before}


def overlap(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    """Backward stops between two layers until the gradients of the later one are averaged."""
    futures: list[torch.futures.Future[torch.Tensor]] = []
    waited = []

    class Gate(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
            return values.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            if futures:
                futures[0].wait()
                waited.append(len(futures))
            return gradient

    class Gated(torch.nn.Module):
        def forward(self, values: torch.Tensor) -> torch.Tensor:
            return Gate.apply(values)

    def noting(state, bucket):  # DDP takes no annotation but its own
        future = compressed_allreduce(state, bucket)
        if state.step > 0 and not bucket.is_last():
            futures.append(future)
        return future

    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(7, 99), Gated(), torch.nn.Linear(99, 3)), bucket_cap_mb=0.0001
    )
    model.register_comm_hook(CompressionState(FOUR_BITS), noting)
    for _ in train(model, rank, range(2)):
        futures.clear()
    return {"waited": waited, "digest": digest(model)}


def bf16(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    model = wrapped(small_model().bfloat16(), CompressionState(FOUR_BITS))
    for step in range(3):
        inputs, targets = batch(rank, step)
        (model(inputs.bfloat16()) - targets.bfloat16()).square().mean().backward()
    return {"grads": digest_of_gradients(model), "kind": str(next(model.parameters()).grad.dtype)}


def digest_of_gradients(model: torch.nn.Module) -> str:
    hashed = xxhash.xxh3_128()
    for parameter in model.parameters():
        hashed.update(parameter.grad.reshape(-1).view(torch.uint8).numpy())
    return hashed.hexdigest()


def settings(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    """Rank 1 has other bits than the others."""
    model = wrapped(small_model(), CompressionState({"codec": "uniform", "bits": 4 + rank % 2}))
    return {"raised": raised_by(lambda: list(train(model, rank, range(1))))}


def states(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    """Two models in one backward, each with its state."""
    one, two = (wrapped(small_model(width), CompressionState(FOUR_BITS)) for width in (40, 50))
    for step in range(3):
        inputs, _ = batch(rank, step)
        (one(inputs).square().mean() + two(inputs).square().mean()).backward()
    return {"digest": digest_of_gradients(one) + digest_of_gradients(two)}


def refused(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    """States that do not fit, and gradients that cannot be averaged."""
    state = CompressionState(FOUR_BITS)
    saved = state.state_dict()
    changed = {"codec": {"codec": "uniform", "bits": 8}, "world_size": 7, "rank": 5, "seed": 1}
    raised = {key: raised_by(lambda: state.load_state_dict({**saved, key: value})) for key, value in changed.items()}  # noqa: B023
    raised["missing"] = raised_by(lambda: state.load_state_dict({}))
    raised["damaged"] = raised_by(lambda: state.load_state_dict({**saved, "buckets": [[3]], "errors": [torch.zeros(2)]}))
    raised["delta"] = raised_by(lambda: CompressionState({"codec": "delta", "bits": 4}))
    doubles = wrapped(torch.nn.Linear(7, 3).double(), state)
    raised["fp64"] = raised_by(lambda: doubles(torch.ones(2, 7).double()).sum().backward())
    return raised


def nan(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    """In its third step, one gradient of rank 1 is not a number."""
    state = CompressionState(FOUR_BITS)
    model = wrapped(small_model(), state)
    steps = train(model, rank, range(5))
    next(steps), next(steps)
    weight = model.module[2].weight

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        spoilt = gradient.clone()
        spoilt[1, 2] = float("nan")
        return spoilt

    if rank == 1:
        weight.register_hook(spoil)
    return {"raised": raised_by(lambda: next(steps)), "saving": raised_by(state.state_dict)}


def death(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    """The last rank is gone after its second step."""
    steps = train(wrapped(small_model(), CompressionState(FOUR_BITS)), rank, range(5))
    next(steps), next(steps)
    if rank == world_size - 1:
        os._exit(3)
    return {"raised": raised_by(lambda: next(steps))}


def main(rank: int, world_size: int, folder: Path, scenarios: list[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    reports = {}
    for name in scenarios:
        started = time.perf_counter()
        reports[name] = globals()[name](rank, world_size, folder)
        print(f"rank {rank}: {name} took {time.perf_counter() - started:.1f} s", file=sys.stderr)
        (folder / f"report.{rank}").write_text(json.dumps(reports))


# --------------------------------------------------------------------------------------------------------------- launches


def launch(folder: Path, world_size: int, scenarios: list[str]) -> list[dict[str, Any]]:
    """Each rank's reports of all scenarios that it came to the end of."""
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    (folder / "store").unlink(missing_ok=True)
    logs = [folder / f"log.{rank}" for rank in range(world_size)]
    processes = []
    try:
        for rank, log in enumerate(logs):
            arguments = [sys.executable, __file__, str(rank), str(world_size), str(folder), *scenarios]
            with log.open("w") as output:
                processes.append(subprocess.Popen(arguments, env=environment, stdout=output, stderr=output))
        until = time.monotonic() + LAUNCH_S
        for process in processes:
            process.wait(max(0.0, until - time.monotonic()))
    finally:
        for process in processes:
            process.kill()
            process.wait()
        print("\n".join(log.read_text() for log in logs))
    reports = [folder / f"report.{rank}" for rank in range(world_size)]
    return [json.loads(report.read_text()) if report.exists() else {} for report in reports]


@pytest.fixture(scope="module", params=[2, 3], ids=["two ranks", "three ranks"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp(f"ranks{request.param}")
    return folder, launch(folder, request.param, [*QUICK, *(["gpt2"] if request.param == 2 else []), "death"])


@pytest.fixture
def ranks(run: tuple[Path, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    return run[1]


def same(reports: list[dict[str, Any]], scenario: str, key: str) -> Any:
    """What all ranks report alike."""
    first, *others = [report[scenario][key] for report in reports]
    assert others == [first] * len(others)
    return first


# ------------------------------------------------------------------------------------------------------------------ tests


def test_the_identity_codec_gives_torchs_own_averages(ranks: list[dict[str, Any]]) -> None:
    same(ranks, "exact", "digest")
    assert all(report["exact"]["gap"] < 1e-6 for report in ranks)
    assert all(report["exact"]["errors"] == 0 for report in ranks)


def test_parameters_stay_the_same_bits_on_all_ranks_whatever_the_sizes_of_batches(ranks: list[dict[str, Any]]) -> None:
    digests = same(ranks, "ragged", "digests")
    assert len(set(digests)) == 30


def test_buckets_that_are_made_anew_after_the_first_step_are_no_matter(ranks: list[dict[str, Any]]) -> None:
    first, second, last = same(ranks, "ragged", "buckets")
    assert first == 1
    assert second == last > 2


def test_bytes_sent_are_what_the_sizes_of_pieces_come_to(ranks: list[dict[str, Any]]) -> None:
    for rank, report in enumerate(ranks):
        told = report["ragged"]
        warm_up = told["nbytes"][0]
        assert told["nbytes"][1:] == [nbytes_by_hand(told["sizes"], rank, len(ranks), four_bits)] * 29
        assert warm_up == nbytes_by_hand(told["sizes"], rank, len(ranks), lambda n: 4 * n)
        assert told["expected"] == [told["nbytes"][1]] * 2
        assert told["total"] == sum(told["nbytes"])


def four_bits(num_values: int) -> int:
    """Two values a byte, a scale for each 32, and one byte that scales are relative to."""
    return 1 + -(-num_values // 32) + -(-num_values // 2)


def nbytes_by_hand(sizes: list[int], rank: int, world_size: int, nbytes: Any) -> int:
    total = 0
    for number, size in enumerate(sizes):
        length = 256 * -(-size // (256 * world_size))
        pieces = [min(length, size - start) for start in range(0, size, length)]
        for index, piece in enumerate(pieces):
            is_own = (number + index) % world_size == rank
            total += nbytes(piece) * (world_size - 1 if is_own else 1)
    return total


def test_what_is_lost_in_one_step_arrives_in_the_next_ones(ranks: list[dict[str, Any]]) -> None:
    for report in ranks:
        assert report["feedback"]["with"] < 0.25 * report["feedback"]["without"]


@pytest.mark.parametrize("run", [3], indirect=True, ids=["three ranks"])
def test_a_run_that_is_resumed_by_new_processes_gives_the_bits_of_one_that_went_on(run: Any) -> None:
    folder, before = run
    after = launch(folder, len(before), ["resumed"])
    assert same(before, "resumable", "digest") == same(after, "resumed", "digest")
    assert same(after, "resumed", "same")
    assert same(before, "resumable", "step") == same(after, "resumed", "step") == 20
    assert same(before, "resumable", "kinds") == ["Tensor", "bool", "dict", "int", "list", "str"]
    kind, text = same(after, "resumed", "refused")
    assert kind == ConfigError.__name__
    assert "bucket 0 of the first step had parameters of [630, 90," in text
    assert "and here [637, 91," in text


def test_parameters_that_some_ranks_or_none_use_are_averaged_or_left_alone(ranks: list[dict[str, Any]]) -> None:
    same(ranks, "unused", "digest")
    assert same(ranks, "unused", "untouched")
    assert same(ranks, "unused", "finite")


def test_gradients_are_exchanged_while_backward_goes_on(ranks: list[dict[str, Any]]) -> None:
    assert same(ranks, "overlap", "waited") == [1]
    same(ranks, "overlap", "digest")


def test_bf16_gradients_come_back_as_bf16_and_alike(ranks: list[dict[str, Any]]) -> None:
    assert same(ranks, "bf16", "kind") == "torch.bfloat16"
    same(ranks, "bf16", "grads")


def test_two_models_in_one_backward_do_not_mix(ranks: list[dict[str, Any]]) -> None:
    same(ranks, "states", "digest")


def test_ranks_of_other_settings_are_told_before_anything_is_exchanged(ranks: list[dict[str, Any]]) -> None:
    for rank, report in enumerate(ranks):
        kind, text = report["settings"]["raised"]
        others = ", ".join(str(other) for other in range(len(ranks)) if other % 2 != rank % 2)
        assert kind == ConfigError.__name__
        assert f"rank {rank} and rank {others} have other settings" in text


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("codec", "has codec = {'codec': 'uniform', 'bits': 8}, but here it is {'codec': 'uniform', 'bits': 4}"),
        ("world_size", "has world_size = 7, but here it is "),
        ("rank", "has rank = 5, but here it is "),
        ("seed", "has seed = 1, but here it is 0"),
        ("missing", "has no 'format'"),
        ("damaged", "errors are no fp32 tensors of its parameters' sizes"),
        ("delta", "codec 'delta' remembers samples"),
        ("fp64", "gradients of torch.strided torch.float64 on cpu cannot be averaged"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(ranks: list[dict[str, Any]], what: str, text: str) -> None:
    for report in ranks:
        kind, told = report["refused"][what]
        assert kind == ConfigError.__name__
        assert text in told


def test_a_gradient_that_is_not_a_number_is_told_by_its_rank_and_stops_all(ranks: list[dict[str, Any]]) -> None:
    for rank, report in enumerate(ranks):
        kind, text = report["nan"]["raised"]
        assert report["nan"]["saving"] == [kind, text]
        if rank == 1:
            assert kind == NonFiniteValues.__name__
            assert " in step 2, parameter 2 by the first step's buckets, from its value 0 on: value 92 is nan" in text
        else:
            assert kind == WorkerFailed.__name__
            assert text.startswith("rank 1 could not exchange the gradients of bucket ")


def test_a_rank_that_is_gone_is_missed_by_the_others(ranks: list[dict[str, Any]]) -> None:
    *living, dead = ranks
    assert "death" not in dead
    for report in living:
        kind, text = report["death"]["raised"]
        assert kind == PeerLost.__name__
        assert text.startswith("the exchange of gradients with rank ")


@pytest.mark.parametrize("run", [2], indirect=True, ids=["two ranks"])
def test_a_small_gpt2_at_four_bits_learns_what_it_learns_uncompressed(run: Any) -> None:
    _, [first, _] = run
    assert first["gpt2"]["plain"] < 2.6
    assert first["gpt2"]["four_bits"] == pytest.approx(first["gpt2"]["plain"], rel=0.01)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
