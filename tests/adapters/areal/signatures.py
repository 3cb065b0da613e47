"""AReaL 1.0.4 as far as the adapter meets it: names, arguments and order of calls, without engines and workers.

After ``areal/trainer/rl_trainer.py``, ``infra/controller/rollout_controller.py`` and ``utils/data.py`` of the wheel
areal 1.0.4 (PyPI).
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

#: Engines built, and what was asked of them.
calls: list[str] = []


class DataLoader:
    """Batches of prompts in epochs; shows where it stands."""

    def __init__(self, num_batches: int = 3) -> None:
        self.batch_size = 2
        self.num_batches = num_batches
        self.epochs: list[int] = []
        self.position = 0
        self.sampler = SimpleNamespace(set_epoch=self.epochs.append)

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[list[dict[str, int]]]:
        for number in range(self.num_batches):
            self.position += 1
            yield [{"prompt": number}, {"prompt": number + 1}]

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "epochs": list(self.epochs)}


def cycle_dataloader(dataloader: Any) -> Iterator[Any]:
    epoch = 0
    while True:
        if hasattr(dataloader, "sampler") and hasattr(dataloader.sampler, "set_epoch"):
            dataloader.sampler.set_epoch(epoch)
        yield from dataloader
        epoch += 1


class Engine:
    """A rollout engine: draws two batches of prompts ahead, and answers in any order."""

    def __init__(self) -> None:
        calls.append("engine")
        self.staleness_manager = None
        self.version = 0
        self._draw = torch.Generator().manual_seed(5)
        self._ready: list[int] = []

    def prepare_batch(self, dataloader: Any, group_size: int) -> list[dict[str, Any]]:
        calls.append("prepare_batch")
        if not hasattr(self, "data_generator"):
            self.data_generator = (item["prompt"] for batch in cycle_dataloader(dataloader) for item in batch)
        while len(self._ready) < 3 * dataloader.batch_size:
            self._ready.append(next(self.data_generator))
        prompts, self._ready = self._ready[: dataloader.batch_size], self._ready[dataloader.batch_size :]
        return [self._play(prompt, group_size) for prompt in reversed(prompts)]

    def _play(self, prompt: int, size: int) -> dict[str, Any]:
        width = int(torch.randint(3, 7, (), generator=self._draw))
        response = torch.arange(width).expand(size, width) >= 2
        return {
            "input_ids": torch.randint(0, 50, (size, width), generator=self._draw, dtype=torch.int32) + prompt,
            "loss_mask": response.int(),
            "logprobs": -torch.rand(size, width, generator=self._draw) * response,
            "versions": torch.where(response, max(self.version - prompt % 2, 0), -1).int(),
            "attention_mask": torch.ones(size, width, dtype=torch.bool),
            "rewards": torch.rand(size, generator=self._draw),
        }

    def set_version(self, version: int) -> None:
        self.version = version

    def pause(self) -> None:
        calls.append("pause")

    def resume(self) -> None:
        calls.append("resume")

    def destroy(self) -> None:
        calls.append("destroy")

    def export_stats(self) -> dict[str, float]:
        return {}


class Actor:
    """The controller of the training engine."""

    def __init__(self) -> None:
        self.version = 0
        self.trained: list[Any] = []
        self.rollout: Any = None

    def connect_engine(self, engine: Any, meta: Any) -> None:
        calls.append("connect_engine")
        self.rollout = engine

    def prepare_batch(
        self,
        dataloader: Any,
        workflow: Any,
        workflow_kwargs: Any,
        should_accept_fn: Any = None,
        group_size: int = 1,
        dynamic_bs: bool = False,
    ) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.rollout.prepare_batch(dataloader, group_size)
        return found

    def ppo_update(self, batch: list[dict[str, Any]]) -> None:
        self.trained.append([dict(one) for one in batch])

    def update_weights(self, meta: Any) -> None:
        calls.append("update_weights")

    def set_version(self, version: int) -> None:
        self.version = version


def config(n_samples: int = 2, **fields: Any) -> SimpleNamespace:
    gconfig = SimpleNamespace(n_samples=n_samples, temperature=0.7, top_p=1.0, top_k=100000000)
    return SimpleNamespace(**{"gconfig": gconfig, "rollout": SimpleNamespace(), "dynamic_bs": False, **fields})


class PPOTrainer:
    """Builds the actor first, then its engines, and connects the two."""

    def __init__(self, config: Any, train_dataset: DataLoader, start: int | None = None) -> None:
        self.config, self.train_dataloader = config, train_dataset
        self.actor = Actor()
        self.rollout = self._init_rollout(config.rollout, is_eval=False, lora_path=None)
        self.eval_rollout = self._init_rollout(config.rollout, is_eval=True, lora_path=None)
        self.actor.connect_engine(self.rollout, "meta")
        info = None if start is None else SimpleNamespace(next=lambda: SimpleNamespace(global_step=start))
        self.recover_info = None if info is None else SimpleNamespace(last_step_info=info)

    def _init_rollout(self, rollout_config: Any, is_eval: bool = False, lora_path: str | None = None) -> Any:
        return Engine()

    def _ensure_proxy_started(self) -> None:
        calls.append("proxy")

    def train(self, steps: range) -> None:
        self._ensure_proxy_started()
        for step in steps:
            batch = self.actor.prepare_batch(
                self.train_dataloader,
                workflow="w",
                workflow_kwargs={},
                should_accept_fn=None,
                group_size=self.config.gconfig.n_samples,
                dynamic_bs=self.config.dynamic_bs,
            )
            for one in batch:
                one["prox_logp"] = one["logprobs"] * self.actor.version
            self.actor.ppo_update(batch)
            self.rollout.pause()
            self.actor.update_weights("meta")
            self.actor.set_version(step + 1)
            self.rollout.set_version(step + 1)
            self.eval_rollout.set_version(step + 1)
            self.rollout.resume()
        self.stats = self.rollout.export_stats()

    def close(self) -> None:
        self.eval_rollout.destroy()
        self.rollout.destroy()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
