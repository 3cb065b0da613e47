"""What a comparison did not look at: modules without a shown output, parameters without a trace, and their shares."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from mock_scheduler.comparison.findings import NotCompared, NotShown, NotWritten
from mock_scheduler.comparison.pairing.selection import Selection
from mock_scheduler.comparison.tensors import TensorComparison, TensorDifference
from mock_scheduler.config.instruments import TraceKind
from mock_scheduler.run_folder.finished_run import load_summary
from mock_scheduler.trace.entries import TraceEntry, TraceKey
from mock_scheduler.trace.shards import whole
from mock_scheduler.verdict.compare_runs import judge_runs
from mock_scheduler.verdict.coverage import Unseen, find_unseen
from mock_scheduler.verdict.verdict import VerdictKind
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


def write_run(folder: Path, **stated: object) -> Path:
    entries = [
        TraceEntry(update=0, kind=kind, spec=whole("a.weight", (4,)), tensor=tensor)
        for kind, tensor in (("initial", torch.zeros(4)), ("gradient", torch.ones(4)), ("parameter", torch.ones(4)))
    ]
    save_rank_trace(folder / "trace", step=0, global_rank=0, world_size=1, coordinates={"tp": 0}, entries=entries)
    content = {"status": "completed", "layout": "tp1", "wall_s": 1.0, "rollout_s": 0.0, "batches": {"0": "x"}, **stated}
    (folder / "run.json").write_text(json.dumps(content), encoding="utf-8")
    (folder / "ledger.json").write_text(json.dumps({"built": {}}), encoding="utf-8")
    (folder / "metrics.jsonl").write_text('{"step": 0, "metrics": {"loss": 1.0}}\n', encoding="utf-8")
    return folder


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
