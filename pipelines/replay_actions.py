"""Plays the actions of a recording through its environments again and compares their answers.

``mock-scheduler replay-actions`` starts it, as ``python -m pipelines.replay_actions --config-name NAME --recording DIR
[--steps 0-4] [--json PATH] a.b=c ...``. It needs no model and no policy: it shows whether environments, seeds and
settings are still the recording's.

Exit codes: 0 all equal, 1 a difference, 3 nothing could be compared or another vocabulary, 5 bad input.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Annotated

import typer

from mock_scheduler.batch import RolloutBatch, Trajectory
from mock_scheduler.config.base import Mode
from mock_scheduler.config.loading import (
    ConfigName,
    ConfigPath,
    ConfigSource,
    Overrides,
    with_one_spelling,
)
from mock_scheduler.config.locating import locate_config
from mock_scheduler.config.steps import StepRanges, parse_steps
from mock_scheduler.errors import ConfigError, ContractError, ExitCode, MockSchedulerError
from mock_scheduler.recording.contract import Contract
from mock_scheduler.recording.paths import format_present
from mock_scheduler.recording.reading.browse import StepPlace, list_recording, open_place
from mock_scheduler.recording.reading.reader import RecordingReader
from mock_scheduler.support.arguments import parse_arguments
from mock_scheduler.support.digests import JSON, canonical_json, iterate_leaves
from mock_scheduler.support.files import save_json
from mock_scheduler.support.processes import end_with_parent
from mock_scheduler.support.terminal_streams import guarded_terminal, print_message, print_output
from mock_scheduler.support.text import count_of, printable
from pipelines.config.loading import load_source
from pipelines.config.schema import PipelineConfig
from pipelines.environments.base import TokenEnvironment, Tokenizer
from pipelines.environments.registry import build_environment, build_tokenizer
from pipelines.environments.replay import EpisodeComparison, EpisodeDifference, replay_episode
from pipelines.environments.seeds import environment_seed, split_of

FORMAT_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordingComparison:
    """The result of a comparison. ``steps``: compared, ``present``: recorded, both by folder: ``train 0-4; val 0``.

    ``first``: the first difference, with its step. ``num_tokens``: tokens of the environments. ``changed_settings``:
    keys of the configuration that differ from the recording's contract and decide the episodes: a likely cause.
    """

    steps: str
    present: str
    num_rows: int
    num_turns: int
    num_tokens: int
    num_trajectories: int
    num_different: int
    first: tuple[StepPlace, EpisodeDifference] | None
    changed_settings: tuple[str, ...]

    @property
    def exit_code(self) -> ExitCode:
        """Returns the exit code: 0, 1 or 3."""
        if self.num_rows == 0:
            return ExitCode.INCOMPARABLE
        return ExitCode.DIVERGED if self.num_different else ExitCode.ALIGNED

    def describe(self) -> str:
        """Describe the result in lines for a terminal."""
        counts = (
            f"{count_of(self.num_rows, 'row')}, {count_of(self.num_turns, 'turn')}, "
            f"{count_of(self.num_tokens, 'token')} of the environments"
        )
        lines = [f"steps        {self.steps}", f"compared     {counts}"]
        if self.first is not None:
            place, difference = self.first
            of_all = count_of(self.num_trajectories, "trajectory", "trajectories")
            lines.append(f"different    {self.num_different:,} of {of_all}")
            lines.append(f"first        {place}, {difference.describe()}")
            lines += [f"setting      {setting}" for setting in self.changed_settings]
        verdict = {
            ExitCode.ALIGNED: "equal: every observation, reward and end is as recorded",
            ExitCode.DIVERGED: "different",
            ExitCode.INCOMPARABLE: f"nothing was compared: no row is in these steps; steps present: {self.present}",
        }
        return "\n".join(map(printable, [*lines, f"verdict      {verdict[self.exit_code]}"]))

    def as_json(self) -> dict[str, JSON]:
        """Return the result as JSON values."""
        first: JSON = None
        if self.first is not None:
            place, difference = self.first
            first = {
                "mode": place.mode,
                "scheduler_id": place.scheduler_id,
                "step": place.step,
                "row": difference.identity,
                "kind": difference.kind,
                "turn": difference.turn,
                "position": difference.position,
                "recorded": difference.recorded,
                "replayed": difference.replayed,
            }
        return {
            "format_version": FORMAT_VERSION,
            "exit_code": int(self.exit_code),
            "steps": self.steps,
            "num_rows": self.num_rows,
            "num_turns": self.num_turns,
            "num_tokens": self.num_tokens,
            "num_trajectories": self.num_trajectories,
            "num_different": self.num_different,
            "first": first,
            "changed_settings": list(self.changed_settings),
        }


class _Replayer:
    """Plays recorded trajectories in a configuration's environments, built on first use."""

    def __init__(self, config: PipelineConfig, tokenizer: Tokenizer) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._environments: dict[tuple[str, Mode], TokenEnvironment] = {}

    def replay(self, rows: Sequence[Trajectory], mode: Mode, *, where: str) -> EpisodeComparison:
        """Play the rows of one trajectory."""
        tag, identity = rows[0].tag, rows[0].identity
        if tag not in self._config.custom_envs:
            raise ConfigError(
                f"{where} holds rows of the tag '{tag}', which is not in custom_envs "
                f"{sorted(self._config.custom_envs)}: use the configuration of the recording"
            )
        seed = environment_seed(
            self._config.seed,
            tag=tag,
            mode=mode,
            scheduler_id=identity.scheduler_id,
            group_id=identity.group_id,
            episode_id=identity.episode_id,
        )
        environment = self._environment(tag, mode)
        return replay_episode(
            rows, environment, self._tokenizer, seed=seed, sequence_length=self._config.sequence_length
        )

    def _environment(self, tag: str, mode: Mode) -> TokenEnvironment:
        key = (tag, mode)
        if key not in self._environments:
            config = self._config.custom_envs[tag]
            self._environments[key] = build_environment(config, self._tokenizer, split=split_of(config, mode))
        return self._environments[key]

    def close(self) -> None:
        """Close all environments."""
        for environment in self._environments.values():
            environment.close()


def compare_recording(config: PipelineConfig, dump_dir: str, steps: StepRanges | None) -> RecordingComparison:
    """Replay the chosen steps of a recording (``None``: all) through the environments of ``config``.

    Raises:
        ContractError: the recording's tokens are of another vocabulary, or of none that is known.
        ConfigError: a row's tag is not in the configuration.
        RecordingError: the recording, or a step of it, is missing, damaged or there in two forms.
    """
    reader, tokenizer = RecordingReader(dump_dir), build_tokenizer(config)
    _check_vocabulary(reader.manifest.contract, tokenizer, dump_dir)
    listings = list_recording(reader.storage)
    for listing in listings:
        listing.raise_problems()
    places = [place for listing in listings for place in listing.chosen(steps)]
    replayer = _Replayer(config, tokenizer)
    compared: list[EpisodeComparison] = []
    first: tuple[StepPlace, EpisodeDifference] | None = None
    for place in places:
        batch = open_place(reader, place).load()
        for rows in _trajectories(batch):
            comparison = replayer.replay(rows, place.mode, where=f"{dump_dir}: {place}")
            compared.append(comparison)
            if first is None and comparison.difference is not None:
                first = (place, comparison.difference)
    replayer.close()
    played = {listing.folder: [place.step for place in listing.chosen(steps)] for listing in listings}
    return RecordingComparison(
        steps=format_present({folder: found for folder, found in played.items() if found}),
        present=format_present(reader.steps()),
        num_rows=sum(comparison.num_rows for comparison in compared),
        num_turns=sum(comparison.num_turns for comparison in compared),
        num_tokens=sum(comparison.num_tokens for comparison in compared),
        num_trajectories=len(compared),
        num_different=sum(comparison.difference is not None for comparison in compared),
        first=first,
        changed_settings=tuple(_changed_settings(reader.manifest.contract, config)),
    )


def _trajectories(batch: RolloutBatch) -> Iterator[list[Trajectory]]:
    """Yields the rows of each trajectory; they lie side by side, in the order of their turns."""
    for _, rows in groupby(batch.rows(), key=lambda row: row.identity.trajectory_key):
        yield list(rows)


def _check_vocabulary(recorded: Contract, tokenizer: Tokenizer, dump_dir: str) -> None:
    digests = [field.value for field in recorded.fields if field.name == "vocabulary"]
    if not digests:
        raise ContractError(
            f"{dump_dir}: its contract names no vocabulary, so that its tokens cannot be read as those of these "
            "environments: it was not recorded by this pipeline"
        )
    if digests[0] != tokenizer.digest():
        raise ContractError(
            f"{dump_dir} was recorded with the vocabulary {digests[0]}, and the configuration's is "
            f"{tokenizer.digest()} ({tokenizer.vocab_size} tokens): use the {tokenizer.source} of the recording"
        )


def _changed_settings(recorded: Contract, config: PipelineConfig) -> Iterator[str]:
    """Yield each changed setting of the episodes: ``seed: recorded 1, configured 2``."""
    sections: dict[str, JSON] = {
        "seed": config.seed,
        "sequence_length": config.sequence_length,
        "custom_envs": {tag: section.model_dump(mode="json") for tag, section in config.custom_envs.items()},
    }
    configured = {name: canonical_json(value) for name, value in iterate_leaves(sections)}
    for field in recorded.fields:
        if field.name in configured or field.name.startswith("custom_envs."):
            texts = canonical_json(field.value), configured.get(field.name, "missing")
            if texts[0] != texts[1]:
                yield f"{field.name}: recorded {texts[0]}, configured {texts[1]}"


def replay_actions(
    config_name: ConfigName,
    recording: Annotated[str, typer.Option("--recording", help="rollout_mock.dump_dir of a run: folder or URL")],
    overrides: Overrides = None,
    config_path: ConfigPath = None,
    steps: Annotated[str | None, typer.Option("--steps", help="these only, as in 0-4,7 or 100-")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="also write the result to this file")] = None,
) -> int:
    """Play recorded actions through the environments again, and name the first answer that differs."""
    name, folder = locate_config(config_name, config_path)
    source = ConfigSource(config_name=name, config_path=folder, overrides=tuple(overrides or ()))
    comparison = compare_recording(load_source(source), recording, parse_steps(steps))
    print_output(f"recording    {printable(recording)}\n{comparison.describe()}")
    if json_path is not None:
        save_json(json_path, comparison.as_json(), sort_keys=False)
    return int(comparison.exit_code)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, print the result and return the exit code; ``None``: the process's own arguments."""
    with guarded_terminal():
        return _run(arguments)


def _run(arguments: Sequence[str] | None) -> int:
    end_with_parent(os.environ)
    try:
        given = sys.argv[1:] if arguments is None else arguments
        return parse_arguments(replay_actions, with_one_spelling(given), prog="python -m pipelines.replay_actions")
    except MockSchedulerError as error:
        print_message(f"error: {error}")
        return int(error.exit_code)
    except OSError as error:
        print_message(f"error: {error}")
        return int(ExitCode.USAGE)
    except Exception:  # noqa: BLE001 - the edge of the process: Python's own code for it, 1, is a verdict here
        print_message(traceback.format_exc())
        return int(ExitCode.INTERNAL)


if __name__ == "__main__":
    sys.exit(main())
