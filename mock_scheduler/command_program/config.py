"""The configuration of a program that is any command; importing this imports no torch.

A key reaches the command by its ``arguments``, or as a field, such as ``{tp}``, in the command or its variables. What
the instruments alone need (trace, perturbed weights, grafts, the steps to observe) reaches the training through
``megatron.attach``, which reads the file that ``MOCK_SCHEDULER_RUN`` names (``config.instruments``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from typing import Annotated, Literal

from pydantic import Field, model_validator

from mock_scheduler.command_program.arguments import (
    ANY_VALUE,
    OPTIONS,
    ArgumentTable,
    Environment,
    Scalar,
    Settings,
    Words,
    is_neutral,
    list_fields,
    value_text,
)
from mock_scheduler.config.align import AlignConfig
from mock_scheduler.config.base import ConfigSection, Decides, FileName, NonNegativeInt, PositiveInt
from mock_scheduler.config.instruments import GraftConfig, OrderConfig, PerturbationConfig, TraceConfig
from mock_scheduler.config.layout import LAYOUT_AXES, ParallelConfig
from mock_scheduler.config.problems import Problem, raise_keyed
from mock_scheduler.config.rollout_mock import RolloutMockConfig

Effect = Literal["nothing", "order", "bits", "training"]

#: The facts behind the words of ``effects``.
EFFECTS: dict[Effect, Decides] = {
    "nothing": Decides.EXECUTION,
    "order": Decides.ORDER,
    "bits": Decides.BITS,
    "training": Decides.TRAINING,
}
#: In an argument: the value of its key.
VALUE_FIELD = ""
#: As a word of its own in ``command``: where the arguments go.
ARGUMENTS_FIELD = "arguments"
#: As the first word of ``command``: starts the ranks of one machine, which run the Python file that follows.
RANKS_FIELD = "ranks"
#: In ``launcher``: the command word by word, or in one text for a shell; the variables of the run, likewise or as JSON.
COMMAND_FIELD, LINE_FIELD, ENV_FIELD, ENV_JSON_FIELD = "command", "command_line", "env", "env_json"

#: The short names of a layout's keys, which are fields.
LAYOUT_FIELDS = {**{axis: f"parallel.{key}" for axis, key in LAYOUT_AXES.items()}, "sp": "parallel.sequence_parallel"}
SIZE_FIELDS = ("world_size", "nodes", "processes_per_node")
PLACE_FIELDS = ("python", "exp_name", "output_dir", "run_file", "folder")


class CommandConfig(ConfigSection):
    """Holds one run of a training command with the instruments attached.

    ``command``: the words of the command, with fields such as ``{world_size}``; ``{ranks}``, as the first word, starts
    all ranks on one machine where nobody else can join them, and a Python file or ``-m`` and a module follow.
    ``{arguments}``, as a word of its own, is where the arguments go, else they follow the last word.

    ``arguments``: by key, its arguments with ``{}`` for the value, or by value a list each, ``*`` being any other
    value. Nothing is passed for a degree of 1, nor for an option that is false or null, unless the value is listed.

    ``options``: keys of the user's own with their values; ``effects``: the effect of an option, ``bits`` where nothing
    is said. ``env``: further variables of the command, with fields. ``working_dir``: relative to the file's folder;
    ``None`` is that folder. ``launcher``: the words that start the command elsewhere, with ``{command}`` as a word of
    its own, or ``{command_line}`` for all of it in one text. ``cancel``: the words that end a job of the launcher's
    elsewhere, where the run is interrupted. ``processes_per_node``: for ``{nodes}``; ``None``: all on
    one. ``timeout_s``: after so many seconds the command is ended. ``sources``: files and folders, relative to the
    file's folder, whose code decides the bits.

    ``begins_at``: the number of the command's first step, where it resumes a checkpoint; ``first_step``: the first step
    to observe; ``max_steps``: where the run ends. ``initial_state``: a
    trace whose initial state the training begins with. ``reductions``: by key, smaller values for ``minimise``, or the
    least one, down to which the value is halved. ``rollout_mock``: only of a program that takes its rollouts through
    the proxy.
    """

    command: Annotated[Words, Decides.BITS] = Field(min_length=1)
    arguments: Annotated[ArgumentTable, Decides.BITS] = Field(default={})
    options: Annotated[dict[str, Scalar], Decides.BITS] = Field(default={})
    effects: Annotated[dict[str, Effect], Decides.NOTHING] = Field(default={})
    """What each option decides, by name; ``bits`` where none is stated."""
    env: Annotated[Environment, Decides.BITS] = Field(default={})
    working_dir: Annotated[str | None, Decides.BITS] = None
    launcher: Annotated[Words, Decides.EXECUTION] = Field(default=[])
    cancel: Annotated[Words, Decides.NOTHING] = Field(default=[])
    processes_per_node: Annotated[PositiveInt | None, Decides.EXECUTION] = None
    timeout_s: Annotated[float | None, Decides.NOTHING] = Field(default=None, gt=0.0)
    sources: Annotated[list[str], Decides.LABEL] = Field(default=["."])

    exp_name: Annotated[FileName, Decides.LABEL] = "training"
    """The run's name."""
    output_dir: Annotated[str, Decides.LABEL] = "./output"
    """The folder of everything that the instruments write."""
    # It names steps; whatever else a resumed run does comes by an option.
    begins_at: Annotated[NonNegativeInt, Decides.NOTHING] = 0
    first_step: Annotated[NonNegativeInt, Decides.TRAINING] = 0
    """The first step to observe."""
    max_steps: Annotated[PositiveInt, Decides.TRAINING] = 2
    """Observed steps end before this one."""
    precision: Annotated[Literal["float32", "bfloat16", "float64"], Decides.BITS] = "float32"
    """Told to the command by ``arguments``."""
    vocab_size: Annotated[PositiveInt | None, Decides.NOTHING] = None
    """Without padding; ``null``: the model's own."""
    pad_token_id: Annotated[NonNegativeInt | None, Decides.NOTHING] = None
    """Cut from the ends of rows before they are told apart."""
    # Every candidate has one and the baseline none; the state itself is compared before anything else.
    initial_state: Annotated[str | None, Decides.LABEL] = None
    reductions: Annotated[dict[str, int | list[Scalar]], Decides.NOTHING] = Field(default={})

    system_envs: Annotated[Settings, Decides.OUTSIDE] = Field(default={}, validate_default=True)
    """Variables of every process, set before it starts."""
    parallel: ParallelConfig = ParallelConfig()
    rollout_mock: Annotated[RolloutMockConfig | None, Decides.NOTHING] = None
    trace: TraceConfig = TraceConfig()
    align: AlignConfig = AlignConfig()
    order: OrderConfig = OrderConfig()
    perturbation: PerturbationConfig = PerturbationConfig()
    graft: GraftConfig = GraftConfig()

    @property
    def resume_from_checkpoint(self) -> str | None:
        """A command finds its checkpoints by itself, so nothing is resumed by a key."""
        return None

    @property
    def nodes(self) -> int:
        """Returns the machines of a run."""
        return -(-self.parallel.world_size // (self.processes_per_node or self.parallel.world_size))

    def passed_keys(self) -> dict[str, Scalar]:
        """Returns the keys that arguments or fields may bring to the command, with their values."""
        layout = self.parallel.model_dump()
        values: dict[str, Scalar] = {key: layout[key.partition(".")[2]] for key in LAYOUT_FIELDS.values()}
        values |= {"precision": self.precision, "max_steps": self.max_steps}
        return values | {f"{OPTIONS}.{name}": value for name, value in self.options.items()}

    def reaches_command(self, key: str) -> bool:
        """Says whether the command is told the value of a key."""
        if key in self.arguments:
            return True
        used = set(list_fields(self._texts()))
        names = {key, *(field for field, own in LAYOUT_FIELDS.items() if own == key)}
        # Replicas have no argument in Megatron: they are the processes that no other axis takes.
        sizes = {*SIZE_FIELDS, RANKS_FIELD} if key == LAYOUT_FIELDS["dp"] else set()
        return bool(used & (names | sizes))

    def words_for(self, key: str) -> list[str] | None:
        """Returns a key's arguments, fields open; ``None`` where its value has none."""
        by_value, value = self.arguments[key], self.passed_keys()[key]
        found = by_value.get(value_text(value), by_value.get(ANY_VALUE))
        return [] if found is None and is_neutral(key, value) else found

    def _texts(self) -> list[str]:
        words = [text for by_value in self.arguments.values() for texts in by_value.values() for text in texts]
        return [*self.command, *words, *self.env.values(), *self.launcher]

    @model_validator(mode="after")
    def _check(self) -> CommandConfig:
        problems = list(_iterate_problems(self))
        if problems:
            raise_keyed("CommandConfig", problems, dict(self))
        return self


def _iterate_problems(config: CommandConfig) -> Iterator[Problem]:
    yield from _argument_problems(config)
    yield from _field_problems(config)
    yield from _option_problems(config)
    if config.first_step < config.begins_at:
        yield (
            "first_step",
            f"is {config.first_step}, and the command begins at step {config.begins_at} (begins_at): set first_step to "
            "that or more",
        )
    if config.max_steps <= config.first_step:
        yield "max_steps", f"is {config.max_steps}, and first_step {config.first_step}: no step would be observed"
    world_size, share = config.parallel.world_size, config.processes_per_node
    if share is not None and world_size > share and world_size % share:
        yield "processes_per_node", f"is {share}, by which the {world_size} processes of the layout do not divide"
    entries = {"align.entry": config.align.entry}
    entries |= {f"align.candidates.{number}.entry": item.entry for number, item in enumerate(config.align.candidates)}
    for key, entry in entries.items():
        if entry is not None:
            yield (
                key,
                "names a Python module, and a command has none of ours; change the command itself by an option, or by "
                "an override of command",
            )


def _argument_problems(config: CommandConfig) -> Iterator[Problem]:
    known = config.passed_keys()
    for key, by_value in config.arguments.items():
        if key not in known:
            yield f"arguments.{key}", f"is for no key that changes{_nearest(key, known)}; keys are {', '.join(known)}"
        elif config.words_for(key) is None:
            values = ", ".join(by_value) or "none"
            yield key, f"is {value_text(known[key])}, for which arguments.{key} has no entry; it has: {values}"


def _field_problems(config: CommandConfig) -> Iterator[Problem]:
    known = {*config.passed_keys(), *LAYOUT_FIELDS, *SIZE_FIELDS, *PLACE_FIELDS}
    whole = {f"{{{ARGUMENTS_FIELD}}}"}
    if config.command[0] == f"{{{RANKS_FIELD}}}":
        whole.add(config.command[0])
        if config.nodes > 1:
            yield (
                "command",
                f"begins with {{ranks}}, which starts processes of one machine, and {config.nodes} are asked for",
            )
        if len(config.command) == 1:
            yield "command", "has nothing behind {ranks}: name the Python file that every rank runs"
    elsewhere = {COMMAND_FIELD, LINE_FIELD, ENV_FIELD, ENV_JSON_FIELD}
    yield from _unknown_fields("command", [word for word in config.command if word not in whole], known)
    yield from _unknown_fields("env", config.env.values(), known)
    yield from _unknown_fields("cancel", config.cancel, known)
    yield from _unknown_fields("launcher", config.launcher, known | elsewhere)
    for key, by_value in config.arguments.items():
        for words in by_value.values():
            yield from _unknown_fields(f"arguments.{key}", words, known | {VALUE_FIELD})
    if config.launcher and not {COMMAND_FIELD, LINE_FIELD} & set(list_fields(config.launcher)):
        yield (
            "launcher",
            "starts no command: give {command} as a word of its own, as in [srun, '{command}'], or {command_line} for "
            "all of it in one text, as in [sbatch, --wait, --wrap, '{command_line}']",
        )
    for word in config.launcher:
        if set(list_fields([word])) & {COMMAND_FIELD, ENV_FIELD} and word not in ("{command}", "{env}"):
            yield (
                "launcher",
                f"has {word!r}: {{command}} and {{env}} stand for several words, so each is one of its own",
            )


def _unknown_fields(key: str, texts: Iterable[str], known: set[str]) -> Iterator[Problem]:
    for name in list_fields(texts):
        if name not in known:
            yield (
                key,
                f"has the unknown field {{{name}}}{_nearest(name, known)}; write {{{{ and }}}} for braces of your own",
            )


def _option_problems(config: CommandConfig) -> Iterator[Problem]:
    mapped = [key for key in config.arguments if key.startswith(f"{OPTIONS}.")]
    for name in config.options:
        key = f"{OPTIONS}.{name}"
        if not config.reaches_command(key):
            yield key, f"reaches no command{_nearest(key, mapped)}; add arguments.{key}, or the field {{{key}}}"
    for name in config.effects:
        if name not in config.options:
            yield f"effects.{name}", f"is for no option{_nearest(name, config.options)}"
    for key in config.reductions:
        if key != "max_steps" and key.partition(".")[2] not in config.options:
            names = ["max_steps", *(f"{OPTIONS}.{name}" for name in config.options)]
            yield f"reductions.{key}", f"is for no key that a run becomes smaller by{_nearest(key, names)}"


def _nearest(name: str, known: Iterable[str]) -> str:
    found = get_close_matches(name, sorted(known), n=1, cutoff=0.5)
    return f"; nearest: {found[0]}" if found else ""
