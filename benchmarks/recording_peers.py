"""Writes and loads one padded batch as verl does: by ``DataProto`` to a file, and through a TransferQueue.

A second process, in an environment of its own, is the peer: verl 0.9.1 with tensordict, and TransferQueue, as
``tests/integrations/verl_requirements.txt`` has them (``launch/test_integrations.sh`` makes ``.venv-verl`` of it). It
also times ``torch.save`` and ``torch.load`` of the same batch, which tell how its times relate to those of the first
process. *DataProto* is ``save_to_disk`` and ``load_from_disk``, as verl's ``skip.rollout`` records. *TransferQueue* is
``kv_batch_put`` of jagged rows and ``kv_batch_get``, as its trainer V1 hands a step over: to the memory of a Ray actor
on this machine, not to a disk.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Times = dict[str, float]


def measure_peers(python: Path, batch_path: Path, rounds: int) -> dict[str, dict[str, float]]:
    """``write_ms``, ``load_ms`` and ``sizes_bytes`` by route, measured by the interpreter ``python``.

    ``batch_path``: the batch, as ``torch.save`` wrote it. Raises ``SystemExit`` with its output where it fails.
    """
    with tempfile.TemporaryDirectory(prefix="peers-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        token = Path(folder, "token")
        token.write_text("0123456789abcdef" * 4, encoding="utf-8")
        done = subprocess.run(
            [str(python), "-W", "ignore", "-m", "benchmarks.recording_peers", str(batch_path), folder, str(rounds)],
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "RAY_USAGE_STATS_ENABLED": "0",
                "RAY_AUTH_MODE": "token",
                "RAY_AUTH_TOKEN_PATH": str(token),
            },
            cwd=Path(__file__).parents[1],
            capture_output=True,
            text=True,
        )
        result = Path(folder, "result.json")
        if done.returncode or not result.is_file():
            raise SystemExit(f"{python} could not measure the peers:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
        measured: dict[str, dict[str, float]] = json.loads(result.read_text(encoding="utf-8"))
        return measured


def _alternate(routes: dict[str, Callable[[], object]], rounds: int) -> Times:
    """Median milliseconds of each route; each runs once before it counts, and the routes take turns."""
    times: dict[str, list[float]] = {name: [] for name in routes}
    for number in range(rounds + 1):
        for name, route in routes.items():
            started_s = time.perf_counter()
            route()
            if number:
                times[name].append(1e3 * (time.perf_counter() - started_s))
    return {name: statistics.median(values) for name, values in times.items()}


def _split(padded: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    import torch

    tensors = {name: value for name, value in padded.items() if isinstance(value, torch.Tensor)}
    return tensors, {name: value for name, value in padded.items() if name not in tensors}


def _measure_files(padded: dict[str, Any], folder: Path, rounds: int) -> dict[str, Times]:
    import numpy as np
    import torch
    from verl import DataProto

    tensors, others = _split(padded)
    columns = {name: np.array(value, dtype=object) for name, value in others.items()}
    proto_path, torch_path = folder / "batch.dp", folder / "batch.pt"
    write: dict[str, Callable[[], object]] = {
        "torch.save": lambda: torch.save(padded, torch_path),
        "DataProto": lambda: DataProto.from_dict(tensors=tensors, non_tensors=columns).save_to_disk(proto_path),
    }
    write_ms = _alternate(write, rounds)
    loaded = DataProto.load_from_disk(proto_path)
    assert all(torch.equal(loaded.batch[name], value) for name, value in tensors.items())
    load: dict[str, Callable[[], object]] = {
        "torch.load": lambda: torch.load(torch_path, weights_only=False),
        "DataProto": lambda: DataProto.load_from_disk(proto_path),
    }
    sizes = {"torch.save": torch_path.stat().st_size, "DataProto": proto_path.stat().st_size}
    return {"write_ms": write_ms, "load_ms": _alternate(load, rounds), "sizes_bytes": sizes}


def _measure_queue(padded: dict[str, Any], folder: Path, rounds: int) -> dict[str, Times]:
    import ray
    import torch
    import transfer_queue as tq
    from omegaconf import OmegaConf
    from verl.utils.tensordict_utils import list_of_dict_to_tensordict

    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        _node_ip_address="127.0.0.1",
        _temp_dir=str(folder / "ray"),
        object_store_memory=200_000_000,
    )
    tq.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}))
    tensors, others = _split(padded)
    lengths = tensors["attention_mask"].sum(1).tolist()
    rows = [
        {
            **{name: value[row, :length].clone() for name, value in tensors.items()},
            **{name: value[row] for name, value in others.items()},
        }
        for row, length in enumerate(lengths)
    ]
    keys = [f"row{number}" for number in range(len(rows))]
    tags: list[dict[str, Any]] = [{} for _ in rows]

    def put() -> None:
        tq.kv_batch_put(keys=keys, partition_id="train", fields=list_of_dict_to_tensordict(rows), tags=tags)

    def get() -> Any:  # noqa: ANN401 - a TensorDict
        return tq.kv_batch_get(keys=keys, partition_id="train")

    write_ms = _alternate({"TransferQueue": put}, rounds)
    first = get()["input_ids"][0]
    assert torch.equal(first, rows[0]["input_ids"])
    load_ms = _alternate({"TransferQueue": get}, rounds)
    tq.close()
    ray.shutdown()
    return {"write_ms": write_ms, "load_ms": load_ms}


def main() -> None:
    """Measure as the peer, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("batch", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("rounds", type=int)
    options = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    padded = torch.load(options.batch, weights_only=False)
    found = _measure_files(padded, options.folder, options.rounds)
    for name, values in _measure_queue(padded, options.folder, options.rounds).items():
        found[name] |= values
    (options.folder / "result.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
