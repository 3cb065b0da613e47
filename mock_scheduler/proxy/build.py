"""Builds the proxy, which the pipeline uses in place of its rollout scheduler.

Contract: everything that can be refused is refused here, before any rollout and any model: the arguments, the
recording's contract, and steps of the plan that are absent, damaged or another run's. One rank reads every bit of the
steps to replay; the other ranks read the same files later, and here only their names. Of a plan of more than
``MOST_CHECKED`` steps this holds for both of its ends: the steps between are looked for beside the run, and each is
verified when it is read.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Unpack

from pydantic import ValidationError

from mock_scheduler.config.problems import raise_problems, validation_problems
from mock_scheduler.config.rollout_mock import RolloutMockConfig
from mock_scheduler.errors import ConfigError, StepNotFoundError, redact
from mock_scheduler.ledger import Ledger
from mock_scheduler.proxy.access import RecordingAccess, format_megabytes
from mock_scheduler.proxy.async_scheduler import AsyncProxyScheduler
from mock_scheduler.proxy.checks import as_contract, as_names, as_plan, check_make_real, check_run_id, share_of
from mock_scheduler.proxy.core import ProxyCore
from mock_scheduler.proxy.in_actor import settle_in_actor
from mock_scheduler.proxy.routing import (
    RequestKey,
    Router,
    modes_to_prepare,
    needs_listing,
    request_key,
    request_stand_in,
)
from mock_scheduler.proxy.settings import BuildOptions, ProxySettings
from mock_scheduler.proxy.sync_scheduler import ProxyScheduler
from mock_scheduler.recording.contract import Contract, check_contract
from mock_scheduler.recording.reading.reader import MOST_CHECKED, RecordingReader
from mock_scheduler.recording.writing.opening import RecordingWriter, WriterOptions, open_recording
from mock_scheduler.scheduler import RolloutRequest
from mock_scheduler.support.digests import JSON

logger = logging.getLogger("mock_scheduler.rollout_mock")
_SLOW_CHECK_S = 1.0  # whoever waits longer wants to know why


def build_scheduler(
    config: RolloutMockConfig | Mapping[str, object],
    make_real: Callable[[], object],
    contract: Contract | Mapping[str, JSON],
    *,
    ledger: Ledger | None = None,
    **options: Unpack[BuildOptions],
) -> ProxyScheduler:
    """Build the rollout scheduler of a run, for the modes of ``config``.

    Args:
        config: the section ``rollout_mock``.
        make_real: builds the real scheduler, any object with ``get_batch``; its methods may be ``async``. It is called
            when the first live answer is needed, or another call of the loop's reaches it before, so this function can
            run before any model exists; a run that only replays never calls it. After replayed steps the real scheduler
            is brought to where it would have been: the state recorded with the last replayed step, the latest policy
            version, generating if the pipeline had resumed.
        contract: describes this run: a ``Contract``, or names and values that must all match.
        ledger: counts every call; by default a new one, shown by the scheduler.
        options: as ``BuildOptions`` lists them.

    Several schedulers of one run (one per domain, say) each have their own proxy, with their own ``scheduler_id`` in
    the requests, and the same ``dump_dir`` and ``run_id``. In mode cache every rank must have built its scheduler
    before any calls ``get_batch``, for example by a barrier: recorded steps are listed once, while building.

    Where the run records, the recording is claimed for it here: a second run in the same ``dump_dir`` is refused before
    it plays anything.

    Raises:
        ConfigError: ``config`` has problems, all of them listed; or ``make_real`` or ``contract`` is of a wrong kind.
        SchedulerError: another option makes no sense.
        ContractError: fields break their rules; lists every one.
        StepNotFoundError: planned steps are absent; lists every one.
        StepExistsError, CorruptRecordingError, RecordingError: as the recording raises them.
    """
    return ProxyScheduler(_build_core(config, make_real, contract, ledger=ledger, options=options))


def build_async_scheduler(
    config: RolloutMockConfig | Mapping[str, object],
    make_real: Callable[[], object],
    contract: Contract | Mapping[str, JSON],
    *,
    ledger: Ledger | None = None,
    **options: Unpack[BuildOptions],
) -> AsyncProxyScheduler:
    """Build the rollout scheduler of an asynchronous training loop, as ``build_scheduler`` does.

    ``make_real`` is called on the event loop, and may be ``async`` itself; a synchronous real scheduler is called in
    threads.
    """
    return AsyncProxyScheduler(_build_core(config, make_real, contract, ledger=ledger, options=options, is_async=True))


def _build_core(
    config: RolloutMockConfig | Mapping[str, object],
    make_real: Callable[[], object],
    contract: Contract | Mapping[str, JSON],
    *,
    ledger: Ledger | None,
    options: BuildOptions,
    is_async: bool = False,
) -> ProxyCore:
    check_make_real(make_real)
    check_run_id(options.get("run_id"))
    options["late_values"] = as_names(options.get("late_values", ()))
    options["plan"] = as_plan(options.get("plan", ()))
    settings = ProxySettings(
        config=config if isinstance(config, RolloutMockConfig) else read_config(config),
        make_real=make_real,
        contract=as_contract(contract),
        ledger=Ledger() if ledger is None else ledger,
        is_restarted=False,
        **options,
    )
    _check_shard(settings)
    settings = settle_in_actor(settings)
    core = ProxyCore(settings, open_access(settings), is_async=is_async)
    if settings.is_logging:
        _log_enabled(settings.config)
    return core


def _log_enabled(config: RolloutMockConfig) -> None:
    if config.origin:
        logger.info("[Rollout Mock] %s", config.origin)
    logger.info("[Rollout Mock] Rollout Mock enabled: mode=%s, dir=%s", config.mode, redact(config.dump_dir))
    for entry in config.schedule:
        logger.info("[Rollout Mock] Schedule: %s", entry.describe())


def _check_shard(settings: ProxySettings) -> None:
    """Refuse shards without a common run id: each writer would record a run of its own, none with a whole step."""
    if settings.shard is None or settings.run_id is not None:
        return
    recording = modes_to_prepare(settings.config, settings.plan) & {"dump", "cache"}
    if recording:
        raise ConfigError(
            f"shard needs run_id, the same on every rank, where the run records (mode {', '.join(sorted(recording))}): "
            "give build_scheduler(run_id=...), for example the name of the run, or a uuid that rank 0 sends to all"
        )


def read_config(values: Mapping[str, object]) -> RolloutMockConfig:
    """Check the section ``rollout_mock`` of a plain mapping; raises ``ConfigError`` listing every problem."""
    try:
        return RolloutMockConfig.model_validate(_as_plain(values))
    except ValidationError as error:
        raise_problems("rollout_mock", validation_problems(error, RolloutMockConfig, section="rollout_mock"))


def _as_plain(value: object) -> object:
    """Make dicts and lists of a configuration library's own containers."""
    if isinstance(value, Mapping):
        return {str(key): _as_plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_as_plain(item) for item in value]
    return value


def open_access(settings: ProxySettings) -> RecordingAccess:
    """Open the recording for the run's modes and check it against the plan.

    Raises:
        ContractError: fields break their rules; lists every one.
        StepNotFoundError: planned steps are absent; lists every one.
        SchedulerError: shards are not equal.
        StepExistsError, CorruptRecordingError, RecordingError: as the recording raises them.
    """
    # The plan first: it costs nothing, and opening a remote recording does.
    for request in settings.plan if settings.shard is not None else ():
        share_of(request, settings.shard)
    reader = _open_reader(settings)
    router = Router(settings.config, settings.plan, _list_steps(settings, reader))
    unlisted = () if reader is None else _check_plan(settings, reader, router)
    writer = _open_writer(settings, reader, router)
    return RecordingAccess(settings, router=router, reader=reader, writer=writer, unlisted=unlisted)


def _list_steps(settings: ProxySettings, reader: RecordingReader | None) -> Mapping[str, Sequence[int]]:
    """The steps present, where a route depends on them: a listing takes as long as the recording is."""
    modes = modes_to_prepare(settings.config, settings.plan)
    if reader is None or not (settings.is_restarted or needs_listing(settings.config, modes)):
        return {}
    return reader.steps()


def _open_reader(settings: ProxySettings) -> RecordingReader | None:
    """Open the recording and check its contract, where any recorded step may be read."""
    config, dump_dir = settings.config, settings.config.dump_dir
    modes = modes_to_prepare(config, settings.plan)
    # Modes dump and real read nothing, so an absent recording is no error there.
    if not modes & {"mock", "verify", "cache"}:
        return None
    try:
        reader = RecordingReader(dump_dir, is_kept=True)
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


def _check_plan(settings: ProxySettings, reader: RecordingReader, router: Router) -> Sequence[RolloutRequest]:
    """Check that each step to be read is present and belongs to its request; returns those of a plan too long for it,
    whose presence is still to be checked."""
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
        # A thousand ranks that read every header of a long plan would storm a folder that they share.
        has_headers=settings.is_writer,
    )
    elapsed_s = time.perf_counter() - started_s
    num_steps = len(wanted) + len(stand_ins)
    if settings.is_logging and elapsed_s > _SLOW_CHECK_S:
        logger.info(
            "[Rollout Mock] Verified %d recorded steps (%s) in %.1f s",
            *(min(num_steps, MOST_CHECKED), format_megabytes(size_bytes), elapsed_s),
        )
    return [*wanted.values(), *stand_ins.values()] if num_steps > MOST_CHECKED else ()


def _open_writer(settings: ProxySettings, reader: RecordingReader | None, router: Router) -> RecordingWriter | None:
    # Other ranks must not look into the folder: the writer may already have made it a recording.
    modes = modes_to_prepare(settings.config, settings.plan)
    if not settings.is_writer or not modes & {"dump", "cache"}:
        return None
    recorded = [request for request in settings.plan if router.route(request).is_recorded]
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
