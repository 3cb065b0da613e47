"""Shows the health of rollout correction over a recording, and the effect of each preset.

Contract: nothing is trained, and nothing is written but the files that were asked for.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from mock_scheduler.config.loading import ConfigSource
from mock_scheduler.config.steps import StepRanges, parse_steps
from mock_scheduler.correction.report.builder import ReportBuilder, ReportOptions
from mock_scheduler.correction.report.page import write_correction_page
from mock_scheduler.correction.report.presets import list_presets
from mock_scheduler.correction.report.scored_step import ScoredStep
from mock_scheduler.correction.report.sources import (
    TrainingConfig,
    TrainingScores,
    open_scores,
    rollout_precision,
    training_of_contract,
    training_of_run,
    training_of_source,
)
from mock_scheduler.correction.report.text import print_correction
from mock_scheduler.correction.report.view import FORMAT_VERSION, CorrectionReport
from mock_scheduler.display.console import Console
from mock_scheduler.display.terminal import build_console, show_progress
from mock_scheduler.errors import ConfigError, ExitCode
from mock_scheduler.recording.paths import format_present, step_folder
from mock_scheduler.recording.reading.browse import StepPlace, list_recording, open_place
from mock_scheduler.recording.reading.reader import RecordingReader
from mock_scheduler.report.recording.show import recorded_vocabulary
from mock_scheduler.run_folder.inputs import check_page_path
from mock_scheduler.scheduler import DEFAULT_SCHEDULER_ID
from mock_scheduler.support.digests import JSON
from mock_scheduler.support.documents import STDOUT, dataclass_to_json, write_json
from mock_scheduler.support.files import save_json


@dataclass(frozen=True, kw_only=True, slots=True)
class CorrectionOptions:
    """Holds the choices of one call.

    run: a traced run that replayed the recording; without it the recording alone is described. source: a configuration
    whose ``rollout_correction`` is shown first, in the place of the run's or the recording's own. presets: names; all
    where empty. num_worst: tokens and trajectories to name. run_stored_code: import the program that ``source``, a
    stored configuration, names.
    """

    run: Path | None = None
    steps: str | None = None
    presets: tuple[str, ...] = ()
    source: ConfigSource | None = None
    num_worst: int = 10
    json_path: str | None = None
    html_path: Path | None = None
    run_stored_code: bool = False


def run_correction(dump_dir: str, options: CorrectionOptions, *, console: Console | None = None) -> int:
    """Prints the report and writes the files that were asked for; always 0. ``console``: ``None`` is this terminal.

    Raises ``ConfigError``, ``RecordingError`` or ``TraceError`` for what cannot be read or does not belong together.
    """
    check_page_path(options.html_path)
    presets = list_presets(options.presets)
    chosen = parse_steps(options.steps)
    reader = RecordingReader(dump_dir)
    training = _find_training(reader, options)
    places = _find_places(reader, chosen)
    builder = ReportBuilder(
        ReportOptions(
            recording=dump_dir,
            run=None if options.run is None else str(options.run),
            training=replace(training.side, rollout_precision=rollout_precision(reader.manifest.contract)),
            configured=None if training.section is None else training.section.spec,
            presets=presets,
            num_worst=options.num_worst,
            vocabulary=recorded_vocabulary(reader),
        )
    )
    with ExitStack() as stack:
        scores = None if options.run is None else stack.enter_context(open_scores(options.run))
        _check_steps(scores, places, options.run)
        on_step = stack.enter_context(show_progress("looking at steps"))
        for number, place in enumerate(places, start=1):
            step = open_place(reader, place)
            batch = step.load()
            logprobs = None if scores is None else scores.load(batch, step=place.step)
            builder.add(ScoredStep(info=step.info, batch=batch, train_logprobs=logprobs))
            on_step(number, len(places))
        is_missing = scores is None or any(place.step not in scores.steps for place in places)
    report = builder.build(next_command=_next_command(dump_dir) if is_missing else "")
    return _show(report, options, console)


def _show(report: CorrectionReport, options: CorrectionOptions, console: Console | None) -> int:
    files: dict[str, Path] = {}
    if options.html_path is not None:
        write_correction_page(report, options.html_path)
        files["html"] = options.html_path
    content = {"format_version": FORMAT_VERSION, **dataclass_to_json(report)}
    if options.json_path == STDOUT:
        write_json(content, STDOUT)
        return int(ExitCode.ALIGNED)
    if options.json_path is not None:
        files["json"] = Path(options.json_path)
        _save(content, files["json"])
    print_correction(report, console or build_console(), files=files)
    return int(ExitCode.ALIGNED)


def _save(content: Mapping[str, JSON], path: Path) -> None:
    try:
        save_json(path, content, sort_keys=False)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error


def _find_training(reader: RecordingReader, options: CorrectionOptions) -> TrainingConfig:
    """Reads the given configuration, or else the run's, or else the recording's."""
    if options.source is not None:
        return training_of_source(options.source, run_stored_code=options.run_stored_code)
    of_run = None if options.run is None else training_of_run(options.run)
    return of_run or training_of_contract(reader.manifest.contract, dump_dir=reader.dump_dir)


def _find_places(reader: RecordingReader, chosen: StepRanges | None) -> list[StepPlace]:
    """Finds the training steps to look at; raises ``ConfigError`` where there is none."""
    listings = {listing.folder: listing for listing in list_recording(reader.storage)}
    listing = listings.get(step_folder("train", DEFAULT_SCHEDULER_ID))
    places = []
    if listing is not None:
        listing.raise_problems()
        places = listing.chosen(chosen)
    if places:
        return places
    present = {name: list(listing.places) for name, listing in listings.items() if listing.places}
    what = "training step" if chosen is None else f"training step of --steps {chosen}"
    raise ConfigError(f"{reader.dump_dir} holds no {what}; steps present: {format_present(present)}")


def _check_steps(scores: TrainingScores | None, places: list[StepPlace], run: Path | None) -> None:
    if scores is not None and not any(place.step in scores.steps for place in places):
        raise ConfigError(
            f"{run} has a trace of none of the recorded steps {StepRanges.of(place.step for place in places)}; "
            f"it has {StepRanges.of(scores.steps)}"
        )


def _next_command(dump_dir: str) -> str:
    return (
        "mock-scheduler launch NAME rollout_mock.enable=true rollout_mock.mode=mock "
        f"rollout_mock.dump_dir={shlex.quote(dump_dir)} output_dir=OUTPUT_DIR trace.level=full 'trace.kinds=[score]'"
    )
