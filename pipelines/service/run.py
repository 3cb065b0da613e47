"""Runs a training service: rank 0 answers requests until the client has finished, the others do as it tells them.

Contract: every rank is either in ``listen`` or carries out the same command. Rank 0 sends an empty command at least
every ``HEARTBEAT_S`` seconds, so no collective of the waiting ranks runs into its timeout.
"""

from __future__ import annotations

import logging
import os
import queue
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from mock_scheduler.config.loading import dump_config
from mock_scheduler.determinism.agreement import TorchRankGroup, check_agreement
from mock_scheduler.determinism.guard import apply_deterministic_mode, check_took_effect, read_back
from mock_scheduler.determinism.settings import is_deterministic_mode
from mock_scheduler.errors import ConfigError, MockSchedulerError, ServiceError
from mock_scheduler.megatron.rules import check_conflicts, find_conflicts
from mock_scheduler.remote import encode_scores, metrics_as_json
from mock_scheduler.support.files import save_json, save_text
from mock_scheduler.support.run_files import METRICS_FILE
from pipelines.config.schema import PipelineConfig
from pipelines.debug_dump.build import build_debug_dump
from pipelines.environments.registry import build_tokenizer, vocab_size_in_effect
from pipelines.megatron.process.ordered_collectives import use_ordered_reductions
from pipelines.megatron.process.runtime import Runtime, start_runtime, stop_runtime
from pipelines.megatron.transformer_config import build_transformer_config, read_setup
from pipelines.observation import StepObservation, check_trace_ranks
from pipelines.progress import configure_logging
from pipelines.service.http_front import Answer, Call, Front, listening
from pipelines.service.service import OutOfOrderError, TrainingService
from pipelines.tracking import Clock, MetricsWriter, prepare_output_dir

SERVICE_FILE = "service.json"
_METRICS_FILE = f"service_{METRICS_FILE}"
HEARTBEAT_S = 20.0
_IDLE, _SCORE, _TRAIN, _STOP = range(4)
_CODES = {"score": _SCORE, "train": _TRAIN, "stop": _STOP, "idle": _IDLE}
_NAMES = {code: name for name, code in _CODES.items()}
logger = logging.getLogger("pipelines.service")


def run_service(config: PipelineConfig) -> None:
    """Serve until the client has finished. Every rank calls it, with its environment applied.

    Raises:
        MockSchedulerError: the service cannot start, or no request came for ``training_service.timeout_s``.
    """
    apply_deterministic_mode(os.environ)
    settings = read_back(os.environ)
    check_took_effect(settings, deterministic=is_deterministic_mode(config.system_envs))
    check_trace_ranks(config)
    tokenizer = build_tokenizer(config)
    runtime = start_runtime(config.parallel, seed=config.seed)
    try:
        configure_logging(is_writer=runtime.is_writer)
        ranks = TorchRankGroup(runtime.device)
        check_agreement(settings, ranks)
        setup = read_setup(build_transformer_config(config), model=config.model, environ=os.environ)
        check_conflicts(find_conflicts(setup), setup, allowed=config.parallel.allow_known_wrong)
        dump = build_debug_dump(config, os.environ, vocab_size=vocab_size_in_effect(config, tokenizer))
        observation = StepObservation(config, runtime, ranks, dump=dump, clock=Clock())
        with (
            use_ordered_reductions(config.order),
            _open_front(config) if runtime.is_writer else nullcontext() as front,
            TrainingService(config, runtime, tokenizer, observation=observation) as service,
        ):
            if front is not None:
                _serve(service, front, Path(config.output_dir))
            else:
                _follow(service, runtime)
    finally:
        stop_runtime()


def _follow(service: TrainingService, runtime: Runtime) -> None:
    """Carry out the commands of rank 0."""
    for command in listen(device=runtime.device):
        if command.operation == "score":
            service.score(command.step, command.body)
        else:
            service.train(command.step, command.body)


@contextmanager
def _open_front(config: PipelineConfig) -> Iterator[Front]:
    """Listen, and make the output folder, before a model is built: requests wait until it is."""
    output_dir = Path(config.output_dir)
    prepare_output_dir(output_dir, resume=False)
    if (output_dir / _METRICS_FILE).exists():
        raise ConfigError(
            f"output_dir {output_dir} holds the metrics of another service; choose another output_dir, or remove the "
            "folder"
        )
    with listening(config.training_service.host, config.training_service.port) as front:
        yield front


def _serve(service: TrainingService, front: Front, output_dir: Path) -> None:
    save_text(output_dir / "service_config.yaml", dump_config(service.config))
    with MetricsWriter(output_dir, enabled=True, tensorboard=False, file_name=_METRICS_FILE) as writer:
        save_json(output_dir / SERVICE_FILE, {"url": front.url, "process_id": os.getpid()})
        logger.info("training service of %s listens at %s", service.config.exp_name, front.url)
        try:
            _answer_all(service, front, writer)
        finally:
            (output_dir / SERVICE_FILE).unlink(missing_ok=True)
    logger.info("%d steps trained. Files in %s", service.next_step, output_dir)


def _answer_all(service: TrainingService, front: Front, writer: MetricsWriter) -> None:
    """Answer one call after another. An error after the ranks were told ends the service, since they may differ."""
    device, timeout_s = service.runtime.device, service.config.training_service.timeout_s
    heard_s = time.monotonic()
    while True:
        try:
            call = front.calls.get(timeout=min(HEARTBEAT_S, timeout_s))
        except queue.Empty:
            if time.monotonic() - heard_s > timeout_s:
                send(Command(operation="stop"), device=device)
                raise ServiceError(
                    f"no request came for {timeout_s:g} s (training_service.timeout_s); {service.next_step} steps were "
                    "trained"
                ) from None
            send(Command(operation="idle"), device=device)
            continue
        if call.operation == "finish":
            send(Command(operation="stop"), device=device)
            call.answer(Answer.json({"steps": service.next_step}))
            return
        call.answer(_refusal(service, call) or _carry_out(service, call, writer))
        heard_s = time.monotonic()  # the client is silent only after it has its answer


def _refusal(service: TrainingService, call: Call) -> Answer | None:
    """Answer a request that concerns no rank; ``None`` for one to carry out."""
    if call.operation == "service":
        return Answer.json(service.describe())
    try:
        service.check("train" if call.operation == "train" else "score", call.step, call.body)
    except OutOfOrderError as error:
        return Answer.json({"error": str(error)}, status=409)
    except MockSchedulerError as error:
        return Answer.json({"error": str(error)}, status=400)
    return None


def _carry_out(service: TrainingService, call: Call, writer: MetricsWriter) -> Answer:
    send(Command(operation=call.operation, step=call.step, body=call.body), device=service.runtime.device)
    try:
        if call.operation == "score":
            return Answer(status=200, body=encode_scores(service.score(call.step, call.body)))
        metrics = service.train(call.step, call.body)
    except Exception as error:
        call.answer(Answer.json({"error": f"the service ends: {error}"}, status=500))
        raise
    writer.write(call.step, metrics)
    logger.info("step %d trained", call.step + 1)
    return Answer.json({"metrics": metrics_as_json(metrics)})


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """A command of rank 0 to all others. ``operation``: score, train, stop or idle; the rest is the request's."""

    operation: str
    step: int = 0
    body: bytes = b""


def send(command: Command, *, device: torch.device) -> None:
    """Tell every other rank; only rank 0 calls it."""
    if dist.get_world_size() == 1:
        return
    numbers = [_CODES[command.operation], command.step, len(command.body)]
    dist.broadcast(torch.tensor(numbers, dtype=torch.int64, device=device), src=0)
    if command.body:
        dist.broadcast(torch.frombuffer(bytearray(command.body), dtype=torch.uint8).to(device), src=0)


def listen(*, device: torch.device) -> Iterator[Command]:
    """Yield the commands of rank 0 until it stops; every other rank iterates over them."""
    while True:
        numbers = torch.zeros(3, dtype=torch.int64, device=device)
        dist.broadcast(numbers, src=0)
        code, step, size = numbers.tolist()
        body = torch.empty(size, dtype=torch.uint8, device=device)
        if size:
            dist.broadcast(body, src=0)
        if code == _STOP:
            return
        if code != _IDLE:
            yield Command(operation=_NAMES[code], step=step, body=body.cpu().numpy().tobytes())
