"""A run's steps are trained by its own model, or by a training service.

Contract: made in two parts. The constructor refuses all that can be refused; ``build`` makes the model, or greets the
service, when nothing else can fail any more. Every rank makes one and calls the same methods.

Client and service keep one contract; the client's learner has its model in the service.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from mock_scheduler.adapters.nexrl.remote import RemoteDump, build_datums
from mock_scheduler.batch import RolloutBatch
from mock_scheduler.config.base import Decides
from mock_scheduler.determinism.agreement import RankGroup
from mock_scheduler.errors import SchedulerError
from mock_scheduler.remote.client import TrainingClient
from mock_scheduler.remote.protocol import with_values
from mock_scheduler.remote.service_file import ServiceAccess, read_service_file, take_token
from mock_scheduler.support.digests import JSON
from mock_scheduler.support.run_files import SERVICE_FILE, TRACE_FOLDER
from mock_scheduler.support.run_output import Clock
from mock_scheduler.trace.full.files import remove_steps_from
from pipelines.algorithm.training_values import ResponseScores, TrainingValues, ValueMaker, needed_scores
from pipelines.config.schema import PipelineConfig
from pipelines.debug_dump.build import build_debug_dump
from pipelines.environments.base import Tokenizer
from pipelines.environments.registry import vocab_size_in_effect
from pipelines.keys import effect_of, keys_in_effect
from pipelines.megatron.checkpoint import load_checkpoint, save_checkpoint
from pipelines.megatron.hf_source import HuggingFaceSource
from pipelines.megatron.learner import Learner
from pipelines.megatron.process_of_rank import Runtime
from pipelines.megatron.run_state import RunState
from pipelines.megatron.trainer import PolicyTrainer
from pipelines.observation import StepObservation, record_operations


def service_contract(
    config: PipelineConfig, tokenizer: Tokenizer, *, source: HuggingFaceSource | None = None
) -> dict[str, JSON]:
    """Collects every key that decides training, by its dotted name, the vocabulary, and the weights it begins with.

    Client and service must train by the same mathematics; layout, kernels, precision and batches are the service's own.
    """
    values = keys_in_effect(config, vocab_size=vocab_size_in_effect(config, tokenizer))
    shared = {key: value for key, value in values.items() if _is_shared(effect_of(key))}
    weights: dict[str, JSON] = {} if source is None else {"initial_weights": source.digest}
    return {**shared, "vocabulary": tokenizer.digest(), **weights}


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

    def __init__(
        self, config: PipelineConfig, tokenizer: Tokenizer, *, url: str, source: HuggingFaceSource | None = None
    ) -> None:
        """Raises ``ServiceError`` where the service does not answer, or is another run's."""
        access = find_service(config, os.environ, url=url)
        self._client = TrainingClient(access, timeout_s=config.training_service.timeout_s)
        self._values = ValueMaker(config)
        self._score_names = needed_scores(config)
        self.service = self._client.check(service_contract(config, tokenizer, source=source), first_step=0)

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


class Training(Protocol):
    """The loop's view of its trainer. ``layout``, ``world_size``: of the model, once it was built."""

    layout: str
    world_size: int

    def build(self, resumed: RunState | None) -> None:
        """Make the model; of a resumed run, as its checkpoint has it."""

    def make_way(self, step: int) -> None:
        """Removes files of this step and later ones, left by an earlier part of a resumed run. One rank calls it."""

    @property
    def policy(self) -> PolicyTrainer:
        """The model that samples. Raises ``SchedulerError`` where this run has none."""
        ...

    def train_step(self, batch: RolloutBatch, *, step: int) -> dict[str, float]:
        """All updates of one rollout step, and the files that it leaves."""
        ...

    def save(self, folder: Path, state: RunState) -> None:
        """Write a checkpoint."""

    def state_dict(self) -> Mapping[str, JSON]:
        """Returns the trainer's state besides model and optimizer, for a checkpoint."""
        ...

    def finish(self) -> None:
        """The run has made all its steps."""


class OwnTraining:
    """Trains the model of the configuration in this run's own processes."""

    def __init__(
        self,
        config: PipelineConfig,
        runtime: Runtime,
        tokenizer: Tokenizer,
        *,
        ranks: RankGroup,
        clock: Clock,
        is_resumed: bool,
        source: HuggingFaceSource | None,
    ) -> None:
        self._source = source
        self.layout = config.parallel.describe()
        self.world_size = runtime.world_size
        self._config = config
        self._runtime = runtime
        self._output_dir = Path(config.output_dir)
        self._vocab_size = vocab_size_in_effect(config, tokenizer)
        self._allowed_tokens = tokenizer.action_ids if config.actor_infer.only_action_tokens else None
        self._dump = build_debug_dump(config, os.environ, vocab_size=self._vocab_size, is_resumed=is_resumed)
        self._observation = StepObservation(config, runtime, ranks, dump=self._dump, clock=clock)
        self._learner: Learner | None = None

    @property
    def learner(self) -> Learner:
        """The learner. Raises ``SchedulerError`` before ``build``."""
        if self._learner is None:
            raise SchedulerError("the model is asked for before it was built")
        return self._learner

    def build(self, resumed: RunState | None) -> None:
        """Make policy, reference and critic; of a resumed run, as its checkpoint has them."""
        config = self._config
        self._learner = Learner(config, self._runtime, vocab_size=self._vocab_size, allowed_tokens=self._allowed_tokens)
        if resumed is not None:
            load_checkpoint(Path(str(config.resume_from_checkpoint)), self._learner, resumed)

    def make_way(self, step: int) -> None:
        """Remove traces and debug dumps of this step and later ones."""
        remove_steps_from(self._output_dir / TRACE_FOLDER, step)
        self._dump.remove_steps_from(step)

    @property
    def policy(self) -> PolicyTrainer:
        """Returns the policy under training."""
        return self.learner.policy

    def train_step(self, batch: RolloutBatch, *, step: int) -> dict[str, float]:
        """Returns all updates of one rollout step; traced, dumped and logged as configured."""
        with (
            record_operations(self._config, self._output_dir, self.learner, step=step),
            self._observation.step(step, batch) as probe,
        ):
            return self.learner.train_step(batch, step=step, probe=probe)

    def save(self, folder: Path, state: RunState) -> None:
        """Write a checkpoint. Collective."""
        save_checkpoint(folder, self.learner, state, source=self._source)

    def state_dict(self) -> Mapping[str, JSON]:
        """Returns the learner's state."""
        return self.learner.state_dict()

    def finish(self) -> None:
        """Nothing is left to do."""


class ServiceTraining:
    """Trains in the service of ``training_service.url``; this run has no model."""

    def __init__(
        self, config: PipelineConfig, tokenizer: Tokenizer, *, url: str, source: HuggingFaceSource | None
    ) -> None:
        self.layout = "that of the service"
        self._source = source
        self.world_size = 1
        self._config = config
        self._tokenizer = tokenizer
        self._url = url
        self._learner: RemoteLearner | None = None
        build_debug_dump(config, os.environ, vocab_size=vocab_size_in_effect(config, tokenizer), trains_remotely=True)

    def build(self, resumed: RunState | None) -> None:
        """Greet the service; the configuration has refused to resume."""
        # Imports httpx, for which no other run should wait.
        from pipelines.training import RemoteLearner

        self._learner = RemoteLearner(self._config, self._tokenizer, url=self._url, source=self._source)
        self.layout = self._learner.service.layout

    def make_way(self, step: int) -> None:
        """The configuration has refused to resume."""

    @property
    def policy(self) -> PolicyTrainer:
        """Raises ``SchedulerError``: the configuration has refused all that samples."""
        raise SchedulerError(f"the policy of this run is in the training service at {self._url}")

    def train_step(self, batch: RolloutBatch, *, step: int) -> dict[str, float]:
        """All updates of one rollout step, in the service; dumped as ``debug.remote_api_dump_options`` says."""
        assert self._learner is not None
        dump = RemoteDump(config=self._config.debug, step=step)
        values, value_metrics = self._learner.prepare(batch, step=step)
        dump.save_prepared_trajectories(batch, values.advantages)
        if self._config.debug.remote_api_dump_options.datums and self._config.debug.is_due(step):
            dump.save_datums(build_datums(batch, values.advantages))
        metrics = self._learner.train(batch, values, step=step)
        dump.save_training_metrics(metrics)
        return metrics | value_metrics

    def save(self, folder: Path, state: RunState) -> None:
        """The configuration has refused checkpoints."""

    def state_dict(self) -> Mapping[str, JSON]:
        """Returns nothing."""
        return {}

    def finish(self) -> None:
        """Tell the service that the run has ended."""
        assert self._learner is not None
        self._learner.finish()


def build_training(
    config: PipelineConfig,
    runtime: Runtime,
    tokenizer: Tokenizer,
    *,
    ranks: RankGroup,
    clock: Clock,
    is_resumed: bool,
    source: HuggingFaceSource | None = None,
) -> Training:
    """Builds the trainer of this run, as ``training_service.url`` says.

    ``source``: the Hugging Face checkpoint that the model begins with.
    """
    url = config.training_service.url
    if url is not None:
        return ServiceTraining(config, tokenizer, url=url, source=source)
    return OwnTraining(config, runtime, tokenizer, ranks=ranks, clock=clock, is_resumed=is_resumed, source=source)
