"""The real rollout scheduler: plays whole groups of episodes with the policy under training.

Groups are dealt to data-parallel replicas; within a replica the leader of each model-parallel group owns the
environments, and all of its ranks compute the policy. Which episodes are played, their seeds and the numbers that
decide each token depend on the configuration's seed and on identities only, never on the layout or on timing.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from mock_scheduler.batch import RolloutBatch, SampleIdentity, SamplingParams
from mock_scheduler.config.schema import EnvManagerConfig, GeneratingArgs, PipelineConfig
from mock_scheduler.determinism.agreement import RankGroup
from mock_scheduler.digests import JSON
from mock_scheduler.ledger import Ledger
from mock_scheduler.recording.step.container import StepInfo
from mock_scheduler.scheduler import Mode, RolloutRequest
from pipelines.environments.base import TokenEnvironment
from pipelines.environments.grid_tokens import GridTokenizer
from pipelines.environments.registry import build_environment
from pipelines.megatron.trainer import PolicyTrainer
from pipelines.rollout.engine import PolicyEngine
from pipelines.rollout.episodes import Episode, play_episodes
from pipelines.rollout.exchange import gather_rows
from pipelines.seeds import derive_seed, derive_uniform


def episodes_per_group(config: PipelineConfig, mode: Mode) -> int:
    """How many episodes every group plays for one batch."""
    manager = config.env_manager(mode)
    return config.batch_size(mode) // (manager.num_env_groups * manager.group_size)


def first_episode(config: PipelineConfig, mode: Mode, step: int) -> int:
    """The number of each group's first episode in a step: where the run's data stand.

    Training episodes are numbered through the run; validation plays the same episodes every time.
    """
    return step * episodes_per_group(config, mode) if mode == "train" else 0


class AgenticRolloutScheduler:
    """Every rank holds one and calls it alike; all get the same batch."""

    def __init__(
        self,
        config: PipelineConfig,
        trainer: PolicyTrainer,
        tokenizer: GridTokenizer,
        ledger: Ledger,
        *,
        ranks: RankGroup,
    ) -> None:
        self._config = config
        self._ranks = ranks
        self._runtime = trainer.runtime
        self._tokenizer = tokenizer
        self._ledger = ledger
        self._engine = PolicyEngine(trainer, ledger)
        self._environments: dict[tuple[str, int], TokenEnvironment] = {}
        self._metrics: dict[str, float] = {}

    def get_batch(self, request: RolloutRequest) -> RolloutBatch:
        """Play ``request.batch_size`` episodes, in whole groups."""
        started_s = time.perf_counter()
        args = self._config.sampling(request.mode)
        batch = self._play(request, args) if self._runtime.is_leader else None
        if not self._runtime.is_leader:
            self._engine.follow(args)
        info = StepInfo(
            step=request.global_step,
            mode=request.mode,
            scheduler_id=request.scheduler_id,
            run_id="exchange",
            policy_version=request.policy_version,
        )
        whole = gather_rows(batch, info, self._ranks)
        elapsed_s = time.perf_counter() - started_s
        num_sampled_tokens = float(whole.response_mask.sum())  # every sampled token is one response token
        self._metrics = {
            "rollout/seconds": elapsed_s,
            "rollout/sampled_tokens": num_sampled_tokens,
            "rollout/tokens_per_second": num_sampled_tokens / elapsed_s,
        }
        return whole

    def _play(self, request: RolloutRequest, args: GeneratingArgs) -> RolloutBatch | None:
        manager = self._config.env_manager(request.mode)
        episodes = self._episodes(request, manager)
        seed, mode = self._config.seed, request.mode

        def sample(prefixes: Sequence[Sequence[int]], uniforms: Sequence[float]) -> tuple[list[int], list[float]]:
            return self._engine.sample(prefixes, uniforms, args)

        def uniform(identity: SampleIdentity, turn: int) -> float:
            return derive_uniform(
                seed, "sampling", mode, identity.scheduler_id, identity.group_id, identity.episode_id, identity.env_id,
                turn,
            )  # fmt: skip

        trajectories = play_episodes(
            episodes,
            sample,
            uniform,
            sequence_length=self._config.sequence_length,
            policy_version=request.policy_version,
        )
        self._engine.finish()
        if not trajectories:
            return None
        sampling = SamplingParams(
            temperature=args.temperature, top_p=args.top_p, top_k=args.top_k, logprobs_mode="processed"
        )
        return RolloutBatch.from_trajectories(trajectories, sampling=sampling, group_size=manager.group_size)

    def _episodes(self, request: RolloutRequest, manager: EnvManagerConfig) -> list[Episode]:
        """This replica's share of the request: whole groups, dealt in turn."""
        per_group = episodes_per_group(self._config, request.mode)
        first = first_episode(self._config, request.mode, request.global_step)
        groups = [
            (group_id, first + offset) for offset in range(per_group) for group_id in range(manager.num_env_groups)
        ]
        episodes: list[Episode] = []
        for group_id, episode_id in groups[self._runtime.dp_rank :: self._runtime.dp_size]:
            tag = manager.tags[group_id % len(manager.tags)]
            seed = derive_seed(
                self._config.seed, "environment", tag, request.mode, request.scheduler_id, group_id, episode_id
            )
            for member in range(manager.group_size):
                identity = SampleIdentity(
                    scheduler_id=request.scheduler_id,
                    group_id=group_id,
                    episode_id=episode_id,
                    env_id=group_id * manager.group_size + member,
                    turn=0,
                )
                environment = self._environment(tag, len(episodes))
                episodes.append(Episode(identity=identity, tag=tag, environment=environment, seed=seed))
        return episodes

    def _environment(self, tag: str, slot: int) -> TokenEnvironment:
        """One environment per tag and concurrent episode, built on first use and kept."""
        key = (tag, slot)
        if key not in self._environments:
            self._ledger.count("built", "environment")
            self._environments[key] = build_environment(self._config.custom_envs[tag], self._tokenizer)
        return self._environments[key]

    def suspend(self) -> None:
        """Nothing to stop: episodes are played within ``get_batch``."""

    def resume(self) -> None:
        """Nothing to start: episodes are played within ``get_batch``."""

    def update_weights(self, policy_version: int) -> None:
        """Nothing to load: the engine computes with the trainer's own weights."""

    def collect_metrics(self) -> dict[str, float]:
        """Seconds and tokens of the last batch, of all ranks."""
        return dict(self._metrics)

    def state_dict(self) -> dict[str, JSON]:
        """Nothing to keep: which episodes come next follows from the request."""
        return {}

    def load_state_dict(self, state: Mapping[str, JSON]) -> None:
        """Nothing to go on from."""

    def close(self) -> None:
        """Close all environments."""
        for environment in self._environments.values():
            environment.close()
        self._environments.clear()
