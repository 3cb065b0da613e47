"""The files that an attached run leaves in its output folder: rank 0 writes them, but for the trace and errors."""

from __future__ import annotations

import platform
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from mock_scheduler.config.instruments import AttachedRun
from mock_scheduler.config.loading import dump_config
from mock_scheduler.errors import ConfigError, MockSchedulerError, TraceError
from mock_scheduler.ledger import Ledger
from mock_scheduler.support.digests import JSON
from mock_scheduler.support.files import save_json, save_text
from mock_scheduler.support.loaded_code import note_loaded_code, save_loaded_code
from mock_scheduler.support.local_key import mark_own
from mock_scheduler.support.run_files import CONFIG_FILE, LEDGER_FILE, RUN_FILE
from mock_scheduler.support.run_output import MetricsWriter, prepare_output_dir, remove_unfinished_files, report_failure
from mock_scheduler.support.versions import read_package_versions

COMPLETED = "completed"


class RunFiles:
    """One rank's part of them; every rank has one. ``is_writer``: this is rank 0."""

    def __init__(self, run: AttachedRun, *, is_writer: bool) -> None:
        self._run = run
        self._output_dir = Path(run.output_dir)
        self._is_writer = is_writer
        self._open = ExitStack()
        self._metrics: MetricsWriter | None = None
        self._started_s = time.perf_counter()

    def begin(self) -> None:
        """Makes the folder and stores the configuration.

        Raises:
            ConfigError: the folder holds the metrics of another run, or cannot be made.
            TraceError: the metrics cannot be written.
        """
        note_loaded_code()
        if not self._is_writer:
            return
        prepare_output_dir(self._output_dir, resume=False, advice=", or name another one in the run file")
        config_file = self._output_dir / CONFIG_FILE
        with _naming(self._output_dir, ConfigError):
            (self._output_dir / RUN_FILE).unlink(missing_ok=True)
            remove_unfinished_files(self._output_dir)
            save_text(config_file, dump_config(self._run))
        mark_own(config_file)
        self._metrics = self._open.enter_context(MetricsWriter(self._output_dir, enabled=True, tensorboard=False))

    def write_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes the line of one step."""
        if self._metrics is not None:
            self._metrics.write(step, metrics)

    def end(self, *, status: str, layout: str, world_size: int, facts: Mapping[str, JSON]) -> None:
        """Writes what the run says about itself. facts: further keys of ``run.json``.

        Raises:
            TraceError: a file cannot be written.
        """
        with _naming(self._output_dir, TraceError):
            save_loaded_code(self._output_dir)
        if not self._is_writer:
            return
        self._open.close()
        self._metrics = None
        content = {
            "status": status,
            "mode": "attached",
            "layout": layout,
            "world_size": world_size,
            "wall_s": time.perf_counter() - self._started_s,
            "rollout_s": 0.0,
            "validation_s": 0.0,
            "packages": {"python": platform.python_version(), **read_package_versions()},
            **facts,
        }
        with _naming(self._output_dir, TraceError):
            Ledger().save(self._output_dir / LEDGER_FILE)
            save_json(self._output_dir / RUN_FILE, content)


@contextmanager
def _naming(folder: Path, kind: type[MockSchedulerError]) -> Iterator[None]:
    """Makes an error of the file system one of ours, which ends all ranks with its message."""
    try:
        yield
    except MockSchedulerError:
        raise
    except OSError as error:
        raise kind(f"output_dir {folder} cannot be written: {error.strerror or error}") from error


@contextmanager
def edge(run: AttachedRun, global_rank: int, started_s: float) -> Iterator[None]:
    """Ends the process where the block raises an error of ours: with its message, ``error.json`` and its exit code."""
    try:
        yield
    except MockSchedulerError as error:
        Path(run.output_dir).mkdir(parents=True, exist_ok=True)
        exit_code = report_failure(error, Path(run.output_dir), global_rank=global_rank, started_s=started_s)
        raise SystemExit(exit_code) from error
