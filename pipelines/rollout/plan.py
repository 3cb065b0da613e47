"""Plans the episodes of a request, and the blocks that share forward passes, before any layout is known.

Contract: pure functions of configuration and request. The episodes are in canonical order: by episode number, then
group, then member; blocks are ``actor_infer.rows_per_forward`` of them in a row, so a group may be cut. Data-parallel
replica r of dp plays the blocks k with k mod dp = r.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mock_scheduler.batch import SampleIdentity
from mock_scheduler.scheduler import Mode, RolloutRequest
from pipelines.config.schema import PipelineConfig
from pipelines.environments.base import Split
from pipelines.environments.seeds import environment_seed, split_of
from pipelines.megatron.process_of_rank import Runtime


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodePlan:
    """Holds one episode to play: its identity, its environment, its seed and its layouts."""

    identity: SampleIdentity
    tag: str
    seed: int
    split: Split


Block = Sequence[EpisodePlan]
"""Episodes with rows in the same forward passes."""


def episodes_per_group(config: PipelineConfig, mode: Mode) -> int:
    """Counts the episodes of every group for one batch."""
    manager = config.env_manager(mode)
    return config.batch_size(mode) // (manager.num_env_groups * manager.group_size)


def first_episode(config: PipelineConfig, mode: Mode, step: int) -> int:
    """Numbers each group's first episode in a step: the state of the run's data.

    Training episodes are numbered through the run; validation plays the same episodes every time.
    """
    return step * episodes_per_group(config, mode) if mode == "train" else 0


def is_supervised(config: PipelineConfig, request: RolloutRequest) -> bool:
    """Says whether a request is of the supervised start: each of its episodes is a group of its own."""
    return request.mode == "train" and config.sft.covers(request.global_step)


def plan_episodes(config: PipelineConfig, request: RolloutRequest) -> list[EpisodePlan]:
    """Plans all episodes of a request, in canonical order."""
    if is_supervised(config, request):
        rows = range(request.batch_size)
        step = request.global_step
        return [plan for row in rows for plan in _plan_group(config, request, group_id=row, episode_id=step, size=1)]
    manager = config.env_manager(request.mode)
    first = first_episode(config, request.mode, request.global_step)
    episode_ids = range(first, first + episodes_per_group(config, request.mode))
    return [
        plan
        for episode_id in episode_ids
        for group_id in range(manager.num_env_groups)
        for plan in _plan_group(config, request, group_id=group_id, episode_id=episode_id, size=manager.group_size)
    ]


def _plan_group(
    config: PipelineConfig, request: RolloutRequest, *, group_id: int, episode_id: int, size: int
) -> list[EpisodePlan]:
    """Plans the members of a group: the same environment, seed and layouts for each."""
    manager = config.env_manager(request.mode)
    tag = manager.tags[group_id % len(manager.tags)]
    seed = environment_seed(
        config.seed,
        tag=tag,
        mode=request.mode,
        scheduler_id=request.scheduler_id,
        group_id=group_id,
        episode_id=episode_id,
    )
    split = split_of(config.custom_envs[tag], request.mode)
    identities = (
        SampleIdentity(
            scheduler_id=request.scheduler_id,
            group_id=group_id,
            episode_id=episode_id,
            env_id=group_id * size + member,
            turn=0,
        )
        for member in range(size)
    )
    return [EpisodePlan(identity=identity, tag=tag, seed=seed, split=split) for identity in identities]


def cut_blocks(episodes: Sequence[EpisodePlan], *, rows_per_forward: int) -> list[Block]:
    """Cuts the episodes into blocks of ``rows_per_forward``; the last one may have fewer."""
    return [episodes[start : start + rows_per_forward] for start in range(0, len(episodes), rows_per_forward)]


def own_blocks(blocks: Sequence[Block], runtime: Runtime) -> Sequence[Block]:
    """Returns the blocks for this rank's replica of the model."""
    return blocks[runtime.dp_rank :: runtime.dp_size]


def planned_requests(config: PipelineConfig, *, first_step: int) -> list[RolloutRequest]:
    """Lists every request of the run in order; known before anything is built.

    Validation comes before the training of every step that ``eval_steps`` divides, and after the last step where it
    divides ``max_steps``. So a shorter replay never asks for a validation that a longer recording lacks.
    """
    requests: list[RolloutRequest] = []
    for step in range(first_step, config.max_steps + 1):
        is_last = step == config.max_steps
        if config.eval_steps and step % config.eval_steps == 0:
            requests.append(_request(config, "val", step))
        if not is_last:
            requests.append(_request(config, "train", step))
    return requests


def _request(config: PipelineConfig, mode: Mode, step: int) -> RolloutRequest:
    is_single = mode == "train" and config.sft.covers(step)
    return RolloutRequest(
        global_step=step,
        batch_size=config.batch_size(mode),
        mode=mode,
        policy_version=step,
        group_size=1 if is_single else config.env_manager(mode).group_size,
        data_cursor={"first_episode": first_episode(config, mode, step)},
    )
