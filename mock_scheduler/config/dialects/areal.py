"""Reads AReaL's ``trajectory_debug`` (called ``debug`` in the proposal before it), read as ``rollout_mock``.

Keys and rules are AReaL's, of its TrajectoryDebugConfig. The differences, and why: docs/dialects.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import field_validator, model_validator

from mock_scheduler.config.base import ConfigSection, NonNegativeInt, PositiveInt
from mock_scheduler.config.dialects.foreign import build_rollout_mock, read_section
from mock_scheduler.config.rollout_mock import RolloutMockConfig

AREAL_SECTIONS = ("trajectory_debug", "debug")


class TrajectoryDebug(ConfigSection):
    """Holds the section as AReaL documents it."""

    dump_rollout_data: bool = False
    replay_rollout_data: bool = False
    path: str | None = None
    dump_steps: list[NonNegativeInt] | None = None
    max_keep: PositiveInt | None = None
    pin_steps: list[NonNegativeInt] | None = None
    dump_scope: Literal["rollout", "full"] = "rollout"

    @property
    def is_on(self) -> bool:
        """Says whether the section asks for anything."""
        return self.dump_rollout_data or self.replay_rollout_data

    @field_validator("path")
    @classmethod
    def _check_path(cls, path: str | None) -> str | None:
        if path is not None and not path.strip():
            raise ValueError("is empty; give a folder, or leave it out for {output_dir}/debug_trajectories")
        return path

    @field_validator("dump_steps")
    @classmethod
    def _check_dump_steps(cls, steps: list[int] | None) -> list[int] | None:
        if steps == []:
            raise ValueError("is an empty list, so that nothing would be dumped; leave it out to dump every step")
        return steps

    @field_validator("dump_scope")
    @classmethod
    def _check_scope(cls, scope: str) -> str:
        if scope == "full":
            raise ValueError(
                "'full' stores what the trainer computes along with the rollout, and a replay would then train on "
                "those numbers and not on what is being tested; use 'rollout', and trace.level=full to store and "
                "compare what the trainer computes"
            )
        return scope

    @model_validator(mode="after")
    def _check_switches(self) -> TrajectoryDebug:
        if self.dump_rollout_data and self.replay_rollout_data:
            raise ValueError(
                "dump_rollout_data and replay_rollout_data are mutually exclusive: a run records or replays; set one "
                "of them to false"
            )
        return self


def from_areal(section: Mapping[str, object], *, default_path: str, name: str = AREAL_SECTIONS[0]) -> RolloutMockConfig:
    """Reads AReaL's section as ``rollout_mock``: dump is mode dump, replay is mode mock, neither is not enabled.

    ``default_path``: the folder where the section has no ``path``. ``name``: of the section in messages. Raises
    ``ConfigError`` with every problem.
    """
    read = read_section(TrajectoryDebug, section, section=name, origin=f"AReaL's {name}")
    return translate_areal(read, default_path=default_path, name=name)


def translate_areal(section: TrajectoryDebug, *, default_path: str, name: str) -> RolloutMockConfig:
    """Translates a section already read, as ``from_areal`` does."""
    dump_dir = section.path or default_path
    if not section.is_on:
        return RolloutMockConfig(enable=False, dump_dir=dump_dir)
    fields: dict[str, object] = {
        "mode": "dump" if section.dump_rollout_data else "mock",
        "dump_dir": dump_dir,
        "steps": section.dump_steps,
        "retention": {"keep_last": section.max_keep, "pin_steps": section.pin_steps or None},
    }
    return build_rollout_mock(f"AReaL's {name}", fields)
