"""Repeats collectives on one of two ranks: ``python -m benchmarks.gpu_check.collectives BACKEND DEVICE FOLDER RANK``.

It meets the other rank in a file of ``FOLDER`` and leaves ``rank{RANK}.json``: for each collective the number of
different digests over its repetitions, the last digest, and the order of its sum.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.gpu_check.determinism import describe_order

_NUM_REPEATS, _NUM_ELEMENTS, _WORLD_SIZE = 20, 100_004, 2
_TIMEOUT = timedelta(seconds=30)


def values_of(rank: int, dtype: torch.dtype) -> torch.Tensor:
    """Makes a rank's values, on the CPU; each rank can make all."""
    return torch.randn(_NUM_ELEMENTS, generator=torch.Generator().manual_seed(rank)).to(dtype)


def run(rank: int, device: torch.device, backend: str) -> dict[str, dict[str, object]]:
    """Repeats all collectives of both dtypes."""
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        parts = [values_of(one, dtype) for one in range(_WORLD_SIZE)]
        name = str(dtype).removeprefix("torch.")

        def all_reduce(own: torch.Tensor = parts[rank]) -> torch.Tensor:
            tensor = own.to(device, copy=True)
            dist.all_reduce(tensor)
            return tensor

        def reduce_scatter(own: torch.Tensor = parts[rank]) -> torch.Tensor:
            output = torch.empty(_NUM_ELEMENTS // _WORLD_SIZE, dtype=own.dtype, device=device)
            dist.reduce_scatter_tensor(output, own.to(device))
            whole = [torch.empty_like(output) for _ in range(_WORLD_SIZE)]
            dist.all_gather(whole, output)
            return torch.cat(whole)

        calls: dict[str, Callable[[], torch.Tensor]] = {f"all-reduce, {name}": all_reduce}
        if backend == "nccl":  # gloo has no reduce-scatter of a GPU's tensors in every release
            calls[f"reduce-scatter, {name}"] = reduce_scatter
        for title, call in calls.items():
            results = [call().cpu() for _ in range(_NUM_REPEATS)]
            digests = [hashlib.sha256(item.view(torch.uint8).numpy().tobytes()).hexdigest() for item in results]
            order = describe_order(results[-1], parts, torch.add)
            found[title] = {"num_digests": len(set(digests)), "digest": digests[-1], "order": order}
    return found


def main() -> None:
    """One rank."""
    backend, device_name, folder, rank = sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4])
    device = torch.device(device_name)
    if device.type == "cuda":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    store = dist.FileStore(str(folder / "store"), _WORLD_SIZE)
    dist.init_process_group(backend, store=store, rank=rank, world_size=_WORLD_SIZE, timeout=_TIMEOUT)
    found = run(rank, device, backend)
    dist.barrier()
    (folder / f"rank{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
