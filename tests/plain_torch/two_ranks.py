"""A training on two ranks: ``torchrun --nproc-per-node 2 two_ranks.py ddp|fsdp TRACE_DIR``."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from mock_scheduler.plain_torch.tracing import trace_training


def main(kind: str, trace_dir: str) -> None:
    """Train for two steps; neither 5 nor 7 rows are shared evenly."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layers = [torch.nn.Linear(3, 5), torch.nn.Linear(5, 7)]
    model: torch.nn.Module = torch.nn.Sequential(layers[0], torch.nn.Tanh(), layers[1])
    if kind == "ddp":
        model = DistributedDataParallel(model)
    else:
        for module in (*layers, model):
            fully_shard(module)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.125)
    tracing = trace_training(model, optimizer, trace_dir=trace_dir)
    rows = (torch.arange(12.0).reshape(4, 3) / 8)[2 * dist.get_rank() :][:2]
    for _ in range(2):
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        optimizer.step()
    tracing.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:3])
