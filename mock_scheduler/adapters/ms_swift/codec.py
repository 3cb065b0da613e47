"""Makes a rollout batch of ms-swift's samples, and samples of it again, bit for bit.

``OnPolicySample`` and its kinds for GRPO and GKD are plain objects with fields. Their prompt is a conversation that
ms-swift encodes later, so a row's tokens are those of the response alone, turn behind turn. Contract: ``decode(encode(
samples))`` is the same list of the same classes with every field, with their types and every bit; fields that a later
release adds are kept like the others. A sample without a token has one placeholder, which is none of its own.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from mock_scheduler.adapters.prompts import digest_prompts, list_prompt_problems
from mock_scheduler.adapters.rows import FROM_CORE, ForeignRow, build_batch, read_about, read_rows, unpack_rows
from mock_scheduler.adapters.token_lists import INT32_MAX, LARGEST_FLOAT32
from mock_scheduler.batch import RolloutBatch, SamplingParams, Termination
from mock_scheduler.batch.columns import JsonColumn
from mock_scheduler.errors import BatchError
from mock_scheduler.scheduler import DEFAULT_SCHEDULER_ID, RolloutRequest, RowShard

META_KEY = "ms_swift"
_VERSION = 1
_KIND, _ORDER, _TURNS, _PROMPT = ":kind", ":order", ":turns", ":prompt"
_TOKENS, _MASK, _LOGPROBS = "response_token_ids", "response_loss_mask", "rollout_logprobs"
#: Fields that say which row it is, and not what is in it; ids of requests are drawn anew in every run.
_IDENTITY_FIELDS = frozenset({"request_id", "prompt_id"})

#: A sample, or another object of ms-swift, which is not imported here.
Foreign: TypeAlias = Any


class SampleCodec:
    """Serves as ``BatchCodec`` of lists of samples.

    Args:
        sampling: how the tokens were sampled; samples do not say.
        find_class: gives a class of ``swift.rl_core.data`` by its name; None: there is none.
        shard: this process's part, where several processes each play their own.
    """

    def __init__(
        self,
        *,
        sampling: SamplingParams,
        find_class: Callable[[str], Foreign],
        shard: RowShard | None = None,
        scheduler_id: str = DEFAULT_SCHEDULER_ID,
    ) -> None:
        self._sampling, self._find_class = sampling, find_class
        self._shard, self._scheduler_id = shard, scheduler_id

    def encode(self, native: Sequence[Foreign], request: RolloutRequest) -> RolloutBatch:
        """Gives the batch; the samples stay as they were.

        Raises:
            BatchError: a sample contradicts itself or has a value that cannot be kept; lists the first of each kind.
        """
        first = 0 if self._shard is None else self._shard.index * len(native)
        prompts = digest_prompts(request.prompts, len(native))
        if not native:
            raise BatchError("samples cannot be recorded: there is none")
        # Of each kind of sample its names in their order, which columns do not keep.
        orders = dict[tuple[str, ...], int]()

        def read(number: int) -> ForeignRow:
            row = self._read(native[number], first + number, request)
            order = orders.setdefault(tuple(vars(native[number])), len(orders))
            about = {_PROMPT: prompts[number], _ORDER: order}
            return dataclasses.replace(row, native={**row.native, **about})

        rows = read_rows((f"sample {number}" for number in range(len(native))), read, "samples cannot be recorded")
        batch = build_batch(
            rows,
            sampling=self._sampling,
            scheduler_id=self._scheduler_id,
            meta={META_KEY: {"version": _VERSION, "orders": [list(names) for names in orders]}},
            group_size=request.group_size if self._shard is None else None,
            identity_fields=_IDENTITY_FIELDS,
        )
        # A part of a batch may have parts of groups.
        return batch if self._shard is None else dataclasses.replace(batch, group_size=None)

    def decode(self, batch: RolloutBatch) -> list[Foreign]:
        """Gives the samples.

        Raises:
            BatchError: the batch was not made by this class, or a class is not there.
        """
        about = read_about(batch, META_KEY, _VERSION, "samples of ms-swift")
        orders = cast("Sequence[Sequence[str]]", about["orders"])
        samples = []
        for place, own in unpack_rows(batch):
            _restore(own, batch, place)
            kind = own[_KIND]
            found = self._find_class(kind)
            if found is None:
                raise BatchError(f"this release of ms-swift has no {kind}, which the recording has: use that of then")
            sample = object.__new__(found)  # not called: its fields are all there
            vars(sample).update({name: own[name] for name in orders[own[_ORDER]]})
            samples.append(sample)
        return samples

    def prompt_problems(self, batch: RolloutBatch, request: RolloutRequest) -> list[str]:
        """Lists the rows whose prompt is not the one that the trainer drew for it."""
        column = batch.extras.get(f"native/{_PROMPT}")
        if not isinstance(column, JsonColumn):
            return []
        return list_prompt_problems(column.items, request.prompts)

    def _read(self, sample: Foreign, number: int, request: RolloutRequest) -> ForeignRow:
        kind = type(sample).__name__
        if self._find_class(kind) is not type(sample):
            raise BatchError(f"it is a {type(sample).__module__}.{kind}, which a replay could not make")
        fields = dict(vars(sample))
        turns, is_nested = _as_turns(fields.get(_TOKENS))
        tokens = list(itertools.chain(*turns))
        if tokens and not 0 <= min(tokens) <= max(tokens) <= INT32_MAX:
            raise BatchError(f"token ids lie from {min(tokens)} to {max(tokens)}; expected 0 to {INT32_MAX}")
        mask, is_core_mask = _read_mask(fields.get(_MASK), turns)
        logprobs, is_core = _read_logprobs(fields.get(_LOGPROBS), turns, mask)
        native: dict[str, object] = {**fields, _KIND: kind, _TURNS: [len(turn) for turn in turns]}
        if is_nested and tokens:
            native[_TOKENS] = FROM_CORE
        if is_core_mask and tokens:
            native[_MASK] = FROM_CORE
        if is_core and tokens:
            native[_LOGPROBS] = FROM_CORE
        reward = (fields.get("rollout_infos") or {}).get("total_reward")
        group_size = request.group_size or 1
        return ForeignRow(
            tokens=np.array(tokens or [0], dtype=np.int32),
            response_mask=mask if tokens else np.zeros(1, dtype=np.bool_),
            rollout_logprobs=logprobs,
            group=number // group_size,
            member=number % group_size,
            reward=float(reward) if isinstance(reward, int | float) and abs(reward) <= LARGEST_FLOAT32 else 0.0,
            versions=request.policy_version,
            termination=_TERMINATIONS.get(str(fields.get("finish_reason")), Termination.TERMINATED),
            native=native,
        )


_TERMINATIONS = {"length": Termination.TRUNCATED, "None": Termination.ABORTED}


def _as_turns(stated: object) -> tuple[list[list[int]], bool]:
    """Reads the tokens by turn, and whether they are stated so: of one turn, ms-swift may state a list of tokens."""
    turns = stated if isinstance(stated, list) else []
    is_nested = type(stated) is list and all(type(turn) is list for turn in turns)
    found = turns if is_nested else [turns]
    kinds = {type(token) for turn in found for token in turn}
    if stated is None or not isinstance(stated, list) or not kinds <= {int}:
        raise BatchError(f"{_TOKENS} holds {sorted(kind.__name__ for kind in kinds)}; expected lists of ints by turn")
    return found, is_nested


def _read_mask(stated: Any, turns: Sequence[Sequence[int]]) -> tuple[npt.NDArray[np.bool_], bool]:  # noqa: ANN401
    """Reads the mask of all tokens, and whether the core fields say the sample's own exactly; none stated: all ones."""
    lengths = [len(turn) for turn in turns]
    if not stated:
        return np.ones(sum(lengths), dtype=np.bool_), False
    parts = stated if isinstance(stated, list) and isinstance(stated[0], list) else [stated]
    if not all(type(part) is list for part in parts):
        raise BatchError(f"{_MASK} is no list of turns")
    flat = list(itertools.chain(*parts))
    if [len(part) for part in parts] != lengths and (flat or sum(lengths)):
        raise BatchError(f"{_MASK} is of another form than {_TOKENS}, which has turns of {lengths} tokens")
    is_exact = parts is stated and set(map(type, flat)) <= {int} and set(flat) <= {0, 1}
    return np.array(flat, dtype=np.bool_), is_exact


def _read_logprobs(
    stated: object, turns: Sequence[Sequence[int]], mask: npt.NDArray[np.bool_]
) -> tuple[npt.NDArray[np.float32], bool]:
    """Reads the log-probabilities of sampled tokens, and whether they are the sample's own exactly.

    ms-swift states them for all tokens or for the sampled ones, and none where a turn lacks some. 0 stands for those
    that are not stated, or are no number.
    """
    num_sampled = int(mask.sum())
    kept = np.zeros(num_sampled, dtype=np.float32)
    parts = stated if isinstance(stated, list) else []
    is_nested = bool(parts) and all(type(part) is list for part in parts)
    flat: list[Any] = list(itertools.chain(*parts)) if is_nested else parts
    if not flat or not all(type(item) in (int, float) for item in flat) or len(flat) not in (num_sampled, len(mask)):
        return kept, False
    numbers = np.array(flat, dtype=np.float64)
    own = numbers if len(flat) == num_sampled else numbers[mask]
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = own.astype(np.float32)
    kept[:] = np.where(np.isfinite(rounded), rounded, np.float32(0))
    is_exact = (
        is_nested
        and len(flat) == num_sampled
        and [len(part) for part in parts] == _sampled_by_turn(turns, mask)
        and set(map(type, flat)) <= {float}
        and kept.astype(np.float64).tobytes() == numbers.tobytes()
    )
    return kept, is_exact


def _sampled_by_turn(turns: Sequence[Sequence[int]], mask: npt.NDArray[np.bool_]) -> list[int]:
    bounds = np.cumsum([0, *(len(turn) for turn in turns)])
    return [int(mask[start:stop].sum()) for start, stop in itertools.pairwise(bounds.tolist())]


def _restore(own: dict[str, Any], batch: RolloutBatch, place: int) -> None:
    """Puts fields in their places that the core fields say exactly."""
    row = slice(*batch.row_offsets[place : place + 2].tolist())
    sampled = slice(*batch.response_offsets[place : place + 2].tolist())
    mask = batch.response_mask[row]
    bounds = np.cumsum([0, *own[_TURNS]]).tolist()
    parts = [slice(start, stop) for start, stop in itertools.pairwise(bounds)]
    if own.get(_TOKENS) is FROM_CORE:
        tokens = batch.tokens[row].tolist()
        own[_TOKENS] = [tokens[part] for part in parts]
    if own.get(_MASK) is FROM_CORE:
        marks = mask.int().tolist()
        own[_MASK] = [marks[part] for part in parts]
    if own.get(_LOGPROBS) is FROM_CORE:
        values = iter(batch.rollout_logprobs[sampled].tolist())
        own[_LOGPROBS] = [[next(values) for _ in range(int(mask[part].sum()))] for part in parts]
