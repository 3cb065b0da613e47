"""Reads verl's rollout skip, in its three generations, read as ``rollout_mock``.

1. ``actor_rollout_ref.rollout.skip_rollout`` and ``skip_dump_dir``.
2. ``actor_rollout_ref.rollout.skip``: ``enable``, ``dump_dir``, ``max_dump_step``, ``action``.
3. ``skip.{rollout,async_rollout,rollout_tq}``: ``enable``, ``dump_dir``, ``steps``, ``action``; at the top level, as in
   verl's trainer configuration, or within the block of the second generation.

verl counts training steps from 1, we from 0. Sources: verl ``verl/utils/rollout_skip.py``,
``verl/utils/skip/config.py``, ``docs/advance/rollout_skip.rst``. What is different here, and why: docs/dialects.md.
"""

from __future__ import annotations

import os.path
import posixpath
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Literal
from urllib.parse import quote

from pydantic import Field, ValidationInfo, field_validator

from mock_scheduler.config.base import ConfigSection, NonNegativeInt, PositiveInt
from mock_scheduler.config.dialects.foreign import build_rollout_mock, describe_unread, read_section, set_aside_unread
from mock_scheduler.config.problems import raise_problems
from mock_scheduler.config.rollout_mock import RolloutMockConfig
from mock_scheduler.config.steps import StepRanges
from mock_scheduler.errors import ConfigError
from mock_scheduler.support.locations import find_protocol

VERL_SECTIONS = ("actor_rollout_ref", "skip")
VERL_NAMING_SECTIONS = ("trainer", "data")
DEFAULT_PROJECT_NAME = "mock-scheduler"

ROLLOUT_KEY = "actor_rollout_ref.rollout"
_ROLES = ("rollout", "async_rollout", "rollout_tq")
_DEFAULT_SKIP_DIR = "~/.verl/rollout_dump"  # of the second and third generation
_RAY_SESSION = "/tmp/ray/session"
_MAX_NAME_BYTES = 255


def _check_location(location: str) -> str:
    """Refuses the places against which verl's own documentation warns; a URL and ``~`` are fine."""
    if find_protocol(location) is not None:
        return location
    path = os.path.expanduser(location)
    if not posixpath.isabs(path):
        raise ValueError(
            f"{location!r} is a relative path: Ray starts workers in folders of its own, so that each would look in "
            "another place; give an absolute path, or a URL such as s3://bucket/path"
        )
    if posixpath.normpath(path).startswith(_RAY_SESSION):
        raise ValueError(
            f"{location!r} is in the folder of a Ray session, which no later run finds again; give a path outside "
            "/tmp/ray"
        )
    return location


class _Skip(ConfigSection):
    """Holds the keys of both the second and the third generation."""

    enable: bool = False
    dump_dir: str = _DEFAULT_SKIP_DIR

    @field_validator("dump_dir")
    @classmethod
    def _check_dump_dir(cls, location: str, info: ValidationInfo) -> str:
        return _check_location(location) if info.data.get("enable") else location


class SkipRole(_Skip):
    """One role of the third generation; ``steps`` are verl's, from 1."""

    steps: list[Annotated[int, Field(ge=1)]] = Field(default=[], validate_default=True)
    action: Literal["cache", "repeat"] = "cache"

    # Validators of fields and not of the model, here and below, so that every problem of a block is listed.
    @field_validator("steps")
    @classmethod
    def _check_steps(cls, steps: list[int], info: ValidationInfo) -> list[int]:
        if info.data.get("enable") and not steps:
            raise ValueError("is empty, and an enabled skip is for these only: list them, as in steps: [1, 2, 3]")
        return steps


class SkipRoles(ConfigSection):
    """Holds the third generation's block: one entry per role."""

    rollout: SkipRole = SkipRole()
    async_rollout: SkipRole = SkipRole()
    rollout_tq: SkipRole = SkipRole()


class SkipBlock(_Skip, SkipRoles):
    """``actor_rollout_ref.rollout.skip``: the second generation, and where given the roles of the third."""

    max_dump_step: NonNegativeInt = 1
    action: Literal["cache", "repeat", "repeat_last"] = "repeat"

    @field_validator("max_dump_step")
    @classmethod
    def _check_max_dump_step(cls, number: int, info: ValidationInfo) -> int:
        if info.data.get("enable") and number == 0:
            raise ValueError("is 0: no step is dumped, and there is nothing to skip with; set the number of steps")
        return number


class VerlRollout(ConfigSection):
    """Holds ``actor_rollout_ref.rollout``, as far as rollout skip reads it."""

    skip_rollout: bool = False
    skip_dump_dir: str = "/tmp/rollout_dump"
    n: PositiveInt | None = None
    skip: SkipBlock = SkipBlock()

    @field_validator("skip_dump_dir")
    @classmethod
    def _check_dump_dir(cls, location: str, info: ValidationInfo) -> str:
        return _check_location(location) if info.data.get("skip_rollout") else location


class VerlActor(ConfigSection):
    """Holds ``actor_rollout_ref``."""

    rollout: VerlRollout = VerlRollout()


class VerlTrainer(ConfigSection):
    """Holds ``trainer``, as far as it names a recording."""

    experiment_name: str | None = None
    project_name: str | None = None


class VerlData(ConfigSection):
    """``data``, as far as rollout skip reads it; the two lengths are in the contract, as ``sequence_length``."""

    train_batch_size: PositiveInt | None = None
    gen_batch_size: PositiveInt | None = None
    max_prompt_length: PositiveInt | None = None
    max_response_length: PositiveInt | None = None


class VerlSections(ConfigSection):
    """Holds all of verl's sections in a configuration of ours."""

    actor_rollout_ref: VerlActor = VerlActor()
    skip: SkipRoles = SkipRoles()
    trainer: VerlTrainer = VerlTrainer()
    data: VerlData = VerlData()


@dataclass(frozen=True, kw_only=True, slots=True)
class VerlNames:
    """The parts of a recording's folder name: a change of any is a new folder. Batch sizes count prompts."""

    experiment: str
    project: str
    train_batch_size: int
    gen_batch_size: int
    n: int

    @property
    def folder(self) -> str:
        """``{experiment}_{project}_TrainGBS{train}__InferGBS{gen}__N{n}`` (verl, docs/advance/rollout_skip.rst).

        No two names share a folder: any character but letters, digits, ``_``, ``-``, ``.`` and ``~`` becomes ``%`` and
        its UTF-8 bytes in hexadecimal, and so does ``_`` in the project's name, the separator of the two names. Raises
        ``ConfigError`` for a name too long for file systems.
        """
        experiment = quote(self.experiment, safe="")
        project = quote(self.project, safe="").replace("_", "%5F")
        folder = f"{experiment}_{project}_TrainGBS{self.train_batch_size}__InferGBS{self.gen_batch_size}__N{self.n}"
        if len(folder) > _MAX_NAME_BYTES:
            raise ConfigError(
                f"the recording's folder, named after experiment {self.experiment!r} and project {self.project!r}, "
                f"would have a name of {len(folder)} bytes; file systems take {_MAX_NAME_BYTES}. Use shorter names"
            )
        return folder


@dataclass(frozen=True, kw_only=True, slots=True)
class VerlSwitch:
    """Holds one enabled rollout skip: the key that enables it, its folder, and its fields of ``rollout_mock``."""

    key: str
    dump_dir: str
    fields: Mapping[str, object]


def from_verl(rollout: Mapping[str, object], *, names: VerlNames) -> RolloutMockConfig:
    """Reads verl's ``actor_rollout_ref.rollout`` as ``rollout_mock``; not enabled where it skips nothing.

    Reads its keys ``skip_rollout``, ``skip_dump_dir``, ``skip``, and ``n``, which replaces ``names.n``. Raises
    ``ConfigError`` with every problem.
    """
    values, unread = set_aside_unread(VerlRollout, rollout, section=ROLLOUT_KEY)
    read = read_section(VerlRollout, values, section=ROLLOUT_KEY, origin=f"verl's {ROLLOUT_KEY}")
    switches = verl_switches(VerlSections(actor_rollout_ref=VerlActor(rollout=read)))
    if len(switches) > 1:
        raise_problems(f"verl's {ROLLOUT_KEY}", [("", several_switches([switch.key for switch in switches]))])
    names = names if read.n is None else replace(names, n=read.n)
    return translate_verl(switches[0], names=names, unread=unread) if switches else RolloutMockConfig()


def several_switches(keys: list[str]) -> str:
    """Returns the message for several switches, where only one may be on."""
    number = "both" if len(keys) == 2 else "all"
    return f"{' and '.join(keys)} are {number} on, and each says what is recorded and replayed; keep one of them"


def translate_verl(switch: VerlSwitch, *, names: VerlNames, unread: Iterable[str] = ()) -> RolloutMockConfig:
    """Translates one switch, as ``from_verl`` does; ``unread``: keys to name in its ``origin``."""
    fields = {"dump_dir": f"{switch.dump_dir.rstrip('/')}/{names.folder}", **switch.fields}
    return build_rollout_mock(f"verl's {switch.key}", fields, remark=describe_unread(unread))


def verl_switches(sections: VerlSections) -> list[VerlSwitch]:
    """Returns every rollout skip that is on."""
    rollout = sections.actor_rollout_ref.rollout
    switches = []
    if rollout.skip_rollout:
        key = f"{ROLLOUT_KEY}.skip_rollout"
        switches.append(VerlSwitch(key=key, dump_dir=rollout.skip_dump_dir, fields={"mode": "cache"}))
    if rollout.skip.enable:
        fields = _skip_fields(rollout.skip)
        switches.append(VerlSwitch(key=f"{ROLLOUT_KEY}.skip", dump_dir=rollout.skip.dump_dir, fields=fields))
    return [*switches, *_roles(rollout.skip, f"{ROLLOUT_KEY}.skip"), *_roles(sections.skip, "skip")]


def _roles(roles: SkipRoles, key: str) -> Iterator[VerlSwitch]:
    for name, role in zip(_ROLES, (roles.rollout, roles.async_rollout, roles.rollout_tq), strict=True):
        if role.enable:
            yield VerlSwitch(key=f"{key}.{name}", dump_dir=role.dump_dir, fields=_role_fields(role))


def _skip_fields(skip: SkipBlock) -> dict[str, object]:
    """Translates the second generation: the first ``max_dump_step`` steps are cached, later ones played or reused."""
    fields: dict[str, object] = {"mode": "cache", "steps": f"0-{skip.max_dump_step - 1}"}
    if skip.action == "cache":
        return fields
    later = {"mode": "mock", "steps": f"{skip.max_dump_step}-", "kinds": ["train"]}
    return {**fields, "schedule": [later], "missing_step": skip.action}


def _role_fields(role: SkipRole) -> dict[str, object]:
    """Translates a role of the third generation.

    ``cache`` plays and records the missing ones of ``steps``; ``repeat`` does so for the first of them, and reuses
    recorded steps for the others. All other steps are played.
    """
    steps = StepRanges.of(step - 1 for step in role.steps)
    if role.action == "cache":
        return {"mode": "cache", "steps": steps}
    first = min(role.steps) - 1
    others = StepRanges.of(step - 1 for step in role.steps if step - 1 != first)
    schedule: list[dict[str, object]] = [{"mode": "cache", "steps": first, "kinds": ["train"]}]
    if not others.ranges:
        return {"mode": "real", "schedule": schedule}
    schedule.append({"mode": "mock", "steps": others, "kinds": ["train"]})
    return {"mode": "real", "schedule": schedule, "missing_step": "repeat"}
