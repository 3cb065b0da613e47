"""Makes a reproduction: the folder of ``mock-scheduler extract``, with as few whole groups as still diverge.

It begins with the group of the row with the largest difference, where the divergence names one, else with all groups;
and where the divergence does not show, it takes twice as many, until all are used.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from mock_scheduler.alignment.extract.entry import EntryFiles
from mock_scheduler.alignment.extract.folder import SCRIPT_FILE, Weights, write_readme, write_reproduction
from mock_scheduler.alignment.extract.source import DivergedCandidate, read_verdict, reduce_batch
from mock_scheduler.batch import RolloutBatch
from mock_scheduler.batch.trajectory import GroupKey
from mock_scheduler.config.stored_code import FLAG
from mock_scheduler.errors import AlignmentError, ConfigError
from mock_scheduler.recording.writing.subset import load_train_step
from mock_scheduler.run_folder.finished_run import load_batches
from mock_scheduler.support.foreign_files import read_tail
from mock_scheduler.support.processes import ending_signals_as_interrupt
from mock_scheduler.support.run_files import ALIGN_FILE, BASELINE_NAME
from mock_scheduler.support.text import count_of
from mock_scheduler.verdict.verdict import VerdictKind

_NUM_LOG_LINES = 15
# A check asks for the verdict alone.
_NOT_FOR_A_CHECK = ("align.proofs.localise=false", "align.proofs.consequence=false")


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Holds the result of running a reproduction: the verdict's word, and its first divergence or reason.

    ``batches``: the digest of the rows of each step of its baseline; empty where it is not known.
    """

    verdict: str
    text: str
    batches: Mapping[int, str] = field(default_factory=dict)

    @property
    def is_diverged(self) -> bool:
        """Says whether it shows the divergence."""
        return self.verdict == VerdictKind.DIVERGED.value


#: Runs the reproduction in a folder, of the candidate of this name; leaves nothing in the folder.
CheckReproduction = Callable[[Path, str], Outcome]


def run_reproduction(folder: Path, name: str, *, run_stored_code: bool = False) -> Outcome:
    """Run the script of a reproduction as its user would, with this interpreter and from this working directory.

    ``run_stored_code``: the user has allowed the code that its configuration names.
    Raises ``AlignmentError`` with the end of its output where it gave no result.
    """
    with tempfile.TemporaryDirectory() as scratch, ending_signals_as_interrupt():
        results, log = Path(scratch) / "align", Path(scratch) / "log"
        allowed = (FLAG,) if run_stored_code else ()
        with log.open("wb") as stream:
            code = subprocess.run(
                ["bash", str(folder / SCRIPT_FILE), "--output-dir", str(results), *allowed, *_NOT_FOR_A_CHECK],
                env={**os.environ, "MOCK_SCHEDULER_ROOT": os.getcwd(), "PYTHON": sys.executable},
                stdout=stream,
                stderr=subprocess.STDOUT,
                check=False,
            ).returncode
        if not (results / ALIGN_FILE).is_file():
            tail = read_tail(log, _NUM_LOG_LINES)
            raise AlignmentError(
                f"the reproduction's script ended with exit code {code} and no result; --no-check makes the folder "
                f"without running it. The last lines of its output:\n{tail}"
            )
        verdict, text = read_verdict(results, name)
        batches: Mapping[int, str] = {}
        with suppress(AlignmentError):  # a baseline that failed has none
            batches = load_batches(results / BASELINE_NAME)
    return Outcome(verdict=verdict, text=text, batches=batches)


@dataclass(frozen=True, kw_only=True, slots=True)
class Extraction:
    """An extraction with any number of groups. ``batch``: all rows of the step; ``check`` None: it is not run.

    ``entries``: the files behind the modules of baseline and candidate; one where both have the same.
    """

    source: DivergedCandidate
    batch: RolloutBatch
    weights: Weights
    entries: Sequence[EntryFiles]
    check: CheckReproduction | None
    console: Console

    def make(self, folder: Path, num_groups: int | None) -> None:
        """Write the folder with as many groups as the divergence needs; raises as ``run_extract``."""
        order = order_groups(self.batch, self.source.sample)
        if num_groups is not None and not 1 <= num_groups <= len(order):
            raise ConfigError(
                f"--groups is {num_groups}, expected 1 to {len(order)}: the groups of step {self.source.step}"
            )
        wanted = num_groups or (len(order) if self.source.sample is None else 1)
        remarks: list[str] = []
        while True:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            wanted, outcome = self._try(folder, order, wanted, remarks)
            if outcome is None or outcome.is_diverged:
                return
            if wanted == len(order):
                raise AlignmentError(
                    f"the divergence does not show again: with all {count_of(wanted, 'group')} of step "
                    f"{self.source.step} the reproduction is {outcome.verdict} ({outcome.text}). Recording, weights "
                    "and configuration do not cause it. Likely causes: changed code or packages, another machine, or a "
                    "run that does not repeat itself (check with mock-scheduler doctor)"
                )
            wanted = min(2 * wanted, len(order))

    def _try(
        self, folder: Path, order: Sequence[GroupKey], wanted: int, remarks: list[str]
    ) -> tuple[int, Outcome | None]:
        """Write the folder with at least ``wanted`` groups and run it; returns their number and the outcome."""
        source, weights = self.source, self.weights
        reduction = reduce_batch(source, num_groups=wanted, num_all=len(order), max_steps=weights.last_step + 1)
        places = self._places(order[: reduction.num_groups])
        groups = {step: self._groups(step, places) for step in range(weights.first_step, weights.last_step + 1)}
        config = write_reproduction(
            source, folder, reduction=reduction, groups=groups, weights=weights, entries=self.entries
        )
        outcome = None
        count = f"{reduction.num_groups} of {count_of(len(order), 'group')}"
        if self.check is None:
            remarks.append("The extraction did not run it (`--no-check`), so it may not diverge.")
        else:
            with self.console.status(f"running the reproduction with {count}"):
                outcome = self.check(folder, source.change.name)
            remarks.append(f"The extraction ran it with {count}. The verdict was {outcome.verdict}: {outcome.text}")
            self.console.print(f"{count}: {outcome.verdict}")
        write_readme(
            folder,
            source,
            config,
            reduction=reduction,
            groups=groups,
            num_all=len(order),
            weights=weights,
            entries=self.entries,
            remarks=remarks,
        )
        return reduction.num_groups, outcome

    def _places(self, chosen: Sequence[GroupKey]) -> list[int]:
        """Find the places of the chosen groups in the step: every step keeps the groups there."""
        return sorted(list(self.batch.group_sizes).index(group) for group in chosen)

    def _groups(self, step: int, places: Sequence[int]) -> list[GroupKey]:
        batch = self.batch if step == self.source.step else load_train_step(self.source.reader, step)
        groups = list(batch.group_sizes)
        return [groups[place] for place in places]


def order_groups(batch: RolloutBatch, sample: str | None) -> list[GroupKey]:
    """List the groups of a batch, the most likely to show the divergence first.

    First the group of the row with the identity ``sample``, then groups with different rewards, since only they have
    advantages relative to the group, then the others; each in the batch's order.
    """
    of_sample = {identity.group_key for identity in batch.identities if str(identity) == sample}
    rewards: dict[GroupKey, set[float]] = {}
    for identity, reward in zip(batch.identities, batch.rewards.tolist(), strict=True):
        rewards.setdefault(identity.group_key, set()).add(reward)
    return sorted(rewards, key=lambda group: (group not in of_sample, len(rewards[group]) < 2))
