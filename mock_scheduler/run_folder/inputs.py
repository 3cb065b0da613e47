"""Opens the inputs of ``mock-scheduler compare`` and ``replicas``: runs, traces, metrics and recordings.

The files in a folder tell its kind. Options of the two commands are read here too.

Contract: reads headers and small files only; problems of both sides are said at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Literal

from mock_scheduler.comparison.pairing.selection import EVERYTHING, Selection
from mock_scheduler.comparison.walk.metrics import load_metrics, load_run_metrics
from mock_scheduler.comparison.walk.traces import trace_level
from mock_scheduler.config.align import ToleranceConfig
from mock_scheduler.config.instruments import LEDGER_KINDS, TRACE_KINDS
from mock_scheduler.config.steps import StepRanges
from mock_scheduler.errors import AlignmentError, ConfigError, ForeignFileError, TraceError
from mock_scheduler.recording.paths import MANIFEST_NAME, describe_absent
from mock_scheduler.recording.reading.reader import RecordingReader
from mock_scheduler.run_folder.command_folder import ALIGN_MARKER
from mock_scheduler.run_folder.finished_run import RunSummary, StoredConfig, load_stored_config, load_summary
from mock_scheduler.support.fetched_folders import find_location, name_locations
from mock_scheduler.support.foreign_files import check_inside
from mock_scheduler.support.run_files import (
    BASELINE_NAME,
    CONFIG_FILE,
    ERROR_FILE,
    METRICS_FILE,
    RUN_FILE,
    TRACE_FOLDER,
)
from mock_scheduler.support.text import list_some
from mock_scheduler.trace.full.files import find_steps
from mock_scheduler.trace.full.opening import check_ranks
from mock_scheduler.trace.sketch.opening import check_sketch_ranks

InputKind = Literal["run", "trace", "metrics", "recording"]

_NUM_RUNS = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedInput:
    """Holds one side of ``mock-scheduler compare``.

    ``name``: of its folder or file. ``path``: there while it is compared. ``level``: of its trace; ``None`` where it
    has none. ``run``: of a run only. ``url``: of a side in a bucket.
    """

    name: str
    path: Path
    kind: InputKind
    level: Literal["full", "sketch"] | None
    run: RunSummary | None = None
    url: str | None = None

    @property
    def location(self) -> str:
        """Returns the path or the URL, as messages and reports name it."""
        return self.url or str(self.path)


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenedInput:
    """One side; ``stored``: the configuration of its run, where it is known."""

    side: ComparedInput
    stored: StoredConfig | None


def find_kind(path: Path) -> InputKind:
    """Finds the kind of the input at a path; raises ``ConfigError`` where it cannot be compared, or is not there."""
    if not path.exists():
        raise ConfigError(f"{path} does not exist")
    if path.is_file():
        if path.suffix == ".jsonl":
            return "metrics"
        raise ConfigError(
            f"{path} is a file without .jsonl; the only file that can be compared holds metrics, one JSON object a line"
        )
    if (path / MANIFEST_NAME).is_file():
        return "recording"
    if (path / RUN_FILE).is_file() or (path / CONFIG_FILE).is_file():
        return "run"
    if path.is_dir() and find_steps(path):
        return "trace"
    if (path / METRICS_FILE).is_file():
        return "metrics"
    if ALIGN_MARKER.is_in(path):
        raise ConfigError(_describe_alignment(path))
    raise ConfigError(
        f"{path} cannot be compared; give a run's output_dir (with {CONFIG_FILE}), a trace (with step_000000/), "
        f"metrics ({METRICS_FILE}) or a recording (with {MANIFEST_NAME})"
    )


def _describe_alignment(folder: Path) -> str:
    """Advises, in the place of the whole folder of an alignment, its finished runs, then those of its proofs."""
    found = sorted(path.parent for level in ("*", "*/*") for path in folder.glob(f"{level}/{RUN_FILE}"))
    runs = sorted(found, key=lambda path: (len(path.parts), path.name != BASELINE_NAME))
    what = f"{folder} is the folder of an alignment, not of a run"
    if not runs:
        return f"{what}, and it has no finished run"
    names = list_some([str(path.relative_to(folder)) for path in runs], _NUM_RUNS, ", ")
    return f"{what}; give one of its runs, such as {runs[-1 if len(runs) == 1 else 1]}: {names}"


def open_inputs(paths: tuple[Path, Path]) -> tuple[OpenedInput, OpenedInput]:
    """Opens both sides, or raises one error with the problems of both; its type is the first one's.

    Raises ``ConfigError`` where a side cannot be compared, both are the same or of different kinds; ``AlignmentError``
    where a run is not completed or has no trace.
    """
    if find_location(paths[0].resolve()) == find_location(paths[1].resolve()):
        what = "file" if paths[0].is_file() else "folder"
        raise ConfigError(f"{paths[0]} and {paths[1]} are the same {what}; give two different ones")
    opened: list[OpenedInput] = []
    errors: list[ConfigError | AlignmentError | TraceError] = []
    for path in paths:
        try:
            opened.append(_open(path, find_kind(path)))
        except (ConfigError, AlignmentError, TraceError) as error:
            errors.append(error)
    if errors:
        raise type(errors[0])("\n".join(map(str, errors))) from errors[0]
    kinds = [item.side.kind for item in opened]
    if kinds[0] != kinds[1]:
        raise ConfigError(_describe_kinds(opened))
    return opened[0], opened[1]


def check_steps(sides: Sequence[ComparedInput], steps: StepRanges | None) -> None:
    """Raises ``ConfigError`` where neither side has any chosen step, with the present steps; ``None``: all."""
    if steps is None:
        return
    absent = describe_absent(steps, [(side.name, _find_present(side)) for side in sides])
    if absent:
        raise ConfigError(absent)


def check_choice(side: ComparedInput, selection: Selection) -> None:
    """Raises ``ConfigError`` where tensors are chosen of an input that has none: the choice would not take effect."""
    if side.kind not in ("metrics", "recording"):
        return
    options = [("--kinds", selection.kinds is not None), ("--patterns", selection.patterns != EVERYTHING.patterns)]
    given = " and ".join(name for name, is_given in options if is_given)
    if given:
        raise ConfigError(f"{given}: {side.path} holds {side.kind} and no tensors to choose; leave out {given}")


def _find_present(side: ComparedInput) -> dict[str, list[int]]:
    """Lists the steps of a side: of a recording by folder, of anything else all as ``steps``; none without any."""
    if side.kind == "recording":
        return {folder: list(steps) for folder, steps in RecordingReader(find_location(side.path)).steps().items()}
    if side.kind == "metrics":
        return {"steps": sorted(load_metrics(side.path))}
    folder = side.path / TRACE_FOLDER if side.kind == "run" else side.path
    steps = {step for step, _ in find_steps(folder)}
    if side.kind == "run" and (side.path / METRICS_FILE).is_file():
        steps |= load_run_metrics(side.path).keys()
    return {"steps": sorted(steps)} if steps else {}


def _own(folder: Path, name: str) -> Path:
    """Gives a file or folder of a run; raises ``TraceError`` where it is a link that leads out of the run's folder."""
    path = folder / name
    try:
        check_inside(path, folder)
    except ForeignFileError as error:
        raise TraceError(str(error)) from error
    return path


def find_trace(path: Path) -> Path:
    """Finds the trace folder of a run, or takes the path itself where it is one; raises ``ConfigError`` otherwise."""
    kind = find_kind(path)
    if kind == "run" and (path / TRACE_FOLDER).is_dir():
        return _own(path, TRACE_FOLDER)
    if kind == "trace":
        return path
    what = f"a run without a {TRACE_FOLDER} folder" if kind == "run" else f"a folder of kind {kind}"
    raise ConfigError(f"{path} is {what}; give a run with trace.level=full, or its trace folder")


def parse_tolerance(stated: Sequence[str], base: ToleranceConfig) -> ToleranceConfig:
    """Puts bounds ``name=value`` over ``base``. Raises ``ConfigError`` with every invalid one."""
    values: dict[str, float] = {}
    problems = []
    for text in (part for item in stated for part in item.split(",") if part.strip()):
        name, equals, value = (part.strip() for part in text.partition("="))
        if not equals or not value:
            problems.append(f"{text!r} has no value")
        elif name not in ToleranceConfig.model_fields:
            nearest = get_close_matches(name, ToleranceConfig.model_fields, n=1, cutoff=0.5)
            problems.append(f"there is no bound {name!r}{f', nearest is {nearest[0]}' if nearest else ''}")
        elif (number := _parse_number(value)) is None:
            problems.append(f"{name} is {value!r}, expected a finite number of at least 0")
        else:
            values[name] = number
    if problems:
        names = ", ".join(ToleranceConfig.model_fields)
        raise ConfigError(f"tolerance: {'; '.join(problems)}; bounds are {names}, as in activation=1e-5")
    return ToleranceConfig.model_validate({**base.model_dump(), **values})


def parse_selection(*, steps: StepRanges | None, kinds: Sequence[str] = (), patterns: Sequence[str] = ()) -> Selection:
    """Reads the part to compare; lists may have commas. Raises ``ConfigError`` for an unknown kind."""
    names = [name for text in kinds for name in text.split(",") if name]
    known = (*TRACE_KINDS, *LEDGER_KINDS)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ConfigError(f"kinds: there is no kind {', '.join(unknown)}; kinds are {', '.join(known)}")
    globs = tuple(text for item in patterns for text in item.split(",") if text)
    return Selection(
        steps=steps,
        kinds=frozenset(kind for kind in known if kind in names) if names else None,
        patterns=globs or ("*",),
    )


def _open(path: Path, kind: InputKind) -> OpenedInput:
    name = path.resolve().name
    if kind == "run":
        return _open_run(path, name)
    stored = None
    if kind == "trace":
        parent = path.resolve().parent / CONFIG_FILE
        stored = load_stored_config(parent) if name == TRACE_FOLDER and parent.is_file() else None
        name = path.resolve().parent.name if name == TRACE_FOLDER else name
    level = _check_trace(path) if kind == "trace" else None
    path = _own(path, METRICS_FILE) if kind == "metrics" and path.is_dir() else path
    side = ComparedInput(name=name, path=path, kind=kind, level=level, url=_url_of(path))
    return OpenedInput(side=side, stored=stored)


def _url_of(path: Path) -> str | None:
    shown = name_locations(str(path))
    return None if shown == str(path) else shown


def _open_run(folder: Path, name: str) -> OpenedInput:
    if not (folder / CONFIG_FILE).is_file():
        raise ConfigError(f"{folder} is not the output_dir of a run: it has no {CONFIG_FILE}")
    stored = load_stored_config(folder / CONFIG_FILE)
    if not (folder / RUN_FILE).is_file():
        raise AlignmentError(
            f"{folder} has no {RUN_FILE}: its run has not completed (it is still running, or {folder / ERROR_FILE} "
            "says why it failed)"
        )
    summary = load_summary(name, folder, elapsed_s=None)
    _own(folder, METRICS_FILE)
    if not (folder / TRACE_FOLDER).is_dir():
        raise AlignmentError(
            f"{folder} has no trace (its run had trace.level={stored.trace_level}), and a comparison of gradients and "
            "parameters needs one; run it again with trace.level=full"
        )
    level = _check_trace(_own(folder, TRACE_FOLDER))
    side = ComparedInput(name=name, path=folder, kind="run", level=level, run=summary, url=_url_of(folder))
    return OpenedInput(side=side, stored=stored)


def _check_trace(trace_dir: Path) -> Literal["full", "sketch"]:
    """Returns the level of a trace; raises ``TraceError`` where ranks have no file, however many others have one."""
    level = trace_level(trace_dir)
    if level == "full":
        check_ranks(trace_dir)
    else:
        check_sketch_ranks(trace_dir)
    return level


def _describe_kinds(opened: Sequence[OpenedInput]) -> str:
    sides = [item.side for item in opened]
    found = " and ".join(f"{side.path} is a {side.kind}" for side in sides)
    kinds = {side.kind for side in sides}
    advice = "give two of one kind"
    if kinds == {"run", "trace"}:
        run = next(side for side in sides if side.kind == "run")
        advice = f"give the run's trace, {run.path / TRACE_FOLDER}"
    elif kinds == {"run", "metrics"}:
        run = next(side for side in sides if side.kind == "run")
        advice = f"give the run's metrics, {run.path / METRICS_FILE}"
    return f"{found}, and the two cannot be compared; {advice}"


def find_read_steps(steps: StepRanges | None) -> Callable[[int], bool] | None:
    """Says which steps of a trace are read where some are compared: an update is held to the moments before it."""
    return None if steps is None else lambda step: step in steps or step + 1 in steps


def _parse_number(text: str) -> float | None:
    """Returns a bound's value; ``None`` where it is none."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 <= value < math.inf else None


def check_page_path(path: Path | None) -> None:
    """Raises ``ConfigError`` for ``--html -``, as it would write a file named ``-``."""
    if path is not None and str(path) == "-":
        raise ConfigError("--html: - is not a file; name one, as in --html page.html")
