"""Carries out the requests of a training service, on every rank alike; HTTP is in ``http_app``, their order in
``order``.

Contract: ``check`` refuses a request before any rank acts on it, so a refused one changes nothing. Every rank makes a
service and calls ``score`` and ``train`` with the same arguments.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import Self

import torch
import torch.distributed as dist

from mock_scheduler.batch import RolloutBatch
from mock_scheduler.errors import ServiceError
from mock_scheduler.megatron.probe.interface import NO_PROBE
from mock_scheduler.remote.protocol import PROTOCOL_VERSION, decode_datums, number_problems, take_values
from mock_scheduler.support.digests import JSON
from mock_scheduler.support.text import bullet_list
from pipelines.algorithm.training_values import TrainingValues
from pipelines.config.schema import PipelineConfig
from pipelines.environments.base import Tokenizer
from pipelines.environments.registry import vocab_size_in_effect
from pipelines.megatron.hf_source import HuggingFaceSource
from pipelines.megatron.learner import Learner, ScoredStep
from pipelines.megatron.process_of_rank import Runtime
from pipelines.megatron.transformer_config import DTYPES
from pipelines.observation import StepObservation
from pipelines.service.order import OutOfOrderError, StepRequest
from pipelines.training import service_contract


class TrainingService:
    """Serves the training of one run.

    ``next_step``: the step to train next. ``observation``: makes the probe of each step. ``source``: the Hugging Face
    checkpoint that the model begins with.
    """

    def __init__(
        self,
        config: PipelineConfig,
        runtime: Runtime,
        tokenizer: Tokenizer,
        *,
        observation: StepObservation,
        source: HuggingFaceSource | None = None,
    ) -> None:
        self.config = config
        self.runtime = runtime
        self.next_step = 0
        self._contract = service_contract(config, tokenizer, source=source)
        self._vocab_size = vocab_size_in_effect(config, tokenizer)
        self._dtype = torch.promote_types(DTYPES[config.precision], torch.float32)  # as the learner computes a loss
        self._observation = observation
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

    def check(self, request: StepRequest, body: bytes) -> None:
        """Raise ``ServiceError`` where a body cannot be trained on, ``OutOfOrderError`` where it is another run's.

        Nothing changes.
        """
        step = request.step
        datums, run_id = decode_datums(body, step=step)
        if run_id != request.run_id:
            raise OutOfOrderError("these datums are of another run than the request; each client has a run of its own")
        problems = self._datum_problems(datums)
        if problems:
            raise ServiceError(f"the datums of step {step} cannot be trained on:{bullet_list(problems)}")
        if request.operation == "train":
            take_values(datums, dtype=self._dtype)
            if self._scored is not None and not _are_same_rows(self._scored.batch, datums):
                raise OutOfOrderError(f"these are not the datums that were scored for step {step}")

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
        return problems + number_problems("rollout_logprobs", datums.rollout_logprobs, datums, dtype=self._dtype)

    def score(self, step: int, body: bytes) -> dict[str, torch.Tensor]:
        """Score a step's datums: float64 ``[M]`` by name. Collective."""
        self._scored = self._start(step, body)
        return self._learner.response_scores(self._scored).tensors()

    def train(self, step: int, body: bytes) -> dict[str, float]:
        """Make all updates of a step and return their metrics. Collective.

        Raises ``ServiceError`` on every rank where the model is spoilt: a loss, a gradient's norm or a weight is not
        finite.
        """
        scored = self._scored or self._start(step, body)
        taken = take_values(decode_datums(body, step=step)[0])
        values = TrainingValues(
            advantages=taken.advantages, returns=taken.returns, weights=taken.weights, kept=taken.kept
        )
        with self._open_step:
            metrics = self._learner.update(scored, values, step=step, probe=self._probe)
        self._scored, self._probe = None, NO_PROBE
        self._check_result(step, metrics)
        self.next_step = step + 1
        return metrics

    def _check_result(self, step: int, metrics: Mapping[str, float]) -> None:
        # After the step's trace has ended, which lists its collectives.
        problems = unsound_metrics(metrics)
        parts = [part for model in self._learner.models.values() for part in model.parameters()]
        are_finite = all(bool(part.parameter.detach().isfinite().all()) for part in parts)
        is_sound = torch.tensor([are_finite and not problems], dtype=torch.int32, device=self.runtime.device)
        if dist.get_world_size() > 1:
            dist.all_reduce(is_sound, op=dist.ReduceOp.MIN)
        if not bool(is_sound.item()):
            found = ", ".join(problems) or "a weight is not finite"
            raise ServiceError(
                f"step {step} was trained, and its model cannot be used: {found}. The same step in a run that trains "
                "itself would go on with it; look at its advantages, its learning rate and clip_grad"
            )

    def _start(self, step: int, body: bytes) -> ScoredStep:
        datums, _ = decode_datums(body, step=step)
        with ExitStack() as stack:
            self._probe = stack.enter_context(self._observation.step(step, datums))
            scored = self._learner.score(datums, probe=self._probe)
            self._open_step = stack.pop_all()
        return scored


def unsound_metrics(metrics: Mapping[str, float]) -> list[str]:
    """List the losses and norms of gradients without a finite value, as ``grad_norm is nan``."""
    return [
        f"{name} is {value}"
        for name, value in sorted(metrics.items())
        if name.endswith(("loss", "grad_norm")) and not math.isfinite(value)
    ]


def _are_same_rows(one: RolloutBatch, other: RolloutBatch) -> bool:
    return one.identities == other.identities and torch.equal(one.tokens, other.tokens)
