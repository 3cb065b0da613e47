"""The file of a checkpoint that says where its run stood; written last, and read before anything is built.

Contract: ``run_state.json`` holds step, mode, the settings behind the checkpoint's tensors, the states of rollout
scheduler and learner, and the size of every other file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from mock_scheduler.config.base import Decides
from mock_scheduler.errors import ConfigError
from mock_scheduler.support.digests import JSON
from mock_scheduler.support.files import load_json_object, save_json
from mock_scheduler.support.text import bullet_list
from pipelines.config.schema import PipelineConfig
from pipelines.keys import effect_of, keys_in_effect

RUN_STATE_FILE = "run_state.json"


_FILES = "files"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunState:
    """A run's place: ``next_step`` is its first untrained step.

    ``fixed``: the settings that a continuing run must share, by the configuration's dotted names.
    """

    next_step: int
    mode: str
    fixed: Mapping[str, JSON]
    scheduler: Mapping[str, JSON]
    learner: Mapping[str, JSON]


def fixed_settings(config: PipelineConfig, *, vocab_size: int) -> dict[str, JSON]:
    """Reads the settings behind a checkpoint's tensors and the run's seeded parts.

    ``vocab_size``: the one in effect; it follows from the environments where the model section has none.
    """
    values = keys_in_effect(config, vocab_size=vocab_size)
    return {
        **{key: value for key, value in values.items() if _is_handed_on(effect_of(key))},
        "models": ["policy", "critic"] if config.adv_estimator == "gae" else ["policy"],
    }


def _is_handed_on(facts: Decides) -> bool:
    # The state is that of training: validation may be another after it.
    return Decides.STATE in facts and Decides.VALIDATION not in facts


def check_same_settings(folder: Path, state: RunState, current: Mapping[str, JSON]) -> None:
    """Raises ``ConfigError`` with every setting that has changed since the checkpoint was written."""
    names = dict.fromkeys([*current, *state.fixed])
    differing = [
        f"{name}: the checkpoint has {_shown(state.fixed, name)}, this run has {_shown(current, name)}"
        for name in names
        if _shown(state.fixed, name) != _shown(current, name)
    ]
    if differing:
        raise ConfigError(
            f"resume_from_checkpoint: {folder} is of a run with other settings, which its tensors, reference policy, "
            f"environments or samples follow from:{bullet_list(differing, limit=None)}\n"
            "Set them as they were, or start a new run."
        )


def _shown(settings: Mapping[str, JSON], name: str) -> str:
    return json.dumps(settings[name]) if name in settings else "none"


def checkpoint_folder(root: Path, next_step: int) -> Path:
    """Names the folder of the checkpoint from which ``next_step`` would be run."""
    return root / f"step_{next_step:06d}"


def _file_sizes(folder: Path) -> dict[str, int]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != RUN_STATE_FILE)
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in paths}


def check_files(folder: Path) -> None:
    """Refuses a checkpoint with a missing or cut file; looks at sizes and reads nothing but the run state.

    Raises:
        ConfigError: with every file of another size than was written.
    """
    path = folder / RUN_STATE_FILE
    written, found = load_json_object(path).get(_FILES), _file_sizes(folder)
    if not isinstance(written, dict) or not written:
        raise _broken(path, f"{_FILES} is missing")
    problems = [
        f"{name}: written with {size} bytes, found {f'with {found[name]}' if name in found else 'missing'}"
        for name, size in written.items()
        if found.get(name) != size
    ]
    if problems:
        raise ConfigError(
            f"resume_from_checkpoint: {folder} is not whole:{bullet_list(problems, limit=10)}\n"
            "Copy it again from where it was written, or resume from another checkpoint."
        )


def read_run_state(folder: Path) -> RunState:
    """Reads where the checkpointed run stood; reads one small file and builds nothing.

    Raises:
        ConfigError: the folder is no checkpoint, or the file is not one of ``write_run_state``'s.
    """
    path = folder / RUN_STATE_FILE
    if not path.is_file():
        raise ConfigError(
            f"resume_from_checkpoint: {folder} is not a checkpoint ({RUN_STATE_FILE} is missing); give a folder such "
            f"as {{output_dir}}/checkpoints/step_000010"
        )
    try:
        content = load_json_object(path)
    except ValueError as error:
        raise _broken(path, f"it {error}") from error
    problems = [
        f"{name} is {json.dumps(content[name])}, should be {kind}" if name in content else f"{name} is missing"
        for name, (is_valid, kind) in _STATE_FIELDS.items()
        if name not in content or not is_valid(content[name])
    ]
    if problems:
        raise _broken(path, "; ".join(problems))
    return RunState(**{name: content[name] for name in _STATE_FIELDS})


def write_run_state(folder: Path, state: RunState) -> None:
    """Writes the last file of a checkpoint, whose other files must all be there."""
    content = {
        "next_step": state.next_step,
        "mode": state.mode,
        "fixed": dict(state.fixed),
        "scheduler": dict(state.scheduler),
        "learner": dict(state.learner),
        _FILES: _file_sizes(folder),
    }
    save_json(folder / RUN_STATE_FILE, content)


def _is_step(value: JSON) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


_STATE_FIELDS: Mapping[str, tuple[Callable[[JSON], bool], str]] = {
    "next_step": (_is_step, "a step"),
    "mode": (lambda value: isinstance(value, str), "a string"),
    "fixed": (lambda value: isinstance(value, dict), "an object"),
    "scheduler": (lambda value: isinstance(value, dict), "an object"),
    "learner": (lambda value: isinstance(value, dict), "an object"),
}


def _broken(path: Path, problem: str) -> ConfigError:
    return ConfigError(f"resume_from_checkpoint: {path} is broken: {problem}; resume from another checkpoint")
