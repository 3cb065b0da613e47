"""A configuration is cut to fewer groups and fewer steps, for baseline and candidate alike.

Contract: pure. The program says by which keys a batch becomes smaller; a key of the candidate's own stays as it is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from pydantic import ValidationError

from mock_scheduler.align.extract.source import DivergedCandidate
from mock_scheduler.errors import ConfigError, LayoutError
from mock_scheduler.program import Plain, ReducedBatch, RunConfig


def reduce_batch(source: DivergedCandidate, *, num_groups: int, num_all: int, max_steps: int) -> ReducedBatch:
    """Finds the fewest groups from ``num_groups`` on with which both configurations load.

    ``num_all``: groups of a recorded batch, with which batch sizes stay as they are. ``max_steps``: after the last step
    to keep. Raises ``ConfigError`` where not even all groups can be trained on so.
    """
    problem = ""
    for count in range(num_groups, num_all + 1):
        for values in source.reductions.list_batches(
            source.baseline, num_groups=count, num_all=num_all, max_steps=max_steps
        ):
            try:
                for config, kept in ((source.baseline, ()), (source.candidate, source.own_keys)):
                    apply_values(config, values, kept=kept)
            except (ValidationError, LayoutError) as error:
                problem = str(error)
                continue
            return ReducedBatch(num_groups=count, values=values)
    raise ConfigError(f"the run cannot be cut to {max_steps} steps: {problem}")


def apply_values(config: RunConfig, values: Mapping[str, Plain], *, kept: Collection[str] = ()) -> RunConfig:
    """Gives the checked configuration with these values by dotted keys, but for the ``kept`` ones.

    Raises ``ValidationError`` or ``LayoutError`` where it is none.
    """
    content = config.model_dump(mode="json")
    for key, value in values.items():
        if key not in kept:
            *sections, name = key.split(".")
            place = content
            for section in sections:
                place = place[section]
            place[name] = value
    return config.model_validate(content)
