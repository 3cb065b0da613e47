"""A run keeps its metrics and files here: one JSON object per step, TensorBoard, seconds by name, and the error at its
end.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import stat
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from mock_scheduler.errors import ConfigError, ExitCode, MockSchedulerError, TraceError, redact
from mock_scheduler.support.files import (
    AppendedLines,
    encode_json,
    publish_new,
    remove_leftovers,
    whole_lines,
    written_aside,
)
from mock_scheduler.support.foreign_files import read_raw_lines
from mock_scheduler.support.run_files import (
    CODE_FOLDER,
    CONFIG_FILE,
    ERROR_FILE,
    LEDGER_FILE,
    METRICS_FILE,
    OPERATIONS_FOLDER,
    RUN_FILE,
    START_FILE,
    START_FOLDER,
    TENSORBOARD_FOLDER,
    TRACE_FOLDER,
)
from mock_scheduler.support.terminal_streams import print_message

logger = logging.getLogger("mock_scheduler.run")

# Of a disk that is broken or full, and of a process with too many files: no program's fault.
_DISK_ERRORS = frozenset({errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EMFILE, errno.ENFILE})
_FILES = (CONFIG_FILE, METRICS_FILE, LEDGER_FILE, RUN_FILE, START_FILE, ERROR_FILE)
_FOLDERS = (CODE_FOLDER, TRACE_FOLDER, START_FOLDER, OPERATIONS_FOLDER, TENSORBOARD_FOLDER)
_CONTINUE = ", or continue that run with resume_from_checkpoint"


class MetricsWriter:
    """Writes metrics on one rank; on all others it does nothing.

    ``resumed_at``: the first step of a resumed run. Its log goes on from there, and logged steps from there on are
    dropped, since this run computes them anew. ``None`` starts a new log; where the run fails before its first step it
    is removed, so that the next run may have the folder.
    """

    def __init__(
        self,
        output_dir: Path,
        *,
        enabled: bool,
        tensorboard: bool,
        resumed_at: int | None = None,
        file_name: str = METRICS_FILE,
    ) -> None:
        self._file: AppendedLines | None = None
        self._board = None
        if not enabled:
            return
        self._path = output_dir / file_name
        self._may_be_removed = resumed_at is None
        try:
            _begin_log(self._path, resumed_at=resumed_at)
            # Closed in __exit__, which the run's with-statement guarantees.
            self._file = AppendedLines(self._path)
        except OSError as error:
            raise TraceError(f"{self._path}: metrics cannot be written: {_words(error)}; it stays as it was") from error
        if tensorboard:
            # Imported here because it takes a second and other ranks do not need it.
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(output_dir / TENSORBOARD_FOLDER), purge_step=resumed_at)

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._file is not None:
                self._file.close()
                if error is not None and self._may_be_removed and not (self._path.parent / TRACE_FOLDER).exists():
                    self._path.unlink(missing_ok=True)
        except OSError as problem:
            if error is None:  # else the run ends with what failed first
                raise self._unsynced(problem) from problem
        finally:
            if self._board is not None:
                self._board.close()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes one line per step, floats at full precision; NaN and infinity become text, since JSON has no such
        numbers.
        """
        if self._file is None:
            return
        values = {name: value if math.isfinite(value) else str(value) for name, value in sorted(metrics.items())}
        self._may_be_removed = False
        try:
            self._file.append(json.dumps({"step": step, "metrics": values}, allow_nan=False))
        except OSError as error:
            raise TraceError(
                f"{self._path}: step {step} cannot be logged: {_words(error)}; all lines before it are whole"
            ) from error
        if self._board is not None:
            for name, value in metrics.items():
                self._board.add_scalar(name, value, step)

    def sync(self) -> None:
        """Has all that was logged on the disk: before a checkpoint is, or a resumed run would lack these steps."""
        if self._file is not None:
            try:
                self._file.sync()
            except OSError as error:
                raise self._unsynced(error) from error

    def _unsynced(self, error: OSError) -> TraceError:
        return TraceError(
            f"{self._path}: metrics may not be on the disk: {_words(error)}; look at the disk, and resume"
        )


def _words(error: OSError) -> str:
    return error.strerror or str(error)


def _begin_log(path: Path, *, resumed_at: int | None) -> None:
    """Puts a log in place that ends before the first step of this run; ``None``: an empty one.

    The older log is replaced, never rewritten in place: a kill at any moment leaves one of the two.
    """
    kept = [] if resumed_at is None or not path.exists() else _lines_before(path, resumed_at)
    with written_aside(path) as aside:
        aside.write_bytes(b"".join(kept))


def _lines_before(path: Path, step: int) -> list[bytes]:
    def on_torn(num_bytes: int) -> None:
        logger.warning(
            "%s: its last line was not written to its end (a full disk, or a machine that went down): these %d bytes "
            "are cut off",
            path,
            num_bytes,
        )

    lines = whole_lines(read_raw_lines(path), on_torn)
    return [line + b"\n" for number, line in enumerate(lines, 1) if _step_of(line, where=f"{path}:{number}") < step]


def _step_of(line: bytes, *, where: str) -> int:
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise TraceError(
            f"{where} is no line of metrics: {error!r}; it was changed since the run wrote it. Remove the line, or the "
            "file, to resume without them"
        ) from error
    if not isinstance(step, int):
        raise TraceError(f"{where}: step is {step!r}, expected a whole number")
    return step


def prepare_output_dir(output_dir: Path, *, resume: bool, advice: str = _CONTINUE) -> None:
    """Make the folder, and refuse to mix two runs in it. One rank calls it.

    advice: the user's further way out, which ends the message.

    Raises:
        ConfigError: the folder holds the metrics of another run, cannot be made or written, or has a pipe, a device, a
            folder or a file in the place of what the run writes.
    """
    if os.path.lexists(output_dir / METRICS_FILE) and not resume:
        raise ConfigError(
            f"output_dir {output_dir} holds the metrics of another run; choose another output_dir, remove the folder"
            f"{advice}"
        )
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        if not os.access(output_dir, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        in_the_way = [
            *(output_dir / name for name in _FILES if _is_other(output_dir / name, stat.S_ISREG)),
            *(output_dir / name for name in _FOLDERS if _is_other(output_dir / name, stat.S_ISDIR)),
        ]
    except OSError as error:
        raise ConfigError(
            f"output_dir {output_dir} cannot be made or written: {error.strerror}; set another output_dir"
        ) from error
    if in_the_way:
        named = ", ".join(str(path) for path in in_the_way)
        raise ConfigError(f"{named}: neither the file nor the folder that a run writes there; remove it")


def _is_other(path: Path, is_kind: Callable[[int], bool]) -> bool:
    """Says whether something of another kind lies there, links followed."""
    try:
        return not is_kind(path.stat().st_mode)
    except FileNotFoundError:
        return False


def remove_unfinished_files(output_dir: Path) -> None:
    """Removes the hidden files that a killed run was writing; nothing reads them. One rank calls it, before any writes.

    Other ranks write their first file after the first batch, and wait for each other before it.
    """
    remove_leftovers(output_dir)
    for folder in (output_dir / TRACE_FOLDER, output_dir / OPERATIONS_FOLDER):
        for path in (folder, *folder.glob("step_*")):
            remove_leftovers(path)


def report_failure(error: BaseException, output_dir: Path | None, *, global_rank: int, started_s: float) -> int:
    """Says on the terminal and in ``error.json`` why the run ended; returns the process's exit code. Never raises.

    Our own errors, and those of a disk, print their message, all others their traceback. Of several failing ranks the
    first writes the file and prints the message; the others print one line. A problem with the file goes to the
    terminal.

    Args:
        started_s: when this process started, in seconds since the epoch; an older file belongs to an earlier run.
    """
    exit_code = failure_exit_code(error)
    content = {
        "type": type(error).__name__,
        "message": redact(str(error)),
        "exit_code": exit_code,
        "global_rank": global_rank,
    }
    prefix = f"[rank {global_rank}] {type(error).__name__}"
    try:
        is_first = output_dir is None or _claim_error_file(output_dir / ERROR_FILE, content, started_s=started_s)
    except OSError as problem:
        is_first = True
        print_message(f"[rank {global_rank}] {ERROR_FILE} cannot be written: {problem}")
    if not is_first:
        print_message(f"{prefix}: {str(error).splitlines()[0] if str(error) else ''}")
        return exit_code
    is_known = isinstance(error, MockSchedulerError) or (isinstance(error, OSError) and error.errno in _DISK_ERRORS)
    text = str(error) if is_known else "".join(traceback.format_exception(error))
    print_message(f"{prefix}: {text}{_describe_earlier(error)}")
    return exit_code


def _describe_earlier(error: BaseException) -> str:
    """Describes the error that was ending the run already when ``error`` was raised, such as a step's before a write's.

    Empty for errors of other libraries: their traceback holds it.
    """
    earlier = None if error.__suppress_context__ else error.__context__
    if earlier is None or not isinstance(error, MockSchedulerError):
        return ""
    return f"\nThe run was ending already, with {type(earlier).__name__}: {earlier}"


def failure_exit_code(error: BaseException) -> int:
    """An error of ours has its own; a file that cannot be read or written is 5; anything else, a lost peer too, 70."""
    if isinstance(error, MockSchedulerError):
        return int(error.exit_code)
    is_file_error = isinstance(error, OSError) and not isinstance(error, ConnectionError)
    return int(ExitCode.USAGE if is_file_error else ExitCode.INTERNAL)


def _claim_error_file(path: Path, content: Mapping[str, Any], *, started_s: float) -> bool:
    """Write the file unless another rank of this run has; returns whether this one did."""
    if path.is_file() and path.stat().st_mtime < started_s:
        path.unlink(missing_ok=True)
    try:
        publish_new(path, encode_json(content))
    except FileExistsError:
        return False
    return True


@dataclass(kw_only=True, slots=True)
class Clock:
    """Holds seconds by name, for one step and for the run."""

    step: dict[str, float] = field(default_factory=dict)
    total: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Add the block's seconds to ``time/{name}``."""
        started_s = time.perf_counter()
        try:
            yield
        finally:
            elapsed_s = time.perf_counter() - started_s
            for table in (self.step, self.total):
                table[name] = table.get(name, 0.0) + elapsed_s

    def take(self) -> dict[str, float]:
        """Returns this step's seconds as metrics, and start the next step's."""
        metrics = {f"time/{name}": seconds for name, seconds in self.step.items()}
        self.step = {}
        return metrics
