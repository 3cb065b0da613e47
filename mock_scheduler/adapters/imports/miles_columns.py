"""The columns that miles writes for its dashboard: one row per sample, as parquet; read by pyarrow (extra ``parquet``).

Contract: ``sample_index, response_length, total_length, tokens, loss_mask, rollout_log_probs``. They hold no rewards
and no groups: rewards are 0 and ``group_size`` rows in a row are a group, or each is one.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mock_scheduler.adapters.imports.steps import ForeignStep, ImportOptions, find_files
from mock_scheduler.adapters.rows import ForeignRow, build_batch
from mock_scheduler.errors import BatchError, ConfigError, ForeignFileError
from mock_scheduler.scheduler import DEFAULT_SCHEDULER_ID, Mode
from mock_scheduler.support.foreign_files import name_descriptor, open_regular

_PATTERN = r"(?:[^/]*/)*rollout_(eval_)?(\d+)\.parquet"
#: Values, or bytes without compression, that a file may have for each of its bytes: a mask of ones takes next to none.
_MAX_GROWTH = 64
_EXAMPLE = "rollout_12.parquet"
_COLUMNS = ("sample_index", "tokens", "response_length", "loss_mask", "rollout_log_probs")


def read_rollouts(source: Path, options: ImportOptions) -> Iterator[ForeignStep]:
    """Reads the steps of files; raises as the other readers, and ``ConfigError`` where pyarrow is not installed."""
    for file in find_files(source, _PATTERN, _EXAMPLE):
        records = _load(file.path, source if source.is_dir() else None)
        rows = [_read_row(record, number, options, file.path) for number, record in enumerate(records)]
        if not rows:
            raise BatchError(f"{file.path} holds no sample")
        lacks = [*options.assumed, "rewards", "policy_versions", "terminations"]
        if options.group_size is None:
            lacks.append("groups")
        if all(record["rollout_log_probs"] is None for record in records):
            lacks.append("rollout_logprobs")
        batch = build_batch(rows, sampling=options.sampling, scheduler_id=DEFAULT_SCHEDULER_ID, meta={})
        mode: Mode = "val" if file.parts[0] else "train"
        yield ForeignStep(step=int(file.parts[1]), mode=mode, batch=batch, lacks=tuple(lacks)).noted()


def _load(path: Path, inside: Path | None) -> list[dict[str, Any]]:
    try:
        import os

        import pyarrow.parquet as parquet  # optional, and slow to import
    except ImportError as error:
        raise ConfigError(
            f"{path} is parquet, which pyarrow reads, and it is not installed: pip install 'mock-scheduler[parquet]'"
        ) from error
    descriptor = open_regular(path, inside=inside)
    try:
        _check_sizes(parquet.read_metadata(name_descriptor(descriptor, path)), os.fstat(descriptor).st_size, path)
        table = parquet.read_table(name_descriptor(descriptor, path), columns=list(_COLUMNS), memory_map=False)
    except ForeignFileError:
        raise
    # What pyarrow raises for a file that it cannot read: its own errors are these.
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ForeignFileError(f"{path} cannot be read as parquet of miles' columns: {error}") from error
    finally:
        os.close(descriptor)
    missing = [name for name in _COLUMNS if name not in table.column_names]
    if missing:
        raise ForeignFileError(f"{path} has no column {', '.join(missing)}; it has {', '.join(table.column_names)}")
    records: list[dict[str, Any]] = table.to_pylist()
    return records


def _check_sizes(metadata: Any, size_bytes: int, path: Path) -> None:  # noqa: ANN401 - pyarrow's
    """Refuse a file that becomes far larger: run lengths and compression make much of little."""
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    columns = [group.column(number) for group in groups for number in range(group.num_columns)]
    claimed = max(
        metadata.num_rows,
        sum(column.num_values for column in columns),
        sum(column.total_uncompressed_size for column in columns),
    )
    if claimed > _MAX_GROWTH * size_bytes:
        raise ForeignFileError(
            f"{path} has {size_bytes} bytes and states {claimed} values or bytes in them: more than {_MAX_GROWTH} times"
        )


def _read_row(record: dict[str, Any], number: int, options: ImportOptions, path: Path) -> ForeignRow:
    tokens, length = record["tokens"] or [0], record["response_length"] or 0
    mask, logprobs = record["loss_mask"], record["rollout_log_probs"]
    mask = [1] * length if mask is None else mask
    if not 0 <= length <= len(tokens) or len(mask) != length or (logprobs is not None and len(logprobs) != length):
        raise BatchError(
            f"{path}: sample {number} has response_length {length} of {len(tokens)} tokens, a loss_mask of {len(mask)} "
            f"and rollout_log_probs of {None if logprobs is None else len(logprobs)}"
        )
    flags = np.array(mask, dtype=np.bool_)
    stated = np.zeros(length, dtype=np.float32) if logprobs is None else np.array(logprobs, dtype=np.float32)
    size = options.group_size or 1
    return ForeignRow(
        tokens=np.array(tokens, dtype=np.int32),
        response_mask=np.concatenate([np.zeros(len(tokens) - length, dtype=np.bool_), flags]),
        rollout_logprobs=stated[flags],
        group=number // size,
        member=number % size,
        prompt_length=len(tokens) - length,
        native={"sample_index": record["sample_index"]},
    )
