"""Writes trace files of level ``full``: every tensor a rank traces of a step, whole, in safetensors files.

This is the format, version 3::

    {trace_dir}/step_000000/rank_00000.part_000.safetensors

*Parts.* A rank's step is one or more parts, numbered from 0. All are ordinary safetensors files, written aside, fsynced
and renamed, so a file's presence is its completeness. The last part is written last and says how many there are:
its presence is the completeness of the rank's step. A step is complete where every rank that writes the trace is.
Hidden ``.*.tmp`` files are left by crashed writers; nothing reads them. Equal content gives equal bytes.

*Pieces.* A part stores pieces of tensors under ``{update:06d}/{kind}/{canonical name}``. A token tensor (its first
dimension is ``token``: all tokens of the step's batch, row after row, without padding) may have several pieces from one
rank, one for each micro-batch; pieces after the first have ``#1``, ``#2``, ... behind the name, counted over all parts.
A piece has its local shape, or is flat where the rank owns only a range of the flattened local tensor.

*Header.* One metadata key, ``mock_scheduler.trace``, holds canonical JSON that carries its own SHA-256 as ``digest``
(``digests.seal``). It is checked before anything else in the header is believed:

- ``format_version``, ``step``, ``global_rank``, ``world_size``, ``coordinates`` (of the rank, by axis) and ``part``;
- ``tensors``: by stored name ``update``, ``kind``, ``name``, ``dtype``, ``global_shape``, ``local_shape``, ``splits``,
  ``flat_range`` (``[start, stop]`` of the flattened local tensor, or null), ``dims`` (the name of each dimension; empty
  where nobody said), ``is_masked`` (a token tensor defined at some tokens only), ``sha256``, ``crc32``, and ``place``
  where kind and name do not say when the tensor was computed: its rank in that order among those of its update;
- ``blocks``: lists of ``[local start, global start, length]``. A split is ``[dim, position in blocks]``: its indices
  of the local tensor are its indices of the whole one. Local indices in no block belong to no canonical element;
- ``ending``, in the last part only: ``num_parts``; ``earlier_parts``, the ``digest`` of each earlier header, so
  one header seals a rank's whole step; and ``footer`` with

  - ``rows``: ``identities`` and ``lengths`` of the batch's rows in canonical order; ``update_rows``: by update, the
    positions of the rows it trains on. Where no rank knows the batch, ``rows`` are the rank's own in any order, with
    ``starts``, the place of each one's first token (``entries.virtual_start``); a token dimension then has the size
    2^62, and readers close the gaps between the rows (``trace.rows``);
  - ``ranks``: the global ranks that write the trace, empty for all; ``kinds``, ``patterns``, ``exclude``: the tensors
    selected;
  - ``unobserved``: ``[kind, name, reason]`` of selected tensors not shown by the model; ``ledgers``:
    by ledger ``calls``, each ``[operation, group, dtype, number of elements]``, and ``order``, a position in ``calls``
    for each time one was made.

*Digests.* ``sha256`` and ``crc32`` are over dtype and shape, as in ``float32[2, 3]``, and then the bytes: a tensor
moved, turned round or converted has another. Every read is checked against the CRC-32. It finds any damage of
up to 32 adjacent bits for certain and costs a quarter of SHA-256; ``TraceReader.verify`` checks every SHA-256. Nothing
is concluded from equal digests: bytes are compared, and a digest that contradicts them is an error.

Nothing is pickled, no code runs on load. ``writing`` writes a step in the background, ``reader`` reads.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from mock_scheduler.errors import TraceError
from mock_scheduler.support.digests import JSON, canonical_json, seal
from mock_scheduler.support.files import rename_away, written_aside
from mock_scheduler.support.tensor_bytes import has_plain_bytes, shape_text
from mock_scheduler.trace.entries import StepFooter, TraceEntry
from mock_scheduler.trace.full.header import footer_as_json, pieces_as_json, rank_step_as_json
from mock_scheduler.trace.full.memory import begin_copy
from mock_scheduler.trace.full.pieces import PieceRecord, RankStep, check_spec, stored_name
from mock_scheduler.trace.shards import ShardSpec

FORMAT_VERSION = 3
METADATA_KEY = "mock_scheduler.trace"

STEP_FOLDER = re.compile(r"step_(\d{6,})")
PART_FILE = re.compile(r"rank_(\d{5,})\.part_(\d{3,})\.safetensors")
#: What ``sketch.files`` writes instead.
SKETCH_FILE = re.compile(r"rank_(\d{5,})\.sketch\.safetensors")
#: What a rank's only file was called up to format version 2.
OLD_RANK_FILE = re.compile(r"rank_\d{5,}\.safetensors")

#: What both safetensors 0.8 and this format can hold.
STORABLE_DTYPES = frozenset(
    {
        torch.bool,
        *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
        *(torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
        *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz),
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """Holds the statements of the last part alone. earlier_parts: the digests of the headers before it."""

    footer: StepFooter
    earlier_parts: tuple[str, ...] = ()


def part_path(trace_dir: Path, rank_step: RankStep, part: int) -> Path:
    """Returns the file of one part of a rank's step."""
    return step_folder(trace_dir, rank_step.step) / part_name(rank_step.place.global_rank, part)


def part_name(global_rank: int, part: int = 0) -> str:
    """Returns the name of a rank's part."""
    return f"rank_{global_rank:05d}.part_{part:03d}.safetensors"


def sketch_name(global_rank: int) -> str:
    """Returns the name of a rank's file in a trace of level ``sketch``."""
    return f"rank_{global_rank:05d}.sketch.safetensors"


def step_folder(trace_dir: Path, step: int) -> Path:
    """Returns the folder of one step."""
    return trace_dir / f"step_{step:06d}"


def find_steps(trace_dir: Path) -> list[tuple[int, Path]]:
    """The steps of a trace of either level, and their folders, by the folders' names; empty where there is no trace."""
    named = ((STEP_FOLDER.fullmatch(path.name), path) for path in sorted(trace_dir.glob("step_*")))
    return [(int(name[1]), path) for name, path in named if name is not None and path.is_dir()]


def remove_steps_from(trace_dir: Path, step: int) -> None:
    """Remove the traced steps a resumed run computes anew; earlier ones stay. One rank calls it.

    The others write their first trace after the first batch, and wait for each other before it. A step is gone as a
    whole, also where this is interrupted. Raises ``TraceError`` where it cannot be removed.
    """
    for number, folder in find_steps(trace_dir):
        if number >= step:
            try:
                shutil.rmtree(rename_away(folder))
            except OSError as error:
                raise TraceError(f"{folder}: a step that is computed anew cannot be removed: {error}") from error


def check_unwritten(trace_dir: Path, rank_step: RankStep) -> None:
    """Raise ``TraceError`` where a part, or the sketches, of this rank's step are there already.

    The folder is not listed: all ranks of a run would list the files of all.
    """
    rank = rank_step.place.global_rank
    # A rank writes its first part before all others, and removes it after them.
    for name in (part_name(rank), sketch_name(rank)):
        path = step_folder(trace_dir, rank_step.step) / name
        if path.exists():
            raise _already_traced(path)


def write_part(
    trace_dir: Path,
    rank_step: RankStep,
    *,
    part: int,
    tensors: Mapping[str, torch.Tensor],
    records: Sequence[PieceRecord],
    ending: Ending | None,
) -> str:
    """Write one part, whole or not at all; return its header's digest.

    tensors: on the CPU and contiguous, by stored name. ending: given for the last part. Raises ``TraceError`` where the
    file is there already or cannot be written.
    """
    path = part_path(trace_dir, rank_step, part)
    content: dict[str, JSON] = {
        "format_version": FORMAT_VERSION,
        **rank_step_as_json(rank_step),
        "part": part,
        **pieces_as_json(records),
    }
    if ending is not None:
        # Only the last part has it: its presence is the completeness of the rank's step.
        content["ending"] = {
            "num_parts": part + 1,
            "earlier_parts": list(ending.earlier_parts),
            "footer": footer_as_json(ending.footer),
        }
    sealed = seal(content)
    # A rank's step is written once: a run that is resumed removes the steps that it computes anew first.
    if path.exists():
        raise _already_traced(path)
    try:
        with written_aside(path) as aside:
            # Sorted, so that equal content gives equal bytes.
            save_file(dict(sorted(tensors.items())), aside, metadata={METADATA_KEY: canonical_json(sealed)})
    except (OSError, SafetensorError) as error:
        raise TraceError(f"{path}: the trace cannot be written: {error}") from error
    return str(sealed["digest"])


def _already_traced(path: Path) -> TraceError:
    return TraceError(
        f"{path} exists: this step is traced already; choose another output_dir or trace_dir, or remove the trace"
    )


@dataclass(slots=True)
class EntryIntake:
    """Checks a rank's entries of one step, names them and copies them to the CPU.

    ``take`` raises ``TraceError`` for a tensor that does not have its spec's shape or is of a dtype that cannot be
    stored, for a spec contradicting itself, and for a tensor, or the same places of a token tensor, given twice.
    """

    rank_step: RankStep
    _given: dict[str, set[ShardSpec]] = field(default_factory=dict)

    def take(self, entry: TraceEntry) -> tuple[str, TraceEntry, Callable[[], None]]:
        """The name to store it under, the entry with a copy of just the elements this rank owns, and what waits for it.

        The copy may be on its way from a GPU until the last of the three was called.
        """
        where = f"{self.rank_step.describe()}: {entry.kind} of {entry.spec.name}"
        tensor = entry.tensor.detach()
        _check_entry(entry, where)
        spec = entry.spec
        name = stored_name(entry.update, entry.kind, spec.name)
        given = self._given.setdefault(name, set())
        # Only token tensors come in pieces, one for each micro-batch.
        if spec in given or (given and not entry.is_by_token):
            raise TraceError(f"{self.rank_step.describe()}: {name} is given twice")
        if spec.flat_range is not None and tuple(tensor.shape) == spec.local_shape:
            tensor = tensor.reshape(-1)[slice(*spec.flat_range)]
        # A copy, since training overwrites its tensors while this one waits to be written.
        owned, wait = begin_copy(tensor)
        given.add(spec)
        name = stored_name(entry.update, entry.kind, spec.name, piece=len(given) - 1)
        return name, replace(entry, tensor=owned), wait


def _check_entry(entry: TraceEntry, where: str) -> None:
    spec, tensor = entry.spec, entry.tensor
    if not has_plain_bytes(tensor) or tensor.dtype not in STORABLE_DTYPES:
        raise TraceError(f"{where} is {shape_text(tensor)}, which safetensors cannot hold")
    if "#" in spec.name:
        raise TraceError(f"{where}: a traced name has no '#', which numbers the pieces of a tensor")
    try:
        check_spec(spec)
    except ValueError as error:
        raise TraceError(f"{where}: the shard spec contradicts itself: {error}") from error
    expected = [spec.local_shape]
    if spec.flat_range is not None:
        expected.append((spec.flat_range[1] - spec.flat_range[0],))
    if tuple(tensor.shape) not in expected:
        wanted = " or ".join(str(list(choice)) for choice in expected)
        raise TraceError(f"{where} has shape {list(tensor.shape)}, its shard spec says {wanted}")
    if entry.dims and len(entry.dims) != len(spec.global_shape):
        raise TraceError(f"{where} has {len(entry.dims)} names of {len(spec.global_shape)} dimensions")
