"""Puts the proxy at the seam of ms-swift's Megatron trainers for GRPO and GKD, ``_generate_completions``.

Contract: put into a trainer while it is made, before it makes its engine. A run that only replays makes no engine,
wakes none and sends no weights, and calls no reward function: rewards are recorded with the rollout. A step is one
rollout: its number is the iteration, times the rollouts that dynamic sampling may play in one. Those of evaluations are
numbered one after another. Each process records the samples that it plays.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TypeAlias, cast

import torch
import torch.distributed as dist

from mock_scheduler.adapters.ms_swift.codec import Foreign, SampleCodec
from mock_scheduler.adapters.ms_swift.settings import MsSwiftSettings
from mock_scheduler.batch import SamplingParams
from mock_scheduler.errors import SchedulerError
from mock_scheduler.ledger import Ledger
from mock_scheduler.proxy.build import build_scheduler
from mock_scheduler.proxy.sync_scheduler import ProxyScheduler
from mock_scheduler.scheduler import RolloutRequest, RowShard
from mock_scheduler.support.digests import JSON

_REWARDS = "rewards"
#: Arguments of ms-swift that a replay must share.
_CONTRACT = (
    *("model", "template", "system", "dataset", "rlhf_type", "num_generations", "num_generations_eval"),
    *("generation_batch_size", "steps_per_generation", "max_completion_length", "temperature", "top_p", "top_k"),
    *("min_p", "repetition_penalty", "stop_words", "dynamic_sample", "max_resample_times"),
    *("truncation_strategy", "multi_turn_scheduler", "max_turns", "lmbda"),
)

_Samples: TypeAlias = "list[Foreign]"


class Rollouts:
    """Holds the rollouts of one trainer."""

    def __init__(self, trainer: Foreign, settings: MsSwiftSettings, *, ledger: Ledger | None = None) -> None:
        self.ledger = Ledger() if ledger is None else ledger
        self._trainer, self._settings = trainer, settings
        self._config = settings.mock_config()
        self._generate: Callable[[_Samples], _Samples] = trainer._generate_completions
        self._score: Callable[[_Samples], torch.Tensor] | None = getattr(trainer, "_score_completions", None)
        self._scheduler: ProxyScheduler | None = None
        self._request: RolloutRequest | None = None
        self._given: _Samples = []
        self._last_iteration, self._place, self._num_evaluated = -1, 0, 0
        trainer._generate_completions = self.generate
        if self._score is not None:
            trainer._score_completions = self.score
        if settings.is_replay_alone:
            self._make_engine: Callable[[], None] = trainer._init_rollout_engine
            trainer._init_rollout_engine = self._make_none

    def generate(self, samples: _Samples) -> _Samples:
        """Answers ``_generate_completions``: of the samples of this process, with their responses."""
        self._open()
        self._given = samples
        # Copied before the rollout, which changes the messages of the samples given to it.
        self._request = self._next_request([list(sample.messages) for sample in samples])
        found: _Samples = self._open().get_batch(self._request)
        if self._score is None:
            self._open().state_dict()  # returns when the step is on disk
        return found

    def score(self, samples: _Samples) -> torch.Tensor:
        """Answers ``_score_completions``: a row of rewards for each sample of the rollout before."""
        if self._request is None or self._score is None:
            raise SchedulerError("samples were scored before any rollout: the trainer has another order of its steps")
        recorded = self._open().late_values(self._request, _REWARDS)
        if recorded is not None:
            return torch.stack(cast("list[torch.Tensor]", recorded)).to(self._trainer.device)
        rewards = self._score(samples)
        self._open().add_late_values(self._request, _REWARDS, list(rewards.detach().cpu().unbind(0)))
        self._open().state_dict()
        return rewards

    def play(self) -> _Samples:
        """Calls ms-swift's own method."""
        return self._generate(self._given)

    def close(self) -> None:
        """Writes the rest; raises any error of writing."""
        if self._scheduler is not None:
            self._scheduler.close()

    def _make_none(self) -> None:
        """Takes the way of ms-swift without an engine, and says afterwards that there is one, as its branches ask."""
        args = self._trainer.args
        stated, args.use_vllm = args.use_vllm, False
        try:
            self._make_engine()
        finally:
            args.use_vllm = stated
        self._trainer.use_vllm = stated
        self.ledger.count("suppressed", "engine")
        self.ledger.count("suppressed", "weight_updates")

    def _open(self) -> ProxyScheduler:
        if self._scheduler is None:
            trainer = self._trainer
            shard = find_shard(trainer)
            data: Foreign = import_module("swift.rl_core.data")
            self._scheduler = build_scheduler(
                self._config,
                lambda: _Live(self),
                {**describe_trainer(trainer), **self._settings.contract},
                codec=SampleCodec(
                    sampling=read_sampling(trainer.args),
                    find_class=lambda name: getattr(data, name, None),
                    shard=shard,
                ),
                ledger=self.ledger,
                resume=self._settings.resume,
                run_id=self._settings.run_id,
                shard=shard,
                late_values=[] if self._score is None else [_REWARDS],
                provenance={"framework": "ms-swift"},
            )
        return self._scheduler

    def _next_request(self, prompts: list[list[Foreign]]) -> RolloutRequest:
        trainer = self._trainer
        iteration, is_training = int(trainer.state.iteration), bool(trainer.unwrapped_models[0].training)
        group_size = getattr(trainer, "num_generations" if is_training else "num_generations_eval", None)
        if is_training:
            # Dynamic sampling plays again within an iteration.
            self._place = self._place + 1 if iteration == self._last_iteration else 0
            self._last_iteration = iteration
            most = 1 + (int(trainer.max_resample_times) if getattr(trainer, "dynamic_sample", False) else 0)
            number = iteration * most + self._place
        else:
            number, self._num_evaluated = self._num_evaluated, self._num_evaluated + 1
        shard = find_shard(trainer)
        return RolloutRequest(
            global_step=number,
            batch_size=len(prompts) * (1 if shard is None else shard.count),
            mode="train" if is_training else "val",
            policy_version=iteration,
            group_size=group_size,
            prompts=prompts,
        )


class _Live:
    """Serves as rollout scheduler with ms-swift's own method."""

    def __init__(self, owner: Rollouts) -> None:
        self._owner = owner

    def get_batch(self, request: RolloutRequest) -> _Samples:
        """Plays."""
        return self._owner.play()


def find_shard(trainer: Foreign) -> RowShard | None:
    """Gives this process's part of every rollout, in the order of the data; None where there is one process."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    group = trainer._get_rollout_group()  # the processes of one data-parallel rank, who play its samples together
    state: Foreign = import_module("megatron.core.parallel_state")
    place, size = dist.get_rank(group=group), dist.get_world_size(group=group)
    return RowShard(index=int(state.get_data_parallel_rank()) * size + place, count=dist.get_world_size())


def read_sampling(args: Foreign) -> SamplingParams:
    """Reads how completions are sampled; a ``top_k`` below 1 turns it off. vLLM is asked for processed ones."""
    return SamplingParams(
        temperature=float(args.temperature),
        top_p=float(getattr(args, "top_p", 1.0)),
        top_k=max(int(getattr(args, "top_k", 0) or 0), 0),
        logprobs_mode="processed",
    )


def describe_trainer(trainer: Foreign) -> dict[str, JSON]:
    """Describes what a replay must share with its recording.

    What ms-swift learns of its engine alone is among it: a replay without one would go another way in silence.
    """
    args = trainer.args
    found = {name: getattr(args, name) for name in _CONTRACT if hasattr(args, name)}
    learned = ("use_gym_env", "disable_rollout_importance_sampling", "reward_func_names")
    found |= {name: getattr(trainer, name) for name in learned if hasattr(trainer, name)}
    return {f"ms_swift.{name}": _as_plain(value) for name, value in found.items()}


def _as_plain(value: object) -> JSON:
    """Gives a plain value as it is, and of any other its class: an object's text has its address."""
    if isinstance(value, str | int | float | None):
        return value
    if isinstance(value, list | tuple):
        return [_as_plain(item) for item in value]
    return type(value).__name__
