"""Batches through Ray's object store, beside the way in which torch pickles tensors, in one run.

The batch has 9 MB in 1,024 rows. *torch*: the same fields with each tensor pickled by torch, and each identity as an
object, which is what a dataclass of tensors does by itself. *buffers*: the batch, as it pickles itself. *in place*: the
same, of which nothing is copied. *NumPy*: its tensors as arrays, without identities and other values; less can hardly
be carried. ``read``: get, and read every value once. Every time is a median of calls in turns; ratios are what counts.

    python -m benchmarks.ray_batches [--rounds 15] [--mean-length 1000]      (needs the extra ray)
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import fields
from functools import partial

import torch

from mock_scheduler.batch import RolloutBatch, SampleIdentity, SamplingParams, Termination, Trajectory
from mock_scheduler.batch.pickled import in_place
from mock_scheduler.support.arguments import ArgumentParser

SAMPLING = SamplingParams(temperature=1.0, top_p=1.0, top_k=0, logprobs_mode="processed")
ROUTES = ("torch", "buffers", "in place", "NumPy")


def make_batch(num_rows: int, length: int) -> RolloutBatch:
    """Rows of one length, whose first tenth is the prompt."""
    generator = torch.Generator().manual_seed(0)
    rows = [
        Trajectory(
            identity=SampleIdentity(scheduler_id="default", group_id=row // 8, episode_id=0, env_id=row % 8, turn=0),
            tokens=torch.randint(0, 150_000, (length,), generator=generator, dtype=torch.int32),
            response_mask=torch.arange(length) >= length // 10,
            rollout_logprobs=-torch.rand(length - length // 10, generator=generator),
            turn_rewards=torch.ones(1),
            policy_versions=torch.zeros(1, dtype=torch.int32),
            termination=Termination.TERMINATED,
            prompt_length=length // 10,
            tag="toy",
        )
        for row in range(num_rows)
    ]
    return RolloutBatch.from_trajectories(rows, sampling=SAMPLING, group_size=8)


def read_all(value: object) -> None:
    """Reads every value of a batch, a mapping of arrays, or a mapping of fields."""
    tensors = value.tensors() if isinstance(value, RolloutBatch) else value
    assert isinstance(tensors, dict)
    for tensor in tensors.values():
        if isinstance(tensor, torch.Tensor):
            tensor.numpy().max(initial=0)
        elif hasattr(tensor, "max"):
            tensor.max(initial=0)


def get_in_place(reference: object) -> object:
    """Gets a batch that shows the store's own bytes."""
    import ray

    with in_place():
        return ray.get(reference)


def measure(calls: dict[tuple[str, str], Callable[[], object]], rounds: int) -> dict[tuple[str, str], float]:
    """The median of each call's times in milliseconds; calls alternate, and none of the first round counts."""
    times: dict[tuple[str, str], list[float]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, call in calls.items():
            started_s = time.perf_counter()
            result = call()
            if number:
                times[name].append(1000 * (time.perf_counter() - started_s))
            del result
    return {name: statistics.median(found) for name, found in times.items()}


def main() -> None:
    """Measures, and prints."""
    parser = ArgumentParser()
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--mean-length", type=int, default=1000)
    arguments = parser.parse_args()
    os.environ.update({"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"})
    import ray

    batch = make_batch(1024, arguments.mean_length)
    size = sum(tensor.nbytes for tensor in batch.tensors().values())
    ray.init(
        num_cpus=1,
        include_dashboard=False,
        object_store_memory=max(20 * size, 200_000_000),
        log_to_driver=False,
        _node_ip_address="127.0.0.1",
    )
    forms: dict[str, object] = {
        "torch": {field.name: getattr(batch, field.name) for field in fields(batch)},
        "buffers": batch,
        "in place": batch,
        "NumPy": {name: tensor.numpy() for name, tensor in batch.tensors().items()},
    }
    references = {route: ray.put(form) for route, form in forms.items()}
    assert ray.get(references["buffers"]).is_identical(batch)
    calls: dict[tuple[str, str], Callable[[], object]] = {}
    for route in ROUTES:
        calls["put", route] = lambda form=forms[route]: ray.put(form)  # type: ignore[misc]
        get = partial(get_in_place if route == "in place" else ray.get, references[route])
        calls["get", route] = get
        calls["read", route] = lambda get=get: read_all(get())  # type: ignore[misc]
    found = measure(calls, arguments.rounds)
    print(f"{size / 1e6:.1f} MB in {len(batch)} rows, Ray {ray.__version__}, torch {torch.__version__}")
    for what in ("put", "get", "read"):
        times = "  ".join(f"{route} {found[what, route]:6.2f} ms" for route in ROUTES)
        print(f"{what:4}  {times}  torch / buffers {found[what, 'torch'] / found[what, 'buffers']:.1f}")


if __name__ == "__main__":
    main()
