"""Stands between the pipeline and the real rollout scheduler: runs it, records it, or answers in its place.

Contract: ``build_scheduler`` is the only way in, and what it returns has one interface in every mode. Every rank
builds one and calls it in the same order; nothing here communicates. All that can be refused is refused while
building, before any rollout and any model. In mock, ``make_real`` is never called.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mock_scheduler.batch import RolloutBatch
from mock_scheduler.config.schema import RolloutMockConfig
from mock_scheduler.digests import JSON
from mock_scheduler.errors import BatchError, ConfigError, SchedulerError
from mock_scheduler.ledger import Ledger
from mock_scheduler.recording import (
    Contract,
    RecordingReader,
    RecordingWriter,
    StepInfo,
    WrittenStep,
    check_contract,
    open_recording,
)
from mock_scheduler.scheduler import RolloutRequest, RolloutScheduler, adapt_scheduler

logger = logging.getLogger("mock_scheduler.rollout_mock")

RECORDED_PREFIX = "recorded/"
_SLOW_CHECK_S = 1.0  # a user who waits longer wants to know for what


@dataclass(frozen=True, kw_only=True, slots=True)
class _BuildArgs:
    """What every mode is built from."""

    config: RolloutMockConfig
    make_real: Callable[[], object]
    contract: Contract
    ledger: Ledger
    plan: Sequence[RolloutRequest]
    is_writer: bool
    provenance: Mapping[str, JSON]
    resume: bool


def build_scheduler(
    config: RolloutMockConfig,
    make_real: Callable[[], object],
    contract: Contract,
    *,
    ledger: Ledger | None = None,
    plan: Sequence[RolloutRequest] = (),
    is_writer: bool = True,
    provenance: Mapping[str, JSON] | None = None,
    resume: bool = False,
) -> RolloutScheduler:
    """The rollout scheduler of a run, for the mode that ``config`` asks for.

    ``make_real`` builds the real scheduler (any object with ``get_batch``); it is called at the first use in real
    and dump, so that this function can run before any model exists, and never in mock. ``contract`` describes this
    run. ``plan`` lists the requests that will come: in mock each must be recorded, in dump none may be unless
    ``resume``. ``is_writer`` is True on exactly one rank: it writes, logs, and in mock verifies every bit of the
    plan's steps. ``provenance`` (for example the settings read back) is added to that of the recording. ``resume``
    lets a dump go on in the folder that its earlier part recorded; planned steps that are there must then come out
    equal.

    Raises ``ConfigError`` for an unknown mode, ``ContractError`` listing every field that breaks its rule,
    ``StepNotFoundError`` listing every absent step, ``StepExistsError``, ``CorruptRecordingError``, ``RecordingError``.
    """
    mode = config.effective_mode
    if mode not in _BUILDERS:
        raise ConfigError(f"rollout_mock.mode is {mode!r}; known modes: {', '.join(_BUILDERS)}")
    args = _BuildArgs(
        config=config,
        make_real=make_real,
        contract=contract,
        ledger=Ledger() if ledger is None else ledger,
        plan=plan,
        is_writer=is_writer,
        provenance={} if provenance is None else provenance,
        resume=resume,
    )
    scheduler = _BUILDERS[mode](args)
    if config.enable and is_writer:
        logger.info("[Rollout Mock] Rollout Mock enabled: mode=%s, dir=%s", mode, config.dump_dir)
    return scheduler


class _Progress:
    """How far a run has come; the part of ``state_dict`` that every mode shares."""

    def __init__(self, mode: str) -> None:
        self._mode = mode
        self.policy_version = 0
        self._last_steps: dict[str, int] = {}

    def advance(self, request: RolloutRequest) -> None:
        self.policy_version = request.policy_version
        self._last_steps[request.mode] = request.global_step

    def as_state(self, scheduler_state: Mapping[str, JSON]) -> dict[str, JSON]:
        return {
            "mode": self._mode,
            "policy_version": self.policy_version,
            "last_steps": dict(self._last_steps),
            "scheduler": dict(scheduler_state),
        }

    def load(self, state: Mapping[str, JSON]) -> Mapping[str, JSON]:
        """Take over a state of any mode and return the real scheduler's part of it."""
        version, steps, scheduler_state = (state.get(key) for key in ("policy_version", "last_steps", "scheduler"))
        if type(version) is not int or not isinstance(steps, Mapping) or not isinstance(scheduler_state, Mapping):
            raise SchedulerError(
                f"state of the rollout scheduler cannot be loaded: it has {sorted(state)}; expected "
                "['last_steps', 'mode', 'policy_version', 'scheduler']"
            )
        self.policy_version = version
        self._last_steps = {mode: int(str(step)) for mode, step in steps.items()}
        return scheduler_state


class _LiveScheduler:
    """Mode real: passes every call on and counts it; builds the real scheduler at the first call that needs it."""

    def __init__(self, args: _BuildArgs, mode: str) -> None:
        self._make_real = args.make_real
        self._ledger = args.ledger
        self._progress = _Progress(mode)
        self._built: RolloutScheduler | None = None

    @property
    def _real(self) -> RolloutScheduler:
        if self._built is None:
            self._built = adapt_scheduler(self._make_real())
            self._ledger.count("built", "scheduler")
        return self._built

    def get_batch(self, request: RolloutRequest) -> RolloutBatch:
        """The real scheduler's batch, checked to be the answer to ``request``."""
        real = self._real
        self._ledger.count("called", "get_batch")
        batch = real.get_batch(request)
        _check_answer(batch, request, real)
        self._progress.advance(request)
        return batch

    def suspend(self) -> None:
        self._count_call("suspend").suspend()

    def resume(self) -> None:
        self._count_call("resume").resume()

    def update_weights(self, policy_version: int) -> None:
        self._count_call("update_weights").update_weights(policy_version)
        self._progress.policy_version = policy_version

    def collect_metrics(self) -> dict[str, float]:
        return self._count_call("collect_metrics").collect_metrics()

    def state_dict(self) -> dict[str, JSON]:
        return self._progress.as_state(self._count_call("state_dict").state_dict())

    def load_state_dict(self, state: Mapping[str, JSON]) -> None:
        scheduler_state = self._progress.load(state)
        # A run without a real scheduler (an old mock checkpoint, or before the first batch) leaves nothing to load.
        if scheduler_state:
            self._count_call("load_state_dict").load_state_dict(scheduler_state)

    def close(self) -> None:
        """Close the real scheduler if it was ever built."""
        if self._built is not None:
            self._count_call("close").close()

    def _count_call(self, name: str) -> RolloutScheduler:
        real = self._real
        self._ledger.count("called", name)
        return real


class _DumpScheduler(_LiveScheduler):
    """Mode dump: real, and every batch is on disk before the pipeline has it."""

    def __init__(self, args: _BuildArgs, writer: RecordingWriter | None) -> None:
        super().__init__(args, "dump")
        self._writer = writer
        self._metrics: dict[str, float] = {}

    def get_batch(self, request: RolloutRequest) -> RolloutBatch:
        batch = super().get_batch(request)
        # Asked for once per batch, on every rank: real schedulers may reset their metrics when asked.
        self._metrics = super().collect_metrics()
        scheduler_state = self._count_call("state_dict").state_dict()
        if self._writer is not None:
            info = StepInfo(
                step=request.global_step,
                mode=request.mode,
                scheduler_id=request.scheduler_id,
                run_id=self._writer.run_id,
                policy_version=request.policy_version,
                metrics={name: float(value) for name, value in self._metrics.items()},
                scheduler_state=scheduler_state,
            )
            _log_dumped(self._writer.write_step(batch, info), batch, request)
        return batch

    def collect_metrics(self) -> dict[str, float]:
        """What was measured, and recorded, with the last batch; empty before the first."""
        return dict(self._metrics)


class _MockScheduler:
    """Mode mock: answers from the recording; there is no real scheduler."""

    def __init__(self, args: _BuildArgs, reader: RecordingReader) -> None:
        self._reader = reader
        self._ledger = args.ledger
        self._is_writer = args.is_writer
        self._progress = _Progress("mock")
        self._metrics: Mapping[str, float] = {}
        self._scheduler_state: Mapping[str, JSON] = {}

    def get_batch(self, request: RolloutRequest) -> RolloutBatch:
        """The recorded batch; raises as ``RecordingReader.load_step``."""
        step = self._reader.load_step(request)
        self._ledger.count("answered", "get_batch")
        self._progress.advance(request)
        self._metrics, self._scheduler_state = step.info.metrics, step.info.scheduler_state
        if self._is_writer:
            logger.info(
                "[Rollout Mock] Loaded step %d: %s (samples=%d)", request.global_step, step.path, len(step.batch)
            )
        return step.batch

    def suspend(self) -> None:
        self._ledger.count("suppressed", "suspend")

    def resume(self) -> None:
        self._ledger.count("suppressed", "resume")

    def update_weights(self, policy_version: int) -> None:
        self._ledger.count("suppressed", "update_weights")
        self._progress.policy_version = policy_version

    def collect_metrics(self) -> dict[str, float]:
        """What the recording run measured for the last batch, each name under ``recorded/``."""
        self._ledger.count("answered", "collect_metrics")
        return {f"{RECORDED_PREFIX}{name}": value for name, value in self._metrics.items()}

    def state_dict(self) -> dict[str, JSON]:
        """Marked as mock; ``scheduler`` is the state that the real one had after the last recorded batch."""
        self._ledger.count("answered", "state_dict")
        return self._progress.as_state(self._scheduler_state)

    def load_state_dict(self, state: Mapping[str, JSON]) -> None:
        """Go on from a state of any mode."""
        self._scheduler_state = self._progress.load(state)
        self._ledger.count("answered", "load_state_dict")

    def close(self) -> None:
        self._ledger.count("suppressed", "close")


def _build_real(args: _BuildArgs) -> RolloutScheduler:
    return _LiveScheduler(args, "real")


def _build_dump(args: _BuildArgs) -> RolloutScheduler:
    # Other ranks must not look into the folder: the writer may already have made it a recording.
    if not args.is_writer:
        return _DumpScheduler(args, None)
    writer = open_recording(
        args.config.dump_dir,
        contract=args.contract,
        plan=args.plan,
        provenance=args.provenance,
        resume=args.resume,
    )
    return _DumpScheduler(args, writer)


def _build_mock(args: _BuildArgs) -> RolloutScheduler:
    dump_dir = args.config.dump_dir
    reader = RecordingReader(dump_dir)
    differences = check_contract(reader.manifest.contract, args.contract, args.config.on_mismatch, source=dump_dir)
    for difference in differences:
        if args.is_writer and not difference.is_blocking:
            logger.info("[Rollout Mock] Differs from the recording, as it may: %s", difference.describe())
    _check_plan(reader, args)
    return _MockScheduler(args, reader)


def _check_plan(reader: RecordingReader, args: _BuildArgs) -> None:
    """One rank reads and verifies all that will be replayed; the others, which read the same files, the headers."""
    started_s = time.perf_counter()
    size_bytes = reader.check_plan(args.plan, verify=args.is_writer)
    elapsed_s = time.perf_counter() - started_s
    if args.is_writer and elapsed_s > _SLOW_CHECK_S:
        logger.info(
            "[Rollout Mock] Verified %d recorded steps (%.2fMB) in %.1f s",
            len(args.plan),
            size_bytes / 2**20,
            elapsed_s,
        )


_BUILDERS: Mapping[str, Callable[[_BuildArgs], RolloutScheduler]] = {
    "real": _build_real,
    "dump": _build_dump,
    "mock": _build_mock,
}


def _check_answer(batch: object, request: RolloutRequest, real: RolloutScheduler) -> None:
    """Refuse what is no batch, or not as many trajectories as were asked for, before it is trained on or recorded."""
    if not isinstance(batch, RolloutBatch):
        raise SchedulerError(
            f"{type(real).__name__}.get_batch returned {type(batch).__name__} for {request.mode} step "
            f"{request.global_step}; expected RolloutBatch"
        )
    if batch.num_trajectories != request.batch_size:
        raise BatchError(
            f"{request.mode} step {request.global_step}: the scheduler returned {batch.num_trajectories} trajectories; "
            f"{request.batch_size} were asked for"
        )


def _log_dumped(written: WrittenStep, batch: RolloutBatch, request: RolloutRequest) -> None:
    logger.info(
        "[Rollout Mock] %s step %d: %s (samples=%d, size=%.2fMB)",
        "Already dumped, and equal," if written.was_present else "Dumped",
        request.global_step,
        written.path,
        len(batch),
        written.size_bytes / 2**20,
    )
    if batch.num_duplicate_rows:
        logger.info(
            "[Rollout Mock] Step %d: %d of %d rows have the content of another row",
            request.global_step,
            batch.num_duplicate_rows,
            len(batch),
        )
