"""SkyRL's own experiment, trainer and data loader on a CPU, with a generator that plays at random and no workers.

``python skyrl_run.py FOLDER MODE [KEY=VALUE ...]``: what the trainer would send to its workers is written to
``FOLDER/MODE.pt``, with the counts of the ledger. Training itself is not there: its workers need a GPU.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.dataset.dataset import PromptDataset
from skyrl.train.entrypoints.main_base import BasePPOExp
from skyrl.train.generators.base import GeneratorInterface, GeneratorOutput
from skyrl.train.trainer import RayPPOTrainer

from mock_scheduler.adapters.skyrl.rollouts import with_rollouts
from mock_scheduler.ledger import Ledger

calls: list[str] = []


class Prompts(PromptDataset):
    """Ten prompts, in the form of SkyRL's own data set."""

    def __init__(self) -> None:
        prompts = [[{"role": "user", "content": f"{uid} + 1?"}] for uid in range(10)]
        self.rows = [(prompt, "gsm8k", {"answer": uid}, str(uid)) for uid, prompt in enumerate(prompts)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


class RandomGenerator(GeneratorInterface):
    """Plays with a generator of its own."""

    def __init__(self, is_stepwise: bool) -> None:
        self._draw = random.Random(3)
        self._is_stepwise = is_stepwise

    async def generate(self, input_batch: Any) -> GeneratorOutput:
        metadata = input_batch["batch_metadata"]
        calls.append(f"{metadata.training_phase} {metadata.global_step}")
        steps = 2 if self._is_stepwise else 1
        ids = [one for one in input_batch["trajectory_ids"] for _ in range(steps)]
        lengths = [self._draw.randint(1, 5) for _ in ids]
        prompts = [[int(one.instance_id) + 1, 2, 3] for one in ids]
        return GeneratorOutput(
            prompt_token_ids=prompts,
            response_ids=[[self._draw.randrange(50) for _ in range(length)] for length in lengths],
            rewards=[[0.0] * (length - 1) + [self._draw.random()] for length in lengths],
            loss_masks=[[1] * length for length in lengths],
            stop_reasons=["stop" for _ in ids],
            rollout_metrics={"generate/mean": sum(lengths) / len(lengths)},
            rollout_logprobs=[[-self._draw.random() for _ in range(length)] for length in lengths],
            trajectory_ids=ids,
            rollout_expert_indices=[
                np.array(
                    [[self._draw.sample(range(8), 2) for _ in range(2)] for _ in range(3 + length - 1)], dtype=np.uint8
                )
                for length in lengths
            ],
            is_last_step=[number % steps == steps - 1 for number in range(len(ids))] if self._is_stepwise else None,
        )


class Client:
    """An engine that is told, and never asked."""

    def __getattr__(self, name: str) -> Any:
        async def tell(*_arguments: Any, **_options: Any) -> None:
            calls.append(name)

        return tell


class Dispatch:
    """What the trainer tells its workers."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def init_weight_sync_state(self, client: Any) -> None:
        calls.append("meet")

    async def save_weights_for_sampler(self, model_id: str | None = None) -> None:
        await self._client.wake_up(tags=["weights"])

    def get_lcm_dp_size(self) -> int:
        return 1

    def get_timing_metrics(self) -> dict[str, float]:
        return {}

    def finalize_pending_saves(self, model: str) -> None:
        pass


class Trainer(RayPPOTrainer):
    """SkyRL's own, which keeps what it would train on."""

    def build_models(self, policy: Any, critic: Any, ref: Any) -> None:
        self.dispatch = Dispatch(self.inference_engine_client)
        self.trained: list[dict[str, Any]] = []

    def fwd_logprobs_values_reward(self, training_input: Any) -> Any:
        training_input["base_action_log_probs"] = None
        training_input["values"] = None
        training_input["action_log_probs"] = training_input["rollout_logprobs"].clone()
        return training_input

    def train_critic_and_policy(self, data: Any) -> dict[str, float]:
        # A field of several tensors, as the experts, is kept by its attributes.
        kept = {
            name: value if isinstance(value, torch.Tensor) else vars(value)
            for name, value in data.items()
            if value is not None
        }
        self.trained.append(kept)
        return {}


class CpuExperiment(BasePPOExp):
    """``BasePPOExp`` with its own order of making things, and without Ray and a tokenizer."""

    def __init__(self, cfg: Any) -> None:
        self.cfg, self.colocate_pg = cfg, None
        self.tokenizer = SimpleNamespace(pad_token_id=0, eos_token_id=1, decode=str)
        self.train_dataset = self.eval_dataset = Prompts()

    def get_inference_client(self) -> Any:
        calls.append("engines")
        return Client()

    def get_generator(self, cfg: Any, tokenizer: Any, inference_engine_client: Any) -> Any:
        calls.append("generator")
        return RandomGenerator(cfg.generator.step_wise_trajectories)

    def get_trainer(self, **parts: Any) -> Any:
        return Trainer(**parts)

    def get_tracker(self) -> Any:
        return SimpleNamespace(log=lambda *_a, **_k: None, finish=lambda: None, log_exception=lambda *_a, **_k: None)

    def _setup_trainer(self) -> Any:
        client = self.get_inference_client()
        generator = self.get_generator(self.cfg, self.tokenizer, client)
        self.trainer = self.get_trainer(
            cfg=self.cfg,
            tracker=self.get_tracker(),
            tokenizer=self.tokenizer,
            train_dataset=self.train_dataset,
            eval_dataset=self.eval_dataset,
            inference_engine_client=client,
            generator=generator,
            colocate_pg=None,
        )
        self.trainer.build_models(None, None, None)
        return self.trainer


def config(keys: list[str]) -> Any:
    """Three steps of four prompts, of two samples each."""
    return SkyRLTrainConfig.from_cli_overrides(
        [
            "trainer.train_batch_size=4",
            "trainer.policy_mini_batch_size=4",
            "trainer.eval_batch_size=4",
            "trainer.epochs=2",
            "trainer.max_training_steps=3",
            "trainer.eval_interval=2",
            "trainer.ckpt_interval=0",
            "trainer.hf_save_interval=0",
            "trainer.placement.colocate_all=false",
            "trainer.resume_mode=none",
            "trainer.print_example_interval=0",
            "generator.n_samples_per_prompt=2",
            "generator.eval_n_samples_per_prompt=1",
            "generator.inference_engine.enable_return_routed_experts=true",
            "generator.inference_engine.enable_ray_prometheus_stats=false",
            "data.dataloader.num_workers=0",
            *keys,
        ]
    )


def main(folder: Path, mode: str, keys: list[str]) -> None:
    ledger = Ledger()
    settings = {"rollout_mock": {"enable": True, "mode": mode, "dump_dir": str(folder / "dump")}}
    cfg = config(keys)
    cfg.trainer.export_path = cfg.trainer.ckpt_path = str(folder)
    experiment: Any = with_rollouts(CpuExperiment, settings, ledger)(cfg)
    experiment.run()
    torch.save(
        {"trained": experiment.trainer.trained, "calls": calls, "counts": ledger.as_dict()}, folder / f"{mode}.pt"
    )


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
