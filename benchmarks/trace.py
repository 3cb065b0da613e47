"""What a trace adds to a training step: off, sketches, whole tensors, and the ways of others, side by side in one run.

One process trains one learner on the CPU: 1 layer, 1,024 hidden units, 8 heads, a gated MLP of 4,096, 16.9 million
parameters in float32, on 16 rows of 128 tokens in four micro-batches, without padding. A step of more layers costs as
many times more as its trace does.

Every round takes one step in each mode, in an order that is turned round from round to round; all modes train on the
same batch, and one round is not counted. A round begins only if one as long as the longest so far would end within
``--minutes``; the first two always do. Ratios are medians over the rounds of the quotient of two steps of the same
round, and beside that of processor time stand the smallest and the largest. A step includes the opening and closing of
its trace, on the disk. Where other programs run beside, elapsed time says little; the bars are of processor time, which
is the same on one thread where nothing else runs, but for the writing of whole tensors in the background.

- *none*: the learner's own probe, which does nothing; twice, so that its ratio to itself shows what is noise;
- *sketch*, *full*: the default kinds (initial, gradient, parameter, weight);
- *sketch, all*, *full, all*: all kinds of tensors;
- *sketch, all and ledgers*: with every random draw and collective as well, for which Python runs at each operation;
- *hooks*, *vime*, *Megatron*: see ``trace_peers``;
- with ``--kinds``, in place of these: sketches of each kind; with ``--sketches``, the first ones alone.

What ``off`` costs is too little for a stopwatch: the empty calls of a step are counted, and timed on their own.

    python -m benchmarks.trace [--rounds 9] [--minutes 8] [--threads 1] [--kinds | --sketches] [--json results.json]
"""

from __future__ import annotations

import json
import math
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.layouts.cases import Case, build_config
from benchmarks.layouts.options import merge_changes
from benchmarks.layouts.training import NUM_ACTIONS, VOCAB_SIZE
from benchmarks.trace_peers import save_by_hooks, save_by_kind, save_gradients
from mock_scheduler.batch import RolloutBatch, SampleIdentity, SamplingParams, Termination, Trajectory
from mock_scheduler.config.instruments import LEDGER_KINDS, TRACE_KINDS, TraceConfig
from mock_scheduler.megatron.probe.interface import NO_PROBE, TrainingProbe
from mock_scheduler.megatron.probe.step_probe import StepProbe
from mock_scheduler.support.arguments import ArgumentParser
from mock_scheduler.support.text import count_of
from pipelines.config.schema import PipelineConfig
from pipelines.megatron.learner import Learner
from pipelines.megatron.process_of_rank import Runtime, start_runtime, stop_runtime

Mode = TraceConfig | Callable[[Path, Sequence[torch.nn.Module]], AbstractContextManager[None]] | None

MODES: dict[str, Mode] = {
    "none": None,
    "none again": None,
    "sketch": TraceConfig(level="sketch"),
    "sketch, all": TraceConfig(level="sketch", kinds=list(TRACE_KINDS)),
    "sketch, all and ledgers": TraceConfig(level="sketch", kinds=[*TRACE_KINDS, *LEDGER_KINDS]),
    "full": TraceConfig(level="full"),
    "full, all": TraceConfig(level="full", kinds=list(TRACE_KINDS)),
    "hooks": save_by_hooks,
    "vime": save_gradients,
    "Megatron": save_by_kind,
}
#: Those that this model has: no router, no weights beside the parameters, no recomputation.
_ABSENT_KINDS = ("router", "weight", "recomputed")
KIND_MODES: dict[str, Mode] = {
    "none": None,
    "none again": None,
    **{
        kind: TraceConfig(level="sketch", kinds=[kind])
        for kind in (*TRACE_KINDS, *LEDGER_KINDS)
        if kind not in _ABSENT_KINDS
    },
    "sketch, all": MODES["sketch, all"],
}
LARGEST_SKETCH_RATIO = 1.10
LARGEST_OFF_SHARE = 1e-3

_NUM_ROWS, _ROW_LENGTH, _PROMPT_LENGTH, _GROUP_SIZE = 16, 128, 32, 4
_SEED = 11
_NUM_TIMED_CALLS = 100_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """The medians of one mode over the rounds.

    ratio, cpu_ratio: to a step without a trace, of elapsed time and of the processor time of all threads.
    cpu_ratios: of each round.
    bytes_per_step: on the disk.
    """

    mode: str
    step_ms: float
    ratio: float
    cpu_ratio: float
    cpu_ratios: list[float]
    bytes_per_step: int


class CountingProbe(TrainingProbe):
    """Does nothing, and counts how often it is asked to."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __getattribute__(self, name: str) -> object:
        if hasattr(TrainingProbe, name) and not name.startswith("_"):
            self.num_calls += 1
        return super().__getattribute__(name)


def build_large_config() -> PipelineConfig:
    """Builds the configuration of the measured run."""
    config = build_config(Case(model="dense", precision="float32", option="one-update"))
    changes = {
        "sequence_length": _ROW_LENGTH,
        "model": {"num_layers": 1, "hidden_size": 1024, "num_query_groups": 8, "ffn_hidden_size": 4096},
        "training": {"micro_batch_size": 4},
    }
    return PipelineConfig.model_validate(merge_changes(config.model_dump(), [changes]))


def build_batch() -> RolloutBatch:
    """Makes rows of equal length, of random tokens."""
    generator = torch.Generator().manual_seed(_SEED)
    num_responses = _ROW_LENGTH - _PROMPT_LENGTH
    rows = [
        Trajectory(
            identity=SampleIdentity(
                scheduler_id="default", group_id=row // _GROUP_SIZE, episode_id=0, env_id=row, turn=0
            ),
            tokens=torch.randint(2, 2 + NUM_ACTIONS, (_ROW_LENGTH,), generator=generator, dtype=torch.int32),
            response_mask=torch.arange(_ROW_LENGTH) >= _PROMPT_LENGTH,
            rollout_logprobs=torch.full((num_responses,), -math.log(NUM_ACTIONS)),
            turn_rewards=torch.tensor([float(row % 2)]),
            policy_versions=torch.zeros(1, dtype=torch.int32),
            termination=Termination.TERMINATED,
            prompt_length=_PROMPT_LENGTH,
            tag="random",
        )
        for row in range(_NUM_ROWS)
    ]
    sampling = SamplingParams(temperature=1.0, top_p=1.0, top_k=0, logprobs_mode="processed")
    return RolloutBatch.from_trajectories(rows, sampling=sampling, group_size=_GROUP_SIZE)


class Benchmark:
    """One learner, the batch that it trains on again and again, and a folder for its traces."""

    def __init__(self, runtime: Runtime, folder: Path, config: PipelineConfig) -> None:
        self.runtime = runtime
        self.folder = folder
        self.learner = Learner(config, runtime, vocab_size=VOCAB_SIZE, allowed_tokens=list(range(2, 2 + NUM_ACTIONS)))
        self.batch: RolloutBatch = build_batch()

    @property
    def num_parameters(self) -> int:
        """Of the policy."""
        return sum(local.parameter.numel() for local in self.learner.policy.policy.parameters())

    def take_step(self, mode: Mode, *, keep: bool = False) -> tuple[float, float, int]:
        """Takes one step; returns its milliseconds, the processor's, and the bytes that it wrote.

        keep: leave what was written in the folder.
        """
        self.folder.mkdir(parents=True)
        started_s, cpu_started_s = time.perf_counter(), time.process_time()
        if isinstance(mode, TraceConfig):
            with StepProbe(self.runtime, self.folder, step=0, config=mode) as probe:
                self.learner.train_step(self.batch, probe=probe)
        else:
            chunks = self.learner.policy.policy.observed.chunks
            with nullcontext() if mode is None else mode(self.folder, chunks):
                self.learner.train_step(self.batch)
        step_ms, cpu_ms = (time.perf_counter() - started_s) * 1e3, (time.process_time() - cpu_started_s) * 1e3
        num_bytes = sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())
        if not keep:
            shutil.rmtree(self.folder)
        return step_ms, cpu_ms, num_bytes

    def measure(self, modes: Mapping[str, Mode], rounds: int, *, limit_s: float) -> list[Result]:
        """Takes every mode in every round, after one round that does not count, for about so many seconds at most."""
        steps: dict[str, list[tuple[float, float, int]]] = {mode: [] for mode in modes}
        ends_s, longest_s = time.monotonic() + limit_s, 0.0
        for number in range(rounds + 1):
            started_s = time.monotonic()
            if number > 1 and started_s + longest_s > ends_s:
                break
            for mode in list(modes) if number % 2 else list(reversed(modes)):
                taken = self.take_step(modes[mode])
                if number:
                    steps[mode].append(taken)
            longest_s = max(longest_s, time.monotonic() - started_s)
        return [_result(mode, taken, steps["none"]) for mode, taken in steps.items()]

    def off_cost(self) -> tuple[int, float]:
        """Counts the calls of a step to a probe that does nothing, and the milliseconds they take together."""
        counting = CountingProbe()
        self.learner.train_step(self.batch, probe=counting)
        started_s = time.perf_counter()
        for _ in range(_NUM_TIMED_CALLS):
            with NO_PROBE.computing(None):  # type: ignore[arg-type]  # of all calls the one that costs most
                pass
        per_call_ms = (time.perf_counter() - started_s) * 1e3 / _NUM_TIMED_CALLS
        return counting.num_calls, counting.num_calls * per_call_ms


def _result(
    mode: str, taken: Sequence[tuple[float, float, int]], without: Sequence[tuple[float, float, int]]
) -> Result:
    ratios = [(mine[0] / other[0], mine[1] / other[1]) for mine, other in zip(taken, without, strict=True)]
    return Result(
        mode=mode,
        step_ms=statistics.median(elapsed for elapsed, _, _ in taken),
        ratio=statistics.median(elapsed for elapsed, _ in ratios),
        cpu_ratio=statistics.median(cpu for _, cpu in ratios),
        cpu_ratios=[cpu for _, cpu in ratios],
        bytes_per_step=taken[-1][2],
    )


def print_results(console: Console, results: Sequence[Result], *, title: str) -> None:
    """One line for each mode."""
    table = Table(title=title, title_justify="left")
    for heading in ("trace", "ms per step", "times a step without", "of processor time", "each round", "MB per step"):
        table.add_column(heading, justify="right")
    for result in results:
        lowest, highest = min(result.cpu_ratios), max(result.cpu_ratios)
        ratios = f"{result.ratio:.3f}", f"{result.cpu_ratio:.3f}", f"{lowest:.3f} to {highest:.3f}"
        table.add_row(result.mode, f"{result.step_ms:,.0f}", *ratios, f"{result.bytes_per_step / 1e6:,.3f}")
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and return 0 where both bars are met, else 1."""
    parser = ArgumentParser(prog="benchmarks.trace", description="Training steps with and without a trace")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--minutes", type=float, default=8.0, help="no round begins that would end later")
    parser.add_argument("--threads", type=int, default=1)
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--kinds", action="store_true", help="sketches of each kind by itself")
    chosen.add_argument("--sketches", action="store_true", help="no whole tensors, and no ways of others")
    parser.add_argument("--json", type=Path, default=None, help="also write the results to this file")
    options = parser.parse_args(arguments)
    # Megatron's and torch's on themselves; see pipelines/agentic.py.
    warnings.filterwarnings("ignore")
    torch.set_num_threads(options.threads)
    config = build_large_config()
    runtime = start_runtime(config.parallel, seed=_SEED)
    with tempfile.TemporaryDirectory(prefix="trace-benchmark-") as folder:
        benchmark = Benchmark(runtime, Path(folder) / "trace", config)
        num_calls, off_ms = benchmark.off_cost()
        modes = KIND_MODES if options.kinds else MODES
        if options.sketches:
            modes = {name: mode for name, mode in MODES.items() if name.startswith(("none", "sketch"))}
        results = benchmark.measure(modes, options.rounds, limit_s=options.minutes * 60)
    stop_runtime()
    by_mode = {result.mode: result for result in results}
    off_share = off_ms / by_mode["none"].step_ms
    num_tokens = int(benchmark.batch.lengths.sum())
    size = f"{benchmark.num_parameters / 1e6:.1f} million parameters, {num_tokens:,} tokens"
    num_rounds = len(by_mode["none"].cpu_ratios)
    title = f"{size}, {count_of(options.threads, 'thread')}, {count_of(num_rounds, 'round')}"
    console = Console(width=120)
    print_results(console, results, title=title)
    console.print(f"off: {num_calls} empty calls in a step, {off_ms:.3f} ms, {off_share:.4%} of it")
    sketch = by_mode["sketch, all"].cpu_ratio
    is_met = sketch <= LARGEST_SKETCH_RATIO and off_share <= LARGEST_OFF_SHARE
    console.print(
        f"bars: sketch, all {sketch:.3f} ≤ {LARGEST_SKETCH_RATIO}, off {off_share:.4%} ≤ {LARGEST_OFF_SHARE:.1%}"
    )
    console.print("met" if is_met else "NOT met")
    if options.json is not None:
        content = {"off_calls": num_calls, "off_ms": off_ms, "modes": [asdict(result) for result in results]}
        options.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return 0 if is_met else 1


if __name__ == "__main__":
    raise SystemExit(main())
