"""The client's side of a training service: the contract that both keep, and a learner whose model is in the service."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from mock_scheduler.batch import RolloutBatch
from mock_scheduler.config.base import Decides
from mock_scheduler.remote.client import TrainingClient
from mock_scheduler.remote.protocol import with_values
from mock_scheduler.remote.service_file import ServiceAccess, read_service_file, take_token
from mock_scheduler.support.digests import JSON
from mock_scheduler.support.run_files import SERVICE_FILE
from pipelines.algorithm.training_values import ResponseScores, TrainingValues, ValueMaker, needed_scores
from pipelines.config.schema import PipelineConfig
from pipelines.environments.grid_tokens import GridTokenizer
from pipelines.environments.registry import vocab_size_in_effect
from pipelines.keys import effect_of, keys_in_effect


def service_contract(config: PipelineConfig, tokenizer: GridTokenizer) -> dict[str, JSON]:
    """Collects every key that decides training, by its dotted name, and the vocabulary.

    Client and service must train by the same mathematics; layout, kernels, precision and batches are the service's own.
    """
    values = keys_in_effect(config, vocab_size=vocab_size_in_effect(config, tokenizer))
    shared = {key: value for key, value in values.items() if _is_shared(effect_of(key))}
    return {**shared, "vocabulary": tokenizer.digest()}


def _is_shared(facts: Decides) -> bool:
    return Decides.TRAINING in facts and Decides.VALIDATION not in facts


def find_service(config: PipelineConfig, environ: Mapping[str, str], *, url: str) -> ServiceAccess:
    """Find the token of a service; raises ``ServiceError`` where it is not where the configuration says."""
    service = config.training_service
    if service.token_variable is not None:
        return take_token(service.token_variable, environ, url=url)
    return read_service_file(Path(service.service_file or Path(config.output_dir) / SERVICE_FILE), url=url)


class RemoteLearner:
    """Trains step after step in the service of ``training_service.url``; one process has it.

    Its metrics equal those of ``pipelines.megatron.learner.Learner`` on the same batches: both make advantages by the
    same code, and the service trains by that learner.
    """

    def __init__(self, config: PipelineConfig, tokenizer: GridTokenizer, *, url: str) -> None:
        """Raises ``ServiceError`` where the service does not answer, or is another run's."""
        access = find_service(config, os.environ, url=url)
        self._client = TrainingClient(access, timeout_s=config.training_service.timeout_s)
        self._values = ValueMaker(config)
        self._score_names = needed_scores(config)
        self.service = self._client.check(service_contract(config, tokenizer), first_step=0)

    def prepare(self, batch: RolloutBatch, *, step: int) -> tuple[TrainingValues, dict[str, float]]:
        """Make the values to train with, and their metrics, of rewards and, where needed, of the service's scores."""
        scores = ResponseScores()
        if self._score_names:
            scores = ResponseScores(**self._client.score(batch, step=step, names=self._score_names))
        return self._values.make(batch, scores, policy_version=step)

    def train(self, batch: RolloutBatch, values: TrainingValues, *, step: int) -> dict[str, float]:
        """Make all updates of one rollout step in the service, and return its metrics."""
        datums = with_values(batch, values.advantages, values.returns, weights=values.weights, kept=values.kept)
        return self._client.train(datums, step=step)

    def finish(self) -> None:
        """Tell the service that the run has ended."""
        self._client.finish()
