"""What a user would take instead: torch.distributed.pipelining over gloo, fp32 on the wire. Knows torch; nothing of pipecomp.

    python -m pipecomp.experiments.torch_pipeline '{"rank": 0, "world_size": 4, "master": "10.0.0.1:29500", ...}'

One process a stage; rank 0 prints one line of JSON, the seconds of each step. The blocks are those of GPT-2 without dropout,
each step is timed from one barrier to the next, and data is made up before the step begins.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional


class Sizes(NamedTuple):
    """Of the model and of a step."""

    width: int
    num_heads: int
    layers_per_stage: int
    vocab_size: int
    length: int
    batch_size: int
    num_microbatches: int


class Block(nn.Module):
    """A pre-norm transformer block with causal attention."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """(B, T, H) -> (B, T, H)."""
        batch, length, width = hidden.shape
        split = self.qkv(self.norm_1(hidden)).view(batch, length, 3, self.num_heads, width // self.num_heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return cast(torch.Tensor, hidden + self.mlp(self.norm_2(hidden)))


class Embedding(nn.Module):
    """Tokens and positions."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(sizes.vocab_size, sizes.width), nn.Embedding(sizes.length, sizes.width)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """(B, T) int64 -> (B, T, H)."""
        return cast(torch.Tensor, self.token(ids) + self.position.weight[: ids.shape[1]])


def train(sizes: Sizes, *, num_steps: int, rank: int, world_size: int, master: str, interface: str) -> list[float]:
    """Run this rank's stage; seconds of each step."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    host, _, port = master.rpartition(":")
    os.environ.update(
        GLOO_SOCKET_IFNAME=interface, MASTER_ADDR=host, MASTER_PORT=port, RANK=str(rank), WORLD_SIZE=str(world_size)
    )
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    is_first, is_last = rank == 0, rank == world_size - 1
    module = _stage(sizes, is_first=is_first, is_last=is_last)
    microbatch = sizes.batch_size // sizes.num_microbatches
    shape = (microbatch, sizes.length) if is_first else (microbatch, sizes.length, sizes.width)
    example = torch.zeros(shape, dtype=torch.long if is_first else torch.float32)
    stage = PipelineStage(module, rank, world_size, torch.device("cpu"), input_args=(example,))
    schedule = Schedule1F1B(stage, sizes.num_microbatches, loss_fn=_loss)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, weight_decay=0.0, fused=True)
    times_s = []
    for _ in range(num_steps):
        ids = torch.randint(0, sizes.vocab_size, (sizes.batch_size, sizes.length))
        labels = torch.randint(0, sizes.vocab_size, (sizes.batch_size, sizes.length))
        dist.barrier()
        started = time.perf_counter()
        optimizer.zero_grad()
        inputs = (ids,) if is_first else ()
        schedule.step(*inputs, target=labels if is_last else None, losses=[] if is_last else None)
        optimizer.step()
        dist.barrier()
        times_s.append(time.perf_counter() - started)
    dist.destroy_process_group()
    return times_s


def _stage(sizes: Sizes, *, is_first: bool, is_last: bool) -> nn.Module:
    modules: list[nn.Module] = [Embedding(sizes)] if is_first else []
    modules += [Block(sizes.width, sizes.num_heads) for _ in range(sizes.layers_per_stage)]
    if is_last:
        modules += [nn.LayerNorm(sizes.width), nn.Linear(sizes.width, sizes.vocab_size, bias=False)]
    return nn.Sequential(*modules)


def _loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def main(text: str) -> None:
    """`text`: JSON of `train`'s arguments, the sizes among them."""
    given: dict[str, Any] = json.loads(text)
    sizes = Sizes(**{name: given.pop(name) for name in Sizes._fields})
    times_s = train(sizes, **given)
    if given["rank"] == 0:
        sys.stdout.write(json.dumps(times_s) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
