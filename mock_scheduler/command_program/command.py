"""Makes the command line, the variables and the run file of one run out of its configuration.

Contract: pure, but for the texts of this process's environment. ``MOCK_SCHEDULER_RUN`` is among the variables that a
launcher takes to other machines.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mock_scheduler.command_program.arguments import list_fields, render, value_text
from mock_scheduler.command_program.config import (
    ARGUMENTS_FIELD,
    COMMAND_FIELD,
    ENV_FIELD,
    ENV_JSON_FIELD,
    LAYOUT_FIELDS,
    LINE_FIELD,
    RANKS_FIELD,
    VALUE_FIELD,
    CommandConfig,
)
from mock_scheduler.config.instruments import RUN_FILE_VARIABLE, AttachedRun
from mock_scheduler.determinism.environment import launch_environment
from mock_scheduler.errors import redact
from mock_scheduler.launch.entry import check_script
from mock_scheduler.launch.ranks import Place, ranks_command
from mock_scheduler.support.run_files import ATTACHED_FILE
from mock_scheduler.support.text import join_words

_LEAST_HIDDEN = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """Holds a command to start.

    ``words``: with its launcher. ``env``: variables over this process's. ``working_dir``: its folder. ``cancel``: ends
    a job that the launcher submitted. ``run_file``: the path of ``run``. For messages and logs, without a value that
    came out of the environment: ``shown``, the words, and ``shown_inner``, the command without its launcher.
    """

    words: tuple[str, ...]
    shown: str
    env: Mapping[str, str]
    working_dir: Path
    shown_inner: str
    cancel: tuple[str, ...]
    run_file: Path
    run: AttachedRun


def build_command(config: CommandConfig, *, folder: Path, python: str) -> Command:
    """Builds the command of a run.

    Args:
        config: the run's.
        folder: of its configuration's file.
        python: the interpreter; programs beside it, such as ``torchrun``, are found before others.
    """
    output_dir = Path(config.output_dir).absolute()
    run_file = output_dir / ATTACHED_FILE
    fields = _fill_fields(config, folder=folder, python=python, run_file=run_file)
    env = {
        **launch_environment(config.system_envs),
        **{name: render(text, fields) for name, text in config.env.items()},
        RUN_FILE_VARIABLE: str(run_file),
    }
    ranks = ranks_command(
        python, (), told_to=output_dir, place=Place(num_local=config.parallel.world_size, is_foreign=True)
    )
    inner = tuple(_fill_words(config, fields, {f"{{{RANKS_FIELD}}}": ranks}))
    path = env.get("PATH", os.environ.get("PATH", os.defpath))
    words = _launch(config, inner, fields, env)
    hidden = _hidden_values(config, fields)
    seen_inner = tuple(_hide(word, hidden) for word in inner)
    seen_env = {name: _hide(text, hidden) for name, text in env.items()}
    seen = tuple(_hide(word, hidden) for word in _launch(config, seen_inner, fields, seen_env))
    return Command(
        words=words,
        shown=redact(join_words(seen)),
        env={**env, "PATH": os.pathsep.join((str(Path(python).parent), path))},
        working_dir=folder / (config.working_dir or ""),
        shown_inner=redact(join_words(seen_inner)),
        cancel=tuple(render(word, fields) for word in config.cancel),
        run_file=run_file,
        run=describe_run(config, output_dir),
    )


def check_ranked_script(config: CommandConfig, folder: Path) -> None:
    """Raises ``ConfigError`` where ``{ranks}`` starts a Python file on this machine that is not there."""
    ranks = f"{{{RANKS_FIELD}}}"
    if config.launcher or ranks not in config.command:
        return
    fields = _fill_fields(config, folder=folder, python=sys.executable, run_file=Path(config.output_dir, ATTACHED_FILE))
    words = _fill_words(config, fields, {ranks: ()})
    if words and not words[0].startswith("-"):
        check_script(words[0], folder / (config.working_dir or ""))


def _hidden_values(config: CommandConfig, fields: Mapping[str, str]) -> dict[str, str]:
    """Lists the texts out of the environment as the command has them, longest first, with the texts to show instead."""
    texts = {value: written for value, written in config.environment_texts.texts.values() if value}
    rendered = {render(value, {**fields, VALUE_FIELD: ""}): written for value, written in _renderable(texts, fields)}
    return dict(sorted({**texts, **rendered}.items(), key=lambda item: -len(item[0])))


def _renderable(texts: Mapping[str, str], fields: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    known = {*fields, VALUE_FIELD}
    return ((value, written) for value, written in texts.items() if known.issuperset(list_fields([value])))


def _hide(word: str, hidden: Mapping[str, str]) -> str:
    """Shows a word without values of the environment; a very short one is told from others as a whole word alone."""
    if word in hidden:
        return hidden[word]
    for value, written in hidden.items():
        if len(value) >= _LEAST_HIDDEN:
            word = word.replace(value, written)
    return word


def describe_run(config: CommandConfig, output_dir: Path) -> AttachedRun:
    """Writes down the part of the instruments in a run."""
    return AttachedRun(
        exp_name=config.exp_name,
        output_dir=str(output_dir),
        precision=config.precision,
        parallel=config.parallel,
        system_envs=config.system_envs,
        begins_at=config.begins_at,
        first_step=config.first_step,
        last_step=config.max_steps - 1,
        trace=config.trace,
        perturbation=config.perturbation,
        graft=config.graft,
        order=config.order,
        initial_state=config.initial_state,
        vocab_size=config.vocab_size,
        pad_token_id=config.pad_token_id,
        rollout_mock=config.rollout_mock,
    )


def _fill_fields(config: CommandConfig, *, folder: Path, python: str, run_file: Path) -> dict[str, str]:
    passed = {key: value_text(value) for key, value in config.passed_keys().items()}
    world_size = config.parallel.world_size
    return {
        **passed,
        **{field: passed[key] for field, key in LAYOUT_FIELDS.items()},
        "vpp": str(config.parallel.num_chunks),
        "world_size": str(world_size),
        "nodes": str(config.nodes),
        "processes_per_node": str(min(config.processes_per_node or world_size, world_size)),
        "python": python,
        "exp_name": config.exp_name,
        "output_dir": str(run_file.parent),
        "run_file": str(run_file),
        "folder": str(folder),
    }


def _fill_words(config: CommandConfig, fields: Mapping[str, str], several: Mapping[str, Sequence[str]]) -> list[str]:
    arguments: list[str] = []
    for key in config.arguments:
        own = {**fields, VALUE_FIELD: value_text(config.passed_keys()[key])}
        arguments += [render(word, own) for word in config.words_for(key) or ()]
    place = f"{{{ARGUMENTS_FIELD}}}"
    words = config.command if place in config.command else [*config.command, place]
    known = {**several, place: arguments}
    return [part for word in words for part in (known[word] if word in known else [render(word, fields)])]


def _launch(
    config: CommandConfig, inner: tuple[str, ...], fields: Mapping[str, str], env: Mapping[str, str]
) -> tuple[str, ...]:
    several = {f"{{{COMMAND_FIELD}}}": inner, f"{{{ENV_FIELD}}}": tuple(f"{name}={text}" for name, text in env.items())}
    texts = {**fields, LINE_FIELD: shlex.join(inner), ENV_JSON_FIELD: json.dumps(dict(env))}
    words = config.launcher or [f"{{{COMMAND_FIELD}}}"]
    return tuple(part for word in words for part in (several.get(word) or (render(word, texts),)))
