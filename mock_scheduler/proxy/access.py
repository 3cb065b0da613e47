"""The proxy's way to its recording: what is checked before a run starts, then loading, comparing and writing steps.

Contract: all that can be refused is refused by ``open_access``, before any rollout and any model.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from mock_scheduler.batch import RolloutBatch
from mock_scheduler.config.schema import RolloutMockConfig
from mock_scheduler.digests import JSON
from mock_scheduler.errors import ContractError, SchedulerError, StepNotFoundError
from mock_scheduler.ledger import Ledger
from mock_scheduler.proxy.answers import share_of
from mock_scheduler.proxy.routing import Route, Router, modes_to_prepare, request_key
from mock_scheduler.recording import (
    Contract,
    RecordedStep,
    RecordingReader,
    RecordingWriter,
    StepInfo,
    WriterOptions,
    WrittenStep,
    check_contract,
    open_recording,
)
from mock_scheduler.recording.diff import compare_batches
from mock_scheduler.scheduler import BatchCodec, RolloutRequest, RowShard

logger = logging.getLogger("mock_scheduler.rollout_mock")

_SLOW_CHECK_S = 1.0  # a user who waits longer wants to know for what
_NUM_ROWS_SHOWN = 10
# For steps that one process of a run records and others replay: the writer is at most two steps behind.
_WRITER_TIMEOUT_S = 120.0
_WRITER_POLL_S = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class ProxySettings:
    """What a proxy is built from; ``mock_scheduler.proxy.BuildOptions`` describes each."""

    config: RolloutMockConfig
    make_real: Callable[[], object]
    contract: Contract
    ledger: Ledger
    plan: Sequence[RolloutRequest] = ()
    is_writer: bool = True
    provenance: Mapping[str, JSON] | None = None
    resume: bool = False
    run_id: str | None = None
    shard: RowShard | None = None
    codec: BatchCodec | None = None
    max_row_tokens: int | None = None

    @property
    def logs(self) -> bool:
        """Whether this process writes the log lines of the run."""
        return self.config.enable and self.is_writer and (self.shard is None or self.shard.index == 0)


class RecordingAccess:
    """``reader`` and ``writer`` are None where the run, or this process, does not read or write."""

    def __init__(
        self, settings: ProxySettings, *, router: Router, reader: RecordingReader | None, writer: RecordingWriter | None
    ) -> None:
        self._settings = settings
        self.router = router
        self._reader = reader
        self.writer = writer
        if writer is not None:
            writer.on_written = self._on_written

    def load(self, request: RolloutRequest, route: Route) -> RecordedStep:
        """The recorded step that answers, or is compared with, ``request``; raises as ``RecordingReader.load_step``."""
        if route.replayed_step is None or route.replayed_step == request.global_step:
            return self._reader_of(request).load_step(request, shard=self._settings.shard)
        # Its data are those of another step by the user's wish; its prompts, where given, must still be the same.
        source = replace(request, global_step=route.replayed_step, data_cursor=None)
        step = self._reader_of(source).load_step(source, shard=self._settings.shard)
        self._settings.ledger.count("recording", "repeated_steps")
        self._log(
            logging.WARNING,
            "[Rollout Mock] %s step %d is not recorded: step %d stands for it (rollout_mock.missing_step=%s)",
            *(request.mode, request.global_step, route.replayed_step, self._settings.config.missing_step),
        )
        return step

    def _reader_of(self, source: RolloutRequest) -> RecordingReader:
        """The reader, once a step that this run itself recorded is on disk: written by this process or by another."""
        if self.router.is_own(source):
            if self.writer is not None:
                self.writer.flush()
            _wait_for_step(self._settings.config.dump_dir, source)
        if self._reader is None:  # a cache that began with this run
            self._reader = RecordingReader(self._settings.config.dump_dir)
        return self._reader

    def log_loaded(self, request: RolloutRequest, step: RecordedStep) -> None:
        """The line for a replayed step."""
        self._log(
            logging.INFO,
            "[Rollout Mock] Loaded step %d: %s (samples=%d)",
            *(request.global_step, step.path, len(step.batch)),
        )

    def report(self, request: RolloutRequest, lines: Sequence[str]) -> None:
        """Lines about a batch that was accepted."""
        for line in lines:
            self._log(logging.INFO, "[Rollout Mock] Step %d: %s", request.global_step, line)

    def verify(self, request: RolloutRequest, route: Route, played: RolloutBatch) -> None:
        """Compare a live batch with the recorded one; raises ``ContractError``, or warns, where any bit differs."""
        step = self.load(request, route)
        differences = compare_batches(step.batch, played, limit=_NUM_ROWS_SHOWN)
        ledger = self._settings.ledger
        if differences.is_identical:
            ledger.count("recording", "verified_steps")
            self._log(
                logging.INFO,
                "[Rollout Mock] Verified step %d: equal to %s (samples=%d)",
                *(request.global_step, step.path, len(played)),
            )
            return
        ledger.count("recording", "different_steps")
        text = (
            f"[Rollout Mock] {request.mode} step {request.global_step} was not played as it is recorded in {step.path}:"
            f"\n{differences.describe(('recorded', 'played'))}"
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
    ) -> None:
        """Hand a batch to the writer; raises its errors, also those of earlier batches."""
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
            metrics=metrics,
            scheduler_state=scheduler_state,
            data_cursor=request.data_cursor,
            shard=None if shard is None else (shard.index, shard.count),
            group_size=None if shard is None else request.group_size,
        )
        self.writer.submit(batch, info)

    def _on_written(self, written: WrittenStep) -> None:
        ledger = self._settings.ledger
        if written.was_present:
            ledger.count("recording", "present_steps")
        else:
            ledger.count("recording", "recorded_steps")
            ledger.count("recording", "recorded_bytes", written.size_bytes)
        self._log(
            logging.INFO,
            "[Rollout Mock] %s step %d: %s (samples=%d, size=%.2fMB)",
            "Already dumped, and equal," if written.was_present else "Dumped",
            *(written.step, written.path, written.num_rows, written.size_bytes / 2**20),
        )

    def _log(self, level: int, message: str, *values: object) -> None:
        if self._settings.logs:
            logger.log(level, message, *values)


def open_access(settings: ProxySettings) -> RecordingAccess:
    """Open what the run reads and writes, and refuse all that can be refused.

    Raises ``ContractError`` listing every field that breaks its rule, ``StepNotFoundError`` listing every absent step,
    ``StepExistsError``, ``CorruptRecordingError``, ``RecordingError``, ``SchedulerError`` where shards are not equal.
    """
    for request in settings.plan:
        share_of(request, settings.shard)
    reader = _open_reader(settings)
    router = Router(settings.config, settings.plan, {} if reader is None else reader.steps())
    if reader is not None:
        _check_plan(settings, reader, router)
    writer = _open_writer(settings, reader, router)
    return RecordingAccess(settings, router=router, reader=reader, writer=writer)


def _wait_for_step(dump_dir: str, request: RolloutRequest) -> None:
    """Until the process that writes has committed the step; raises ``StepNotFoundError`` where it does not come."""
    deadline_s = time.monotonic() + _WRITER_TIMEOUT_S
    while True:
        try:
            reader = RecordingReader(dump_dir)
            if reader.has_step(request) or time.monotonic() > deadline_s:
                return  # loading says what is missing
        except StepNotFoundError:
            if time.monotonic() > deadline_s:
                raise
        time.sleep(_WRITER_POLL_S)


def _open_reader(settings: ProxySettings) -> RecordingReader | None:
    """The recording, with its contract checked, where any recorded step may be read."""
    config, dump_dir = settings.config, settings.config.dump_dir
    modes = modes_to_prepare(config, settings.plan)
    if not modes & {"mock", "verify", "cache"}:
        return None
    try:
        reader = RecordingReader(dump_dir)
    except StepNotFoundError:
        can_begin = "cache" in modes and config.missing_step != "error"
        if "verify" in modes or ("mock" in modes and not can_begin):
            raise
        return None  # a cache that begins, and may repeat what it recorded
    differences = check_contract(reader.manifest.contract, settings.contract, config.on_mismatch, source=dump_dir)
    for difference in differences:
        if settings.logs and not difference.is_blocking:
            logger.info("[Rollout Mock] Differs from the recording, as it may: %s", difference.describe())
    return reader


def _check_plan(settings: ProxySettings, reader: RecordingReader, router: Router) -> None:
    """One rank reads and verifies all that will be read; the others, which read the same files, the headers."""
    wanted: dict[object, RolloutRequest] = {}
    for request in settings.plan:
        route = router.route(request)
        if route.is_verified or route.replayed_step == request.global_step:
            wanted[request_key(request)] = request
        elif route.replayed_step is not None:
            if router.is_own(replace(request, global_step=route.replayed_step)):
                continue  # recorded by this run before it is asked for
            source = replace(request, global_step=route.replayed_step, data_cursor=None, prompt_digests=None)
            wanted.setdefault(request_key(source), source)
    started_s = time.perf_counter()
    size_bytes = reader.check_plan(list(wanted.values()), verify=settings.is_writer, shard=settings.shard)
    elapsed_s = time.perf_counter() - started_s
    if settings.logs and elapsed_s > _SLOW_CHECK_S:
        logger.info(
            "[Rollout Mock] Verified %d recorded steps (%.2fMB) in %.1f s",
            *(len(wanted), size_bytes / 2**20, elapsed_s),
        )


def _open_writer(settings: ProxySettings, reader: RecordingReader | None, router: Router) -> RecordingWriter | None:
    # Other ranks must not look into the folder: the writer may already have made it a recording.
    modes = modes_to_prepare(settings.config, settings.plan)
    recorded = [request for request in settings.plan if router.route(request).is_recorded]
    if not settings.is_writer or not modes & {"dump", "cache"}:
        return None
    if settings.plan and not recorded:
        if "dump" in modes and settings.logs:
            logger.warning(
                "[Rollout Mock] Nothing is recorded: rollout_mock.steps=%s, every=%d leaves out every planned step",
                *(settings.config.steps, settings.config.every),
            )
        return None
    config = settings.config
    return open_recording(
        config.dump_dir,
        contract=settings.contract,
        plan=recorded,
        provenance={} if settings.provenance is None else settings.provenance,
        resume=settings.resume or reader is not None,
        options=WriterOptions(
            compression=config.compression,
            background=config.background,
            on_low_disk=config.on_low_disk,
            retention=config.retention,
            shard=settings.shard,
            num_planned_steps=len(recorded),
        ),
        run_id=settings.run_id if reader is None else reader.manifest.run_id,
        max_row_tokens=settings.max_row_tokens,
    )
