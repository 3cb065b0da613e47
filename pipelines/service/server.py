"""Serves training: ``python -m pipelines.service.server --config-path configs --config-name NAME a.b=c ...``.

Trains the Megatron model of the configuration under its layout on the datums of a client, by the protocol of
``mock_scheduler.remote``. In ``output_dir`` it has ``service.json`` while it is ready, with its URL, its process id and
the token of every request, for its owner alone. It leaves ``service_config.yaml``, ``service_metrics.jsonl`` and the
files of ``trace`` and ``debug`` there. A client with the same ``output_dir`` adds a run's own files beside them, and
``mock-scheduler compare`` reads both as one run.
It ends after ``POST /v1/finish``, or with an error where no request came for ``training_service.timeout_s`` seconds.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from mock_scheduler.determinism.environment import check_settings
from mock_scheduler.errors import ConfigError
from pipelines.agentic import run_entry
from pipelines.config.schema import PipelineConfig


def check_service(config: PipelineConfig) -> None:
    """Raise ``ConfigError`` for settings that a service cannot carry out."""
    check_settings(config.system_envs)
    if config.training_service.url is not None:
        raise ConfigError(
            f"training_service.url is {config.training_service.url}: a service trains itself and has no other; the "
            "client is the run that sets it. Leave it out here"
        )
    if config.trace.operations:
        raise ConfigError("trace.operations is true: a service keeps no operation log; set it to false")
    if config.save_steps or config.resume_from_checkpoint is not None:
        raise ConfigError(
            "save_steps and resume_from_checkpoint: a service writes and reads no checkpoints; set save_steps=0 and "
            "leave resume_from_checkpoint out"
        )


def _run_service(config: PipelineConfig) -> None:
    # Imported here, since torch and Megatron read the environment when they are imported.
    from pipelines.service.run import run_service

    run_service(config)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a service in this process; returns its exit code, one of ``errors.ExitCode`` but never 1."""
    return run_entry(arguments, prog="pipelines.service.server", check=check_service, run=_run_service)


if __name__ == "__main__":
    sys.exit(main())
