"""Compares values of frameworks by type and bit, and stores batches of them."""

from __future__ import annotations

import struct
from collections.abc import Mapping

import numpy as np
import torch

from mock_scheduler.batch import RolloutBatch
from mock_scheduler.recording.step.step_file import decode_step, encode_step
from mock_scheduler.recording.step.step_info import StepInfo
from mock_scheduler.support.tensor_bytes import as_bytes


def bits(value: object) -> object:
    """A value that is equal exactly where every type and every bit is."""
    if isinstance(value, torch.Tensor):
        return ("tensor", value.dtype, tuple(value.shape), as_bytes(value).tolist())
    if isinstance(value, np.ndarray):
        content = [bits(item) for item in value.flat] if value.dtype == object else value.tobytes()
        return ("array", value.dtype.str, value.shape, content)
    if isinstance(value, np.generic):
        return ("scalar", value.dtype.str, value.tobytes())
    if isinstance(value, float):
        return ("float", struct.pack(">d", value))
    if isinstance(value, Mapping):
        return ("dict", [(bits(key), bits(item)) for key, item in value.items()])
    if isinstance(value, list | tuple):
        return (type(value).__name__, [bits(item) for item in value])
    return (type(value).__name__, value)


def stored(batch: RolloutBatch) -> RolloutBatch:
    """The batch as the file of a step gives it back."""
    info = StepInfo(step=0, mode="train", scheduler_id="default", run_id="r", policy_version=7)
    return decode_step(encode_step(batch, info).to_bytes())[0]
