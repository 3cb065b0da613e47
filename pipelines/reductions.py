"""Runs of the pipeline become smaller, for ``mock-scheduler minimise`` and ``extract``; imports no torch.

Rows are left out and never cut, since the length of a row is the environment's; a group keeps its size. With fewer
steps, the rate and the coefficients that follow from the number of updates of the whole run stay the whole run's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

from mock_scheduler.errors import ConfigError
from mock_scheduler.program import Dimension, Plain, ReducedBatch, ReducedWorkload, RunConfig, halvings
from mock_scheduler.support.files import load_json_object, save_json
from mock_scheduler.support.foreign_files import copy_folder, read_bytes
from pipelines.config.schema import PipelineConfig

_GROUPS, _GROUP_SIZE = "train_env_manager.num_env_groups", "train_env_manager.group_size"
_ROWS, _ROWS_OF_UPDATE = "rollout_batch_size", "training.global_batch_size"
_MICRO_BATCH = "training.micro_batch_size"
_DECAY = "training.lr_decay_iters"
_UPDATES = "updates of an epoch"  # no key: with the rows it decides training.global_batch_size
_LEAST_GROUP = 2  # of one trajectory alone no advantage is left

# The last file of a checkpoint (``pipelines.megatron.checkpoint``), and the keys in it that the size of a batch enters.
_RUN_STATE_FILE = "run_state.json"
_BATCH_KEYS = (_ROWS, _GROUPS)
#: What a checkpoint's tensors follow from: where a candidate differs in these, it cannot begin from the baseline's.
_STATE_KEYS = frozenset({"seed", "precision", "rollout_form", "adv_estimator", "model"})


def own_config(config: RunConfig) -> PipelineConfig:
    """Narrows a configuration to the pipeline's; raises ``TypeError`` for one of another program."""
    if not isinstance(config, PipelineConfig):
        raise TypeError(f"expected a configuration of the pipeline, found {type(config).__name__}")
    return config


class PipelineReductions:
    """Is the pipeline's ``mock_scheduler.program.Reductions``."""

    def list_dimensions(self, config: RunConfig) -> tuple[Dimension, ...]:
        """Lists steps, validation, groups, epochs, updates, layers and micro-batches as far as they can be reduced."""
        return tuple(_iterate_dimensions(own_config(config)))

    def reduce_workload(self, config: RunConfig, chosen: Mapping[str, Plain], *, num_parts: int) -> ReducedWorkload:
        """Gives the keys of a workload; rows of a step, an update and a micro-batch follow from groups and updates."""
        own = own_config(config)
        envs, training = own.train_env_manager, own.training
        rows = own.rollout_batch_size // (envs.num_env_groups * envs.group_size)
        rows *= _size(chosen.get(_GROUPS, envs.num_env_groups)) * _size(chosen.get(_GROUP_SIZE, envs.group_size))
        updates = _size(chosen.get(_UPDATES, own.rollout_batch_size // training.global_batch_size))
        of_update = max(rows // updates, 1)
        of_micro_batch = _size(chosen.get(_MICRO_BATCH, training.micro_batch_size))
        if training.batching == "fixed":
            of_micro_batch = min(of_micro_batch, max(of_update // num_parts, 1))
        derived: dict[str, tuple[int, int]] = {
            _ROWS: (own.rollout_batch_size, rows),
            _ROWS_OF_UPDATE: (training.global_batch_size, of_update),
            _MICRO_BATCH: (training.micro_batch_size, of_micro_batch),
        }
        kept = {key: value for key, value in chosen.items() if key not in (_UPDATES, _MICRO_BATCH)}
        values = {**kept, **{key: now for key, (before, now) in derived.items() if now != before}}
        # Rows of a micro-batch are no more than there are, so that its level may have no effect.
        is_idle = of_micro_batch <= training.micro_batch_size
        return ReducedWorkload(values=values, idle=frozenset({_MICRO_BATCH}) if is_idle else frozenset())

    def list_batches(
        self, baseline: RunConfig, *, num_groups: int, num_all: int, max_steps: int
    ) -> list[Mapping[str, Plain]]:
        """Lists batch sizes for so many groups: as many updates of the old size as fit, or one; large ones first."""
        config = own_config(baseline)
        if config.sft.steps and num_groups < num_all:
            return []  # groups of its supervised steps are single rows, those of the others have several
        ends: dict[str, Plain] = {"max_steps": max_steps, "eval_steps": 0, "save_steps": 0, **_keep_decay(config)}
        return [{**sizes, **ends} for sizes in _list_sizes(config, num_groups=num_groups, num_all=num_all)]

    def follow_batch(self, candidate: RunConfig, batch: ReducedBatch) -> dict[str, Plain]:
        """Lets a candidate that makes another number of updates decay its rate over its own whole run's."""
        config = own_config(candidate)
        own = config.lr_decay_updates(first_step=config.first_policy_step)
        return {_DECAY: own} if batch.values.get(_DECAY, own) != own else {}

    def checkpoint_name(self, step: int) -> str:
        """Returns ``step_000010``, as ``pipelines.megatron.checkpoint`` names them."""
        return f"step_{step:06d}"

    def describe_seed(self, config: RunConfig) -> str:
        """Names the seed: the initial weights follow from it."""
        return f"seed {own_config(config).seed}, from which the initial weights follow"

    def first_trained_step(self, config: RunConfig) -> int:
        """Returns the step after the critic's warm-up."""
        return own_config(config).first_policy_step

    def begins_alike(self, baseline: RunConfig, candidate: RunConfig) -> bool:
        """Says whether both runs agree on all keys that decide a checkpoint's tensors."""
        ours, theirs = (own_config(config).model_dump(include=set(_STATE_KEYS)) for config in (baseline, candidate))
        return ours == theirs

    def next_step(self, checkpoint: Path) -> int | None:
        """Reads the step of a checkpoint out of its last file."""
        path = checkpoint / _RUN_STATE_FILE
        if not path.is_file():
            return None
        try:
            step = load_json_object(path, inside=checkpoint).get("next_step")
        except (OSError, ValueError) as error:
            raise ConfigError(f"the checkpoint {checkpoint} cannot be used: {path.name} {error}") from error
        if not isinstance(step, int):
            raise ConfigError(f"the checkpoint {checkpoint} cannot be used: {path.name} has no next_step")
        return step

    def copy_checkpoint(self, origin: Path, target: Path, batch: ReducedBatch, *, root: Path) -> None:
        """Copies a checkpoint for a run with other batches: their size is in no tensor.

        Raises:
            ConfigError: it has links out of ``root``, or its last file is not as it was written.
        """
        # Imported here, since it imports torch, which nothing else of this file needs.
        from mock_scheduler.support.digests import open_sealed, seal

        copy_folder(origin, target, root=root)
        path = target / _RUN_STATE_FILE
        try:
            state = load_json_object(path)
            is_sealed = "digest" in state
            state = open_sealed(read_bytes(path)) if is_sealed else state
            if not isinstance(state.get("fixed"), dict):
                raise ValueError("has no settings in fixed")
        except ValueError as error:
            raise ConfigError(f"the checkpoint {origin} cannot be used: {path.name} {error}") from error
        state["fixed"] |= {key: batch.values[key] for key in _BATCH_KEYS if key in batch.values}
        save_json(path, seal(state) if is_sealed else state)


def _iterate_dimensions(config: PipelineConfig) -> Iterator[Dimension]:
    def shrinking(name: str, key: str, value: int, least: int = 1) -> Iterator[Dimension]:
        values = tuple(halvings(value, least))
        if values:
            yield Dimension(kind="workload", name=name, key=key, original=value, values=values)

    envs, training = config.train_env_manager, config.training
    yield from shrinking("steps", "max_steps", config.max_steps)
    if config.eval_steps:
        yield Dimension(
            kind="workload", name="validation every", key="eval_steps", original=config.eval_steps, values=(0,)
        )
    yield from shrinking("groups", _GROUPS, envs.num_env_groups)
    yield from shrinking("trajectories of a group", _GROUP_SIZE, envs.group_size, _LEAST_GROUP)
    yield from shrinking("epochs", "ppo_epochs", config.ppo_epochs)
    yield from shrinking(_UPDATES, _UPDATES, config.rollout_batch_size // training.global_batch_size)
    if config.model.hf_checkpoint is None:  # its files have all of them
        yield from shrinking("layers", "model.num_layers", config.model.num_layers)
    if training.batching == "fixed":
        size, largest = training.micro_batch_size, training.global_batch_size
        larger = tuple(size << power for power in range(1, 32) if size << power <= largest)
        if larger:
            yield Dimension(
                kind="workload", name="rows of a micro-batch", key=_MICRO_BATCH, original=size, values=larger
            )


def _list_sizes(config: PipelineConfig, *, num_groups: int, num_all: int) -> Iterator[dict[str, Plain]]:
    training, manager = config.training, config.train_env_manager
    if num_groups == num_all:
        yield {}
        return
    batch = num_groups * manager.group_size
    update = training.global_batch_size if batch % training.global_batch_size == 0 else batch
    sizes: dict[str, Plain] = {_ROWS: batch, _GROUPS: num_groups, _ROWS_OF_UPDATE: update}
    if training.has_token_budget:
        yield sizes
        return
    most = math.gcd(training.micro_batch_size, update)
    for micro_batch in range(most, 0, -1):
        if most % micro_batch == 0:
            yield {**sizes, _MICRO_BATCH: micro_batch}


def _keep_decay(config: PipelineConfig) -> dict[str, Plain]:
    """Keeps a decay over all updates of the run as it was: with fewer steps it would be over earlier."""
    follows = config.training.lr_decay_style != "constant" or config.entropy_loss_coef_final is not None
    if not follows or config.training.lr_decay_iters is not None:
        return {}
    return {_DECAY: config.lr_decay_updates(first_step=config.first_policy_step)}


def _size(value: Plain) -> int:
    return int(value) if value is not None else 1
