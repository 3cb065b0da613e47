"""Compares debug dumps step by step: ``python -m mock_scheduler.compare_debug_dumps``.

Arguments are those of NexRL's script of this name, and some of ours. Exit codes: 0 all equal within the tolerance,
1 different, 3 nothing compared or something missing, 5 bad arguments or a file that cannot be read.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from mock_scheduler.adapters.nexrl.comparison.dumps import StepReport, compare_dumps
from mock_scheduler.adapters.nexrl.comparison.report import render_report, report_as_json
from mock_scheduler.adapters.nexrl.comparison.values import Tolerance
from mock_scheduler.adapters.nexrl.names import check_step, find_steps
from mock_scheduler.config.steps import StepRanges
from mock_scheduler.errors import ConfigError, ExitCode, MockSchedulerError
from mock_scheduler.support.files import save_json

_DEFAULT_STEP = 1


class _Parser(argparse.ArgumentParser):
    """argparse whose usage errors are ConfigErrors: its own exit code, 2, is a verdict here."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}\n{self.format_usage().strip()}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, print the report, write the JSON; returns the exit code."""
    try:
        options = _build_parser().parse_args(arguments)
        reports = [_compare(options, step) for step in _steps(options)]
    except MockSchedulerError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return error.exit_code
    sys.stdout.write("\n\n".join(map(render_report, reports)) + "\n")
    exit_code = _worst(reports)
    if options.output is not None:
        try:
            save_json(options.output, _as_json(reports, exit_code), sort_keys=False)
        except OSError as error:
            sys.stderr.write(f"{options.output} cannot be written: {error}\n")
            return ExitCode.USAGE
    return exit_code


def _build_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m mock_scheduler.compare_debug_dumps", description="Compare debug dumps.")
    parser.add_argument(
        "--self_hosted_dir", required=True, type=Path, metavar="DIR", help="debug.dump_dir of the self-hosted run"
    )
    parser.add_argument(
        "--remote_api_dir", type=Path, metavar="DIR", help="debug.dump_dir of the run that trains on a service"
    )
    parser.add_argument(
        "--weaver_dir", type=Path, metavar="DIR", help="WEAVER_DEBUG_DUMP_DIR, or another run's debug.dump_dir"
    )
    parser.add_argument("--step", type=int, help=f"the step, default {_DEFAULT_STEP}; the first step of a run is 0")
    parser.add_argument("--steps", help="several steps, as in 0-3,7; each must be there")
    parser.add_argument("--num_ranks", type=int, help="ranks that there must be; default: as many as there are")
    parser.add_argument("--num_micros", type=int, help="micro-batches of a rank that there must be; default: likewise")
    parser.add_argument("--atol", type=float, default=Tolerance().atol, help="absolute tolerance (default %(default)s)")
    parser.add_argument("--rtol", type=float, default=Tolerance().rtol, help="relative tolerance (default %(default)s)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write the report as JSON")
    return parser


def _steps(options: argparse.Namespace) -> list[int]:
    """The steps to compare; an open range ends with the last one of the self-hosted dump."""
    _check_numbers(options)
    if options.steps is None:
        return [_DEFAULT_STEP if options.step is None else options.step]
    if options.step is not None:
        raise ConfigError("--step and --steps: give one of them")
    try:
        chosen = StepRanges.parse(options.steps)
    except ValueError as error:
        raise ConfigError(f"--steps {options.steps!r}: {error}") from error
    folder = options.self_hosted_dir
    present = find_steps(folder)
    steps: list[int] = []
    for first, last in chosen.ranges:
        if last is None:
            steps += [step for step in present if step >= first]
            continue
        for step in range(first, last + 1):
            check_step(step, present, f"the Self-Hosted dump {folder}")
            steps.append(step)
    if not steps:
        check_step(chosen.ranges[0][0], present, f"the Self-Hosted dump {folder}")
    return steps


def _check_numbers(options: argparse.Namespace) -> None:
    problems = [
        f"--{name} is {value}; expected at least {least}"
        for name, value, least in (
            ("step", options.step, 0),
            ("num_ranks", options.num_ranks, 1),
            ("num_micros", options.num_micros, 1),
            ("atol", options.atol, 0),
            ("rtol", options.rtol, 0),
        )
        if value is not None and not value >= least
    ]
    if problems:
        raise ConfigError("; ".join(problems))


def _compare(options: argparse.Namespace, step: int) -> StepReport:
    return compare_dumps(
        options.self_hosted_dir,
        options.remote_api_dir,
        options.weaver_dir,
        step,
        options.num_ranks,
        options.num_micros,
        tolerance=Tolerance(atol=options.atol, rtol=options.rtol),
    )


def _worst(reports: Sequence[StepReport]) -> ExitCode:
    """1 where any step differs, else 3 where any is incomplete."""
    codes = {report.exit_code for report in reports}
    for code in (ExitCode.DIVERGED, ExitCode.INCOMPARABLE):
        if code in codes:
            return code
    return ExitCode.ALIGNED


def _as_json(reports: Sequence[StepReport], exit_code: ExitCode) -> dict[str, object]:
    """One step's report as NexRL has it; several in a list."""
    if len(reports) == 1:
        return dict(report_as_json(reports[0]))
    return {"exit_code": int(exit_code), "steps": [report_as_json(report) for report in reports]}


if __name__ == "__main__":
    sys.exit(main())
