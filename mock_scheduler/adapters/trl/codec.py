"""The answer of TRL's ``rollout_func`` as a rollout batch and back, bit for bit.

TRL passes a dict: ``prompt_ids`` and ``completion_ids``, lists of lists of token ids; ``logprobs``, such lists of
numbers, or None; optionally ``env_mask``, lists of 1 for the policy's tokens and 0 for others; and further fields for
the reward functions. Contract: ``decode(encode(native))`` is ``native`` with every type and bit, and its keys in their
order. Rows are in TRL's order: row ``i`` of all processes is sample ``i % group_size`` of group ``i // group_size``.

- ``native/logprobs`` and ``native/env_mask`` hold a row where the core fields would give other values back, else null;
- ``native/{name}`` holds a further field that has one entry per row; ``meta["trl"]`` any other;
- ``trl/prompt`` holds the digest of the prompt that the trainer drew, null where it holds what is not plain data.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from mock_scheduler.adapters.plain_values import from_json, to_json
from mock_scheduler.adapters.prompts import digest_prompts, list_prompt_problems
from mock_scheduler.adapters.token_lists import LARGEST_FLOAT32, read_reward
from mock_scheduler.batch import RolloutBatch, SampleIdentity, SamplingParams, Termination, Trajectory
from mock_scheduler.batch.columns import JsonColumn, Ragged, RowValue
from mock_scheduler.batch.plausibility import VALID_COLUMN
from mock_scheduler.errors import BatchError
from mock_scheduler.scheduler import RolloutRequest, RowShard, shown
from mock_scheduler.support.digests import JSON

META_KEY = "trl"
PROMPT_COLUMN = "trl/prompt"
_NATIVE = "native/"
_TOKENS = ("prompt_ids", "completion_ids")
_CORE = (*_TOKENS, "logprobs", "env_mask")
_INT32_MAX = 2**31 - 1

#: What ``rollout_func`` returns.
Native: TypeAlias = "dict[str, Any]"


class TrlCodec:
    """A ``BatchCodec`` for GRPOTrainer.

    ``eos_token_ids``: a completion that ends with one has terminated, any other was cut; none given: all have
    terminated. ``shard``: this process's rows, where several processes each play their own. ``model``: describes the
    trainer's, and goes into the meta of each batch; ``recorded_model``: that of the last one decoded, if it has one.
    ``reward_weights``: by the name of the late values of each reward function.
    """

    def __init__(
        self,
        *,
        sampling: SamplingParams,
        eos_token_ids: Collection[int] = (),
        shard: RowShard | None = None,
        reward_weights: Mapping[str, float] | None = None,
    ) -> None:
        self._sampling = sampling
        self._reward_weights = dict(reward_weights or {})
        self._eos_token_ids = frozenset(eos_token_ids)
        self._shard = shard
        self.model: dict[str, JSON] = {}
        self.recorded_model: dict[str, JSON] | None = None

    def encode(self, native: Native, request: RolloutRequest) -> RolloutBatch:
        """Return the batch; raises ``BatchError`` listing every field of another form."""
        problems = _problems(native)
        if problems:
            raise BatchError(f"rollout_func returned what cannot be recorded: {'; '.join(problems)}")
        num_rows = len(native["prompt_ids"])
        digests = digest_prompts(request.prompts, num_rows)
        further = {name: value for name, value in native.items() if name not in _CORE}
        by_row = [name for name, value in further.items() if type(value) is list and len(value) == num_rows]
        rows = []
        for row in range(num_rows):
            extras: dict[str, RowValue] = {
                f"{_NATIVE}{name}": to_json(further[name][row], f"field {name!r}, row {row},") for name in by_row
            }
            extras[PROMPT_COLUMN] = digests[row]
            rows.append(self._encode_row(native, row, request, extras))
        meta: dict[str, JSON] = {
            "keys": list(native),
            "model": self.model,
            "has_logprobs": native["logprobs"] is not None,
            "values": {
                name: to_json(value, f"field {name!r}") for name, value in further.items() if name not in by_row
            },
        }
        group_size = None if self._shard is not None else request.group_size
        return RolloutBatch.from_trajectories(
            rows, sampling=self._sampling, group_size=group_size, meta={META_KEY: meta}
        )

    def _encode_row(self, native: Native, row: int, request: RolloutRequest, extras: dict[str, RowValue]) -> Trajectory:
        prompt, completion = (native[name][row] for name in _TOKENS)
        mask = [True] * len(completion)
        if "env_mask" in native:
            given = native["env_mask"][row]
            mask = [bool(value) for value in given]
            extras[f"{_NATIVE}env_mask"] = None if _is_same(given, list(map(int, mask))) else to_json(given, "env_mask")
        logprobs = [0.0] * len(completion)
        valid = [False] * len(completion)
        if native["logprobs"] is not None:
            given = native["logprobs"][row]
            # NaN and infinities compare as False, too. A larger one is no log-probability: it would be infinite.
            valid = [type(value) in (float, int) and abs(value) <= LARGEST_FLOAT32 for value in given]
            # What is no number is 0 in the batch, which says so in ``valid``.
            logprobs = [
                float(np.float32(value)) if is_valid else 0.0 for value, is_valid in zip(given, valid, strict=True)
            ]
            shown_again = [value if is_own else 0.0 for value, is_own in zip(logprobs, mask, strict=True)]
            extras[f"{_NATIVE}logprobs"] = None if _is_same(given, shown_again) else to_json(given, "logprobs")
        own = [index for index, is_own in enumerate(mask) if is_own]
        extras[VALID_COLUMN] = Ragged(torch.tensor([valid[index] for index in own], dtype=torch.bool))
        return Trajectory(
            identity=self._identity(row, len(native["prompt_ids"]), request),
            tokens=torch.tensor([*prompt, *completion], dtype=torch.int32),
            response_mask=torch.tensor([False] * len(prompt) + mask, dtype=torch.bool),
            rollout_logprobs=torch.tensor([logprobs[index] for index in own], dtype=torch.float32),
            turn_rewards=torch.zeros(1),
            policy_versions=torch.tensor([request.policy_version], dtype=torch.int32),
            termination=self._termination(completion),
            prompt_length=len(prompt),
            tag="trl",
            extras=extras,
        )

    def decode(self, batch: RolloutBatch) -> Native:
        """Return TRL's dict."""
        about: Any = batch.meta[META_KEY]
        self.recorded_model = about.get("model") or None
        values: Native = {name: [] for name in _CORE}
        exact = {name: _items(batch, name) for name in ("logprobs", "env_mask")}
        for row, trajectory in enumerate(batch.rows()):
            tokens, length = trajectory.tokens.tolist(), trajectory.prompt_length
            mask = trajectory.response_mask.tolist()[length:]
            sampled = iter(trajectory.rollout_logprobs.tolist())
            logprobs = [next(sampled) if is_own else 0.0 for is_own in mask]
            values["prompt_ids"].append(tokens[:length])
            values["completion_ids"].append(tokens[length:])
            for name, core in (("logprobs", logprobs), ("env_mask", list(map(int, mask)))):
                item = exact[name][row]
                values[name].append(core if item is None else from_json(item))
        if not about["has_logprobs"]:
            values["logprobs"] = None
        for name in about["keys"]:
            if name in about["values"]:
                values[name] = from_json(about["values"][name])
            elif name not in _CORE:
                values[name] = [from_json(item) for item in _items(batch, name)]
        return {name: values[name] for name in about["keys"]}

    def late_rewards(self, values: Mapping[str, Sequence[RowValue]]) -> list[float]:
        """Return each row's reward as TRL adds it up: weighted, without the functions that have none for it."""
        weighted = [
            [self._reward_weights.get(name, 1.0) * _reward_of(item) for item in items] for name, items in values.items()
        ]
        return [read_reward([value for value in row if math.isfinite(value)]) for row in zip(*weighted, strict=True)]

    def prompt_problems(self, batch: RolloutBatch, request: RolloutRequest) -> list[str]:
        """List the rows whose prompt is not the one that the trainer drew for it."""
        column = batch.extras.get(PROMPT_COLUMN)
        if not isinstance(column, JsonColumn):
            return []
        return list_prompt_problems(column.items, list(request.prompts))

    def _identity(self, row: int, num_rows: int, request: RolloutRequest) -> SampleIdentity:
        group_size = request.group_size or 1
        number = row + (0 if self._shard is None else self._shard.index * num_rows)
        return SampleIdentity(
            scheduler_id=request.scheduler_id,
            group_id=number // group_size,
            episode_id=0,
            env_id=number % group_size,
            turn=0,
        )

    def _termination(self, completion: Sequence[int]) -> Termination:
        if self._eos_token_ids and (not completion or completion[-1] not in self._eos_token_ids):
            return Termination.TRUNCATED
        return Termination.TERMINATED


def _problems(native: object) -> list[str]:
    """List what keeps a dict from being recorded; fields are looked at row by row once they have rows."""
    if not isinstance(native, Mapping):
        return [f"it is of type {type(native).__name__}; expected a dict"]
    missing = [name for name in (*_TOKENS, "logprobs") if name not in native]
    if missing:
        return [f"it has no {', '.join(missing)}; expected prompt_ids, completion_ids and logprobs"]
    present = [name for name in _CORE if name in native and not (name == "logprobs" and native[name] is None)]
    problems = []
    for name in present:
        value = native[name]
        if type(value) is not list or any(type(row) is not list for row in value):
            kinds = sorted({type(row).__name__ for row in value}) if type(value) is list else [type(value).__name__]
            problems.append(f"{name} has {', '.join(kinds)}; expected a list of lists (tensors: .tolist())")
        elif len(value) != len(native["prompt_ids"]):
            problems.append(f"{name} has {len(value)} rows, prompt_ids {len(native['prompt_ids'])}")
    if problems:
        return problems
    for name in _TOKENS:
        wrong = [
            token for row in native[name] for token in row if type(token) is not int or not 0 <= token <= _INT32_MAX
        ]
        if wrong:
            problems.append(f"{name} holds {shown(wrong[0])}; expected token ids, ints of 0 to 2**31 - 1")
    for name in present:
        sizes = [(len(native[name][row]), len(ids)) for row, ids in enumerate(native["completion_ids"])]
        other = [row for row, (size, length) in enumerate(sizes) if size != length] if name not in _TOKENS else []
        if other:
            size, length = sizes[other[0]]
            problems.append(f"{name} has {size} entries in row {other[0]}, whose completion has {length} tokens")
    return problems


def _is_same(given: list[Any], core: list[Any]) -> bool:
    """Whether two lists are equal with types and the sign of zero."""
    return len(given) == len(core) and all(
        type(a) is type(b) and a == b and math.copysign(1.0, a) == math.copysign(1.0, b)
        for a, b in zip(given, core, strict=True)
    )


def _reward_of(item: Any) -> float:  # noqa: ANN401 - what ``rewards`` recorded of one row
    """A reward function's value as TRL's float32 tensor has it; NaN where there is none, or no number."""
    try:
        value = float(from_json(item["value"]))
    except (TypeError, ValueError, OverflowError):  # TRL will say what is wrong with it
        return math.nan
    return float(np.float32(value)) if abs(value) <= LARGEST_FLOAT32 else math.nan


def _items(batch: RolloutBatch, name: str) -> Sequence[JSON]:
    column = batch.extras.get(f"{_NATIVE}{name}")
    return column.items if isinstance(column, JsonColumn) else [None] * len(batch)
