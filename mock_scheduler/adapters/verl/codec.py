"""verl's ``DataProto`` at the seam of the agent loop as a rollout batch and back, bit for bit.

Contract: ``decode(encode(native))`` has every tensor, array and value of ``native`` with its dtype, place and every
bit, as ``PaddedCodec`` keeps them. There is no ``uid`` at this seam: ``n`` rows in a row are a group. Rows of a greedy
baseline, which verl adds for REMAX, come behind all others, one for each group.

- ``native/mock_scheduler.drawn``: per row, the digest of each field that the trainer drew for it; null where a field
  holds what is no plain data.
- a ``raw_prompt`` that is no plain data (images) is not kept: ``restore_prompts`` gives a replay the drawn one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

from mock_scheduler.adapters.padded import VERL, PaddedCodec
from mock_scheduler.adapters.plain_values import from_json
from mock_scheduler.adapters.prompts import digest_prompts
from mock_scheduler.batch import RolloutBatch, SampleIdentity, SamplingParams
from mock_scheduler.batch.columns import JsonColumn
from mock_scheduler.errors import BatchError
from mock_scheduler.scheduler import DEFAULT_SCHEDULER_ID, Mode, RolloutRequest, shown

#: A ``DataProto``, whose attributes are read by name: verl is imported where one is made.
Proto: TypeAlias = Any

_DRAWN = "mock_scheduler.drawn"
_PROMPT = "raw_prompt"
_SAMPLED = "__do_sample__"
#: Stands in a recording for prompts that are no plain data.
_AS_DRAWN = "mock_scheduler: as drawn"
#: Drawn anew in every run, or added to the prompts by the agent loop itself.
_NOT_DRAWN = ("uid", "priority")
_NUM_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Drawn:
    """The prompts of one rollout as the trainer drew them; ``digests``: per row, of each of its fields."""

    proto: Proto
    digests: tuple[Mapping[str, str | None], ...]

    @classmethod
    def of(cls, proto: Proto) -> Drawn:
        """Digest the rows, before an agent loop adds fields to them."""
        fields = {
            name: digest_prompts(list(values))
            for name, values in sorted(proto.non_tensor_batch.items())
            if name not in _NOT_DRAWN
        }
        return cls(proto, tuple({name: digests[row] for name, digests in fields.items()} for row in range(len(proto))))

    @property
    def num_sampled(self) -> int:
        """The rows before those of a greedy baseline."""
        is_sampled = self.proto.non_tensor_batch.get(_SAMPLED)
        return len(self.digests) if is_sampled is None else int(np.count_nonzero(is_sampled))


class VerlCodec:
    """A ``BatchCodec`` for ``generate_sequences``, whose requests have ``Drawn`` prompts.

    ``sampling`` and ``group_sizes``: of rollouts that train, and of evaluations. ``make_proto``: makes a ``DataProto``
    of tensors, arrays and meta; None: verl's own, which is imported to decode.
    """

    def __init__(
        self,
        *,
        sampling: Mapping[Mode, SamplingParams],
        group_sizes: Mapping[Mode, int],
        scheduler_id: str = DEFAULT_SCHEDULER_ID,
        make_proto: Callable[..., Proto] | None = None,
    ) -> None:
        self._sampling = sampling
        self._group_sizes = group_sizes
        self._scheduler_id = scheduler_id
        self._make_proto = _make_proto if make_proto is None else make_proto

    def encode(self, native: Proto, request: RolloutRequest) -> RolloutBatch:
        """Return the batch; raises ``BatchError`` listing every field that cannot be kept."""
        tensors = {} if native.batch is None else dict(native.batch.items())
        arrays = dict(native.non_tensor_batch)
        both = sorted(tensors.keys() & arrays.keys())
        if both:
            raise BatchError(f"{', '.join(both)}: a tensor and an array have one name; expected different ones")
        if _PROMPT in arrays and None in digest_prompts(list(arrays[_PROMPT])):
            arrays[_PROMPT] = np.full(len(native), _AS_DRAWN, dtype=object)
        drawn = _drawn_of(request)
        fields: dict[str, object] = {**tensors, **arrays, VERL.meta: native.meta_info}
        if drawn is not None and len(drawn.digests) == len(native):
            fields[_DRAWN] = [dict(row) for row in drawn.digests]
        num_sampled = len(native) if drawn is None else drawn.num_sampled
        codec = PaddedCodec(
            VERL,
            sampling=self._sampling[request.mode],
            group_ids=lambda _native, row: self._identify(row, num_sampled, self._group_sizes[request.mode]),
        )
        return codec.encode(fields, request)

    def decode(self, batch: RolloutBatch) -> Proto:
        """Return the ``DataProto``."""
        fields = PaddedCodec(VERL, sampling=batch.sampling).decode(batch)
        fields.pop(_DRAWN, None)
        meta = fields.pop(VERL.meta)
        tensors = {name: value for name, value in fields.items() if isinstance(value, torch.Tensor)}
        arrays = {name: value for name, value in fields.items() if name not in tensors}
        return self._make_proto(tensors, arrays, meta)

    def prompt_problems(self, batch: RolloutBatch, request: RolloutRequest) -> list[str]:
        """List the rows for which the trainer drew other fields than for those of the batch."""
        drawn, column = _drawn_of(request), batch.extras.get(f"native/{_DRAWN}")
        if drawn is None or not isinstance(column, JsonColumn):
            return []
        if len(drawn.digests) != len(column):
            return [f"the batch has {len(column)} rows; the trainer drew {len(drawn.digests)} prompts"]
        rows = batch.extras["identity/row"].values.tolist()  # type: ignore[union-attr]  # a tensor of PaddedCodec's
        recorded: dict[int, Any] = dict(zip(rows, map(from_json, column.items), strict=True))
        others = [row for row in range(len(rows)) if _differing(recorded[row], drawn.digests[row])]
        if not others:
            return []
        named = "; ".join(_describe(row, recorded[row], drawn) for row in others[:_NUM_SHOWN])
        more = f" (and {len(others) - _NUM_SHOWN} more)" if len(others) > _NUM_SHOWN else ""
        return [
            f"{len(others)} of {len(rows)} prompts are not the recorded ones: {named}{more}. Use the data files, "
            "data.seed and data.shuffle of the recording, or record again"
        ]

    def _identify(self, row: int, num_sampled: int, group_size: int) -> SampleIdentity:
        is_baseline = row >= num_sampled
        group = row - num_sampled if is_baseline else row // group_size
        return SampleIdentity(
            scheduler_id=self._scheduler_id,
            group_id=group,
            episode_id=0,
            env_id=group_size if is_baseline else row % group_size,
            turn=0,
        )


def restore_prompts(native: Proto, drawn: Drawn) -> None:
    """Put the drawn prompts where a replayed batch has none of its own."""
    prompts = native.non_tensor_batch.get(_PROMPT)
    if prompts is not None and len(prompts) and all(prompt == _AS_DRAWN for prompt in prompts):
        native.non_tensor_batch[_PROMPT] = drawn.proto.non_tensor_batch[_PROMPT]


def _make_proto(
    tensors: Mapping[str, torch.Tensor], arrays: Mapping[str, np.ndarray[Any, Any]], meta: dict[str, Any]
) -> Proto:
    # Imported here: a recording is looked at without verl.
    from verl import DataProto

    return DataProto.from_dict(tensors=dict(tensors), non_tensors=dict(arrays), meta_info=meta)


def _drawn_of(request: RolloutRequest) -> Drawn | None:
    return request.prompts if isinstance(request.prompts, Drawn) else None


def _differing(recorded: Mapping[str, str | None], current: Mapping[str, str | None]) -> list[str]:
    """Name the fields that only one side has, or whose digests differ; what has none is not compared."""
    return [
        name
        for name in {**recorded, **current}
        if name not in recorded
        or name not in current
        or (None not in (recorded[name], current[name]) and recorded[name] != current[name])
    ]


def _describe(row: int, recorded: Mapping[str, str | None], drawn: Drawn) -> str:
    names: Sequence[str] = _differing(recorded, drawn.digests[row])
    values = drawn.proto.non_tensor_batch
    told = ", ".join(f"{name} is now {shown(values[name][row]) if name in values else 'absent'}" for name in names)
    return f"row {row}: {told}"
