"""SkyRL 0.4.0 as far as the adapter meets it: names, arguments and order of calls, without engines and workers.

After ``skyrl/train/generators/base.py``, ``train/entrypoints/main_base.py``, ``train/trainer.py`` and
``backends/skyrl_train/workers/worker_dispatch.py`` of the wheel skyrl 0.4.0 (PyPI, 2026-10).
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np


@dataclass
class TrajectoryID:
    instance_id: str
    repetition_id: int


@dataclass
class BatchMetadata:
    global_step: int
    training_phase: str


def config(**keys: Any) -> SimpleNamespace:
    """The keys that the adapter reads, by their dotted names."""
    values = {
        "trainer.policy.model.path": "tiny",
        "trainer.fully_async.enabled": False,
        "trainer.algorithm.dynamic_sampling.type": None,
        "trainer.algorithm.dynamic_sampling.max_sample_batches": 30,
        "trainer.steps": 3,
        "generator.n_samples_per_prompt": 2,
        "generator.sampling_params.temperature": 0.5,
        "generator.sampling_params.top_p": 1.0,
        "generator.sampling_params.top_k": -1,
        "generator.eval_sampling_params.temperature": 0.0,
        **{name.replace("__", "."): value for name, value in keys.items()},
    }
    root = SimpleNamespace()
    for name, value in values.items():
        node, *parts = root, *name.split(".")
        for part in parts[:-1]:
            if not hasattr(node, part):
                setattr(node, part, SimpleNamespace())
            node = getattr(node, part)
        setattr(node, parts[-1], value)
    return root


class Dispatch:
    """What the driver tells its workers; a weight goes to the engines with every call."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def init_weight_sync_state(self, client: Any) -> None:
        asyncio.get_running_loop()  # SkyRL calls it within its training loop
        client.engines_meet_workers()

    async def save_weights_for_sampler(self, model_id: str | None = None) -> None:
        await self._client.wake_up(tags=["weights"])
        await self._client.take_weights()


class Client:
    """Engines that run."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def engines_meet_workers(self) -> None:
        self.calls.append("meet")

    async def wake_up(self, *args: Any, **kwargs: Any) -> None:
        self.calls.append("wake_up")

    async def take_weights(self) -> None:
        self.calls.append("weights")

    async def sleep(self, *args: Any, **kwargs: Any) -> None:
        self.calls.append("sleep")


class Generator:
    """Plays by a generator of random numbers of its own, which no replay may move."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.num_calls = 0
        self._draw = random.Random(7)

    async def generate(self, input_batch: dict[str, Any]) -> dict[str, Any]:
        self.num_calls += 1
        count = len(input_batch["prompts"])
        lengths = [self._draw.randint(0, 4) for _ in range(count)]
        return {
            "prompt_token_ids": [[number + 1, 5] for number in range(count)],
            "response_ids": [[self._draw.randrange(100) for _ in range(length)] for length in lengths],
            "rewards": [self._draw.random() for _ in range(count)],
            "loss_masks": [[1] * length for length in lengths],
            "stop_reasons": [self._draw.choice(["stop", "length"]) for _ in range(count)],
            "rollout_metrics": {"generate/avg_num_tokens": sum(lengths) / count, "x": np.float64(2.5)},
            "rollout_logprobs": [[-self._draw.random() for _ in range(length)] for length in lengths],
            "trajectory_ids": input_batch["trajectory_ids"],
            "is_last_step": None,
        }


class Trainer:
    """``RayPPOTrainer``: draws prompts from its data loader, has them played, and trains."""

    def __init__(
        self, *, cfg: Any, train_dataset: list[dict[str, Any]], inference_engine_client: Any, generator: Any
    ) -> None:
        self.cfg, self.generator, self.inference_engine_client = cfg, generator, inference_engine_client
        self.train_dataset = train_dataset
        self.trained: list[dict[str, Any]] = []
        self.evaluated: list[dict[str, Any]] = []
        self.metrics: list[dict[str, Any]] = []

    def build_models(self, policy: Any, critic: Any, ref: Any) -> None:
        self.dispatch = Dispatch(self.inference_engine_client)

    def init_weight_sync_state(self) -> None:
        self.dispatch.init_weight_sync_state(self.inference_engine_client)

    async def train(self) -> None:
        self.init_weight_sync_state()
        await self.dispatch.save_weights_for_sampler()
        self.evaluated.append(await self._play(self.train_dataset[:1], "eval", 0, 1))
        per_step = 2 if self.cfg.trainer.algorithm.dynamic_sampling.type else 1
        for step in range(1, self.cfg.trainer.steps + 1):
            for _ in range(per_step):
                prompts = [self.train_dataset[(2 * step + one) % len(self.train_dataset)] for one in range(2)]
                output = await self._play(prompts, "train", step, self.cfg.generator.n_samples_per_prompt)
                self.metrics.append(output.pop("rollout_metrics"))
                self.trained.append(output)
            await self.inference_engine_client.sleep()
            await self.dispatch.save_weights_for_sampler()

    async def _play(self, prompts: list[dict[str, Any]], phase: str, step: int, repeats: int) -> dict[str, Any]:
        played: dict[str, Any] = await self.generator.generate(
            {
                "prompts": [one["prompt"] for one in prompts for _ in range(repeats)],
                "env_classes": ["gsm8k"] * len(prompts) * repeats,
                "env_extras": [one["env_extras"] for one in prompts for _ in range(repeats)],
                "sampling_params": None,
                "trajectory_ids": [TrajectoryID(one["uid"], number) for one in prompts for number in range(repeats)],
                "batch_metadata": BatchMetadata(global_step=step, training_phase=phase),
            }
        )
        return played


class Experiment:
    """``BasePPOExp``."""

    def __init__(self, cfg: Any) -> None:
        self.cfg = cfg
        self.made: list[str] = []
        self.train_dataset = [
            {
                "prompt": [{"role": "user", "content": f"{number}?"}],
                "env_extras": {"answer": number},
                "uid": str(number),
            }
            for number in range(5)
        ]

    def get_inference_client(self) -> Any:
        self.made.append("engines")
        return Client()

    def get_generator(self, cfg: Any, tokenizer: Any, inference_engine_client: Any) -> Any:
        self.made.append("generator")
        return Generator(inference_engine_client)

    def get_trainer(self, cfg: Any, inference_engine_client: Any, generator: Any) -> Trainer:
        return Trainer(
            cfg=cfg,
            train_dataset=self.train_dataset,
            inference_engine_client=inference_engine_client,
            generator=generator,
        )

    def run(self) -> None:
        client = self.get_inference_client()
        generator = self.get_generator(self.cfg, None, client)
        self.trainer = self.get_trainer(cfg=self.cfg, inference_engine_client=client, generator=generator)
        self.trainer.build_models(None, None, None)
        asyncio.run(self.trainer.train())
