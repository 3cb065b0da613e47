"""Makes any training command a program that the instruments run and compare; importing this imports no torch.

``mock_scheduler.program`` finds ``PROGRAM`` for every configuration with a ``command``. Its runs become smaller by the
keys for which the user states smaller values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from mock_scheduler.command_program.command import check_ranked_script
from mock_scheduler.command_program.config import EFFECTS, CommandConfig
from mock_scheduler.command_program.loading import build_loader
from mock_scheduler.config.base import ConfigSection, KeyEffects, effects_of
from mock_scheduler.config.loading import ConfigSource
from mock_scheduler.errors import ConfigError
from mock_scheduler.layouts.order_plan import OrderPlan
from mock_scheduler.program import (
    ClipRule,
    ConfigLoader,
    Dimension,
    Plain,
    Program,
    ReducedBatch,
    ReducedWorkload,
    Reductions,
    RunConfig,
    halvings,
)


def own_config(config: RunConfig) -> CommandConfig:
    """Takes a run's configuration as one of a command."""
    assert isinstance(config, CommandConfig)
    return config


def steps_until(config: CommandConfig, last_step: int | None) -> int | None:
    """Gives the steps of a run that ends behind a step; ``None`` where it keeps its own or the command has them."""
    if last_step is None or last_step + 1 >= config.max_steps or config.reaches_command("max_steps"):
        return None
    return last_step + 1


class CommandReductions:
    """Reduces the steps of a run, and the keys of ``reductions``.

    A run's data are the command's own, so nothing can be cut out of them: ``extract`` keeps them whole.
    """

    def list_dimensions(self, config: RunConfig) -> tuple[Dimension, ...]:
        """Lists the steps and the stated keys."""
        return tuple(_iterate_dimensions(own_config(config)))

    def reduce_workload(self, config: RunConfig, chosen: Mapping[str, Plain], *, num_parts: int) -> ReducedWorkload:
        """Takes the values as they are: the user says that the command can run with them."""
        return ReducedWorkload(values=dict(chosen))

    def list_batches(
        self, baseline: RunConfig, *, num_groups: int, num_all: int, max_steps: int
    ) -> Sequence[Mapping[str, Plain]]:
        """Refuses: there is no recording to cut."""
        _refuse()

    def follow_batch(self, candidate: RunConfig, batch: ReducedBatch) -> dict[str, Plain]:
        """Refuses: there is no recording to cut."""
        _refuse()

    def checkpoint_name(self, step: int) -> str:
        """Refuses: a command names its checkpoints itself."""
        _refuse()

    def describe_seed(self, config: RunConfig) -> str:
        """Says that the first weights are the baseline's."""
        return "the baseline's initial state"

    def first_trained_step(self, config: RunConfig) -> int:
        """Gives the first observed step."""
        return own_config(config).first_step

    def begins_alike(self, baseline: RunConfig, candidate: RunConfig) -> bool:
        """Every candidate begins with the baseline's state."""
        return True

    def next_step(self, checkpoint: Path) -> int | None:
        """Knows no checkpoint."""
        return None

    def copy_checkpoint(self, origin: Path, target: Path, batch: ReducedBatch, *, root: Path) -> None:
        """Refuses: a command's checkpoints are its own."""
        _refuse()


def _refuse() -> NoReturn:
    raise ConfigError(
        "a command reads its data itself, so there are no recorded rollouts to cut; mock-scheduler minimise shrinks "
        "the layout, the changes and the keys of reductions"
    )


def _iterate_dimensions(config: CommandConfig) -> Iterator[Dimension]:
    stated: dict[str, int | list[Plain]] = {"max_steps": config.first_step + 1, **config.reductions}
    in_effect = config.passed_keys()
    for key, values in stated.items():
        original = in_effect[key]
        if isinstance(values, list):
            smaller = tuple(value for value in values if value != original)
        else:
            is_size = isinstance(original, int) and not isinstance(original, bool)
            smaller = tuple(halvings(int(original or 0), values)) if is_size else ()
        if smaller:
            name = key.removeprefix("options.")
            yield Dimension(kind="workload", name=name, key=key, original=original, values=smaller)


# A configuration's own YAML counts key by key, and other files of a folder may be results.
_CODE_SUFFIXES = (".py", ".sh")
_MADE_HERE = ".mock-scheduler-*"


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandProgram:
    """Is a command's ``mock_scheduler.program.Program``. Its one process of ours starts and ends the command."""

    schema: type[ConfigSection] = CommandConfig
    entry: str = "mock_scheduler.command_program.entry"
    preload: tuple[str, ...] = ()
    replay_entry: str | None = None
    export_entry: str | None = None
    packages: tuple[str, ...] = ()
    initial_state_key: str | None = "initial_state"
    quiet_keys: Mapping[str, Plain] = field(default_factory=dict)
    folder_keys: Mapping[str, Plain] = field(default_factory=dict)
    reductions: Reductions | None = field(default_factory=CommandReductions)

    def build_loader(self, config_name: str, config_path: str | Path) -> ConfigLoader:
        """Builds a loader that checks the file of ``{ranks}`` too; folders of code become absolute."""
        load = build_loader(config_name, config_path)
        folder = Path(config_path).absolute()

        def load_placed(overrides: Sequence[str]) -> RunConfig:
            config = load(overrides)
            check_ranked_script(config, folder)
            return config.model_copy(update={"sources": [str(folder / name) for name in config.sources]})

        return load_placed

    def arguments(self, entry: str, source: ConfigSource) -> tuple[str, ...]:
        """Starts the entry module with the configuration's source."""
        return ("-m", entry, *source.arguments())

    def num_processes(self, config: RunConfig) -> int:
        """Returns one, which starts the command; the command starts its own."""
        return 1

    def effects(self, config: RunConfig) -> KeyEffects:
        """Adds the stated effects of options."""
        own = {f"options.{name}": EFFECTS[effect] for name, effect in own_config(config).effects.items()}
        return KeyEffects(by_key={**effects_of(CommandConfig).by_key, **own})

    def list_sources(self, config: RunConfig) -> Sequence[Path]:
        """Lists the code in ``sources``, hidden folders and those of alignments left out."""
        return sorted({path for name in own_config(config).sources for path in _list_code(Path(name))})

    def first_step(self, config: RunConfig) -> int:
        """Gives the first observed step."""
        return own_config(config).first_step

    def end_after(self, config: RunConfig, last_step: int | None) -> list[str]:
        """Ends the run earlier, where the command itself is not told its length: a schedule may follow from that."""
        steps = steps_until(own_config(config), last_step)
        return [] if steps is None else [f"max_steps={steps}"]

    def count_elements(self, config: RunConfig, *, vocabulary: int) -> int | None:
        """Knows nothing of the model."""
        return None

    def order_limits(self, config: RunConfig) -> tuple[str, ...]:
        """Knows none: the run itself refuses an order that cannot be followed in it."""
        return ()

    def plan_order(self, config: RunConfig) -> OrderPlan | None:
        """Knows no order before the run, which builds the model."""
        return None

    def load_clip_rule(self, config_path: Path) -> ClipRule:
        """Knows no loss, so no token counts as clipped."""
        return ClipRule(low=0.0, high=0.0, has_clip=False)


def _list_code(place: Path) -> Iterator[Path]:
    if place.is_file():
        yield place
        return
    if not place.is_dir():
        raise ConfigError(f"sources: there is no file or folder {place}")
    if any(place.glob(_MADE_HERE)):
        return
    for path in place.iterdir():
        if path.name.startswith(".") or path.is_symlink():
            continue
        if path.is_dir():
            yield from _list_code(path)
        elif path.suffix in _CODE_SUFFIXES:
            yield path


PROGRAM: Program = CommandProgram()
