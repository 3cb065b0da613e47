"""A process of a run loads its configuration, applies the environment, does its work, and ends with an exit code.

Contract: imports neither torch nor Megatron. The configuration is loaded and its environment applied before torch, NCCL
or TransformerEngine can read it; only then may the rest be imported.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from mock_scheduler.determinism.environment import apply_system_envs, read_launched_with
from mock_scheduler.support.processes import end_with_parent
from pipelines.config.loading import load_source
from pipelines.config.schema import PipelineConfig
from pipelines.tracking import report_failure

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
    """Keeps warnings that a user cannot act on out of a run's output."""
    for message in _FOREIGN_WARNINGS:
        warnings.filterwarnings("ignore", message=message)


def run_entry(
    arguments: Sequence[str] | None,
    *,
    prog: str,
    check: Callable[[PipelineConfig], None],
    run: Callable[[PipelineConfig], None],
    prepare: Callable[[], None] = lambda: None,
) -> int:
    """Loads the configuration, applies its environment, then calls ``run``; returns the process's exit code.

    ``prog``: in usage errors. ``check`` refuses configurations before anything else. ``run`` imports torch and all else
    that reads the environment itself. Where a launcher started this process, it ends with it.
    """
    end_with_parent(os.environ)

    def load() -> PipelineConfig:
        # Imports typer, for which a session, whose runs come here without arguments, should not wait.
        from mock_scheduler.config.loading import parse_config_arguments

        return load_source(parse_config_arguments(sys.argv[1:] if arguments is None else arguments, prog=prog))

    return attempt_run(load, check=check, run=run, prepare=prepare)


def attempt_run(
    load: Callable[[], PipelineConfig],
    *,
    check: Callable[[PipelineConfig], None],
    run: Callable[[PipelineConfig], None],
    prepare: Callable[[], None] = lambda: None,
) -> int:
    """One run from its configuration to its end, whose failure is reported as its own; returns its exit code."""
    started_s = time.time()
    global_rank = int(os.environ.get("RANK", "0"))
    output_dir: Path | None = None
    try:
        config = load()
        output_dir = Path(config.output_dir)
        check(config)
        apply_environment(config.system_envs)
        prepare()
        run(config)
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    # The edge of the process; BaseException, since torch.distributed.checkpoint's CheckpointException is no Exception.
    except BaseException as error:  # noqa: BLE001
        return report_failure(error, output_dir, global_rank=global_rank, started_s=started_s)
    return 0


def apply_environment(system_envs: Mapping[str, str]) -> None:
    """Export ``system_envs`` into this process, and keep other libraries' warnings on themselves off its terminal."""
    apply_system_envs(system_envs, environ=os.environ, modules=sys.modules, launched_with=read_launched_with())
    _silence_foreign_warnings()
