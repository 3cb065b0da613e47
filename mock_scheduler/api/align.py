"""Carries out an alignment from Python: a baseline, its candidates, and a verdict for each."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from rich.text import Text

from mock_scheduler.alignment.executors.build import Execution, build_execution
from mock_scheduler.alignment.executors.jobs import check_no_other_job
from mock_scheduler.alignment.executors.protocol import MakeLaunch, OutlivesDriver
from mock_scheduler.alignment.plan.plan import plan_alignment
from mock_scheduler.alignment.plan.planned_run import AlignPlan
from mock_scheduler.alignment.prove.alignment import AlignmentRunner
from mock_scheduler.alignment.prove.proof_runs import order_reductions
from mock_scheduler.alignment.runs.run_cache import RunCache, read_machine
from mock_scheduler.alignment.runs.run_store import RunStore, open_folder, say_taken_again
from mock_scheduler.api.compare import Verdict
from mock_scheduler.api.stored_answer import find_answer, save_answer
from mock_scheduler.config.locating import locate_config
from mock_scheduler.config.stored_code import Use
from mock_scheduler.display.console import Console
from mock_scheduler.display.pages import render_summary
from mock_scheduler.display.terminal import print_lines
from mock_scheduler.errors import ExitCode
from mock_scheduler.program import ConfigLoader, RunConfig, check_stored_code, find_program
from mock_scheduler.report.alignment.builder import build_view
from mock_scheduler.report.alignment.ci import write_junit
from mock_scheduler.report.alignment.page import write_alignment_page
from mock_scheduler.report.alignment.view import AlignmentView
from mock_scheduler.report.json_file import save_result
from mock_scheduler.report.origin import describe_origin
from mock_scheduler.run_folder.command_folder import ALIGN_MARKER, claim_folder
from mock_scheduler.run_folder.finished_run import RunSummary
from mock_scheduler.run_folder.inputs import ComparedInput
from mock_scheduler.support.local_key import mark_own
from mock_scheduler.support.run_files import ALIGN_FILE
from mock_scheduler.support.text import printable
from mock_scheduler.verdict.consequence.figures import CONSEQUENCE_KINDS
from mock_scheduler.verdict.results import AlignmentResult, CandidateResult, ComparisonResult
from mock_scheduler.verdict.wording.verdicts import describe_proved_by

PAGE_FILE = "align.html"
_REPORTS = (ALIGN_FILE, PAGE_FILE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Alignment:
    """Holds a finished alignment: one baseline, several candidates, a verdict for each. A notebook shows its table.

    Attributes:
        result: Every fact: overrides, runs, proofs, localisation, consequence and seconds of each candidate.
        view: The same as its reports lay it out.
    """

    result: AlignmentResult
    view: AlignmentView

    @property
    def output_dir(self) -> Path:
        """Returns the folder with runs, recording and reports."""
        return self.result.output_dir

    @property
    def exit_code(self) -> ExitCode:
        """Returns the exit code of the gravest verdict."""
        return self.result.exit_code

    @property
    def passes(self) -> bool:
        """Whether every candidate passes."""
        return self.result.passes

    @property
    def verdicts(self) -> Mapping[str, Verdict]:
        """Returns the verdicts by the names of the candidates, in their order."""
        return {candidate.name: self._verdict(candidate) for candidate in self.result.candidates}

    def __getitem__(self, name: str) -> Verdict:
        return self.verdicts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.verdicts)

    def __len__(self) -> int:
        return len(self.result.candidates)

    def save_html(self, path: str | Path) -> None:
        """Write the alignment as one page that opens offline; raises ``AlignmentError`` where it cannot."""
        write_alignment_page(self.view, Path(path))

    def save_json(self, path: str | Path) -> None:
        """Write every fact as one JSON object (``align.json``); raises ``AlignmentError`` where it cannot."""
        save_result(self.result, self.view, Path(path))

    def save_junit(self, path: str | Path) -> None:
        """Write the verdicts as JUnit XML; raises ``AlignmentError`` where it cannot."""
        write_junit(self.view, Path(path))

    def __str__(self) -> str:
        return printable(str(self.result))

    def _repr_html_(self) -> str:
        return render_summary(
            f"Alignment of {self.view.config_name}: {self.view.headline}",
            [("folder", str(self.output_dir)), ("baseline", self.result.baseline.layout)],
            tone="good" if self.passes else "bad",
            columns=("candidate", "layout", "verdict", "proved by", "found"),
            table=[
                (item.name, item.layout, item.verdict.kind.value, describe_proved_by(item.verdict), verdict.headline)
                for item, verdict in zip(self.result.candidates, self.verdicts.values(), strict=True)
            ],
        )

    def _verdict(self, candidate: CandidateResult) -> Verdict:
        comparison = ComparisonResult(
            baseline=_side(self.result.baseline, self.result.baseline.output_dir),
            candidate=_side(candidate.run, self.output_dir / candidate.name),
            bounds=self.result.bounds,
            verdict=candidate.verdict,
        )
        return Verdict.of(comparison)


def align(
    config_name: str,
    overrides: Sequence[str] = (),
    *,
    config_path: str | Path | None = None,
    output_dir: str | Path | None = None,
    recording: str | Path | None = None,
    overwrite: bool = False,
    is_quiet: bool = True,
    run_stored_code: bool = False,
) -> Alignment:
    """Record a baseline, replay it under every candidate of a configuration, and give a verdict for each.

    Runs are started as processes of their own, as ``mock-scheduler align`` starts them. ``align.json`` and
    ``align.html`` are written into the alignment's folder. A finished run there is taken again where an equal one would
    be made.

    Args:
        config_name: The name of a YAML file in ``config_path``, without ``.yaml``; or the path of one.
        config_path: The folder of the named file; ``None``: ``configs``.
        overrides: Further keys, such as ``["max_steps=2"]``, in Hydra's grammar.
        output_dir: The folder of the alignment; ``None``: as the configuration says.
        recording: A recording for the baseline to replay too; ``None``: the baseline records.
        overwrite: Run everything anew.
        is_quiet: Print nothing of the runs' progress.
        run_stored_code: Also run the code that a stored ``config.yaml`` names: interpreter, entry, program, variables.
            Also take finished runs again that another user made.

    Raises:
        ConfigError: The configuration cannot be aligned, or another user made a run in the folder.
        AlignmentError: The baseline failed.
    """
    name, folder = locate_config(config_name, config_path)
    return run_alignment(
        AlignmentOrder(
            config_name=name,
            config_path=Path(folder),
            overrides=overrides,
            output_dir=None if output_dir is None else Path(output_dir),
            recording_dir=None if recording is None else Path(recording),
            overwrite=overwrite,
            console=Console(file=io.StringIO()) if is_quiet else Console(),
            run_stored_code=run_stored_code,
        )
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class AlignmentOrder:
    """Asks for an alignment. Arguments are as in ``align``.

    Attributes:
        console: shows the progress.
        make_launch: makes what carries the runs out; ``None``: as ``align.executor`` says.
        takes_foreign: finished runs of another user are taken again too; ``None`` is ``run_stored_code``.
    """

    config_name: str
    config_path: Path
    overrides: Sequence[str]
    output_dir: Path | None
    recording_dir: Path | None
    overwrite: bool
    console: Console
    make_launch: MakeLaunch | None = None
    run_stored_code: bool = False
    takes_foreign: bool | None = None


def run_alignment(order: AlignmentOrder) -> Alignment:
    """Plan, run and prove; ``align.json`` is saved anew after every stage, so an interrupt loses nothing.

    Raises as ``align`` does.
    """
    with _opened(order) as opened:
        return opened.carry_out()


def view_alignment(order: AlignmentOrder) -> AlignmentView:
    """Gives the view of ``run_alignment``; compares nothing where that would only repeat a finished alignment."""
    with _opened(order) as opened:
        found = opened.find_answer()
        return opened.carry_out().view if found is None else found


@contextmanager
def _opened(order: AlignmentOrder) -> Iterator[_Opened]:
    """Plans an alignment, and claims its folder."""
    config_name, config_path = order.config_name, order.config_path
    told = check_stored_code(config_name, config_path, use=Use.ALIGN, run_stored_code=order.run_stored_code)
    print_lines(order.console, told)
    program = find_program(config_name, config_path)
    load = program.build_loader(config_name, config_path)
    config = load(order.overrides)
    plan = plan_alignment(
        load,
        program=program,
        overrides=order.overrides,
        output_dir=order.output_dir,
        recording_dir=order.recording_dir,
        trace_kinds=_further_kinds(config),
    )
    plan = order_reductions(plan, load=load)
    takes_foreign = order.run_stored_code if order.takes_foreign is None else order.takes_foreign
    execution = _build_execution(plan, order)
    with claim_folder(plan.output_dir, marker=ALIGN_MARKER):
        is_own = not plan.output_dir.is_symlink() and ALIGN_MARKER.is_in(plan.output_dir)
        if order.overwrite and is_own and isinstance(execution.launch, OutlivesDriver):
            execution.launch.end_earlier(plan.output_dir)
        check_no_other_job(plan.output_dir, execution.executor)
        open_folder(plan.output_dir, fresh=order.overwrite)
        cache = RunCache(
            root=plan.output_dir,
            recording_dir=plan.recording_dir,
            takes_foreign=takes_foreign,
            environ=execution.environ,
            machine=execution.machine or read_machine(),
        )
        name = _name_alignment(config_name, config)
        yield _Opened(order=order, plan=plan, load=load, execution=execution, cache=cache, name=name)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Opened:
    """An alignment that was planned, in its folder."""

    order: AlignmentOrder
    plan: AlignPlan
    load: ConfigLoader
    execution: Execution
    cache: RunCache
    name: str

    def find_answer(self) -> AlignmentView | None:
        view = find_answer(self.plan, self.cache, config_name=self.name, reports=_REPORTS)
        if view is not None:
            for run in self.plan.runs:
                say_taken_again(run, self.order.console)
            self.order.console.print("every comparison is taken again too: no file has changed since")
        return view

    def carry_out(self) -> Alignment:
        plan, console = self.plan, self.order.console
        reports = _Reports(result_path=plan.output_dir / ALIGN_FILE)
        runner = AlignmentRunner(
            plan=plan,
            config_name=self.name,
            load=self.load,
            store=RunStore(
                launch=self.execution.launch,
                cache=self.cache,
                console=console,
                at_once=self.execution.at_once,
            ),
            save=reports.save,
            console=console,
        )
        result = runner.run()
        view = reports.view
        assert view is not None  # a result that has ended was saved
        write_alignment_page(view, plan.output_dir / PAGE_FILE)
        # A run that failed may do better next time, so its verdict is no answer for good. Without an answer the same
        # question is answered by comparing again. A figure that is not finite is in no document.
        if not runner.store.has_failed:
            with suppress(OSError, ValueError):
                save_answer(plan, view, config_name=self.name, reports=_REPORTS)
        return Alignment(result=result, view=view)


def _build_execution(plan: AlignPlan, order: AlignmentOrder) -> Execution:
    align = plan.baseline.config.align
    if order.make_launch is not None:
        return Execution(launch=order.make_launch(order.config_name, order.config_path), at_once=align.at_once)

    def say(name: str, what: str) -> None:
        order.console.print(Text.assemble((name, "bold"), f"  {what}"))

    return build_execution(align, order.config_name, order.config_path, recording_dir=plan.recording_dir, say=say)


def _name_alignment(config_name: str, config: RunConfig) -> str:
    """Names an alignment by its configuration's file, or where that is any ``align.yaml`` by its ``exp_name``."""
    return config.exp_name if config_name.removesuffix(".yaml") == "align" else config_name


def _further_kinds(config: RunConfig) -> Sequence[str]:
    """Lists kinds to trace beside the configuration's own: without a recording, inputs show that data are the same."""
    if config.rollout_mock is None:
        return _OWN_DATA_KINDS
    return CONSEQUENCE_KINDS if config.align.proofs.consequence else ()


_OWN_DATA_KINDS = ("input", "loss")


@dataclass(kw_only=True, slots=True)
class _Reports:
    """Saves the result so far. ``view``: of the last result, built once for all reports, since it reads traces."""

    result_path: Path
    view: AlignmentView | None = None

    def save(self, result: AlignmentResult) -> None:
        """Write it to ``result_path``; before its end without the parts read from folders."""
        self.view = replace(build_view(result, is_full=result.times is not None), origin=describe_origin())
        save_result(result, self.view, self.result_path)
        mark_own(self.result_path)


def _side(run: RunSummary | None, path: Path) -> ComparedInput:
    name = path.name if run is None else run.name
    return ComparedInput(name=name, path=path, kind="run", level="full", run=run)
