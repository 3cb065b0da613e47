"""What a comparison did not look at: modules without a shown output, parameters without a trace, and their shares."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from mock_scheduler.comparison.findings import NotCompared, NotShown, NotWritten
from mock_scheduler.comparison.pairing.selection import Selection
from mock_scheduler.comparison.tensors import TensorComparison, TensorDifference
from mock_scheduler.config.instruments import TraceKind
from mock_scheduler.config.steps import StepRanges
from mock_scheduler.errors import AlignmentError
from mock_scheduler.report.verdict_json import verdict_to_json
from mock_scheduler.run_folder.finished_run import load_summary
from mock_scheduler.trace.entries import TraceEntry, TraceKey
from mock_scheduler.trace.shards import whole
from mock_scheduler.verdict.compare_runs import judge_runs
from mock_scheduler.verdict.coverage import Unseen, find_unseen
from mock_scheduler.verdict.verdict import Verdict, VerdictKind
from mock_scheduler.verdict.wording.coverage import describe_unseen
from mock_scheduler.verdict.wording.verdicts import write_headline
from tests.comparison.stated import stated
from tests.rank_traces import save_rank_trace


def equal(kind: TraceKind, name: str, num_elements: int, *, num_absent: int = 0) -> TensorDifference:
    return TensorDifference(
        key=TraceKey(step=0, update=0, kind=kind, name=name),
        num_elements=num_elements,
        bit_equal=True,
        max_abs=0.0,
        relative=0.0,
        tolerance=1.0,
        num_absent=num_absent,
    )


def gap(kind: TraceKind, name: str, reason: NotShown | NotWritten) -> NotCompared:
    return NotCompared(kind=kind, name=name, sides=("candidate",), reasons=(reason,), first_step=0, num_steps=1)


def comparison(*differences: TensorDifference, not_compared: tuple[NotCompared, ...] = ()) -> TensorComparison:
    return TensorComparison(
        steps=(0,),
        differences=differences,
        findings=(),
        baseline_conflicts=(),
        candidate_conflicts=(),
        not_compared=not_compared,
    )


def test_what_everybody_looked_at_is_no_gap() -> None:
    tensors = comparison(equal("gradient", "a.weight", 4), equal("parameter", "a.weight", 4))
    assert find_unseen(tensors, modules={}, parameters={}) is None
    assert find_unseen(None, modules={"a": "why"}, parameters={}) is None


def test_a_modules_share_is_that_of_its_parameters_and_a_seen_output_is_no_gap() -> None:
    tensors = comparison(
        equal("activation", "decoder.layers.0", 8),
        equal("gradient", "vision.proj.weight", 25),
        equal("gradient", "decoder.layers.0.mlp.weight", 75),
        not_compared=(
            gap("activation_gradient", "decoder.layers.0", NotShown(reason="its gradient alone is hidden")),
            gap("activation", "decoder.layers.0.input_layernorm", NotShown(reason="fused")),
        ),
    )
    found = find_unseen(tensors, modules={"vision": "a Tower", "decoder.layers.0": "nothing"}, parameters={})
    assert found == Unseen(
        modules={"vision": "a Tower", "decoder.layers.0.input_layernorm": "fused"},
        module_share=0.25,
        parameters={},
        parameter_share=0.0,
    )
    assert describe_unseen(found) == (
        "the output of 2 modules with 25.0 % of the compared parameters (vision, decoder.layers.0.input_layernorm)"
    )


def test_parameters_count_by_the_elements_that_no_side_compared() -> None:
    tensors = comparison(
        equal("gradient", "a.weight", 60, num_absent=20),
        equal("parameter", "a.weight", 60, num_absent=20),
        not_compared=(gap("gradient", "b.weight", NotWritten(ranks=(0,))),),
    )
    found = find_unseen(tensors, modules={}, parameters={"b.weight": 10, "c.weight": 10})
    assert found is not None
    assert found.parameters == {"b.weight": 10, "c.weight": 10, "a.weight": 20}
    assert found.parameter_share == 0.4
    assert describe_unseen(found) == "3 parameters with 40.0 % of all elements (b.weight, c.weight, a.weight)"
    # Without its size a share would be a guess.
    unknown = find_unseen(tensors, modules={}, parameters={})
    assert unknown is not None
    assert (unknown.parameters, unknown.parameter_share) == ({"b.weight": 0, "a.weight": 20}, None)
    assert describe_unseen(unknown) == "2 parameters (b.weight, a.weight)"


def test_small_shares_are_not_0_and_large_ones_not_100() -> None:
    parts = {"modules": {"m": "why"}, "parameters": {"p": 1}}
    assert "less than 0.1 %" in describe_unseen(Unseen(module_share=1e-5, parameter_share=0.99999, **parts))
    assert "more than 99.9 %" in describe_unseen(Unseen(module_share=1e-5, parameter_share=0.99999, **parts))


def test_what_was_not_chosen_is_not_missed() -> None:
    tensors = comparison(equal("gradient", "a.weight", 4))
    asked = {"modules": {"b": "why"}, "parameters": {"c.weight": 4}}
    assert find_unseen(tensors, **asked, selection=Selection(kinds=frozenset({"gradient"}))) is None
    assert find_unseen(tensors, **asked, selection=Selection(patterns=("a.*",))) is None
    assert find_unseen(tensors, **asked) is not None


def write_run(
    folder: Path, *, steps: Sequence[int] = (0,), traced: Sequence[int] | None = None, **stated: object
) -> Path:
    """A run of one parameter; it grows by 1 in each step, and by ``moved`` more in the last one."""
    moved = float(str(stated.pop("moved", 0.0)))
    for step in steps if traced is None else traced:
        after = torch.full((4,), step + 1.0 + (moved if step == steps[-1] else 0.0))
        values = {"initial": torch.full((4,), float(step)), "gradient": torch.ones(4), "parameter": after}
        entries = [
            TraceEntry(update=0, kind=kind, spec=whole("a.weight", (4,)), tensor=tensor)
            for kind, tensor in values.items()
        ]
        save_rank_trace(
            folder / "trace", step=step, global_rank=0, world_size=1, coordinates={"tp": 0}, entries=entries
        )
    batches = {str(step): "x" for step in steps}
    told = stated.pop("steps_stated", None)
    stated |= {} if told is None else {"steps": told}
    content = {"status": "completed", "layout": "tp1", "wall_s": 1.0, "rollout_s": 0.0, "batches": batches, **stated}
    (folder / "run.json").write_text(json.dumps(content), encoding="utf-8")
    (folder / "ledger.json").write_text(json.dumps({"built": {}}), encoding="utf-8")
    lines = [json.dumps({"step": step, "metrics": {"loss": 1.0}}) for step in steps]
    (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return folder


def judge(baseline: Path, candidate: Path) -> Verdict:
    runs = [load_summary(path.name, path, elapsed_s=1.0) for path in (baseline, candidate)]
    return judge_runs(*runs, bounds=stated(), is_deterministic=True)


def test_identical_is_not_said_without_what_the_runs_state(tmp_path: Path) -> None:
    told = {"unobserved_modules": {"gate": "a Gate"}, "untraced_parameters": {"b.weight": 12}}
    runs = [
        load_summary(name, write_run(tmp_path / name, **stated), elapsed_s=1.0)
        for name, stated in (("one", {}), ("two", told))
    ]
    verdict = judge_runs(*runs, bounds=stated(), is_deterministic=True)
    assert verdict.kind is VerdictKind.IDENTICAL
    assert write_headline(verdict) == (
        "every bit is equal, in 2 tensors over 1 step; not looked at: the output of 1 module (gate) and 1 parameter "
        "with 75.0 % of all elements (b.weight)"
    )
    assert str(verdict) == "identical: compared 1 metrics and 2 tensors, not 1 modules and 1 parameters"


def test_shares_of_nothing_are_0() -> None:
    """Where no parameter was compared, a module without a shown output ended the comparison in a ZeroDivisionError."""
    outputs = comparison(equal("activation", "a", 8))
    for tensors in (comparison(), outputs, comparison(equal("gradient", "a.weight", 0))):
        found = find_unseen(tensors, modules={"b": "why"}, parameters={})
        assert found == Unseen(modules={"b": "why"}, module_share=0.0, parameters={}, parameter_share=0.0)
        assert describe_unseen(found) == "the output of 1 module (b)"


def test_a_comparison_begins_where_the_resumed_run_begins(tmp_path: Path) -> None:
    """It was ``diverged: step 0 was traced by the baseline`` for a right run and for a wrong one."""
    whole_run = write_run(tmp_path / "whole", steps=range(4))
    begun = {"first": 2, "last": 3}
    resumed = judge(whole_run, write_run(tmp_path / "resumed", steps=(2, 3), steps_stated=begun))
    assert resumed.kind is VerdictKind.IDENTICAL
    assert write_headline(resumed) == (
        "from step 2 on, where the candidate begins: every bit is equal, in 5 tensors over 2 steps; not looked at: "
        "steps 0-1, before the candidate begins"
    )
    assert str(resumed) == "identical: compared 1 metrics and 5 tensors, not steps 0-1"
    stored = verdict_to_json(resumed)["unseen"]
    assert isinstance(stored, dict)
    assert stored["steps"] == [{"side": "candidate", "why": "before", "steps": "0-1"}]
    wrong = judge(whole_run, write_run(tmp_path / "wrong", steps=(2, 3), steps_stated=begun, moved=0.5))
    assert wrong.kind is VerdictKind.DIVERGED
    assert write_headline(wrong).startswith(
        "from step 2 on, where the candidate begins: step 3, update 0, optimizer: parameter of a.weight differs by 0.5"
    )
    # A run that does not say that it begins later lacks steps.
    silent = judge(whole_run, write_run(tmp_path / "silent", steps=(2, 3)))
    assert (silent.kind, str(silent.first)) == (VerdictKind.DIVERGED, "step step 0 at step 0")


def test_steps_that_a_configuration_leaves_out_are_said_and_no_divergence(tmp_path: Path) -> None:
    whole_run = write_run(tmp_path / "whole", steps=range(4))
    told = {"first": 0, "last": 3, "traced": "0-2", "every": 2}
    seldom = judge(whole_run, write_run(tmp_path / "seldom", steps=range(4), traced=(0, 2), steps_stated=told))
    assert describe_unseen(seldom.unseen) == "the tensors of steps 1, 3, which the candidate was not to trace"
    short = judge(write_run(tmp_path / "short", steps=(0, 1), steps_stated={"last": 1}), whole_run)
    assert describe_unseen(short.unseen) == "steps 2-3, after the baseline has ended"
    assert (seldom.kind, short.kind) == (VerdictKind.IDENTICAL, VerdictKind.IDENTICAL)
    # Step 2 was to be traced, and metrics of step 1 were to be logged.
    lost = judge(whole_run, write_run(tmp_path / "lost", steps=range(4), traced=(0,), steps_stated=told))
    assert (lost.kind, str(lost.first)) == (VerdictKind.DIVERGED, "step step 2 at step 2")


@pytest.mark.parametrize("steps", [{"first": -1}, {"every": 0}, {"traced": "5-2"}, {"last": "3"}, [0]])
def test_damaged_statements_of_steps_are_refused(tmp_path: Path, steps: object) -> None:
    with pytest.raises(AlignmentError, match="expected the steps that the run was to have"):
        load_summary("run", write_run(tmp_path / "run", steps_stated=steps), elapsed_s=1.0)


def test_an_optimizer_whose_last_moments_nobody_compared_is_said(tmp_path: Path) -> None:
    """Only runs that state their precision can show them, and only whole comparisons miss them."""
    folders = [write_run(tmp_path / name, precision="float32") for name in ("one", "two")]
    verdict = judge(*folders)
    assert write_headline(verdict).endswith("; not looked at: the optimizer's moments behind the last update")
    tensors = comparison(equal("gradient", "a.weight", 4), equal("optimizer", "a.weight.exp_avg", 4))
    assert find_unseen(tensors, modules={}, parameters={}, asks_last_state=True) is None
    lacks = comparison(equal("gradient", "a.weight", 4))
    assert find_unseen(lacks, modules={}, parameters={}, asks_last_state=True) == Unseen(last_state=True)
    chosen = Selection(steps=StepRanges.of([0]))
    assert find_unseen(lacks, modules={}, parameters={}, asks_last_state=True, selection=chosen) is None
