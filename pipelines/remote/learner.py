"""A learner whose model is in a training service: advantages are made here, updates there."""

from __future__ import annotations

from mock_scheduler.batch import RolloutBatch
from mock_scheduler.remote import TrainingClient, with_values
from pipelines.algorithm.training_values import ResponseScores, TrainingValues, ValueMaker, needed_scores
from pipelines.config.schema import PipelineConfig
from pipelines.environments.grid_tokens import GridTokenizer
from pipelines.remote.contract import service_contract


class RemoteLearner:
    """Trains step after step in the service of ``training_service.url``; one process has it.

    Its metrics equal those of ``pipelines.megatron.learner.Learner`` on the same batches: both make advantages by the
    same code, and the service trains by that learner.
    """

    def __init__(self, config: PipelineConfig, tokenizer: GridTokenizer, *, url: str) -> None:
        """Raises ``ServiceError`` where the service does not answer, or is another run's."""
        self._client = TrainingClient(url, timeout_s=config.training_service.timeout_s)
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
