"""Defines the rollout batch: typed, immutable and jagged, with its rows in identity order whatever their arrival order.

Contract: a ``RolloutBatch`` that exists is consistent. Its constructor checks it against the rules of
``checks`` and lists every problem in one ``BatchError``; nothing is padded, and nothing is repaired. Its tensors
are on the CPU and must not be written to. Named extras go with the rows, ``meta`` with the whole, bit for bit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mock_scheduler.batch.checks import (
    TENSOR_FIELDS,
    content_problems,
    dtype_problems,
    extras_problems,
    identity_problems,
    meta_problems,
    prompt_problems,
    raise_problems,
    scalar_problems,
    size_problems,
)
from mock_scheduler.batch.columns import Column, TensorColumn, column_kind, copy_json, join_columns
from mock_scheduler.batch.engine_columns import RowSizes, engine_column_problems
from mock_scheduler.batch.fields import as_array, copy_given, given, make_tensor, tensor_field
from mock_scheduler.batch.offsets import compute_response_offsets
from mock_scheduler.batch.pickled import PickledByBuffers
from mock_scheduler.batch.row_digests import compute_prompt_digests, compute_row_digests
from mock_scheduler.batch.trajectory import (
    GroupKey,
    SampleIdentity,
    SamplingParams,
    Termination,
    Trajectory,
    build_identities,
    count_groups,
    partial_group_problems,
    sampling_as_json,
)
from mock_scheduler.errors import BatchError
from mock_scheduler.support.digests import JSON, canonical_json, compute_json_digest
from mock_scheduler.support.raw_tensors import RawTensor

if TYPE_CHECKING:
    import torch

#: Extras whose names start with this say which row it is, as its identity does, and not what is in it.
IDENTITY_EXTRAS = "identity/"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PaddedBatch:
    """A batch padded on the right: ``tokens`` int64, ``response_mask`` bool and ``rollout_logprobs`` float32, all
    ``[B, length]`` (logprobs 0 where the mask is False); ``lengths`` int64 ``[B]``."""

    tokens: torch.Tensor
    response_mask: torch.Tensor
    rollout_logprobs: torch.Tensor
    lengths: torch.Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class RolloutBatch(PickledByBuffers):
    """B rows in strictly increasing identity order; row i is ``tokens[row_offsets[i]:row_offsets[i + 1]]``.

    ``tokens`` int32 and ``response_mask`` bool ``[sum T]``; ``rollout_logprobs`` float32 ``[sum R]``, on response
    tokens only, in token order; ``turn_rewards`` float32 and ``policy_versions`` int32 ``[sum K]``, row i from
    ``turn_offsets[i]``; ``row_offsets``, ``turn_offsets`` int64 ``[B + 1]``; ``rewards`` float32 ``[B]``, the stored
    total of the row; ``terminations`` uint8 ``[B]`` of ``Termination``; ``prompt_lengths`` int32 ``[B]``;
    ``prompt_digests`` SHA-256 (hex) of the prompt tokens as little-endian int32. ``group_size`` is the number of
    trajectories of every group; ``None``: groups may be partial. ``extras``: further columns by name, in
    the order of their names, one entry per row; they may hold NaN and infinities. ``meta``: JSON values of the whole
    batch by name.
    """

    identities: tuple[SampleIdentity, ...]
    tokens: torch.Tensor = tensor_field()
    row_offsets: torch.Tensor = tensor_field()
    response_mask: torch.Tensor = tensor_field()
    rollout_logprobs: torch.Tensor = tensor_field()
    turn_offsets: torch.Tensor = tensor_field()
    turn_rewards: torch.Tensor = tensor_field()
    policy_versions: torch.Tensor = tensor_field()
    rewards: torch.Tensor = tensor_field()
    terminations: torch.Tensor = tensor_field()
    prompt_lengths: torch.Tensor = tensor_field()
    prompt_digests: tuple[str, ...]
    tags: tuple[str, ...]
    sampling: SamplingParams
    group_size: int | None
    extras: Mapping[str, Column] = field(default_factory=dict)
    meta: Mapping[str, JSON] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._check(is_new=True)
        self._check_prompts()

    def check_again(self) -> None:
        """Checks the batch as its constructor does; raises ``BatchError``."""
        self._check(is_new=True, takes_arrays=True)
        self._check_prompts()

    def _check_prompts(self) -> None:
        """Checks the prompts' digests and the columns of engines, of fields that are sound."""
        core = self.core_arrays()
        expected = compute_prompt_digests(core["tokens"], core["row_offsets"], core["prompt_lengths"])
        raise_problems(prompt_problems(self.prompt_digests, expected, self.identities) + self._engine_problems())

    def _engine_problems(self) -> list[str]:
        """List columns that engines add (``engine_columns``) and that do not fit; a batch read from a file may have
        any, since older ones gave their names no meaning."""
        arrays = self.arrays
        sizes = RowSizes(
            identities=self.identities,
            lengths=arrays["lengths"],
            response_lengths=arrays["response_lengths"],
            num_turns=arrays["num_turns"],
            response_tokens=arrays["tokens"][arrays["response_mask"]],
        )
        return engine_column_problems(self.extras, sizes, self.meta)

    def _to_pickle(self) -> dict[str, Any]:
        numbers = np.array([identity.numbers for identity in self.identities], dtype=np.int64).reshape(-1, 4)
        rows = [identity.scheduler_id for identity in self.identities], numbers
        return {**PickledByBuffers._to_pickle(self), "identities": rows}

    @classmethod
    def _from_pickle(cls, carried: Mapping[str, Any]) -> RolloutBatch:
        # Objects by the thousand would take longer than all tensors.
        return cls._unchecked(**{**carried, "identities": build_identities(*carried["identities"])})

    @classmethod
    def _unchecked(cls, **fields: Any) -> RolloutBatch:  # noqa: ANN401 - the fields of this class
        """Make the batch of all fields, known to be consistent."""
        batch = object.__new__(cls)
        for name, value in fields.items():
            object.__setattr__(batch, name, value)
        return batch

    @classmethod
    def _restored(cls, **fields: Any) -> RolloutBatch:  # noqa: ANN401 - the fields of this class
        """The batch of fields whose prompt digests were computed from the prompts, and whose JSON was checked or read
        from JSON: all else is checked. For a batch just made from rows, or read from a step file, whose own digests
        prove them to be the written ones. Tensors may be arrays of the right dtypes, and ``RawTensor`` in columns."""
        batch = cls._unchecked(**fields)
        batch._check(is_new=False, takes_arrays=True)
        return batch

    def core_arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Returns the core tensors as arrays."""
        return {name: as_array(given(self, name)) for name in TENSOR_FIELDS}

    def _check(self, *, is_new: bool, takes_arrays: bool = False) -> None:
        """Raise ``BatchError`` unless the fields are consistent."""
        raise_problems(scalar_problems(self.tags, self.group_size) + (meta_problems(self.meta) if is_new else []))
        object.__setattr__(self, "extras", dict(sorted(self.extras.items())))
        object.__setattr__(self, "meta", dict(sorted(self.meta.items())))
        # Each check indexes with what those before it have shown to be sound.
        tensors = {name: given(self, name) for name in TENSOR_FIELDS}
        if not takes_arrays or not all(isinstance(tensor, np.ndarray) for tensor in tensors.values()):
            raise_problems(dtype_problems(tensors))
        arrays = self.core_arrays()
        sizes = {"prompt_digests": len(self.prompt_digests), "tags": len(self.tags)}
        problems = size_problems(arrays, sizes, num_rows=len(self))
        raise_problems(problems + extras_problems(self.extras, len(self), checks_json=is_new))
        # Last, since it slices by the offsets.
        raise_problems(content_problems(arrays, self.identities) + identity_problems(self.identities, self.group_size))

    @classmethod
    def from_trajectories(
        cls,
        rows: Iterable[Trajectory],
        *,
        sampling: SamplingParams,
        group_size: int | None,
        meta: Mapping[str, JSON] | None = None,
    ) -> RolloutBatch:
        """The batch of the given rows, in identity order; the tensors are copied.

        ``group_size`` is the number of trajectories every (scheduler, group, episode) must have; ``None``: any. Raises
        ``BatchError`` with all problems: an incomplete group, a duplicated identity, a mask, logprobs or turns unfit
        for the row, extras of some rows only, a wrong dtype, a NaN or infinity.
        """
        # Rows are of torch's tensors, which take long to import.
        from mock_scheduler.batch.rows import extra_name_problems, join_extras, join_rows, row_problems

        # By identity, so that a batch does not depend on the order in which episodes ended.
        ordered = sorted(rows, key=lambda row: row.identity)
        identities = tuple(row.identity for row in ordered)
        meta = {} if meta is None else meta
        raise_problems(scalar_problems((), group_size))
        problems_by_row = [row_problems(row) for row in ordered]
        problems = (
            meta_problems(meta)
            + [problem for found in problems_by_row for problem in found]
            + extra_name_problems(ordered)
        )
        columns, column_problems = join_extras(ordered) if not problems else ({}, [])
        if problems or column_problems:
            sound = [row for row, found in zip(ordered, problems_by_row, strict=True) if not found]
            arrays = {name: tensor.numpy() for name, tensor in join_rows(sound).items()}
            problems += column_problems + content_problems(arrays, [row.identity for row in sound])
            raise_problems(problems + identity_problems(identities, group_size))
        core = join_rows(ordered)
        tokens, row_offsets, prompt_lengths = (
            core[name].numpy() for name in ("tokens", "row_offsets", "prompt_lengths")
        )
        batch = cls._restored(
            identities=identities,
            prompt_digests=compute_prompt_digests(tokens, row_offsets, prompt_lengths),
            tags=tuple(row.tag for row in ordered),
            sampling=sampling,
            group_size=group_size,
            extras=columns,
            meta=meta,
            **core,
        )
        raise_problems(batch._engine_problems())
        return batch

    @classmethod
    def concat(cls, batches: Sequence[RolloutBatch]) -> RolloutBatch:
        """Returns one batch of all rows, sorted and checked anew.

        Raises ``BatchError`` where sampling, group size or meta differ, or as ``from_trajectories``.
        """
        if not batches:
            raise BatchError("concat: no batches were given")
        first = batches[0]
        for index, batch in enumerate(batches):
            if (batch.sampling, batch.group_size) != (first.sampling, first.group_size):
                raise BatchError(
                    f"concat: batch {index} has {batch.sampling} and group_size {batch.group_size}, "
                    f"batch 0 has {first.sampling} and group_size {first.group_size}"
                )
            if canonical_json(batch.meta) != canonical_json(first.meta):
                raise BatchError(f"concat: batch {index} has meta {batch.meta}, batch 0 has {first.meta}")
        filled = [batch for batch in batches if len(batch)]
        if not filled:
            return first
        kinds = [{name: column_kind(column) for name, column in batch.extras.items()} for batch in filled]
        if any(kind != kinds[0] for kind in kinds):  # which is said where rows are joined
            rows = [row for batch in batches for row in batch.rows()]
            return cls.from_trajectories(rows, sampling=first.sampling, group_size=first.group_size, meta=first.meta)
        return cls._join(filled)

    @classmethod
    def _join(cls, batches: Sequence[RolloutBatch]) -> RolloutBatch:
        """The batch of all rows of batches that are alike but for their rows; raises as ``concat``."""
        identities = [identity for batch in batches for identity in batch.identities]
        digests = [digest for batch in batches for digest in batch.prompt_digests]
        tags = [tag for batch in batches for tag in batch.tags]
        order = sorted(range(len(identities)), key=identities.__getitem__)
        is_ordered = order == list(range(len(order)))

        def join(parts: Sequence[Column]) -> Any:  # noqa: ANN401 - of the same type
            joined = join_columns(parts)
            return joined if is_ordered else joined.select(order)

        cores = [batch._core_columns() for batch in batches]
        core: dict[str, TensorColumn] = {name: join([columns[name] for columns in cores]) for name in cores[0]}
        batch = cls._restored(
            identities=tuple(identities[row] for row in order),
            row_offsets=core["tokens"].bounds,
            turn_offsets=core["turn_rewards"].bounds,
            prompt_digests=tuple(digests[row] for row in order),
            tags=tuple(tags[row] for row in order),
            sampling=batches[0].sampling,
            group_size=batches[0].group_size,
            extras={name: join([batch.extras[name] for batch in batches]) for name in batches[0].extras},
            meta=batches[0].meta,
            **{name: column.raw.array() for name, column in core.items()},
        )
        raise_problems(batch._engine_problems())
        return batch

    def with_group_size(self, group_size: int | None) -> RolloutBatch:
        """Returns the same rows, whose groups have another size; raises ``BatchError`` where one has not."""
        return self._restored(**{**self._given(), "group_size": group_size})

    def _given(self) -> dict[str, Any]:
        """Returns the fields by name, tensors as they were given."""
        return {item.name: given(self, item.name) for item in fields(self)}

    def __len__(self) -> int:
        return len(self.identities)

    @cached_property
    def arrays(self) -> Mapping[str, npt.NDArray[Any]]:
        """Returns the core tensors as NumPy arrays, which need no torch where the batch was read from a file.

        They share memory with the tensors. With them what follows from them: ``lengths``, ``response_offsets``,
        ``response_lengths`` and ``num_turns``.
        """
        core = self.core_arrays()
        response_offsets = compute_response_offsets(core["row_offsets"], core["response_mask"])
        return {
            **core,
            "lengths": np.diff(core["row_offsets"]),
            "response_offsets": response_offsets,
            "response_lengths": np.diff(response_offsets),
            "num_turns": np.diff(core["turn_offsets"]),
        }

    @property
    def lengths(self) -> torch.Tensor:
        """Returns tokens per row, int64 ``[B]``."""
        return make_tensor(self.arrays["lengths"].copy())

    @property
    def response_offsets(self) -> torch.Tensor:
        """Returns the start of each row's logprobs, int64 ``[B + 1]``."""
        return make_tensor(self.arrays["response_offsets"].copy())

    @property
    def response_lengths(self) -> torch.Tensor:
        """Returns response tokens per row, int64 ``[B]``."""
        return make_tensor(self.arrays["response_lengths"].copy())

    @property
    def group_index(self) -> torch.Tensor:
        """int64 ``[B]``: 0 to ``num_groups`` - 1 in row order; equal where (scheduler, group, episode) are equal."""
        keys = [identity.group_key for identity in self.identities]
        index = {key: position for position, key in enumerate(dict.fromkeys(keys))}
        return make_tensor(np.array([index[key] for key in keys], dtype=np.int64))

    @property
    def group_sizes(self) -> Counter[GroupKey]:
        """Number of trajectories of each group, by ``SampleIdentity.group_key``, in row order."""
        return count_groups(identity.trajectory_key for identity in self.identities)

    @property
    def num_groups(self) -> int:
        """Number of different (scheduler, group, episode)."""
        return len(self.group_sizes)

    def __repr__(self) -> str:
        num_tokens, num_sampled = (len(as_array(given(self, name))) for name in ("tokens", "rollout_logprobs"))
        counts = f"{len(self):,} rows, {self.num_trajectories:,} trajectories, {num_tokens:,} tokens"
        return f"RolloutBatch({counts}, {num_sampled:,} of them sampled)"

    @property
    def num_trajectories(self) -> int:
        """Number of trajectories; fewer than rows where a row is a turn."""
        return self.group_sizes.total()

    @property
    def num_rows_without_response(self) -> int:
        """Rows without a sampled token, for example since the first prompt was too long."""
        return int((self.arrays["response_lengths"] == 0).sum())

    @property
    def num_duplicate_rows(self) -> int:
        """Counts rows with the content, identity aside, of an earlier row."""
        return len(self.duplicate_rows())

    def duplicate_rows(self) -> list[tuple[SampleIdentity, SampleIdentity]]:
        """List rows with the content of an earlier row, each with the first of its kind, in row order.

        The content is everything but the identity and the extras whose names start with ``identity/``.
        """
        compared = {name: column for name, column in self.extras.items() if not name.startswith(IDENTITY_EXTRAS)}
        digests = compute_row_digests({**self._core_columns(), **compared}, self.tags)
        firsts: dict[bytes, SampleIdentity] = {}
        pairs = [(row, firsts.setdefault(digest, row)) for row, digest in zip(self.identities, digests, strict=True)]
        return [(row, first) for row, first in pairs if row != first]

    def partial_groups(self, group_size: int) -> list[str]:
        """List groups without ``group_size`` trajectories, as in ``default/group 1/episode 0: 7 of 8
        trajectories``."""
        return partial_group_problems(self.group_sizes, group_size)

    def rows(self) -> list[Trajectory]:
        """The rows one by one, as views of this batch; ``from_trajectories`` of them gives this batch again."""
        lengths, turns = self.arrays["lengths"].tolist(), self.arrays["num_turns"].tolist()
        tokens, response_mask = self.tokens.split(lengths), self.response_mask.split(lengths)
        rollout_logprobs = self.rollout_logprobs.split(self.arrays["response_lengths"].tolist())
        turn_rewards, policy_versions = self.turn_rewards.split(turns), self.policy_versions.split(turns)
        terminations, prompt_lengths = self.terminations.tolist(), self.prompt_lengths.tolist()
        rewards, columns = self.rewards.tolist(), {name: column.rows() for name, column in self.extras.items()}
        return [
            Trajectory(
                identity=identity,
                tokens=tokens[i],
                response_mask=response_mask[i],
                rollout_logprobs=rollout_logprobs[i],
                turn_rewards=turn_rewards[i],
                policy_versions=policy_versions[i],
                termination=Termination(terminations[i]),
                prompt_length=prompt_lengths[i],
                tag=self.tags[i],
                reward=rewards[i],
                extras={name: values[i] for name, values in columns.items()},
            )
            for i, identity in enumerate(self.identities)
        ]

    def select(self, rows: Sequence[int]) -> RolloutBatch:
        """Copies these rows, in strictly increasing order; groups need not be whole.

        Raises ``BatchError`` for other orders: the rows of a batch stay in identity order.
        """
        # Rows of a batch in increasing order are a batch: nothing else need be checked.
        if any(later <= earlier for earlier, later in pairwise(rows)) or not all(0 <= r < len(self) for r in rows):
            raise BatchError(f"select: rows {list(rows)} are not strictly increasing numbers of 0 to {len(self) - 1}")
        chosen = {name: column.select(rows) for name, column in self._core_columns().items()}
        own = {
            "identities": tuple(self.identities[r] for r in rows),
            "row_offsets": chosen["tokens"].bounds,
            "turn_offsets": chosen["turn_rewards"].bounds,
            "prompt_digests": tuple(self.prompt_digests[r] for r in rows),
            "tags": tuple(self.tags[r] for r in rows),
            "group_size": None,
            "extras": {name: column.select(rows) for name, column in self.extras.items()},
            **{name: column.raw.array() for name, column in chosen.items()},
        }
        return RolloutBatch._unchecked(**{**self._given(), **own})

    def copy(self) -> RolloutBatch:
        """Returns an equal batch with its own memory."""
        own = {
            "extras": {name: column.copy() for name, column in self.extras.items()},
            "meta": {name: copy_json(value) for name, value in self.meta.items()},
            **{name: copy_given(given(self, name)) for name in TENSOR_FIELDS},
        }
        return RolloutBatch._unchecked(**{**self._given(), **own})

    def _core_columns(self) -> dict[str, TensorColumn]:
        """Returns every core tensor but the offsets, as a column."""
        offsets = {
            "tokens": "row_offsets",
            "response_mask": "row_offsets",
            "rollout_logprobs": "response_offsets",
            "turn_rewards": "turn_offsets",
            "policy_versions": "turn_offsets",
            "rewards": None,
            "terminations": None,
            "prompt_lengths": None,
        }
        arrays = self.arrays
        return {
            name: TensorColumn.of_given(RawTensor.of_array(arrays[name]), None if bounds is None else arrays[bounds])
            for name, bounds in offsets.items()
        }

    def digest(self) -> str:
        """SHA-256 (hex) over the whole content; equal exactly where every bit of two batches is equal."""
        values: JSON = {
            "identities": [[identity.scheduler_id, *identity.numbers] for identity in self.identities],
            "prompt_digests": self.prompt_digests,
            "tags": self.tags,
            "sampling": sampling_as_json(self.sampling),
            "group_size": self.group_size,
            "tensors": {name: RawTensor.of_array(array).digest() for name, array in self.core_arrays().items()},
            "extras": {name: column.digest() for name, column in self.extras.items()},
            "meta": self.meta,
        }
        return compute_json_digest(values)

    def is_identical(self, other: RolloutBatch) -> bool:
        """True where every bit of the content is equal: -0.0 is not 0.0, and no tolerance is applied."""
        return self.digest() == other.digest()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns the core tensors by name, without the extras, in the order of ``TENSOR_FIELDS``."""
        # The names are those of this class's own fields: this looks nothing up that may be absent.
        return {name: getattr(self, name) for name in TENSOR_FIELDS}

    def pad(self, length: int, pad_id: int = 0) -> PaddedBatch:
        """Rows padded on the right with ``pad_id`` to ``length``; raises ``BatchError`` naming longer rows."""
        too_long = [
            f"{identity}: {size} tokens"
            for identity, size in zip(self.identities, self.lengths.tolist(), strict=True)
            if size > length
        ]
        if too_long:
            raise BatchError(f"pad: {len(too_long)} rows are longer than {length}: {'; '.join(too_long)}")
        import torch

        inside = torch.arange(length) < self.lengths[:, None]
        tokens = torch.full(inside.shape, pad_id, dtype=torch.int64)
        tokens[inside] = self.tokens.long()
        mask = torch.zeros(inside.shape, dtype=torch.bool)
        mask[inside] = self.response_mask
        rollout_logprobs = torch.zeros(inside.shape, dtype=torch.float32)
        rollout_logprobs[mask] = self.rollout_logprobs
        return PaddedBatch(tokens=tokens, response_mask=mask, rollout_logprobs=rollout_logprobs, lengths=self.lengths)
