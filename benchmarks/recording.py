"""Recording against ``torch.save`` and the pickle route of the same batch, side by side in one run.

The batch is that of an agentic run: seven tensors padded to 128 × 8,192 with a mean length of 700 tokens (35.7 MB).
The pickle route is ``torch.save`` into a buffer that is pickled to a file, as ROLL's rollout mock does. Every time is
the median of alternating rounds, so that a slow moment of the machine hits all alike; ratios are what counts.

    python benchmarks/recording.py [--rounds 15] [--json results.json]
"""

from __future__ import annotations

import argparse
import io
import json
import os
import pickle
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from mock_scheduler.adapters.padded import ROLL_AGENTIC, PaddedCodec
from mock_scheduler.batch import RolloutBatch, SamplingParams
from mock_scheduler.recording import Contract, RecordingReader, StepInfo, open_recording
from mock_scheduler.recording.writer import RecordingWriter, WriterOptions
from mock_scheduler.scheduler import RolloutRequest, RowShard

SAMPLING = SamplingParams(temperature=1.0, top_p=1.0, top_k=0, logprobs_mode="processed")
GROUP_SIZE = 8
CODEC = PaddedCodec(ROLL_AGENTIC, sampling=SAMPLING, group_size=GROUP_SIZE)

Padded = dict[str, object]


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """One bar of the design: ``value`` must be at least, or at most, ``bound``."""

    name: str
    value: float
    bound: float
    is_floor: bool

    @property
    def is_met(self) -> bool:
        return self.value >= self.bound if self.is_floor else self.value <= self.bound


def make_padded(num_rows: int, width: int, *, mean_length: int, seed: int = 0) -> Padded:
    """A batch as ROLL's agentic scheduler makes it: five turns per row, of which the policy samples the second half."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(mean_length // 2, mean_length + mean_length // 2, (num_rows,), generator=generator)
    positions = torch.arange(width).expand(num_rows, width)
    inside = positions < lengths[:, None]
    turn_length = (lengths // 5).clamp(min=2)[:, None]
    is_sampled = inside & (positions % turn_length >= turn_length // 2)
    logprobs = torch.rand(num_rows, width - 1, generator=generator).neg_()
    scores = torch.zeros(num_rows, width)
    scores[torch.arange(num_rows), lengths - 1] = torch.rand(num_rows, generator=generator)
    return {
        "input_ids": torch.randint(1, 150_000, (num_rows, width), generator=generator) * inside,
        "attention_mask": inside.long(),
        "position_ids": positions * inside,
        "response_mask": is_sampled,
        "prompt_mask": inside & (positions < turn_length // 2),
        "scores": scores,
        "infer_logprobs": logprobs * is_sampled[:, 1:],
        "env_ids": list(range(num_rows)),
        "group_ids": [row // GROUP_SIZE for row in range(num_rows)],
        "tags": ["SimpleSokoban"] * num_rows,
    }


def request(num_rows: int, step: int = 0) -> RolloutRequest:
    return RolloutRequest(global_step=step, batch_size=num_rows)


def info(writer: RecordingWriter, step: int) -> StepInfo:
    return StepInfo(step=step, mode="train", scheduler_id="default", run_id=writer.run_id, policy_version=step)


def open_writer(
    folder: Path, *, background: bool, shard: RowShard | None = None, run_id: str | None = None
) -> RecordingWriter:
    return open_recording(
        str(folder),
        contract=Contract([]),
        plan=(),
        provenance={},
        resume=False,
        options=WriterOptions(background=background, shard=shard),
        run_id=run_id,
    )
