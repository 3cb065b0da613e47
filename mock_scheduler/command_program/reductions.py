"""Makes runs of a command smaller by the keys for which the user states smaller values; imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from mock_scheduler.command_program.config import CommandConfig
from mock_scheduler.errors import ConfigError
from mock_scheduler.program import Dimension, Plain, ReducedBatch, ReducedWorkload, RunConfig, halvings


def own_config(config: RunConfig) -> CommandConfig:
    """Takes a run's configuration as one of a command."""
    assert isinstance(config, CommandConfig)
    return config


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
