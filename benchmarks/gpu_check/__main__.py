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
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import NoReturn

from benchmarks.gpu_check.checks import CHECKS, LIMIT_S, Check, find_obstacle
from benchmarks.gpu_check.findings import (
    CheckResult,
    Outcome,
    conclude,
    exit_code_of,
    read_findings,
    write_json,
)
from benchmarks.gpu_check.machine import Machine
from benchmarks.gpu_check.processes import ROOT, child_environment
from benchmarks.gpu_check.wheels import WheelError, choose_lacking, install, join_parts

_USAGE = 5
#: A check that has less than this left of the time is not begun.
_LEAST_S = 5.0
_MACHINE_S = 120.0
_SHOWN_CHARACTERS = 600


class UsageError(Exception):
    """Bad input; the message says what is wrong and what to do."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}\n{self.format_usage().strip()}")


@dataclass(kw_only=True, slots=True)
class Report:
    """The report so far; ``save`` writes it as JSON and, where its libraries are there, as a page."""

    folder: Path
    machine: Machine
    started: str
    is_rehearsal: bool
    results: list[CheckResult] = field(default_factory=list)
    page_problem: str = ""

    @property
    def exit_code(self) -> int:
        """Returns what the script would exit with."""
        return exit_code_of(self.results, is_rehearsal=self.is_rehearsal)

    def save(self) -> None:
        """Writes both files, whole or not at all."""
        content = {
            "format": 1,
            "started": self.started,
            "is_rehearsal": self.is_rehearsal,
            "exit_code": self.exit_code,
            "machine": asdict(self.machine),
            "checks": [asdict(result) for result in self.results],
        }
        write_json(self.folder / "gpu_check.json", content)
        if not self.page_problem:
            try:
                from benchmarks.gpu_check.page import write_report_page  # its libraries may lack

                write_report_page(self.folder / "gpu_check.html", content)
            except ImportError as error:
                self.page_problem = f"no page was written: {error}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the script, and returns its exit code."""
    try:
        options = _parse(arguments)
        folder = _make_folder(options.output)
        environment = _build_environment(options, folder)
        machine = _read_machine(options.device, environment, folder)
    except (UsageError, WheelError) as error:
        print(f"gpu_check: {error}", file=sys.stderr)
        return _USAGE
    return _run(options, folder, environment, machine)


def _run(options: argparse.Namespace, folder: Path, environment: dict[str, str], machine: Machine) -> int:
    started_s = time.monotonic()
    rehearsal = options.device == "cpu"
    report = Report(
        folder=folder,
        machine=machine,
        started=time.strftime("%Y-%m-%d %H:%M:%S%z"),
        is_rehearsal=rehearsal,
    )
    report.results = [CheckResult(name=check.name, reason="not begun") for check in options.checks]
    if rehearsal:
        print("A rehearsal on the CPU: nothing here says anything about a GPU.")
    for place, check in enumerate(options.checks):
        left_s = options.limit - (time.monotonic() - started_s)
        report.results[place] = _run_check(
            check, machine, folder, environment, limit_s=min(check.budget_s * options.limit / LIMIT_S, left_s)
        )
        report.save()
        _say(check, report.results[place])
    print(
        f"report: {folder / 'gpu_check.json'}" + (f" ({report.page_problem})" if report.page_problem else " and .html")
    )
    return report.exit_code


def _run_check(
    check: Check, machine: Machine, folder: Path, environment: dict[str, str], *, limit_s: float
) -> CheckResult:
    """Runs a check as a process; whatever it does, its findings are kept."""
    result = CheckResult(name=check.name, limit_s=round(max(limit_s, 0.0), 1))
    obstacle = find_obstacle(check, machine)
    if obstacle:
        return replace(result, reason=obstacle)
    if limit_s < _LEAST_S:
        return replace(result, reason="no time was left for it")
    findings, log, work = (folder / place for place in (f"checks/{check.name}.json", f"logs/{check.name}.txt", "work"))
    findings.unlink(missing_ok=True)
    work = work / check.name
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    words = [check.name, str(folder / "machine.json"), str(work), str(findings)]
    started_s = time.monotonic()
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gpu_check.one_check", *words],
            cwd=ROOT,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
    shutil.rmtree(work, ignore_errors=True)
    found, tables = read_findings(findings)
    result = replace(result, seconds=round(time.monotonic() - started_s, 1), findings=found, tables=tables)
    return conclude(result, exit_code=code, last_lines=_last_lines(log))


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends what is left of a check: its process, and those of its session."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


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
        for name in ("checks", "logs", "work"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        write_json(folder / "gpu_check.json", {"format": 1, "checks": []})
    except OSError as error:
        raise UsageError(
            f"--output {folder} cannot be written: {error.strerror}; name a folder that this user may write"
        ) from error
    return folder


def _build_environment(options: argparse.Namespace, folder: Path) -> dict[str, str]:
    """Makes the environment of all checks; installs the carried wheels of what lacks."""
    environment = child_environment(options.device, TMPDIR=str(folder / "work"))
    if options.wheels is None:
        return environment
    packages = folder / "packages"
    lacking = choose_lacking(join_parts(options.wheels, folder / "work" / "wheels"))
    if lacking:
        print(f"installing {', '.join(path.name for path in lacking)}", flush=True)
        install(lacking, packages)
    if packages.is_dir():
        # For this process too, whose page needs them.
        sys.path.append(str(packages))
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH", ""), str(packages)]))
    return environment


def _read_machine(device: str, environment: dict[str, str], folder: Path) -> Machine:
    command = [sys.executable, "-m", "benchmarks.gpu_check.machine", device]
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=_MACHINE_S
        )
    except subprocess.TimeoutExpired:
        return Machine(device=device, cuda_problem=f"CUDA did not answer within {_MACHINE_S:.0f} s")
    try:
        machine = Machine.of_json(json.loads(done.stdout.splitlines()[-1]))
    except (IndexError, ValueError):
        ended = (done.stderr.strip() or f"exit code {done.returncode}")[-_SHOWN_CHARACTERS:]
        machine = Machine(device=device, cuda_problem=f"the process that looked for a GPU ended: {ended}")
    write_json(folder / "machine.json", asdict(machine))
    return machine


if __name__ == "__main__":
    sys.exit(main())
