"""Framed tensors as columns of a batch, and back: of each, per row, a stretch left of the row, in it and right of it.

Contract: see ``padded`` for the columns and ``segments`` for their content. The bytes written for a row depend
on the row alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch

from mock_scheduler.adapters.padded.core import CoreFields
from mock_scheduler.adapters.padded.fields import LANE_DTYPES, FramedShape, NativeFields, as_lanes
from mock_scheduler.adapters.padded.layout import Frame, PaddedLayout, RowSpans
from mock_scheduler.adapters.padded.segments import Lanes, SegmentReader, TokenFields, write_segment
from mock_scheduler.batch import RolloutBatch
from mock_scheduler.batch.columns import Column, TensorColumn
from mock_scheduler.batch.engine_columns import ROUTED_EXPERTS_COLUMN
from mock_scheduler.errors import BatchError
from mock_scheduler.support.digests import JSON
from mock_scheduler.support.tensor_bytes import as_bytes, dtype_name, find_dtype, from_bytes

PROGRAM_COLUMN = "padded.program"
VALUES_COLUMN = "padded.values"
_HEAD_FRAMES = (Frame.FULL, Frame.PROMPT, Frame.RESPONSE)
_HEAD_SIZE = len(_HEAD_FRAMES) + 2  # then the row's start and split


def describe_tensor(tensor: torch.Tensor, frame: Frame, width: int, *, is_routing: bool = False) -> dict[str, JSON]:
    """Describes a framed tensor for its reader, beside its columns; ``width``: that of its frame. ``is_routing``: it
    is that of the batch's routed experts."""
    shape = FramedShape.of(tensor, width)
    about: dict[str, JSON] = {"kind": "framed", "dtype": dtype_name(tensor.dtype), "frame": frame.value}
    routing: dict[str, JSON] = {"is_routing": True} if is_routing else {}
    leading: dict[str, JSON] = {"leading": list(shape.leading)} if shape.leading else {}
    return {**about, "shape": list(shape.tail), **leading, **routing}


class _Sources:
    """The batch's own fields as lanes of any dtype; ``offsets``: where its rows start in them."""

    def __init__(self, core: Mapping[str, torch.Tensor], routed: TensorColumn | None) -> None:
        self._routed = routed
        self._tokens, self._mask = core["tokens"], core["response_mask"].numpy()
        self._rollout_logprobs = core["rollout_logprobs"]
        self._by_dtype: dict[torch.dtype, TokenFields] = {}
        self.offsets: list[int] = core["row_offsets"].tolist()

    def of(self, dtype: torch.dtype, lanes_in_column: int, *, is_routing: bool) -> TokenFields | None:
        """The fields for a tensor of this dtype; ``None`` where a token has several values, unless it
        ``is_routing``."""
        if is_routing and self._routed is not None:
            return TokenFields(mask=self._mask, tokens=None, rollout_logprobs=None, routing=self._routing_lanes())
        if lanes_in_column != 1:
            return None
        if dtype not in self._by_dtype:
            self._by_dtype[dtype] = self._convert(dtype, LANE_DTYPES[dtype.itemsize])
        return self._by_dtype[dtype]

    def _routing_lanes(self) -> Lanes:
        """The experts of all tokens, 0 where a row has none of theirs."""
        column = cast("TensorColumn", self._routed)
        content, bounds = column.row_bytes()
        lane, size = LANE_DTYPES[column.values.dtype.itemsize], math.prod(column.values.shape[1:])
        values = content.view(lane)
        out = np.zeros(len(self._mask) * size, dtype=lane)
        for row, start in enumerate(self.offsets[:-1]):
            own = values[bounds[row] // lane().itemsize : bounds[row + 1] // lane().itemsize]
            out[start * size : start * size + len(own)] = own
        return out

    def _convert(self, dtype: torch.dtype, lane: type[np.unsignedinteger[Any]]) -> TokenFields:
        if dtype.is_floating_point:
            rollout_logprobs = np.zeros(len(self._mask), dtype=lane)
            rollout_logprobs[self._mask] = as_bytes(self._rollout_logprobs.to(dtype)).numpy().view(lane)
            return TokenFields(mask=self._mask, tokens=None, rollout_logprobs=rollout_logprobs)
        # Of an id, the lane is the low bytes, whether the dtype is signed or not.
        tokens = None if dtype == torch.bool else self._tokens.numpy().astype(lane)
        return TokenFields(mask=self._mask, tokens=tokens, rollout_logprobs=None)


class PaddedWriter:
    """Writes the framed tensors of one batch; ``order``: the framework's row numbers in batch order."""

    def __init__(self, fields: NativeFields, core: CoreFields, layout: PaddedLayout, order: Sequence[int]) -> None:
        self._fields, self._spans, self._order = fields, core.spans, order
        self._routed_name = layout.routed_experts if core.routed_experts is not None else None
        self._sources = _Sources(core.tensors, core.routed_experts)

    def write(self) -> dict[str, Column]:
        """The columns of all framed tensors."""
        widths = [self._spans.widths[frame] for frame in _HEAD_FRAMES]
        starts, splits = self._spans.starts.tolist(), self._spans.splits.tolist()
        programs: list[list[int]] = [[*widths, starts[row], splits[row]] for row in self._order]
        values: list[list[bytes]] = [[] for _ in self._order]
        # Sorted: the reader has no other way to know which stretch comes next.
        for name in sorted(self._fields.framed):
            self._write_tensor(name, programs, values)
        joined = [integer for program in programs for integer in program]
        content = np.frombuffer(bytearray(b"".join([part for parts in values for part in parts])), dtype=np.uint8)
        return {
            PROGRAM_COLUMN: TensorColumn(
                values=torch.tensor(joined, dtype=torch.int32), offsets=_offsets([len(program) for program in programs])
            ),
            VALUES_COLUMN: TensorColumn(
                values=from_bytes(content, torch.uint8, content.shape),
                offsets=_offsets([sum(map(len, parts)) for parts in values]),
            ),
        }

    def _write_tensor(self, name: str, programs: list[list[int]], values: list[list[bytes]]) -> None:
        """Its rules and values are added to those of the rows."""
        tensor, frame = self._fields.framed[name]
        shape = FramedShape.of(tensor, self._spans.widths[frame])
        lanes, columns = as_lanes(tensor, shape.num_lines), self._spans.columns(frame)
        size = shape.lanes_per_column(tensor.dtype)
        is_routing = name == self._routed_name
        fields, offsets = self._sources.of(tensor.dtype, size, is_routing=is_routing), self._sources.offsets
        values_per_token = size if is_routing else 1
        for index, row in enumerate(self._order):
            first, stop, token = columns[row]
            for line in lanes[row]:
                start, end = first * size, stop * size
                at = (offsets[index] + token) * values_per_token
                segments = [write_segment(line[start:end], fields, at)]
                if start:
                    segments.insert(0, write_segment(line[:start]))
                if end < len(line):
                    segments.append(write_segment(line[end:]))
                for rules, kept in segments:
                    programs[index] += rules
                    values[index].append(kept.tobytes())


class PaddedReader:
    """Reads the framed tensors of a batch; ``order``: its row numbers in the order of the framework's rows.

    ``kinds``: the description by ``describe_tensor`` of each, by field. ``widths``: by frame, for a batch of no rows.
    """

    def __init__(
        self,
        batch: RolloutBatch,
        kinds: Mapping[str, Mapping[str, Any]],
        order: Sequence[int],
        widths: Mapping[str, int] | None,
    ) -> None:
        self._batch, self._order = batch, order
        self._kinds = {name: kinds[name] for name in sorted(kinds) if kinds[name]["kind"] == "framed"}
        program, values = (cast("TensorColumn", batch.extras[name]) for name in (PROGRAM_COLUMN, VALUES_COLUMN))
        integers, bounds = program.values.tolist(), cast("torch.Tensor", program.offsets).tolist()
        content, starts = values.values.numpy(), cast("torch.Tensor", values.offsets).tolist()
        self._programs = [integers[bounds[row] : bounds[row + 1]] for row in range(len(batch))]
        self._rows = [
            SegmentReader(self._programs[row], content[starts[row] : starts[row + 1]], position=_HEAD_SIZE)
            for row in range(len(batch))
        ]
        self._spans = self._read_spans(widths)

    def read(self) -> dict[str, torch.Tensor]:
        """The tensors by field."""
        routed = self._batch.extras.get(ROUTED_EXPERTS_COLUMN)
        sources = _Sources(self._batch.tensors(), routed if isinstance(routed, TensorColumn) else None)
        return {name: self._read_tensor(name, kind, sources) for name, kind in self._kinds.items()}

    def _read_spans(self, widths: Mapping[str, int] | None) -> RowSpans:
        heads = np.array([program[:_HEAD_SIZE] for program in self._programs], dtype=np.int64).reshape(-1, _HEAD_SIZE)
        found = np.unique(heads[:, : len(_HEAD_FRAMES)], axis=0).tolist()
        if not found and widths is not None:
            found = [[widths[frame.value] for frame in _HEAD_FRAMES]]
        if len(found) != 1:
            listed = "; ".join(", ".join(map(str, sizes)) for sizes in found) or "none, since it has no rows"
            raise BatchError(
                "padded batch: rows of one width cannot be told: full, prompt and response columns found are "
                f"{listed}. Decode rows that were recorded together."
            )
        full, prompt, response = found[0]
        sizes = {Frame.FULL: full, Frame.SHIFTED: max(full - 1, 0), Frame.PROMPT: prompt, Frame.RESPONSE: response}
        lengths = self._batch.lengths.numpy()
        return RowSpans(starts=heads[:, -2], lengths=lengths, splits=heads[:, -1], widths=sizes)

    def _read_tensor(self, name: str, kind: Mapping[str, Any], sources: _Sources) -> torch.Tensor:
        dtype, frame = find_dtype(kind["dtype"]), Frame(kind["frame"])
        shape = FramedShape(leading=tuple(kind.get("leading", ())), tail=tuple(kind["shape"]))
        size = shape.lanes_per_column(dtype)
        num_rows, width, columns = len(self._order), self._spans.widths[frame], self._spans.columns(frame)
        is_routing = bool(kind.get("is_routing"))
        fields, offsets = sources.of(dtype, size, is_routing=is_routing), sources.offsets
        values_per_token = size if is_routing else 1
        lanes = np.zeros((num_rows, shape.num_lines, width * size), dtype=LANE_DTYPES[min(dtype.itemsize, 8)])
        for lines, row in zip(lanes, self._order, strict=True):
            first, stop, token = columns[row]
            reader, start, end = self._rows[row], first * size, stop * size
            for line in lines:
                if start:
                    reader.read_into(line[:start])
                reader.read_into(line[start:end], fields, (offsets[row] + token) * values_per_token)
                if end < len(line):
                    reader.read_into(line[end:])
        return from_bytes(lanes.reshape(-1).view(np.uint8), dtype, (num_rows, *shape.leading, width, *shape.tail))


def _offsets(sizes: Sequence[int]) -> torch.Tensor:
    return torch.tensor([0, *sizes], dtype=torch.int64).cumsum(0)
