"""The worst sample of a program without a recording: its tokens are those of the baseline's trace."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from mock_scheduler.report.alignment.sample import SampleView, find_worst_sample
from mock_scheduler.run_folder.finished_run import load_summary
from mock_scheduler.support.run_files import TRACE_FOLDER
from mock_scheduler.trace.entries import VIRTUAL_TOKENS, RowTable, TraceEntry
from mock_scheduler.trace.full.reader import open_trace
from mock_scheduler.trace.shards import Block, ShardSpec, Split
from mock_scheduler.verdict.compare_runs import compare_paths
from mock_scheduler.verdict.results import CandidateResult
from tests.content_traces import KINDS, ContentStep, content_step, save_content_run

TOKENS = {"seven": [7, 8, 9, 10], "nine": [9, 1, 2, 3, 4]}


def with_mask(step: ContentStep, masks: dict[str, list[float]]) -> ContentStep:
    """The step with a traced loss mask."""
    rows = RowTable.by_content(list(masks), [len(mask) for mask in masks.values()])
    order = sorted(range(len(rows.starts)), key=lambda row: rows.starts[row])
    blocks, values = [], []
    for row in order:
        blocks.append(Block(local_start=len(values), global_start=rows.starts[row], length=rows.lengths[row]))
        values += masks[rows.identities[row]]
    spec = ShardSpec(
        name="loss_mask",
        global_shape=(VIRTUAL_TOKENS,),
        local_shape=(len(values),),
        splits=(Split(dim=0, blocks=tuple(blocks)),),
    )
    return replace(
        step, more=[TraceEntry(update=0, kind="input", spec=spec, tensor=torch.tensor(values), dims=("token",))]
    )


def find(tmp_path: Path, step: ContentStep, changed: ContentStep, *, kinds: tuple[str, ...] = KINDS) -> SampleView:
    """The worst sample of two runs."""
    for name, values in (("baseline", step), ("candidate", changed)):
        save_content_run(tmp_path / name, values, kinds=kinds)  # type: ignore[arg-type]
    candidate = CandidateResult(
        name="candidate",
        overrides=(),
        layout="dp2",
        log_path=tmp_path / "log",
        run=load_summary("candidate", tmp_path / "candidate", elapsed_s=None),
        verdict=compare_paths(tmp_path / "baseline", tmp_path / "candidate").verdict,
    )
    with open_trace(tmp_path / "baseline" / TRACE_FOLDER) as reader:
        found = find_worst_sample(candidate, reader, None)
    assert found is not None
    return found


def test_the_worst_row_is_shown_with_its_tokens_and_losses(tmp_path: Path) -> None:
    step = with_mask(content_step(TOKENS), {"seven": [1.0] * 4, "nine": [0.0, 0.0, 1.0, 1.0, 0.0]})
    found = find(tmp_path, step, step.changed("nine", 3, 2, by=0.5))
    assert (found.identity, found.step, found.problem, found.summary) == ("nine", 0, "", "5 tokens")
    assert (found.worst_position, found.max_difference) == (3, 0.5)
    # The mask keeps the predictions of positions 2 and 3: tokens 3 and 4 are trained on.
    assert [(turn.title, turn.tokens, turn.differences) for turn in found.turns] == [
        ("without a loss", (9, 1, 2), (0.0, 0.0, 0.0)),
        ("with a loss", (3, 4), (0.5, 0.0)),
    ]


def test_a_row_without_a_traced_mask_is_one_stretch(tmp_path: Path) -> None:
    step = content_step(TOKENS)
    found = find(tmp_path, step, step.changed("seven", 1, 0, by=0.25))
    assert [(turn.title, turn.texts) for turn in found.turns] == [("with a loss", ("7", "8", "9", "10"))]


def test_a_row_whose_tokens_were_not_traced_is_named_alone(tmp_path: Path) -> None:
    step = content_step(TOKENS)
    kinds = tuple(kind for kind in KINDS if kind != "input")
    found = find(tmp_path, step, step.changed("seven", 1, 0, by=0.25), kinds=kinds)
    assert (found.identity, found.turns) == ("seven", ())
    assert found.problem == "its text is not known: the run has no recording"
