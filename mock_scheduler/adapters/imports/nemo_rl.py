"""Reads what NeMo-RL's trainer logs of its training data: ``train_data_step{step}.jsonl``, one row a line.

Contract: numbers are float32, written so that every bit comes back. Rewards are those that were trained on: scaled and
shaped. With dynamic sampling the rows are those that were kept. Messages, and how rows ended, are not in the files.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mock_scheduler.adapters.imports.steps import ForeignStep, ImportOptions, find_files
from mock_scheduler.adapters.rows import ForeignRow, build_batch
from mock_scheduler.adapters.token_lists import check_tokens, read_logprobs, read_mask, read_reward
from mock_scheduler.errors import BatchError, ForeignFileError
from mock_scheduler.scheduler import DEFAULT_SCHEDULER_ID
from mock_scheduler.support.foreign_files import read_lines

_PATTERN = r"(?:[^/]*/)*train_data_step(\d+)\.jsonl"
_EXAMPLE = "train_data_step12.jsonl"
_MAX_LINE_BYTES = 2**28
_NEEDED = ("token_ids", "token_loss_mask", "generation_logprobs", "input_lengths", "rewards")
#: Values of the training that follow from the rollout, or are its core fields.
_NOT_NATIVE = frozenset({*_NEEDED, "advantages", "prev_logprobs"})


def read_rollouts(source: Path, options: ImportOptions) -> Iterator[ForeignStep]:
    """Reads the steps of files, in their order; raises as the other readers."""
    inside = source if source.is_dir() else None
    for file in find_files(source, _PATTERN, _EXAMPLE):
        step = int(file.parts[0])
        records = list(_load(file.path, inside))
        rows = []
        for number, record in enumerate(records):
            try:
                rows.append(_read_row(record, number, options.group_size or 1))
            except (BatchError, TypeError, ValueError, OverflowError) as error:
                raise BatchError(f"{file.path}, row {number}: {error}") from error
        if not rows:
            raise BatchError(f"{file.path} holds no row")
        lacks = [*options.assumed, "policy_versions", "terminations"]
        if options.group_size is None:
            lacks.append("groups")
        batch = build_batch(rows, sampling=options.sampling, scheduler_id=DEFAULT_SCHEDULER_ID, meta={})
        yield ForeignStep(step=step, batch=batch, lacks=tuple(lacks)).noted()


def _load(path: Path, inside: Path | None) -> Iterator[Mapping[str, Any]]:
    for number, line in enumerate(read_lines(path, max_bytes=_MAX_LINE_BYTES, inside=inside), start=1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ForeignFileError(f"{path}, line {number}, is not JSON: {error}") from error
        if not isinstance(record, dict) or not all(_is_row(record.get(name)) for name in _NEEDED):
            raise ForeignFileError(f"{path}, line {number}, is no row with {', '.join(_NEEDED)}, each a list of one")
        # NeMo-RL writes each row as a batch of one.
        yield {name: value[0] if _is_row(value) else value for name, value in record.items()}


def _is_row(value: object) -> bool:
    return isinstance(value, list) and len(value) == 1


def _read_row(record: Mapping[str, Any], number: int, group_size: int) -> ForeignRow:
    length = int(record["input_lengths"])
    tokens = check_tokens(record["token_ids"], "token_ids")
    if not 0 < length <= len(tokens):
        raise BatchError(f"input_lengths is {length}, and the row has {len(tokens)} tokens with its padding")
    mask, _ = read_mask(record["token_loss_mask"], len(tokens), "token_loss_mask")
    if mask[length:].any():
        raise BatchError(f"token_loss_mask has sampled tokens behind the row's {length}")
    logprobs, _ = read_logprobs(record["generation_logprobs"], mask, "generation_logprobs")
    reward = record["rewards"]
    if not isinstance(reward, int | float):
        raise BatchError(f"rewards is {reward!r}; expected a number")
    return ForeignRow(
        tokens=np.array(tokens[:length], dtype=np.int32),
        response_mask=mask[:length],
        rollout_logprobs=logprobs,
        group=number // group_size,
        member=number % group_size,
        reward=read_reward(reward),
        prompt_length=int(mask.argmax()) if mask.any() else length,
        native={name: value for name, value in record.items() if name not in _NOT_NATIVE},
    )
