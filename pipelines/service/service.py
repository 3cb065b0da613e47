"""Carries out the requests of a training service, on every rank alike; HTTP is in ``http_front``.

Contract: a step is trained once, in order. ``check`` refuses a request before any rank acts on it, so a refused one
changes nothing. Every rank makes a service and calls ``score`` and ``train`` with the same arguments.
"""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType
from typing import Literal, Self

import torch

from mock_scheduler.batch import RolloutBatch
from mock_scheduler.errors import ServiceError
from mock_scheduler.remote import PROTOCOL_VERSION, decode_datums, take_values
from mock_scheduler.support.digests import JSON
from mock_scheduler.support.text import bullet_list
from pipelines.algorithm.training_values import TrainingValues, needed_scores
from pipelines.config.schema import PipelineConfig
from pipelines.environments.grid_tokens import GridTokenizer
from pipelines.environments.registry import vocab_size_in_effect
from pipelines.megatron.learner import Learner, ScoredStep
from pipelines.megatron.probing.interface import NO_PROBE
from pipelines.megatron.process.runtime import Runtime
from pipelines.observation import StepObservation
from pipelines.remote import service_contract

Operation = Literal["score", "train"]


class OutOfOrderError(ServiceError):
    """A request out of order: another step, another client, or scoring left out."""


class TrainingService:
    """The training of one run. ``next_step``: the step to train next. ``observation``: makes the probe of each step."""

    def __init__(
        self, config: PipelineConfig, runtime: Runtime, tokenizer: GridTokenizer, *, observation: StepObservation
    ) -> None:
        self.config = config
        self.runtime = runtime
        self.next_step = 0
        self._contract = service_contract(config, tokenizer)
        self._vocab_size = vocab_size_in_effect(config, tokenizer)
        self._score_names = needed_scores(config)
        self._observation = observation
        self._run_id: str | None = None
        self._scored: ScoredStep | None = None
        self._probe = NO_PROBE
        self._open_step = ExitStack()  # the probe of the step that is being trained
        self._learner = Learner(
            config,
            runtime,
            vocab_size=self._vocab_size,
            allowed_tokens=tokenizer.action_ids if config.actor_infer.only_action_tokens else None,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Drop the files of a step scored but never trained, so only whole steps are left."""
        if self._scored is not None:
            unfinished = ServiceError(f"the service ended in the middle of step {self.next_step}")
            self._open_step.__exit__(type(unfinished), unfinished, None)

    def describe(self) -> dict[str, JSON]:
        """Describe the service as ``GET /v1/service`` answers."""
        return {
            "protocol": PROTOCOL_VERSION,
            "next_step": self.next_step,
            "layout": self.config.parallel.describe(),
            "contract": self._contract,
        }

    def check(self, operation: Operation, step: int, body: bytes) -> None:
        """Raise ``OutOfOrderError`` or ``ServiceError`` where a request cannot be carried out; nothing changes."""
        if step >= self.config.max_steps:
            raise OutOfOrderError(f"step {step} was sent, and max_steps is {self.config.max_steps}")
        if step != self.next_step:
            raise OutOfOrderError(f"step {step} was sent, and step {self.next_step} comes next")
        datums, run_id = decode_datums(body, step=step)
        if self._run_id not in (None, run_id):
            raise OutOfOrderError("another client's run is being trained here; start a service of your own")
        problems = self._datum_problems(datums)
        if problems:
            raise ServiceError(f"the datums of step {step} cannot be trained on:{bullet_list(problems)}")
        if operation == "train":
            take_values(datums)
            if self._scored is None and self._score_names:
                raise OutOfOrderError(f"step {step} must be scored first, for {', '.join(self._score_names)}")
            if self._scored is not None and not _are_same_rows(self._scored.batch, datums):
                raise OutOfOrderError(f"these are not the datums that were scored for step {step}")
        elif self._scored is not None:
            raise OutOfOrderError(f"step {step} was scored already")

    def _datum_problems(self, datums: RolloutBatch) -> list[str]:
        """List every problem that would fail in the middle of a step."""
        if len(datums) == 0:
            return ["there are none"]
        problems = []
        longest, limit = int(datums.lengths.max()), self.config.sequence_length
        if longest > limit:
            problems.append(f"a row has {longest} tokens, and sequence_length is {limit}")
        largest = int(datums.tokens.max())
        if largest >= self._vocab_size or int(datums.tokens.min()) < 0:
            problems.append(f"token ids run to {largest}, and the vocabulary has {self._vocab_size} tokens")
        if datums.num_trajectories != self.config.rollout_batch_size:
            problems.append(
                f"there are {datums.num_trajectories} trajectories, and rollout_batch_size is "
                f"{self.config.rollout_batch_size}"
            )
        return problems

    def score(self, step: int, body: bytes) -> dict[str, torch.Tensor]:
        """Score a step's datums: float64 ``[M]`` by name. Collective."""
        self._scored = self._start(step, body)
        return self._learner.response_scores(self._scored).tensors()

    def train(self, step: int, body: bytes) -> dict[str, float]:
        """Make all updates of a step and return their metrics. Collective."""
        scored = self._scored or self._start(step, body)
        taken = take_values(decode_datums(body, step=step)[0])
        values = TrainingValues(
            advantages=taken.advantages, returns=taken.returns, weights=taken.weights, kept=taken.kept
        )
        with self._open_step:
            metrics = self._learner.update(scored, values, step=step, probe=self._probe)
        self._scored, self._probe = None, NO_PROBE
        self.next_step = step + 1
        return metrics

    def _start(self, step: int, body: bytes) -> ScoredStep:
        datums, self._run_id = decode_datums(body, step=step)
        with ExitStack() as stack:
            self._probe = stack.enter_context(self._observation.step(step))
            scored = self._learner.score(datums, probe=self._probe)
            self._open_step = stack.pop_all()
        return scored


def _are_same_rows(one: RolloutBatch, other: RolloutBatch) -> bool:
    return one.identities == other.identities and torch.equal(one.tokens, other.tokens)
