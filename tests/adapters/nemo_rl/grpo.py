"""NeMo-RL as far as the adapter meets it: names, arguments and order of calls, without workers, engines and actors.

After ``nemo_rl/algorithms/grpo.py``, ``experience/rollouts.py``, ``distributed/batched_data_dict.py`` and
``data/multimodal_utils.py`` of NVIDIA-NeMo/RL 7ea279abf (2026-08-22).
"""

from __future__ import annotations

import copy
import random
from collections import UserDict
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

calls: list[str] = []


def noting(name: str, answer: Any) -> Any:
    """A function that notes its call."""

    def note(*_arguments: Any, **_options: Any) -> Any:
        calls.append(name)
        return answer

    return note


class BatchedDataDict(UserDict):  # type: ignore[type-arg]
    """Lists and tensors of one length."""

    @property
    def size(self) -> int:
        return len(next(iter(self.data.values())))

    def repeat_interleave(self, count: int) -> BatchedDataDict:
        return BatchedDataDict(
            {
                name: value.repeat_interleave(count, dim=0)
                if isinstance(value, torch.Tensor)
                else [copy.deepcopy(item) for item in value for _ in range(count)]
                for name, value in self.data.items()
            }
        )


class PackedTensor:
    """Images of rows, some of which share them."""

    def __init__(self, tensors: list[torch.Tensor | None], dim_to_pack: int) -> None:
        self.tensors, self.dim_to_pack, self.pad_to_max_shape = tensors, dim_to_pack, False
        self._row_offsets: list[int] | None = None
        self._segment_provenance = [b"\x00\x01"] * len(tensors)


@dataclass
class NemoGymRolloutResult:
    input_ids: torch.Tensor
    final_batch: BatchedDataDict
    rollout_metrics: dict[str, Any]
    task_index: int | None


def config(**keys: Any) -> SimpleNamespace:
    """The keys that the adapter and the stand-ins read."""
    grpo = {
        "num_prompts_per_step": 2,
        "num_generations_per_prompt": 2,
        "val_num_generations_per_prompt": 1,
        "max_rollout_turns": 2,
        "max_num_steps": 3,
        "use_dynamic_sampling": False,
        "seed": 42,
        "async_grpo": SimpleNamespace(enabled=keys.get("asynchronous", False)),
    }
    generation = {
        "backend": keys.get("backend", "vllm"),
        "temperature": 0.5,
        "top_p": 1.0,
        "top_k": None,
        "val_temperature": 0.5,
        "val_top_p": 1.0,
        "val_top_k": None,
        "refit_transport": None,
        "colocated": {"enabled": keys.get("colocated", True)},
    }
    return SimpleNamespace(
        policy={
            "model_name": "tiny",
            "generation": {
                name: value if name == "colocated" else keys.get(name, value) for name, value in generation.items()
            },
        },
        grpo=SimpleNamespace(**{name: keys.get(name, value) for name, value in grpo.items()}),
        data={"shuffle": False},
        env={"should_use_nemo_gym": keys.get("gym", False)},
        data_plane={"enabled": keys.get("data_plane", False)},
    )


class Tokenizer:
    """One token for each character."""

    pad_token_id = 0
    chat_template = None

    def __init__(self, first: int = 1) -> None:
        self.first = first
        self.special_tokens_map = {"pad_token": "~"}

    def get_vocab(self) -> dict[str, int]:
        return {chr(97 + place): place + self.first for place in range(26)}

    def encode(self, text: str) -> torch.Tensor:
        return torch.tensor([ord(letter) % 26 + self.first for letter in text], dtype=torch.int64)


class VllmGeneration:
    """Draws by a generator of its own."""

    def __init__(self, cluster: Any, config: Any, **options: Any) -> None:
        calls.append("engine")
        self.cfg = config
        self._draw = random.Random(7)
        self.dp_openai_server_base_urls = ["http://engine"]

    def generate(self, count: int) -> list[list[int]]:
        calls.append("generate")
        return [[self._draw.randrange(1, 50) for _ in range(self._draw.randint(0, 4))] for _ in range(count)]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return noting(f"engine.{name}", [])


class MegatronGeneration(VllmGeneration):
    """Runs in the policy where both share their GPUs."""

    @staticmethod
    def init_cluster_placement_groups(cluster: Any, config: Any) -> None:
        calls.append(f"placed {cluster.name}")


class Policy:
    """Keeps what it is given to train on."""

    def __init__(self, **options: Any) -> None:
        self.trained: list[dict[str, Any]] = []

    def train(self, data: dict[str, Any]) -> None:
        self.trained.append(copy.deepcopy(data))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return noting(f"policy.{name}", [])


class Environment:
    """Says something and rewards; it is asked as an actor is."""

    def step(self, count: int) -> list[float]:
        calls.append("environment")
        return [0.25 * row for row in range(count)]


def create_weight_synchronizer(**options: Any) -> Any:
    return SimpleNamespace(
        is_stale=True,
        init_communicator=noting("communicator", None),
        sync_weights=noting("weights", {}),
    )


def spinup_nemo_gym_actor(**options: Any) -> Any:
    calls.append("gym")
    return Environment()


def maybe_gpu_profile_step(policy: Any, step: int) -> None:
    calls.append(f"step {step}")


def refit_policy_generation(policy: Any, generation: Any, colocated: bool, **options: Any) -> dict[str, float]:
    calls.append("weights")
    return {}


def _play(generation: Any, batch: BatchedDataDict, tokenizer: Tokenizer, environment: Any) -> BatchedDataDict:
    """Two turns for all rows; the messages of the batch itself grow, as NeMo-RL's do."""
    final = BatchedDataDict(batch.data)
    total = torch.zeros(batch.size)
    for turn in range(2):
        answers = generation.generate(batch.size)
        total += torch.tensor(environment.step(batch.size))
        for row, ids in enumerate(answers):
            logprobs = -torch.arange(len(ids), dtype=torch.float32) / 8 - turn
            tokens = torch.tensor(ids, dtype=torch.int64)
            log = final["message_log"][row]
            log.append({"role": "assistant", "content": "x", "token_ids": tokens, "generation_logprobs": logprobs})
            log.append({"role": "environment", "content": "ok", "token_ids": tokenizer.encode("ok")})
        final["extra_env_info"] = [{**info, "turn": turn} for info in final["extra_env_info"]]
    final["total_reward"], final["truncated"] = total, total > 0.5
    return final


def run_multi_turn_rollout(
    policy_generation: Any, input_batch: BatchedDataDict, tokenizer: Any, task_to_env: Any, max_seq_len: int = 8
) -> tuple[BatchedDataDict, dict[str, Any]]:
    final = _play(policy_generation, input_batch, tokenizer, task_to_env["math"])
    return final, {"total_turns": 4, "mean_gen_tokens_per_sample": 2.5, "timing/rollout": random.random()}


run_async_multi_turn_rollout = run_multi_turn_rollout


def run_nemo_gym_rollout_sync(
    policy_generation: Any, input_batch: BatchedDataDict, tokenizer: Any, task_to_env: Any, max_seq_len: int = 8
) -> NemoGymRolloutResult:
    final = _play(policy_generation, input_batch, tokenizer, task_to_env["math"])
    metrics = {"gen_tokens_per_sample/mean": 2.5, "timing/rollout": random.random()}
    ids = torch.tensor([[1, 2, 0]] * final.size)
    return NemoGymRolloutResult(input_ids=ids, final_batch=final, rollout_metrics=metrics, task_index=None)


def setup(
    master_config: Any,
    tokenizer: Any,
    dataset: Any,
    val_dataset: Any,
    processor: Any = None,
    policy_factory: Any = None,
) -> tuple[Any, ...]:
    make = policy_factory or Policy
    colocated = master_config.policy["generation"]["colocated"]["enabled"]
    cluster = SimpleNamespace(name="grpo_policy_cluster" if colocated else "grpo_inference_cluster")
    is_megatron = master_config.policy["generation"]["backend"] == "megatron"
    engines: Any = MegatronGeneration if is_megatron else VllmGeneration
    if is_megatron:
        engines.init_cluster_placement_groups(cluster, master_config.policy)
    generation = engines(cluster=cluster, config=master_config.policy["generation"])
    policy = make(cluster=cluster, config=master_config.policy)
    gym = spinup_nemo_gym_actor(base_urls=generation.dp_openai_server_base_urls) if dataset is None else None
    if not colocated:
        assert policy.init_collective("ip", 1, 2) + generation.init_collective("ip", 1, 2) == []
    if is_megatron:
        generation.weight_synchronizer = create_weight_synchronizer(policy=policy, generation=generation)
        generation.weight_synchronizer.init_communicator()
    policy.prepare_refit_info()
    return policy, generation, gym, dataset, val_dataset


def validate(policy_generation: Any, batches: Any, tokenizer: Any, envs: Any, step: int, config: Any) -> list[Any]:
    found = []
    for batch in batches:
        rows = copy.deepcopy(batch).repeat_interleave(config.grpo.val_num_generations_per_prompt)
        found.append(_ask(config, policy_generation, rows, tokenizer, envs))
    return found


def grpo_train(
    policy: Policy,
    policy_generation: Any,
    dataloader: Any,
    val_batches: Any,
    tokenizer: Any,
    task_to_env: Any,
    master_config: Any,
) -> dict[str, Any]:
    """Return what a test looks at; NeMo-RL's returns nothing."""
    found: dict[str, Any] = {"val": [], "metrics": []}
    refit_policy_generation(policy, policy_generation, True)
    found["val"].append(validate(policy_generation, val_batches, tokenizer, task_to_env, 0, master_config))
    for step in range(1, master_config.grpo.max_num_steps + 1):
        maybe_gpu_profile_step(policy, step)
        maybe_gpu_profile_step(policy_generation, step)
        for _ in range(2 if master_config.grpo.use_dynamic_sampling else 1):
            batch = copy.deepcopy(dataloader[step % len(dataloader)])
            rows = batch.repeat_interleave(master_config.grpo.num_generations_per_prompt)
            final, metrics = _ask(master_config, policy_generation, rows, tokenizer, task_to_env)
            policy_generation.finish_generation()
            found["metrics"].append(metrics)
            for log in final["message_log"]:
                for message in log:
                    message["token_loss_mask"] = torch.ones_like(message["token_ids"])
            policy.train(final.data)
        refit_policy_generation(policy, policy_generation, True)
        if step == 2:
            found["val"].append(validate(policy_generation, val_batches, tokenizer, task_to_env, step, master_config))
    found["trained"] = policy.trained
    return found


def _ask(config: Any, generation: Any, rows: BatchedDataDict, tokenizer: Any, envs: Any) -> Any:
    if config.env["should_use_nemo_gym"]:
        result = run_nemo_gym_rollout_sync(generation, rows, tokenizer, envs, max_seq_len=9)
        assert result.input_ids.shape == (rows.size, 3)
        return result.final_batch, result.rollout_metrics
    return run_multi_turn_rollout(
        policy_generation=generation, input_batch=rows, tokenizer=tokenizer, task_to_env=envs, max_seq_len=9
    )


def prompts(texts: list[str], tokenizer: Tokenizer) -> BatchedDataDict:
    """A batch as NeMo-RL's collate function makes it."""
    ids = [tokenizer.encode(text) for text in texts]
    return BatchedDataDict(
        {
            "message_log": [
                [{"role": "user", "content": text, "token_ids": tokens}]
                for text, tokens in zip(texts, ids, strict=True)
            ],
            "length": torch.tensor([len(tokens) for tokens in ids]),
            "loss_multiplier": torch.ones(len(texts)),
            "extra_env_info": [{"ground_truth": text} for text in texts],
            "task_name": ["math"] * len(texts),
            "idx": list(range(len(texts))),
            "stop_strings": [None] * len(texts),
        }
    )
