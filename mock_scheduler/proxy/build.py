"""Builds the proxy, which the pipeline uses in place of its rollout scheduler."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Unpack

from pydantic import ValidationError

from mock_scheduler.config.problems import raise_problems, validation_problems
from mock_scheduler.config.rollout_mock import RolloutMockConfig
from mock_scheduler.errors import ConfigError
from mock_scheduler.ledger import Ledger
from mock_scheduler.proxy.async_scheduler import AsyncProxyScheduler
from mock_scheduler.proxy.checks import as_contract, as_plan, check_make_real, check_run_id
from mock_scheduler.proxy.core import ProxyCore
from mock_scheduler.proxy.opening import open_access
from mock_scheduler.proxy.routing import modes_to_prepare
from mock_scheduler.proxy.settings import BuildOptions, ProxySettings
from mock_scheduler.proxy.sync_scheduler import ProxyScheduler
from mock_scheduler.recording import Contract
from mock_scheduler.support.digests import JSON

logger = logging.getLogger("mock_scheduler.rollout_mock")


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
            when the first live answer is needed, so this function can run before any model exists; a run that only
            replays never calls it. After replayed steps the real scheduler is brought to where it would have been: the
            state recorded with the last replayed step, the latest policy version, generating if the pipeline had
            resumed.
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
    return AsyncProxyScheduler(_build_core(config, make_real, contract, ledger=ledger, options=options))


def _build_core(
    config: RolloutMockConfig | Mapping[str, object],
    make_real: Callable[[], object],
    contract: Contract | Mapping[str, JSON],
    *,
    ledger: Ledger | None,
    options: BuildOptions,
) -> ProxyCore:
    check_make_real(make_real)
    check_run_id(options.get("run_id"))
    options["plan"] = as_plan(options.get("plan", ()))
    settings = ProxySettings(
        config=config if isinstance(config, RolloutMockConfig) else read_config(config),
        make_real=make_real,
        contract=as_contract(contract),
        ledger=Ledger() if ledger is None else ledger,
        **options,
    )
    _check_shard(settings)
    core = ProxyCore(settings, open_access(settings))
    if settings.is_logging:
        _log_enabled(settings.config)
    return core


def _log_enabled(config: RolloutMockConfig) -> None:
    if config.origin:
        logger.info("[Rollout Mock] %s", config.origin)
    logger.info("[Rollout Mock] Rollout Mock enabled: mode=%s, dir=%s", config.mode, config.dump_dir)
    for entry in config.schedule:
        logger.info("[Rollout Mock] Schedule: %s", entry.describe())


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
