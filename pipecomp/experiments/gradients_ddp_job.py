"""What a user would take instead: torch's DistributedDataParallel over gloo, on a model that computes nothing. Knows torch; of
pipecomp its gradient hook alone, and only where it is asked for.

    python -m pipecomp.experiments.gradients_ddp_job '{"rank": 0, "world_size": 4, "master": "10.0.0.1:29500", ...}'

One process a rank; rank 0 prints one line of JSON, the seconds of each step. The loss is the dot product of all parameters with a
tensor that is made once, so that a backward pass is one multiplication a value. Each step is timed from one barrier to the next.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Blocks(nn.Module):
    """Parameters, as many as asked for, of the same size."""

    def __init__(self, num_blocks: int, block_values: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(block_values)) for _ in range(num_blocks))

    def forward(self, directions: torch.Tensor) -> torch.Tensor:
        """(block_values,) -> (): its dot products with all parameters, summed. Each gradient is `directions`."""
        return torch.stack([torch.dot(weight, directions) for weight in self.weights]).sum()


def train(
    *,
    num_blocks: int,
    block_values: int,
    num_steps: int,
    codec: dict[str, Any] | None,
    rank: int,
    world_size: int,
    master: str,
    interface: str,
) -> list[float]:
    """Run this rank; seconds of each step. `codec`: of pipecomp's hook; None: DDP's own all-reduce of fp32."""
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    host, _, port = master.rpartition(":")
    os.environ.update(
        GLOO_SOCKET_IFNAME=interface, MASTER_ADDR=host, MASTER_PORT=port, RANK=str(rank), WORLD_SIZE=str(world_size)
    )
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    model = DistributedDataParallel(Blocks(num_blocks, block_values))
    if codec is not None:
        from pipecomp.ddp import CompressionState, compressed_allreduce

        model.register_comm_hook(CompressionState(codec), compressed_allreduce)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0, fused=True)
    directions = torch.randn(block_values)
    times_s = []
    for _ in range(num_steps):
        dist.barrier()
        started = time.perf_counter()
        optimizer.zero_grad()
        model(directions).backward()
        optimizer.step()
        dist.barrier()
        times_s.append(time.perf_counter() - started)
    dist.destroy_process_group()
    return times_s


def main(text: str) -> None:
    """`text`: JSON of `train`'s arguments."""
    given: dict[str, Any] = json.loads(text)
    times_s = train(**given)
    if given["rank"] == 0:
        sys.stdout.write(json.dumps(times_s) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
