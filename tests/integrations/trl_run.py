"""Trains with TRL's GRPOTrainer and recorded rollouts, several times in one process.

``python -m tests.integrations.trl_run FOLDER NAME:MODE[:KEY=VALUE]…`` runs in ``.venv-engines``. For each run it writes
``FOLDER/NAME.json``: what was logged, the digest of every parameter after the training, the calls that were made, and
the ledger; or the error that refused it.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
from functools import partial
from pathlib import Path
from typing import Any

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationMixin
from trl import GRPOConfig, GRPOTrainer
from trl.trainer import grpo_trainer

from mock_scheduler.adapters.trl import Rollouts, trace_callback
from mock_scheduler.errors import MockSchedulerError

PROMPTS = ["Left Right", "what is 12 plus 30?", "the quick", "Up Down Up"]
CALLS = {"engine": 0, "generate": 0, "reward": 0}


def shortness(completions: list[str], log_metric: Any, log_extra: Any, **_columns: Any) -> list[float | None]:
    """A reward that draws from two generators, logs, and has no value for one row."""
    CALLS["reward"] += 1
    values = [len(set(text)) / 7 + random.random() / 10 + torch.rand(()).item() / 10 for text in completions]
    log_metric("shortness", sum(values))
    log_extra("length", [len(text) for text in completions])
    return [None, *values[1:]]


def name_of_dumps(is_vllm: bool) -> str:
    """Runs of one kind share a recording."""
    return "vllm_dumps" if is_vllm else "shared_dumps" if "WORLD_SIZE" in os.environ else "dumps"


async def vowels(completions: list[str], **_columns: Any) -> list[float]:
    """An asynchronous reward."""
    CALLS["reward"] += 1
    return [-0.1 * text.count("e") for text in completions]


def main(folder: Path, name: str, mode: str, given: dict[str, str]) -> dict[str, Any]:
    """Train for three steps."""
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(given.get("tokenizer", str(folder / "model")), padding_side="left")
    prompts = [given.get("prompt", PROMPTS[0]), *PROMPTS[1:]] * 4
    is_vllm = "vllm" in given
    args = GRPOConfig(
        output_dir=str(folder / name),
        per_device_train_batch_size=8,
        num_generations=int(given.get("generations", 4)),
        max_completion_length=12,
        max_steps=3,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        seed=7,
        beta=0.01,
        gradient_accumulation_steps=2,
        disable_tqdm=True,
        lr_scheduler_type="constant",
        eval_strategy="steps" if "evaluate" in given else "no",
        eval_steps=2,
        per_device_eval_batch_size=8,
        use_vllm=is_vllm,
        vllm_mode="colocate",
        vllm_max_model_length=128,
    )
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    CALLS.update(engine=0, generate=0, reward=0)
    random.seed(int(given.get("seed", 1)))
    data = Dataset.from_list([{"prompt": prompt} for prompt in prompts])
    config = {"enable": mode != "real", "mode": mode, "dump_dir": str(folder / name_of_dumps(is_vllm))}
    with Rollouts(
        config if mode != "real" else {"enable": False},
        args=args,
        processing_class=tokenizer,
        reward_funcs=[shortness, vowels],
        contract={"model": "tiny"},
        run_id=name if mode == "dump" else None,
    ) as rollouts:
        trainer = GRPOTrainer(
            model,
            reward_funcs=rollouts.reward_funcs,
            rollout_func=rollouts,
            args=args,
            train_dataset=data,
            eval_dataset=data.select(range(4)) if "evaluate" in given else None,
            processing_class=tokenizer,
        )
        if "trace" in given:
            trainer.add_callback(trace_callback(folder / f"{name}-trace"))
        trainer.train()
    return {
        "logs": lasting_logs(trainer),
        "weights": digest_weights(model),
        "calls": dict(CALLS),
        "ledger": rollouts.ledger.as_dict(),
        "has_engine": hasattr(getattr(trainer, "vllm_generation", None), "llm"),
    }


def lasting_logs(trainer: Any) -> list[dict[str, Any]]:
    """What was logged, without what is measured in seconds."""
    timed = ("runtime", "per_second", "step_time", "total_flos", "profiling", "perf/", "queue")
    return [
        {key: value for key, value in line.items() if not any(word in key for word in timed)}
        for line in trainer.state.log_history
    ]


def digest_weights(model: Any) -> dict[str, str]:
    """The digest of every parameter."""
    return {
        key: hashlib.sha256(value.detach().contiguous().numpy().tobytes()).hexdigest()
        for key, value in sorted(model.state_dict().items())
    }


def count_generation() -> None:
    """Count the calls of transformers' ``generate``."""
    generate: Any = GenerationMixin.generate

    def counted(self: Any, *arguments: Any, **options: Any) -> Any:
        CALLS["generate"] += 1
        return generate(self, *arguments, **options)

    GenerationMixin.generate = counted


if __name__ == "__main__":
    count_generation()
    given_environment = set(os.environ)  # vLLM and accelerate add to it
    if any("vllm=" in word and ":mock:" not in word for word in sys.argv):
        from tests.integrations.trl_vllm import build_host_engine

        grpo_trainer.VLLMGeneration = partial(build_host_engine, CALLS)
    place = Path(sys.argv[1])
    for word in sys.argv[2:]:
        name, mode, *pairs = word.split(":")
        try:
            result = main(place, name, mode, dict(pair.split("=", 1) for pair in pairs))
        except MockSchedulerError as error:
            result = {"error": f"{type(error).__name__}: {error}"}
        rank = f"-{os.environ['RANK']}" if "RANK" in given_environment else ""
        (place / f"{name}{rank}.json").write_text(json.dumps(result, indent=1), encoding="utf-8")
