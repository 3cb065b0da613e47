"""The proxy at ROLL's seam: the ``RolloutScheduler`` of its agentic pipeline.

    pipeline_cls: mock_scheduler.adapters.roll.rollouts.RecordedAgenticPipeline     # in ROLL's configuration

or ``with_rollouts(YourPipeline)``. Contract: while the pipeline is made, the names ``RolloutScheduler`` and, in a run
that only replays, ``Cluster`` of its module stand for classes of this adapter; afterwards they are ROLL's again. Both
schedulers, of training and of validation, write one recording. Settings are read in the driver and go with the actor.
"""

from __future__ import annotations

import sys
import uuid
from importlib import import_module
from types import ModuleType
from typing import Any, TypeVar, cast

from mock_scheduler.adapters.rebinding import standing_for
from mock_scheduler.adapters.roll.scheduler import recorded_scheduler
from mock_scheduler.adapters.roll.settings import RollSettings, check_supported
from mock_scheduler.adapters.roll.suppress import cluster_factory
from mock_scheduler.adapters.settings import GivenSettings, load_settings
from mock_scheduler.errors import ConfigError
from mock_scheduler.ledger import Ledger
from mock_scheduler.recording.manifest import load_manifest
from mock_scheduler.recording.paths import MANIFEST_NAME
from mock_scheduler.recording.storage import open_storage

Pipeline = TypeVar("Pipeline", bound=type)
_AGENTIC = "roll.pipeline.agentic.agentic_pipeline"
_SCHEDULER, _CLUSTER = "RolloutScheduler", "Cluster"


def with_rollouts(pipeline: Pipeline, settings: GivenSettings = None, ledger: Ledger | None = None) -> Pipeline:
    """Return a pipeline of ROLL (``AgenticPipeline``, or your own) that records its rollouts, or replays them.

    Args:
        pipeline: its class.
        settings: None: of the file that ``MOCK_SCHEDULER_ROLL`` names, read when the pipeline is made.
        ledger: counts what this process suppresses; each scheduler's actor has one of its own (``counts``).
    """
    base: Any = pipeline

    class RecordedPipeline(base):  # type: ignore[misc]  # of ROLL
        """The pipeline with rollouts of the proxy."""

        def __init__(self, pipeline_config: Any, *arguments: Any, **options: Any) -> None:  # noqa: ANN401 - ROLL's
            check_supported(pipeline_config)
            read = load_settings(RollSettings, settings).with_absolute_folder()
            self.ledger = Ledger() if ledger is None else ledger
            self._replays = read.mock_config().modes_in_use == {"mock"}
            run_id = _find_run_id(read)
            module = _find_module(base)
            names: dict[str, Any] = {_SCHEDULER: recorded_scheduler(getattr(module, _SCHEDULER), read, run_id)}
            if self._replays:
                names[_CLUSTER] = cluster_factory(getattr(module, _CLUSTER), self.ledger)
            with standing_for(module, names):
                super().__init__(pipeline_config, *arguments, **options)

        def set_model_update_pair(self, *arguments: Any, **options: Any) -> None:  # noqa: ANN401
            if self._replays:
                self.ledger.count("suppressed", "model_update_pair")
            else:
                super().set_model_update_pair(*arguments, **options)

        def _validate_partial_gpu_config(self) -> bool:
            # It checks how the GPUs of training lie in those of sampling and scoring; a replay has training alone.
            if self._replays:
                self.ledger.count("suppressed", "partial_gpu_mode")
                return False
            return bool(super()._validate_partial_gpu_config())

    RecordedPipeline.__name__ = RecordedPipeline.__qualname__ = f"Recorded{base.__name__}"
    return cast("Pipeline", RecordedPipeline)


def _find_run_id(settings: RollSettings) -> str:
    """Two actors write one recording: both have this id. A run that goes on has that of its recording."""
    storage = open_storage(settings.mock_config().dump_dir)
    if settings.resume and storage.exists(MANIFEST_NAME):
        return load_manifest(storage).run_id
    return f"roll-{uuid.uuid4().hex}"


def _find_module(pipeline: type) -> ModuleType:
    """The module in which the pipeline, or what it is made of, looks up its classes."""
    for base in pipeline.__mro__:
        module = sys.modules[base.__module__]
        if hasattr(module, _SCHEDULER) and hasattr(module, _CLUSTER):
            return module
    raise ConfigError(
        f"{pipeline.__module__}.{pipeline.__name__} has no {_SCHEDULER} and {_CLUSTER} in its module: it is no agentic "
        "pipeline of ROLL. Pipelines of other kinds, as RLVR, are not recorded"
    )


def __getattr__(name: str) -> Any:  # noqa: ANN401 - a class of ROLL
    if name != "RecordedAgenticPipeline":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = with_rollouts(import_module(_AGENTIC).AgenticPipeline)
    globals()[name] = found
    return found
