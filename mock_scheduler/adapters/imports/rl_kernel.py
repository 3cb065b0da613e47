"""Captures of RL-Kernel's consistency debugger as two traces, ``training`` and ``rollout``, of one sample.

A folder holds ``capture-manifest.json``, the boundaries in the order of computation, and ``captures/{side}-rank{N}-
call{M}.pt``, each some positions and features of one boundary. Contract: a position of the sample is a token, and a
rank's features are channels, so that tp and cp of the two sides may differ. A boundary that a side holds in part is
refused, as RL-Kernel refuses it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mock_scheduler.adapters.imports.traces import RankTensors, Traces, name_tensor, write_ranks
from mock_scheduler.errors import ForeignFileError, RecordingError
from mock_scheduler.support.digests import compute_json_digest
from mock_scheduler.support.foreign_files import load_json
from mock_scheduler.support.pickles.torch_files import read_torch_file
from mock_scheduler.support.text import list_some
from mock_scheduler.trace.entries import ROW_PLACES, RowTable, TraceEntry
from mock_scheduler.trace.shards import Block, ShardSpec, Split, blocks_of_indices

_MANIFEST, _SCHEMA = "capture-manifest.json", "rlkernel.capture.v1"
_FILE = re.compile(r"(training|rollout)-rank(\d+)-call(\d+)\.pt")
#: What both sides must share: another sample has other rows.
_SAMPLE = ("tokens", "positions", "mask")
_NUM_SHOWN = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class _Boundary:
    number: int
    name: str
    positions: frozenset[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Capture:
    """One file: some positions and features of a boundary."""

    rank: int
    boundary: _Boundary
    value: torch.Tensor
    positions: tuple[int, ...]
    offset: int
    width: int

    def entry(self, row: int) -> TraceEntry:
        """Gives it as a piece of the boundary's tensor, of a row of ``row`` tokens."""
        tokens = Split(dim=0, blocks=blocks_of_indices(self.positions))
        features = Split(dim=1, blocks=(Block(local_start=0, global_start=self.offset, length=self.value.shape[1]),))
        spec = ShardSpec(
            name=self.boundary.name,
            global_shape=(row, self.width),
            local_shape=tuple(self.value.shape),
            splits=(tokens, features),
        )
        return TraceEntry(
            update=0,
            kind="activation",
            spec=spec,
            tensor=self.value,
            dims=("token", "channel"),
            is_masked=True,
            place=self.boundary.number,
        )


def write_captures(source: Path, folder: Path) -> Traces:
    """Writes a trace of each side; gives their steps.

    Raises:
        RecordingError: there is no manifest, or no capture.
        ForeignFileError: a file cannot be read or contradicts the manifest, or a side holds a boundary in part.
    """
    boundaries = _load_manifest(source)
    sides: dict[str, list[tuple[int, int, Path]]] = {}
    for path in sorted((source / "captures").glob("*")):
        match = _FILE.fullmatch(path.name)
        if match is not None:
            sides.setdefault(match[1], []).append((int(match[2]), int(match[3]), path))
        elif path.suffix == ".lock" and not path.with_suffix(".pt").is_file():
            raise ForeignFileError(f"{path} was begun and {path.stem}.pt was never written: capture again")
    if not sides:
        raise RecordingError(f"{source} has no captures/training-rank0-call0.pt or the like")
    traces = {}
    for side, files in sorted(sides.items()):
        ranks = _read_side(side, sorted(files), boundaries, source)
        traces[side] = write_ranks(ranks, folder / side)
    return traces


def _load_manifest(source: Path) -> dict[str, _Boundary]:
    path = source / _MANIFEST
    if not path.is_file():
        raise RecordingError(f"{source} has no {_MANIFEST}: give the folder of one capture")
    try:
        manifest = load_json(path, inside=source)
    except ValueError as error:
        raise ForeignFileError(f"{path} {error}") from error
    if not isinstance(manifest, dict) or manifest.get("schema_version") != _SCHEMA:
        schema = manifest.get("schema_version") if isinstance(manifest, dict) else None
        raise ForeignFileError(f"{path} is of schema {schema!r}; expected {_SCHEMA}")
    found: dict[str, _Boundary] = {}
    for number, item in enumerate(manifest["boundaries"]):
        name, positions = item["id"], item["positions"]
        if not isinstance(name, str) or name in found or not positions or not all(map(_is_position, positions)):
            raise ForeignFileError(f"{path}: boundary {number} has no name of its own, or other positions than numbers")
        found[name] = _Boundary(number=number, name=name_tensor(name), positions=frozenset(positions))
    return found


def _is_position(value: object) -> bool:
    return type(value) is int and 0 <= value < ROW_PLACES


def _read_side(
    side: str, files: Sequence[tuple[int, int, Path]], boundaries: Mapping[str, _Boundary], source: Path
) -> Iterator[RankTensors]:
    captures, identities = [], {}
    for rank, _, path in files:
        record = read_torch_file(path, inside=source, what="a capture of RL-Kernel's")
        captures.append(_read_capture(record, side, rank, boundaries, path))
        identities[_identify(record, path)] = path
    if len(identities) > 1:
        named = " and ".join(str(path) for path in list(identities.values())[:2])
        raise ForeignFileError(f"{named} are of two samples: capture one at a time")
    _check_whole(side, captures, boundaries, source)
    row = 1 + max(position for boundary in boundaries.values() for position in boundary.positions)
    rows = RowTable(identities=tuple(identities), lengths=(row,))
    ranks = sorted({capture.rank for capture in captures})
    for rank in ranks:
        yield RankTensors(
            step=0,
            rank=rank,
            world_size=ranks[-1] + 1,
            entries=(capture.entry(row) for capture in captures if capture.rank == rank),
            ranks=tuple(ranks),
            rows=rows,
            update_rows=((0,),),
        )


def _read_capture(
    record: Any,  # noqa: ANN401 - of a file
    side: str,
    rank: int,
    boundaries: Mapping[str, _Boundary],
    path: Path,
) -> _Capture:
    boundary = boundaries.get(record["boundary"]) if isinstance(record, dict) else None
    if boundary is None or record.get("schema_version") != _SCHEMA or record.get("side") != side:
        raise ForeignFileError(f"{path} is no capture of {_SCHEMA} of side {side} and a boundary of the manifest")
    value, about = record["tensors"]["value"], record["metadata"]
    positions = tuple(about["stage_positions"]["value"].tolist())
    offset, width = about["feature_offsets"].get("value", 0), about["feature_sizes"]["value"]
    is_sound = (
        isinstance(value, torch.Tensor)
        and value.dim() == 2
        and len(value) == len(positions) == len(set(positions))
        and boundary.positions.issuperset(positions)
        and type(offset) is int
        and type(width) is int
        and 0 <= offset <= offset + value.shape[1] <= width
    )
    if not is_sound:
        raise ForeignFileError(f"{path}: positions, features and tensor of {boundary.name} do not fit each other")
    return _Capture(rank=rank, boundary=boundary, value=value, positions=positions, offset=offset, width=width)


def _identify(record: Mapping[str, Any], path: Path) -> str:
    identity = record.get("identity")
    if not isinstance(identity, Mapping) or any(identity.get(name) is None for name in _SAMPLE):
        raise ForeignFileError(f"{path} does not say which {', '.join(_SAMPLE)} it is of")
    return compute_json_digest([str(identity[name]) for name in _SAMPLE])[:16]


def _check_whole(side: str, captures: Sequence[_Capture], boundaries: Mapping[str, _Boundary], source: Path) -> None:
    """Raise ``ForeignFileError`` where a side lacks positions or features of a boundary."""
    held: dict[tuple[str, int], set[tuple[int, int]]] = {}
    widths: dict[str, int] = {}
    for capture in captures:
        widths[capture.boundary.name] = capture.width
        for position in capture.positions:
            span = (capture.offset, capture.offset + capture.value.shape[1])
            held.setdefault((capture.boundary.name, position), set()).add(span)
    problems = []
    for boundary in boundaries.values():
        lacking = []
        for position in sorted(boundary.positions):
            end = 0
            for start, stop in sorted(held.get((boundary.name, position), ())):
                end = max(end, stop) if start <= end else end
            if end < widths.get(boundary.name, 1):
                lacking.append(str(position))
        if lacking:
            problems.append(f"{boundary.name} at positions {list_some(lacking, _NUM_SHOWN, ', ')}")
    if problems:
        raise ForeignFileError(f"{source}: side {side} holds in part or not: {list_some(problems, _NUM_SHOWN)}")
