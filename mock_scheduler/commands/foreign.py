"""``import`` and ``export``: files of other frameworks become an ordinary recording or trace, and one becomes files.

Contract: a recording or trace appears whole, in a folder that was not there, or not at all. What rollout files do not
say is listed in the recording's provenance and in each batch.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from mock_scheduler.adapters.formats import WRITTEN_NAMES, ForeignFormat, find_format
from mock_scheduler.adapters.imports.steps import ForeignStep, ImportOptions
from mock_scheduler.adapters.imports.traces import Traces
from mock_scheduler.batch import RolloutBatch
from mock_scheduler.config.steps import StepRanges, parse_steps
from mock_scheduler.display.console import Console
from mock_scheduler.display.terminal import build_console
from mock_scheduler.errors import (
    ConfigError,
    ExitCode,
    ForeignFileError,
    MockSchedulerError,
    RecordingError,
    StepNotFoundError,
    redact,
)
from mock_scheduler.recording.contract import Contract
from mock_scheduler.recording.paths import describe_absent, format_present, parse_folder
from mock_scheduler.recording.reading.browse import FolderListing, list_recording, open_place
from mock_scheduler.recording.reading.reader import RecordingReader
from mock_scheduler.recording.step.step_info import StepInfo
from mock_scheduler.recording.writing.opening import WriterOptions, open_recording
from mock_scheduler.scheduler import DEFAULT_SCHEDULER_ID, Mode
from mock_scheduler.support.digests import JSON
from mock_scheduler.support.documents import STDOUT, write_json
from mock_scheduler.support.foreign_files import load_json
from mock_scheduler.support.text import count_of, in_prose, shorten

Read = Callable[[Path, ImportOptions], Iterator[ForeignStep]]
Write = Callable[[Iterable[tuple[Mode, int, RolloutBatch]], Path], list[Path]]


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportCommand:
    """Holds the arguments of ``import``.

    Attributes:
        rollouts: what the user states of the rollouts.
        contract: a JSON file with names and values that a replay must match; ``None``: the recording has none.
        shift: added to the number of each step.
        json_path: a file for what was written: folder, format, steps by mode and what the source lacks, or the steps of
            each trace by its folder below; ``-``: standard output, in place of the text.
    """

    rollouts: ImportOptions = field(default_factory=ImportOptions)
    contract: Path | None = None
    shift: int = 0
    json_path: str | None = None


def run_import(
    format_name: str, source: Path, dump_dir: Path, command: ImportCommand, *, console: Console | None = None
) -> int:
    """Make a recording of rollout files.

    Raises:
        ConfigError: the format is none, or its files cannot be read safely.
        RecordingError: ``dump_dir`` is there already, or no file is found.
        ForeignFileError: a file is damaged, would run code, or claims more than it holds.
        BatchError: its rows contradict themselves.
    """
    chosen = find_format(format_name)
    if not chosen.reader and not chosen.tracer:
        raise ConfigError(f"{source}: files of {chosen.framework} are not read: {chosen.refusal}")
    _refuse_target(dump_dir)
    if os.path.lexists(dump_dir):
        raise RecordingError(f"{dump_dir} is there already: give a new folder for the recording")
    if chosen.tracer:
        return _import_trace(chosen, source, dump_dir, command.json_path, console or build_console())
    contract = Contract.of(_load_contract(command.contract))
    read: Read = _load(chosen.reader)
    with _published(dump_dir) as aside:
        lacks, steps = _write(read(source, command.rollouts), aside, chosen, source, contract, command.shift)
        if not steps:
            raise RecordingError(f"{source} holds no step")
    if command.json_path != STDOUT:
        _report(console or build_console(), dump_dir, steps, lacks)
    _write_facts(command.json_path, chosen, dump_dir, {"steps": _as_json(steps), "not_in_source": list[JSON](lacks)})
    return int(ExitCode.ALIGNED)


def _write_facts(path: str | None, chosen: ForeignFormat, folder: Path, facts: Mapping[str, JSON]) -> None:
    write_json({"format_version": 1, "format": chosen.name, "folder": str(folder), **facts}, path)


def _as_json(steps: Mapping[str, Sequence[int]]) -> dict[str, JSON]:
    return {name: list[JSON](numbers) for name, numbers in steps.items()}


def _import_trace(chosen: ForeignFormat, source: Path, folder: Path, json_path: str | None, console: Console) -> int:
    write: Callable[[Path, Path], Traces] = _load(chosen.tracer)
    with _published(folder) as aside, _explained(chosen, source):
        traces = write(source, aside)
    _write_facts(json_path, chosen, folder, {"traces": _as_json(traces)})
    for name, steps in traces.items() if json_path != STDOUT else ():
        place = in_prose(str(folder / name))
        text = f"wrote {place}: a trace of {count_of(len(steps), 'step')}; mock-scheduler compare opens it"
        console.print(text, markup=False, highlight=False)
    return int(ExitCode.ALIGNED)


@contextmanager
def _published(folder: Path) -> Iterator[Path]:
    """Give a path to write at; what is there at the end goes to its folder, all or none."""
    aside = folder.parent / f".{folder.name}.{os.getpid()}.aside"
    try:
        yield aside
        _publish(aside, folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _write(
    steps: Iterator[ForeignStep],
    folder: Path,
    chosen: ForeignFormat,
    source: Path,
    contract: Contract,
    shift: int,
) -> tuple[list[str], dict[str, list[int]]]:
    """Gives what the source lacks, and the numbers of the written steps by mode."""
    # All steps first: the provenance, which is written before them, says what each of them lacks.
    with _explained(chosen, source):
        read = list(steps)
    lacks = list(dict.fromkeys(name for step in read for name in step.lacks))
    imported: dict[str, JSON] = {
        "format": chosen.name,
        "framework": chosen.framework,
        "source": redact(str(source.absolute())),
        "not_in_source": lacks,
    }
    writer = open_recording(
        str(folder),
        contract=contract,
        plan=(),
        provenance={"imported": imported},
        resume=False,
        options=WriterOptions(background=False),
    )
    written: dict[str, list[int]] = {}
    try:
        for step in read:
            number = step.step + shift
            if number < 0 or number in written.get(step.mode, []):
                raise RecordingError(
                    f"{source} holds {step.mode} step {number} twice, or below 0 (with --shift {shift})"
                )
            info = StepInfo(
                step=number,
                mode=step.mode,
                scheduler_id=DEFAULT_SCHEDULER_ID,
                run_id=writer.run_id,
                policy_version=step.policy_version,
            )
            writer.write_step(step.batch, info)
            written.setdefault(step.mode, []).append(number)
    finally:
        writer.close()
    return lacks, written


@contextmanager
def _explained(chosen: ForeignFormat, source: Path) -> Iterator[None]:
    """Say of what files of another form make Python and torch raise that they are of another form."""
    try:
        yield
    except MockSchedulerError:
        raise
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError) as error:
        found = f"{type(error).__name__}: {shorten(str(error), 200)}"
        raise ForeignFileError(
            f"{source} cannot be read as files of {chosen.framework}: a value is absent or of another form ({found})"
        ) from error


def _refuse_target(folder: Path) -> None:
    """Raise ``RecordingError`` where a new folder cannot be made there."""
    # A path has lost the second slash of a URL.
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", str(folder)):
        raise RecordingError(f"{folder} is a URL, and a folder of this machine is expected: make it here, and copy it")
    if folder.is_symlink() and not folder.exists():
        raise RecordingError(f"{folder} is a link to {os.readlink(folder)}, which is not there: remove it")
    if folder.exists() and not folder.is_dir():
        raise RecordingError(f"{folder} is a file, where a folder is expected")


def _report(console: Console, dump_dir: Path, steps: Mapping[str, list[int]], lacks: Iterable[str]) -> None:
    console.print(f"wrote {in_prose(str(dump_dir))}: {format_present(steps)}", markup=False, highlight=False)
    absent = ", ".join(lacks)
    if absent:
        console.print(f"not in the source, and filled in: {absent}", markup=False, highlight=False)


def run_export(
    format_name: str,
    recording: str,
    folder: Path,
    *,
    steps: str | None,
    json_path: str | None = None,
    console: Console | None = None,
) -> int:
    """Write a recording's steps as another framework's files. ``json_path``: as of ``ImportCommand``, for their number.

    Raises:
        ConfigError: the format is none, or is not written.
        RecordingError: the recording cannot be read or has several schedulers, or a file is there already.
        StepNotFoundError: a chosen step is absent; nothing is written.
    """
    chosen = find_format(format_name)
    if not chosen.writer:
        raise ConfigError(f"{chosen.name} is read alone; export writes {', '.join(WRITTEN_NAMES)}")
    reader = RecordingReader(recording)
    _refuse_target(folder)
    ranges, listings = parse_steps(steps), list_recording(reader.storage)
    _check_steps(listings, ranges, recording)
    write: Write = _load(chosen.writer)
    with _published(folder) as aside:
        num_files = len(write(_read_steps(reader, listings, ranges), aside))
    if json_path != STDOUT:
        out = console or build_console()
        out.print(f"wrote {count_of(num_files, 'file')} to {in_prose(str(folder))}", markup=False, highlight=False)
    _write_facts(json_path, chosen, folder, {"num_files": num_files})
    return int(ExitCode.ALIGNED)


def _check_steps(listings: Sequence[FolderListing], chosen: StepRanges | None, recording: str) -> None:
    for listing in listings:
        listing.raise_problems()
    present = {listing.folder: list(listing.places) for listing in listings if listing.places}
    if not present:
        raise RecordingError(f"{recording} holds no step to write")
    absent = describe_absent(chosen, [(recording, present)])
    if absent:
        raise StepNotFoundError(absent)
    schedulers = {found[1] for found in map(parse_folder, present) if found is not None}
    if len(schedulers) > 1:
        raise RecordingError(
            f"{recording} has steps of several schedulers ({', '.join(sorted(schedulers))}), and a file has no place "
            "to name one: export a recording of one scheduler"
        )


def _read_steps(
    reader: RecordingReader, listings: Sequence[FolderListing], chosen: StepRanges | None
) -> Iterator[tuple[Mode, int, RolloutBatch]]:
    for listing in listings:
        for step, place in listing.places.items():
            if chosen is None or step in chosen:
                opened = open_place(reader, place)
                yield opened.info.mode, step, opened.load()


def _publish(aside: Path, folder: Path) -> None:
    """Move written files to their folder, all or none; raise ``RecordingError`` where one is there already."""
    if not folder.exists():
        os.rename(aside, folder)
        return
    names = sorted(os.listdir(aside))
    for name in names:
        if os.path.lexists(folder / name):
            raise RecordingError(f"{folder / name} is there already, and is not replaced: give another folder")
    for name in names:
        os.rename(aside / name, folder / name)


def _load(reference: str) -> Any:  # noqa: ANN401 - a function
    module, _, name = reference.partition(":")
    return getattr(import_module(module), name)


def _load_contract(path: Path | None) -> Mapping[str, JSON]:
    if path is None:
        return {}
    try:
        value = load_json(path)
    except ValueError as error:
        raise ConfigError(f"--contract {path} {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"--contract {path} holds a {type(value).__name__}; expected names and values")
    return value
