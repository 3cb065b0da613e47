# ruff: noqa: D102 - the docstring of each protocol explains its fields
"""Instruments know a training program by these protocols, and find a configuration's program here; imports no torch.

A *program* reads a configuration, trains, and leaves files under the names of ``support.run_files`` in the run's
``output_dir``. Two exist: the pipeline of this repository, and any training command with a mapping from keys to its
arguments (``mock_scheduler.command_program``).

Contract: a program is found by name, in this module alone: by the top-level key ``program`` of a configuration's file,
as ``module:NAME``; where the file has a top-level ``command`` instead, by ``COMMAND_PROGRAM``; else by
``config.locating.DEFAULT_PROGRAM``, the program of the shipped configurations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Protocol, Self, TypeAlias, runtime_checkable

from mock_scheduler.config.align import AlignConfig
from mock_scheduler.config.base import ConfigSection, EnvironmentTexts, KeyEffects
from mock_scheduler.config.instruments import GraftConfig, OrderConfig, PerturbationConfig, TraceConfig
from mock_scheduler.config.layout import ParallelConfig
from mock_scheduler.config.loading import ConfigSource
from mock_scheduler.config.locating import DEFAULT_PROGRAM
from mock_scheduler.config.rollout_mock import RolloutMockConfig
from mock_scheduler.config.stored_code import (
    PROGRAM_KEY,
    StoredCode,
    Use,
    find_stored_code,
    is_stored,
    names_command,
    read_program_name,
    refuse_stored_code,
)
from mock_scheduler.determinism.settings import environment_settings
from mock_scheduler.errors import ConfigError
from mock_scheduler.layouts.order_plan import OrderPlan
from mock_scheduler.support.local_key import is_own

#: The program of every configuration that has a ``command``.
COMMAND_PROGRAM = "mock_scheduler.command_program.program:PROGRAM"

Plain: TypeAlias = "int | bool | str | float | None"
"""The value of one key."""


class RunConfig(Protocol):
    """The checked configuration of one run, of any program: a pydantic model with at least these keys.

    ``parallel``, ``rollout_mock``, ``trace``, ``align``, ``order``, ``perturbation`` and ``graft`` are sections of the
    library; an instrument makes a run by overrides of keys in them and of the plain ones. ``max_steps``: training
    steps, from 0. ``precision``: ``float32``, ``bfloat16`` or ``float64``. ``system_envs``: variables of every process.
    ``resume_from_checkpoint``: the folder of the checkpoint to go on from. ``rollout_mock``: ``None`` where the run
    takes no rollouts from a scheduler, so there is nothing to record.
    """

    @property
    def exp_name(self) -> str: ...
    @property
    def output_dir(self) -> str: ...
    @property
    def max_steps(self) -> int: ...
    @property
    def precision(self) -> str: ...
    @property
    def resume_from_checkpoint(self) -> str | None: ...
    @property
    def system_envs(self) -> Mapping[str, str]: ...
    @property
    def parallel(self) -> ParallelConfig: ...
    @property
    def rollout_mock(self) -> RolloutMockConfig | None: ...
    @property
    def trace(self) -> TraceConfig: ...
    @property
    def align(self) -> AlignConfig: ...
    @property
    def order(self) -> OrderConfig: ...
    @property
    def perturbation(self) -> PerturbationConfig: ...
    @property
    def graft(self) -> GraftConfig: ...
    @property
    def environment_texts(self) -> EnvironmentTexts: ...
    def keep_environment_texts(self, found: EnvironmentTexts) -> None: ...
    def model_dump(self, *, mode: str = ..., exclude: set[str] | None = ...) -> dict[str, Any]: ...
    def model_copy(self, *, update: Mapping[str, Any] | None = ...) -> Self: ...
    @classmethod
    def model_validate(cls, obj: Any) -> Self: ...  # noqa: ANN401 - as pydantic has it


#: Makes a checked configuration out of overrides ``a.b=c``; raises ``ConfigError``.
ConfigLoader = Callable[[Sequence[str]], RunConfig]


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipRule:
    """How a run's policy loss clips a token's ratio of new to old probability.

    ``low``, ``high``: how far the ratio counts below and above 1. ``dual``: the dual clip's bound, ``None`` without
    one. ``is_geometric``: the loss is GMPO. ``is_bypass``: old log-probabilities are the rollout policy's.
    ``has_clip``: whether the loss has a clip at all.
    """

    low: float
    high: float
    dual: float | None = None
    is_geometric: bool = False
    is_bypass: bool = False
    has_clip: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Dimension:
    """Holds one reducible part of a case, at levels 1, 2, ..., each smaller than the one before.

    ``name``: in words. ``key``: the key to set, or a name of the program's own. ``original``: the value at level
    0; ``values``: at the levels from 1 on. Where ``kind`` is ``change``, ``key`` is an override of a candidate,
    ``entry`` or ``python``, and its only value, ``None``, leaves it out.
    """

    kind: Literal["workload", "layout", "change"]
    name: str
    key: str
    original: Plain
    values: tuple[Plain, ...]

    def describe(self, level: int, in_effect: Plain = None) -> str:
        """``tp 4 → 1``, or ``without a.b=c``; ``in_effect``: the value of the level, where it is known."""
        if self.kind == "change":
            return f"without {self.name}"
        value = self.values[level - 1] if in_effect is None else in_effect
        return f"{self.name} {_show(self.original)} → {_show(value)}"


def halvings(value: int, least: int) -> Iterator[int]:
    """Yields half of a size, a quarter and so on, rounded down, as long as it is not below the least."""
    while value // 2 >= least:
        value //= 2
        yield value


def _show(value: Plain) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "1" if value is None else str(value)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReducedWorkload:
    """The keys of a smaller workload with their values; ``idle``: dimensions whose level has no effect in it."""

    values: Mapping[str, Plain]
    idle: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True, slots=True)
class ReducedBatch:
    """Holds the number of groups of every batch, and the keys of both sides with new values."""

    num_groups: int
    values: Mapping[str, Plain]


class Reductions(Protocol):
    """Makes runs of a program smaller, for ``minimise`` and ``extract``."""

    def list_dimensions(self, config: RunConfig) -> tuple[Dimension, ...]:
        """Lists the reducible parts of the workload; baseline and candidate share it."""
        ...

    def reduce_workload(self, config: RunConfig, chosen: Mapping[str, Plain], *, num_parts: int) -> ReducedWorkload:
        """Gives the keys of the workload with the chosen value of each dimension, by the dimension's key.

        ``num_parts``: the fewest micro-batches of an update under the layout.
        """
        ...

    def list_batches(
        self, baseline: RunConfig, *, num_groups: int, num_all: int, max_steps: int
    ) -> Sequence[Mapping[str, Plain]]:
        """Lists values of keys for so many of all groups of a batch, and so many steps, the best ones first."""
        ...

    def follow_batch(self, candidate: RunConfig, batch: ReducedBatch) -> dict[str, Plain]:
        """Gives a candidate's keys beside the batch's, since it makes another number of updates."""
        ...

    def checkpoint_name(self, step: int) -> str:
        """Names the folder of the checkpoint before a step."""
        ...

    def describe_seed(self, config: RunConfig) -> str:
        """Says in a phrase where the initial weights come from."""
        ...

    def first_trained_step(self, config: RunConfig) -> int:
        """Gives the first step with training of the policy itself."""
        ...

    def begins_alike(self, baseline: RunConfig, candidate: RunConfig) -> bool:
        """Says whether a candidate can begin from the baseline's checkpoints."""
        ...

    def next_step(self, checkpoint: Path) -> int | None:
        """Gives the next step after a checkpoint; ``None`` for no checkpoint, ``ConfigError`` for a damaged one."""
        ...

    def copy_checkpoint(self, origin: Path, target: Path, batch: ReducedBatch, *, root: Path) -> None:
        """Copies a checkpoint in a form for a run with other batches; no link may lead out of ``root``."""
        ...


@runtime_checkable
class Program(Protocol):
    """A training program.

    ``schema``: the model of its configurations. ``entry``: the Python module of every process of a run;
    ``preload``: modules that every rank of a run imports, and that compute nothing by it, so that one process may do it
    for all; ``replay_entry``: the one for playing recorded actions again, and ``export_entry``: the one for writing a
    checkpoint as Hugging Face's; ``None`` where there is none. ``packages``: their sources decide the bits of a run,
    beside the library's. ``initial_state_key``: the key for the folder of a trace whose initial state a run begins
    with, ``None`` where runs of every layout begin alike by themselves. ``quiet_keys``: values of keys to leave out
    work without a change of training: validation, checkpoints, trackers. ``folder_keys``: values of keys to put all
    files of a run into its ``output_dir``. ``reductions``: ``None`` where runs cannot be made smaller.
    """

    @property
    def schema(self) -> type[ConfigSection]: ...
    @property
    def entry(self) -> str: ...
    @property
    def preload(self) -> tuple[str, ...]: ...
    @property
    def replay_entry(self) -> str | None: ...
    @property
    def export_entry(self) -> str | None: ...
    @property
    def packages(self) -> tuple[str, ...]: ...
    @property
    def initial_state_key(self) -> str | None: ...
    @property
    def quiet_keys(self) -> Mapping[str, Plain]: ...
    @property
    def folder_keys(self) -> Mapping[str, Plain]: ...
    @property
    def reductions(self) -> Reductions | None: ...

    def build_loader(self, config_name: str, config_path: str | Path) -> ConfigLoader:
        """Builds a loader of one configuration under any overrides."""
        ...

    def arguments(self, entry: str, source: ConfigSource) -> tuple[str, ...]:
        """Gives the arguments of Python for a run of a source by an entry module."""
        ...

    def num_processes(self, config: RunConfig) -> int:
        """Counts the processes of a run that run its entry: those of the layout, or 1 that starts them itself."""
        ...

    def effects(self, config: RunConfig) -> KeyEffects:
        """Gives the effect of each key; of the user's own keys, as this configuration states it."""
        ...

    def list_sources(self, config: RunConfig) -> Sequence[Path]:
        """Lists further files that decide the bits of a run, beside ``packages``."""
        ...

    def first_step(self, config: RunConfig) -> int:
        """Gives the first step of a run: 0, or the one after its checkpoint."""
        ...

    def end_after(self, config: RunConfig, last_step: int | None) -> list[str]:
        """Gives overrides to end a run after a step, as far as nothing else moves, and to save nothing on the way.

        ``last_step`` ``None``: the run keeps its steps.
        """
        ...

    def count_elements(self, config: RunConfig, *, vocabulary: int) -> int | None:
        """Counts, at most, the elements of one token in a full trace, with their gradients; ``None``: not known."""
        ...

    def order_limits(self, config: RunConfig) -> tuple[str, ...]:
        """Says why the order of sums of a run cannot be followed by one process; empty where it can."""
        ...

    def plan_order(self, config: RunConfig) -> OrderPlan | None:
        """Plans the order of a run's sums; ``ValueError`` where there are ``order_limits``.

        ``None``: nobody knows the order before the run.
        """
        ...

    def load_clip_rule(self, config_path: Path) -> ClipRule:
        """Reads how a finished run clips from its ``config.yaml``; ``AlignmentError`` where the file does not say."""
        ...


def check_stored_code(config_name: str, config_path: str | Path, *, use: Use, run_stored_code: bool) -> str:
    """Refuses a configuration that a run left behind and that names code, unless the user asked for it.

    Everything that loads a configuration by name calls this before ``find_program``. A configuration of the user's own
    passes: one that no run left, or one that a run of this user left here (``support.local_key``). Returns a text that
    says what will run; empty where nothing of the file's own does. Raises ``ConfigError``.
    """
    path = _config_file(config_name, config_path)
    if not is_stored(path) or not path.is_file() or is_own(path):
        return ""
    return refuse_stored_code(path, list_stored_code(path), use=use, is_allowed=run_stored_code)


def list_stored_code(path: Path, *, overrides: Sequence[object] = (), only: str | None = None) -> list[StoredCode]:
    """Lists the code that a stored configuration names, as ``config.stored_code.find_stored_code`` does."""
    settings = [setting.name for setting in environment_settings()]
    own = (DEFAULT_PROGRAM, COMMAND_PROGRAM)
    return find_stored_code(path, own_programs=own, settings=settings, overrides=overrides, only=only)


def find_program(config_name: str, config_path: str | Path) -> Program:
    """Finds the program of a configuration; raises ``ConfigError`` where the named one is none.

    Only the named file is looked at, and the key must stand on a line of its own. The program is imported: see
    ``check_stored_code``.
    """
    path = _config_file(config_name, config_path)
    named = read_program_name(path)
    if named:
        return import_program(named, origin=f"{path}: {PROGRAM_KEY} ")
    return import_program(COMMAND_PROGRAM if names_command(path) else DEFAULT_PROGRAM)


def _config_file(config_name: str, config_path: str | Path) -> Path:
    return Path(config_path) / f"{config_name.removesuffix('.yaml')}.yaml"


def import_program(name: str, *, origin: str = "") -> Program:
    """Imports a program by ``module:NAME``; raises ``ConfigError`` where there is none of this name."""
    module_name, _, attribute = name.partition(":")
    try:
        found = vars(import_module(module_name)).get(attribute)
    except (ModuleNotFoundError, ValueError) as error:
        raise ConfigError(f"{origin}{name!r} cannot be imported: {error}; write it as module:NAME") from error
    if not isinstance(found, Program):
        raise ConfigError(f"{origin}{name!r} is no program: {module_name} has no {attribute or 'name'} that is one")
    return found


def load_config(source: ConfigSource, program: Program | None = None, *, run_stored_code: bool = False) -> RunConfig:
    """Loads the checked configuration of a source; raises ``ConfigError``.

    ``program``: ``None`` is the one of the configuration, and then ``run_stored_code`` allows a stored configuration to
    name it.
    """
    if program is None:
        check_stored_code(source.config_name, source.config_path, use=Use.LOAD, run_stored_code=run_stored_code)
        program = find_program(source.config_name, source.config_path)
    return program.build_loader(source.config_name, source.config_path)(source.overrides)
