"""SkyRL's ``GeneratorOutput`` as a rollout batch and back, bit for bit.

It is a dict of lists with one entry per row, and of values about the whole rollout. With step-wise trajectories a row
is one step of a trajectory, and rows of one ``trajectory_ids`` entry are its turns.

Contract: ``decode(encode(output))`` is ``output``: every field in its order, with its types and every bit. Core fields
are read from it: ``loss_masks`` marks response tokens; rewards of tokens count by their sum; ``rollout_logprobs`` that
are no float32 are kept beside the core. A row without a token has one placeholder, which is none of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import torch

from mock_scheduler.adapters.plain_values import pack, unpack
from mock_scheduler.adapters.prompts import digest_prompts, list_prompt_problems
from mock_scheduler.adapters.rows import (
    FROM_CORE,
    ForeignRow,
    build_batch,
    column_row,
    experts_are_usable,
    read_about,
    read_rows,
    restore_experts,
    unpack_rows,
    without_doubles,
)
from mock_scheduler.adapters.token_lists import (
    check_tokens,
    read_logprobs,
    read_mask,
    read_reward,
    select_support,
    spread_logprobs,
)
from mock_scheduler.batch import RolloutBatch, SamplingParams, Termination
from mock_scheduler.batch.engine_columns import SUPPORT_COLUMN, SUPPORT_OFFSETS_COLUMN
from mock_scheduler.config.base import Mode
from mock_scheduler.errors import BatchError
from mock_scheduler.scheduler import RolloutRequest
from mock_scheduler.support.digests import JSON

META_KEY = "skyrl"
_VERSION = 1
_PROMPT, _RESPONSE = "prompt_token_ids", "response_ids"
_EXPERTS, _SUPPORT, _IDS = "rollout_expert_indices", "rollout_sample_support", "trajectory_ids"
_SUPPORT_WIDTH = ":support"
_TERMINATIONS = {"stop": Termination.TERMINATED, "length": Termination.TRUNCATED}
_PADDING = -1

#: SkyRL's own, a TypedDict; fields that the release does not have are absent.
GeneratorOutput: TypeAlias = "dict[str, Any]"


def make_trajectory_id(instance_id: str, repetition_id: int) -> Any:  # noqa: ANN401 - of a class of SkyRL
    """Make an id of the installed SkyRL's class."""
    base: Any = import_module("skyrl.train.generators.base")
    return base.TrajectoryID(instance_id=instance_id, repetition_id=repetition_id)


class SkyrlCodec:
    """A ``BatchCodec`` of ``GeneratorOutput``.

    Args:
        sampling: how tokens are sampled, in training and in evaluations.
    """

    def __init__(self, *, sampling: Mapping[Mode, SamplingParams]) -> None:
        self._sampling = sampling

    def encode(self, native: GeneratorOutput, request: RolloutRequest) -> RolloutBatch:
        """Return the batch; the output stays as it was.

        Raises:
            BatchError: the output contradicts itself or has a value that cannot be kept; lists every such row.
        """
        count = _count_rows(native)
        by_row = [name for name, value in native.items() if type(value) is list and len(value) == count]
        places = _identify(native.get(_IDS), count, request.group_size or 1)

        def read(number: int) -> ForeignRow:
            fields = {name: native[name][number] for name in by_row}
            return _read_row(fields, places[number], request.policy_version)

        rows = read_rows(
            (f"row {number}" for number in range(count)), read, "the generator's output cannot be recorded"
        )
        rest = {name: value for name, value in native.items() if name not in by_row}
        packed, content = pack(rest, "the generator's output")
        about: dict[str, JSON] = {
            "version": _VERSION,
            "fields": list(native),
            "by_row": by_row,
            "rest": packed,
            "bytes": content.hex(),
            "prompts": list(digest_prompts(request.prompts)),
        }
        return build_batch(
            without_doubles(rows, _EXPERTS),
            sampling=self._sampling[request.mode],
            scheduler_id=request.scheduler_id,
            meta={META_KEY: about},
            identity_fields=(_IDS,),
        )

    def decode(self, batch: RolloutBatch) -> GeneratorOutput:
        """Return the output; of a part of a batch, with the rows that are in it.

        Raises:
            BatchError: the batch was not made by this class.
        """
        about = _read_meta(batch)
        rest = unpack(about["rest"], bytes.fromhex(about["bytes"]))
        lists: dict[str, list[Any]] = {name: [] for name in about["by_row"]}
        for place, own in unpack_rows(batch):
            _restore(own, batch, place)
            if isinstance(own.get(_IDS), tuple):
                own[_IDS] = make_trajectory_id(*own[_IDS])
            for name, values in lists.items():
                values.append(own[name])
        return {name: lists[name] if name in lists else rest[name] for name in about["fields"]}

    def prompt_problems(self, batch: RolloutBatch, request: RolloutRequest) -> list[str]:
        """List the prompts of the request that are not those of the batch."""
        return list_prompt_problems(_read_meta(batch)["prompts"], request.prompts, "prompt")


def _read_meta(batch: RolloutBatch) -> dict[str, Any]:
    return dict(read_about(batch, META_KEY, _VERSION, "SkyRL's generator"))


def _count_rows(native: object) -> int:
    if not isinstance(native, Mapping) or not {_PROMPT, _RESPONSE} <= native.keys():
        found = ", ".join(map(str, native)) if isinstance(native, Mapping) else type(native).__name__
        raise BatchError(f"the generator's output has no {_PROMPT} and {_RESPONSE}; found: {found}")
    counts = {name: len(native[name]) for name in (_PROMPT, _RESPONSE) if type(native[name]) is list}
    if len(counts) < 2 or len(set(counts.values())) > 1 or not counts[_PROMPT]:
        raise BatchError(
            f"{_PROMPT} and {_RESPONSE} must be lists with an entry for each row; found {counts or 'none'}"
        )
    return counts[_PROMPT]


def _identify(ids: object, count: int, group_size: int) -> list[tuple[int, int, int]]:
    """Group, trajectory and turn of each row: by the trajectories' ids, else by its place."""
    if type(ids) is not list or len(ids) != count:
        return [(number // group_size, number % group_size, 0) for number in range(count)]
    groups: dict[str, int] = {}
    seen: Counter[tuple[int, int]] = Counter()
    places = []
    for number, one in enumerate(ids):
        if type(getattr(one, "repetition_id", None)) is not int or one.repetition_id < 0:
            raise BatchError(f"row {number}: {_IDS} has {one!r}; expected instance_id, and repetition_id from 0")
        key = groups.setdefault(str(one.instance_id), len(groups)), int(one.repetition_id)
        places.append((*key, seen[key]))
        seen[key] += 1
    return places


def _read_row(fields: dict[str, Any], place: tuple[int, int, int], version: int) -> ForeignRow:
    prompt, response = (check_tokens(fields[name], name) for name in (_PROMPT, _RESPONSE))
    tokens, native = [*prompt, *response], dict(fields)
    mask, is_core_mask = read_mask(fields.get("loss_masks"), len(response), "loss_masks")
    logprobs, is_core = read_logprobs(fields.get("rollout_logprobs"), mask, "rollout_logprobs")
    if tokens:
        native[_PROMPT] = native[_RESPONSE] = FROM_CORE
    if is_core_mask:
        native["loss_masks"] = FROM_CORE
    if is_core:
        native["rollout_logprobs"] = FROM_CORE
    support = _read_support(fields.get(_SUPPORT), response, mask)
    if support is not None:
        native[_SUPPORT], native[_SUPPORT_WIDTH] = FROM_CORE, fields[_SUPPORT].shape[1]
    if fields.get(_IDS) is not None:
        native[_IDS] = (fields[_IDS].instance_id, fields[_IDS].repetition_id)
    experts = fields.get(_EXPERTS)
    return ForeignRow(
        tokens=np.array(tokens or [0], dtype=np.int32),
        response_mask=np.concatenate([np.zeros(len(prompt) if tokens else 1, dtype=np.bool_), mask]),
        rollout_logprobs=logprobs,
        group=place[0],
        member=place[1],
        turn=place[2],
        reward=read_reward(fields.get("rewards")),
        versions=version,
        termination=_TERMINATIONS.get(fields.get("stop_reasons", "stop"), Termination.ABORTED),
        prompt_length=len(prompt) if tokens else 1,
        native=native,
        routed_experts=experts if experts_are_usable(experts, len(tokens)) else None,
        support=support,
    )


def _read_support(
    stated: object, response: Sequence[int], mask: npt.NDArray[np.bool_]
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]] | None:
    """Ids and offsets for sampled tokens, where they say all that the row does; padding is behind the ids."""
    if not isinstance(stated, np.ndarray) or stated.dtype.str != "<i4" or stated.shape[:1] != (len(response),):
        return None
    if stated.ndim != 2 or (stated[~mask] != _PADDING).any():
        return None
    is_id = stated != _PADDING
    if (is_id[:, 1:] & ~is_id[:, :-1]).any():
        return None
    starts = np.concatenate([[0], is_id.sum(axis=1).cumsum()])
    return select_support(stated[is_id].astype(np.int64), starts, np.asarray(response, dtype=np.int64), mask)


def _restore(own: dict[str, Any], batch: RolloutBatch, place: int) -> None:
    """Puts fields in their places that the core fields say exactly."""
    start, stop = batch.row_offsets[place : place + 2].tolist()
    split = start + int(batch.prompt_lengths[place])
    mask = batch.response_mask[split:stop]
    if own[_PROMPT] is FROM_CORE:
        own[_PROMPT], own[_RESPONSE] = batch.tokens[start:split].tolist(), batch.tokens[split:stop].tolist()
    if own.get("loss_masks") is FROM_CORE:
        own["loss_masks"] = mask.int().tolist()
    if own.get("rollout_logprobs") is FROM_CORE:
        own["rollout_logprobs"] = spread_logprobs(batch, place, mask)
    restore_experts(own, batch, place, _EXPERTS)
    if own.get(_SUPPORT) is FROM_CORE:
        own[_SUPPORT] = _spread_support(batch, place, mask, cast("int", own[_SUPPORT_WIDTH]))


def _spread_support(batch: RolloutBatch, place: int, mask: torch.Tensor, width: int) -> npt.NDArray[np.int32]:
    ids, starts = (column_row(batch, name, place).numpy() for name in (SUPPORT_COLUMN, SUPPORT_OFFSETS_COLUMN))
    spread = np.full((len(mask), width), _PADDING, dtype=np.int32)
    sizes = np.zeros(len(mask), dtype=np.int64)
    sizes[mask.numpy()] = np.diff(starts)
    spread[np.arange(width) < sizes[:, None]] = ids
    return spread
