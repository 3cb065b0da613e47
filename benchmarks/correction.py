"""Rollout correction against verl's helper on the same tensors, and against a forward pass, side by side in one run.

A batch of 128 rows of 8,192 float32 log-probabilities: *filled*, every token a response token, and *ragged*, responses
of 40 to 100 % of a row, padded on the right. Log ratios are normal of deviation 0.02, and of deviation 1 for one token
in a thousand, so that every threshold is met. Both sides make weights, a mask and metrics: ours
``compute_correction`` and ``correction_metrics``, verl's ``compute_rollout_correction_and_rejection_mask``. They must
agree on weights and mask. Ours has metrics that verl's has not: quantiles, buckets, probabilities, raw and applied
weights, moments of float64.

Torch has one thread for each by default, as a process has whose launcher sets OMP_NUM_THREADS to 1 (torchrun, Ray).
With more, verl's operations are divided among them, and ours takes blocks of rows on as many.

Every round takes both in turn, in an order that is turned round from round to round, and one round is not counted.
Ratios are medians over the rounds of the quotient of two times of the same round. *CPU* is the processor time of all
threads, which a busy machine does not stretch as much; threads that wait for one another may count there in full.

Memory is what is resident beyond the inputs, at its largest in the first call of a fresh process (Linux: VmHWM, after
/proc/self/clear_refs); what a call on two rows loads is not counted.

The forward pass is of 8 pre-norm GPT layers of hidden size 1,024, causal attention and a 4,096 MLP, in float32, without
a vocabulary head, on rows of 1,024 tokens. Its time per token is less than that of any model in use: at 8,192 tokens
attention costs more, and the head and more layers come on top. The share is that of ours per response token in it.

verl is optional: benchmarks/verl_peer.py says how to install it. Without it ours alone is measured.

    python -m benchmarks.correction [--verl FOLDER] [--rounds 9] [--threads 1] [--json results.json]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.verl_peer import VerlHelper, load_verl_helper
from mock_scheduler.correction import CorrectionInputs, CorrectionResult, compute_correction, correction_metrics
from mock_scheduler.correction.config.section import RolloutCorrectionConfig
from mock_scheduler.support.arguments import ArgumentParser
from mock_scheduler.support.text import format_bytes

LARGEST_RATIO = 1.0
LARGEST_FORWARD_SHARE = 0.03

_GEOMETRIC = f"{1 / 1.001!r}_1.001"
#: verl's arguments, which are our keys as well. Its k1 bounds are those of 1/ratio; reciprocal ones mean the same.
CASES: dict[str, dict[str, Any]] = {
    "token TIS": {"rollout_is": "token", "rollout_is_threshold": 2.0},
    "sequence TIS": {"rollout_is": "sequence", "rollout_is_threshold": 2.0},
    "geometric RS": {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": _GEOMETRIC},
    "token TIS, geometric RS, veto": {
        "rollout_is": "token",
        "rollout_is_threshold": 2.0,
        "rollout_rs": "seq_mean_k1,seq_max_k2",
        "rollout_rs_threshold": f"{_GEOMETRIC},6.0",
    },
}
FILLS = ("ragged", "filled")

_HIDDEN, _LAYERS, _HEADS, _FORWARD_TOKENS = 1024, 8, 16, 1024
_SEED = 11

Route = Callable[[], object]


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """float32 ``[B, T]`` each."""

    train: torch.Tensor
    rollout: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """The medians of one case over the rounds; verl's are ``None`` where it is absent, peaks where they cannot be read.

    ns_per_token: of ours, per response token.
    """

    fill: str
    case: str
    ours_ms: float
    ns_per_token: float
    verl_ms: float | None
    ratio: float | None
    cpu_ratio: float | None
    ours_peak_bytes: int | None
    verl_peak_bytes: int | None


def make_batch(fill: str, *, rows: int, width: int) -> Batch:
    """The same one for the same arguments."""
    generator = torch.Generator().manual_seed(_SEED)
    rollout = torch.empty(rows, width).exponential_(1.0, generator=generator).neg_()
    is_wild = torch.rand(rows, width, generator=generator) < 1e-3
    deviation = torch.where(is_wild, 1.0, 0.02)
    train = rollout + deviation * torch.randn(rows, width, generator=generator)
    lengths = torch.full((rows,), width)
    if fill == "ragged":
        lengths = (width * (0.4 + 0.6 * torch.rand(rows, generator=generator))).long()
    return Batch(train=train, rollout=rollout, mask=(torch.arange(width) < lengths[:, None]).float())


def correct(batch: Batch, case: str) -> CorrectionResult:
    """Ours, with its metrics."""
    spec = RolloutCorrectionConfig.model_validate(CASES[case]).spec
    inputs = CorrectionInputs(train_logprobs=batch.train, rollout_logprobs=batch.rollout, response_mask=batch.mask)
    result = compute_correction(inputs, spec)
    correction_metrics(result.states, spec)
    return result


def check_agreement(batch: Batch, case: str, helper: VerlHelper) -> None:
    """Raises ``SystemExit`` where the two disagree; float32 sums may decide otherwise at a bound."""
    ours, (weights, mask, _) = correct(batch, case), helper(batch.train, batch.rollout, batch.mask, **CASES[case])
    num_rows = int((ours.mask != mask).any(dim=1).sum())
    if num_rows > 1:
        raise SystemExit(f"{case}: masks of {num_rows} rows differ")
    if ours.weights is not None:
        torch.testing.assert_close(ours.weights, weights.batch["rollout_is_weights"], rtol=1e-3, atol=1e-6)


def time_routes(routes: dict[str, Route], *, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Measures the seconds of each route in each round, elapsed and of the processor."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in routes}
    for number in range(rounds + 1):
        for name in list(routes) if number % 2 else list(reversed(routes)):
            started_s, cpu_started_s = time.perf_counter(), time.process_time()
            routes[name]()
            taken = time.perf_counter() - started_s, time.process_time() - cpu_started_s
            if number:
                times[name].append(taken)
    return times


def measure(fill: str, case: str, options: argparse.Namespace, helper: VerlHelper | None) -> Result:
    """One case, in this process and, for its memory, in one of its own for each side."""
    batch = make_batch(fill, rows=options.rows, width=options.width)
    routes: dict[str, Route] = {"ours": lambda: correct(batch, case)}
    if helper is not None:
        check_agreement(batch, case, helper)
        routes["verl"] = lambda: helper(batch.train, batch.rollout, batch.mask, **CASES[case])
    times = time_routes(routes, rounds=options.rounds)
    peaks = {name: read_peak(name, fill, case, options) for name in routes}
    ours_s = statistics.median(elapsed for elapsed, _ in times["ours"])
    pairs = list(zip(times["ours"], times["verl"], strict=True)) if helper is not None else []
    return Result(
        fill=fill,
        case=case,
        ours_ms=ours_s * 1e3,
        ns_per_token=ours_s * 1e9 / float(batch.mask.sum()),
        verl_ms=statistics.median(theirs[0] for _, theirs in pairs) * 1e3 if pairs else None,
        ratio=statistics.median(mine[0] / theirs[0] for mine, theirs in pairs) if pairs else None,
        cpu_ratio=statistics.median(mine[1] / theirs[1] for mine, theirs in pairs) if pairs else None,
        ours_peak_bytes=peaks["ours"],
        verl_peak_bytes=peaks.get("verl"),
    )


def read_peak(side: str, fill: str, case: str, options: argparse.Namespace) -> int | None:
    """Bytes beyond the inputs, in a process of its own; ``None`` where the system does not say."""
    command = [sys.executable, "-m", "benchmarks.correction", "--memory-of", side, fill, case]
    for name in ("rows", "width", "threads"):
        command += [f"--{name}", str(getattr(options, name))]
    command += ["--verl", str(options.verl)] if options.verl is not None else []
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1]
    return None if printed == "None" else int(printed)


def measure_peak(side: str, fill: str, case: str, options: argparse.Namespace) -> int | None:
    """Measures the peak in the process that ``read_peak`` starts."""
    helper = load_verl_helper(options.verl) if side == "verl" else None

    def call(batch: Batch) -> object:
        if helper is None:
            return correct(batch, case)
        return helper(batch.train, batch.rollout, batch.mask, **CASES[case])

    call(make_batch(fill, rows=2, width=64))
    batch = make_batch(fill, rows=options.rows, width=options.width)
    try:
        Path("/proc/self/clear_refs").write_text("5")
        before = _status_bytes("VmRSS")
    except OSError:
        return None
    # Held until its peak was read, as a caller holds it.
    result = call(batch)
    peak = _status_bytes("VmHWM") - before
    del result
    return peak


def _status_bytes(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{key}:")).split()[1]) * 1024


class GPTLayer(torch.nn.Module):
    """A pre-norm transformer layer."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = torch.nn.LayerNorm(_HIDDEN), torch.nn.LayerNorm(_HIDDEN)
        self.qkv, self.projection = torch.nn.Linear(_HIDDEN, 3 * _HIDDEN), torch.nn.Linear(_HIDDEN, _HIDDEN)
        self.mlp = torch.nn.Sequential(
            torch.nn.Linear(_HIDDEN, 4 * _HIDDEN), torch.nn.GELU(), torch.nn.Linear(4 * _HIDDEN, _HIDDEN)
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[B, T, H]`` to the same."""
        shape = (*hidden.shape[:2], 3, _HEADS, _HIDDEN // _HEADS)
        query, key, value = self.qkv(self.attention_norm(hidden)).view(shape).permute(2, 0, 3, 1, 4)
        mixed = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.projection(mixed.transpose(1, 2).flatten(2))
        return hidden + self.mlp(self.mlp_norm(hidden))


def forward_ns_per_token(rounds: int) -> float:
    """Of one row; the median over the rounds."""
    torch.manual_seed(_SEED)
    model = torch.nn.Sequential(*(GPTLayer() for _ in range(_LAYERS)))
    hidden = torch.randn(1, _FORWARD_TOKENS, _HIDDEN)
    with torch.no_grad():
        times = time_routes({"forward": lambda: model(hidden)}, rounds=rounds)["forward"]
    return statistics.median(elapsed for elapsed, _ in times) * 1e9 / _FORWARD_TOKENS


def print_results(console: Console, results: Sequence[Result], *, forward_ns: float, title: str) -> None:
    """A table for a person."""
    table = Table(title=title, title_justify="left")
    for heading in ("mask", "case", "ours", "verl", "ratio", "of CPU", "memory", "verl's", "forward"):
        table.add_column(heading, justify="left" if heading in ("mask", "case") else "right")
    for item in results:
        table.add_row(
            item.fill,
            item.case,
            f"{item.ours_ms:.0f} ms",
            _text(item.verl_ms, lambda value: f"{value:.0f} ms"),
            _text(item.ratio, lambda value: f"{value:.2f}"),
            _text(item.cpu_ratio, lambda value: f"{value:.2f}"),
            _text(item.ours_peak_bytes, lambda value: format_bytes(int(value))),
            _text(item.verl_peak_bytes, lambda value: format_bytes(int(value))),
            f"{item.ns_per_token / forward_ns:.3%}",
        )
    console.print(table)


def _text(value: float | None, form: Callable[[float], str]) -> str:
    return "-" if value is None else form(value)


def is_met(results: Sequence[Result], *, forward_ns: float) -> bool:
    """Says whether every bar is met: time and memory against verl where both were measured, and the share of a forward
    pass.
    """
    slow = any(item.ratio is not None and item.ratio > LARGEST_RATIO for item in results)
    large = any(
        item.verl_peak_bytes is not None
        and item.ours_peak_bytes is not None
        and item.ours_peak_bytes > item.verl_peak_bytes
        for item in results
    )
    dear = any(item.ns_per_token > LARGEST_FORWARD_SHARE * forward_ns for item in results)
    return not (slow or large or dear)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and return 0 where every bar is met, else 1."""
    parser = ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--verl", type=Path, default=None, help="the folder that verl 0.9.1 is installed in")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--width", type=int, default=8192)
    parser.add_argument("--threads", type=int, default=1, help="of torch, for both sides")
    parser.add_argument("--json", type=Path, default=None, help="also write the results to this file")
    parser.add_argument("--memory-of", nargs=3, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    # verl's and tensordict's on themselves.
    warnings.filterwarnings("ignore")
    torch.set_num_threads(options.threads)
    if options.memory_of is not None:
        print(measure_peak(*options.memory_of, options))
        return 0
    helper = None if options.verl is None else load_verl_helper(options.verl)
    forward_ns = forward_ns_per_token(options.rounds)
    load = os.getloadavg()[0]
    results = [measure(fill, case, options, helper) for fill in FILLS for case in CASES]
    title = (
        f"{options.rows} x {options.width}, {options.threads} of {os.cpu_count()} cores, {options.rounds} rounds, "
        f"load {load:.1f} to {os.getloadavg()[0]:.1f}"
    )
    console = Console()
    print_results(console, results, forward_ns=forward_ns, title=title)
    per_token = max(item.ns_per_token for item in results)
    fastest = 1e9 * LARGEST_FORWARD_SHARE / per_token
    console.print(f"forward: {forward_ns / 1e3:,.0f} us per token; ours: at most {per_token:.0f} ns")
    console.print(f"ours is {LARGEST_FORWARD_SHARE:.0%} of a forward pass of {fastest:,.0f} tokens per second")
    has_met = is_met(results, forward_ns=forward_ns)
    console.print("met" if has_met else "NOT met")
    if options.json is not None:
        content = {"forward_ns_per_token": forward_ns, "cases": [asdict(item) for item in results]}
        options.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return 0 if has_met else 1


if __name__ == "__main__":
    raise SystemExit(main())
