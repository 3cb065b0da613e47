"""Loads, compares and writes the recorded steps of a run.

Contract: every event is counted in the ledger, and logged by the one process with that duty.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace

from mock_scheduler.batch import RolloutBatch
from mock_scheduler.errors import ContractError, SchedulerError, StepInTwoFormsError, StepNotFoundError
from mock_scheduler.proxy.checks import BatchReports
from mock_scheduler.proxy.read_ahead import ReadAhead
from mock_scheduler.proxy.routing import Route, Router, request_stand_in
from mock_scheduler.proxy.settings import ProxySettings
from mock_scheduler.recording.inspection.diff import compare_batches
from mock_scheduler.recording.paths import format_present, parse_folder
from mock_scheduler.recording.reading.reader import RecordedStep, RecordingReader
from mock_scheduler.recording.step.step_info import GeneratorStates, StepInfo, info_differences
from mock_scheduler.recording.writing.opening import RecordingWriter, WrittenStep
from mock_scheduler.scheduler import RolloutRequest
from mock_scheduler.support.digests import JSON

logger = logging.getLogger("mock_scheduler.rollout_mock")

_NUM_ROWS_SHOWN = 10


class RecordingAccess:
    """The proxy's way to its recording; ``reader``, ``writer`` None: this process does not read, or not write.

    ``unlisted``: steps to look for beside the run; one that is absent, or there in two forms, is named by the next
    call, whatever it asks for. Where the store did not answer, that call has them looked for again.
    """

    def __init__(
        self,
        settings: ProxySettings,
        *,
        router: Router,
        reader: RecordingReader | None,
        writer: RecordingWriter | None,
        unlisted: Sequence[RolloutRequest] = (),
    ) -> None:
        self._settings = settings
        self.router = router
        self._reader = reader
        self.writer = writer
        self._ahead = ReadAhead(settings.plan, source_of=self._readable_source, shard=settings.shard)
        self._unlisted = unlisted
        self._listing = self._begin_listing()
        self._logged: set[str] = set()
        if writer is not None:
            writer.on_written = self._on_written

    def load(self, request: RolloutRequest, route: Route) -> RecordedStep:
        """Load the step to answer ``request`` with, or to compare; raises as ``RecordingReader.load_step``."""
        self._heed_listing()
        source = self._source_of(request, route)
        reader = self._reader_of(source)
        is_stand_in = source is not request
        step = reader.load_step(
            source, shard=self._settings.shard, is_stand_in=is_stand_in, read=self._ahead.take(source)
        )
        if reader.storage.is_remote:
            self._ahead.follow(request, reader)
        if is_stand_in:
            self._settings.ledger.count("recording", "repeated_steps")
            self._log(
                logging.WARNING,
                "[Rollout Mock] %s step %d is not recorded: step %d stands for it (rollout_mock.missing_step=%s)",
                *(request.mode, request.global_step, source.global_step, self._settings.config.missing_step),
            )
        elif request.data_cursor is not None and step.info.data_cursor is None:
            self._log_once(
                logging.WARNING,
                "[Rollout Mock] The recording has no data cursor for %s step %d: where the run's data stand is not "
                "compared with it, here and wherever it has none",
                *(request.mode, request.global_step),
            )
        return step

    def _begin_listing(self) -> Future[object] | None:
        reader, unlisted = self._reader, self._unlisted
        if reader is None or not unlisted:
            return None
        return self._ahead.run(lambda: reader.check_present(unlisted))

    def _heed_listing(self) -> None:
        """Raise what the listing beside the run has found; begin it again where it only failed."""
        if self._listing is None or not self._listing.done():
            return
        error = self._listing.exception()
        if error is None:
            return
        if isinstance(error, (StepNotFoundError, StepInTwoFormsError)) or not isinstance(error, OSError):
            raise error
        self._log_once(
            logging.WARNING,
            "[Rollout Mock] The steps between both ends of the plan could not be looked for, which is tried again: %s",
            error,
        )
        self._listing = self._begin_listing()

    def close(self) -> None:
        """Read nothing more, and write the rest; raises any error of writing, every time."""
        self._ahead.close()
        if self.writer is not None:
            self.writer.close()

    def _source_of(self, request: RolloutRequest, route: Route) -> RolloutRequest:
        """The request by which the step is loaded: ``request`` itself, unless another step stands for it."""
        if route.replayed_step in (None, request.global_step):
            return request
        return request_stand_in(request, route.replayed_step)

    def _readable_source(self, request: RolloutRequest) -> RolloutRequest | None:
        """What a coming request will load, as far as that is recorded already and not by this run."""
        route = self.router.route(request)
        source = self._source_of(request, route)
        is_read = route.is_verified or not route.is_live
        return source if is_read and not self.router.is_own(source) else None

    def last_trained(self, request: RolloutRequest | None) -> StepInfo | None:
        """What was recorded with the last training step before ``request``; None where there is none."""
        found = self.router.last_trained(request)
        if found is None:
            return None
        folder, step = found
        parsed = parse_folder(folder)
        assert parsed is not None  # a folder that was listed
        source = RolloutRequest(global_step=step, batch_size=1, scheduler_id=parsed[1])
        return self._open_reader().open_step(source).info_of(self._settings.shard)

    def _reader_of(self, source: RolloutRequest) -> RecordingReader:
        """Return the reader, once a step of this run itself is on disk, written by this process or by another."""
        if self.router.is_own(source):
            if self.writer is not None:
                self.writer.flush()
            self._settings.patience.wait_until(  # a step that never comes is named by loading it
                lambda: self._is_there(source),
                describe=lambda: f"{source.mode} step {source.global_step}, which another process of the run records",
            )
        return self._open_reader()

    def _open_reader(self) -> RecordingReader:
        if self._reader is None:  # a cache that began with this run
            self._reader = RecordingReader(self._settings.config.dump_dir, is_kept=True)
        return self._reader

    def _is_there(self, source: RolloutRequest) -> bool:
        try:
            return self._open_reader().has_step(source)
        except StepNotFoundError:  # no recording yet
            return False

    def log_loaded(self, request: RolloutRequest, step: RecordedStep) -> None:
        """Log a replayed step."""
        self._log(
            logging.INFO,
            "[Rollout Mock] Loaded step %d: %s (samples=%d)",
            *(request.global_step, step.path, len(step.batch)),
        )

    def report(self, request: RolloutRequest, reports: BatchReports) -> None:
        """Log what an accepted batch is reported for."""
        for level, lines in ((logging.INFO, reports.lines), (logging.WARNING, reports.warnings)):
            for line in lines:
                self._log(level, "[Rollout Mock] Step %d: %s", request.global_step, line)

    def warn(self, line: str, *, once: str = "") -> None:
        """Log a line of a call that may be wrong; ``once``: what names its kind, of which only the first is logged."""
        if once:
            self._log_once(logging.WARNING, "[Rollout Mock] %s", line, key=once)
        else:
            self._log(logging.WARNING, "[Rollout Mock] %s", line)

    def verify(
        self,
        request: RolloutRequest,
        route: Route,
        played: RolloutBatch,
        *,
        scheduler_state: Mapping[str, JSON],
        random_states: GeneratorStates | None = None,
        late_random_states: GeneratorStates | None = None,
    ) -> None:
        """Compare a live batch, and the states of scheduler and random generators after it, with the recorded ones.

        Raises ``ContractError``, or warns, where any bit differs, and as ``load`` does. States are compared only with
        those recorded by a process with the same rows.
        """
        # Bits decide; no tolerance is applied to a rollout.
        step = self.load(request, route)
        differences = compare_batches(step.batch, played, limit=_NUM_ROWS_SHOWN)
        lines = [] if differences.is_identical else [differences.describe(("recorded", "played"))]
        if step.is_as_recorded:
            info = replace(
                step.info,
                scheduler_state=scheduler_state,
                random_states=random_states,
                late_random_states=late_random_states,
            )
            lines += info_differences(step.info, info)
        ledger = self._settings.ledger
        if not lines:
            ledger.count("recording", "verified_steps")
            self._log(
                logging.INFO,
                "[Rollout Mock] Verified step %d: equal to %s (samples=%d)",
                *(request.global_step, step.path, len(played)),
            )
            return
        ledger.count("recording", "different_steps")
        text = "\n".join(
            [
                f"[Rollout Mock] {request.mode} step {request.global_step} was not played as it is recorded in "
                f"{step.path}:",
                *lines,
            ]
        )
        if self._settings.config.on_difference == "error":
            raise ContractError(f"{text}\nrollout_mock.on_difference=warn goes on with what was played.")
        self._log(logging.WARNING, "%s", text)

    def submit(
        self,
        batch: RolloutBatch,
        request: RolloutRequest,
        *,
        metrics: Mapping[str, float],
        scheduler_state: Mapping[str, JSON],
        random_states: GeneratorStates | None = None,
        late_random_states: GeneratorStates | None = None,
    ) -> None:
        """Hand a batch to the writer; raises its errors, also of earlier batches.

        JSON has no NaN and no infinity: such metrics are left out, with one warning for each name.
        """
        if self.writer is None:
            raise SchedulerError(
                f"{request.mode} step {request.global_step} is to be recorded, but the plan has no step that is: no "
                "recording was opened. Give build_scheduler a plan with every request that will come."
            )
        shard = self._settings.shard
        info = StepInfo(
            step=request.global_step,
            mode=request.mode,
            scheduler_id=request.scheduler_id,
            run_id=self.writer.run_id,
            policy_version=request.policy_version,
            metrics=self._finite_metrics(metrics, request),
            scheduler_state=scheduler_state,
            data_cursor=request.data_cursor,
            shard=None if shard is None else (shard.index, shard.count),
            group_size=None if shard is None else request.group_size,
            random_states=random_states,
            late_random_states=late_random_states,
        )
        self.writer.submit(batch, info)

    def checkpoint_saved(self, next_step: int, *, last_played: int | None) -> None:
        """Let the writer's retention remove steps made superfluous by a checkpoint; raises the writer's errors.

        ``last_played``: the latest training step given to the pipeline by this scheduler; None before the first.
        Raises ``SchedulerError`` where neither it nor the run's other schedulers reached the step before ``next_step``.
        """
        if self.writer is None:
            return
        # Steps before the checkpoint may be removed: one that lies ahead would remove what no run has had.
        if last_played is not None and next_step > last_played + 1:
            last_played = max(last_played, self.writer.last_train_step())
            if next_step > last_played + 1:
                raise SchedulerError(
                    f"checkpoint_saved: next_step is {next_step}; expected at most {last_played + 1}, the step after "
                    f"the last one that was played, train step {last_played}: a checkpoint cannot continue later"
                )
        removed = self.writer.checkpoint_saved(next_step)
        num_removed = sum(map(len, removed.values()))
        if num_removed:
            self._settings.ledger.count("recording", "removed_steps", num_removed)
            self._log(
                logging.INFO,
                "[Rollout Mock] Removed %d recorded steps, which the checkpoint of step %d makes superfluous "
                "(rollout_mock.retention): %s",
                *(num_removed, next_step, format_present(removed)),
            )

    def _finite_metrics(self, metrics: Mapping[str, float], request: RolloutRequest) -> dict[str, float]:
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        for name in [name for name in metrics if name not in finite]:
            self._log_once(
                logging.WARNING,
                "[Rollout Mock] Metric %r is not recorded where it is no finite number, as at %s step %d (%s)",
                *(name, request.mode, request.global_step, metrics[name]),
                key=name,
            )
        return finite

    def _on_written(self, written: WrittenStep) -> None:
        ledger = self._settings.ledger
        if written.was_present:
            ledger.count("recording", "present_steps")
        else:
            ledger.count("recording", "recorded_steps")
            ledger.count("recording", "recorded_bytes", written.size_bytes)
        self._log(
            logging.INFO,
            "[Rollout Mock] %s step %d: %s (samples=%d, size=%s)",
            "Already dumped, and equal," if written.was_present else "Dumped",
            *(written.step, written.path, written.num_rows, format_megabytes(written.size_bytes)),
        )

    def _log(self, level: int, message: str, *values: object) -> None:
        if self._settings.is_logging:
            logger.log(level, message, *values)

    def _log_once(self, level: int, message: str, *values: object, key: str = "") -> None:
        """Log a line unless one of its kind and ``key`` was logged before."""
        if message + key not in self._logged:
            self._logged.add(message + key)
            self._log(level, message, *values)


def format_megabytes(size_bytes: int) -> str:
    """Format as ``12.34MB`` (of 2**20 bytes), with two significant digits where two decimals would not show them."""
    size = size_bytes / 2**20
    decimals = 2 if size >= 0.1 or not size_bytes else 1 - math.floor(math.log10(size))
    return f"{size:.{decimals}f}MB"
