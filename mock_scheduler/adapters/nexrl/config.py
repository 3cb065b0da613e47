"""The sections ``debug`` and ``rollout_worker``, spelled as NexRL spells them, and the variables of its trainer.

Contract: importing this module imports no torch. ``docs/nexrl.md`` says what is written, and where.
"""

from __future__ import annotations

import os.path
import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import ClassVar, Literal, get_args

from pydantic import field_validator, model_validator

from mock_scheduler.config.base import ConfigSection, Decides, PositiveInt
from mock_scheduler.errors import ConfigError
from mock_scheduler.support.text import bullet_list

DumpFormat = Literal["pt", "jsonl"]
TrainerDumpOption = Literal["forward_data", "loss", "is_loss_debug", "batch_inputs", "param", "gradient"]
TRAINER_DUMP_OPTIONS: tuple[TrainerDumpOption, ...] = get_args(TrainerDumpOption)

#: What needs ``target_param_pattern``.
PARAMETER_OPTIONS = ("param", "gradient")

_PREFIX = "WEAVER_DEBUG_DUMP_"
_ENABLED, _DIR, _EVERY_N, _OPTIONS = (f"{_PREFIX}{name}" for name in ("ENABLED", "DIR", "EVERY_N", "OPTIONS"))
_TRAINER_VARIABLES = (_ENABLED, _DIR, _EVERY_N, _OPTIONS)
_SWITCH = {"1": True, "true": True, "0": False, "false": False, "": False}


class DumpOptions(ConfigSection):
    """What a run that trains by itself writes; each is a folder of ``dump_dir``."""

    trajectory: bool = False
    """The batch."""
    old_log_probs: bool = False
    """Log-probabilities before the first update."""
    forward_data: bool = False
    """Inputs and outputs of each micro-batch."""
    loss: bool = False
    """Losses of each micro-batch."""
    param: bool = False
    """Parameters that match the pattern."""
    gradient: bool = False
    """Gradients that match the pattern."""


class RemoteApiDumpOptions(ConfigSection):
    """What a run that trains on a remote service writes; each is a folder of ``dump_dir``."""

    prepared_trajectories: bool = False
    """Rows as they are sent."""
    datums: bool = False
    """Requests of each micro-batch."""
    training_metrics: bool = False
    """The service's answers."""


class DebugConfig(ConfigSection):
    """NexRL's debug dump: what a step computes, in a file for each rank and micro-batch.

    ``dump_dir``: ``~`` is expanded. ``dump_format``: ``pt`` or ``jsonl``. ``target_param_pattern``: a regular
    expression that is searched for in the names of parameters, Megatron's (``decoder.layers.0.…``) and Hugging Face's
    (``model.layers.0.…``); needed for ``param`` and ``gradient``. ``enable_data_dump`` false turns all of it off,
    whatever the options are.
    """

    decides: ClassVar = Decides.NOTHING

    enable_data_dump: bool = False
    """The switch of all of it."""
    dump_dir: str = "./debug_dump"
    dump_format: DumpFormat = "pt"
    dump_every_n_steps: PositiveInt = 1
    """Steps divisible by it are written."""
    dump_options: DumpOptions = DumpOptions()
    remote_api_dump_options: RemoteApiDumpOptions = RemoteApiDumpOptions()
    target_param_pattern: str = ""

    def enabled_options(self) -> tuple[str, ...]:
        """What is written of ``dump_options``; nothing while ``enable_data_dump`` is false."""
        return _names_of(self.dump_options) if self.enable_data_dump else ()

    def enabled_remote_options(self) -> tuple[str, ...]:
        """What is written of ``remote_api_dump_options``; nothing while ``enable_data_dump`` is false."""
        return _names_of(self.remote_api_dump_options) if self.enable_data_dump else ()

    def is_due(self, step: int) -> bool:
        """Whether anything is written of a step."""
        return self.enable_data_dump and step % self.dump_every_n_steps == 0

    @field_validator("dump_dir")
    @classmethod
    def _check_dump_dir(cls, folder: str) -> str:
        if not folder.strip():
            raise ValueError("is empty; give a folder such as ./debug_dump")
        return os.path.expanduser(folder)

    @field_validator("target_param_pattern")
    @classmethod
    def _check_pattern(cls, pattern: str) -> str:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(
                f"{pattern!r} is no regular expression: {error}; in double quotes YAML halves backslashes: "
                "\"model\\\\.layers\\\\.0\\\\..*\" or 'model\\.layers\\.0\\..*'"
            ) from error
        return pattern

    @model_validator(mode="after")
    def _check_options(self) -> DebugConfig:
        problems = self._option_problems()
        if problems:
            raise ValueError(f"has keys that do not go together:{bullet_list(problems, limit=None)}")
        return self

    def _option_problems(self) -> list[str]:
        chosen = [f"dump_options.{name}" for name in _names_of(self.dump_options)]
        chosen += [f"remote_api_dump_options.{name}" for name in _names_of(self.remote_api_dump_options)]
        problems = []
        if chosen and "enable_data_dump" not in self.model_fields_set:
            problems.append(
                f"{', '.join(chosen)} would have no effect: enable_data_dump is not given; set it to true, or to false "
                "to dump nothing"
            )
        if self.enable_data_dump and not chosen:
            problems.append(
                "enable_data_dump is true, and no option of dump_options or remote_api_dump_options is: nothing would "
                "be written"
            )
        needing = [name for name in PARAMETER_OPTIONS if name in self.enabled_options()]
        if needing and not self.target_param_pattern:
            problems.append(
                f"target_param_pattern is not given: {' and '.join(f'dump_options.{name}' for name in needing)} for "
                "which parameters? Give it as 'model\\.layers\\.0\\.self_attn\\.q_proj\\.weight'"
            )
        return problems


def _names_of(options: DumpOptions | RemoteApiDumpOptions) -> tuple[str, ...]:
    return tuple(name for name, is_on in options.model_dump().items() if is_on)


class RolloutWorkerConfig(ConfigSection):
    """Where rollouts come from: ``real`` plays them, ``mock`` reads the trajectories that a debug dump wrote.

    ``trajectory_load_path``: a step's file, or a folder with one for each step. ``trajectory_format``: by default what
    the files are. ``match``: which trajectory is given for which of those that a step asks for: the one with its
    ``(group_id, run_id)``, or, for files of another system's ids, that at its place in the ``order`` of ids.
    ``missing_logprobs``: what to do with trajectories that hold no log-probabilities, as NexRL's own: refuse them, or
    take ``zero`` for each.
    """

    # It says where rollouts come from. A replay never has it, and so no contract may ask for it.
    decides: ClassVar = Decides.NOTHING

    type: Literal["real", "mock"] = "real"
    """``real`` plays, ``mock`` reads a dump."""
    need_llm_inference: bool | None = None
    """NexRL's; whether rollouts need an engine."""
    trajectory_load_path: str | None = None
    trajectory_format: DumpFormat | None = None
    match: Literal["ids", "order"] = "ids"
    missing_logprobs: Literal["error", "zero"] = "error"

    @property
    def reads_dump(self) -> bool:
        """Whether rollouts are read in the place of played."""
        return self.type == "mock"

    @field_validator("trajectory_load_path")
    @classmethod
    def _expand_path(cls, path: str | None) -> str | None:
        if path is not None and not path.strip():
            raise ValueError("is empty; give a file such as debug_dump/trajectory/step_000000.pt")
        return None if path is None else os.path.expanduser(path)

    @model_validator(mode="after")
    def _check_combination(self) -> RolloutWorkerConfig:
        problems = self._mock_problems() if self.reads_dump else self._real_problems()
        if problems:
            raise ValueError(f"has keys that do not go together:{bullet_list(problems, limit=None)}")
        return self

    def _mock_problems(self) -> list[str]:
        problems = []
        if self.trajectory_load_path is None:
            problems.append(
                "type mock needs trajectory_load_path, a file such as debug_dump/trajectory/step_000000.pt or the "
                "folder it is in: rollouts are never made up"
            )
        if self.need_llm_inference:
            problems.append("need_llm_inference true with type mock: nothing is inferred; set it to false")
        return problems

    def _real_problems(self) -> list[str]:
        problems = []
        for name in ("trajectory_load_path", "trajectory_format", "match", "missing_logprobs"):
            value = getattr(self, name)
            if value != type(self).model_fields[name].default:
                problems.append(f"{name} {value} has no effect with type real; set type=mock, or leave it out")
        if self.need_llm_inference is False:
            problems.append("need_llm_inference false with type real: episodes are played by a model; leave it out")
        return problems


def rollout_worker_problem(worker: RolloutWorkerConfig, modes_in_use: frozenset[str]) -> str:
    """Why the section cannot stand beside ``rollout_mock`` in these modes; empty where it can."""
    if not worker.reads_dump or modes_in_use != {"mock"}:
        return ""
    return (
        "rollout_worker.type mock with rollout_mock.mode mock: two sources for one rollout, and the recording would "
        "answer every request; leave out rollout_worker, or set rollout_mock.enable=false (or mode=dump, to record "
        "what the debug dump holds)"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerDump:
    """What NexRL's trainer mode writes, as its environment variables say.

    ``folder``: its own, beside that of ``debug``. ``every_n``: steps.
    """

    folder: str
    every_n: int
    options: tuple[TrainerDumpOption, ...]

    def is_due(self, step: int) -> bool:
        """Whether anything is written of a step."""
        return step % self.every_n == 0


def read_trainer_dump(environ: Mapping[str, str], *, target_param_pattern: str = "") -> TrainerDump | None:
    """What ``WEAVER_DEBUG_DUMP_ENABLED``, ``_DIR``, ``_EVERY_N`` and ``_OPTIONS`` ask for; ``None``: nothing.

    ``_DIR`` is ``./weaver_debug_dump`` and ``_EVERY_N`` 1 where they are not set. Raises ``ConfigError`` listing every
    variable that is unknown, has a wrong value or no effect.
    """
    given = {name: value.strip() for name, value in environ.items() if name.startswith(_PREFIX)}
    problems = [_unknown_variable(name) for name in sorted(set(given) - set(_TRAINER_VARIABLES))]
    switch = _SWITCH.get(given.get(_ENABLED, "").lower())
    if switch is None:
        problems.append(f"{_ENABLED} is {given[_ENABLED]!r}; expected 1 or 0")
    elif not switch and _ENABLED not in given and given:
        problems.append(f"{', '.join(sorted(given))} would have no effect without {_ENABLED}=1")
    options: tuple[TrainerDumpOption, ...] = ()
    if switch:
        options = _read_options(given.get(_OPTIONS, ""), target_param_pattern, problems)
    every_n = given.get(_EVERY_N, "1")
    if not every_n.isascii() or not every_n.isdigit() or int(every_n) < 1:
        problems.append(f"{_EVERY_N} is {every_n!r}; expected a whole number of at least 1")
    folder = given.get(_DIR, "./weaver_debug_dump")
    if not folder:
        problems.append(f"{_DIR} is empty; give a folder such as ./weaver_debug_dump")
    if problems:
        raise ConfigError(f"the environment of the debug dump cannot be used:{bullet_list(problems, limit=None)}")
    return TrainerDump(folder=os.path.expanduser(folder), every_n=int(every_n), options=options) if switch else None


def _unknown_variable(name: str) -> str:
    nearest = get_close_matches(name, _TRAINER_VARIABLES, n=1, cutoff=0.5)
    hint = f"; nearest: {nearest[0]}" if nearest else ""
    return f"{name} is unknown{hint}; known: {', '.join(_TRAINER_VARIABLES)}"


def _read_options(text: str, pattern: str, problems: list[str]) -> tuple[TrainerDumpOption, ...]:
    """The options in their canonical order; what is wrong with them is added to ``problems``."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    problems += [
        f"{_OPTIONS}: unknown option {name!r}; known: {', '.join(TRAINER_DUMP_OPTIONS)}"
        for name in names
        if name not in TRAINER_DUMP_OPTIONS
    ]
    if not names:
        problems.append(f"{_OPTIONS} names nothing to write; known: {', '.join(TRAINER_DUMP_OPTIONS)}")
    needing = [name for name in names if name in PARAMETER_OPTIONS]
    if needing and not pattern:
        problems.append(
            f"{_OPTIONS}: {' and '.join(needing)} for which parameters? Set debug.target_param_pattern in the "
            "configuration"
        )
    return tuple(option for option in TRAINER_DUMP_OPTIONS if option in names)
