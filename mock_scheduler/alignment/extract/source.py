"""Reads a diverged candidate of a finished alignment, and cuts both configurations to fewer groups and fewer steps.

Contract: reads ``align.json``, the runs' ``config.yaml`` and the recording; nothing is written. Only the needed keys
are looked at; a missing or wrong one is an error with the names of file and key. The program says by which keys a
batch becomes smaller; a key of the candidate's own stays as it is.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from mock_scheduler.alignment.plan.overrides import expand_candidates, override_keys
from mock_scheduler.alignment.plan.plan import RECORDING_NAME
from mock_scheduler.config.align import CANDIDATE_NAME, CandidateConfig
from mock_scheduler.config.loading import ConfigSource
from mock_scheduler.config.stored_code import StoredCode, Use, refuse_stored_code
from mock_scheduler.errors import ConfigError, LayoutError, StepNotFoundError
from mock_scheduler.program import (
    Plain,
    Program,
    ReducedBatch,
    Reductions,
    RunConfig,
    find_program,
    list_stored_code,
    load_config,
)
from mock_scheduler.recording.paths import format_present
from mock_scheduler.recording.reading.reader import RecordingReader
from mock_scheduler.support.documents import Document
from mock_scheduler.support.files import load_json_object
from mock_scheduler.support.foreign_files import is_inside, refuse_link_out
from mock_scheduler.support.local_key import is_own
from mock_scheduler.support.locations import find_protocol
from mock_scheduler.support.run_files import ALIGN_FILE, BASELINE_NAME, CONFIG_FILE
from mock_scheduler.support.text import printable
from mock_scheduler.support.versions import PACKAGE

_DIVERGED = "diverged"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Worst:
    sample: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Figures:
    worst: _Worst | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Difference:
    figures: _Figures | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Divergence:
    step: int | None = None
    sample: str | None = None
    difference: _Difference | None = None

    def find_sample(self) -> str | None:
        """Finds the row; results of format 2 have it among the figures of the tensor alone."""
        figures = self.difference.figures if self.difference is not None else None
        worst = figures.worst if figures is not None else None
        return self.sample or (worst.sample if worst is not None else None)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Candidate:
    name: str
    verdict: str | None = None
    sentence: str | None = None
    reason: str | None = None
    overrides: tuple[str, ...] | None = None
    first_divergence: _Divergence | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Result:
    """Holds the needed keys of ``align.json``."""

    candidates: tuple[_Candidate, ...]
    recording_dir: str | None = None


_RESULT = Document[_Result](_Result)


@dataclass(frozen=True, kw_only=True, slots=True)
class DivergedCandidate:
    """Holds a diverged candidate of a finished alignment.

    ``program``: whose runs they are; ``reductions``: how it makes runs smaller. ``baseline``, ``candidate``: the runs'
    own configurations. ``change``: the candidate as it was configured, with its entry. ``used``: the allowed code and
    files of the stored configurations, in words. ``is_trusted``: these may run. ``sentence``: the first divergence in
    words. ``step``: its place, or the step asked for; ``sample``: the row with the largest difference, as recordings
    name it, where one row has it.
    """

    align_dir: Path
    program: Program
    reductions: Reductions
    change: CandidateConfig
    baseline: RunConfig
    candidate: RunConfig
    sentence: str
    step: int
    sample: str | None
    reader: RecordingReader
    used: str = ""
    is_trusted: bool = False

    @property
    def steps(self) -> list[int]:
        """Returns the training steps of the recording, ascending."""
        return self.reader.steps().get("train", [])

    @property
    def baseline_dir(self) -> Path:
        """Returns the folder of the baseline's run."""
        return self.align_dir / BASELINE_NAME

    @property
    def own_packages(self) -> tuple[str, ...]:
        """Returns the packages of the library and of the program."""
        return (PACKAGE, *self.program.packages)

    @property
    def baseline_entry(self) -> str:
        """Returns the module of the baseline's processes."""
        return self.baseline.align.entry or self.program.entry

    @property
    def candidate_entry(self) -> str:
        """Returns the module of the candidate's processes."""
        return self.change.entry or self.baseline_entry

    @property
    def own_keys(self) -> frozenset[str]:
        """Returns the candidate sets these keys itself."""
        return frozenset(override_keys(self.change.overrides))


def read_diverged(
    align_dir: Path, name: str, *, step: int | None = None, use: Use = Use.ALIGN, run_stored_code: bool = False
) -> DivergedCandidate:
    """Reads the candidate ``name`` of the alignment in ``align_dir``; ``step``: another one than its divergence's.

    ``use``: for what; ``run_stored_code``: the folder may name code to run and files elsewhere. Nothing that it names
    is imported or started here before this was asked.

    Raises ``ConfigError`` where the folder is no alignment's, there is no candidate of this name or it has not
    diverged, and ``StepNotFoundError`` where the recording is gone or lacks the step.
    """
    result = read_result(align_dir)
    found = find_candidate(result, name, align_dir)
    divergence = found.first_divergence or _Divergence()
    configs = [_config_file(align_dir, run) for run in (BASELINE_NAME, name)]
    origin, stored = configs[0], found.overrides or ()
    is_mine = all(map(is_own, (align_dir / ALIGN_FILE, *configs)))
    named = [code for path in configs for code in list_stored_code(path, overrides=stored, only=name)]
    named = [] if is_mine else named
    refuse_stored_code(origin, named, use=use, is_allowed=run_stored_code)
    program, baseline = _load(configs[0])
    _, candidate = _load(configs[1])
    elsewhere = [*_checkpoint_elsewhere(baseline, align_dir), *recording_elsewhere(result, align_dir)]
    used = refuse_stored_code(origin, [] if is_mine else [*named, *elsewhere], use=use, is_allowed=run_stored_code)
    if program.reductions is None:
        raise ConfigError(f"runs of {program.entry} cannot be cut down: it does not say how")
    reader = open_recording(result, align_dir)
    steps = reader.steps().get("train", [])
    wanted = divergence.step if step is None else step
    if wanted is None:
        wanted = min(steps, default=0)
    if wanted not in steps:
        raise StepNotFoundError(
            f"the recording {reader.dump_dir} has no training step {wanted}; steps present: "
            f"{format_present(reader.steps())}"
        )
    return DivergedCandidate(
        align_dir=align_dir,
        program=program,
        reductions=program.reductions,
        change=find_change(baseline, name, found),
        baseline=baseline,
        candidate=candidate,
        sentence=found.sentence or found.reason or "",
        step=wanted,
        sample=divergence.find_sample() if wanted == divergence.step else None,
        reader=reader,
        used=used,
        is_trusted=is_mine or run_stored_code,
    )


def read_verdict(align_dir: Path, name: str) -> tuple[str, str]:
    """Verdict and first divergence (or reason) of a candidate of a finished alignment; raises ``ConfigError``."""
    found = _find(read_result(align_dir), name, align_dir)
    return str(found.verdict), found.sentence or found.reason or ""


def read_result(align_dir: Path) -> _Result:
    """Reads the needed keys of ``align.json``; raises ``ConfigError``."""
    path = align_dir / ALIGN_FILE
    if not path.is_file():
        raise ConfigError(f"{align_dir} is not the folder of an alignment: it has no {ALIGN_FILE}")
    refuse_link_out(path, align_dir)
    try:
        result = load_json_object(path, inside=align_dir)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} {error}") from error
    try:
        return _RESULT.load(result)
    except ValueError as error:
        raise ConfigError(f"{path} is not a result of mock-scheduler align: {error}") from error


def _by_name(result: _Result) -> dict[str, _Candidate]:
    return {item.name: item for item in result.candidates}


def _find(result: _Result, name: str, align_dir: Path) -> _Candidate:
    by_name = _by_name(result)
    if name not in by_name or not re.fullmatch(CANDIDATE_NAME, name):
        verdicts = ", ".join(f"{other} ({item.verdict})" for other, item in by_name.items()) or "none"
        raise ConfigError(f"{align_dir} has no candidate {name!r}; its candidates are {printable(verdicts)}")
    return by_name[name]


def find_candidate(result: _Result, name: str, align_dir: Path) -> _Candidate:
    """Finds a diverged candidate; raises ``ConfigError`` where there is none of this name, or it has not diverged."""
    found = _find(result, name, align_dir)
    if found.verdict != _DIVERGED:
        diverged = [other for other, item in _by_name(result).items() if item.verdict == _DIVERGED]
        raise ConfigError(
            f"candidate {name!r} of {align_dir} is {printable(str(found.verdict))}, not {_DIVERGED}, so it has no "
            f"divergence to reproduce; the diverged candidates are {printable(', '.join(diverged)) or 'none'}"
        )
    return found


def find_change(baseline: RunConfig, name: str, found: _Candidate) -> CandidateConfig:
    """Returns the candidate as it was configured; its overrides are the result's."""
    configured = {item.name: item for item in expand_candidates(baseline.align, baseline.parallel)}
    change = configured.get(name, CandidateConfig(name=name))
    return change.model_copy(update={"overrides": list(found.overrides or ())})


def _config_file(align_dir: Path, name: str) -> Path:
    """Returns the configuration of a finished run, a file within the alignment."""
    path = align_dir / name / CONFIG_FILE
    if not path.is_file():
        raise ConfigError(f"{path}, the run's configuration, is gone; run the alignment again")
    refuse_link_out(path, align_dir)
    return path


def _load(path: Path) -> tuple[Program, RunConfig]:
    """Returns the program and the configuration of a finished run."""
    program = find_program(path.stem, path.parent)
    return program, load_config(ConfigSource(config_name=path.stem, config_path=str(path.parent)), program)


def _checkpoint_elsewhere(baseline: RunConfig, align_dir: Path) -> list[StoredCode]:
    """The reproduction gets a copy of the checkpoint from which the baseline began."""
    resumed = baseline.resume_from_checkpoint
    if resumed is None or is_inside(Path(resumed), align_dir):
        return []
    return [StoredCode(kind="checkpoint", key="resume_from_checkpoint", value=resumed, use=Use.LOAD)]


def recording_elsewhere(result: _Result, align_dir: Path) -> list[StoredCode]:
    """The reproduction gets rows of the recording, where the alignment replayed another one than its own."""
    named = result.recording_dir
    own = align_dir / RECORDING_NAME
    refuse_link_out(own, align_dir)
    is_here = named is not None and find_protocol(named) is None and is_inside(Path(named), align_dir)
    # A folder without a recording in it stands for none: ``open_recording`` goes on to the other one.
    if named is None or is_here or _open(str(own)) is not None:
        return []
    return [StoredCode(kind="recording", key=f"recording_dir of {ALIGN_FILE}", value=named, use=Use.LOAD)]


def open_recording(result: _Result, align_dir: Path) -> RecordingReader:
    """Opens the recording in the alignment's folder or, where it replayed another one, the other."""
    places = [str(align_dir / RECORDING_NAME), *([] if result.recording_dir is None else [result.recording_dir])]
    for place in places:
        reader = _open(place)
        if reader is not None:
            return reader
    raise StepNotFoundError(
        f"the recording of this alignment is gone: there is none at {' or '.join(dict.fromkeys(places))}; extract "
        "needs its rollouts, so run the alignment again"
    )


def _open(place: str) -> RecordingReader | None:
    try:
        return RecordingReader(place)
    except StepNotFoundError:
        return None


def reduce_batch(source: DivergedCandidate, *, num_groups: int, num_all: int, max_steps: int) -> ReducedBatch:
    """Finds the fewest groups, from ``num_groups`` on, so that both configurations load.

    ``num_all``: groups of a recorded batch; with all of them batch sizes stay as they are. ``max_steps``: after the
    last step to keep. Raises ``ConfigError`` where not even all groups can be trained on so.
    """
    problem = ""
    for count in range(num_groups, num_all + 1):
        for values in source.reductions.list_batches(
            source.baseline, num_groups=count, num_all=num_all, max_steps=max_steps
        ):
            try:
                for config, kept in ((source.baseline, ()), (source.candidate, source.own_keys)):
                    apply_values(config, values, kept=kept)
            except (ValidationError, LayoutError) as error:
                problem = str(error)
                continue
            return ReducedBatch(num_groups=count, values=values)
    raise ConfigError(f"the run cannot be cut to {max_steps} steps: {problem}")


def apply_values(config: RunConfig, values: Mapping[str, Plain], *, kept: Collection[str] = ()) -> RunConfig:
    """Returns the checked configuration with ``values`` by dotted keys, but for the ``kept`` ones.

    Raises ``ValidationError`` or ``LayoutError`` where it is none.
    """
    content = config.model_dump(mode="json")
    for key, value in values.items():
        if key not in kept:
            *sections, name = key.split(".")
            place = content
            for section in sections:
                place = place[section]
            place[name] = value
    changed = config.model_validate(content)
    changed.keep_environment_texts(config.environment_texts)
    return changed
