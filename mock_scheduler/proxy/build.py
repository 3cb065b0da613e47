"""Builds what the pipeline gets in place of its rollout scheduler."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TypedDict, Unpack

from pydantic import ValidationError

from mock_scheduler.config.problems import raise_problems, validation_problems
from mock_scheduler.config.rollout_mock import RolloutMockConfig
from mock_scheduler.errors import ConfigError
from mock_scheduler.ledger import Ledger
from mock_scheduler.proxy.async_scheduler import AsyncProxyScheduler
from mock_scheduler.proxy.core import ProxyCore
from mock_scheduler.proxy.given import as_contract, as_plan, check_make_real, check_run_id
from mock_scheduler.proxy.opening import open_access
from mock_scheduler.proxy.routing import modes_to_prepare
from mock_scheduler.proxy.settings import ProxySettings
from mock_scheduler.proxy.sync_scheduler import ProxyScheduler
from mock_scheduler.recording import Contract
from mock_scheduler.recording.writing.sharded import Patience
from mock_scheduler.scheduler import BatchCodec, RolloutRequest, RowShard
from mock_scheduler.support.digests import JSON

logger = logging.getLogger("mock_scheduler.rollout_mock")


class BuildOptions(TypedDict, total=False):
    """The keyword arguments of ``build_scheduler`` and ``build_async_scheduler``; all may be left out.

    ``plan``: every request that will come, in order. With it absent steps, present steps and a wrong contract are
    refused before any rollout, and calls need not be held where the next answer is known. Without it every mode that
    the configuration allows is prepared for.
    ``is_writer``: True on exactly one rank (of each row shard, where there are any): it writes, and verifies every bit
    of what the plan will read; it, or that of shard 0, logs.
    ``provenance``: added to that of the recording, for example the determinism settings that were read back.
    ``resume``: a dump goes on in the folder that its earlier part recorded; planned steps that are there must then come
    out equal.
    ``run_id``: given alike by all schedulers and ranks that record one run together, a text of 1 to 128 printable
    characters; by default a new one.
    ``shard``: this process gets, and records, only its own rows of every batch; recording with it needs ``run_id``.
    ``codec``: between the framework's batches, which the pipeline gets, and ``RolloutBatch``.
    ``max_row_tokens``: the longest row possible; bounds the disk that a dump may need before its first step.
    ``patience``: how long to wait for other processes of the run that write: for the shards of a step, and for a step
    that another process records and this one replays; by default 10 minutes (``Patience(timeout_s=600)``). A wait of
    more than 5 s says in the log for what, and again every 30 s.
    """

    plan: Sequence[RolloutRequest]
    is_writer: bool
    provenance: Mapping[str, JSON] | None
    resume: bool
    run_id: str | None
    shard: RowShard | None
    codec: BatchCodec | None
    max_row_tokens: int | None
    patience: Patience


def build_scheduler(
    config: RolloutMockConfig | Mapping[str, object],
    make_real: Callable[[], object],
    contract: Contract | Mapping[str, JSON],
    *,
    ledger: Ledger | None = None,
    **options: Unpack[BuildOptions],
) -> ProxyScheduler:
    """The rollout scheduler of a run, for the modes that ``config`` asks for; ``BuildOptions`` lists the options.

    ``make_real`` builds the real scheduler: any object with ``get_batch``, whose methods may be ``async``. It is called
    when the first live answer is needed, so that this function can run before any model exists, and never in a run
    that only replays; where replayed steps came first, the real scheduler is then brought to where it would have been:
    the scheduler state recorded with the last replayed step, the latest policy version, generating if the pipeline had
    resumed. ``contract`` describes this run: a ``Contract``, or names and values that all must match. ``ledger`` counts
    what happens; by default a new one, which the scheduler shows.

    Several schedulers of one run (one per domain, say) each have their own proxy, with their own ``scheduler_id`` in
    the requests, and the same ``dump_dir`` and ``run_id``. In mode cache every rank must have built its scheduler
    before any calls ``get_batch``, for example by a barrier: which steps are recorded is listed once, while building.

    Where the run records, the recording is claimed for it here: a second run in the same ``dump_dir`` is refused before
    it plays anything.

    Raises ``ConfigError`` listing every problem of ``config``, or where ``make_real`` or ``contract`` is of a wrong
    kind, ``SchedulerError`` for other options that make no sense, ``ContractError`` listing every field that breaks its
    rule, ``StepNotFoundError`` listing every absent step, ``StepExistsError``, ``CorruptRecordingError``,
    ``RecordingError``.
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
    """As ``build_scheduler``, for an asynchronous training loop.

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


def _check_shard(settings: ProxySettings) -> None:
    """Writers that each made up a run id would record as many runs, of which none has a whole step."""
    if settings.shard is None or settings.run_id is not None:
        return
    recording = modes_to_prepare(settings.config, settings.plan) & {"dump", "cache"}
    if recording:
        raise ConfigError(
            f"shard needs run_id, the same on every rank, where the run records (mode {', '.join(sorted(recording))}): "
            "give build_scheduler(run_id=...), for example the name of the run, or a uuid that rank 0 sends to all"
        )


def _log_enabled(config: RolloutMockConfig) -> None:
    if config.origin:
        logger.info("[Rollout Mock] %s", config.origin)
    logger.info("[Rollout Mock] Rollout Mock enabled: mode=%s, dir=%s", config.mode, config.dump_dir)
    for entry in config.schedule:
        logger.info("[Rollout Mock] Schedule: %s", entry.describe())


def read_config(values: Mapping[str, object]) -> RolloutMockConfig:
    """The checked ``rollout_mock`` section of a plain mapping; raises ``ConfigError`` listing every problem."""
    try:
        return RolloutMockConfig.model_validate(_as_plain(values))
    except ValidationError as error:
        raise_problems("rollout_mock", validation_problems(error, RolloutMockConfig, section="rollout_mock"))


def _as_plain(value: object) -> object:
    """Dicts and lists in place of a configuration library's own."""
    if isinstance(value, Mapping):
        return {str(key): _as_plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_as_plain(item) for item in value]
    return value
