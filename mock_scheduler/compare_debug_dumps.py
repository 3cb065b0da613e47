"""Compares debug dumps step by step: ``python -m mock_scheduler.compare_debug_dumps``.

Contract: its options are NexRL's, and some of ours. Exit codes are 0 all equal within the tolerance, 1 different,
3 nothing compared or something missing, 5 bad arguments or a file that cannot be read.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from mock_scheduler.adapters.nexrl.comparison.report import StepReport, compare_dumps, render_report, report_as_json
from mock_scheduler.adapters.nexrl.comparison.values import Tolerance
from mock_scheduler.adapters.nexrl.names import check_step, find_steps
from mock_scheduler.config.steps import StepRanges
from mock_scheduler.errors import ConfigError, ExitCode, MockSchedulerError
from mock_scheduler.support.arguments import parse_arguments
from mock_scheduler.support.files import save_json
from mock_scheduler.support.terminal_streams import guarded_terminal, print_message, print_output

_DEFAULT_STEP = 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Compares, prints the report and writes the JSON; returns the exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    try:
        with guarded_terminal():
            return parse_arguments(compare, given, prog="python -m mock_scheduler.compare_debug_dumps")
    except MockSchedulerError as error:
        print_message(f"{type(error).__name__}: {error}")
        return error.exit_code


def compare(
    self_hosted_dir: Annotated[
        Path, typer.Option("--self_hosted_dir", metavar="DIR", help="debug.dump_dir of the self-hosted run")
    ],
    remote_api_dir: Annotated[
        Path | None,
        typer.Option("--remote_api_dir", metavar="DIR", help="debug.dump_dir of the run that trains on a service"),
    ] = None,
    weaver_dir: Annotated[
        Path | None,
        typer.Option("--weaver_dir", metavar="DIR", help="WEAVER_DEBUG_DUMP_DIR, or another run's debug.dump_dir"),
    ] = None,
    step: Annotated[
        int | None,
        typer.Option("--step", help=f"the step, default {_DEFAULT_STEP}; the first step of a run is 0"),
    ] = None,
    steps: Annotated[str | None, typer.Option("--steps", help="several steps, as in 0-3,7; each must be there")] = None,
    num_ranks: Annotated[
        int | None, typer.Option("--num_ranks", help="ranks that there must be; default: as many as there are")
    ] = None,
    num_micros: Annotated[
        int | None,
        typer.Option("--num_micros", help="micro-batches of a rank that there must be; default: likewise"),
    ] = None,
    atol: Annotated[float, typer.Option("--atol", help="absolute tolerance")] = Tolerance().atol,
    rtol: Annotated[float, typer.Option("--rtol", help="relative tolerance")] = Tolerance().rtol,
    output: Annotated[
        Path | None, typer.Option("--output", metavar="FILE", help="also write the report as JSON")
    ] = None,
) -> int:
    """Compare debug dumps."""
    _check_least(
        {
            "step": (step, 0),
            "num_ranks": (num_ranks, 1),
            "num_micros": (num_micros, 1),
            "atol": (atol, 0),
            "rtol": (rtol, 0),
        }
    )
    tolerance = Tolerance(atol=atol, rtol=rtol)
    reports = [
        compare_dumps(self_hosted_dir, remote_api_dir, weaver_dir, number, num_ranks, num_micros, tolerance=tolerance)
        for number in _choose_steps(self_hosted_dir, step, steps)
    ]
    print_output("\n\n".join(map(render_report, reports)))
    exit_code = _worst(reports)
    if output is not None:
        try:
            save_json(output, _as_json(reports, exit_code), sort_keys=False)
        except OSError as error:
            print_message(f"{output} cannot be written: {error}")
            return ExitCode.USAGE
    return exit_code


def _check_least(numbers: Mapping[str, tuple[float | None, int]]) -> None:
    """Raises ``ConfigError`` listing every option whose number is less than its least one; NaN is too."""
    problems = [
        f"--{name} is {value}; expected at least {least}"
        for name, (value, least) in numbers.items()
        if value is not None and not value >= least
    ]
    if problems:
        raise ConfigError("; ".join(problems))


def _choose_steps(folder: Path, step: int | None, given: str | None) -> list[int]:
    """Returns the steps to compare; an open range ends with the last step of the self-hosted dump."""
    if given is None:
        return [_DEFAULT_STEP if step is None else step]
    if step is not None:
        raise ConfigError("--step and --steps: give one of them")
    try:
        chosen = StepRanges.parse(given)
    except ValueError as error:
        raise ConfigError(f"--steps {given!r}: {error}") from error
    present = find_steps(folder)
    steps: list[int] = []
    for first, last in chosen.ranges:
        if last is None:
            steps += [number for number in present if number >= first]
            continue
        for number in range(first, last + 1):
            check_step(number, present, f"the Self-Hosted dump {folder}")
            steps.append(number)
    if not steps:
        check_step(chosen.ranges[0][0], present, f"the Self-Hosted dump {folder}")
    return steps


def _worst(reports: Sequence[StepReport]) -> ExitCode:
    """1 where any step differs, else 3 where any is incomplete."""
    codes = {report.exit_code for report in reports}
    for code in (ExitCode.DIVERGED, ExitCode.INCOMPARABLE):
        if code in codes:
            return code
    return ExitCode.ALIGNED


def _as_json(reports: Sequence[StepReport], exit_code: ExitCode) -> dict[str, object]:
    """Returns one step's report in NexRL's layout; several reports in a list."""
    if len(reports) == 1:
        return dict(report_as_json(reports[0]))
    return {"exit_code": int(exit_code), "steps": [report_as_json(report) for report in reports]}


if __name__ == "__main__":
    sys.exit(main())
