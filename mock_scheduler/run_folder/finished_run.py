"""Reads the files of a finished run: its summary or its error, and the few keys of its configuration with a use here.

``run.json`` and ``ledger.json`` are there after a completed run, ``error.json`` after a failed one.
Contract: every file is checked, and an error names the file and lists all of its problems. The rules for a
configuration before a run do not apply to a stored one: another release of Megatron, or of this project, may have
written it. Other keys are not looked at.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from mock_scheduler.config.align import ToleranceConfig
from mock_scheduler.config.base import ConfigSection
from mock_scheduler.config.instruments import PerturbationConfig
from mock_scheduler.config.interpolations import resolve_variables
from mock_scheduler.config.problems import validation_problems
from mock_scheduler.determinism.settings import is_deterministic_mode
from mock_scheduler.errors import AlignmentError, ConfigError
from mock_scheduler.support.files import load_json_object
from mock_scheduler.support.foreign_files import describe_failure, read_text
from mock_scheduler.support.loaded_code import load_loaded_code
from mock_scheduler.support.local_key import is_own
from mock_scheduler.support.run_files import CODE_FOLDER, ERROR_FILE, LEDGER_FILE, RUN_FILE
from mock_scheduler.support.text import MAX_DIGITS, bullet_list, is_real, shorten
from mock_scheduler.support.yaml_text import load_yaml
from mock_scheduler.trace.stated_steps import StatedSteps, load_stated_steps


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSummary:
    """Holds one finished run.

    Seconds are as the run measured them (``wall_s``, ``rollout_s``) and from the outside (``elapsed_s``: with the start
    of its processes). ``built`` counts built things, such as engines. ``batches``: the digest of the rollouts
    behind its training, by step. ``draws``: what draws random numbers in training, as ``hidden_dropout``.

    What an attached run says of itself: ``unobserved_modules``: modules whose output nothing can show, with the reason.
    ``untraced_parameters``: parameters that no rank traced, with their numbers of elements. ``order_limits``: what
    keeps one process from adding in its order (of a run in one process: in any layout's). ``not_followed``: sums that
    were left as they are where it followed another order. ``assumed``: sums that it followed as they usually are.

    ``own_calls``: how often each function or class of the user's in the place of a package's was called. ``steps``: the
    steps that it was to have. ``precision``: that it computed in; empty where it does not say so.
    ``idle_vocabulary``: tp ranks, as ``tp1``, of whose part of the vocabulary no token may be chosen.
    """

    name: str
    output_dir: Path
    layout: str
    wall_s: float
    rollout_s: float
    elapsed_s: float
    built: Mapping[str, int]
    batches: Mapping[str, str]
    draws: tuple[str, ...] = ()
    unobserved_modules: Mapping[str, str] = field(default_factory=dict)
    untraced_parameters: Mapping[str, int] = field(default_factory=dict)
    order_limits: tuple[str, ...] = ()
    not_followed: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()
    own_calls: Mapping[str, int] = field(default_factory=dict)
    steps: StatedSteps = field(default_factory=StatedSteps)
    precision: str = ""
    idle_vocabulary: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFailure:
    """How a run failed: its own error in words, and its exit code; 0 where it ended well and yet ran nothing."""

    exit_code: int
    message: str


def load_summary(name: str, output_dir: Path, *, elapsed_s: float | None) -> RunSummary:
    """Reads the summary of a completed run; raises ``AlignmentError``.

    ``elapsed_s``: ``None`` where nobody watched it from outside; its own seconds stand in.
    """
    stated = _load(
        output_dir / RUN_FILE,
        {
            "status": _COMPLETED,
            "layout": _TEXT,
            "wall_s": _NUMBER,
            "rollout_s": _NUMBER,
            "batches": _DIGESTS,
        },
        {
            "draws": _TEXTS,
            "unobserved_modules": _NAMED_TEXTS,
            "untraced_parameters": _COUNTS,
            "order_limits": _TEXTS,
            "not_followed": _TEXTS,
            "assumed": _TEXTS,
            "steps": _STEPS,
            "precision": _TEXT,
            "idle_vocabulary": _TEXTS,
        },
    )
    ledger = _load(output_dir / LEDGER_FILE, {"built": _COUNTS})
    return RunSummary(
        name=name,
        output_dir=output_dir,
        layout=stated["layout"],
        wall_s=float(stated["wall_s"]),
        rollout_s=float(stated["rollout_s"]),
        elapsed_s=float(stated["wall_s"]) if elapsed_s is None else elapsed_s,
        built=ledger["built"],
        batches=stated["batches"],
        draws=tuple(stated.get("draws", ())),
        idle_vocabulary=tuple(stated.get("idle_vocabulary", ())),
        unobserved_modules=stated.get("unobserved_modules", {}),
        untraced_parameters=stated.get("untraced_parameters", {}),
        order_limits=tuple(stated.get("order_limits", ())),
        not_followed=tuple(stated.get("not_followed", ())),
        assumed=tuple(stated.get("assumed", ())),
        own_calls=_load_own_calls(output_dir),
        steps=load_stated_steps(stated.get("steps", {})),
        precision=stated.get("precision", ""),
    )


def _load_own_calls(output_dir: Path) -> dict[str, int]:
    try:
        loaded = load_loaded_code(output_dir)
    except (OSError, ValueError) as error:
        raise AlignmentError(f"{output_dir / CODE_FOLDER}: the record of loaded code is damaged: {error}") from error
    return {} if loaded is None else loaded.calls


def load_batches(output_dir: Path) -> dict[int, str]:
    """Returns the digest of the rollouts of a completed run, by step; raises ``AlignmentError``."""
    stated = _load(output_dir / RUN_FILE, {"status": _COMPLETED, "batches": _DIGESTS})
    return {int(step): digest for step, digest in stated["batches"].items()}


def load_failure(output_dir: Path) -> RunFailure | None:
    """Returns the written error of a failed run, or ``None`` where there is none; raises ``AlignmentError``."""
    path = output_dir / ERROR_FILE
    if not path.is_file():
        return None
    stated = _load(path, {"type": _TEXT, "message": _TEXT, "exit_code": _INTEGER})
    return RunFailure(exit_code=stated["exit_code"], message=f"{stated['type']}: {stated['message']}")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Kind:
    """Holds the kind of a value: in words, and as a test."""

    text: str
    is_valid: Callable[[object], bool]


def _show(value: object) -> str:
    return shorten(repr(value), 80)


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 10**MAX_DIGITS


def _is_digests(value: object) -> bool:
    return isinstance(value, dict) and all(
        step.isdecimal() and len(step) <= MAX_DIGITS and isinstance(digest, str) for step, digest in value.items()
    )


_TEXT = _Kind(text="a text", is_valid=lambda value: isinstance(value, str))
_TEXTS = _Kind(
    text="a list of texts",
    is_valid=lambda value: isinstance(value, list) and all(isinstance(item, str) for item in value),
)
_NAMED_TEXTS = _Kind(
    text="an object of texts",
    is_valid=lambda value: isinstance(value, dict) and all(isinstance(item, str) for item in value.values()),
)
_INTEGER = _Kind(text="an integer", is_valid=_is_integer)
_NUMBER = _Kind(text="a number", is_valid=lambda value: is_real(value) and math.isfinite(value))
_COUNTS = _Kind(
    text="an object of integers",
    is_valid=lambda value: isinstance(value, dict) and all(map(_is_integer, value.values())),
)
_DIGESTS = _Kind(text="an object of digests by step", is_valid=_is_digests)


def _is_steps(value: object) -> bool:
    try:
        load_stated_steps(value)
    except ValueError:
        return False
    return True


_STEPS = _Kind(text="the steps that the run was to have", is_valid=_is_steps)
_COMPLETED = _Kind(text="'completed'", is_valid=lambda value: value == "completed")


def _load(path: Path, kinds: Mapping[str, _Kind], further: Mapping[str, _Kind] | None = None) -> dict[str, Any]:
    """Returns the named values of a file, each checked to be of its kind; ``further``: those that it may lack."""
    try:
        content = load_json_object(path, inside=path.parent)
    except OSError as error:
        raise AlignmentError(describe_failure(error, path)) from error
    except ValueError as error:
        raise AlignmentError(f"{path} {error}") from error
    problems = [
        f"{name} is {_show(content[name])}, expected {kind.text}" if name in content else f"{name} is missing"
        for name, kind in [*kinds.items(), *((name, kind) for name, kind in (further or {}).items() if name in content)]
        if name not in content or not kind.is_valid(content[name])
    ]
    if problems:
        raise AlignmentError(f"{path}: {'; '.join(problems)}")
    return content


_Section = TypeVar("_Section", bound=ConfigSection)


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredConfig:
    """Holds the needed keys. ``tolerance``: the stated bounds of the run, if any. ``perturbation``: of its weights."""

    path: Path
    precision: str
    trace_level: str
    is_deterministic: bool
    tolerance: ToleranceConfig
    perturbation: PerturbationConfig


def load_stored_config(path: Path) -> StoredConfig:
    """Reads a run's ``config.yaml``; raises ``ConfigError`` where a needed key is missing or of another kind."""
    content = read_stored_keys(path)
    problems: list[str] = []
    precision = _text(content, "precision", problems)
    trace_level = _text(_section(content, "trace", problems), "level", problems, prefix="trace.")
    envs = {str(name): str(value) for name, value in _section(content, "system_envs", problems).items()}
    stated = _section(content, "align", problems).get("tolerance")
    tolerance = _checked(ToleranceConfig, "align.tolerance", stated, problems)
    perturbation = _checked(PerturbationConfig, "perturbation", content.get("perturbation"), problems)
    if problems:
        raise ConfigError(f"{path} is not the configuration of a run:{bullet_list(problems, limit=None)}")
    return StoredConfig(
        path=path,
        precision=precision,
        trace_level=trace_level,
        is_deterministic=is_deterministic_mode(envs),
        tolerance=tolerance,
        perturbation=perturbation,
    )


def read_stored_keys(path: Path) -> dict[str, Any]:
    """Reads the keys of a run's ``config.yaml``; raises ``ConfigError`` where there are none.

    In a run of this user's, ``${oc.env:NAME}`` has this process's value; without one it stays as it stands there. In
    a stranger's it always does: whatever an error or a report shows of it may be sent back.
    """
    try:
        text = read_text(path, inside=path.parent, what="a configuration")
    except OSError as error:
        raise ConfigError(describe_failure(error, path)) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    try:
        content = load_yaml(text)
    except ValueError as error:
        raise ConfigError(f"{path} {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} is not a configuration: it has no keys")
    return resolve_variables(content, str(path)) if is_own(path) else content


def _section(content: Mapping[str, Any], name: str, problems: list[str]) -> Mapping[str, Any]:
    value = content.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        problems.append(f"{name} is {_show(value)}, expected keys")
        return {}
    return value


def _text(content: Mapping[str, Any], name: str, problems: list[str], *, prefix: str = "") -> str:
    value = content.get(name)
    if isinstance(value, str):
        return value
    # YAML reads an unquoted off as False.
    if value is False:
        return "off"
    problems.append(f"{prefix}{name} is {_show(value)}, expected a text")
    return ""


def _checked(section: type[_Section], name: str, value: object, problems: list[str]) -> _Section:
    """Returns a section as it stands; one without keys where it is missing, or wrong, and then a problem."""
    try:
        return section.model_validate(value or {})
    except ValidationError as error:
        problems.extend(f"{key}: {text}" for key, text in validation_problems(error, section, section=name))
        return section()
