"""Plans the runs of ``mock-scheduler doctor``: a recording where there is none, and two replays; nothing runs here.

A program without rollouts reads its own data, so it is run twice as it stands.

All train the same steps, from the first to the requested one, under the configuration's own layout. Validation,
checkpoints and trackers are left out: they cost time and cannot differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mock_scheduler.alignment.plan.overrides import format_override, override_keys, quote_override
from mock_scheduler.alignment.plan.planned_run import PlannedRun
from mock_scheduler.determinism.environment import check_settings
from mock_scheduler.errors import ConfigError
from mock_scheduler.launch.entry import check_entry
from mock_scheduler.program import ConfigLoader, Program, RunConfig
from mock_scheduler.recording.paths import format_present
from mock_scheduler.recording.reading.reader import RecordingReader
from mock_scheduler.support.text import count_of

FOLDER = "doctor"
RECORDING_NAME = "recording"
REPLAY_NAMES = ("first", "second")

_SET_BY_DOCTOR = {
    "trace.level": "off",
    "rollout_mock.enable": "true",
    "rollout_mock.schedule": "[]",
    "rollout_mock.steps": "null",
    "rollout_mock.every": "1",
    "rollout_mock.missing_step": "error",
    "rollout_mock.on_mismatch": "error",
    "rollout_mock.retention.keep_last": "null",
    # The doctor looks for the very lack of determinism with which a replay would refuse to run.
    "rollout_mock.allow_nondeterministic": "true",
}
# Of a program without rollouts; updated parameters are few, and show whether its replicas agree.
_SET_IN_RUNS = {"trace.operations": "true", "trace.level": "full", "trace.kinds": "[parameter]"}
# A configuration file may have these keys; on this command line they would have no effect.
_NOT_FOR_USERS = ("max_steps", "trace.level", "trace.operations")


@dataclass(frozen=True, kw_only=True, slots=True)
class DoctorPlan:
    """The runs. ``recorder``: makes the recording; ``None`` where there is one. ``step``: the last replayed step.

    ``recording_dir``: ``None`` of a program without rollouts. ``first_step``: of both replays.
    """

    step: int
    output_dir: Path
    recording_dir: Path | None
    recorder: PlannedRun | None
    replays: tuple[PlannedRun, PlannedRun]
    first_step: int = 0

    @property
    def runs(self) -> tuple[PlannedRun, ...]:
        """Returns all runs, in order."""
        return (*([self.recorder] if self.recorder else []), *self.replays)

    def describe(self) -> str:
        """Returns ``6 steps (0 to 5) in each of 3 runs: recorder, first, second``."""
        first, last = self.first_step, self.step
        steps = f"1 step ({last})" if first == last else f"{count_of(last + 1 - first, 'step')} ({first} to {last})"
        return f"{steps} in each of {len(self.runs)} runs: {', '.join(run.name for run in self.runs)}"


def plan_doctor(
    load: ConfigLoader,
    *,
    program: Program,
    overrides: Sequence[str],
    output_dir: Path | None,
    step: int,
    recording: Path | None,
    entry: str | None = None,
) -> DoctorPlan:
    """Plans the runs.

    Args:
        load: Makes a checked configuration of ``program`` out of overrides.
        program: The training program.
        overrides: Of all runs.
        output_dir: ``None`` is the configuration's; the runs go to ``doctor`` in it.
        step: The last step to replay.
        recording: ``None`` is the configuration's own (``rollout_mock.mode`` mock or cache), or else a new one.
        entry: The module that runs the replays; ``None`` is the program's own.

    Raises:
        ConfigError: A step, an override or a module cannot be used.
        DeterminismError: Settings do not make a deterministic run.
        RecordingError: The recording has to be read for the step, and cannot be.
    """
    _check_overrides(overrides, program)
    config = load(overrides)
    kept = {**program.quiet_keys, **program.folder_keys}
    planner = _Planner(
        load=load,
        program=program,
        root=((output_dir or Path(config.output_dir)) / FOLDER).resolve(),
        exp_name=config.exp_name,
        entry=entry or program.entry,
        shared=(*overrides, *(format_override(key, value) for key, value in kept.items())),
    )
    make_plan = _plan_replays if config.rollout_mock is not None else _plan_without_rollouts
    return make_plan(planner, config, step=step, recording=recording)


def _plan_replays(planner: _Planner, config: RunConfig, *, step: int, recording: Path | None) -> DoctorPlan:
    """Plans two replays of a recording, and before them its own run where there is none."""
    given = recording if recording is not None else _configured_recording(config)
    _check_step(step, config, given)
    _check_run(planner, config)
    recording_dir = planner.root / RECORDING_NAME if given is None else given.resolve()
    common = (
        *(f"{key}={value}" for key, value in _SET_BY_DOCTOR.items()),
        f"max_steps={step + 1}",
        quote_override("rollout_mock.dump_dir", str(recording_dir)),
    )
    replay = ("rollout_mock.mode=mock", "trace.operations=true")
    first, second = (planner.plan(name, common, replay) for name in REPLAY_NAMES)
    recorder = None
    if given is None:
        recording_planner = replace(planner, entry=planner.program.entry)
        recorder = recording_planner.plan("recorder", common, ("rollout_mock.mode=dump", "trace.operations=false"))
    return DoctorPlan(
        step=step, output_dir=planner.root, recording_dir=recording_dir, recorder=recorder, replays=(first, second)
    )


def _plan_without_rollouts(planner: _Planner, config: RunConfig, *, step: int, recording: Path | None) -> DoctorPlan:
    """Plans the same run twice."""
    if recording is not None:
        raise ConfigError(f"--recording is {recording}, and this program takes no rollouts: leave it out")
    first_step = planner.program.first_step(config)
    if not first_step <= step < config.max_steps:
        raise ConfigError(
            f"--step is {step}; the configuration has steps {first_step} to {config.max_steps - 1} "
            f"(max_steps={config.max_steps})"
        )
    _check_run(planner, config)
    common = (
        *(f"{key}={value}" for key, value in _SET_IN_RUNS.items()),
        *planner.program.end_after(config, step),
    )
    first, second = (planner.plan(name, common) for name in REPLAY_NAMES)
    return DoctorPlan(
        step=step,
        output_dir=planner.root,
        recording_dir=None,
        recorder=None,
        replays=(first, second),
        first_step=first_step,
    )


def _check_run(planner: _Planner, config: RunConfig) -> None:
    check_settings(config.system_envs)
    check_entry(planner.entry)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Planner:
    """All runs of one diagnosis share these parts."""

    load: ConfigLoader
    program: Program
    root: Path
    exp_name: str
    entry: str
    shared: tuple[str, ...]

    def plan(self, name: str, common: Sequence[str], own: tuple[str, ...] = ()) -> PlannedRun:
        run_dir = self.root / name
        complete = (
            *self.shared,
            *common,
            *own,
            quote_override("output_dir", str(run_dir)),
            quote_override("exp_name", f"{self.exp_name}-{FOLDER}-{name}"),
        )
        return PlannedRun(
            name=name,
            program=self.program,
            entry=self.entry,
            own_overrides=own,
            overrides=complete,
            config=self.load(complete),
            output_dir=run_dir,
        )


def _configured_recording(config: RunConfig) -> Path | None:
    mock = config.rollout_mock
    assert mock is not None  # refused before
    return Path(mock.dump_dir) if mock.effective_mode in ("mock", "cache") else None


def _check_step(step: int, config: RunConfig, recording: Path | None) -> None:
    """Refuses a step beyond the run's; a replayed recording may have more than ``max_steps``."""
    if step < 0:
        raise ConfigError(f"--step is {step}; it must be the number of a training step, from 0")
    if step < config.max_steps:
        return
    has = f"the configuration has steps 0 to {config.max_steps - 1} (max_steps={config.max_steps})"
    if recording is None:
        raise ConfigError(f"--step is {step}; {has}")
    steps = RecordingReader(str(recording)).steps()
    if step not in steps.get("train", []):
        raise ConfigError(f"--step is {step}; {has}, and the recording {recording} has {format_present(steps)}")


def _check_overrides(overrides: Sequence[str], program: Program) -> None:
    clashes = [key for key in (*_NOT_FOR_USERS, *program.quiet_keys) if key in override_keys(overrides)]
    if clashes:
        raise ConfigError(f"doctor sets {', '.join(clashes)} itself; choose the step with --step")
