"""Entry of the agentic pipeline: ``python -m pipelines.agentic --config_path configs --config_name NAME a.b=c ...``.

Every process of a run starts here. The configuration is loaded and its environment applied before torch, NCCL or
TransformerEngine can read it; only then is the rest imported.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

from mock_scheduler.config.loading import parse_config_arguments
from mock_scheduler.config.schema import PipelineConfig
from mock_scheduler.determinism.environment import apply_system_envs, check_settings, read_launched_with
from mock_scheduler.determinism.settings import is_deterministic_mode, required_lines
from mock_scheduler.errors import DeterminismError
from mock_scheduler.processes import end_with_parent
from pipelines.tracking import report_failure


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


# Warnings of megatron-core 0.16.1 to 0.19.2 and torch 2.13 on themselves: optional packages that are absent (what is in
# use is in the run's provenance), deprecated calls between the two, a gradient that Megatron reads to test for None.
_FOREIGN_WARNINGS = (
    ".*(Transformer Engine|Apex).*not installed.*",
    "full scope is deprecated.*",
    ".*(reduce_scatter_tensor|all_gather_into_tensor)` is deprecated.*",
    "`load_state_dict` is deprecated.*",
    "Please use DTensor instead.*",
    "The .grad attribute of a Tensor that is not a leaf Tensor.*",
)


def _silence_foreign_warnings() -> None:
    """Keep a run's output to what its user can act on."""
    for message in _FOREIGN_WARNINGS:
        warnings.filterwarnings("ignore", message=message)


def main(arguments: Sequence[str] | None = None, *, prepare: Callable[[], None] = lambda: None) -> int:
    """Run the pipeline in this process; returns its exit code, one of ``errors.ExitCode`` but never 1.

    Where a launcher started this process, it ends with it.

    ``prepare`` is called after the environment was applied and before the pipeline is imported: the place for an
    entry module of one's own to put another kernel or a patch in (``align.candidates``, key ``entry``).
    """
    end_with_parent(os.environ)
    started_s = time.time()
    global_rank = int(os.environ.get("RANK", "0"))
    output_dir: Path | None = None
    try:
        source = parse_config_arguments(sys.argv[1:] if arguments is None else arguments, prog="pipelines.agentic")
        config = source.load()
        output_dir = Path(config.output_dir)
        check_replay_is_deterministic(config)
        apply_system_envs(
            config.system_envs, environ=os.environ, modules=sys.modules, launched_with=read_launched_with()
        )
        _silence_foreign_warnings()
        prepare()
        # Imported here, since torch and Megatron read the environment when they are imported.
        from pipelines.run import run_pipeline

        run_pipeline(config)
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    # The edge of the process; BaseException, since torch.distributed.checkpoint's CheckpointException is no Exception.
    except BaseException as error:  # noqa: BLE001
        return report_failure(error, output_dir, global_rank=global_rank, started_s=started_s)
    return 0


if __name__ == "__main__":
    sys.exit(main())
