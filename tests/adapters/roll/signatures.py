"""ROLL 0.3.0 as far as the adapter meets it: names, arguments and order of calls, without Ray, engines and workers.

After ``roll/pipeline/agentic/agentic_pipeline.py``, ``distributed/scheduler/rollout_scheduler.py``,
``rollout_mock_mixin.py``, ``protocol.py`` and ``distributed/executor/cluster.py`` of alibaba/ROLL 8eb27cc2
(2026-08-19).
"""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

#: Schedulers and clusters made, and what was asked of them.
calls: list[str] = []


class DataProto:
    """Tensors, arrays and meta; data that are in the store are not here."""

    def __init__(
        self, batch: Any = None, non_tensor_batch: Any = None, meta_info: Any = None, store: Any = None
    ) -> None:
        self._batch, self._non_tensor_batch, self._remote_batch = batch, non_tensor_batch or {}, store
        self.meta_info: dict[str, Any] = meta_info or {}

    @property
    def batch(self) -> Any:
        return self._batch if self._remote_batch is None else self._remote_batch[0]

    @property
    def non_tensor_batch(self) -> Any:
        return self._non_tensor_batch if self._remote_batch is None else self._remote_batch[1]

    @classmethod
    def to_remote(cls, data: DataProto) -> DataProto:
        calls.append("to_remote")
        return cls(meta_info=data.meta_info, store=(data.batch, data.non_tensor_batch))


def make_data_proto(tensors: Any, arrays: Any, meta: Any) -> DataProto:
    return DataProto(batch=dict(tensors), non_tensor_batch=dict(arrays), meta_info=dict(meta))


def agentic_batch(step: int, rows: int = 4, width: int = 6, seed: int = 0) -> DataProto:
    draw = torch.Generator().manual_seed(100 * seed + step)
    lengths = torch.randint(3, width + 1, (rows,), generator=draw)
    attention = torch.arange(width) < lengths[:, None]
    response = attention & (torch.arange(width) >= 2)
    tensors = {
        "input_ids": torch.randint(1, 90, (rows, width), generator=draw),
        "attention_mask": attention.long(),
        "response_mask": response.long(),
        "prompt_mask": (attention & ~response).bool(),
        "scores": torch.rand(rows, width, generator=draw) * response,
        "infer_logprobs": -torch.rand(rows, width - 1, generator=draw),
        "step_scores": torch.rand(rows, generator=draw),
    }
    del tensors["step_scores"]
    arrays = {
        "env_ids": np.array([row % 2 for row in range(rows)], dtype=object),
        "group_ids": np.array([row // 2 for row in range(rows)], dtype=object),
        "tags": np.array(["FrozenLake"] * rows, dtype=object),
        "traj_group_id": np.array([f"FrozenLake_{row // 2}_{step}_7" for row in range(rows)], dtype=object),
        "traj_id": np.array([f"FrozenLake_{row // 2}_{step}_7_{row % 2}" for row in range(rows)], dtype=object),
        "step_scores": np.array([[float(row)] for row in range(rows)] + [None], dtype=object)[:-1],
        "episode_scores": np.array([float(row) for row in range(rows)], dtype=object),
    }
    return DataProto(tensors, arrays, {"metrics": {"env/success": [0.0, 1.0]}, "note": ("a", 1)})


class RolloutScheduler:
    def __init__(
        self,
        config: Any,
        env_manager_config: Any,
        resource_manager: Any,
        infer_cluster: Any,
        mode: str,
        collator: Any = None,
    ) -> None:
        calls.append(f"scheduler {mode}")
        self.config, self.mode, self.infer_cluster = config, mode, infer_cluster

    async def initialize(self) -> None:
        calls.append(f"initialize {self.mode}")

    async def suspend(self) -> None:
        calls.append(f"suspend {self.mode}")

    async def shutdown(self) -> None:
        calls.append(f"shutdown {self.mode}")

    async def shrink_sampler(self, target_gpus: list[int]) -> dict[str, Any]:
        return {"offload_ranks": target_gpus}

    async def expand_sampler(self, target_gpus: list[int], skip_load: bool = False) -> dict[str, Any]:
        return {"load_ranks": target_gpus}

    def _should_load_mock(self, global_step: int) -> bool:
        return True  # where the adapter leaves ROLL's own replay on, the test fails

    async def _maybe_dump_batch(self, batch: DataProto, global_step: int) -> None:
        raise AssertionError("ROLL's own dump")

    async def get_batch(self, data: DataProto, batch_size: int) -> DataProto:
        step = data.meta_info["global_step"]
        if self._should_load_mock(step):
            raise AssertionError("ROLL's own replay")
        calls.append(f"get_batch {self.mode} {step}")
        batch = agentic_batch(step, rows=max(batch_size, 2), seed=int(self.mode == "val"))
        batch.meta_info["get_batch_return_start_time"] = time.time() - 1000
        batch.meta_info["metrics"]["time/get_batch_cost_gqm"] = time.time()
        await self._maybe_dump_batch(batch, step)
        return DataProto.to_remote(batch)


class Cluster:
    def __init__(self, name: str, worker_cls: Any, resource_manager: Any, worker_config: Any) -> None:
        calls.append(f"cluster {name}")
        self.name, self.worker_config = name, worker_config
        self.placement_groups = [[1]]

    def initialize(self, pipeline_config: Any, blocking: bool) -> list[Any]:
        return [1]

    def load_states(self, *_: Any, **__: Any) -> None:
        calls.append(f"load_states {self.name}")

    offload_states = load_states

    def get_metrics(self) -> Any:
        return DataProto(meta_info={"metrics": {}})


class _Handle:
    """An actor's handle: its methods run to their end."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def __getattr__(self, name: str) -> Any:
        def remote(*arguments: Any, **options: Any) -> Any:
            return asyncio.run(getattr(self._actor, name)(*arguments, **options))

        return SimpleNamespace(remote=remote)


def config(**fields: Any) -> SimpleNamespace:
    infer = SimpleNamespace(generating_args=SimpleNamespace(temperature=0.8, top_p=1.0, top_k=0))
    given = {"rollout_batch_size": 4, "val_batch_size": -1, "actor_infer": infer, "steps": 3, "seed": 3, **fields}
    return SimpleNamespace(**given)


class BasePipeline:
    def __init__(self, pipeline_config: Any) -> None:
        self.pipeline_config = pipeline_config
        self.model_update_groups: list[Any] = []

    def set_model_update_pair(self, src_cluster: Any, tgt_cluster: Any, frequency: int = 1) -> None:
        self.model_update_groups.append(tgt_cluster)

    def model_update(self, global_step: int) -> dict[str, Any]:
        calls.extend(f"weights to {group.name}" for group in self.model_update_groups)
        return {}


class AgenticPipeline(BasePipeline):
    def __init__(self, pipeline_config: Any) -> None:
        super().__init__(pipeline_config)
        clusters = {
            name: Cluster(name=name, worker_cls=None, resource_manager=None, worker_config=None)
            for name in ("actor_train", "actor_infer", "reward")
        }
        self.actor_train, self.actor_infer, self.reward = clusters.values()
        assert all(cluster.placement_groups is not None for cluster in clusters.values())
        self.schedulers = {
            mode: _Handle(
                RolloutScheduler(
                    config=pipeline_config,
                    env_manager_config=None,
                    resource_manager=None,
                    infer_cluster=self.actor_infer,
                    mode=mode,
                )
            )
            for mode in ("train", "val")
        }
        self.actor_infer.initialize(pipeline_config=pipeline_config, blocking=False)
        if self.reward:
            self.reward.initialize(pipeline_config=pipeline_config, blocking=False)
        for scheduler in self.schedulers.values():
            scheduler.initialize.remote()
        self.set_model_update_pair(src_cluster=self.actor_train, tgt_cluster=self.actor_infer, frequency=1)
        self.trained: list[Any] = []
        self.ages: list[float] = []

    def run(self) -> None:
        for step in range(self.pipeline_config.steps):
            self.schedulers["train"].suspend.remote()
            self.model_update(step)
            self.actor_infer.load_states()
            question = DataProto(meta_info={"global_step": step})
            if step == 0:
                self._keep(self.schedulers["val"].get_batch.remote(question, self.pipeline_config.val_batch_size))
            self._keep(self.schedulers["train"].get_batch.remote(question, self.pipeline_config.rollout_batch_size))
            self.actor_infer.get_metrics().meta_info.pop("metrics", {})
            self.actor_infer.offload_states()
        self.counts = (
            {mode: scheduler.counts.remote() for mode, scheduler in self.schedulers.items()}
            if (type(self) is not AgenticPipeline)
            else {}
        )
        for scheduler in self.schedulers.values():
            scheduler.shutdown.remote()

    def _keep(self, batch: DataProto) -> None:
        self.ages.append(time.time() - batch.meta_info.pop("get_batch_return_start_time"))
        batch.meta_info["metrics"].pop("time/get_batch_cost_gqm", None)
        self.trained.append([batch.batch, batch.non_tensor_batch, batch.meta_info])
