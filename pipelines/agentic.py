"""Runs the agentic pipeline: ``python -m pipelines.agentic --config-path configs --config-name NAME a.b=c ...``.

Every process of a run starts here: it loads its configuration, applies the environment, does its work and ends with an
exit code. Contract: importing this imports neither torch nor Megatron, since torch, NCCL and TransformerEngine read the
environment when they are imported.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from mock_scheduler.config.loading import parse_config_arguments
from mock_scheduler.determinism.environment import apply_system_envs, check_settings, read_launched_with
from mock_scheduler.determinism.settings import is_deterministic_mode, required_lines
from mock_scheduler.errors import DeterminismError
from mock_scheduler.support.loaded_code import note_loaded_code, save_loaded_code
from mock_scheduler.support.own_calls import count_own_calls
from mock_scheduler.support.processes import end_process, end_with_parent
from mock_scheduler.support.run_output import report_failure
from mock_scheduler.support.terminal_streams import guarded_terminal
from pipelines.config.loading import load_source
from pipelines.config.schema import PipelineConfig

#: Packages whose sources decide the bits of a run, beside the library's and installed ones.
_PACKAGES = ("pipelines",)

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


def no_preparation() -> None:
    """Changes nothing: a run without code of a user's own."""


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
    prepare: Callable[[], None] = no_preparation,
) -> int:
    """Loads the configuration, applies its environment, then calls ``run``; returns the process's exit code.

    ``prog``: in usage errors. ``check`` refuses configurations before anything else. ``run`` imports torch and all else
    that reads the environment itself. Where a launcher started this process, it ends with it.
    """
    end_with_parent(os.environ)
    started_s = time.time()
    global_rank = int(os.environ.get("RANK", "0"))
    output_dir: Path | None = None
    with guarded_terminal():
        try:
            config = load_source(parse_config_arguments(sys.argv[1:] if arguments is None else arguments, prog=prog))
            output_dir = Path(config.output_dir)
            check(config)
            apply_environment(config.system_envs)
            prepare()
            note_loaded_code(_PACKAGES)
            own = count_own_calls(_PACKAGES) if prepare is not no_preparation else None
            run(config)
            calls = None if own is None else own.calls
            save_loaded_code(output_dir, global_rank=global_rank, packages=_PACKAGES, calls=calls)
        except (KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        # The edge of the process; BaseException, since torch.distributed.checkpoint's CheckpointException is no
        # Exception.
        except BaseException as error:  # noqa: BLE001
            return report_failure(error, output_dir, global_rank=global_rank, started_s=started_s)
    return 0


def apply_environment(system_envs: Mapping[str, str]) -> None:
    """Exports ``system_envs`` into this process, and keeps warnings of other libraries about themselves off its
    terminal.
    """
    apply_system_envs(system_envs, environ=os.environ, modules=sys.modules, launched_with=read_launched_with())
    _silence_foreign_warnings()


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


def main(arguments: Sequence[str] | None = None, *, prepare: Callable[[], None] = no_preparation) -> int:
    """Runs the pipeline in this process; returns its exit code, one of ``errors.ExitCode`` but never 1.

    ``prepare`` is called between the environment and the import of the pipeline. A user's own entry module puts another
    kernel or a patch in there (``align.candidates``, key ``entry``).
    """
    return run_entry(
        arguments, prog="pipelines.agentic", check=check_replay_is_deterministic, run=_run_pipeline, prepare=prepare
    )


def _run_pipeline(config: PipelineConfig) -> None:
    # Imported here, since torch and Megatron read the environment when they are imported.
    from pipelines.run import run_pipeline

    run_pipeline(config)


if __name__ == "__main__":
    end_process(main())
