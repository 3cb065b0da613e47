"""Batches of verl's form at the seam of the agent loop, and how two are compared."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from mock_scheduler.adapters.verl.codec import VerlCodec
from mock_scheduler.batch import SamplingParams
from tests.adapters.padded_cases import assert_same

SAMPLING = SamplingParams(temperature=1.0, top_p=1.0, top_k=0, logprobs_mode="processed")
GREEDY = SamplingParams(temperature=0.0, top_p=1.0, top_k=0, logprobs_mode="processed")


class Proto:
    """Has what ``DataProto`` has of names: tensors, arrays and a dict about the whole."""

    def __init__(self, tensors: dict[str, torch.Tensor], arrays: dict[str, Any], meta: dict[str, Any]) -> None:
        self.batch = tensors
        self.non_tensor_batch = arrays
        self.meta_info = meta

    def __len__(self) -> int:
        return len(next(iter((self.batch or self.non_tensor_batch).values())))


def codec(n: int = 2, val_n: int = 1) -> VerlCodec:
    return VerlCodec(
        sampling={"train": SAMPLING, "val": GREEDY}, group_sizes={"train": n, "val": val_n}, make_proto=Proto
    )


def objects(values: list[Any]) -> np.ndarray[Any, Any]:
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array


def drawn(prompts: list[Any], *, step: int = 1, n: int = 1, **fields: Any) -> Proto:
    """What the trainer asks with: each prompt ``n`` times in a row."""
    rows = [prompt for prompt in prompts for _ in range(n)]
    arrays = {
        "raw_prompt": objects([[{"role": "user", "content": prompt}] for prompt in rows]),
        "reward_model": objects([{"ground_truth": "1"} for _ in rows]),
        "uid": objects([f"{id(rows)}-{row}" for row in range(len(rows))]),
        **{name: objects(values) for name, values in fields.items()},
    }
    return Proto({}, arrays, {"global_steps": step})


def played(asked: Proto, seed: int, *, prompt: int = 4, response: int = 5, filler: int = 0) -> Proto:
    """What an agent loop answers, after verl's ``_postprocess``; ``filler`` stands in the padding."""
    rows = len(asked)
    generator = torch.Generator().manual_seed(seed)
    prompt_mask = torch.arange(prompt) >= prompt - torch.randint(1, prompt + 1, (rows, 1), generator=generator)
    lengths = torch.randint(0, response + 1, (rows, 1), generator=generator)
    mask = torch.arange(response) < lengths
    attention = torch.cat([prompt_mask, mask], 1).long()
    ids = torch.randint(3, 90, (rows, prompt + response), generator=generator).where(attention.bool(), filler)
    scores = torch.zeros(rows, response)
    scores[torch.arange(rows), lengths[:, 0] - 1] = torch.rand(rows, generator=generator)
    tensors = {
        "prompts": ids[:, :prompt],
        "responses": ids[:, prompt:],
        "response_mask": mask.long(),
        "input_ids": ids,
        "attention_mask": attention,
        "position_ids": (attention.cumsum(1) - 1).clamp(min=0),
        "rollout_log_probs": -torch.rand(rows, response, generator=generator) * mask,
        "rm_scores": scores,
    }
    arrays = {
        "__num_turns__": np.full(rows, 2, dtype=np.int32),
        "kinds": np.arange(rows),
        "note": np.array([f"n{row}" for row in range(rows)]),
        "multi_modal_inputs": objects([{"pixel_values": torch.rand(2, 3, generator=generator)} for _ in range(rows)]),
        "raw_prompt": asked.non_tensor_batch["raw_prompt"],
        "turn_scores": objects([[] for _ in range(rows)]),
        "min_global_steps": objects([None] * rows),
    }
    meta = {"timing": {"agent_loop/slowest/score": np.float64(0.25)}, "reward_extra_keys": ["kinds", "note"]}
    return Proto(tensors, arrays, meta)


def assert_equal(found: Proto, expected: Proto) -> None:
    """Equal in every field, type and bit."""
    assert_same(found.batch, expected.batch)
    assert list(found.non_tensor_batch) == list(expected.non_tensor_batch)
    for name, values in expected.non_tensor_batch.items():
        other = found.non_tensor_batch[name]
        assert (other.dtype, other.shape) == (values.dtype, values.shape), name
        assert repr(other.tolist()) == repr(values.tolist()), name
    assert repr(found.meta_info) == repr(expected.meta_info)
