"""How a configuration becomes that of fewer groups and fewer steps, for baseline and candidate alike.

Contract: pure. What a group is stays as it is, and so does whatever the candidate sets itself. The rate and the
coefficients that follow from the number of updates of the whole run stay those of the whole run.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from pydantic import ValidationError

from mock_scheduler.align.extract.source import DivergedCandidate
from mock_scheduler.errors import ConfigError, LayoutError
from mock_scheduler.support.digests import JSON
from pipelines.config.schema import PipelineConfig

Values = Mapping[str, JSON]


@dataclass(frozen=True, kw_only=True, slots=True)
class Reduction:
    """The number of groups of every batch, and the configuration's keys that are other than they were, both sides'."""

    num_groups: int
    values: Values


def reduce_batch(source: DivergedCandidate, *, num_groups: int, num_all: int, max_steps: int) -> Reduction:
    """The fewest groups from ``num_groups`` on that both configurations allow, with the batch sizes that then fit.

    ``num_all``: groups of a recorded batch, with which batch sizes stay as they are. ``max_steps``: after the last step
    that is kept. Raises ``ConfigError`` where not even all groups can be trained on so.
    """
    problem = ""
    for count in range(num_groups, num_all + 1):
        for sizes in _batch_sizes(source.baseline, num_groups=count, num_all=num_all):
            values = {**sizes, "max_steps": max_steps, "eval_steps": 0, "save_steps": 0, **_decay(source, sizes)}
            try:
                for config, kept in ((source.baseline, ()), (source.candidate, source.own_keys)):
                    apply_values(config, values, kept=kept)
            except (ValidationError, LayoutError) as error:
                problem = str(error)
                continue
            return Reduction(num_groups=count, values=values)
    raise ConfigError(f"the run cannot be cut to {max_steps} steps: {problem}")


def apply_values(config: PipelineConfig, values: Values, *, kept: Collection[str] = ()) -> PipelineConfig:
    """The checked configuration with these values by dotted keys, but for the ``kept`` ones.

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
    return PipelineConfig.model_validate(content)


def _batch_sizes(config: PipelineConfig, *, num_groups: int, num_all: int) -> Iterator[dict[str, JSON]]:
    """Batch sizes for this many groups: as many updates of the old size as fit, or one; large micro-batches first."""
    training, manager = config.training, config.train_env_manager
    if num_groups == num_all:
        yield {}
        return
    batch = num_groups * manager.group_size
    update = training.global_batch_size if batch % training.global_batch_size == 0 else batch
    sizes: dict[str, JSON] = {
        "rollout_batch_size": batch,
        "train_env_manager.num_env_groups": num_groups,
        "training.global_batch_size": update,
    }
    if training.has_token_budget:
        yield sizes
        return
    most = math.gcd(training.micro_batch_size, update)
    for micro_batch in range(most, 0, -1):
        if most % micro_batch == 0:
            yield {**sizes, "training.micro_batch_size": micro_batch}


def _decay(source: DivergedCandidate, sizes: Values) -> dict[str, JSON]:
    """With fewer steps a decay over all updates of the run would be over earlier, so it is given as it was."""
    config = source.baseline
    follows = config.training.lr_decay_style != "constant" or config.entropy_loss_coef_final is not None
    if not follows or config.training.lr_decay_iters is not None:
        return {}
    return {"training.lr_decay_iters": config.lr_decay_updates(first_step=config.first_policy_step)}
