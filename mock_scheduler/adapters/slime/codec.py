"""The samples of slime, miles and vime as a rollout batch and back, bit for bit.

A sample is a mapping of its fields, as its ``to_dict`` gives them and as the files of the family hold them. Samples lie
in lists at any depth: groups, and within a group the rows into which one rollout was split (``rollout_id``).

Contract: ``decode(encode(samples))`` is the same nesting of the same mappings: every field, with its types and every
bit. Core fields are read from them: ``loss_mask`` (all ones where there is none) marks response tokens; a dict of
rewards counts by ``reward_key``; ``rollout_log_probs`` of masked tokens are kept beside the core. A sample without a
token has one placeholder, which is none of its own.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias, cast

import numpy as np
import torch

from mock_scheduler.adapters.rows import (
    FROM_CORE,
    ForeignRow,
    build_batch,
    column_row,
    read_about,
    read_rows,
    restore_experts,
    unpack_rows,
    without_doubles,
)
from mock_scheduler.adapters.slime.sample_fields import (
    TERMINATIONS,
    SampleFields,
    is_restorable,
    read_experts,
    read_support,
    read_tag,
    read_version,
)
from mock_scheduler.adapters.token_lists import (
    LARGEST_FLOAT32,
    check_tokens,
    read_logprobs,
    read_mask,
    spread_logprobs,
)
from mock_scheduler.batch import RolloutBatch, SamplingParams, Termination
from mock_scheduler.batch.engine_columns import SUPPORT_COLUMN, SUPPORT_OFFSETS_COLUMN
from mock_scheduler.errors import BatchError
from mock_scheduler.scheduler import DEFAULT_SCHEDULER_ID, RolloutRequest
from mock_scheduler.support.digests import JSON

META_KEY = "slime"
_VERSION = 1
_PATH = ":path"
_SUPPORT_KIND = ":support"
#: Fields that say which row a sample is, and not what is in it.
_IDENTITY_FIELDS = frozenset({_PATH, "group_index", "index", "rollout_id", "session_id", "routing_key"})

#: Lists of lists of samples, at any depth.
Nested: TypeAlias = "Sequence[Nested | SampleFields]"
_Path = tuple[int, ...]


class SlimeCodec:
    """A ``BatchCodec`` of nested lists of samples.

    Args:
        sampling: how the tokens were sampled; samples do not say.
        reward_key: the entry of a dict of rewards that counts (``--reward-key``); ``None``: such a row's reward is 0 in
            the core fields.
        scheduler_id: of the recording.
    """

    def __init__(
        self, *, sampling: SamplingParams, reward_key: str | None = None, scheduler_id: str = DEFAULT_SCHEDULER_ID
    ) -> None:
        self._sampling, self._reward_key, self._scheduler_id = sampling, reward_key, scheduler_id

    def encode(self, native: Nested, request: RolloutRequest) -> RolloutBatch:
        """Gives the batch; the samples stay as they were.

        Raises:
            BatchError: a sample contradicts itself or has a value that cannot be kept; lists the first of each kind.
        """
        return self.build(native, version=request.policy_version)

    def build(
        self,
        native: Nested,
        *,
        version: int,
        reads_versions: bool = False,
        by_place: bool = False,
        meta: Mapping[str, JSON] | None = None,
    ) -> RolloutBatch:
        """Gives the batch of samples, all of policy ``version``.

        ``reads_versions``: a sample's own ``weight_versions`` count instead, where they are numbers up to ``version``.
        An engine counts the weights that it was sent, and a replay sends none. ``by_place``: a sample's group and
        trajectory are its place in the lists, whatever its own numbers.
        """
        placed = list(_walk(native, ()))
        empty = [list(path) for path, sample in placed if sample is None]
        samples = [(path, sample) for path, sample in placed if sample is not None]
        if not samples:
            raise BatchError("a rollout has no sample")
        places = _identify(samples, by_place=by_place)

        def read(number: int) -> ForeignRow:
            path, sample = samples[number]
            own = read_version(sample.get("weight_versions"), version) if reads_versions else version
            return self._read(sample, path, places[number], own)

        labels = (f"sample {number} (index {sample.get('index')})" for number, (_, sample) in enumerate(samples))
        rows = read_rows(labels, read, "samples cannot be recorded")
        about: dict[str, JSON] = {
            "version": _VERSION,
            "empty": empty,
            "fields": list(dict.fromkeys(name for _, sample in samples for name in sample)),
        }
        return build_batch(
            without_doubles(rows, "rollout_routed_experts"),
            sampling=self._sampling,
            scheduler_id=self._scheduler_id,
            meta={**(meta or {}), META_KEY: about},
            identity_fields=_IDENTITY_FIELDS,
        )

    def decode(self, batch: RolloutBatch) -> list[Any]:
        """Gives the samples' fields in their nesting; of a part of a batch, without what is not in it.

        Raises:
            BatchError: the batch was not made by this class.
        """
        about = read_about(batch, META_KEY, _VERSION, "slime's samples")
        names = cast("Sequence[str]", about["fields"])
        root: dict[int, Any] = {}
        for path in cast("Sequence[Sequence[int]]", about["empty"]):
            _put(root, tuple(path), {})
        lengths = batch.row_offsets.tolist()
        for place, own in unpack_rows(batch):
            path = own.pop(_PATH)
            tokens = slice(lengths[place], lengths[place + 1])
            _restore(own, batch, place, tokens)
            _put(root, path, _Leaf({name: own[name] for name in names if name in own}))
        return cast("list[Any]", _as_lists(root))

    def _read(self, sample: SampleFields, path: _Path, place: tuple[int, int, int], version: int) -> ForeignRow:
        tokens, length = check_tokens(sample.get("tokens"), "tokens"), sample.get("response_length", 0)
        if type(length) is not int or not 0 <= length <= len(tokens):
            raise BatchError(f"response_length is {length!r}, and it has {len(tokens)} tokens")
        native: dict[str, object] = {**sample, _PATH: path}
        prompt_length = len(tokens) - length
        mask, is_core_mask = read_mask(sample.get("loss_mask"), length)
        if tokens:
            native["tokens"] = FROM_CORE
        if is_core_mask:
            native["loss_mask"] = FROM_CORE
        logprobs, is_core = read_logprobs(sample.get("rollout_log_probs"), mask, "rollout_log_probs")
        if is_core:
            native["rollout_log_probs"] = FROM_CORE
        support = read_support(sample, tokens, mask)
        if support is not None and is_restorable(sample, support[1], mask):
            native["rollout_top_p_token_ids"] = native["rollout_top_p_token_offsets"] = FROM_CORE
            native[_SUPPORT_KIND] = type(sample["rollout_top_p_token_ids"]).__name__
        return ForeignRow(
            tokens=np.array(tokens or [0], dtype=np.int32),
            response_mask=np.concatenate([np.zeros(prompt_length if tokens else 1, dtype=np.bool_), mask]),
            rollout_logprobs=logprobs,
            group=place[0],
            member=place[1],
            turn=place[2],
            reward=self._read_reward(sample.get("reward")),
            versions=version,
            termination=TERMINATIONS.get(str(sample.get("status")), Termination.ABORTED),
            prompt_length=prompt_length if tokens else 1,
            tag=read_tag(sample),
            native=native,
            routed_experts=read_experts(sample.get("rollout_routed_experts"), len(tokens)),
            support=support,
        )

    def has_reward(self, sample: Mapping[str, Any]) -> bool:
        """Whether the sample says its reward as a number that a batch may hold; else the batch has 0."""
        return abs(self._stated_reward(sample.get("reward"))) <= LARGEST_FLOAT32

    def _read_reward(self, reward: object) -> float:
        number = self._stated_reward(reward)
        return number if abs(number) <= LARGEST_FLOAT32 else 0.0

    def _stated_reward(self, reward: object) -> float:
        value = reward.get(self._reward_key) if isinstance(reward, Mapping) and self._reward_key else reward
        return float(value) if isinstance(value, int | float | np.number) else math.nan


def _walk(native: object, path: _Path) -> Iterator[tuple[_Path, SampleFields | None]]:
    """Every sample with its place; of an empty list, its place and None."""
    if isinstance(native, Mapping):
        yield path, native
    elif not isinstance(native, list | tuple):
        raise BatchError(f"a rollout holds a {type(native).__name__}; expected lists of samples")
    elif not native and path:
        yield path, None
    for number, item in enumerate(native if isinstance(native, list | tuple) else ()):
        yield from _walk(item, (*path, number))


def _identify(samples: Sequence[tuple[_Path, SampleFields]], *, by_place: bool) -> list[tuple[int, int, int]]:
    """Group, trajectory and row of each sample: by its own numbers where all have them, else by its place."""
    has_groups = not by_place and all(_is_number(sample.get("group_index")) for _, sample in samples)
    has_members = not by_place and all(_is_number(_member(sample)) for _, sample in samples)
    seen: Counter[tuple[int, int]] = Counter()
    places = []
    for number, (path, sample) in enumerate(samples):
        group = sample["group_index"] if has_groups else (path[0] if len(path) > 1 else 0)
        member = _member(sample) if has_members else (path[1] if len(path) > 1 else number)
        places.append((group, member, seen[group, member]))
        seen[group, member] += 1
    return places


def _member(sample: SampleFields) -> Any:  # noqa: ANN401 - of a file
    """The rollout execution: several samples may be rows of one."""
    return sample.get("index") if sample.get("rollout_id") is None else sample["rollout_id"]


def _is_number(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _restore(own: dict[str, Any], batch: RolloutBatch, place: int, tokens: slice) -> None:
    """Puts fields in their places that the core fields say exactly."""
    prompt_length = int(batch.prompt_lengths[place])
    mask = batch.response_mask[tokens][prompt_length:]
    if own.get("tokens") is FROM_CORE:
        own["tokens"] = batch.tokens[tokens].tolist()
    if own.get("loss_mask") is FROM_CORE:
        own["loss_mask"] = mask.int().tolist()
    if own.get("rollout_log_probs") is FROM_CORE:
        own["rollout_log_probs"] = spread_logprobs(batch, place, mask)
    restore_experts(own, batch, place, "rollout_routed_experts")
    if own.get("rollout_top_p_token_ids") is FROM_CORE:
        ids, starts = (column_row(batch, name, place) for name in (SUPPORT_COLUMN, SUPPORT_OFFSETS_COLUMN))
        sizes = torch.zeros(len(mask), dtype=torch.int64)
        sizes[mask] = starts.diff()
        bounds = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)]).int()
        is_list = own[_SUPPORT_KIND] == "list"
        own["rollout_top_p_token_ids"] = ids.tolist() if is_list else ids.clone()
        own["rollout_top_p_token_offsets"] = bounds.tolist() if is_list else bounds


class _Leaf:
    """A sample in the tree of lists."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self.fields = fields


def _put(root: dict[int, Any], path: _Path, value: object) -> None:
    for number in path[:-1]:
        root = root.setdefault(number, {})
    root[path[-1]] = value


def _as_lists(node: object) -> object:
    if isinstance(node, _Leaf):
        return node.fields
    items = cast("dict[int, Any]", node)
    return [_as_lists(items[number]) for number in sorted(items)]
