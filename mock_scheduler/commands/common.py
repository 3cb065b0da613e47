"""Pieces shared by the commands: chosen steps, a result as JSON, and the vocabulary of a recording."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from mock_scheduler.config.steps import StepRanges
from mock_scheduler.errors import ConfigError
from mock_scheduler.recording.inspection.vocabulary import Vocabulary
from mock_scheduler.recording.reading.reader import RecordingReader
from mock_scheduler.support.digests import JSON
from mock_scheduler.support.files import encode_json, save_json

#: The format of the JSON of ``inspect``, ``verify`` and ``diff``.
FORMAT_VERSION = 1
#: ``--json -``: the JSON goes to stdout, in place of the text.
STDOUT = "-"


def parse_steps(text: str | None) -> StepRanges | None:
    """Read ``--steps`` as a set; ``None`` where it is absent. Raises ``ConfigError``."""
    if text is None:
        return None
    try:
        return StepRanges.parse(text)
    except ValueError as error:
        raise ConfigError(f"--steps: {error}") from error


def recorded_vocabulary(reader: RecordingReader) -> Vocabulary | None:
    """Read the vocabulary in the recording's provenance, if any."""
    value = reader.manifest.provenance.get("vocabulary")
    if not isinstance(value, Mapping | list):
        return None
    return Vocabulary.from_json(value, source=f"provenance 'vocabulary' of {reader.dump_dir}")


def write_json(value: Mapping[str, JSON], path: str | None) -> None:
    """Write a result as ``--json`` asks: to a file, to stdout, or (``None``) not at all."""
    if path == STDOUT:
        print(encode_json(value, sort_keys=False).decode(), end="")
    elif path is not None:
        save_json(Path(path), value, sort_keys=False)
