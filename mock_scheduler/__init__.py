"""Record a rollout once; replay it under any layout, kernel or batching; prove whether training numerics moved.

``import mock_scheduler as ms`` gives the names below, each loaded when it is first used: importing this package imports
no torch. ``docs/api.md`` lists them with their docstrings, and ``docs/python.md`` shows them at work.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from mock_scheduler.support.versions import VERSION

__version__ = VERSION

#: The public names by what they are for, with the modules that define them.
PUBLIC_NAMES: dict[str, dict[str, str]] = {
    "Run with recorded rollouts": {
        "build_scheduler": "mock_scheduler.proxy.build",
        "build_async_scheduler": "mock_scheduler.proxy.build",
        "RolloutRequest": "mock_scheduler.scheduler",
        "RolloutScheduler": "mock_scheduler.scheduler",
        "AsyncRolloutScheduler": "mock_scheduler.scheduler",
        "RowShard": "mock_scheduler.scheduler",
        "BatchCodec": "mock_scheduler.scheduler",
        "Ledger": "mock_scheduler.ledger",
    },
    "Batches": {
        "RolloutBatch": "mock_scheduler.batch",
        "Trajectory": "mock_scheduler.batch",
        "SampleIdentity": "mock_scheduler.batch",
        "SamplingParams": "mock_scheduler.batch",
        "Termination": "mock_scheduler.batch",
    },
    "Recordings": {
        "read_recording": "mock_scheduler.api.reading",
        "Recording": "mock_scheduler.api.reading",
        "Contract": "mock_scheduler.recording.contract",
        "ContractField": "mock_scheduler.recording.contract",
        "Rule": "mock_scheduler.recording.contract",
    },
    "Traces": {
        "open_trace": "mock_scheduler.api.reading",
        "Trace": "mock_scheduler.api.reading",
        "TraceKey": "mock_scheduler.trace.entries",
    },
    "Verdicts": {
        "compare": "mock_scheduler.api.compare",
        "check_replicas": "mock_scheduler.api.compare",
        "align": "mock_scheduler.api.align",
        "Verdict": "mock_scheduler.api.compare",
        "VerdictKind": "mock_scheduler.verdict.verdict",
        "Divergence": "mock_scheduler.verdict.divergences",
        "Proof": "mock_scheduler.verdict.verdict",
        "Suspicion": "mock_scheduler.comparison.noise.suspicions",
        "Localisation": "mock_scheduler.verdict.localisation",
        "Consequence": "mock_scheduler.verdict.consequence.figures",
        "Alignment": "mock_scheduler.api.align",
        "ReplicaResult": "mock_scheduler.verdict.results",
    },
    "Rollout correction": {
        "correct": "mock_scheduler.correction",
        "Correction": "mock_scheduler.correction",
    },
    "Errors": {
        "MockSchedulerError": "mock_scheduler.errors",
        "ConfigError": "mock_scheduler.errors",
        "LayoutError": "mock_scheduler.errors",
        "BatchError": "mock_scheduler.errors",
        "CorrectionError": "mock_scheduler.errors",
        "RecordingError": "mock_scheduler.errors",
        "StepNotFoundError": "mock_scheduler.errors",
        "StepExistsError": "mock_scheduler.errors",
        "CorruptRecordingError": "mock_scheduler.errors",
        "ContractError": "mock_scheduler.errors",
        "SchedulerError": "mock_scheduler.errors",
        "DeterminismError": "mock_scheduler.errors",
        "RankDisagreementError": "mock_scheduler.errors",
        "TraceError": "mock_scheduler.errors",
        "ServiceError": "mock_scheduler.errors",
        "AlignmentError": "mock_scheduler.errors",
        "ExitCode": "mock_scheduler.errors",
    },
}

_MODULES = {name: module for names in PUBLIC_NAMES.values() for name, module in names.items()}

if TYPE_CHECKING:
    from mock_scheduler.api.align import Alignment as Alignment
    from mock_scheduler.api.align import align as align
    from mock_scheduler.api.compare import Verdict as Verdict
    from mock_scheduler.api.compare import check_replicas as check_replicas
    from mock_scheduler.api.compare import compare as compare
    from mock_scheduler.api.reading import Recording as Recording
    from mock_scheduler.api.reading import Trace as Trace
    from mock_scheduler.api.reading import open_trace as open_trace
    from mock_scheduler.api.reading import read_recording as read_recording
    from mock_scheduler.batch import RolloutBatch as RolloutBatch
    from mock_scheduler.batch import SampleIdentity as SampleIdentity
    from mock_scheduler.batch import SamplingParams as SamplingParams
    from mock_scheduler.batch import Termination as Termination
    from mock_scheduler.batch import Trajectory as Trajectory
    from mock_scheduler.comparison.noise.suspicions import Suspicion as Suspicion
    from mock_scheduler.correction import Correction as Correction
    from mock_scheduler.correction import correct as correct
    from mock_scheduler.errors import AlignmentError as AlignmentError
    from mock_scheduler.errors import BatchError as BatchError
    from mock_scheduler.errors import ConfigError as ConfigError
    from mock_scheduler.errors import ContractError as ContractError
    from mock_scheduler.errors import CorrectionError as CorrectionError
    from mock_scheduler.errors import CorruptRecordingError as CorruptRecordingError
    from mock_scheduler.errors import DeterminismError as DeterminismError
    from mock_scheduler.errors import ExitCode as ExitCode
    from mock_scheduler.errors import LayoutError as LayoutError
    from mock_scheduler.errors import MockSchedulerError as MockSchedulerError
    from mock_scheduler.errors import RankDisagreementError as RankDisagreementError
    from mock_scheduler.errors import RecordingError as RecordingError
    from mock_scheduler.errors import SchedulerError as SchedulerError
    from mock_scheduler.errors import ServiceError as ServiceError
    from mock_scheduler.errors import StepExistsError as StepExistsError
    from mock_scheduler.errors import StepNotFoundError as StepNotFoundError
    from mock_scheduler.errors import TraceError as TraceError
    from mock_scheduler.ledger import Ledger as Ledger
    from mock_scheduler.proxy.build import build_async_scheduler as build_async_scheduler
    from mock_scheduler.proxy.build import build_scheduler as build_scheduler
    from mock_scheduler.recording.contract import Contract as Contract
    from mock_scheduler.recording.contract import ContractField as ContractField
    from mock_scheduler.recording.contract import Rule as Rule
    from mock_scheduler.scheduler import AsyncRolloutScheduler as AsyncRolloutScheduler
    from mock_scheduler.scheduler import BatchCodec as BatchCodec
    from mock_scheduler.scheduler import RolloutRequest as RolloutRequest
    from mock_scheduler.scheduler import RolloutScheduler as RolloutScheduler
    from mock_scheduler.scheduler import RowShard as RowShard
    from mock_scheduler.trace.entries import TraceKey as TraceKey
    from mock_scheduler.verdict.consequence.figures import Consequence as Consequence
    from mock_scheduler.verdict.divergences import Divergence as Divergence
    from mock_scheduler.verdict.localisation import Localisation as Localisation
    from mock_scheduler.verdict.results import ReplicaResult as ReplicaResult
    from mock_scheduler.verdict.verdict import Proof as Proof
    from mock_scheduler.verdict.verdict import VerdictKind as VerdictKind


def __getattr__(name: str) -> object:
    """Load a public name when it is first used (PEP 562)."""
    if name not in _MODULES:
        raise AttributeError(f"module 'mock_scheduler' has no name {name!r}; docs/api.md lists those that it has")
    value: object = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value  # the next use finds it at once
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
