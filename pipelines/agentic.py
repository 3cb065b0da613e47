"""Entry of the agentic pipeline: ``python -m pipelines.agentic --config-path configs --config-name NAME a.b=c ...``.

Every process of a run starts here. The configuration is loaded and its environment applied before torch, NCCL or
TransformerEngine can read it; only then is the rest imported.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from mock_scheduler.determinism.environment import check_settings
from mock_scheduler.determinism.settings import is_deterministic_mode, required_lines
from mock_scheduler.errors import DeterminismError
from pipelines.config.schema import PipelineConfig
from pipelines.entry import run_entry


def check_replay_is_deterministic(config: PipelineConfig) -> None:
    """Refuse to record or replay without deterministic settings, unless the configuration says so.

    Raises:
        DeterminismError: settings are missing or conflict; the message has the lines to add.
    """
    check_settings(config.system_envs)
    mock = config.rollout_mock
    if mock.modes_in_use == {"real"} or mock.allow_nondeterministic:
        return
    if not is_deterministic_mode(config.system_envs):
        lines = "".join(f"    {line}\n" for line in required_lines())
        raise DeterminismError(
            f"rollout_mock.mode {mock.mode} without deterministic settings proves nothing: two runs would differ by "
            "themselves. Add to the configuration:\n"
            f"  system_envs:\n{lines}"
            "or set rollout_mock.allow_nondeterministic=true to go on without them."
        )


def main(arguments: Sequence[str] | None = None, *, prepare: Callable[[], None] = lambda: None) -> int:
    """Run the pipeline in this process; returns its exit code, one of ``errors.ExitCode`` but never 1.

    ``prepare`` is called after the environment was applied and before the pipeline is imported: the place for an
    entry module of one's own to put another kernel or a patch in (``align.candidates``, key ``entry``).
    """
    return run_entry(
        arguments, prog="pipelines.agentic", check=check_replay_is_deterministic, run=_run_pipeline, prepare=prepare
    )


def _run_pipeline(config: PipelineConfig) -> None:
    # Imported here, since torch and Megatron read the environment when they are imported.
    from pipelines.run import run_pipeline

    run_pipeline(config)


if __name__ == "__main__":
    sys.exit(main())
