"""NeMo-RL's own script, ``examples/run_grpo.py``, on a CPU: its setup, data, rollouts, environments and training loop.

``python nemo_rl_run.py FOLDER MODE KIND [KEY=VALUE ...]``: what the loop gives its policy, what it
logs, and the counts of the ledger are written to ``FOLDER/MODE.pt``. Policy and engine are none: they need a GPU.
``KIND`` is ``math``, one turn in NeMo-RL's environment of mathematics, or ``games``, several turns in two environments,
with asynchronous rollouts and dynamic sampling.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import ray
import torch
from examples import run_grpo
from nemo_rl.algorithms import grpo
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.ray_actor_environment_registry import ACTOR_ENVIRONMENT_REGISTRY
from nemo_rl.distributed.virtual_cluster import PY_EXECUTABLES
from nemo_rl.environments.interfaces import EnvironmentInterface, EnvironmentReturn
from nemo_rl.environments.utils import register_env
from nemo_rl.models.generation.interfaces import GenerationInterface
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from tokenizers.decoders import Fuse
from transformers import PreTrainedTokenizerFast

from mock_scheduler.adapters.nemo_rl.rollouts import with_rollouts
from mock_scheduler.adapters.plain_values import to_json
from mock_scheduler.ledger import Ledger

calls: list[str] = []
trained: list[dict[str, Any]] = []
logged: list[tuple[str, int, Any]] = []
_FIRST = 32
#: By which NeMo-RL imports the class.
ACTOR = "nemo_rl_run.GameActor"


class Policy:
    """Keeps what it would train on."""

    def __init__(self, **_options: Any) -> None:
        self.num_updates = 0

    def __getattr__(self, name: str) -> Any:
        def tell(*_arguments: Any, **_options: Any) -> Any:
            calls.append(f"policy.{name}")
            return {"stream_weights_via_ipc_zmq": [], "get_free_memory_bytes": 2**30}.get(name)

        if name.startswith("__"):
            raise AttributeError(name)
        return tell

    def get_logprobs(self, data: Any, timer: Any = None) -> dict[str, torch.Tensor]:
        return {"logprobs": -(data["input_ids"] % 7).float() - self.num_updates}

    def get_reference_policy_logprobs(self, data: Any, timer: Any = None) -> dict[str, torch.Tensor]:
        return {"reference_logprobs": -(data["input_ids"] % 5).float()}

    def train(self, data: Any, loss_fn: Any, timer: Any = None) -> dict[str, Any]:
        self.num_updates += 1
        trained.append({name: value.clone() for name, value in data.items()})
        loss = data["advantages"].sum()
        names = ("global_valid_seqs", "global_valid_toks", "token_mult_prob_error", "gen_kl_error", "lr")
        return {"loss": loss, "grad_norm": loss.abs(), "all_mb_metrics": {name: [1.0] for name in names}}


class Engine(GenerationInterface):
    """Writes letters at random, and an answer in a box."""

    def __init__(self, cluster: Any, config: Any) -> None:
        calls.append("engine")
        self.cfg = config
        self._draw = torch.Generator().manual_seed(3)

    def generate(self, data: Any, greedy: bool = False) -> Any:
        calls.append("generate")
        rows = [
            torch.cat([row[:length], self._respond()])
            for row, length in zip(data["input_ids"], data["input_lengths"], strict=True)
        ]
        lengths = torch.tensor([len(row) for row in rows])
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=self.cfg["_pad_token_id"])
        logprobs = -torch.rand(ids.shape, generator=self._draw)
        places = torch.arange(ids.shape[1])
        logprobs[(places < data["input_lengths"][:, None]) | (places >= lengths[:, None])] = 0
        return BatchedDataDict(
            {
                "output_ids": ids,
                "generation_lengths": lengths - data["input_lengths"],
                "unpadded_sequence_lengths": lengths,
                "logprobs": logprobs,
                "truncated": lengths % 5 == 0,
            }
        )

    async def generate_async(self, data: Any, greedy: bool = False) -> AsyncIterator[Any]:
        output = self.generate(data, greedy)
        output["gen_leader_worker_idx"] = torch.tensor([0])
        yield 0, output

    def _respond(self) -> torch.Tensor:
        count, answer = (int(torch.randint(most, (), generator=self._draw)) for most in (6, 3))
        letters = torch.randint(97, 123, (count,), generator=self._draw).tolist()
        return torch.tensor([*letters, *map(ord, f"\\boxed{{{answer}}}"), _FIRST + 95]) - _FIRST

    def init_collective(self, *_arguments: Any, **_options: Any) -> list[Any]:
        return []

    def prepare_for_generation(self, *_arguments: Any, **_options: Any) -> bool:
        return True

    def finish_generation(self, *_arguments: Any, **_options: Any) -> bool:
        return True

    def shutdown(self) -> bool:
        return True

    def prepare_refit_info(self, state_dict_info: Any) -> None:
        calls.append("prepare_refit_info")

    def update_weights_via_ipc_zmq(self) -> list[Any]:
        calls.append("weights")
        return []


class Game(EnvironmentInterface[dict[str, Any]]):
    """Asks again until the answer is right, or three were given."""

    def __init__(self, cfg: dict[str, Any]) -> None:
        self._scale = cfg["scale"]

    def step(self, message_log_batch: list[Any], metadata: list[dict[str, Any]]) -> Any:
        told = [sum(message["role"] == "assistant" for message in log) for log in message_log_batch]
        right = [
            f"{{{meta['ground_truth']}}}" in log[-1]["content"]
            for log, meta in zip(message_log_batch, metadata, strict=True)
        ]
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": "" if is_right else "no\n"} for is_right in right],
            metadata=[{**meta, "told": count} for meta, count in zip(metadata, told, strict=True)],
            next_stop_strings=[["}"]] * len(told),
            rewards=torch.tensor([self._scale * is_right for is_right in right]),
            terminateds=torch.tensor([is_right or count > 2 for is_right, count in zip(right, told, strict=True)]),
            answers=None,
        )

    def global_post_process_and_metrics(self, batch: Any) -> Any:
        return batch, {}

    def shutdown(self) -> None:
        pass


GameActor = ray.remote(num_cpus=0)(Game)


class Logger(grpo.Logger):
    """NeMo-RL's own, which shows what it is given."""

    def log_metrics(
        self, metrics: dict[str, Any], step: int, prefix: str = "", *arguments: Any, **options: Any
    ) -> None:
        logged.append((prefix, step, to_json(dict(metrics), prefix)))


def make_inputs(folder: Path) -> None:
    """Write a tokenizer of single characters, and questions whose answer is a digit."""
    letters = Tokenizer(models.WordLevel({chr(place + _FIRST): place for place in range(95)} | {"\n": 95}, "?"))
    letters.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    letters.decoder = Fuse()
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters, pad_token="~", eos_token="\n", unk_token="?")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder / "tokenizer")
    for name, count in (("train", 8), ("more", 8), ("val", 4)):
        lines = [json.dumps({"input": f"{name} {number} mod 3?", "output": str(number % 3)}) for number in range(count)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")


def write_config(folder: Path, kind: str) -> list[str]:
    """Write a configuration that is NeMo-RL's example but for its size: three steps, four prompts of two samples."""
    train = {
        "dataset_name": "ResponseDataset",
        "data_path": str(folder / "train.jsonl"),
        "split_validation_size": 0,
    }
    config: dict[str, Any] = {
        "defaults": str(Path(str(run_grpo.__file__)).with_name("configs") / "grpo_math_1B.yaml"),
        "policy": {
            "model_name": str(folder / "tokenizer"),
            "max_total_sequence_length": 96,
            "generation": {"vllm_cfg": {"async_engine": kind == "games"}},
        },
        "grpo": {
            "num_prompts_per_step": 4,
            "num_generations_per_prompt": 2,
            "max_num_steps": 3,
            "max_num_epochs": 3,
            "val_period": 2,
            "val_at_start": True,
            "val_batch_size": 2,
            "max_val_samples": 4,
        },
        "checkpointing": {"enabled": False},
        "logger": {"log_dir": str(folder / "logs"), "monitor_gpus": False},
        "data": {
            "num_workers": 0,
            "train": train,
            "validation": {"dataset_name": "ResponseDataset", "data_path": str(folder / "val.jsonl")},
            "default": {"prompt_file": None},
        },
        "env": {"math": {"num_workers": 1}},
    }
    keys = []
    if kind == "games":
        named = [
            {**train, "env_name": "small"},
            {**train, "data_path": str(folder / "more.jsonl"), "env_name": "large"},
        ]
        # Its configuration takes a list in the place of a mapping by the command line alone.
        listed = ",".join("{" + ",".join(f"{name}:{value}" for name, value in one.items()) + "}" for one in named)
        keys.append(f"data.train=[{listed}]")
        config["data"]["train"] = None
        config["data"]["default"]["env_name"] = "small"
        config["env"] |= {"small": {"scale": 0.5}, "large": {"scale": 2.0}}
        config["grpo"] |= {"num_prompts_per_step": 2, "num_generations_per_prompt": 4, "max_rollout_turns": 3}
        config["grpo"] |= {"use_dynamic_sampling": True, "val_num_generations_per_prompt": 2}
    path = folder / "config.yaml"
    path.write_text(json.dumps(config), encoding="utf-8")  # JSON is YAML
    return ["--config", str(path), *keys]


def start_ray() -> None:
    """Start Ray, and name it: NeMo-RL looks for the one of the machine, where others may run theirs."""
    context: Any = ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    os.environ["RAY_ADDRESS"] = context.address_info["gcs_address"]


def main(folder: Path, mode: str, kind: str, keys: Sequence[str]) -> None:
    """Run NeMo-RL's script with both lines of the adapter."""
    make_inputs(folder)
    for name in ("small", "large"):
        register_env(name, ACTOR)
    ACTOR_ENVIRONMENT_REGISTRY[ACTOR] = PY_EXECUTABLES.SYSTEM
    stand_ins: Any = grpo
    stand_ins.Policy, stand_ins.VllmGeneration, stand_ins.Logger = Policy, Engine, Logger
    script: Any = run_grpo
    script.init_ray = start_ray
    ledger = Ledger()
    settings = {"rollout_mock": {"enable": True, "mode": mode, "dump_dir": str(folder / "dump")}}
    script.setup, script.grpo_train = with_rollouts(script.setup, script.grpo_train, settings, ledger)
    sys.argv = ["run_grpo.py", *write_config(folder, kind), *keys]
    run_grpo.main()
    found = {"trained": trained, "logged": logged, "calls": calls, "counts": ledger.as_dict()}
    torch.save(found, folder / f"{mode}.pt")
    ray.shutdown()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4:])
