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
from mock_scheduler.layouts.rules import check_conflicts, find_conflicts
from mock_scheduler.megatron.ordered_collectives import use_ordered_reductions
from mock_scheduler.remote.protocol import encode_scores, metrics_as_json
from mock_scheduler.remote.service_file import published
from mock_scheduler.support.files import save_text
from mock_scheduler.support.run_files import METRICS_FILE, SERVICE_FILE
from mock_scheduler.support.run_output import Clock, MetricsWriter, prepare_output_dir
from mock_scheduler.trace.selection import check_trace_ranks
from pipelines.algorithm.training_values import needed_scores
from pipelines.config.schema import PipelineConfig
from pipelines.debug_dump.build import build_debug_dump
from pipelines.environments.registry import build_tokenizer, vocab_size_in_effect
from pipelines.megatron.hf_source import read_source
from pipelines.megatron.process_of_rank import Runtime, start_runtime, stop_runtime
from pipelines.megatron.transformer_config import build_transformer_config, read_setup
from pipelines.observation import StepObservation
from pipelines.progress import configure_logging
from pipelines.service.access import is_loopback
from pipelines.service.http_app import Answer, Call
from pipelines.service.http_front import Front, listening
from pipelines.service.order import OutOfOrderError, StepOrder, StepRequest
from pipelines.service.service import TrainingService

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
    check_trace_ranks(config.trace, config.parallel)
    tokenizer = build_tokenizer(config)
    runtime = start_runtime(config.parallel, seed=config.seed)
    try:
        configure_logging(is_writer=runtime.is_writer)
        ranks = TorchRankGroup(runtime.device)
        check_agreement(settings, ranks)
        setup = read_setup(build_transformer_config(config), model=config.model, environ=os.environ)
        check_conflicts(find_conflicts(setup), setup, allowed=config.parallel.allow_known_wrong)
        source = read_source(config.model, ranks)
        dump = build_debug_dump(config, os.environ, vocab_size=vocab_size_in_effect(config, tokenizer))
        observation = StepObservation(config, runtime, ranks, dump=dump, clock=Clock())
        with (
            use_ordered_reductions(config.order),
            _open_front(config) if runtime.is_writer else nullcontext() as front,
            TrainingService(config, runtime, tokenizer, observation=observation, source=source) as service,
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
    output_dir, own = Path(config.output_dir), config.training_service
    prepare_output_dir(output_dir, resume=False)
    if any(os.path.lexists(output_dir / name) for name in (_METRICS_FILE, SERVICE_FILE)):
        raise ConfigError(
            f"output_dir {output_dir} holds the metrics of another service, or its {SERVICE_FILE}; choose another "
            "output_dir, or remove the folder"
        )
    order: StepOrder[Answer] = StepOrder(max_steps=config.max_steps, score_names=needed_scores(config))
    with listening(own.host, own.port, order=order, max_body_bytes=config.max_request_bytes) as front:
        if not is_loopback(front.address):
            logger.warning(
                "the training service listens at %s (training_service.host), which other machines reach: nothing that "
                "it receives or answers is encrypted, and who reads along has its token and can train. Better is "
                "127.0.0.1 and a tunnel to it",
                front.url,
            )
        yield front


def _serve(service: TrainingService, front: Front, output_dir: Path) -> None:
    save_text(output_dir / "service_config.yaml", dump_config(service.config))
    with (
        MetricsWriter(output_dir, enabled=True, tensorboard=False, file_name=_METRICS_FILE) as writer,
        published(output_dir / SERVICE_FILE, url=front.url, token=front.token),
    ):
        logger.info("training service of %s listens at %s", service.config.exp_name, front.url)
        _answer_all(service, front, writer)
    logger.info("%d steps trained. Files in %s", service.next_step, output_dir)


def _answer_all(service: TrainingService, front: Front, writer: MetricsWriter) -> None:
    """Answer one call after another. An error after the ranks were told ends the service, since they may differ.

    Only a request that is carried out counts as one: refused ones keep no service alive.
    """
    timeout_s = service.config.training_service.timeout_s
    ranks, heard_s = _OtherRanks(service.runtime.device), time.monotonic()
    while True:
        call = _next_call(front, timeout_s=min(HEARTBEAT_S, timeout_s))
        if call is not None and call.operation == "finish":
            ranks.tell(Command(operation="stop"))
            call.answer(Answer.json({"steps": service.next_step}))
            return
        if call is not None:
            answer = _answer(service, front, ranks, call, writer)
            call.answer(answer)
            if answer.status == 200:
                heard_s = time.monotonic()  # the client is silent only after it has its answer
        if time.monotonic() - heard_s > timeout_s:
            ranks.tell(Command(operation="stop"))
            raise ServiceError(
                f"no request came for {timeout_s:g} s (training_service.timeout_s); {service.next_step} steps were "
                "trained"
            )
        ranks.keep_waiting()


def _next_call(front: Front, *, timeout_s: float) -> Call | None:
    try:
        return front.calls.get(timeout=timeout_s)
    except queue.Empty:
        return None


def _answer(service: TrainingService, front: Front, ranks: _OtherRanks, call: Call, writer: MetricsWriter) -> Answer:
    if call.request is None:
        return Answer.json(service.describe())
    try:
        # Another request may have been carried out since this one was admitted.
        known = front.order.admit(call.request)
        if known is not None:
            return known
        service.check(call.request, call.body)
    except OutOfOrderError as error:
        return Answer.json({"error": str(error)}, status=409)
    except MockSchedulerError as error:
        return Answer.json({"error": str(error)}, status=400)
    ranks.tell(Command(operation=call.request.operation, step=call.request.step, body=call.body))
    answer = _carry_out(service, call, call.request, writer)
    ranks.last_told_s = time.monotonic()
    front.order.record(call.request, answer)
    return answer


def _carry_out(service: TrainingService, call: Call, request: StepRequest, writer: MetricsWriter) -> Answer:
    try:
        if request.operation == "score":
            return Answer(status=200, body=encode_scores(service.score(request.step, call.body)))
        metrics = service.train(request.step, call.body)
    except Exception as error:
        call.answer(Answer.json({"error": f"the service ends: {error}"}, status=500))
        raise
    writer.write(request.step, metrics)
    logger.info("step %d trained", request.step + 1)
    return Answer.json({"step": request.step, "metrics": metrics_as_json(metrics)})


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """A command of rank 0 to all others. ``operation``: score, train, stop or idle; the rest is the request's."""

    operation: str
    step: int = 0
    body: bytes = b""


class _OtherRanks:
    """The waiting ranks, by the view of rank 0. ``last_told_s``: when they got, or had done, their last command."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.last_told_s = time.monotonic()

    def tell(self, command: Command) -> None:
        """Send a command."""
        send(command, device=self._device)
        self.last_told_s = time.monotonic()

    def keep_waiting(self) -> None:
        """Send an empty command where it is time for one."""
        if time.monotonic() - self.last_told_s >= HEARTBEAT_S:
            self.tell(Command(operation="idle"))


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
