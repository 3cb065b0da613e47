"""What ``megatron.attach`` adds to the steps of a training that is not ours: nothing asked, sketches and whole tensors.

One process trains the example of ``docs/examples/own_megatron`` on the CPU: two layers of 1,024 hidden units in
float32, and a batch of few tokens for its parameters. A real step has 100 times as many, which makes it longer and
leaves the sketches of gradients and parameters as they are.

Every mode has a model of its own in the same process, since what is attached stays attached. Every round takes one step
of each, in an order that is turned round from round to round, and one round is not counted. Ratios are medians over the
rounds of the quotient of two steps of the same round; processor time is what to look at where other programs run
beside. Memory is the peak of a step above the memory before it (Linux alone), beyond the largest such peak where
nothing is traced.

- *none*: nothing is attached; twice, so that its ratio to itself shows what is noise;
- *nothing asked*: ``megatron.attach(model, optimizer)`` without a run file;
- *sketch*: the default kinds (initial, gradient, parameter, weight);
- *full*: whole tensors of the default kinds, in parts of 32 MB.

What *nothing asked* costs is too little for a stopwatch. So the benchmark looks whether anything is left in the model
and the optimizer, and times the two optional calls of a step on their own.

    python -m benchmarks.attach [--rounds 5] [--threads 1] [--hidden-size 1024] [--json results.json]
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from rich.console import Console
from rich.table import Table

from mock_scheduler import megatron
from mock_scheduler.config.instruments import AttachedRun, TraceConfig
from mock_scheduler.megatron.host_device import use_host_device
from mock_scheduler.support.arguments import ArgumentParser

EXAMPLE = Path(__file__).parents[1] / "docs" / "examples" / "own_megatron"
PART_BYTES = 32 << 20
MODES: dict[str, TraceConfig | None] = {
    "none": None,
    "none again": None,
    "nothing asked": None,
    "sketch": TraceConfig(level="sketch"),
    "full": TraceConfig(level="full", part_bytes=PART_BYTES),
}
LARGEST_SKETCH_RATIO = 1.10
LARGEST_OFF_SHARE = 5e-3

_NUM_TIMED_CALLS = 100_000
_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCost:
    """What one step took. peak_bytes: above the memory before it; 0 where the system does not say."""

    elapsed_ms: float
    cpu_ms: float
    peak_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """The medians of one mode over the rounds; ratios are to a step where nothing is attached."""

    mode: str
    step_ms: float
    ratio: float
    cpu_ratio: float
    extra_peak_bytes: int


def _memory(name: str) -> int:
    """Reads a line of the process's status, in bytes."""
    if not _STATUS.exists():
        return 0
    line = next(line for line in _STATUS.read_text(encoding="ascii").splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) << 10


def measure(work: Callable[[], None]) -> StepCost:
    """Runs and measures; the peak of memory is begun anew before."""
    if _CLEAR_REFS.exists():
        _CLEAR_REFS.write_text("5", encoding="ascii")
    before = _memory("VmRSS")
    started_s, cpu_started_s = time.perf_counter(), time.process_time()
    work()
    elapsed_s, cpu_s = time.perf_counter() - started_s, time.process_time() - cpu_started_s
    return StepCost(elapsed_ms=elapsed_s * 1e3, cpu_ms=cpu_s * 1e3, peak_bytes=max(0, _memory("VmHWM") - before))


class Trained:
    """One model of the example with its optimizer; ``attach`` was called where a mode of ``modes`` says so."""

    def __init__(
        self,
        example: Any,  # noqa: ANN401 - the example's module
        args: argparse.Namespace,
        mode: str,
        folder: Path,
        *,
        modes: Mapping[str, TraceConfig | None] = MODES,
    ) -> None:
        self._example, self._args = example, args
        config = example.build_config(args)
        self.model = example.build_model(args, config)
        dtypes = {"bf16": args.bf16, "params_dtype": config.params_dtype}
        adam = OptimizerConfig(optimizer="adam", lr=args.lr, clip_grad=1.0, **dtypes)
        self.optimizer: MegatronOptimizer = get_megatron_optimizer(adam, self.model)
        self.folder = folder / mode.replace(" ", "_")
        self._step = 0
        trace = modes[mode]
        if trace is not None:
            run = AttachedRun(output_dir=str(self.folder), trace=trace)
            megatron.attach(self.model, self.optimizer, run=run)
        elif mode == "nothing asked":
            megatron.attach(self.model, self.optimizer)

    def take_step(self) -> None:
        """Trains on the same rows in every step."""
        args = self._args
        rows = range(0, args.global_batch_size, args.micro_batch_size)
        batches = [self._example.make_batch(args, first) for first in rows]
        for chunk in self.model:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=partial(self._example.forward_step, args),
            data_iterator=iter(batches),
            model=self.model,
            num_microbatches=len(batches),
            seq_length=args.seq_length,
            micro_batch_size=args.micro_batch_size,
            forward_only=False,
        )
        self.optimizer.step()

    def forget(self) -> None:
        """Removes what the step wrote, so that the disk holds one step."""
        shutil.rmtree(self.folder / "trace", ignore_errors=True)

    def hooks(self) -> int:
        """Counts hooks of modules, and methods of the optimizer that are not its class's."""
        modules = [module for chunk in self.model for module in chunk.modules()]
        own = [name for name in vars(self.optimizer) if name == "step"]
        return len(own) + sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in modules)

    @property
    def largest_bytes(self) -> int:
        """Of its parameters, in the precision of the update."""
        return max(4 * parameter.numel() for chunk in self.model for parameter in chunk.parameters())


def measure_modes(trained: dict[str, Trained], rounds: int) -> list[Result]:
    """Every mode in every round, after one round that does not count."""
    steps: dict[str, list[StepCost]] = {mode: [] for mode in MODES}
    for number in range(rounds + 1):
        for mode in list(MODES) if number % 2 else list(reversed(MODES)):
            cost = measure(trained[mode].take_step)
            trained[mode].forget()
            if number:
                steps[mode].append(cost)
    without = steps["none"]
    # The allocator keeps what was freed, so peaks of equal steps differ; the largest of those without a trace counts.
    peaks = {mode: int(statistics.median(cost.peak_bytes for cost in taken)) for mode, taken in steps.items()}
    plain_peak = max(peak for mode, peak in peaks.items() if MODES[mode] is None)
    return [
        Result(
            mode=mode,
            step_ms=statistics.median(cost.elapsed_ms for cost in taken),
            ratio=statistics.median(a.elapsed_ms / b.elapsed_ms for a, b in zip(taken, without, strict=True)),
            cpu_ratio=statistics.median(a.cpu_ms / b.cpu_ms for a, b in zip(taken, without, strict=True)),
            extra_peak_bytes=peaks[mode] - plain_peak,
        )
        for mode, taken in steps.items()
    ]


def time_optional_calls() -> float:
    """Milliseconds of ``run.step`` and ``run.log`` of a step where nothing is asked."""
    handle = megatron.TrainingHandle()
    started_s = time.perf_counter()
    for number in range(_NUM_TIMED_CALLS):
        with handle.step(number):
            handle.log({})
    return (time.perf_counter() - started_s) * 1e3 / _NUM_TIMED_CALLS


def print_results(console: Console, results: Sequence[Result], *, title: str) -> None:
    """One line for each mode."""
    table = Table(title=title, title_justify="left")
    for heading in ("attached", "ms per step", "times a step without", "of processor time", "MB of memory beyond it"):
        table.add_column(heading, justify="right")
    for result in results:
        ratios = f"{result.ratio:.3f}", f"{result.cpu_ratio:.3f}"
        table.add_row(result.mode, f"{result.step_ms:,.0f}", *ratios, f"{result.extra_peak_bytes / 1e6:,.1f}")
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints, and returns 0 where the bars are met, else 1."""
    options = _parse(arguments)
    # Megatron's and torch's on themselves.
    warnings.filterwarnings("ignore")
    torch.set_num_threads(options.threads)
    use_host_device()
    sys.path.insert(0, str(EXAMPLE))
    example = importlib.import_module("train")
    with tempfile.TemporaryDirectory(prefix="attach-benchmark-") as folder:
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
        sizes = {"--hidden-size": options.hidden_size, "--seq-length": 256, "--num-layers": 2, "--vocab-size": 1024}
        sys.argv[1:] = [text for name, value in sizes.items() for text in (name, str(value))]
        args = example.parse_arguments()
        example.start_megatron(args)
        trained = {mode: Trained(example, args, mode, Path(folder)) for mode in MODES}
        results = measure_modes(trained, options.rounds)
        num_hooks = trained["nothing asked"].hooks() - trained["none"].hooks()
    dist.destroy_process_group()
    return _report(options, trained["none"], results, num_hooks)


def _report(options: argparse.Namespace, plain: Trained, results: list[Result], num_hooks: int) -> int:
    by_mode = {result.mode: result for result in results}
    calls_ms = time_optional_calls()
    off_share = calls_ms / by_mode["none"].step_ms
    largest = plain.largest_bytes
    num_parameters = sum(parameter.numel() for chunk in plain.model for parameter in chunk.parameters())
    console = Console()
    title = f"{num_parameters / 1e6:.1f} million parameters, hidden size {options.hidden_size}, {options.rounds} rounds"
    print_results(console, results, title=title)
    console.print(f"nothing asked: {num_hooks} hooks, {calls_ms:.4f} ms for step and log, {off_share:.4%} of a step")
    sketch, full = by_mode["sketch"], by_mode["full"]
    bars = [
        (f"nothing asked: {off_share:.4%} ≤ {LARGEST_OFF_SHARE:.1%}", off_share <= LARGEST_OFF_SHARE and not num_hooks),
        (f"sketch: {sketch.cpu_ratio:.3f} ≤ {LARGEST_SKETCH_RATIO}", sketch.cpu_ratio <= LARGEST_SKETCH_RATIO),
        _memory_bar(sketch, largest + PART_BYTES),
        # The part before may still be on its way to the disk.
        _memory_bar(full, largest + 2 * PART_BYTES),
    ]
    for text, is_met in bars:
        console.print(f"{text}: {'met' if is_met else 'NOT met'}")
    if options.json is not None:
        content = {"hooks": num_hooks, "off_ms": calls_ms, "modes": [asdict(result) for result in results]}
        options.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return 0 if all(is_met for _, is_met in bars) else 1


def _memory_bar(result: Result, most: int) -> tuple[str, bool]:
    text = f"{result.mode}: {result.extra_peak_bytes / 1e6:.1f} MB of memory ≤ {most / 1e6:.1f} MB"
    return text, result.extra_peak_bytes <= most


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = ArgumentParser(prog="benchmarks.attach", description="Steps of a training with attach and without")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--hidden-size", type=int, default=1024)
    parser.add_argument("--json", type=Path, default=None, help="also write the results to this file")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
