"""Reads the report's sources beside a recording: a run's training log-probabilities, and configurations.

Contract: only reads; an unusable source is a ``ConfigError`` with the reason and the remedy. A trace's
log-probabilities belong to recorded tokens only where rows, lengths and, of a completed run, the digest of the whole
batch are the recorded ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from mock_scheduler.batch import RolloutBatch
from mock_scheduler.comparison.walk.traces import trace_level
from mock_scheduler.config.loading import ConfigSource
from mock_scheduler.correction.config.algorithm import AlgorithmConfig
from mock_scheduler.correction.config.section import RolloutCorrectionConfig
from mock_scheduler.correction.report.view import TrainingSide
from mock_scheduler.errors import AlignmentError, ConfigError
from mock_scheduler.program import load_config
from mock_scheduler.recording.contract import Contract
from mock_scheduler.run_folder.finished_run import load_batches, read_stored_keys
from mock_scheduler.run_folder.inputs import find_trace
from mock_scheduler.support.run_files import CONFIG_FILE, RUN_FILE, TRACE_FOLDER
from mock_scheduler.support.text import bullet_list, list_some
from mock_scheduler.trace.entries import TraceKey
from mock_scheduler.trace.full.reader import TraceReader, open_trace

_SCORES = "old_logprobs"
_TRACED = "trace.level=full 'trace.kinds=[score]'"
_TEMPERATURE = "actor_infer.generating_args.temperature"
_RESTRICTION = "actor_infer.only_action_tokens"
_PRECISION = "precision"
_WEIGHTS_PRECISION = "actor_infer.weights_precision"
_SECTION = "algorithm."


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingConfig:
    """Facts of training for the report; section: ``None`` where correction is off."""

    side: TrainingSide
    section: RolloutCorrectionConfig | None


def training_of_source(source: ConfigSource, *, run_stored_code: bool = False) -> TrainingConfig:
    """Loads and checks a configuration; ``run_stored_code`` as for ``program.load_config``."""
    config = load_config(source, run_stored_code=run_stored_code)
    return _training_of_keys(f"configuration {source.config_name}", config.model_dump(mode="json"))


def training_of_run(run: Path) -> TrainingConfig | None:
    """Reads the needed keys of a run's ``config.yaml``; ``None`` where there is none."""
    path = _run_folder(run) / CONFIG_FILE
    if not path.is_file():
        return None
    return _training_of_keys(str(path), read_stored_keys(path))


def _training_of_keys(origin: str, content: Mapping[str, Any]) -> TrainingConfig:
    """Reads them out of a whole configuration as plain values."""
    return _training(
        origin,
        algorithm=_parse_algorithm(content.get("algorithm") or {}, origin),
        temperature=_number(_find(content, _TEMPERATURE)),
        restricts_vocabulary=_flag(_find(content, _RESTRICTION)),
        precision=_text(_find(content, _PRECISION)),
    )


def rollout_precision(contract: Contract) -> str | None:
    """Reads the type that the recorded rollouts were computed in: the coarser of engine and weights."""
    values = {field.name: field.value for field in contract.fields}
    kinds = [_text(values.get(name)) for name in (_WEIGHTS_PRECISION, _PRECISION)]
    return "bfloat16" if "bfloat16" in kinds else kinds[-1]


def training_of_contract(contract: Contract, *, dump_dir: str) -> TrainingConfig:
    """Reads the recording run's configuration from its contract, whose fields are values by dotted keys."""
    values = {field.name: field.value for field in contract.fields}
    content: dict[str, Any] = {}
    for name, value in values.items():
        if name.startswith(_SECTION):
            _insert(content, name.removeprefix(_SECTION).split("."), value)
    source = f"the contract of {dump_dir}"
    return _training(
        source,
        algorithm=_parse_algorithm(content, source),
        temperature=_number(values.get(_TEMPERATURE)),
        restricts_vocabulary=_flag(values.get(_RESTRICTION)),
        precision=_text(values.get(_PRECISION)),
    )


class TrainingScores:
    """Reads training log-probabilities of a traced run; made by ``open_scores``."""

    def __init__(self, run: Path, reader: TraceReader, digests: Mapping[int, str] | None) -> None:
        self._run = run
        self._reader = reader
        self._digests = digests

    @property
    def steps(self) -> tuple[int, ...]:
        """Returns the traced steps, ascending."""
        return self._reader.steps

    def load(self, batch: RolloutBatch, *, step: int) -> torch.Tensor | None:
        """Loads those of a batch's M response tokens, floating ``[M]``; ``None`` where the step was not traced.

        Raises ``ConfigError`` where the trace has no scores, or scores of other rollouts.
        """
        if step not in self._reader.steps:
            return None
        key = TraceKey(step=step, update=0, kind="score", name=_SCORES)
        if not self._reader.has(key):
            kinds = ", ".join(self._reader.footer(step).kinds)
            raise ConfigError(
                f"{self._run}: step {step} was traced without {_SCORES} of kind score (its kinds: {kinds}); run it "
                f"again with {_TRACED}"
            )
        self._check_batch(batch, step)
        merged = self._reader.merge(key)
        if merged.conflicts:
            raise ConfigError(f"{self._run}: ranks disagree: {merged.conflicts[0].describe()}")
        # The log-probability of a token is at the place of the token before it, which predicts it.
        places = batch.response_mask.nonzero().flatten() - 1
        is_missing = torch.isin(places + 1, batch.row_offsets[:-1])
        if merged.present is not None:
            is_missing |= ~merged.present.flatten()[places.clamp(min=0)]
        if bool(is_missing.any()):
            raise ConfigError(
                f"{self._run}: {int(is_missing.sum())} of {len(places)} response tokens of step {step} have no "
                f"{_SCORES} in the trace; run it again with {_TRACED} and without trace.ranks"
            )
        return merged.tensor[places]

    def _check_batch(self, batch: RolloutBatch, step: int) -> None:
        rows = self._reader.footer(step).rows
        identities = tuple(map(str, batch.identities))
        if rows.identities != identities or rows.lengths != tuple(batch.lengths.tolist()):
            pairs = zip(rows.identities, identities, strict=False)
            differing = [f"{theirs} where {ours} is recorded" for theirs, ours in pairs if theirs != ours]
            example = list_some(differing, 1) or f"{len(rows.identities)} rows, of other lengths or number"
            raise ConfigError(
                f"{self._run} trained on other rollouts at step {step}: {example}; give a run that replayed this "
                "recording"
            )
        digest = None if self._digests is None else self._digests.get(step)
        if digest is not None and digest != batch.digest():
            raise ConfigError(
                f"{self._run} trained on other rollouts at step {step}: its batch has digest {digest[:12]}, the "
                f"recorded one {batch.digest()[:12]}; give a run that replayed this recording"
            )


@contextmanager
def open_scores(run: Path) -> Iterator[TrainingScores]:
    """Opens the training log-probabilities of a run, or of a trace folder; raises ``ConfigError`` where it has none."""
    trace_dir = find_trace(run)
    if trace_level(trace_dir) != "full":
        raise ConfigError(f"{trace_dir} has sketches only, which hold no tokens; run it again with {_TRACED}")
    try:
        folder = _run_folder(run)
        digests = load_batches(folder) if (folder / RUN_FILE).is_file() else None
    except AlignmentError as error:
        raise ConfigError(str(error)) from error
    with open_trace(trace_dir) as reader:
        yield TrainingScores(run, reader, digests)


def _run_folder(run: Path) -> Path:
    """The run that a trace folder lies in, or the path itself."""
    return run.resolve().parent if run.resolve().name == TRACE_FOLDER else run


def _training(
    source: str,
    *,
    algorithm: AlgorithmConfig,
    temperature: float | None,
    restricts_vocabulary: bool | None,
    precision: str | None,
) -> TrainingConfig:
    section = algorithm.rollout_correction
    notes = (*([algorithm.flat_keys] if algorithm.flat_keys else []), *(section.notes if section else ()))
    side = TrainingSide(
        source=source,
        temperature=temperature,
        restricts_vocabulary=restricts_vocabulary,
        correction=None if section is None else section.spec.describe(),
        precision=precision,
        notes=notes,
    )
    return TrainingConfig(side=side, section=section)


def _parse_algorithm(content: object, source: str) -> AlgorithmConfig:
    try:
        return AlgorithmConfig.model_validate(content)
    except ValidationError as error:
        problems = [f"algorithm.{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors()]
        raise ConfigError(f"{source} has a rollout correction that cannot be read:{bullet_list(problems)}") from error


def _insert(content: dict[str, Any], keys: list[str], value: object) -> None:
    for key in keys[:-1]:
        content = content.setdefault(key, {})
    content[keys[-1]] = value


def _find(content: Mapping[str, Any], name: str) -> object:
    value: Any = content
    for key in name.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _flag(value: object) -> bool | None:
    return value if isinstance(value, bool) else None
