"""The step file: one safetensors file that holds one batch, with digests over every bit of it.

``header`` has the format, ``layout`` the tensors of a batch, ``stored_tensors`` their bytes.

Contract: equal content gives equal bytes, whatever the rows' arrival order. Opening reads and checks the header only. A
load touches the bytes of its rows in each tensor (the offsets of rows are read whole), verifies just the blocks these
lie in, and unpickles nothing; its tensors are views of the very verified memory, which is the reader's own: nothing
written to one or to the file reaches the other. Every failure names the file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from mmap import mmap
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from mock_scheduler.batch import RolloutBatch
from mock_scheduler.errors import BatchError, CorruptRecordingError, RecordingError
from mock_scheduler.recording.step.header import StepHeader, encode_tensors, parse_head, read_head
from mock_scheduler.recording.step.layout import (
    IDENTITY_TENSORS,
    RowKeys,
    StepLayout,
    pack_batch,
    read_layout,
    unpack_batch,
    unpack_keys,
)
from mock_scheduler.recording.step.step_info import StepInfo
from mock_scheduler.recording.step.stored_tensors import BlockReader, TensorRange, view_array, view_raw
from mock_scheduler.recording.storage import ByteSource
from mock_scheduler.recording.storage.byte_sources import MemorySource
from mock_scheduler.support.digests import JSON
from mock_scheduler.support.raw_tensors import RawTensor

StepBuffer: TypeAlias = "bytes | bytearray | memoryview | mmap"
_MAX_KEPT_HEAD_BYTES = 64 * 2**10


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedStep:
    """A step file in memory. ``pieces``: its bytes in order, views of the batch's tensors where that is possible, so
    the batch must not change before they are written; ``digest``: that of ``StepFile.digest``."""

    pieces: tuple[bytes | memoryview, ...]
    digest: str

    @property
    def size_bytes(self) -> int:
        """Returns the size of the file."""
        return sum(len(piece) for piece in self.pieces)

    def to_bytes(self) -> bytes:
        """Returns the whole file."""
        return b"".join(self.pieces)


def encode_step(batch: RolloutBatch, info: StepInfo) -> EncodedStep:
    """Returns the step file of a batch.

    Raises ``RecordingError`` where ``info`` holds a value other than JSON (NaN, an infinity, an object), naming it, or
    where the step is too large for the format.
    """
    tensors, content = pack_batch(batch)
    content["info"] = info.as_json()
    pieces, digest = encode_tensors(content, tensors, name=f"step {info.step}")
    return EncodedStep(pieces=pieces, digest=digest)


def decode_step(
    data: StepBuffer, *, source: str = "step in memory", verify: bool = True
) -> tuple[RolloutBatch, StepInfo]:
    """Returns the batch and the step's description of itself; the inverse of ``encode_step``, bit for bit.

    Tensors are views of ``data`` where it is writable (a bytearray), else of one copy. Raises as
    ``StepFile.open`` and ``StepFile.load``, naming ``source``.
    """
    view = memoryview(data)
    buffer = MemorySource(bytearray(view) if view.readonly else view, path=source)
    step = StepFile.open(buffer, name=source)
    return step.load(verify=verify), step.info


class StepFile:
    """One opened step file; made by ``open``."""

    def __init__(
        self, source: ByteSource, *, name: str, header: StepHeader, layout: StepLayout, content: dict[str, Any]
    ) -> None:
        self._source = source
        self._reader = BlockReader(source, name=name)
        self._header = header
        self._layout = layout
        self._content = content
        self.name = name
        self.info = StepInfo.from_json(content["info"])

    @classmethod
    def open(cls, source: ByteSource, *, name: str) -> StepFile:
        """Read and check the header; ``name`` is the file's, for messages.

        Raises ``CorruptRecordingError`` where any bit of it changed or it is not as long as it says, ``RecordingError``
        where another version wrote it.
        """
        head = read_head(source, name=name)
        describe = _describe if len(head) <= _MAX_KEPT_HEAD_BYTES else _describe.__wrapped__
        with _as_corrupt(name):
            header, layout = describe(head, source.size_bytes, name)
            return cls(source, name=name, header=header, layout=layout, content=json.loads(header.content))

    @property
    def digest(self) -> str:
        """SHA-256 (hex) that stands for all the file holds: equal exactly where two files are."""
        return self._header.digest

    @property
    def size_bytes(self) -> int:
        """Returns the size of the file, decompressed."""
        return self._source.size_bytes

    @property
    def num_bytes_read(self) -> int:
        """Counts bytes read so far, of the header and of the tensors."""
        return self._header.size_bytes + self._reader.num_bytes_read

    @property
    def num_rows(self) -> int:
        """Counts rows in the file."""
        return self._layout.num_rows

    @property
    def num_trajectories(self) -> int:
        """Trajectories in the file; fewer than rows where a row is a turn."""
        return self._layout.num_trajectories

    @property
    def group_size(self) -> int | None:
        """The group size of the batch as it was written."""
        group_size: int | None = self._content["group_size"]
        return group_size

    @property
    def sampling(self) -> Mapping[str, JSON]:
        """Returns the sampling of the batch, as JSON."""
        sampling: Mapping[str, JSON] = self._content["sampling"]
        return sampling

    @property
    def meta(self) -> Mapping[str, JSON]:
        """Returns the meta of the batch."""
        meta: Mapping[str, JSON] = self._content["meta"]
        return meta

    @property
    def extra_kinds(self) -> Mapping[str, JSON]:
        """Returns extra -> its kind, dtype and shape of an entry: equal in all shards with rows."""
        entries = {name: self._header.entries[f"extras/{name}"] for name in self._content["extras"]}
        return {
            name: [kind, entries[name].dtype, list(entries[name].shape[1:])]
            for name, kind in self._content["extras"].items()
        }

    def load(self, rows: range | None = None, *, verify: bool = True) -> RolloutBatch:
        """Returns the rows ``rows`` (contiguous; None: all) as a batch.

        ``group_size`` is the file's where the groups of the given rows are whole, else None. ``verify`` False skips the
        digests, for bytes verified before. Raises ``CorruptRecordingError`` naming the tensors in whose
        blocks any bit changed.
        """
        rows = range(self.num_rows) if rows is None else rows
        if rows.step != 1 or not 0 <= rows.start <= rows.stop <= self.num_rows:
            raise ValueError(f"{self.name}: {rows} is no contiguous part of {self.num_rows} rows")
        with _as_corrupt(self.name):
            return self._load_all(verify=verify) if len(rows) == self.num_rows else self._load_some(rows, verify=verify)

    def verify(self) -> None:
        """Read the whole file, check every digest and that it holds a batch; raises as ``load``.

        Checks anew too the one fact a load believes of a file with right digests: the digest of every prompt.
        """
        batch = self.load()
        with _as_corrupt(self.name):
            batch.check_again()

    def read_keys(self) -> RowKeys:
        """The identities and prompts of all rows, without their tokens; raises as ``load``."""
        with _as_corrupt(self.name):
            arrays = self._read(dict.fromkeys((*IDENTITY_TENSORS, "prompt_digests")), verify=True).arrays
            return unpack_keys(arrays, self._content["scheduler_ids"])

    def trajectory_starts(self) -> list[int]:
        """The first row of every trajectory, ascending; raises as ``load``."""
        if self.num_trajectories == self.num_rows:
            return list(range(self.num_rows))
        with _as_corrupt(self.name):
            arrays = self._read(dict.fromkeys(IDENTITY_TENSORS), verify=True).arrays
            starts: list[int] = [0, *(np.flatnonzero(_key_changes(arrays, num_numbers=3)) + 1).tolist()]
            self._check_num_trajectories(len(starts))
        return starts

    def _load_all(self, *, verify: bool) -> RolloutBatch:
        loaded = self._read(dict.fromkeys(self._header.entries), verify=verify)
        # Digests show that the file is as written, not that its offsets make sense: they are used as indices next.
        self._check_offsets(loaded.arrays)
        batch = unpack_batch(loaded.arrays, loaded.tensors, self._content, group_size=self.group_size)
        # The batch has shown its rows to be in the order of their identities.
        num_changes = int(np.count_nonzero(_key_changes(loaded.arrays, num_numbers=3)))
        self._check_num_trajectories(num_changes + 1 if len(batch) else 0)
        return batch

    def _load_some(self, rows: range, *, verify: bool) -> RolloutBatch:
        # Offsets are read whole: each of them must rise for any slice by them to be sound.
        offsets = self._read(dict.fromkeys(self._layout.offsets), verify=verify).arrays
        self._check_offsets(offsets)
        parts = {name: range(int(values[rows.start]), int(values[rows.stop])) for name, values in offsets.items()}
        wanted = {name: rows if o is None else parts[o] for name, o in self._layout.columns.items()}
        # With the rows before and after, which tell whether a group is cut.
        around = range(max(rows.start - 1, 0), min(rows.stop + 1, self.num_rows))
        arrays, tensors = self._read({**wanted, **dict.fromkeys(IDENTITY_TENSORS, around)}, verify=verify)
        changes = _key_changes(arrays, num_numbers=2)
        is_whole = all(changes[end - around.start - 1] for end in (rows.start, rows.stop) if 0 < end < self.num_rows)
        for name in IDENTITY_TENSORS:
            arrays[name] = arrays[name][rows.start - around.start :][: len(rows)]
        for name, values in offsets.items():
            # A batch's own offsets begin at 0.
            arrays[name] = values[rows.start : rows.stop + 1] - values[rows.start]
        return unpack_batch(arrays, tensors, self._content, group_size=self.group_size if is_whole else None)

    def _read(self, wanted: Mapping[str, range | None], *, verify: bool) -> _Loaded:
        """Returns tensors by name, each whole (None) or some of its entries along the first dimension."""
        entries, extra_values = self._header.entries, self._layout.extra_values
        ranges = [TensorRange.of(entries[name], part) for name, part in wanted.items()]
        views = self._reader.read(ranges, verify=verify)
        loaded = _Loaded({}, {})
        for name, part in wanted.items():
            if name in extra_values:
                loaded.tensors[name] = view_raw(views[name], entries[name], entries=part)
            else:
                loaded.arrays[name] = view_array(views[name], entries[name], entries=part)
        return loaded

    def _check_offsets(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Raises ``ValueError`` unless each of the offsets rises from 0 to the entries of its columns."""
        ends = {}
        for name in self._layout.offsets:
            offsets = arrays[name]
            if (offsets[1:] < offsets[:-1]).any():
                raise ValueError(f"{name} do not rise")
            ends[name] = (int(offsets[0]), int(offsets[-1]))
        for column, its_offsets in self._layout.columns.items():
            num_entries = self._header.entries[column].shape[0]
            if its_offsets is not None and ends[its_offsets] != (0, num_entries):
                raise ValueError(f"{its_offsets} do not rise from 0 to the {num_entries} entries of {column}")

    def _check_num_trajectories(self, found: int) -> None:
        if found != self.num_trajectories:
            raise ValueError(f"{found} trajectories; its header says {self.num_trajectories}")


class _Loaded(NamedTuple):
    """Holds tensors read: the values of extras, of any dtype, as bytes, and all others as arrays, by name."""

    arrays: dict[str, npt.NDArray[Any]]
    tensors: dict[str, RawTensor]


@lru_cache(maxsize=256)
def _describe(head: bytes, size_bytes: int, name: str) -> tuple[StepHeader, StepLayout]:
    """Parses and checks a header.

    The last ones are kept, since a run checks the headers of all its steps before it loads them one by one. It is the
    very bytes of the header that are looked up, so a file changed in between is never taken for the old one.
    """
    header = parse_head(head, size_bytes=size_bytes, name=name)
    kinds = {entry.name: (entry.dtype, entry.shape) for entry in header.entries.values()}
    return header, read_layout(json.loads(header.content), kinds)


def _key_changes(arrays: Mapping[str, npt.NDArray[Any]], *, num_numbers: int) -> npt.NDArray[np.bool_]:
    """Whether row i + 1 differs from row i in its scheduler or in the first numbers of its identity."""
    # Rows lie in identity order, so a trajectory or group ends where its key changes.
    numbers, schedulers = arrays["identities"], arrays["scheduler_index"]
    changes: npt.NDArray[np.bool_] = schedulers[1:] != schedulers[:-1]
    for column in range(num_numbers):
        changes |= numbers[1:, column] != numbers[:-1, column]
    return changes


@contextmanager
def _as_corrupt(name: str) -> Iterator[None]:
    """Turns the errors of a file with right digests but senseless content into ``CorruptRecordingError``."""
    try:
        yield
    except RecordingError:
        raise
    except (BatchError, KeyError, IndexError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise CorruptRecordingError(f"{name}: content is no rollout batch: {error!r}") from error
