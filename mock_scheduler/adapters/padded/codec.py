"""Frameworks' padded batches as ``RolloutBatch`` and back, bit for bit, whatever their padding.

Contract: ``decode(encode(native))`` is ``native``: every tensor with its dtype, shape, rows' order and every bit (NaN
payloads, -0.0, garbage in the padding), on the CPU; every other field with its types. Decoding part of a batch's rows
gives those rows. Values beyond the core fields of the batch are kept beside them, row by row, so batches of equal
fields can be joined and cut:

- ``padded.program``: int32, the widths of the frames, the row's start and split, then the rules of each framed tensor
  (``segments``), in the order of their names, left of the row, in it, right of it;
- ``padded.values``: uint8, the bytes of the values that these rules need, in the same order;
- ``identity/row``: the row's number in the framework's batch;
- ``native/{field}`` for each other field, ``identity/native/{field}`` where it identifies the row: a tensor, or JSON
  per row (of an identifying field, int64 where all values are such numbers);
- ``meta["padded"]``: how each field is kept. The entries of the framework's meta are beside it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch

from mock_scheduler.adapters.padded.columns import PaddedReader, PaddedWriter, describe_tensor
from mock_scheduler.adapters.padded.core import CoreReader
from mock_scheduler.adapters.padded.fields import (
    IdentifyRow,
    Native,
    NativeFields,
    identify_rows,
    raise_problems,
    read_tags,
    sort_fields,
)
from mock_scheduler.adapters.padded.layout import PaddedLayout
from mock_scheduler.adapters.padded.values import (
    describe_rows,
    from_json,
    read_column,
    write_dense,
    write_identity,
    write_meta,
    write_rows,
)
from mock_scheduler.batch import IDENTITY_EXTRAS, RolloutBatch, SamplingParams
from mock_scheduler.batch.columns import Column, TensorColumn
from mock_scheduler.batch.engine_columns import ROUTED_EXPERTS_COLUMN, VERSIONS_COLUMN
from mock_scheduler.errors import BatchError
from mock_scheduler.scheduler import DEFAULT_SCHEDULER_ID, RolloutRequest
from mock_scheduler.support.digests import JSON

META_KEY = "padded"
ROW_COLUMN = f"{IDENTITY_EXTRAS}row"
_VERSION = 1


class PaddedCodec:
    """A ``BatchCodec`` for one framework's padded batches.

    ``layout``: ``ROLL_AGENTIC``, ``ROLL_RLVR``, ``VERL``, ``AREAL`` or one of your own. ``sampling``: how the tokens
    were sampled; padded batches do not say. ``group_ids``: the field whose equal values make a group, or a
    function from the framework's batch and a row number to a ``SampleIdentity``; ``None``: the layout's field, or,
    where the batch has none, the row number divided by ``group_size``. ``group_size``: trajectories every group
    must have; ``None``: as the request says.

    A framework's batch is one mapping of all its fields; of a ``DataProto``, for example,
    ``{**data.batch, **data.non_tensor_batch, "meta_info": data.meta_info}``.
    """

    def __init__(
        self,
        layout: PaddedLayout,
        *,
        sampling: SamplingParams,
        scheduler_id: str = DEFAULT_SCHEDULER_ID,
        group_ids: str | IdentifyRow | None = None,
        group_size: int | None = None,
    ) -> None:
        self._layout = dataclasses.replace(layout, group_ids=group_ids) if isinstance(group_ids, str) else layout
        self._needs_group_ids = isinstance(group_ids, str)
        self._identify = group_ids if callable(group_ids) else None
        self._sampling, self._scheduler_id, self._group_size = sampling, scheduler_id, group_size

    def encode(self, native: object, request: RolloutRequest) -> RolloutBatch:
        """The batch of a framework's mapping of fields; the mapping stays as it was and is not shared.

        Raises ``BatchError`` where a field is missing or cannot be kept, where tokens, logprobs on response tokens or
        rewards are no possible values, and as ``RolloutBatch`` does.
        """
        if not isinstance(native, Mapping):
            raise BatchError(
                f"batch of layout {self._layout.name!r} is a {type(native).__name__}; expected a mapping of its fields "
                f"such as {{**data.batch, **data.non_tensor_batch, {self._layout.meta!r}: data.meta_info}}"
            )
        layout = self._layout.fit(native)
        fields = sort_fields(native, layout)
        group_size = self._group_size or request.group_size
        identities = self._identify_rows(native, fields.num_rows, group_size)
        order = sorted(range(fields.num_rows), key=identities.__getitem__)
        ordered = [identities[row] for row in order]
        with np.errstate(over="ignore", invalid="ignore"):  # values that are not finite are refused, or are garbage
            core = CoreReader(fields, layout, order, ordered).read(request.policy_version)
        tags = read_tags(native, layout, fields.num_rows)
        kinds, columns = self._write_others(fields, order, tags)
        columns |= PaddedWriter(fields, core, layout, order).write()
        if core.token_versions is not None:
            columns[VERSIONS_COLUMN] = core.token_versions
        if core.routed_experts is not None:
            columns[ROUTED_EXPERTS_COLUMN] = core.routed_experts
        return RolloutBatch(
            identities=tuple(ordered),
            prompt_digests=core.prompt_digests,
            tags=tuple(tags[row] for row in order) if tags is not None else ("",) * len(order),
            sampling=self._sampling,
            group_size=group_size,
            extras=columns,
            meta=self._write_meta(native, fields, kinds, layout),
            **core.tensors,
        )

    def decode(self, batch: RolloutBatch) -> dict[str, Any]:
        """The framework's fields, in their order: tensors, and arrays or lists of one value per row.

        Raises ``BatchError`` where the batch was not made by this class, or joins rows of different widths.
        """
        # Columns of this codec can only be read as they were written.
        about = batch.meta.get(META_KEY)
        if not isinstance(about, Mapping) or about.get("version") != _VERSION:
            found = about.get("version") if isinstance(about, Mapping) else None
            raise BatchError(
                f"batch was not recorded from padded tensors: meta {META_KEY!r} has version {found}; expected "
                f"{_VERSION}. Replay it with the codec that recorded it."
            )
        kinds = cast("Mapping[str, Mapping[str, Any]]", about["fields"])
        numbers = cast("TensorColumn", batch.extras[ROW_COLUMN]).values
        order = torch.argsort(numbers, stable=True).tolist()
        widths = cast("Mapping[str, int] | None", about["widths"])
        framed = PaddedReader(batch, kinds, order, widths).read()
        native: dict[str, Any] = {}
        for name in cast("Sequence[str]", about["order"]):
            if name not in kinds:
                keys = cast("Sequence[str]", about["meta_keys"])
                native[name] = {key: from_json(batch.meta[key]) for key in keys}
            elif name in framed:
                native[name] = framed[name].numpy() if kinds[name]["is_array"] else framed[name]
            else:
                native[name] = read_column(batch, kinds[name], order)
        return native

    def _identify_rows(self, native: Native, num_rows: int, group_size: int | None) -> list[Any]:
        if self._identify is not None:
            return [self._identify(native, row) for row in range(num_rows)]
        if self._needs_group_ids and self._layout.group_ids not in native:
            found = ", ".join(sorted(map(repr, native)))
            raise_problems([f"group field {self._layout.group_ids!r} is absent; fields found: {found}"], self._layout)
        return identify_rows(
            native, self._layout, num_rows=num_rows, scheduler_id=self._scheduler_id, group_size=group_size
        )

    def _write_others(
        self, fields: NativeFields, order: list[int], tags: tuple[str, ...] | None
    ) -> tuple[dict[str, dict[str, JSON]], dict[str, Column]]:
        """How each field but the meta is kept, and the columns of those that are not framed."""
        kinds: dict[str, dict[str, JSON]] = {}
        columns: dict[str, Column] = {ROW_COLUMN: TensorColumn(values=torch.tensor(order, dtype=torch.int32))}
        for name, (tensor, frame) in fields.framed.items():
            is_routing = name == self._layout.routed_experts
            about = describe_tensor(tensor, frame, fields.widths[frame], is_routing=is_routing)
            kinds[name] = {**about, "is_array": name in fields.arrays}
        for name, tensor in fields.dense.items():
            kinds[name] = {"kind": "dense", "column": self._column_name(name), "is_array": name in fields.arrays}
            columns[self._column_name(name)] = write_dense(tensor, order)
        for name, values in fields.rows.items():
            is_tags = name == self._layout.tags and tags is not None
            kinds[name] = {**describe_rows(values), "column": None if is_tags else self._column_name(name)}
            if not is_tags:
                write = write_identity if name in self._layout.all_identity_fields else write_rows
                columns[self._column_name(name)] = write(name, values, order)
        return kinds, columns

    def _column_name(self, name: str) -> str:
        return f"{IDENTITY_EXTRAS}native/{name}" if name in self._layout.all_identity_fields else f"native/{name}"

    def _write_meta(
        self,
        native: Native,
        fields: NativeFields,
        kinds: Mapping[str, Mapping[str, JSON]],
        layout: PaddedLayout,
    ) -> dict[str, JSON]:
        meta = {} if fields.meta is None else write_meta(layout.meta, fields.meta, META_KEY)
        about: dict[str, JSON] = {
            "version": _VERSION,
            "layout": layout.name,
            "order": list(native),
            "fields": kinds,
            "meta_keys": None if fields.meta is None else list(fields.meta),
            "absent": [role for role, name in layout.optional.items() if name not in native],
            "widths": None if fields.num_rows else {frame.value: width for frame, width in fields.widths.items()},
        }
        return {**meta, META_KEY: about}
