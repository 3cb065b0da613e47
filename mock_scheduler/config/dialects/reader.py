"""Reads other frameworks' names for recording and replay, in the configuration of any program: AReaL's and verl's.

Contract: pure functions from the composed configuration to one without foreign sections, whose ``rollout_mock`` does as
they asked and says in ``origin`` how they became it. They are refused together with an enabled ``rollout_mock``, and
with one another. A program takes out the foreign keys of its own first. The differences from the originals are in
docs/dialects.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from pydantic import BaseModel, ValidationError

from mock_scheduler.config.base import ConfigSection
from mock_scheduler.config.dialects.areal import AREAL_SECTIONS, TrajectoryDebug, translate_areal
from mock_scheduler.config.dialects.foreign import describe_unread, set_aside_unread
from mock_scheduler.config.dialects.verl import (
    DEFAULT_PROJECT_NAME,
    VERL_NAMING_SECTIONS,
    VERL_SECTIONS,
    VerlNames,
    VerlSections,
    several_switches,
    translate_verl,
    verl_switches,
)
from mock_scheduler.config.problems import Problem, validation_problems
from mock_scheduler.config.rollout_mock import RolloutMockConfig
from mock_scheduler.errors import ConfigError

Model = TypeVar("Model", bound=BaseModel)

# Keys of rollout_mock that a foreign section decides; all others may be set beside it.
_DECIDED = ("enable", "mode", "dump_dir", "schedule", "steps", "missing_step", "retention", "origin")


@dataclass(frozen=True, kw_only=True, slots=True)
class Resolved:
    """Holds a configuration without foreign sections, or its problems with them."""

    values: dict[str, object]
    problems: tuple[Problem, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class RunNames:
    """The values of a checked configuration by which a foreign section is translated.

    ``num_prompts``: of one training batch; ``rows_per_prompt``: trajectories with one and the same prompt.
    """

    exp_name: str
    output_dir: str
    rollout_mock: RolloutMockConfig
    num_prompts: int
    rows_per_prompt: int


def _no_conflicts(config: object) -> list[Problem]:
    return []


@dataclass(frozen=True, kw_only=True, slots=True)
class ForeignKeys(Generic[Model]):
    """Holds a program's own reading of foreign keys: the configuration without them, and with their translation.

    ``unread``: the keys set aside. ``conflicts``: contradictions between these keys and the checked configuration.
    """

    values: Mapping[str, object]
    unread: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()
    conflicts: Callable[[Model], list[Problem]] = field(default=_no_conflicts)


class _ArealSections(ConfigSection):
    """Holds both names of AReaL's section, for messages with whole keys."""

    trajectory_debug: TrajectoryDebug = TrajectoryDebug()
    debug: TrajectoryDebug = TrajectoryDebug()

    def by_name(self) -> dict[str, TrajectoryDebug]:
        """Returns the sections by the names in ``AREAL_SECTIONS``."""
        return {"trajectory_debug": self.trajectory_debug, "debug": self.debug}


@dataclass(frozen=True, kw_only=True, slots=True)
class DialectReader(Generic[Model]):
    """Reads foreign sections in the configurations of one program.

    ``schema``: of the rest. ``name_run``: gives the values for translations. ``read_own``: takes out the foreign keys
    of the program's own.
    """

    schema: type[Model]
    name_run: Callable[[Model], RunNames]
    read_own: Callable[[Mapping[str, object]], ForeignKeys[Model]]

    def resolve(self, values: Mapping[str, object]) -> Resolved:
        """Turns the foreign sections of ``values``, the composed configuration, into ``rollout_mock``.

        Without one, ``values`` come back as they are. With one, the rest is checked as well, since the names of verl's
        folders are taken from it: ``problems`` has the problems of both.
        """
        own_keys = self.read_own(values)
        values = own_keys.values
        areal = {
            name: _section(values[name]) for name in AREAL_SECTIONS if name in values and not _is_own(name, values)
        }
        verl = {name: _section(values[name]) for name in (*VERL_SECTIONS, *VERL_NAMING_SECTIONS) if name in values}
        if not any(name in verl for name in VERL_SECTIONS):
            verl = {}  # `trainer` or `data` alone name nothing: they are unknown keys
        own = {key: value for key, value in values.items() if key not in areal and key not in verl}
        if not areal and not verl:
            return Resolved(values=own)
        problems: list[Problem] = [*own_keys.problems]
        config = _validated(self.schema, _with_stated_enable(own), problems)
        if config is not None:
            problems += own_keys.conflicts(config)
        areal_sections = _validated(_ArealSections, areal, problems)
        read, unread = set_aside_unread(VerlSections, verl)
        unread += own_keys.unread
        verl_sections = _validated(VerlSections, read, problems)
        if config is None or areal_sections is None or verl_sections is None or problems:
            return Resolved(values=own, problems=tuple(problems))
        return _translate_into(own, self.name_run(config), areal_sections, verl_sections, unread)


def _translate_into(
    own: dict[str, object], run: RunNames, areal: _ArealSections, verl: VerlSections, unread: Sequence[str]
) -> Resolved:
    """Returns the checked configuration with its one foreign switch turned into ``rollout_mock``."""
    try:
        mock = _translate(run, areal, verl, unread)
    except ConfigError as error:
        return Resolved(values=own, problems=(("", str(error)),))
    kept = run.rollout_mock.model_dump(mode="json")
    if mock is None:
        if not unread:
            return Resolved(values=own)
        origin = f"no rollout skip of verl's is on{describe_unread(unread)}"
        given = own.get("rollout_mock")
        section = dict(given) if isinstance(given, Mapping) else {}
        return Resolved(values={**own, "rollout_mock": {**section, "origin": kept["origin"] or origin}})
    decided = {key: value for key, value in mock.model_dump(mode="json").items() if key in _DECIDED}
    return Resolved(values={**own, "rollout_mock": {**kept, **decided}})


def _with_stated_enable(values: dict[str, object]) -> dict[str, object]:
    """The same with ``rollout_mock`` off where it does not say, since a foreign section may decide it."""
    section = values.get("rollout_mock")
    return {**values, "rollout_mock": {"enable": False, **section}} if isinstance(section, Mapping) else values


def _is_own(name: str, values: Mapping[str, object]) -> bool:
    """Says whether a section is this project's: ``debug`` is, unless it has a key of AReaL's section alone."""
    section = values[name]
    return name == "debug" and isinstance(section, Mapping) and not set(section) & set(TrajectoryDebug.model_fields)


def _section(value: object) -> object:
    """Reads an empty section of a YAML file, null, as a section without requests."""
    return {} if value is None else value


def _validated(model: type[Model], values: Mapping[str, object], problems: list[Problem]) -> Model | None:
    """Returns the values as this model; where they are none, their problems are added to ``problems``."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        problems += validation_problems(error, model)
        return None


def _translate(
    run: RunNames, areal: _ArealSections, verl: VerlSections, unread: Sequence[str]
) -> RolloutMockConfig | None:
    """Turns the one foreign switch into a section; ``None`` where none is on, ``ConfigError`` where several are."""
    areal_on = {name: section for name, section in areal.by_name().items() if section.is_on}
    verl_on = verl_switches(verl)
    keys = [*areal_on, *(switch.key for switch in verl_on)]
    if run.rollout_mock.enable and keys:
        keys.insert(0, "rollout_mock")
    if len(keys) > 1:
        raise ConfigError(several_switches(keys))
    for name, section in areal_on.items():
        default_path = f"{run.output_dir.rstrip('/')}/debug_trajectories"
        return translate_areal(section, default_path=default_path, name=name)
    return translate_verl(verl_on[0], names=_verl_names(run, verl), unread=unread) if verl_on else None


def _verl_names(run: RunNames, verl: VerlSections) -> VerlNames:
    """Takes verl's own keys where given, else ours: a group is a prompt's ``n`` responses in verl."""
    train_batch_size = verl.data.train_batch_size or run.num_prompts
    experiment, project = verl.trainer.experiment_name, verl.trainer.project_name
    return VerlNames(
        experiment=run.exp_name if experiment is None else experiment,
        project=DEFAULT_PROJECT_NAME if project is None else project,
        train_batch_size=train_batch_size,
        gen_batch_size=verl.data.gen_batch_size or train_batch_size,
        n=verl.actor_rollout_ref.rollout.n or run.rows_per_prompt,
    )
