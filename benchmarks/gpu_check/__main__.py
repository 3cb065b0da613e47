"""Runs the checks one after another, each as a process of its own: ``python -m benchmarks.gpu_check [OPTIONS]``.

Exit codes: 0 all ran and held, 1 one failed, 4 one (or a part) was not run, 5 bad input. The report is rewritten after
each check, and a check's findings are in its own file from the moment they are there.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from threading import Event
from typing import NoReturn

from benchmarks.gpu_check.checks import CHECKS, LIMIT_S, Check, find_obstacle
from benchmarks.gpu_check.findings import (
    CheckResult,
    Outcome,
    conclude,
    exit_code_of,
    read_alignments,
    read_findings,
    write_json,
)
from benchmarks.gpu_check.machine import Machine
from benchmarks.gpu_check.processes import ROOT, child_environment, end_all, wait_for
from benchmarks.gpu_check.wheels import WheelError, install_lacking
from mock_scheduler.support.processes import handling_signals

_USAGE = 5
#: Kept of the time for the last report.
_CLOSING_S = 10.0
#: A check that has less than this left of the time is not begun.
_LEAST_S = 5.0
_MACHINE_S = 90.0
_SHOWN_CHARACTERS = 600
_ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


class UsageError(Exception):
    """Bad input; the message says what is wrong and what to do."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}\n{self.format_usage().strip()}")


@dataclass(kw_only=True, slots=True)
class Report:
    """The report so far; ``save`` writes it as JSON and, where its libraries are there, as a page.

    wheel_problems: why carried wheels were not installed. ended: set by a signal to this script. problem: why the last
    report was not written whole.
    """

    folder: Path
    machine: Machine
    started: str
    is_rehearsal: bool
    wheel_problems: Sequence[str]
    ended: Event
    results: list[CheckResult] = field(default_factory=list)
    problem: str = ""

    @property
    def exit_code(self) -> int:
        """Returns what the script would exit with."""
        return exit_code_of(self.results, is_partial=self.is_rehearsal or bool(self.wheel_problems))

    def save(self) -> None:
        """Writes both files, whole or not at all."""
        content = {
            "format": 1,
            "started": self.started,
            "is_rehearsal": self.is_rehearsal,
            "exit_code": self.exit_code,
            "machine": asdict(self.machine),
            "wheel_problems": list(self.wheel_problems),
            "checks": [asdict(result) for result in self.results],
        }
        try:
            write_json(self.folder / "gpu_check.json", content)
            from benchmarks.gpu_check.page import write_report_page  # its libraries may lack

            write_report_page(self.folder / "gpu_check.html", content)
            self.problem = ""
        except Exception as error:  # noqa: BLE001 - without a page, or with a full disk, the next check is run all the same
            self.problem = f"not all of it was written: {error}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the script, and returns its exit code."""
    started_s = time.monotonic()
    try:
        options = _parse(arguments)
        folder = _make_folder(options.output)
        ended = Event()
        with _make_work_folder() as work, handling_signals(_ENDING, lambda *_: ended.set()):
            environment, wheel_problems = _build_environment(options, folder, Path(work))
            machine = _read_machine(options.device, environment, folder)
            report = Report(
                folder=folder,
                machine=machine,
                started=time.strftime("%Y-%m-%d %H:%M:%S%z"),
                is_rehearsal=options.device == "cpu",
                wheel_problems=wheel_problems,
                ended=ended,
            )
            return _run(options, report, environment, Path(work), end_s=started_s + options.limit - _CLOSING_S)
    except (UsageError, WheelError) as error:
        print(f"gpu_check: {error}", file=sys.stderr)
        return _USAGE


def _run(options: argparse.Namespace, report: Report, environment: dict[str, str], work: Path, *, end_s: float) -> int:
    report.results = [CheckResult(name=check.name, reason="not begun") for check in options.checks]
    report.save()
    if report.is_rehearsal:
        print("A rehearsal on the CPU: nothing here says anything about a GPU.")
    for problem in report.wheel_problems:
        print(f"carried wheels: {problem}")
    for place, check in enumerate(options.checks):
        limit_s = share_of_time(options.checks[place:], report.machine, left_s=end_s - time.monotonic())
        report.results[place] = _run_check(check, report, environment, work, limit_s=limit_s)
        report.save()
        _say(check, report.results[place])
        if report.ended.is_set():
            break
    written = report.problem or "with its page, gpu_check.html"
    print(f"report: {report.folder / 'gpu_check.json'} ({written})", flush=True)
    return report.exit_code


def share_of_time(checks: Sequence[Check], machine: Machine, *, left_s: float) -> float:
    """Computes the seconds that the first of ``checks`` may take: its share among all that can be run.

    So what one leaves, and what a check that cannot be run would have taken, is there for the later ones.
    """
    shares = [0.0 if find_obstacle(check, machine) else check.budget_s for check in checks]
    return left_s * shares[0] / sum(shares) if shares[0] else 0.0


def _run_check(check: Check, report: Report, environment: dict[str, str], work: Path, *, limit_s: float) -> CheckResult:
    """Runs a check as a process; whatever it does, its findings are kept."""
    result, folder = CheckResult(name=check.name, limit_s=round(max(limit_s, 0.0), 1)), report.folder
    obstacle = find_obstacle(check, report.machine)
    if obstacle:
        return replace(result, reason=obstacle)
    if limit_s < _LEAST_S:
        return replace(result, reason="no time was left for it")
    findings, log = folder / "checks" / f"{check.name}.json", folder / "logs" / f"{check.name}.txt"
    findings.unlink(missing_ok=True)
    work = work / check.name
    work.mkdir()
    words = [check.name, str(folder / "machine.json"), str(work), str(findings)]
    started_s = time.monotonic()
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gpu_check.one_check", *words],
            cwd=ROOT,
            env={**environment, "TMPDIR": str(work)},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        code = wait_for(process, report.ended, end_s=started_s + limit_s)
        end_all(process, work)
    found, tables = read_findings(findings)
    if code != 0:
        tables += read_alignments(work)
    result = replace(result, seconds=round(time.monotonic() - started_s, 1), findings=found, tables=tables)
    result = conclude(result, exit_code=code, last_lines=_last_lines(log))
    if result.outcome is not Outcome.HELD:
        _keep_logs(work, log)
    shutil.rmtree(work, ignore_errors=True)
    return replace(result, reason="the script was ended from outside") if report.ended.is_set() else result


def _keep_logs(work: Path, log: Path) -> None:
    """Copies what each run of a check's alignments printed, beside the check's own log."""
    for path in work.rglob("run.log"):
        with suppress(OSError):
            shutil.copyfile(path, log.with_name(f"{log.stem}.{'.'.join(path.relative_to(work).parts[:-1])}.txt"))


def _last_lines(log: Path) -> str:
    text = log.read_text(encoding="utf-8", errors="replace").strip()
    return text[-_SHOWN_CHARACTERS:]


def _say(check: Check, result: CheckResult) -> None:
    counts = ", ".join(f"{result.count(kind)} {kind}" for kind in Outcome if result.count(kind))
    rest = "; ".join(text for text in (counts, result.reason) if text)
    print(f"{check.name}: {result.outcome} ({result.seconds:.0f} s){': ' + rest if rest else ''}", flush=True)
    for finding in result.findings:
        if finding.outcome in (Outcome.FAILED, Outcome.NOT_RUN):
            wanted = f"; expected {finding.expected}" if finding.expected else ""
            print(f"  {finding.outcome}: {finding.name}: {finding.found}{wanted}", flush=True)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = _Parser(prog="launch/gpu_check.sh", description="Checks on a GPU what no machine without one can show")
    parser.add_argument("--output", type=Path, default=Path("output/gpu_check"), help="the report's folder")
    parser.add_argument("--wheels", type=Path, help="a folder of wheels for what lacks here; they may be in parts")
    parser.add_argument("--only", default="", help=f"some of {','.join(check.name for check in CHECKS)}")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for everything (600)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if not options.limit > 0:
        raise UsageError(f"--limit {options.limit:g}: expected a positive number of seconds")
    names = [name.strip() for name in options.only.split(",") if name.strip()]
    unknown = [name for name in names if name not in {check.name for check in CHECKS}]
    if unknown:
        raise UsageError(f"--only {','.join(unknown)}: known are {', '.join(check.name for check in CHECKS)}")
    options.checks = [check for check in CHECKS if not names or check.name in names]
    return options


def _make_folder(folder: Path) -> Path:
    folder = folder.absolute()
    try:
        for name in ("checks", "logs"):
            (folder / name).mkdir(parents=True, exist_ok=True)
            for earlier in (folder / name).iterdir():
                earlier.unlink()
        write_json(folder / "gpu_check.json", {"format": 1, "checks": []})
    except OSError as error:
        raise UsageError(
            f"--output {folder} cannot be written: {error.strerror}; name a folder that this user may write"
        ) from error
    return folder


def _make_work_folder() -> tempfile.TemporaryDirectory[str]:
    """Makes a folder with a short name, since sockets lie in it, outside the report, which may be copied meanwhile."""
    try:
        return tempfile.TemporaryDirectory(prefix="gpu_check-", ignore_cleanup_errors=True)
    except OSError as error:
        raise UsageError(f"{error.strerror}; set TMPDIR to a folder that this user may write") from error


def _build_environment(options: argparse.Namespace, folder: Path, work: Path) -> tuple[dict[str, str], Sequence[str]]:
    """Makes the environment of all checks; installs the carried wheels of what lacks, and says which it could not."""
    environment = child_environment(options.device, TMPDIR=str(work))
    if options.wheels is None:
        return environment, ()
    packages = folder / "packages"
    problems = install_lacking(options.wheels, packages, work=work / "wheels")
    if packages.is_dir():
        # For this process too, whose page needs them.
        sys.path.append(str(packages))
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH", ""), str(packages)]))
    return environment, problems


def _read_machine(device: str, environment: dict[str, str], folder: Path) -> Machine:
    command = [sys.executable, "-m", "benchmarks.gpu_check.machine", device]
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=_MACHINE_S
        )
        output, ended = done.stdout, done.stderr.strip() or f"exit code {done.returncode}"
    except subprocess.TimeoutExpired as error:
        output = (error.stdout or b"").decode()
        ended = f"it did not answer within {_MACHINE_S:.0f} s"
    try:
        last = next(line for line in reversed(output.splitlines()) if line.startswith("{"))
        machine = Machine.of_json(json.loads(last))
    except (StopIteration, ValueError):
        problem = f"the process that looked for a GPU ended: {ended[-_SHOWN_CHARACTERS:]}"
        machine = Machine(device=device, cuda_problem=problem)
    write_json(folder / "machine.json", asdict(machine))
    return machine


if __name__ == "__main__":
    sys.exit(main())
