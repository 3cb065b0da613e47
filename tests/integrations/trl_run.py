"""Trains with TRL's GRPOTrainer and recorded rollouts, several times in one process.

``python -m tests.integrations.trl_run FOLDER NAME:MODE[:KEY=VALUE]…`` runs in ``.venv-engines``. For each run it writes
``FOLDER/NAME.json``: what was logged, the digest of every parameter after the training, the calls that were made, and
the ledger; or the error that refused it.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import random
import sys
import tempfile
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
    config = {"enable": mode != "real", "mode": mode, "dump_dir": str(folder / ("vllm_dumps" if is_vllm else "dumps"))}
    with Rollouts(
        config if mode != "real" else {"enable": False},
        args=args,
        processing_class=tokenizer,
        reward_funcs=[shortness, vowels],
        contract={"model": "tiny"},
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
        "children": [process.name for process in multiprocessing.active_children()],
    }


class HostEngine:
    """vLLM on the CPU in the place of TRL's ``VLLMGeneration``, whose weights and memory are a GPU's."""

    def __init__(self, *, model: Any, processing_class: Any, max_completion_length: int, **_options: Any) -> None:
        from vllm import LLM

        CALLS["engine"] += 1
        self._model, self._length, self._num_played = model, max_completion_length, 0
        self._folder = tempfile.mkdtemp()
        processing_class.save_pretrained(self._folder)
        model.save_pretrained(self._folder)
        self._llm = LLM(
            model=self._folder,
            dtype="float32",
            enforce_eager=True,
            max_model_len=128,
            seed=0,
            logprobs_mode="processed_logprobs",
            enable_prefix_caching=False,
        )

    def sync_weights(self) -> None:
        self._model.save_pretrained(self._folder)
        self._llm.collective_rpc("reload_weights", kwargs={"weights_path": self._folder})

    def generate(self, *, prompts: list[list[int]], **_options: Any) -> tuple[Any, ...]:
        from vllm import SamplingParams

        CALLS["generate"] += 1
        sampling = []
        for _ in prompts:
            self._num_played += 1
            sampling.append(SamplingParams(max_tokens=self._length, logprobs=0, seed=self._num_played))
        asked = [{"prompt_token_ids": ids} for ids in prompts]
        outputs = [output.outputs[0] for output in self._llm.generate(asked, sampling, use_tqdm=False)]
        completions = [list(output.token_ids) for output in outputs]
        logprobs = [
            [[found[token].logprob] for token, found in zip(ids, output.logprobs, strict=True)]
            for ids, output in zip(completions, outputs, strict=True)
        ]
        return prompts, completions, logprobs, None


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
    if any("vllm=" in word and ":mock:" not in word for word in sys.argv):
        grpo_trainer.VLLMGeneration = HostEngine
    place = Path(sys.argv[1])
    for word in sys.argv[2:]:
        name, mode, *pairs = word.split(":")
        try:
            result = main(place, name, mode, dict(pair.split("=", 1) for pair in pairs))
        except MockSchedulerError as error:
            result = {"error": f"{type(error).__name__}: {error}"}
        (place / f"{name}.json").write_text(json.dumps(result, indent=1), encoding="utf-8")
