"""Measures the check that all ranks hold the same settings, where they do and where one rank differs.

Two measurements, each with the settings that this machine reads back:

- real processes over gloo: time, words handed to reductions, and bytes that the process wrote to its sockets;
- simulated ranks, up to 8192 in this process, each running the real rounds over a recursive-doubling all-reduce that
  moves the words pair by pair and counts every message: a rank's traffic must not grow with the number of ranks beyond
  the log2(N) messages of fixed size of any all-reduce.

Run: ``python -m benchmarks.agreement [--json FILE] [--processes 2,4,8] [--ranks 8,64,...]``. No GPU, no network.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from mock_scheduler.determinism.agreement import TorchRankGroup, check_agreement
from mock_scheduler.determinism.agreement_rounds import Op, Reduction, Words, agreement_rounds
from mock_scheduler.determinism.guard import read_back
from mock_scheduler.errors import RankDisagreementError
from mock_scheduler.launch.process_group import stay_on_this_machine
from mock_scheduler.support.arguments import ArgumentParser

WORD_BYTES = 8
PLANTED_SHARE = 2777 / 4096  # where the rank that differs stands among all
Array = npt.NDArray[np.int64]


@dataclass(kw_only=True, slots=True)
class Traffic:
    """The traffic of each simulated rank: one number per rank."""

    messages: Array
    sent_bytes: Array
    num_reductions: int = 0

    @classmethod
    def of(cls, world_size: int) -> Traffic:
        """Nothing sent yet."""
        return cls(messages=np.zeros(world_size, np.int64), sent_bytes=np.zeros(world_size, np.int64))

    def send(self, senders: Array, num_words: int) -> None:
        """One message of each sender."""
        self.messages[senders] += 1
        self.sent_bytes[senders] += num_words * WORD_BYTES


_COMBINE: dict[Op, Callable[[Array, Array], Array]] = {Op.MIN: np.minimum, Op.SUM: np.add}


def all_reduce(rows: Array, op: Op, traffic: Traffic) -> Array:
    """Reduces ``rows`` [ranks, words] by recursive doubling: each rank's result, computed from the words it received.

    In step k every rank exchanges its words with the one whose number differs in bit k. Ranks beyond the largest power
    of two hand theirs to a partner first and get the result back.
    """
    combine, num_words = _COMBINE[op], rows.shape[1]
    world_size = len(rows)
    core = 1 << (world_size.bit_length() - 1)
    extra = np.arange(core, world_size)
    held = rows.copy()
    traffic.num_reductions += 1
    if len(extra):
        traffic.send(extra, num_words)
        held[extra - core] = combine(held[extra - core], held[extra])
    ranks = np.arange(core)
    for bit in range(core.bit_length() - 1):
        traffic.send(ranks, num_words)
        held[:core] = combine(held[:core], held[ranks ^ (1 << bit)])
    if len(extra):
        traffic.send(extra - core, num_words)
        held[extra] = held[extra - core]
    return held


def simulate(values: Sequence[Mapping[str, str]]) -> tuple[list[str], Traffic]:
    """Runs the rounds of every rank in step; returns the lines, the same on all ranks, and the traffic.

    Raises:
        RuntimeError: ranks that ask for different reductions, or end with different lines; in a real run, a hang.
    """
    world_size = len(values)
    traffic = Traffic.of(world_size)
    ranks = [
        agreement_rounds(own, global_rank=global_rank, world_size=world_size) for global_rank, own in enumerate(values)
    ]
    reductions = [next(rounds) for rounds in ranks]
    while True:
        shapes = {(reduction.op, len(reduction.words)) for reduction in reductions}
        if len(shapes) != 1:
            raise RuntimeError(f"ranks ask for different reductions: {sorted(str(shape) for shape in shapes)}")
        rows = np.array([reduction.words for reduction in reductions], dtype=np.int64)
        answers = all_reduce(rows, reductions[0].op, traffic)
        reductions, results = [], []
        for rounds, answer in zip(ranks, answers.tolist(), strict=True):
            try:
                reductions.append(rounds.send(answer))
            except StopIteration as finished:
                results.append(finished.value)
        if results:
            if reductions or any(lines != results[0] for lines in results):
                raise RuntimeError("ranks end at different times or with different answers")
            return results[0], traffic


def planted(values: Mapping[str, str], world_size: int) -> tuple[list[Mapping[str, str]], int]:
    """Puts ``values`` on every rank but one, where ``NCCL_ALGO`` is Tree; also returns this rank."""
    by_rank: list[Mapping[str, str]] = [values] * world_size
    global_rank = int(world_size * PLANTED_SHARE)
    by_rank[global_rank] = {**values, "NCCL_ALGO": "Tree"}
    return by_rank, global_rank


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedCost:
    """The busiest rank's traffic; ``gathered_bytes``: its traffic if every rank's values were gathered."""

    world_size: int
    is_agreeing: bool
    num_reductions: int
    messages: int
    sent_bytes: int
    gathered_bytes: int
    line: str


def measure_simulated(values: Mapping[str, str], world_size: int) -> list[SimulatedCost]:
    """The agreeing and the disagreeing case."""
    size = len(json.dumps(dict(values)).encode())
    costs = []
    for by_rank in ([values] * world_size, planted(values, world_size)[0]):
        lines, traffic = simulate(by_rank)
        costs.append(
            SimulatedCost(
                world_size=world_size,
                is_agreeing=not lines,
                num_reductions=traffic.num_reductions,
                messages=int(traffic.messages.max()),
                sent_bytes=int(traffic.sent_bytes.max()),
                gathered_bytes=size * (world_size - 1),
                line="; ".join(lines),
            )
        )
    return costs


class CountingGroup(TorchRankGroup):
    """All ranks, and how much this one handed to reductions."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.num_reductions = 0
        self.reduced_bytes = 0

    def reduce(self, reduction: Reduction) -> Words:
        """As ``TorchRankGroup``, and counted."""
        self.num_reductions += 1
        self.reduced_bytes += len(reduction.words) * WORD_BYTES
        return super().reduce(reduction)


@dataclass(frozen=True, kw_only=True, slots=True)
class RealCost:
    """The cost of one check on the busiest rank; ``socket_bytes``: written by the process, ``None`` where unknown."""

    world_size: int
    is_agreeing: bool
    num_reductions: int
    reduced_bytes: int
    socket_bytes: int | None
    median_ms: float


def _written_bytes() -> int | None:
    path = Path("/proc/self/io")
    if not path.is_file():
        return None
    counters = dict(line.split(": ") for line in path.read_text().splitlines())
    return int(counters["wchar"])


def _check(values: Mapping[str, str], group: CountingGroup) -> None:
    try:
        check_agreement(values, group)
    except RankDisagreementError:
        return


def _measure_on_rank(global_rank: int, world_size: int, folder: str, repeats: int) -> None:
    stay_on_this_machine(os.environ)
    dist.init_process_group(
        "gloo", store=dist.FileStore(f"{folder}/store", world_size), rank=global_rank, world_size=world_size
    )
    agreed = {name: value for name, value in read_back({}).items() if not name.startswith("python.")}
    by_rank, _ = planted(agreed, world_size)
    costs = []
    for values in (agreed, by_rank[global_rank]):
        group = CountingGroup()
        _check(values, group)  # gloo connects at the first collective
        group.num_reductions = group.reduced_bytes = 0
        before, times_ms = _written_bytes(), []
        for _ in range(repeats):
            start_s = time.perf_counter()
            _check(values, group)
            times_ms.append((time.perf_counter() - start_s) * 1e3)
        after = _written_bytes()
        costs.append(
            RealCost(
                world_size=world_size,
                is_agreeing=not costs,
                num_reductions=group.num_reductions // repeats,
                reduced_bytes=group.reduced_bytes // repeats,
                socket_bytes=None if before is None or after is None else (after - before) // repeats,
                median_ms=statistics.median(times_ms),
            )
        )
    Path(folder, f"rank{global_rank}.json").write_text(json.dumps([asdict(cost) for cost in costs]))
    dist.destroy_process_group()


def measure_real(world_size: int, *, repeats: int) -> list[RealCost]:
    """Start ``world_size`` gloo processes; of each case the busiest rank's cost."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_measure_on_rank, args=(world_size, folder, repeats), nprocs=world_size)
        by_rank = [json.loads(Path(folder, f"rank{global_rank}.json").read_text()) for global_rank in range(world_size)]
    cases = [[RealCost(**costs[case]) for costs in by_rank] for case in range(2)]
    return [max(costs, key=lambda cost: (cost.socket_bytes or 0, cost.median_ms)) for costs in cases]


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


def _print_real(costs: Sequence[RealCost]) -> None:
    print("gloo, one check, busiest rank")
    print(f"{'processes':>9} {'case':>9} {'reductions':>10} {'reduced B':>9} {'socket B':>9} {'median ms':>9}")
    for cost in costs:
        case = "agree" if cost.is_agreeing else "differ"
        socket = "unknown" if cost.socket_bytes is None else cost.socket_bytes
        print(
            f"{cost.world_size:>9} {case:>9} {cost.num_reductions:>10} {cost.reduced_bytes:>9} {socket:>9} "
            f"{cost.median_ms:>9.2f}"
        )


def _print_simulated(costs: Sequence[SimulatedCost]) -> None:
    print("\nsimulated recursive doubling, one check, busiest rank")
    print(
        f"{'ranks':>6} {'case':>7} {'reductions':>10} {'messages':>8} {'sent B':>8} {'B / log2 N':>10} {'gather B':>10}"
    )
    for cost in costs:
        steps = (cost.world_size - 1).bit_length()
        case = "agree" if cost.is_agreeing else "differ"
        print(
            f"{cost.world_size:>6} {case:>7} {cost.num_reductions:>10} {cost.messages:>8} {cost.sent_bytes:>8} "
            f"{cost.sent_bytes / steps:>10.1f} {cost.gathered_bytes:>10}"
        )
    print(costs[-1].line)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print both tables and, with ``--json``, write them."""
    parser = ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--processes", type=_numbers, default=[2, 4, 8], help="real gloo processes")
    parser.add_argument("--ranks", type=_numbers, default=[8, 64, 512, 4096, 8192], help="simulated ranks")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args(arguments)
    real = [cost for size in options.processes for cost in measure_real(size, repeats=options.repeats)]
    if real:
        _print_real(real)
    values = {**read_back(os.environ), "NCCL_ALGO": "Ring"}
    simulated = [cost for size in options.ranks for cost in measure_simulated(values, size)]
    if simulated:
        _print_simulated(simulated)
    if options.json is not None:
        content = {"gloo": [asdict(cost) for cost in real], "simulated": [asdict(cost) for cost in simulated]}
        options.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
