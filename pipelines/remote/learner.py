"""A learner whose model is in a training service: advantages are made here, updates there."""

from __future__ import annotations

from mock_scheduler.batch import RolloutBatch
from mock_scheduler.config.schema import PipelineConfig
from mock_scheduler.remote.client import TrainingClient
from mock_scheduler.remote.protocol import with_values
from pipelines.algorithm.advantages import TokenAdvantages
from pipelines.algorithm.preparation import AdvantageMaker, ResponseScores, needed_scores
from pipelines.environments.grid_tokens import GridTokenizer
from pipelines.remote.contract import service_contract


class RemoteLearner:
    """Trains step after step in the service of ``training_service.url``; one process has it.

    The metrics are those of ``pipelines.megatron.learner.Learner`` on the same batches, since both make advantages by
    the same code and the service trains by that learner.
    """

    def __init__(self, config: PipelineConfig, tokenizer: GridTokenizer, *, url: str) -> None:
        """Raises ``ServiceError`` where the service does not answer, or is another run's."""
        self._client = TrainingClient(url, timeout_s=config.training_service.timeout_s)
        self._advantages = AdvantageMaker(config)
        self._score_names = needed_scores(config)
        self.service = self._client.check(service_contract(config, tokenizer), first_step=0)

    def prepare(self, batch: RolloutBatch, *, step: int) -> tuple[TokenAdvantages, dict[str, float]]:
        """Advantages and their metrics, of rewards and of what the service's models say where that is needed."""
        scores = ResponseScores()
        if self._score_names:
            scores = ResponseScores(**self._client.score(batch, step=step, names=self._score_names))
        return self._advantages.make(batch, scores)

    def train(self, batch: RolloutBatch, advantages: TokenAdvantages, *, step: int) -> dict[str, float]:
        """All updates of one rollout step, in the service; its metrics."""
        return self._client.train(with_values(batch, advantages.advantages, advantages.returns), step=step)

    def finish(self) -> None:
        """Tell the service that the run has ended."""
        self._client.finish()
