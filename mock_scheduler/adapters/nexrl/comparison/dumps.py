"""The comparison of a step of two or three debug dumps, and its verdict."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mock_scheduler.adapters.nexrl.comparison.pairing import Item, missing
from mock_scheduler.adapters.nexrl.comparison.sections import Dumps, Section, SectionMaker, find_place_counts
from mock_scheduler.adapters.nexrl.comparison.values import MISSING, Tolerance
from mock_scheduler.adapters.nexrl.names import check_step, find_steps
from mock_scheduler.errors import ExitCode, TraceError


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """The result of a step's comparison. ``num_ranks``, ``num_micros``: numbers compared."""

    step: int
    dumps: Dumps
    tolerance: Tolerance
    num_ranks: int
    num_micros: int
    sections: tuple[Section, ...]

    def items(self) -> Iterator[tuple[Section, Item]]:
        """Every comparison, in order."""
        for section in self.sections:
            for item in section.items:
                yield section, item

    def first_failure(self, *, missing_too: bool = True) -> tuple[Section, Item] | None:
        """The first comparison that does not hold, in the order of training: by update, then section."""
        failures = [
            (section, item)
            for section, item in self.items()
            if not item.difference.is_ok and (missing_too or item.difference.status not in MISSING)
        ]
        return min(failures, key=lambda failure: failure[1].update, default=None)

    @property
    def num_compared(self) -> int:
        """Comparisons of values, of one element at least."""
        return sum(item.difference.num_compared > 0 for _, item in self.items())

    @property
    def exit_code(self) -> ExitCode:
        """1: values differ; 3: nothing differs, but something is missing, or nothing was compared; else 0."""
        if self.first_failure(missing_too=False) is not None:
            return ExitCode.DIVERGED
        is_complete = self.first_failure() is None and self.num_compared > 0
        return ExitCode.ALIGNED if is_complete else ExitCode.INCOMPARABLE


def compare_dumps(
    self_hosted_dir: Path | str,
    remote_api_dir: Path | str | None = None,
    weaver_dir: Path | str | None = None,
    step: int = 1,
    num_ranks: int | None = None,
    num_micros: int | None = None,
    *,
    tolerance: Tolerance = Tolerance(),  # noqa: B008 - immutable
) -> StepReport:
    """Compare one step. ``num_ranks``, ``num_micros``: how many there must be; None: as many as there are.

    Raises ``StepNotFoundError`` listing the steps of a folder without the step, ``TraceError`` for a folder that
    is not there or a file that cannot be read.
    """
    dumps = Dumps(
        self_hosted=Path(self_hosted_dir),
        remote_api=None if remote_api_dir is None else Path(remote_api_dir),
        weaver=None if weaver_dir is None else Path(weaver_dir),
    )
    for name, folder in dumps.all().items():
        if not folder.is_dir():
            raise TraceError(f"the {name} dump {folder} is no folder; give a run's debug.dump_dir")
        check_step(step, find_steps(folder), f"the {name} dump {folder}")
    sections = tuple(SectionMaker(dumps=dumps, step=step, tolerance=tolerance).sections())
    ranks, micros = find_place_counts(dumps, step)
    counts = _count_section({"ranks": (num_ranks, ranks), "micro-batches of a rank": (num_micros, micros)})
    return StepReport(
        step=step,
        dumps=dumps,
        tolerance=tolerance,
        num_ranks=num_ranks or ranks,
        num_micros=num_micros or micros,
        sections=(*counts, *sections),
    )


def _count_section(counts: dict[str, tuple[int | None, int]]) -> tuple[Section, ...]:
    """A section for given numbers that differ from those in the dumps."""
    items = [
        missing("dumps", name, in_first=True, detail=f"{given} were asked for, and the dumps hold {found}")
        for name, (given, found) in counts.items()
        if given is not None and given != found
    ]
    return (Section(name="RANKS_AND_MICROBATCHES", title="Number", items=tuple(items)),) if items else ()
