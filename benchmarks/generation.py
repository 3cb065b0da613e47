"""Compares the speed of playing episodes with kept keys and values, and with every history computed anew for each
token.

Both engines play the same episodes with the same weights in this process, in turn, round by round; they must draw the
same tokens. A policy of 2 layers and 64 hidden units plays 4x4 FrozenLake, ten turns at most. Reported for each number
of episodes: sampled tokens per second of each engine and their ratio (medians over the rounds), the environments' share
of generation, and the shares of generation in a whole step with two epochs of updates.

Run: ``python -m benchmarks.generation [--json FILE] [--episodes 64,128] [--rounds 5]``. One thread, no GPU, no network.
"""

from __future__ import annotations

import json
import statistics
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from mock_scheduler.batch import RolloutBatch
from mock_scheduler.determinism.agreement import TorchRankGroup
from mock_scheduler.ledger import Ledger
from mock_scheduler.scheduler import RolloutRequest
from mock_scheduler.support.arguments import ArgumentParser
from pipelines.config.schema import PipelineConfig
from pipelines.environments.registry import build_tokenizer
from pipelines.megatron.learner import Learner
from pipelines.megatron.process_of_rank import Runtime, start_runtime, stop_runtime
from pipelines.rollout.scheduler import AgenticRolloutScheduler

GROUP_SIZE = 8
LOGPROB_BOUND = 1e-5


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """Medians over the rounds. ``environment_share``: of cached generation; the others: of a step that generates so."""

    num_episodes: int
    num_tokens: int
    cached_tokens_per_second: float
    uncached_tokens_per_second: float
    ratio: float
    environment_share: float
    cached_generation_share: float
    uncached_generation_share: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Player:
    """One engine and the learner whose weights it plays with."""

    learner: Learner
    scheduler: AgenticRolloutScheduler


def build_config(num_episodes: int, *, use_kv_cache: bool) -> PipelineConfig:
    """Builds the configuration of the measured run."""
    return PipelineConfig.model_validate(
        {
            "exp_name": "generation",
            "rollout_batch_size": num_episodes,
            "val_batch_size": num_episodes,
            "sequence_length": 192,
            "ppo_epochs": 2,
            "model": {"num_layers": 2, "hidden_size": 64, "num_query_groups": 2, "ffn_hidden_size": 128},
            "training": {"micro_batch_size": 8, "global_batch_size": 32, "lr": 1e-3},
            "actor_infer": {"only_action_tokens": True, "use_kv_cache": use_kv_cache, "rows_per_forward": 64},
            "train_env_manager": {"num_env_groups": num_episodes // GROUP_SIZE, "group_size": GROUP_SIZE},
            "val_env_manager": {"num_env_groups": num_episodes // GROUP_SIZE, "group_size": GROUP_SIZE},
            "custom_envs": {"FrozenLake": {"max_steps": 10, "env_config": {"map_name": None, "size": 4}}},
        }
    )


def build_player(num_episodes: int, runtime: Runtime, *, use_kv_cache: bool) -> Player:
    """A learner with the canonical initial weights, and the scheduler that plays with them."""
    config = build_config(num_episodes, use_kv_cache=use_kv_cache)
    tokenizer = build_tokenizer(config)
    learner = Learner(config, runtime, vocab_size=tokenizer.vocab_size, allowed_tokens=tokenizer.action_ids)
    ranks = TorchRankGroup(runtime.device)
    scheduler = AgenticRolloutScheduler(config, learner.policy, tokenizer, Ledger(), ranks=ranks)
    return Player(learner=learner, scheduler=scheduler)


def play(player: Player, num_episodes: int, *, step: int) -> tuple[RolloutBatch, dict[str, float]]:
    """One batch and its metrics."""
    request = RolloutRequest(global_step=step, batch_size=num_episodes, mode="train", policy_version=0)
    return player.scheduler.get_batch(request), player.scheduler.collect_metrics()


def check_same(cached: RolloutBatch, uncached: RolloutBatch) -> None:
    """Raise ``RuntimeError`` unless both drew the same tokens with the same probabilities."""
    difference = float((cached.rollout_logprobs - uncached.rollout_logprobs).abs().max())
    if not torch.equal(cached.tokens, uncached.tokens) or difference > LOGPROB_BOUND:
        raise RuntimeError(f"the engines do not play alike: logprobs differ by up to {difference}")


def measure(num_episodes: int, runtime: Runtime, *, rounds: int) -> Result:
    """Play and train ``rounds`` times after one round that does not count."""
    cached = build_player(num_episodes, runtime, use_kv_cache=True)
    uncached = build_player(num_episodes, runtime, use_kv_cache=False)
    seconds: dict[str, list[float]] = {"cached": [], "uncached": [], "environment": [], "training": []}
    tokens: list[float] = []
    for step in range(rounds + 1):
        batch, cached_metrics = play(cached, num_episodes, step=step)
        other, uncached_metrics = play(uncached, num_episodes, step=step)
        check_same(batch, other)
        # Both learners take the step, so that the next round is played with the same weights.
        started_s = time.perf_counter()
        cached.learner.train_step(batch)
        training_s = time.perf_counter() - started_s
        uncached.learner.train_step(batch)
        if step > 0:
            tokens.append(cached_metrics["rollout/sampled_tokens"])
            seconds["cached"].append(cached_metrics["rollout/seconds"])
            seconds["uncached"].append(uncached_metrics["rollout/seconds"])
            seconds["environment"].append(cached_metrics["rollout/environment_seconds"])
            seconds["training"].append(training_s)
    for player in (cached, uncached):
        player.scheduler.close()
    return summarise(num_episodes, tokens, seconds)


def summarise(num_episodes: int, tokens: Sequence[float], seconds: dict[str, list[float]]) -> Result:
    """Takes the medians of the rounds."""

    def median_of_quotients(above: Sequence[float], below: Sequence[float]) -> float:
        return statistics.median(one / other for one, other in zip(above, below, strict=True))

    def share_of_step(name: str) -> float:
        whole = [one + training for one, training in zip(seconds[name], seconds["training"], strict=True)]
        return median_of_quotients(seconds[name], whole)

    return Result(
        num_episodes=num_episodes,
        num_tokens=int(statistics.median(tokens)),
        cached_tokens_per_second=median_of_quotients(tokens, seconds["cached"]),
        uncached_tokens_per_second=median_of_quotients(tokens, seconds["uncached"]),
        ratio=median_of_quotients(seconds["uncached"], seconds["cached"]),
        environment_share=median_of_quotients(seconds["environment"], seconds["cached"]),
        cached_generation_share=share_of_step("cached"),
        uncached_generation_share=share_of_step("uncached"),
    )


def print_results(console: Console, results: Sequence[Result]) -> None:
    """Two tables: generation alone, and whole steps."""
    speed = Table(title="Generation, sampled tokens per second", title_justify="left")
    for heading in ("episodes", "tokens", "cached", "uncached", "ratio", "environments' share"):
        speed.add_column(heading, justify="right")
    steps = Table(title="Share of a whole step", title_justify="left")
    for heading in ("episodes", "generation, cached", "training", "generation, uncached", "training"):
        steps.add_column(heading, justify="right")
    for result in results:
        speed.add_row(
            str(result.num_episodes),
            str(result.num_tokens),
            f"{result.cached_tokens_per_second:,.0f}",
            f"{result.uncached_tokens_per_second:,.0f}",
            f"{result.ratio:.2f}",
            f"{result.environment_share:.0%}",
        )
        shares = (result.cached_generation_share, result.uncached_generation_share)
        steps.add_row(str(result.num_episodes), *(f"{part:.0%}" for share in shares for part in (share, 1.0 - share)))
    console.print(speed)
    console.print(steps)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; returns 0."""
    parser = ArgumentParser(prog="benchmarks.generation", description="Cached against uncached generation")
    parser.add_argument("--json", type=Path, default=None, help="also write the results to this file")
    parser.add_argument("--episodes", default="64,128", help=f"numbers of episodes, multiples of {4 * GROUP_SIZE}")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    # Megatron's and torch's on themselves; see pipelines/agentic.py.
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    counts = [int(count) for count in options.episodes.split(",")]
    runtime = start_runtime(build_config(counts[0], use_kv_cache=True).parallel, seed=0)
    results = [measure(count, runtime, rounds=options.rounds) for count in counts]
    stop_runtime()
    print_results(Console(), results)
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(result) for result in results], indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
