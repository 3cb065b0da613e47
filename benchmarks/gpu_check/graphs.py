"""Captures parts of a training in CUDA graphs, and sees whether attach refuses, observes or misses them."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from benchmarks.attach import EXAMPLE, Trained
from benchmarks.gpu_check.context import CheckContext
from benchmarks.gpu_check.findings import FindingsLog
from mock_scheduler import megatron
from mock_scheduler.config.instruments import TRACE_KINDS, AttachedRun, TraceConfig
from mock_scheduler.errors import MockSchedulerError
from mock_scheduler.megatron.host_device import use_host_device
from mock_scheduler.support.run_files import ERROR_FILE

_PLAIN: dict[str, TraceConfig | None] = {"none": None}


def check(context: CheckContext) -> None:
    """Asks for graphs by each of Megatron's keys, then captures a layer before attach and behind it."""
    use_host_device()
    sys.path.insert(0, str(EXAMPLE))
    example = importlib.import_module("train")
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0", "LOCAL_RANK": "0"}
    sys.argv[1:] = ["--layers", "local"]
    args = example.parse_arguments()
    example.start_megatron(args)
    for key, value in {"enable_cuda_graph": True, "external_cuda_graph": True, "cuda_graph_impl": "local"}.items():
        ask_for_graphs(context.log, Trained(example, args, "none", context.folder, modes=_PLAIN), key, value)
    capture = _capture_first_norm if context.is_gpu else pretend_to_capture
    for moment in ("before attach", "behind attach"):
        trained = Trained(example, args, "none", context.folder, modes=_PLAIN)
        capture_layer(context.log, trained, context.folder / moment.split()[0], capture, moment=moment)
    replay_without_a_pass(context.log, Trained(example, args, "none", context.folder, modes=_PLAIN))
    if not context.is_gpu:
        context.log.not_run("a real capture", "CUDA graphs need a GPU; a pretended one was seen")
    dist.destroy_process_group()


def replay_without_a_pass(log: FindingsLog, trained: Trained) -> None:
    """Updates the parameters without a forward pass, as a training does that replays a whole captured step."""
    folder = trained.folder / "replayed"
    attach(trained, folder)
    trained.take_step()
    found = refusal_of(trained.optimizer.step, folder)
    log.hold(
        "a step that is replayed whole, so that no forward pass is called",
        is_held="forward pass" in found,
        found=found or "nothing was said",
        expected="refused, naming the forward pass",
    )


def ask_for_graphs(log: FindingsLog, trained: Trained, key: str, value: object) -> None:
    """Sets one of Megatron's keys in a built model's configuration, and attaches."""
    config: Any = trained.model[0].module.config
    with patch.object(config, key, value, create=True):
        found = refusal_of(lambda: attach(trained, trained.folder / key), trained.folder / key)
    hold_refused(log, f"{key}={value}", found)


def capture_layer(
    log: FindingsLog, trained: Trained, folder: Path, capture: Callable[[Trained], None], *, moment: str
) -> None:
    """Captures a module of the model; whoever attaches, or trains, must be told."""

    question = f"a module that is captured {moment} (make_graphed_callables)"

    def run() -> None:
        if moment == "before attach":
            capture(trained)
        attach(trained, folder)
        if moment == "behind attach":
            capture(trained)
        trained.take_step()

    try:
        found = refusal_of(run, folder)
    except (RuntimeError, AssertionError) as error:  # of torch, that could not capture
        log.hold(question, is_held=False, found=f"torch: {error}", expected="a refusal of attach")
    else:
        hold_refused(log, question, found)


def attach(trained: Trained, folder: Path) -> None:
    """Attaches with whole tensors of all kinds."""
    run = AttachedRun(output_dir=str(folder), trace=TraceConfig(level="full", kinds=[*TRACE_KINDS]))
    megatron.attach(trained.model, trained.optimizer, run=run)


def refusal_of(call: Callable[[], object], folder: Path) -> str:
    """Returns the text by which attach ended the training, of ``error.json``; empty where it went through."""
    try:
        call()
    except (MockSchedulerError, SystemExit) as error:
        path = folder / ERROR_FILE
        if not path.is_file():
            return str(error) or "it ended without a word"
        return str(json.loads(path.read_text(encoding="utf-8"))["message"])
    return ""


def hold_refused(log: FindingsLog, question: str, found: str) -> None:
    """Holds a capture to a refusal that names CUDA graphs."""
    log.hold(
        question,
        is_held="CUDA graph" in found,
        found=found or "nothing was said",
        expected="refused, naming CUDA graphs",
    )


def _capture_first_norm(trained: Trained) -> None:
    """Captures a norm: as small as a module can be whose output a trace shows."""
    norm = _first_norm(trained)
    sample = torch.randn(32, 2, norm.weight.numel(), device="cuda", requires_grad=True)
    torch.cuda.make_graphed_callables(norm, (sample,))


def pretend_to_capture(trained: Trained) -> None:
    """Puts a function of torch's module of graphs in a norm's ``forward``, where there is no GPU to capture on."""
    norm = _first_norm(trained)
    original = norm.forward

    def new_fwd(*arguments: object) -> object:
        return original(*arguments)

    new_fwd.__module__ = "torch.cuda.graphs"
    norm.forward = new_fwd


def _first_norm(trained: Trained) -> Any:  # noqa: ANN401 - a module of Megatron's
    return trained.model[0].module.decoder.layers[0].input_layernorm
