"""Rows of a TransferQueue as a rollout batch and back, bit for bit.

Contract: ``decode(encode(rows))`` has the same keys in the same order, each with its tags and every field, with every
type and bit; and the same notes. Core fields are read by the names that the framework gives (``row_fields``).

- ``identity/native/:key`` and ``native/:tag``: the key and the tags of each row;  ``native/{field}``: its fields;
- ``meta["transfer_queue"]``: the partition, the kinds of the fields, the notes, and the digests of the prompts that the
  trainer drew for the batch, in order, null for one that is not plain data; null where they are not known.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from mock_scheduler.adapters.plain_values import pack, unpack
from mock_scheduler.adapters.prompts import digest_prompts, list_prompt_problems
from mock_scheduler.adapters.rows import (
    FROM_CORE,
    ForeignRow,
    build_batch,
    column_row,
    experts_fit,
    read_about,
    read_rows,
    unpack_rows,
)
from mock_scheduler.adapters.transfer_queue.columns import Columns, QueueColumn
from mock_scheduler.adapters.transfer_queue.row_fields import (
    FieldNames,
    SplitKey,
    read_row,
    read_version,
    restored,
    split_key,
    without_doubles,
)
from mock_scheduler.batch import RolloutBatch, SamplingParams
from mock_scheduler.batch.engine_columns import ROUTED_EXPERTS_COLUMN
from mock_scheduler.errors import BatchError
from mock_scheduler.scheduler import DEFAULT_SCHEDULER_ID, RolloutRequest, shown
from mock_scheduler.support.digests import JSON

META_KEY = "transfer_queue"
_VERSION = 1
_KEY, _TAG = ":key", ":tag"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class QueueRows:
    """Rows in their order. ``notes``: plain values that go with them all."""

    partition: str
    keys: Sequence[str]
    tags: Sequence[Mapping[str, Any]]
    columns: Columns
    notes: Mapping[str, object] = field(default_factory=dict)

    def check(self) -> None:
        """Raise ``BatchError`` where keys, tags and fields are not of one number of rows, or a key is there twice."""
        sizes = {"tags": len(self.tags), **{name: len(column.rows) for name, column in self.columns.items()}}
        wrong = [f"{name} ({size})" for name, size in sizes.items() if size != len(self.keys)]
        twice = [key for key, count in Counter(self.keys).items() if count > 1]
        if wrong or twice or not self.keys:
            found = f"other numbers of rows in {', '.join(wrong)}" if wrong else f"twice {', '.join(twice) or 'none'}"
            raise BatchError(f"{len(self.keys)} keys of partition {self.partition!r}, and {found}")


class QueueCodec:
    """A ``BatchCodec`` of ``QueueRows``.

    Args:
        names: of the fields that core fields are read from.
        sampling: how the tokens were sampled; rows do not say.
        split: takes a key apart.

    ``RolloutRequest.prompts``, where given, are those that the trainer drew since the batch before, in order. A replay
    is refused where they are others; where the recording does not know them, where a row's own is not among them.
    """

    def __init__(self, names: FieldNames, *, sampling: SamplingParams, split: SplitKey = split_key) -> None:
        self._names, self._sampling, self._split = names, sampling, split

    def encode(self, native: QueueRows, request: RolloutRequest) -> RolloutBatch:
        """Gives the batch; raises ``BatchError`` listing every row that contradicts itself or cannot be kept."""
        return self.build(
            native, version=request.policy_version, scheduler_id=request.scheduler_id, prompts=request.prompts
        )

    def build(
        self,
        native: QueueRows,
        *,
        version: int,
        scheduler_id: str = DEFAULT_SCHEDULER_ID,
        prompts: Sequence[object] | None = None,
    ) -> RolloutBatch:
        """Gives the batch; ``version``: of rows whose tags do not say one."""
        native.check()
        groups: dict[str, int] = {}

        def read(number: int) -> ForeignRow:
            name, member, turn = self._split(native.keys[number])
            return self._read(native, number, (groups.setdefault(name, len(groups)), member, turn), version)

        labels = (f"row {number} ({key})" for number, key in enumerate(native.keys))
        rows = read_rows(labels, read, "rows of a TransferQueue cannot be recorded")
        keeps_experts = experts_fit([row.routed_experts for row in rows])
        return build_batch(
            [without_doubles(row, self._names, keeps_experts=keeps_experts) for row in rows],
            sampling=self._sampling,
            scheduler_id=scheduler_id,
            meta={META_KEY: _describe(native, prompts)},
            identity_fields=(_KEY, *self._names.identities),
        )

    def _read(self, native: QueueRows, number: int, place: tuple[int, int, int], version: int) -> ForeignRow:
        values = {name: column.rows[number] for name, column in native.columns.items()}
        if taken := [name for name in values if name.startswith(":")]:
            raise BatchError(f"has a field {taken[0]!r}; names that begin with ':' are taken")
        tag = native.tags[number]
        own = read_version(self._names, tag)
        row = read_row(values, self._names, place=place, version=version if own is None else own)
        return replace(row, native={_KEY: native.keys[number], _TAG: dict(tag), **values})

    def decode(self, batch: RolloutBatch) -> QueueRows:
        """Gives the rows; of a part of a batch, those in it.

        Raises:
            BatchError: the batch was not made by this class.
        """
        about = _about(batch)
        offsets, responses = batch.row_offsets.tolist(), batch.response_offsets.tolist()
        rows = []
        for place, own in unpack_rows(batch):
            tokens = slice(offsets[place], offsets[place + 1])
            if any(value is FROM_CORE for value in own.values()):
                again = self._restore(batch, place, tokens, slice(responses[place], responses[place + 1]))
                own = {name: again[name] if value is FROM_CORE else value for name, value in own.items()}
            rows.append(own)
        fields: Sequence[Sequence[Any]] = about["fields"]
        return QueueRows(
            partition=str(about["partition"]),
            keys=[row[_KEY] for row in rows],
            tags=[row[_TAG] for row in rows],
            columns={
                name: QueueColumn(kind=kind, rows=[row[name] for row in rows], ragged_dim=ragged_dim)
                for name, kind, ragged_dim in fields
            },
            notes=read_notes(batch),
        )

    def _restore(self, batch: RolloutBatch, place: int, tokens: slice, responses: slice) -> dict[str, Any]:
        has_experts = ROUTED_EXPERTS_COLUMN in batch.extras
        experts = column_row(batch, ROUTED_EXPERTS_COLUMN, place) if has_experts else None
        return cast(
            "dict[str, Any]",
            restored(
                self._names,
                batch.tokens[tokens],
                batch.response_mask[tokens][int(batch.prompt_lengths[place]) :],
                batch.rollout_logprobs[responses],
                reward=float(batch.rewards[place]),
                experts=experts,
            ),
        )

    def prompt_problems(self, batch: RolloutBatch, request: RolloutRequest) -> list[str]:
        """List the prompts that are in the batch, and that the trainer did not draw."""
        if request.prompts is None:
            return []
        recorded: Sequence[JSON] | None = _about(batch)["prompts"]
        if recorded is not None:
            return list_prompt_problems(recorded, request.prompts, "prompt")
        own, drawn = self._row_prompts(batch), digest_prompts(request.prompts)
        # What is not plain data has no digest, and may be any prompt.
        absent = 0 if None in drawn else sum(prompt not in drawn for prompt in own)
        if not absent:
            return []
        return [
            f"{absent} of {len(own)} prompts of the batch are none of the {len(drawn)} that the trainer drew, as "
            f"{shown(request.prompts[0])}. Use the data set, seed and order of the recording, or record again"
        ]

    def _row_prompts(self, batch: RolloutBatch) -> set[str]:
        """The digests of the rows' own prompts, as far as they are there."""
        rows = unpack_rows(batch) if self._names.prompt else []
        digests = digest_prompts([own.get(str(self._names.prompt)) for _, own in rows])
        return {digest for digest in digests if digest is not None}


def read_notes(batch: RolloutBatch) -> dict[str, Any]:
    """Reads the notes of a batch that ``QueueCodec`` made; raises ``BatchError`` where it did not."""
    about = _about(batch)
    notes: dict[str, Any] = unpack(about["notes"], bytes.fromhex(about["bytes"]))
    return notes


def _about(batch: RolloutBatch) -> Mapping[str, Any]:
    return read_about(batch, META_KEY, _VERSION, "a TransferQueue")


def _describe(native: QueueRows, prompts: Sequence[object] | None) -> JSON:
    notes, content = pack(dict(native.notes), "notes")
    return {
        "version": _VERSION,
        "partition": native.partition,
        "fields": [[name, column.kind, column.ragged_dim] for name, column in native.columns.items()],
        "notes": notes,
        "bytes": content.hex(),
        "prompts": None if prompts is None else list(digest_prompts(prompts)),
    }
