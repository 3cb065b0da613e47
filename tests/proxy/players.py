"""Schedulers, configurations and runs for the tests of the proxy."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from mock_scheduler.batch import RolloutBatch
from mock_scheduler.config.rollout_mock import RolloutMockConfig
from mock_scheduler.proxy.build import build_scheduler
from mock_scheduler.proxy.sync_scheduler import ProxyScheduler
from mock_scheduler.recording.contract import Contract
from mock_scheduler.scheduler import RolloutRequest
from tests.recording.builders import SAMPLING, make_contract, make_rows


def batch_of(request: RolloutRequest) -> RolloutBatch:
    """Four rows that depend on everything that tells a request from others."""
    kind = 0 if request.mode == "train" else 500
    domain = sum(map(ord, request.scheduler_id))
    rows = make_rows(2, 2, seed=request.global_step + kind + 1000 * domain)
    named = [replace(row, identity=replace(row.identity, scheduler_id=request.scheduler_id)) for row in rows]
    return RolloutBatch.from_trajectories(named, sampling=SAMPLING, group_size=2)


class Player:
    """A whole scheduler: plays the batch of the request and notes its calls; ``cursor`` counts its batches."""

    def __init__(self) -> None:
        self.calls: list[object] = []
        self.cursor = 0
        self.version: int | None = None
        self.is_running = False

    def get_batch(self, request: RolloutRequest) -> RolloutBatch:
        self.calls.append(("get_batch", request.mode, request.global_step))
        self.cursor += 1
        return batch_of(request)

    def suspend(self) -> None:
        self.is_running = False
        self.calls.append("suspend")

    def resume(self) -> None:
        self.is_running = True
        self.calls.append("resume")

    def update_weights(self, policy_version: int) -> None:
        self.version = policy_version
        self.calls.append(("update_weights", policy_version))

    def collect_metrics(self) -> dict[str, float]:
        return {"time/rollout_s": 0.25, "batches": float(self.cursor)}

    def state_dict(self) -> dict[str, object]:
        return {"cursor": self.cursor}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        self.cursor = int(str(state["cursor"]))
        self.calls.append(("load_state_dict", dict(state)))

    def close(self) -> None:
        self.calls.append("close")


class AsyncPlayer:
    """The same, asynchronous: every call waits for the loop once."""

    def __init__(self) -> None:
        self.player = Player()
        self.loops: set[int] = set()

    async def _call(self, name: str, *arguments: object) -> object:
        await asyncio.sleep(0)
        self.loops.add(id(asyncio.get_running_loop()))
        return getattr(self.player, name)(*arguments)

    async def get_batch(self, request: RolloutRequest) -> object:
        return await self._call("get_batch", request)

    async def suspend(self) -> None:
        await self._call("suspend")

    async def resume(self) -> None:
        await self._call("resume")

    async def update_weights(self, policy_version: int) -> None:
        await self._call("update_weights", policy_version)

    async def collect_metrics(self) -> object:
        return await self._call("collect_metrics")

    async def state_dict(self) -> object:
        return await self._call("state_dict")

    async def load_state_dict(self, state: Mapping[str, object]) -> None:
        await self._call("load_state_dict", state)

    async def close(self) -> None:
        await self._call("close")


class BatchOnly:
    def get_batch(self, request: RolloutRequest) -> RolloutBatch:
        return batch_of(request)


def never() -> object:
    raise AssertionError("make_real was called")


def config(tmp_path: Path, mode: Any, **changes: Any) -> RolloutMockConfig:
    return RolloutMockConfig(enable=True, mode=mode, dump_dir=str(tmp_path / "x"), **changes)


def request(step: int, **changes: Any) -> RolloutRequest:
    return RolloutRequest(**{"global_step": step, "batch_size": 4, "policy_version": step, **changes})


def requests(steps: Iterable[int], **changes: Any) -> list[RolloutRequest]:
    return [request(step, **changes) for step in steps]


def dump(
    tmp_path: Path,
    steps: Iterable[int] = range(3),
    make_real: Callable[[], object] = Player,
    settings: Mapping[str, Any] | None = None,
    **options: Any,
) -> list[RolloutBatch]:
    """Record these training steps, and return their batches."""
    scheduler = build_scheduler(config(tmp_path, "dump", **(settings or {})), make_real, make_contract(), **options)
    with scheduler:
        return [scheduler.get_batch(request(step)) for step in steps]


def mock(tmp_path: Path, contract: Contract | None = None, **options: Any) -> ProxyScheduler:
    return build_scheduler(config(tmp_path, "mock"), never, contract or make_contract(), **options)


def digests(batches: Iterable[RolloutBatch]) -> list[str]:
    return [batch.digest() for batch in batches]


def play(scheduler: ProxyScheduler, steps: Iterable[int]) -> list[RolloutBatch]:
    """The loop of a pipeline: weights, resume, batch, suspend."""
    batches = []
    for step in steps:
        scheduler.update_weights(step)
        scheduler.resume()
        batches.append(scheduler.get_batch(request(step)))
        scheduler.suspend()
    return batches
