"""Composes and runs the training loop of the agentic pipeline.

The loop asks the rollout scheduler for one batch per step and trains on it; it never asks for the mode. A run is
refused as early as possible, in this order: settings without effect, environments, the checkpoint to resume and those
in the way, the layout, ranks that differ, the checkpoint's content and timeline, the output folder, contract and
recording; only then is a model built.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mock_scheduler.adapters.nexrl.rollouts import DumpedRollouts
from mock_scheduler.batch import RolloutBatch
from mock_scheduler.config.loading import dump_config
from mock_scheduler.correction.config.algorithm import describe_correction
from mock_scheduler.determinism.agreement import TorchRankGroup, check_agreement
from mock_scheduler.determinism.environment import check_unchanged
from mock_scheduler.determinism.guard import (
    apply_deterministic_mode,
    check_took_effect,
    read_back,
    read_node_values,
)
from mock_scheduler.determinism.settings import is_deterministic_mode
from mock_scheduler.layouts.rules import check_conflicts, find_conflicts
from mock_scheduler.ledger import Ledger
from mock_scheduler.megatron.ordered_collectives import use_ordered_reductions
from mock_scheduler.proxy.build import build_scheduler
from mock_scheduler.scheduler import RolloutRequest
from mock_scheduler.support.files import save_json, save_text
from mock_scheduler.support.local_key import mark_own
from mock_scheduler.support.run_files import CONFIG_FILE, LEDGER_FILE, RUN_FILE
from mock_scheduler.support.run_output import Clock, MetricsWriter, prepare_output_dir, remove_unfinished_files
from mock_scheduler.support.versions import read_package_versions
from mock_scheduler.trace.selection import check_trace_ranks
from mock_scheduler.trace.stated_steps import StatedSteps
from pipelines.batch_metrics import (
    compute_batch_metrics,
    compute_success_by_length,
    compute_success_by_tag,
    compute_version_metrics,
)
from pipelines.config.schema import PipelineConfig
from pipelines.environments.base import Tokenizer
from pipelines.environments.registry import build_tokenizer, can_show, check_environments, vocab_size_in_effect
from pipelines.megatron.hf_source import check_source, find_weight_files, read_source
from pipelines.megatron.model import find_idle_vocabulary
from pipelines.megatron.process_of_rank import Runtime, start_runtime, stop_runtime
from pipelines.megatron.run_state import RunState, checkpoint_folder, fixed_settings, training_settings
from pipelines.megatron.transformer_config import build_transformer_config, read_setup
from pipelines.progress import StepProgress, configure_logging
from pipelines.replay_contract import build_contract
from pipelines.resuming import (
    check_resumed,
    checkpoints_root,
    is_save_due,
    read_recording_place,
    read_resumed_state,
)
from pipelines.rollout.dumped import open_dumped_rollouts
from pipelines.rollout.plan import is_supervised, planned_requests
from pipelines.rollout.scheduler import AgenticRolloutScheduler
from pipelines.training import build_training

logger = logging.getLogger("pipelines.run")


class AgenticPipeline:
    """The run in this process's place of the layout: builds its parts, then trains step by step.

    Every rank must build one and run it. ``settings``: the determinism settings read back in this process.
    """

    def __init__(
        self,
        config: PipelineConfig,
        runtime: Runtime,
        tokenizer: Tokenizer,
        *,
        settings: Mapping[str, str],
        resumed: RunState | None,
    ) -> None:
        self._config = config
        self._runtime = runtime
        self._output_dir = Path(config.output_dir)
        self._is_resumed = resumed is not None
        self._first_step = resumed.next_step if resumed else 0
        self._tokenizer = tokenizer
        self._plan = planned_requests(config, first_step=self._first_step)
        self._ranks = TorchRankGroup(runtime.device)
        check_agreement(settings, self._ranks)
        self._ledger = Ledger()
        self._clock = Clock()
        self._batch_digests: dict[str, str] = {}
        setup = read_setup(build_transformer_config(config), model=config.model, environ=os.environ)
        facts = find_conflicts(setup)
        check_conflicts(facts, setup, allowed=config.parallel.allow_known_wrong)
        source = read_source(config.model, self._ranks)
        if resumed is not None:
            check_resumed(config, resumed, self._ranks, vocab_size=vocab_size_in_effect(config, tokenizer))
            check_source(Path(str(config.resume_from_checkpoint)), resumed.files, source)
        self._source = source
        self._training = build_training(
            config, runtime, tokenizer, ranks=self._ranks, clock=self._clock, is_resumed=self._is_resumed, source=source
        )
        self._dumped_rollouts = open_dumped_rollouts(
            config, self._plan, vocab_size=vocab_size_in_effect(config, tokenizer)
        )
        if runtime.is_writer:
            prepare_output_dir(self._output_dir, resume=self._is_resumed)
            for line in describe_correction(config.algorithm):
                logger.info("%s", line)
        self._scheduler = build_scheduler(
            config.rollout_mock,
            self._make_real,
            build_contract(config, tokenizer, settings, weights_digest=None if source is None else source.digest),
            ledger=self._ledger,
            plan=self._plan,
            is_writer=runtime.is_writer,
            provenance=self._provenance(settings) | {"facts": [fact.describe() for fact in facts]},
            resume=self._is_resumed,
            # A run that goes on is the same run: its recordings have one run id.
            run_id=resumed.recording.run_id if resumed is not None and resumed.recording is not None else None,
            max_row_tokens=config.sequence_length,
        )
        self._training.build(resumed)
        if resumed is not None:
            self._scheduler.load_state_dict(dict(resumed.scheduler))

    def _provenance(self, settings: Mapping[str, str]) -> dict[str, Any]:
        return {
            "settings": dict(settings),
            "node": read_node_values(os.environ),
            # Not where a tokenizer of text would be loaded for it alone.
            "vocabulary": list(self._tokenizer.display_texts) if can_show(self._config, self._tokenizer) else [],
        }

    def _make_real(self) -> AgenticRolloutScheduler | DumpedRollouts:
        """Returns the real scheduler; called by the proxy at its first use, and never in mock."""
        return self._dumped_rollouts or AgenticRolloutScheduler(
            self._config,
            self._training.policy,
            self._tokenizer,
            self._ledger,
            ranks=self._ranks,
            source=self._source,
        )

    def run(self) -> None:
        """All steps from the first to ``max_steps``, and the files that a run leaves."""
        config, is_writer = self._config, self._runtime.is_writer
        started_s = time.perf_counter()
        # Read anew: Megatron sets NVTE_* of its own (by attention_backend) when it builds a model.
        settings = read_back(os.environ)
        if is_writer:
            # Only now that nothing was refused: what an earlier run left stays whole until this one begins.
            (self._output_dir / RUN_FILE).unlink(missing_ok=True)
            remove_unfinished_files(self._output_dir)
            config_file = self._output_dir / CONFIG_FILE
            save_text(config_file, dump_config(config))
            mark_own(config_file)
            if self._is_resumed:
                self._training.make_way(self._first_step)
        use_tensorboard = config.track_with == "tensorboard"
        with (
            # Outermost: a step that fails still closes the real scheduler, and raises what could not be recorded.
            self._scheduler,
            MetricsWriter(
                self._output_dir,
                enabled=is_writer,
                tensorboard=use_tensorboard,
                resumed_at=self._first_step if self._is_resumed else None,
            ) as writer,
            StepProgress(config, first_step=self._first_step, enabled=is_writer) as progress,
        ):
            self._run_steps(writer, progress)
            self._training.finish()
        check_unchanged(settings, read_back(os.environ))
        self._add_other_ranks()
        if is_writer:
            self._finish(time.perf_counter() - started_s, settings)

    def _run_steps(self, writer: MetricsWriter, progress: StepProgress) -> None:
        metrics: dict[str, float] = {}
        for request in self._plan:
            if request.mode == "val":
                metrics = self._validate(request)
                progress.validated(request.global_step, metrics)
                continue
            metrics |= self._train(request)
            progress.trained(request.global_step, metrics)
            writer.write(request.global_step, metrics)
            metrics = {}
            self._save_if_due(request.global_step + 1, writer)
        if metrics:  # the validation after the last step
            writer.write(self._config.max_steps, metrics)

    def _get_batch(self, request: RolloutRequest) -> RolloutBatch:
        """Returns one batch of the scheduler, checked to be the same on every rank."""
        if not is_supervised(self._config, request):  # nothing is sampled
            self._scheduler.update_weights(request.policy_version)
        self._scheduler.resume()
        batch: RolloutBatch = self._scheduler.get_batch(request)
        self._scheduler.suspend()
        digest = batch.digest()
        check_agreement({f"{request.mode} batch of step {request.global_step}": digest}, self._ranks)
        if request.mode == "train":
            self._batch_digests[str(request.global_step)] = digest
        return batch

    def _validate(self, request: RolloutRequest) -> dict[str, float]:
        with self._clock.measure("validation"):
            batch = self._get_batch(request)
        metrics = compute_batch_metrics(batch) | compute_success_by_tag(batch) | compute_success_by_length(batch)
        return {f"val/{name}": value for name, value in metrics.items()}

    def _train(self, request: RolloutRequest) -> dict[str, float]:
        with self._clock.measure("rollout"):
            batch = self._get_batch(request)
        rollout_metrics = self._scheduler.collect_metrics()
        with self._clock.measure("train"):
            train_metrics = self._training.train_step(batch, step=request.global_step)
        if is_supervised(self._config, request):  # its rewards are those of given answers
            return train_metrics | rollout_metrics | self._clock.take()
        versions = compute_version_metrics(batch, request.policy_version)
        return compute_batch_metrics(batch) | versions | train_metrics | rollout_metrics | self._clock.take()

    def _save_if_due(self, next_step: int, writer: MetricsWriter) -> None:
        config = self._config
        if not is_save_due(config, next_step):
            return
        vocab_size = vocab_size_in_effect(config, self._tokenizer)
        scheduler = self._scheduler.state_dict()
        state = RunState(
            next_step=next_step,
            mode=config.rollout_mock.effective_mode,
            fixed=fixed_settings(config, vocab_size=vocab_size),
            scheduler=scheduler,
            learner=self._training.state_dict(),
            training=training_settings(config, vocab_size=vocab_size),
            recording=read_recording_place(config, next_step, last_mode=scheduler["mode"])
            if self._runtime.is_writer
            else None,
        )
        with self._clock.measure("checkpoint"):
            # A resumed run takes the metrics of earlier steps from the log, so they must be as safe as its weights.
            writer.sync()
            self._training.save(checkpoint_folder(checkpoints_root(config), next_step), state)
        self._scheduler.checkpoint_saved(next_step)

    def _add_other_ranks(self) -> None:
        """Adds the objects built on other ranks to the ledger's counts; the calls are the same on each rank."""
        built = self._ledger.as_dict()["built"]
        by_rank = [json.loads(counts) for counts in self._ranks.gather(json.dumps(built).encode())]
        for global_rank, counts in enumerate(by_rank):
            if global_rank != self._runtime.global_rank:
                for name, count in counts.items():
                    self._ledger.count("built", name, count)

    def _find_idle_vocabulary(self) -> list[str]:
        config = self._config
        idle = find_idle_vocabulary(
            self._tokenizer.action_ids if config.actor_infer.only_action_tokens else None,
            vocab_size_in_effect(config, self._tokenizer),
            multiple_of=config.model.make_vocab_size_divisible_by,
            tp_size=config.parallel.tensor_model_parallel_size,
        )
        return [f"tp{rank}" for rank in idle]

    def _finish(self, wall_s: float, settings: Mapping[str, str]) -> None:
        """Stores and prints all that the run did and skipped."""
        total = self._clock.total
        validation_s, train_s = total.get("validation", 0.0), total.get("train", 0.0)
        rollout_s = total.get("rollout", 0.0) + validation_s
        num_steps = self._config.max_steps - self._first_step
        steps = StatedSteps.of(self._config.trace, first=self._first_step, last=self._config.max_steps - 1)
        self._ledger.save(self._output_dir / LEDGER_FILE)
        save_json(
            self._output_dir / RUN_FILE,
            {
                "status": "completed",
                "mode": self._config.rollout_mock.effective_mode,
                "layout": self._training.layout,
                "world_size": self._training.world_size,
                "num_steps": num_steps,
                "steps": steps.as_json(),
                "precision": self._config.precision,
                "idle_vocabulary": self._find_idle_vocabulary(),
                "wall_s": wall_s,
                "rollout_s": rollout_s,
                "validation_s": validation_s,
                "train_s": train_s,
                "batches": self._batch_digests,
                "settings": dict(settings),
                "packages": {"python": platform.python_version(), **read_package_versions()},
            },
        )
        logger.info("\n%s", self._ledger.render())
        logger.info(
            "\n%d steps in %.1f s: rollout %.1f s (validation %.1f s of it), training %.1f s. Files in %s",
            num_steps,
            wall_s,
            rollout_s,
            validation_s,
            train_s,
            self._output_dir,
        )


def run_pipeline(config: PipelineConfig) -> None:
    """One run in this process's place of the layout. Every rank must call it, after its environment was applied.

    Raises:
        MockSchedulerError: of any kind, where the run cannot start or a step cannot be carried out.
    """
    apply_deterministic_mode(os.environ)
    is_deterministic = is_deterministic_mode(config.system_envs)
    settings = read_back(os.environ)
    check_took_effect(settings, deterministic=is_deterministic)
    check_trace_ranks(config.trace, config.parallel)
    tokenizer = build_tokenizer(config)
    check_environments(config, tokenizer)
    if config.samples and config.actor_infer.engine != "megatron":
        # No other run imports a client of servers.
        from pipelines.rollout.engines.access import check_engine

        check_engine(config, os.environ, vocab_size=vocab_size_in_effect(config, tokenizer))
    if config.samples and config.env_workers.type == "ray":
        # No other run imports Ray.
        from pipelines.environments.ray_cluster import check_cluster

        check_cluster(config, os.environ)
    resumed = read_resumed_state(config, vocab_size=vocab_size_in_effect(config, tokenizer))
    if config.model.hf_checkpoint is not None:
        find_weight_files(config.model)  # refuses its files where they are not this model's
    try:
        runtime = start_runtime(config.parallel, seed=config.seed)
        configure_logging(is_writer=runtime.is_writer)
        with use_ordered_reductions(config.order):
            AgenticPipeline(config, runtime, tokenizer, settings=settings, resumed=resumed).run()
        check_took_effect(read_back(os.environ), deterministic=is_deterministic)
    finally:
        stop_runtime()
