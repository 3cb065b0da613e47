"""A plan lists the runs of an alignment with their overrides; everything is checked before the first one starts.

The baseline is the user's command line plus ``align.baseline``, run by ``align.entry``, in mode dump, or in mock on a
finished recording. Each candidate is the same plus its own overrides, run by its own entry where it has one, in mock on
the same recording. A program that takes no
rollouts from a scheduler has neither mode nor recording. Where runs do not begin alike by themselves, each begins with
the initial state in the baseline's trace. An alignment decides mode, recording, trace, initial state, folders and
proofs itself, and nobody else may: an override without effect is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from mock_scheduler.alignment.plan.interpreters import Interpreter, InterpreterReader, describe_versions
from mock_scheduler.alignment.plan.overrides import (
    check_free,
    format_override,
    list_candidates,
    override_keys,
    quote_override,
)
from mock_scheduler.alignment.plan.planned_run import (
    PROOFS_NAME,
    AlignPlan,
    PlannedRun,
    find_changes,
    initial_state_overrides,
)
from mock_scheduler.config.align import CandidateConfig, ToleranceConfig
from mock_scheduler.config.instruments import LEDGER_KINDS, TRACE_KINDS
from mock_scheduler.determinism.environment import check_settings
from mock_scheduler.errors import ConfigError, DeterminismError, RecordingError
from mock_scheduler.launch.entry import check_entry
from mock_scheduler.program import ConfigLoader, Program, RunConfig
from mock_scheduler.recording.paths import format_present
from mock_scheduler.recording.reading.reader import RecordingReader
from mock_scheduler.support.digests import JSON, iterate_leaves
from mock_scheduler.support.run_files import ALIGN_FILE, BASELINE_NAME, TRACE_FOLDER

RECORDING_NAME = "recording"
#: What else lies in an alignment's folder beside its candidates.
RESERVED_NAMES = (
    BASELINE_NAME,
    RECORDING_NAME,
    PROOFS_NAME,
    ALIGN_FILE,
    *(Path(ALIGN_FILE).with_suffix(suffix).name for suffix in (".html", ".junit.xml")),
)

#: Finds the interpreter of a candidate; ``None`` is this process's own. Raises ``ConfigError``.
ReadInterpreter = Callable[[str | None], Interpreter]

# Every step of the baseline is recorded, and every step of a candidate is that of the recording.
_WHOLE_RECORDING = {
    "rollout_mock.enable": "true",
    "rollout_mock.on_mismatch": "error",
    "rollout_mock.schedule": "[]",
    "rollout_mock.steps": "null",
    "rollout_mock.every": "1",
    "rollout_mock.missing_step": "error",
    "rollout_mock.retention.keep_last": "null",
}
_SET_BY_ALIGN = (
    *(*_WHOLE_RECORDING, "rollout_mock.mode", "rollout_mock.dump_dir", "trace.level"),
    *("order.emulate", "perturbation.", "graft."),
)
_SET_PER_RUN = ("output_dir", "exp_name", "align.")


def plan_alignment(
    load: ConfigLoader,
    *,
    program: Program,
    overrides: Sequence[str],
    output_dir: Path | None,
    recording_dir: Path | None = None,
    trace_kinds: Sequence[str] = (),
    read_interpreter: ReadInterpreter | None = None,
) -> AlignPlan:
    """Plans an alignment; nothing is run or written, but other interpreters are asked for their versions.

    ``load`` makes a checked configuration of ``program`` out of overrides. ``output_dir``: ``None`` means
    ``align.output_dir``, or ``{output_dir}/align``. ``recording_dir``: a recording to replay in the baseline as well;
    its contract is checked by the runs. ``trace_kinds``: kinds to trace beside the configuration's own ``trace.kinds``.

    Raises ``ConfigError`` with all problems: missing, doubled or impossible candidates, a recording with too
    few steps or none at all, and keys reserved for the alignment.
    """
    config = load(overrides)
    problems: list[str] = []
    with _noting(problems):
        check_free("the command line", overrides, _SET_BY_ALIGN)
    with _noting(problems):
        check_free("align.baseline", config.align.baseline, _set_for_candidates(program))
    _check_has_rollouts(config, recording_dir)
    root = (output_dir or Path(config.align.output_dir or Path(config.output_dir) / "align")).resolve()
    planner = _Planner(
        load=load,
        program=program,
        root=root,
        recording_dir=_place_recording(config, root, recording_dir),
        trace_kinds=tuple(trace_kinds),
        read_interpreter=read_interpreter or InterpreterReader(packages=program.packages).read,
    )
    shared = (*overrides, *config.align.baseline)
    of_baseline = load(shared) if config.align.baseline else config
    with _noting(problems):
        _check_proof_keys(of_baseline, told=override_keys(shared))
    candidates, of_list = list_candidates(of_baseline.align, of_baseline.parallel, reserved=RESERVED_NAMES)
    problems += of_list
    first_step = program.first_step(of_baseline)
    with _noting(problems):
        _check_recording(recording_dir, of_baseline, first_step=first_step)
    with _noting(problems):
        _check_initial_state(of_baseline, program.initial_state_key, first_step=first_step)
    baseline = _plan_baseline(planner, of_baseline, shared, is_recorded=recording_dir is not None, problems=problems)
    planned, of_candidates = _plan_candidates(planner, candidates, shared, baseline, listed=of_baseline)
    if of_candidates:
        raise ConfigError("\n".join(("nothing was run:", *problems, *of_candidates)))
    if problems:
        raise ConfigError("\n".join(problems))
    return AlignPlan(
        output_dir=root,
        recording_dir=planner.recording_dir,
        tolerance=baseline.config.align.tolerance or ToleranceConfig(),
        baseline=baseline,
        candidates=tuple(planned),
        is_recorded=recording_dir is not None,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Planner:
    """All runs of one alignment share these parts."""

    load: ConfigLoader
    program: Program
    root: Path
    recording_dir: Path | None
    trace_kinds: tuple[str, ...]
    read_interpreter: ReadInterpreter

    def plan(
        self,
        candidate: CandidateConfig,
        overrides: Sequence[str],
        *,
        exp_name: str,
        mode: Literal["dump", "mock"],
    ) -> PlannedRun:
        """One run; raises ``ConfigError`` or ``DeterminismError`` where it cannot be."""
        run_dir = self.root / candidate.name
        begins_from = self._initial_state(candidate)
        complete = (
            *overrides,
            *self._recording_overrides(mode),
            *initial_state_overrides(self.program, begins_from),
            "trace.level=full",
            quote_override("output_dir", str(run_dir)),
            quote_override("exp_name", f"{exp_name}-{candidate.name}"),
            *(format_override(key, value) for key, value in self.program.folder_keys.items()),
        )
        config = self.load(complete)
        # In the order of all kinds, so that equal traces have equal fingerprints.
        initial = () if self.program.initial_state_key is None else ("initial",)
        missing = {*self.trace_kinds, *initial} - set(config.trace.kinds)
        if missing:
            kinds = [kind for kind in (*TRACE_KINDS, *LEDGER_KINDS) if kind in {*config.trace.kinds, *missing}]
            complete = (*complete, f"trace.kinds=[{','.join(kinds)}]")
            config = self.load(complete)
        check_settings(config.system_envs)
        entry = candidate.entry or config.align.entry or self.program.entry
        check_entry(entry)
        interpreter = self.read_interpreter(candidate.python)
        return PlannedRun(
            name=candidate.name,
            program=self.program,
            entry=entry,
            own_overrides=tuple(candidate.overrides),
            overrides=complete,
            config=config,
            output_dir=run_dir,
            python=interpreter.path,
            env=interpreter.env,
            versions=interpreter.versions,
            packages=interpreter.packages,
            sources=interpreter.sources,
            exact=candidate.exact,
            begins_from=begins_from,
        )

    def _recording_overrides(self, mode: Literal["dump", "mock"]) -> tuple[str, ...]:
        if self.recording_dir is None:
            return ()
        return (
            *(f"{key}={value}" for key, value in _WHOLE_RECORDING.items()),
            f"rollout_mock.mode={mode}",
            quote_override("rollout_mock.dump_dir", str(self.recording_dir)),
        )

    def _initial_state(self, candidate: CandidateConfig) -> Path | None:
        """Finds the trace whose initial state a run begins with; ``None`` for the baseline, which begins by itself."""
        if self.program.initial_state_key is None or candidate.name == BASELINE_NAME:
            return None
        return self.root / BASELINE_NAME / TRACE_FOLDER


def _plan_baseline(
    planner: _Planner,
    config: RunConfig,
    shared: Sequence[str],
    *,
    is_recorded: bool,
    problems: Sequence[str],
) -> PlannedRun:
    """Plans the baseline, or raises its error behind the earlier ones: each candidate would say the same."""
    baseline = CandidateConfig(name=BASELINE_NAME, overrides=config.align.baseline)
    try:
        return planner.plan(baseline, shared, exp_name=config.exp_name, mode="mock" if is_recorded else "dump")
    except (ConfigError, DeterminismError) as error:
        if not problems:
            raise
        raise ConfigError("\n".join((*problems, str(error)))) from error


def _plan_candidates(
    planner: _Planner,
    candidates: Sequence[CandidateConfig],
    shared: Sequence[str],
    baseline: PlannedRun,
    *,
    listed: RunConfig,
) -> tuple[list[PlannedRun], list[str]]:
    """Plans every candidate with a valid configuration, and says why the others cannot run."""
    of_list = {candidate.name for candidate in listed.align.candidates}
    planned, problems = [], []
    for candidate in candidates:
        own = tuple(candidate.overrides)
        try:
            check_free("its overrides", own, _set_for_candidates(planner.program))
            run = planner.plan(candidate, (*shared, *own), exp_name=listed.exp_name, mode="mock")
        except (ConfigError, DeterminismError) as error:
            advice = "" if candidate.name in of_list else f"\nor leave it out: align.matrix.exclude: [{candidate.name}]"
            problems.append(f"candidate {candidate.name!r}: {error}{advice}")
            continue
        planned.append(
            replace(
                run,
                has_other_code=run.entry != baseline.entry,
                changes=find_changes(
                    _values_of(baseline.config), _values_of(run.config), run.program.effects(run.config).of
                ),
                version_changes=describe_versions(baseline.versions, run.versions),
            )
        )
    return planned, problems


def _values_of(config: RunConfig) -> dict[str, JSON]:
    return dict(iterate_leaves(config.model_dump(mode="json")))


def _place_recording(config: RunConfig, root: Path, given: Path | None) -> Path | None:
    if config.rollout_mock is None:
        return None
    return root / RECORDING_NAME if given is None else given.resolve()


def _check_has_rollouts(config: RunConfig, recording_dir: Path | None) -> None:
    if config.rollout_mock is None and recording_dir is not None:
        raise ConfigError(
            f"--recording {recording_dir}: this program has no rollout_mock section, so it takes no rollouts from a "
            "scheduler; leave the option out, or add the section where the program builds its scheduler from it"
        )


def _check_initial_state(config: RunConfig, key: str | None, *, first_step: int) -> None:
    """Refuses a trace without every tensor with which candidates must begin, told so by ``key``."""
    if key is None:
        return
    trace = config.trace
    limits = {
        "trace.patterns": trace.patterns != ["*"],
        "trace.exclude": bool(trace.exclude),
        "trace.ranks": trace.ranks is not None,
        "trace.steps": trace.steps is not None and first_step not in trace.steps,
        "trace.dump_every_n_steps": first_step % trace.dump_every_n_steps != 0,
    }
    found = [name for name, is_limit in limits.items() if is_limit]
    if found:
        raise ConfigError(
            f"candidates begin with the initial state in the baseline's trace ({key}), and {', '.join(found)} would "
            f"leave some of it out; trace step {first_step} whole"
        )


def _set_for_candidates(program: Program) -> tuple[str, ...]:
    """Lists the keys set by the alignment in every run: the library's, and folders and state of the program's own."""
    initial = () if program.initial_state_key is None else (program.initial_state_key,)
    return (*_SET_BY_ALIGN, *_SET_PER_RUN, *program.folder_keys, *initial)


@contextmanager
def _noting(problems: list[str]) -> Iterator[None]:
    """Adds an error of the block to the problems."""
    try:
        yield
    except ConfigError as error:
        problems.append(str(error))


def _check_proof_keys(config: RunConfig, *, told: Collection[str]) -> None:
    """Refuses a configuration with a key of a proof run; an alignment adds runs for its proofs.

    ``told``: keys of overrides; they are refused where they stand.
    """
    found = [
        format_override(key, str(value))
        for key, value in (
            ("order.emulate", config.order.emulate and config.order.emulate.describe()),
            ("perturbation.seed", config.perturbation.seed),
            ("graft.trace_dir", config.graft.trace_dir),
        )
        if value is not None and not any(f"{key}.".startswith(f"{name}.") for name in told)
    ]
    if found:
        raise ConfigError(f"an alignment sets {', '.join(found)} itself; remove it from the configuration")


def _check_recording(recording_dir: Path | None, config: RunConfig, *, first_step: int) -> None:
    if recording_dir is None:
        return
    try:
        steps = RecordingReader(str(recording_dir)).steps()
    except RecordingError as error:
        raise ConfigError(f"the recording to replay cannot be used: {error}") from error
    missing = sorted(set(range(first_step, config.max_steps)) - set(steps.get("train", [])))
    if missing:
        raise ConfigError(
            f"max_steps is {config.max_steps}, and the recording {recording_dir} has {format_present(steps)}: step "
            f"{missing[0]} is missing; set max_steps to at most {missing[0]}, or record again"
        )
