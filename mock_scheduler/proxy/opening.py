"""Opens a run's recording for reading and writing, and checks it against the plan before any rollout and any model.

Contract: ``open_access`` refuses everything that can be refused. One rank reads every bit of the steps to replay; the
other ranks read the same files later, and here only their headers.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace

from mock_scheduler.errors import StepNotFoundError
from mock_scheduler.proxy.access import RecordingAccess, format_megabytes
from mock_scheduler.proxy.checks import share_of
from mock_scheduler.proxy.missing_steps import request_stand_in
from mock_scheduler.proxy.routing import RequestKey, Router, modes_to_prepare, request_key
from mock_scheduler.proxy.settings import ProxySettings
from mock_scheduler.recording import (
    RecordingReader,
    RecordingWriter,
    WriterOptions,
    check_contract,
    open_recording,
)
from mock_scheduler.scheduler import RolloutRequest

logger = logging.getLogger("mock_scheduler.rollout_mock")

_SLOW_CHECK_S = 1.0  # whoever waits longer wants to know why


def open_access(settings: ProxySettings) -> RecordingAccess:
    """Open the recording for the run's modes and check it against the plan.

    Raises:
        ContractError: fields break their rules; lists every one.
        StepNotFoundError: planned steps are absent; lists every one.
        SchedulerError: shards are not equal.
        StepExistsError, CorruptRecordingError, RecordingError: as the recording raises them.
    """
    for request in settings.plan:
        share_of(request, settings.shard)
    reader = _open_reader(settings)
    router = Router(settings.config, settings.plan, {} if reader is None else reader.steps())
    if reader is not None:
        _check_plan(settings, reader, router)
    writer = _open_writer(settings, reader, router)
    return RecordingAccess(settings, router=router, reader=reader, writer=writer)


def _open_reader(settings: ProxySettings) -> RecordingReader | None:
    """Open the recording and check its contract, where any recorded step may be read."""
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
        if settings.is_logging and not difference.is_blocking:
            logger.info("[Rollout Mock] Differs from the recording, as it may: %s", difference.describe())
    return reader


def _check_plan(settings: ProxySettings, reader: RecordingReader, router: Router) -> None:
    """Check that each step to be read is present and belongs to its request."""
    wanted: dict[RequestKey, RolloutRequest] = {}
    stand_ins: dict[RequestKey, RolloutRequest] = {}
    for request in settings.plan:
        route = router.route(request)
        if route.is_verified or route.replayed_step == request.global_step:
            wanted[request_key(request)] = request
        elif route.replayed_step is not None:
            source = replace(request_stand_in(request, route.replayed_step), prompt_digests=None)
            if not router.is_own(source):  # else recorded by this run before it is asked for
                stand_ins[request_key(source)] = source
    for key in wanted:
        stand_ins.pop(key, None)
    started_s = time.perf_counter()
    size_bytes = reader.check_plan(
        list(wanted.values()),
        stand_ins=list(stand_ins.values()),
        verify=settings.is_writer,
        shard=settings.shard,
    )
    elapsed_s = time.perf_counter() - started_s
    if settings.is_logging and elapsed_s > _SLOW_CHECK_S:
        logger.info(
            "[Rollout Mock] Verified %d recorded steps (%s) in %.1f s",
            *(len(wanted) + len(stand_ins), format_megabytes(size_bytes), elapsed_s),
        )


def _open_writer(settings: ProxySettings, reader: RecordingReader | None, router: Router) -> RecordingWriter | None:
    # Other ranks must not look into the folder: the writer may already have made it a recording.
    modes = modes_to_prepare(settings.config, settings.plan)
    recorded = [request for request in settings.plan if router.route(request).is_recorded]
    if not settings.is_writer or not modes & {"dump", "cache"}:
        return None
    if settings.plan and not recorded:
        if "dump" in modes and settings.is_logging:
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
            patience=settings.patience,
        ),
        run_id=settings.run_id if reader is None else reader.manifest.run_id,
        max_row_tokens=settings.max_row_tokens,
    )
