"""Other frameworks' names for recording and replay, in a configuration of ours: AReaL's and verl's.

Contract: pure functions from the composed configuration to one without foreign sections, whose ``rollout_mock`` does
what they asked for and says in ``origin`` what became of them; verl's keys of rollout correction among them become
``algorithm``. They are refused together with an enabled ``rollout_mock``, and with one another. The differences from
the originals are in docs/dialects.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from mock_scheduler.config.base import ConfigSection
from mock_scheduler.config.dialects.areal import AREAL_SECTIONS, TrajectoryDebug, from_areal, translate_areal
from mock_scheduler.config.dialects.verl import (
    DEFAULT_PROJECT_NAME,
    VERL_NAMING_SECTIONS,
    VERL_SECTIONS,
    VerlNames,
    VerlSections,
    from_verl,
    several_switches,
    translate_verl,
    verl_switches,
)
from mock_scheduler.config.dialects.verl_keys import describe_unread, set_aside_unread
from mock_scheduler.config.problems import Problem, validation_problems
from mock_scheduler.config.rollout_mock import RolloutMockConfig
from mock_scheduler.correction.config.verl_dialect import read_verl_correction
from mock_scheduler.errors import ConfigError
from pipelines.config.schema import PipelineConfig

__all__ = ["Resolved", "VerlNames", "from_areal", "from_verl", "resolve_dialects"]

Model = TypeVar("Model", bound=BaseModel)

# Keys of rollout_mock that a foreign section decides; all others may be set beside it.
_DECIDED = ("enable", "mode", "dump_dir", "schedule", "steps", "missing_step", "retention", "origin")


@dataclass(frozen=True, kw_only=True, slots=True)
class Resolved:
    """A configuration without foreign sections, or the problems that it has with them."""

    values: dict[str, object]
    problems: tuple[Problem, ...] = ()


class _ArealSections(ConfigSection):
    """Both names of AReaL's section, for messages with whole keys."""

    trajectory_debug: TrajectoryDebug = TrajectoryDebug()
    debug: TrajectoryDebug = TrajectoryDebug()

    def by_name(self) -> dict[str, TrajectoryDebug]:
        """The sections by the names in ``AREAL_SECTIONS``."""
        return {"trajectory_debug": self.trajectory_debug, "debug": self.debug}


def resolve_dialects(values: Mapping[str, object]) -> Resolved:
    """``values``, the composed configuration, with foreign sections turned into ``rollout_mock``.

    Where there is none, ``values`` come back as they are. With one, the rest is checked as well, since the names of
    verl's folders are taken from it: all problems of both are in ``problems``.
    """
    correction = read_verl_correction(values)
    values = correction.values
    areal = {name: _section(values[name]) for name in AREAL_SECTIONS if name in values and not _is_own(name, values)}
    verl = {name: _section(values[name]) for name in (*VERL_SECTIONS, *VERL_NAMING_SECTIONS) if name in values}
    if not any(name in verl for name in VERL_SECTIONS):
        verl = {}  # `trainer` or `data` alone name nothing: they are unknown keys
    own = {key: value for key, value in values.items() if key not in areal and key not in verl}
    if not areal and not verl:
        return Resolved(values=own)
    problems: list[Problem] = [*correction.problems]
    config = _validated(PipelineConfig, own, problems)
    if config is not None:
        problems += correction.conflicts(config.algorithm)
    areal_sections = _validated(_ArealSections, areal, problems)
    read, unread = set_aside_unread(VerlSections, verl)
    unread += correction.unread
    verl_sections = _validated(VerlSections, read, problems)
    if config is None or areal_sections is None or verl_sections is None or problems:
        return Resolved(values=own, problems=tuple(problems))
    try:
        mock = _translate(config, areal_sections, verl_sections, unread)
    except ConfigError as error:
        return Resolved(values=own, problems=(("", str(error)),))
    kept = config.rollout_mock.model_dump(mode="json")
    if mock is None:
        if not unread:
            return Resolved(values=own)
        origin = f"no rollout skip of verl's is on{describe_unread(unread)}"
        return Resolved(values={**own, "rollout_mock": {**kept, "origin": kept["origin"] or origin}})
    decided = {key: value for key, value in mock.model_dump(mode="json").items() if key in _DECIDED}
    return Resolved(values={**own, "rollout_mock": {**kept, **decided}})


def _is_own(name: str, values: Mapping[str, object]) -> bool:
    """Whether a section is this project's: ``debug`` is, unless it has a key that only AReaL's section has."""
    section = values[name]
    return name == "debug" and isinstance(section, Mapping) and not set(section) & set(TrajectoryDebug.model_fields)


def _section(value: object) -> object:
    """An empty section of a YAML file is null: it asks for nothing."""
    return {} if value is None else value


def _validated(model: type[Model], values: Mapping[str, object], problems: list[Problem]) -> Model | None:
    """The values as this model; where they are none, their problems are added to ``problems``."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        problems += validation_problems(error, model)
        return None


def _translate(
    config: PipelineConfig, areal: _ArealSections, verl: VerlSections, unread: Sequence[str]
) -> RolloutMockConfig | None:
    """The section that the one foreign switch becomes; None where none is on. ConfigError where several are."""
    areal_on = {name: section for name, section in areal.by_name().items() if section.is_on}
    verl_on = verl_switches(verl)
    keys = [*areal_on, *(switch.key for switch in verl_on)]
    if config.rollout_mock.enable and keys:
        keys.insert(0, "rollout_mock")
    if len(keys) > 1:
        raise ConfigError(several_switches(keys))
    for name, section in areal_on.items():
        default_path = f"{config.output_dir.rstrip('/')}/debug_trajectories"
        return translate_areal(section, default_path=default_path, name=name)
    return translate_verl(verl_on[0], names=_verl_names(config, verl), unread=unread) if verl_on else None


def _verl_names(config: PipelineConfig, verl: VerlSections) -> VerlNames:
    """verl's own keys where given, else ours: a group is what verl calls a prompt's ``n`` responses."""
    group_size = config.train_env_manager.group_size
    train_batch_size = verl.data.train_batch_size or config.rollout_batch_size // group_size
    experiment, project = verl.trainer.experiment_name, verl.trainer.project_name
    return VerlNames(
        experiment=config.exp_name if experiment is None else experiment,
        project=DEFAULT_PROJECT_NAME if project is None else project,
        train_batch_size=train_batch_size,
        gen_batch_size=verl.data.gen_batch_size or train_batch_size,
        n=verl.actor_rollout_ref.rollout.n or group_size,
    )
