"""What of a TRL run must be the same in a recording and its replay, as values of the contract.

Contract: attributes of TRL's configuration and tokenizer are read by name, and TRL itself is not imported; what a
release lacks is left out.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, TypeAlias

from mock_scheduler.adapters.transformers_objects import describe_model, describe_tokenizer
from mock_scheduler.batch import SamplingParams
from mock_scheduler.errors import ConfigError
from mock_scheduler.scheduler import RowShard
from mock_scheduler.support.digests import JSON, compute_json_digest

#: An object of TRL or transformers, whose attributes are read by name: neither is imported here.
TrlObject: TypeAlias = Any

_ARGUMENTS = (
    "num_generations",
    "num_generations_eval",
    "per_device_train_batch_size",
    "steps_per_generation",
    "num_iterations",
    "max_completion_length",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "use_vllm",
)


def describe_arguments(args: TrlObject, processing_class: TrlObject, reward_names: Sequence[str]) -> dict[str, JSON]:
    """Describe the run: how many samples are drawn and how, with which tokenizer, scored by which functions."""
    found: dict[str, JSON] = {f"trl.{name}": getattr(args, name) for name in _ARGUMENTS if hasattr(args, name)}
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    return {
        **found,
        "trl.tokenizer": describe_tokenizer(tokenizer),
        "trl.chat_template": compute_json_digest(getattr(tokenizer, "chat_template", None)),
        "trl.reward_functions": list(reward_names),
        "trl.num_processes": num_processes(),
    }


def describe_trainers_model(model: TrlObject) -> dict[str, JSON]:
    """Describe a model's kind and size by its configuration; empty where it has none."""
    found = describe_model(getattr(model, "config", None))
    return {f"trl.model.{name}": value for name, value in found.items()}


def read_sampling(args: TrlObject) -> SamplingParams:
    """Read how completions are sampled; TRL's None and 0 of ``top_k`` both mean that all tokens may be."""
    return SamplingParams(
        temperature=float(args.temperature),
        top_p=float(args.top_p),
        top_k=int(args.top_k or 0),
        logprobs_mode="processed",
    )


def num_processes() -> int:
    """Count the processes of the run, as its launcher says."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def row_shard() -> RowShard | None:
    """Give this process's part of every batch; None where there is one process."""
    count = num_processes()
    if count == 1:
        return None
    if "RANK" not in os.environ:
        raise ConfigError(f"WORLD_SIZE is {count} and RANK is not set: start with torchrun or accelerate launch")
    return RowShard(index=int(os.environ["RANK"]), count=count)
