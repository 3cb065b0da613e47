"""Where training draws, as dropout does, other draws are told from a fault."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from mock_scheduler.comparison.bounds.bounds import EXACT
from mock_scheduler.run_folder.finished_run import RunSummary
from mock_scheduler.trace.entries import LedgerCall, StepFooter, TraceEntry
from mock_scheduler.trace.shards import whole
from mock_scheduler.verdict.compare_runs import judge_runs
from mock_scheduler.verdict.reasons import OtherDraws
from mock_scheduler.verdict.verdict import Verdict, VerdictKind
from mock_scheduler.verdict.wording.verdicts import describe_reason
from tests.rank_traces import save_rank_trace


def run(folder: Path, *, layout: str = "tp1", draws: tuple[str, ...] = ()) -> RunSummary:
    return RunSummary(
        name=folder.name,
        output_dir=folder,
        layout=layout,
        wall_s=1.0,
        rollout_s=0.0,
        elapsed_s=1.0,
        built={},
        batches={"0": "aa"},
        draws=draws,
    )


def trace(folder: Path, value: float, drawn: Sequence[int]) -> None:
    calls = [LedgerCall(operation="bernoulli_", group=(), dtype="float32", num_elements=count) for count in drawn]
    save_rank_trace(
        folder / "trace",
        step=0,
        global_rank=0,
        world_size=1,
        coordinates={},
        entries=[
            TraceEntry(update=0, kind=kind, spec=whole("w", (2,)), tensor=torch.tensor([1.0, value]))
            for kind in ("initial", "gradient", "parameter")
        ],
        footer=StepFooter(kinds=("gradient", "random"), ledgers={"random": calls} if drawn else {}),
    )


def judge(baseline: RunSummary, candidate: RunSummary) -> Verdict:
    return judge_runs(baseline, candidate, bounds=EXACT, is_deterministic=True, has_metrics=False)


@pytest.mark.parametrize(
    ("draws", "sentence"),
    [
        (
            ("hidden_dropout",),
            "hidden_dropout draws other random numbers under another layout (tp1 and tp2), so the two trained under "
            "other masks; set it to 0 to compare them",
        ),
        (
            ("hidden_dropout", "attention_dropout"),
            "hidden_dropout and attention_dropout draw other random numbers under another layout (tp1 and tp2), so the "
            "two trained under other masks; set them to 0 to compare them",
        ),
    ],
)
@pytest.mark.parametrize("sides", [(True, True), (True, False), (False, True)])
def test_another_layout_draws_otherwise(
    tmp_path: Path, draws: tuple[str, ...], sentence: str, sides: tuple[bool, bool]
) -> None:
    baseline = run(tmp_path / "a", draws=draws if sides[0] else ())
    verdict = judge(baseline, run(tmp_path / "b", layout="tp2", draws=draws if sides[1] else ()))
    assert verdict == Verdict(kind=VerdictKind.INCOMPARABLE, why=OtherDraws(draws=draws, layouts=("tp1", "tp2")))
    assert describe_reason(verdict) == sentence


@pytest.mark.parametrize(
    ("drawn", "draws", "kind"),
    [
        (([8, 8], [4, 4, 4, 4]), ("hidden_dropout",), VerdictKind.INCOMPARABLE),
        (([8, 8], [8, 8]), ("hidden_dropout",), VerdictKind.DIVERGED),  # alike: the difference is one of the training
        (([], []), ("hidden_dropout",), VerdictKind.DIVERGED),
        (([8], [4]), (), VerdictKind.DIVERGED),  # nothing of the model draws: the call itself is the difference
    ],
)
def test_one_layout_is_compared_unless_its_ledgers_show_other_draws(
    tmp_path: Path, drawn: tuple[list[int], list[int]], draws: tuple[str, ...], kind: VerdictKind
) -> None:
    folders = tmp_path / "a", tmp_path / "b"
    for folder, value, calls in zip(folders, (1.0, 2.0), drawn, strict=True):
        trace(folder, value, calls)
    verdict = judge(*(run(folder, draws=draws) for folder in folders))
    assert verdict.kind is kind
    if kind is VerdictKind.INCOMPARABLE:
        assert describe_reason(verdict) == (
            "hidden_dropout draws random numbers, and the two runs drew others (their ledgers of draws differ), so the "
            "two trained under other masks; set it to 0 to compare them"
        )


def test_runs_without_draws_are_compared_in_any_layout(tmp_path: Path) -> None:
    for folder in (tmp_path / "a", tmp_path / "b"):
        trace(folder, 3.0, [])
    verdict = judge(run(tmp_path / "a"), run(tmp_path / "b", layout="tp2"))
    assert not isinstance(verdict.why, OtherDraws)
