"""The real rollout scheduler plays whole requests of episodes with the policy under training.

Blocks of episodes are dealt to data-parallel replicas; within a replica the leader owns the environments, and all of
its ranks compute the policy, or its leader alone asks a server that has it (``actor_infer.engine``). The episodes,
their seeds, the numbers that decide each token and the rows of a forward pass depend on the configuration and on
identities only, never on the layout or on timing.

Ranks then give each other the rows they played, so every rank holds the same whole batch. Rows travel as step files,
the format of the recording: typed, checked by digest, and no pickle.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mock_scheduler.batch import RolloutBatch, SamplingParams, Trajectory
from mock_scheduler.batch.engine_columns import NUM_EXPERTS_META
from mock_scheduler.determinism.agreement import RankGroup
from mock_scheduler.ledger import Ledger
from mock_scheduler.recording.step.step_file import decode_step, encode_step
from mock_scheduler.recording.step.step_info import StepInfo
from mock_scheduler.scheduler import RolloutRequest
from mock_scheduler.support.digests import JSON
from pipelines.config.schema import PipelineConfig
from pipelines.environments.base import ResetRequest, ResetResult, StepResult, Tokenizer
from pipelines.environments.workers import EnvironmentPool, StartWorker
from pipelines.megatron.hf_source import HuggingFaceSource
from pipelines.megatron.layers.routing import empty_routing
from pipelines.megatron.trainer import PolicyTrainer
from pipelines.rollout.engine import PolicyEngine
from pipelines.rollout.episodes import episode_rows, play_block
from pipelines.rollout.plan import cut_blocks, is_supervised, own_blocks, plan_episodes
from pipelines.rollout.supervised import answer_all
from pipelines.rollout.turns import RolloutEngine, TurnRules


@dataclass(kw_only=True, slots=True)
class _TimedEnvironments:
    """Holds a pool, and the seconds in its calls."""

    pool: EnvironmentPool
    seconds: float = 0.0

    def reset_many(self, requests: Sequence[ResetRequest]) -> list[ResetResult]:
        """Start these episodes."""
        started_s = time.perf_counter()
        results = self.pool.reset_many(requests)
        self.seconds += time.perf_counter() - started_s
        return results

    def step_many(self, turns: Sequence[tuple[int, Sequence[int]]]) -> list[StepResult]:
        """Take these turns."""
        started_s = time.perf_counter()
        results = self.pool.step_many(turns)
        self.seconds += time.perf_counter() - started_s
        return results


def _build_engine(
    trainer: PolicyTrainer,
    tokenizer: Tokenizer,
    ledger: Ledger,
    *,
    ranks: RankGroup,
    source: HuggingFaceSource | None,
) -> RolloutEngine:
    if trainer.config.actor_infer.engine == "megatron":
        return PolicyEngine(trainer, ledger)
    # No other run imports a client of servers.
    from pipelines.rollout.engines.served import ServedEngine

    return ServedEngine(trainer, tokenizer, ledger, ranks=ranks, source=source)


def _find_start(config: PipelineConfig) -> StartWorker | None:
    """Finds what starts workers of environments; ``None``: they are processes of this machine."""
    if config.env_workers.type == "process":
        return None
    # No other run imports Ray.
    from pipelines.environments.ray_cluster import connect
    from pipelines.environments.ray_workers import RayWorker

    connect(config, os.environ)
    return functools.partial(RayWorker, settings=config.env_workers)


class AgenticRolloutScheduler:
    """Every rank holds one and calls it alike; all get the same batch."""

    def __init__(
        self,
        config: PipelineConfig,
        trainer: PolicyTrainer,
        tokenizer: Tokenizer,
        ledger: Ledger,
        *,
        ranks: RankGroup,
        source: HuggingFaceSource | None = None,
    ) -> None:
        """``source``: the Hugging Face checkpoint that the policy began with."""
        self._config = config
        self._ranks = ranks
        self._runtime = trainer.runtime
        self._tokenizer = tokenizer
        self._ledger = ledger
        self._engine = _build_engine(trainer, tokenizer, ledger, ranks=ranks, source=source)
        self._pools: dict[int, EnvironmentPool] = {}
        self._environment_seconds = 0.0
        self._metrics: dict[str, float] = {}

    def get_batch(self, request: RolloutRequest) -> RolloutBatch:
        """Plays a step's episodes, in whole groups; validation always plays the same ones."""
        if is_supervised(self._config, request):
            return self._supervise(request)
        started_s = time.perf_counter()
        self._engine.check_version(request.policy_version)
        before, self._environment_seconds = dict(self._engine.counts), 0.0
        args = self._config.sampling(request.mode)
        rows: list[Trajectory] = []
        with self._engine.generating(args):
            if self._runtime.is_leader:
                rows = self._play(request)
                self._engine.finish()
            else:
                self._engine.follow()
        sampling = SamplingParams(
            temperature=args.temperature, top_p=args.top_p, top_k=args.top_k, logprobs_mode=self._engine.logprobs_mode
        )
        group_size = self._config.env_manager(request.mode).group_size
        records = self._config.actor_infer.record_routed_experts
        meta: dict[str, JSON] = {NUM_EXPERTS_META: self._config.model.num_moe_experts} if records else {}
        batch = gather_rows(
            rows, _exchange_info(request), self._ranks, sampling=sampling, group_size=group_size, meta=meta
        )
        elapsed_s = time.perf_counter() - started_s
        num_sampled_tokens = float(batch.response_mask.sum())  # every sampled token is one response token
        self._metrics = {
            "rollout/seconds": elapsed_s,
            "rollout/sampled_tokens": num_sampled_tokens,
            "rollout/tokens_per_second": num_sampled_tokens / elapsed_s,
            **{name: float(count - before[name]) for name, count in self._engine.counts.items()},
            "rollout/environment_seconds": self._environment_seconds,
            **self._engine.measured,
        }
        return batch

    def _supervise(self, request: RolloutRequest) -> RolloutBatch:
        """Asks a step's questions with their answers; nothing is sampled, and no engine is asked."""
        started_s = time.perf_counter()
        rows: list[Trajectory] = []
        if self._ranks.global_rank == 0:
            pool = self._pool(self._config.train_env_manager.num_env_workers)
            num_built = pool.num_built
            rows = answer_all(plan_episodes(self._config, request), pool, self._config, step=request.global_step)
            self._ledger.count("built", "environment", pool.num_built - num_built)
        sampling = SamplingParams(temperature=1.0, top_p=1.0, top_k=0, logprobs_mode="processed")
        batch = gather_rows(rows, _exchange_info(request), self._ranks, sampling=sampling, group_size=1)
        self._metrics = {"rollout/seconds": time.perf_counter() - started_s}
        return batch

    def _play(self, request: RolloutRequest) -> list[Trajectory]:
        """Plays this replica's blocks; returns their rows."""
        config = self._config
        rules = TurnRules(
            ends_turn=self._tokenizer.ends_turn,
            max_new_tokens=config.actor_infer.max_new_tokens,
            sequence_length=config.sequence_length,
        )
        blocks = cut_blocks(plan_episodes(config, request), rows_per_forward=config.actor_infer.rows_per_forward)
        own = own_blocks(blocks, self._runtime)
        if not own:
            return []
        environments = _TimedEnvironments(pool=self._pool(config.env_manager(request.mode).num_env_workers))
        num_built = environments.pool.num_built
        no_experts = empty_routing(config.model) if config.actor_infer.record_routed_experts else None
        rows: list[Trajectory] = []
        for block in own:
            sample = self._engine.open_block(request.mode, rules)
            for episode in play_block(block, environments, sample, rules=rules):
                rows += episode_rows(
                    episode,
                    config.rollout_form,
                    policy_version=request.policy_version,
                    no_experts=no_experts,
                    says_finish=config.actor_infer.engine != "megatron",
                )
        self._ledger.count("built", "environment", environments.pool.num_built - num_built)
        self._environment_seconds = environments.seconds
        return rows

    def _pool(self, num_workers: int) -> EnvironmentPool:
        """Builds a pool on first use; training and validation share one if they have the same number of workers."""
        if num_workers not in self._pools:
            self._pools[num_workers] = EnvironmentPool(
                self._config.custom_envs, self._tokenizer, num_workers=num_workers, start=_find_start(self._config)
            )
        return self._pools[num_workers]

    def suspend(self) -> None:
        """Stops nothing: episodes are played within ``get_batch``."""

    def resume(self) -> None:
        """Starts nothing: episodes are played within ``get_batch``."""

    def update_weights(self, policy_version: int) -> None:
        """Has the engine sample by the trainer's present weights."""
        self._engine.update_weights(policy_version)

    def collect_metrics(self) -> dict[str, float]:
        """Returns the last batch's metrics: tokens of all replicas, seconds of this rank, counts of its engine.

        ``rollout/environment_seconds``: the wait for environments on a replica's leader; 0 elsewhere.
        """
        return dict(self._metrics)

    def state_dict(self) -> dict[str, JSON]:
        """Keeps nothing: the next episodes follow from the request."""
        return {}

    def load_state_dict(self, state: Mapping[str, JSON]) -> None:
        """Loads nothing."""

    def close(self) -> None:
        """Closes the engine and all environments, and ends their processes."""
        self._engine.close()
        for pool in self._pools.values():
            pool.close()
        if self._pools and self._config.env_workers.type == "ray":
            from pipelines.environments.ray_cluster import disconnect

            disconnect()
        self._pools.clear()


def _exchange_info(request: RolloutRequest) -> StepInfo:
    """Makes the head of the step files in which ranks exchange rows."""
    return StepInfo(
        step=request.global_step,
        mode=request.mode,
        scheduler_id=request.scheduler_id,
        run_id="exchange",
        policy_version=request.policy_version,
    )


def gather_rows(
    rows: Sequence[Trajectory],
    info: StepInfo,
    ranks: RankGroup,
    *,
    sampling: SamplingParams,
    group_size: int,
    meta: Mapping[str, JSON] | None = None,
) -> RolloutBatch:
    """Gathers all ranks' rows, in canonical order, on every rank; a rank may have none. Collective.

    Raises ``BatchError`` where the groups of all ranks' rows together are not whole.
    """
    if ranks.world_size == 1:
        return RolloutBatch.from_trajectories(rows, sampling=sampling, group_size=group_size, meta=meta)
    # A block of one rank may hold a part of a group, so only the union is asked for whole groups.
    own = RolloutBatch.from_trajectories(rows, sampling=sampling, group_size=None) if rows else None
    parts = ranks.gather(encode_step(own, info).to_bytes() if own else b"")
    gathered = [row for part in parts if part for row in decode_step(part)[0].rows()]
    return RolloutBatch.from_trajectories(gathered, sampling=sampling, group_size=group_size, meta=meta)
