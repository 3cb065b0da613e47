"""What NeMo-RL's rollout functions return as a rollout batch and back, bit for bit.

A rollout is a ``BatchedDataDict``: lists and tensors with an entry for each row, of which ``message_log`` has the row's
messages; metrics of the whole; and, of NeMo Gym, the padded prompts.

Contract: ``decode(encode(rollout))`` is ``rollout``: every field in its order, with its types and every bit, but for
times among the metrics (``timing/…``), since those of no two rollouts are equal. A row without a token has one
placeholder, which is none of its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch

from mock_scheduler.adapters.nemo_rl.messages import put_together, take_apart
from mock_scheduler.adapters.nemo_rl.values import from_plain, make_batch, to_plain
from mock_scheduler.adapters.plain_values import pack, unpack
from mock_scheduler.adapters.prompts import digest_prompts, list_prompt_problems
from mock_scheduler.adapters.rows import (
    ForeignRow,
    build_batch,
    experts_are_usable,
    read_about,
    read_rows,
    restore_experts,
    unpack_rows,
    without_doubles,
)
from mock_scheduler.adapters.token_lists import read_reward
from mock_scheduler.batch import RolloutBatch, SamplingParams, Termination
from mock_scheduler.config.base import Mode
from mock_scheduler.errors import BatchError
from mock_scheduler.scheduler import RolloutRequest
from mock_scheduler.support.digests import JSON

META_KEY = "nemo_rl"
_VERSION = 1
_LOG, _REWARD, _TRUNCATED, _TASK = "message_log", "total_reward", "truncated", "task_name"
#: A column of our own: the experts of all messages of a row.
_EXPERTS = "message_log.routed_experts"
_TIMES = "timing/"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PlayedRollout:
    """One rollout. ``batch``: NeMo-RL's; ``gym``: what its function for NeMo Gym returns beside batch and metrics, else
    None."""

    batch: Any
    metrics: Mapping[str, Any]
    gym: Mapping[str, Any] | None = None


class NemoRlCodec:
    """A ``BatchCodec`` of ``PlayedRollout``.

    Args:
        sampling: how tokens are sampled, in training and in validation.
    """

    def __init__(self, *, sampling: Mapping[Mode, SamplingParams]) -> None:
        self._sampling = sampling

    def encode(self, native: PlayedRollout, request: RolloutRequest) -> RolloutBatch:
        """Return the batch; the rollout stays as it was.

        Raises:
            BatchError: the rollout contradicts itself or has a value that cannot be kept; lists every such row.
        """
        fields = dict(native.batch.items())
        count = _count_rows(fields)
        by_row = {name: column for name, column in _name_columns(fields) if _is_by_row(fields[name], count)}
        group_size = request.group_size or 1

        def read(number: int) -> ForeignRow:
            own = {name: fields[name][number] for name in by_row}
            return _read_row(own, by_row, divmod(number, group_size), request.policy_version)

        rows = read_rows((f"row {number}" for number in range(count)), read, "the rollout cannot be recorded")
        rest = {
            "fields": {name: value for name, value in fields.items() if name not in by_row},
            "metrics": {name: value for name, value in native.metrics.items() if not str(name).startswith(_TIMES)},
            "gym": None if native.gym is None else dict(native.gym),
        }
        packed, content = pack(to_plain(rest), "the rollout")
        about: dict[str, JSON] = {
            "version": _VERSION,
            "fields": list(fields),
            "by_row": [[name, column] for name, column in by_row.items()],
            "tensors": [name for name in by_row if isinstance(fields[name], torch.Tensor)],
            "rest": packed,
            "bytes": content.hex(),
            "prompts": list(digest_prompts(request.prompts)),
        }
        return build_batch(
            without_doubles(rows, _EXPERTS),
            sampling=self._sampling[request.mode],
            scheduler_id=request.scheduler_id,
            meta={META_KEY: about},
        )

    def decode(self, batch: RolloutBatch) -> PlayedRollout:
        """Return the rollout; of a part of a batch, with the rows that are in it.

        Raises:
            BatchError: the batch was not made by this class.
        """
        about = _read_meta(batch)
        rest = from_plain(unpack(about["rest"], bytes.fromhex(about["bytes"])))
        lists: dict[str, list[Any]] = {name: [] for name, _ in about["by_row"]}
        for place, own in unpack_rows(batch):
            restore_experts(own, batch, place, _EXPERTS)
            for name, column in about["by_row"]:
                lists[name].append(_read_log(own, batch, place) if name == _LOG else from_plain(own[column]))
        found = {name: torch.stack(values) if name in about["tensors"] else values for name, values in lists.items()}
        fields = {name: found[name] if name in found else rest["fields"][name] for name in about["fields"]}
        return PlayedRollout(batch=make_batch(fields), metrics=rest["metrics"], gym=rest["gym"])

    def prompt_problems(self, batch: RolloutBatch, request: RolloutRequest) -> list[str]:
        """List the prompts of the request that are not those of the batch."""
        return list_prompt_problems(_read_meta(batch)["prompts"], request.prompts)


def _read_meta(batch: RolloutBatch) -> dict[str, Any]:
    return dict(read_about(batch, META_KEY, _VERSION, "NeMo-RL's rollouts"))


def _count_rows(fields: Mapping[str, Any]) -> int:
    missing = [name for name in (_LOG, _REWARD) if name not in fields]
    if missing:
        raise BatchError(f"the rollout has no {' and no '.join(missing)}; found: {', '.join(map(str, fields))}")
    logs, rewards = fields[_LOG], fields[_REWARD]
    if not isinstance(logs, list) or not logs or not isinstance(rewards, torch.Tensor) or rewards.shape != (len(logs),):
        raise BatchError(f"{_LOG} and {_REWARD} must have an entry for each row, and at least one")
    return len(logs)


def _name_columns(fields: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Names each field's column: NeMo-RL calls some ``reward/…``."""
    names: list[tuple[str, str]] = []
    for place, name in enumerate(fields):
        if not isinstance(name, str):
            raise BatchError(f"a field is called {name!r}; expected a text")
        column = re.sub(r"[^A-Za-z0-9_.:-]", ".", name)[:100]
        names.append((name, column if column == name else f"{column}:{place}"))
    if len({column for _, column in names}) < len(names):
        raise BatchError(f"fields are called so alike that one would be lost: {', '.join(name for name, _ in names)}")
    return names


def _is_by_row(value: object, count: int) -> bool:
    return (type(value) is list or (isinstance(value, torch.Tensor) and value.dim() > 0)) and len(value) == count


def _read_row(own: Mapping[str, Any], columns: Mapping[str, str], place: tuple[int, int], version: int) -> ForeignRow:
    log = take_apart(own[_LOG])
    native: dict[str, object] = {columns[name]: to_plain(value) for name, value in own.items() if name != _LOG}
    native[columns[_LOG]] = log.messages
    experts = None
    if log.experts is not None:
        native[_EXPERTS], experts = log.experts, log.experts.numpy()
    is_empty = not len(log.tokens)
    is_truncated = bool(own.get(_TRUNCATED, False))
    return ForeignRow(
        tokens=np.zeros(1, dtype=np.int32) if is_empty else log.tokens.astype(np.int32),
        response_mask=np.zeros(1, dtype=np.bool_) if is_empty else log.mask,
        rollout_logprobs=log.logprobs,
        group=place[0],
        member=place[1],
        reward=read_reward(own[_REWARD].item()),
        versions=version,
        termination=Termination.TRUNCATED if is_truncated else Termination.TERMINATED,
        prompt_length=max(log.prompt_length, 1 if is_empty else 0),
        tag=own[_TASK] if isinstance(own.get(_TASK), str) else "",
        native=native,
        routed_experts=experts if experts_are_usable(experts, len(log.tokens)) else None,
    )


def _read_log(own: Mapping[str, Any], batch: RolloutBatch, place: int) -> list[dict[str, Any]]:
    start, stop = batch.row_offsets[place : place + 2].tolist()
    first, last = batch.response_offsets[place : place + 2].tolist()
    messages, experts = cast("Sequence[Mapping[str, Any]]", own[_LOG]), own.get(_EXPERTS)
    return put_together(messages, batch.tokens[start:stop], batch.rollout_logprobs[first:last], experts)
