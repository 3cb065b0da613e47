"""The results of comparing, and the tables of them."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from mock_scheduler.support.text import format_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """One pair of traces. Seconds are medians; ``ratio``: of the speeds of comparing and of reading and subtracting.

    ``other_cores``: cores that other processes, or other machines on the same hardware, kept busy while comparing.
    """

    dtype: str
    content: str
    num_cores: int
    read_and_subtract_s: float
    compare_s: float
    read_and_subtract_cpu_s: float
    compare_cpu_s: float
    gib_per_s: float
    peak_bytes: int
    peak_tensors: float
    other_cores: float
    ratio: float
    cpu_ratio: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerResult:
    """The same tensors compared by both: seconds, bytes of both sides, and how many times the speed of the peer."""

    dtype: str
    size_bytes: int
    compare_s: float
    msprobe_s: float
    ratio: float


def print_results(results: list[Result], curve: list[tuple[int, int]], peers: list[PeerResult]) -> None:
    """Tables for a person."""
    print_table(
        "compare beside read and subtract (bars of the ratio: 0.5 on one core, 1 on all)",
        ("dtype", "content", "cores", "read, subtract", "compare", "both sides", "ratio", "of CPU", "busy", "memory"),
        [
            (
                item.dtype,
                item.content,
                str(item.num_cores),
                f"{item.read_and_subtract_s:.2f} s",
                f"{item.compare_s:.2f} s",
                f"{item.gib_per_s:.2f} GiB/s",
                f"{item.ratio:.2f}",
                f"{item.cpu_ratio:.2f}",
                f"{item.other_cores:.1f}",
                f"{item.peak_tensors:.1f} tensors",
            )
            for item in results
        ],
    )
    print_table(
        "memory by the size of a tensor",
        ("tensor", "peak", "tensors"),
        [(format_bytes(size), format_bytes(peak), f"{peak / size:.1f}") for size, peak in curve],
    )
    if peers:
        print_table(
            "compare beside msprobe, whose start is not counted (bar: 20 times as fast)",
            ("dtype", "both sides", "compare", "msprobe", "times as fast"),
            [
                (
                    item.dtype,
                    format_bytes(item.size_bytes),
                    f"{item.compare_s:.3f} s",
                    f"{item.msprobe_s:.2f} s",
                    f"{item.ratio:.0f}",
                )
                for item in peers
            ],
        )


def print_table(title: str, headers: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    """One table with figures on the right."""
    table = Table(title=title)
    for header in headers:
        table.add_column(header, justify="left" if header in ("dtype", "content") else "right")
    for row in rows:
        table.add_row(*row)
    Console(width=120).print(table)
