"""Two traces of a small batch: every planted difference is found, with its name, index, sample, token and ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch

from mock_scheduler.comparison.pairing.selection import EVERYTHING, Selection
from mock_scheduler.comparison.tensors import TensorComparison
from mock_scheduler.comparison.walk.traces import compare_trace_folders
from mock_scheduler.config.instruments import TraceKind
from mock_scheduler.config.steps import StepRanges
from mock_scheduler.errors import ExitCode, TraceError
from mock_scheduler.trace.entries import (
    DimName,
    LedgerCall,
    RankPlace,
    RowTable,
    StepFooter,
    TraceEntry,
    Unobserved,
)
from mock_scheduler.trace.full.reader import open_trace
from mock_scheduler.trace.full.writing import FullSink
from mock_scheduler.trace.shards import ShardSpec, Split, blocks_of_indices, cut_shard, even_split
from mock_scheduler.trace.sketch.files import SketchSink
from mock_scheduler.verdict.direct_verdict import decide
from mock_scheduler.verdict.replicas import check_replicas
from mock_scheduler.verdict.verdict import Verdict, VerdictKind
from mock_scheduler.verdict.wording.findings import describe_finding, describe_note, describe_reasons
from mock_scheduler.verdict.wording.verdicts import describe_reason, describe_sentence
from tests.comparison.stated import stated

BOUNDS = stated()
ROWS = RowTable(identities=("train/g0/e0", "train/g0/e1", "train/g1/e0"), lengths=(3, 5, 4))
WEIGHT = "decoder.layers.0.mlp.linear_fc1.weight"
LAYER = "decoder.layers.0"
ROUTER = "decoder.layers.0.mlp.router"


def noise(name: str, *shape: int) -> torch.Tensor:
    seed = sum(ord(letter) * (place + 1) for place, letter in enumerate(name))
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@dataclass(kw_only=True)
class Run:
    """A run of two tensor-parallel ranks; tensors by kind and name. ``rows``: of the batch, in this run's order."""

    tensors: dict[tuple[TraceKind, str], torch.Tensor]
    dims: dict[str, tuple[DimName, ...]]
    footer: StepFooter = field(default_factory=lambda: StepFooter(rows=ROWS, update_rows=((0, 1, 2),)))
    steps: int = 1
    copies: Mapping[tuple[int, str], torch.Tensor] = field(default_factory=dict)

    def with_tensor(self, kind: TraceKind, name: str, tensor: torch.Tensor) -> Run:
        return replace(self, tensors={**self.tensors, (kind, name): tensor})

    def without(self, kind: TraceKind, name: str) -> Run:
        return replace(self, tensors={key: value for key, value in self.tensors.items() if key != (kind, name)})

    def write(self, folder: Path, *, is_sketch: bool = False, num_ranks: int = 2, ranks: Sequence[int] = ()) -> Path:
        """Weights are split over the ranks, everything else is whole on each."""
        for step in range(self.steps):
            for rank in ranks or range(num_ranks):
                place = RankPlace(global_rank=rank, coordinates={"tp": rank})
                make = SketchSink if is_sketch else FullSink
                sink = make(folder, step=step, place=place, world_size=num_ranks)
                for (kind, name), tensor in self.tensors.items():
                    value = self.copies.get((rank, name), tensor)
                    splits = even_split(0, size=len(value), rank=rank, num_ranks=num_ranks) if name == WEIGHT else ()
                    local = (len(value) // num_ranks, *value.shape[1:]) if splits else tuple(value.shape)
                    spec = ShardSpec(name=name, global_shape=tuple(value.shape), local_shape=local, splits=splits)
                    piece = cut_shard(value, spec)
                    sink.add(TraceEntry(update=0, kind=kind, spec=spec, tensor=piece, dims=self.dims.get(name, ())))
                sink.close(replace(self.footer, ranks=tuple(ranks) or tuple(range(num_ranks))))
        return folder


def make_run() -> Run:
    before = noise("before", 8, 6)
    gradient = noise("gradient", 8, 6)
    return Run(
        tensors={
            ("initial", WEIGHT): before,
            ("input", "tokens"): torch.arange(12),
            ("activation", LAYER): noise("layer", 12, 4),
            ("gradient", WEIGHT): gradient,
            ("parameter", WEIGHT): before - 0.125 * gradient.sign(),
        },
        dims={"tokens": ("token",), LAYER: ("token", "channel"), WEIGHT: ("row", "column")},
    )


def changed(tensor: torch.Tensor, index: tuple[int, ...], by: float) -> torch.Tensor:
    tensor = tensor.clone()
    tensor[index] += by
    return tensor


def compare(first: Path, second: Path, selection: Selection = EVERYTHING) -> TensorComparison:
    return compare_trace_folders(first, second, bounds=BOUNDS, selection=selection)


def judge(found: TensorComparison) -> Verdict:
    return decide(None, found, bounds=BOUNDS, required=())


def compare_with(tmp_path: Path, candidate: Run, baseline: Run | None = None) -> TensorComparison:
    return compare((baseline or make_run()).write(tmp_path / "a"), candidate.write(tmp_path / "b"))


def test_equal_traces_are_identical_in_another_layout(tmp_path: Path) -> None:
    alignment = judge(compare(make_run().write(tmp_path / "a"), make_run().write(tmp_path / "b", num_ranks=1)))
    assert alignment.kind is VerdictKind.IDENTICAL
    assert describe_reason(alignment) == (
        "bit-equal: 1 input tensor, 1 activation, 1 gradient, 1 parameter; one changed bit would have been found"
    )


def test_one_changed_element_of_a_shard_is_found_with_its_index_and_rank(tmp_path: Path) -> None:
    run = make_run()
    gradient = changed(run.tensors["gradient", WEIGHT], (6, 2), 1.0)
    found = compare_with(tmp_path, run.with_tensor("gradient", WEIGHT, gradient))
    (difference,) = found.exceeding
    assert difference.figures is not None
    assert difference.figures.worst is not None
    assert (difference.key.name, difference.key.kind, difference.figures.worst.index) == (WEIGHT, "gradient", (6, 2))
    assert [place.global_rank for place in difference.figures.worst.candidate_ranks] == [1]
    assert difference.residual is not None
    assert difference.residual.kind == "one element"
    sentence = describe_sentence(judge(found))
    assert sentence is not None
    assert sentence.startswith(f"step 0, update 0, backward: gradient of {WEIGHT} differs by ")
    assert sentence.endswith("held by global rank 1 (tp1) in both runs; the 2 tensors before it are equal")


def test_a_changed_token_is_found_with_its_sample_and_position(tmp_path: Path) -> None:
    run = make_run()
    output = changed(run.tensors["activation", LAYER], (5, 3), 1.0)
    (difference,) = compare_with(tmp_path, run.with_tensor("activation", LAYER, output)).exceeding
    assert difference.figures is not None
    worst = difference.figures.worst
    assert worst is not None
    assert (worst.sample, worst.position, worst.index) == ("train/g0/e1", 2, (5, 3))


def test_rows_in_another_order_are_compared_by_identity(tmp_path: Path) -> None:
    run = make_run()
    order = torch.tensor([*range(8, 12), *range(3), *range(3, 8)])
    moved = run.with_tensor("activation", LAYER, changed(run.tensors["activation", LAYER], (5, 3), 1.0)[order])
    moved = moved.with_tensor("input", "tokens", run.tensors["input", "tokens"][order])
    rows = RowTable(identities=("train/g1/e0", "train/g0/e0", "train/g0/e1"), lengths=(4, 3, 5))
    found = compare_with(tmp_path, replace(moved, footer=StepFooter(rows=rows, update_rows=((0, 1, 2),))))
    assert found.findings == ()
    (difference,) = found.exceeding
    assert difference.figures is not None
    assert difference.figures.worst is not None
    assert (difference.figures.worst.sample, difference.figures.worst.index) == ("train/g0/e1", (5, 3))


def test_rows_of_one_side_are_findings_and_shared_rows_are_compared(tmp_path: Path) -> None:
    run = make_run()
    rows = RowTable(identities=("train/g0/e0", "train/g9/e9"), lengths=(3, 2))
    short = run.with_tensor("activation", LAYER, run.tensors["activation", LAYER][:5])
    short = short.with_tensor("input", "tokens", run.tensors["input", "tokens"][:5])
    short = replace(short, footer=StepFooter(rows=rows, update_rows=((0, 1),)))
    found = compare_with(tmp_path, short)
    assert [describe_finding(item) for item in found.findings] == [
        "2 rows of 3 of step 0 are in the baseline only: train/g0/e1; train/g1/e0",
        "1 row of 2 of step 0 is in the candidate only: train/g9/e9",
        "update 0 of step 0 trains on other rows: 2 only in the baseline, 1 only in the candidate, the first is "
        "train/g0/e1",
    ]
    activation = next(item for item in found.differences if item.key.kind == "activation")
    assert (activation.num_elements, activation.num_absent, activation.bit_equal) == (12, 36, True)
    assert judge(found).kind is VerdictKind.DIVERGED


def test_other_tokens_are_a_divergence_by_their_number(tmp_path: Path) -> None:
    run = make_run()
    tokens = run.tensors["input", "tokens"].clone()
    tokens[0] = 99
    (difference,) = compare_with(tmp_path, run.with_tensor("input", "tokens", tokens)).exceeding
    assert (difference.key.name, difference.relative, difference.tolerance) == ("tokens", 1 / 12, 0.0)


def test_another_dtype_is_a_finding_and_still_has_figures(tmp_path: Path) -> None:
    run = make_run()
    output = run.tensors["activation", LAYER].to(torch.bfloat16)
    found = compare_with(tmp_path, run.with_tensor("activation", LAYER, output))
    (finding,) = found.findings
    assert describe_finding(finding) == (
        f"activation of {LAYER} at step 0, update 0 has dtype float32 in the baseline and bfloat16 in the candidate"
    )
    difference = next(item for item in found.differences if item.key.name == LAYER)
    assert difference.dtypes == ("float32", "bfloat16")
    assert 1e-4 < difference.relative < 2.0**-8


def test_two_stated_precisions_explain_dtypes_and_a_rounded_start_and_nothing_else(tmp_path: Path) -> None:
    """The narrower run has weights of its own, which are its rounded parameters; the wider one has none."""
    run, selection = make_run(), Selection(precisions=("float32", "bfloat16"))
    narrow = run.with_tensor("activation", LAYER, run.tensors["activation", LAYER].bfloat16())
    after = run.tensors["parameter", WEIGHT]
    for kind, values in (("initial", run.tensors["initial", WEIGHT].bfloat16().float()), ("weight", after.bfloat16())):
        narrow = narrow.with_tensor(kind, WEIGHT, values)
    baseline = run.write(tmp_path / "a")
    found = compare(baseline, narrow.write(tmp_path / "b"), selection)
    assert (found.findings, found.has_two_precisions, found.last_measured) == ((), True, (0, 0))
    assert [(item.kind, item.name, item.sides) for item in found.not_compared] == [("weight", WEIGHT, ("baseline",))]
    cut = (run.tensors["initial", WEIGHT].view(torch.int32) & -65536).view(torch.float32)
    wrong = compare(baseline, narrow.with_tensor("initial", WEIGHT, cut).write(tmp_path / "c"), selection)
    assert [describe_finding(item).partition(": ")[0] for item in wrong.findings] == [
        f"parameter of {WEIGHT} before step 0 is not the baseline's, rounded to bfloat16, in the candidate"
    ]


def test_a_tensor_that_a_run_was_not_told_to_trace_makes_it_incomparable_and_says_so(tmp_path: Path) -> None:
    footer = StepFooter(rows=ROWS, update_rows=((0, 1, 2),), kinds=("initial", "input", "gradient", "parameter"))
    candidate = replace(make_run().without("activation", LAYER), footer=footer)
    found = compare_with(tmp_path, candidate)
    (finding,) = found.findings
    assert describe_finding(finding) == (
        "1 tensor of kind activation of the baseline is not traced by the candidate: its trace.kinds are initial, "
        "input, gradient, parameter"
    )
    alignment = judge(found)
    assert alignment.kind is VerdictKind.INCOMPARABLE
    assert "Compare what both have with kinds and patterns (--kinds, --patterns)" in describe_reason(alignment)


@pytest.mark.parametrize("is_sketch", [False, True])
def test_traces_with_other_globs_say_which_and_compare_what_both_have(tmp_path: Path, is_sketch: bool) -> None:
    """Fewer names for a long run are no difference of the training, and no agreement either."""
    baseline = make_run().write(tmp_path / "a", is_sketch=is_sketch)
    footer = StepFooter(rows=ROWS, update_rows=((0, 1, 2),), exclude=("*.linear_fc1.*",))
    fewer = replace(make_run(), footer=footer)
    for kind in ("initial", "gradient", "parameter"):
        fewer = fewer.without(kind, WEIGHT)  # type: ignore[arg-type]
    candidate = fewer.write(tmp_path / "b", is_sketch=is_sketch)
    found = compare(baseline, candidate)
    assert [describe_finding(item) for item in found.findings] == [
        f"1 tensor of kind {kind} of the baseline is not traced by the candidate: its trace.exclude is *.linear_fc1.*"
        for kind in ("initial", "gradient", "parameter")
    ]
    assert judge(found).kind is VerdictKind.INCOMPARABLE
    shared = compare(baseline, candidate, Selection(patterns=(LAYER, "tokens")))
    assert judge(shared).kind is VerdictKind.IDENTICAL
    changed_layer = fewer.with_tensor("activation", LAYER, changed(fewer.tensors["activation", LAYER], (3, 1), 1.0))
    planted = compare(baseline, changed_layer.write(tmp_path / "c", is_sketch=is_sketch), Selection(patterns=(LAYER,)))
    assert judge(planted).kind is VerdictKind.DIVERGED
    assert [item.key.name for item in planted.exceeding] == [LAYER]


def test_what_a_model_does_not_show_is_listed_and_no_divergence(tmp_path: Path) -> None:
    unobserved = (Unobserved(kind="activation", name=LAYER, reason="fused into the next layer"),)
    footer = StepFooter(rows=ROWS, update_rows=((0, 1, 2),), unobserved=unobserved)
    found = compare_with(tmp_path, replace(make_run().without("activation", LAYER), footer=footer))
    (missing,) = found.not_compared
    assert (missing.name, missing.sides, describe_reasons(missing)) == (
        LAYER,
        ("candidate",),
        "fused into the next layer",
    )
    assert list(map(describe_note, found.notes)) == [
        f"no activation was compared at all: {LAYER} is not shown by both runs"
    ]
    assert judge(found).kind is VerdictKind.IDENTICAL


def test_a_trace_of_some_ranks_is_compared_as_far_as_it_goes(tmp_path: Path) -> None:
    first = make_run().write(tmp_path / "a")
    found = compare(first, make_run().write(tmp_path / "b", ranks=(1,)))
    assert found.findings == ()
    gradient = next(item for item in found.differences if item.key.kind == "gradient")
    assert (gradient.num_elements, gradient.num_absent, gradient.bit_equal) == (24, 24, True)
    assert any(
        "24 elements only in the baseline, 0 only in the candidate" in describe_note(note) for note in found.notes
    )


def test_a_lost_file_is_an_error_that_names_the_rank(tmp_path: Path) -> None:
    first, second = make_run().write(tmp_path / "a"), make_run().write(tmp_path / "b")
    next(second.rglob("rank_00001*")).unlink()
    with pytest.raises(TraceError, match="no file of global rank 1 of 2"):
        compare(first, second)


def test_a_swapped_pair_of_ranks_is_a_permutation(tmp_path: Path) -> None:
    run = make_run()
    swapped = torch.cat([run.tensors["gradient", WEIGHT][4:], run.tensors["gradient", WEIGHT][:4]])
    (difference,) = compare_with(tmp_path, run.with_tensor("gradient", WEIGHT, swapped)).exceeding
    assert difference.residual is not None
    assert difference.residual.kind == "permutation"


def test_a_shard_in_place_of_another_is_found_on_the_rank_that_has_it(tmp_path: Path) -> None:
    run = make_run()
    doubled = torch.cat([run.tensors["gradient", WEIGHT][:4]] * 2)
    (difference,) = compare_with(tmp_path, run.with_tensor("gradient", WEIGHT, doubled)).exceeding
    assert difference.figures is not None
    assert difference.figures.worst is not None
    assert [place.global_rank for place in difference.figures.worst.candidate_ranks] == [1]


def test_a_range_of_steps_is_compared_alone(tmp_path: Path) -> None:
    first = replace(make_run(), steps=2).write(tmp_path / "a")
    second = make_run().write(tmp_path / "b")
    assert [describe_finding(item) for item in compare(first, second).findings] == [
        "step 1 was traced by the baseline but not by the candidate"
    ]
    found = compare(first, second, Selection(steps=StepRanges.parse("0")))
    assert (found.findings, found.steps) == ((), (0,))


def test_nothing_that_matches_is_no_comparison(tmp_path: Path) -> None:
    found = compare(
        make_run().write(tmp_path / "a"), make_run().write(tmp_path / "b"), Selection(patterns=("decoder.layers.9.*",))
    )
    assert judge(found).kind is VerdictKind.INCOMPARABLE
    assert describe_reason(judge(found)) == (
        "nothing of both sides is chosen by pattern 'decoder.layers.9.*'; the nearest are decoder.layers.0, "
        "decoder.layers.0.mlp.linear_fc1.weight"
    )


@pytest.mark.parametrize("kind", ["gradient", "activation"])
def test_swapping_the_sides_finds_the_same(tmp_path: Path, kind: TraceKind) -> None:
    run = make_run()
    name = WEIGHT if kind == "gradient" else LAYER
    other = run.with_tensor(kind, name, changed(run.tensors[kind, name], (2, 2), 1.0)).without("input", "tokens")
    first, second = run.write(tmp_path / "a"), other.write(tmp_path / "b")
    there, back = compare(first, second), compare(second, first)
    assert [item.key for item in there.exceeding] == [item.key for item in back.exceeding]
    assert [item.max_abs for item in there.exceeding] == [item.max_abs for item in back.exceeding]
    assert [item.name for item in there.findings] == [item.name for item in back.findings] == ["tokens"]


def make_routed(logits: torch.Tensor) -> Run:
    """Two experts of three for each token, as the logits say; outputs are those of the chosen ones."""
    chosen = logits.topk(2, dim=1).indices.sort(dim=1).values
    outputs = chosen.unsqueeze(2).float() + torch.ones(12, 2, 4)
    run = make_run()
    return replace(
        run,
        tensors={
            **run.tensors,
            ("router", f"{ROUTER}.logits"): logits,
            ("router", f"{ROUTER}.chosen_experts"): chosen,
            ("activation", f"{LAYER}.mlp.experts"): outputs,
        },
        dims={
            **run.dims,
            f"{ROUTER}.logits": ("token", "expert"),
            f"{ROUTER}.chosen_experts": ("token", "slot"),
            f"{LAYER}.mlp.experts": ("token", "slot", "channel"),
        },
    )


def test_a_choice_of_experts_that_rounding_flipped_is_counted_and_left_out(tmp_path: Path) -> None:
    logits = torch.tensor([[3.0, 1.0, 0.0]]).repeat(12, 1)
    logits[4] = torch.tensor([3.0, 1.0, 1.0 - 2.0**-20])
    moved = logits.clone()
    moved[4, 2] += 2.0**-19
    found = compare_with(tmp_path, make_routed(moved), make_routed(logits))
    assert found.exceeding == ()
    (flips,) = found.flips
    assert (flips.num_tokens, flips.num_flipped, flips.largest_gap) == (12, 1, 2.0**-20)
    outputs = next(item for item in found.differences if item.key.name.endswith("experts") and item.num_absent != 0)
    assert outputs.num_flipped_tokens == 1
    assert "rounding chose other experts for 1 token" in describe_reason(judge(found))


def test_another_choice_of_experts_that_no_rounding_explains_is_a_divergence(tmp_path: Path) -> None:
    logits = torch.tensor([[3.0, 1.0, 0.0]]).repeat(12, 1)
    baseline = make_routed(logits)
    wrong = baseline.tensors["router", f"{ROUTER}.chosen_experts"].clone()
    wrong[4] = torch.tensor([0, 2])
    found = compare_with(tmp_path, baseline.with_tensor("router", f"{ROUTER}.chosen_experts", wrong), baseline)
    assert [item.key.name for item in found.exceeding] == [f"{ROUTER}.chosen_experts"]
    assert found.flips == ()


def test_copies_within_one_run_are_counted_by_axis_and_named_where_they_differ(tmp_path: Path) -> None:
    run = make_run()
    with open_trace(run.write(tmp_path / "a")) as reader:
        result = check_replicas(reader, str(tmp_path / "a"))
    assert (dict(result.num_copies), result.exit_code) == ({"tp": 2}, ExitCode.ALIGNED)
    other = changed(run.tensors["activation", LAYER], (1, 1), 2.0**-10)
    with open_trace(replace(run, copies={(1, LAYER): other}).write(tmp_path / "b")) as reader:
        result = check_replicas(reader, str(tmp_path / "b"))
    assert result.exit_code is ExitCode.DIVERGED
    assert result.conflicts[0].describe().startswith(f"{LAYER}: ranks tp0 and tp1 hold different activations at step 0")


def test_a_ledger_that_parts_is_a_divergence_with_the_first_call(tmp_path: Path) -> None:
    calls = tuple(LedgerCall(operation="all_reduce", group=(0, 1), dtype="float32", num_elements=n) for n in (4, 8))
    base = StepFooter(rows=ROWS, update_rows=((0, 1, 2),), ledgers={"collective": calls})
    first = replace(make_run(), footer=base)
    second = replace(make_run(), footer=replace(base, ledgers={"collective": calls[:1]}))
    alignment = judge(compare_with(tmp_path, second, first))
    assert alignment.kind is VerdictKind.DIVERGED
    assert describe_sentence(alignment) == (
        "step 0, global rank 0 (tp0): collective call 1 is all_reduce of 8 float32 over ranks 0, 1 in the baseline, "
        "and absent (1 in all) in the candidate"
    )


def test_collectives_of_other_settings_are_not_compared_but_draws_are(tmp_path: Path) -> None:
    calls = {
        kind: tuple(LedgerCall(operation=kind, group=(0, 1), dtype="float32", num_elements=n) for n in (4, 8))
        for kind in ("collective", "random")
    }
    runs = [
        replace(make_run(), footer=StepFooter(rows=ROWS, update_rows=((0, 1, 2),), ledgers=own))  # type: ignore[arg-type]
        for own in (calls, {**calls, "collective": calls["collective"][:1]}, {**calls, "random": calls["random"][:1]})
    ]
    base, other, drew = (run.write(tmp_path / name) for run, name in zip(runs, ("a", "b", "c"), strict=True))
    selection = Selection(has_other_calls=True)
    found = compare(base, other, selection)
    assert judge(found).kind is VerdictKind.IDENTICAL
    assert [ledger.kind for ledger in found.ledgers] == ["random"]
    assert [describe_note(note) for note in found.notes] == [
        "the ledger of collective calls was not compared: the two runs have different settings, which may change them"
    ]
    assert judge(compare(base, drew, selection)).kind is VerdictKind.DIVERGED


def test_sketches_find_equal_bits_and_a_divergence_and_say_which_full_trace_to_take(tmp_path: Path) -> None:
    run = make_run()
    first = run.write(tmp_path / "a", is_sketch=True)
    equal = judge(compare(first, run.write(tmp_path / "b", is_sketch=True, num_ranks=1)))
    assert equal.kind is VerdictKind.IDENTICAL
    reason = describe_reason(equal)
    assert reason.startswith("bit-equal by the fingerprints of sketches: ")
    assert reason.endswith("a fingerprint; fingerprints are taken as the runs recorded them")
    wrong = run.with_tensor("gradient", WEIGHT, run.tensors["gradient", WEIGHT] * 1.5)
    diverged = judge(compare(first, wrong.write(tmp_path / "c", is_sketch=True)))
    assert diverged.kind is VerdictKind.DIVERGED
    assert diverged.first is not None
    assert diverged.first.value == pytest.approx(0.5, rel=0.5)
    assert diverged.full_dump == (
        "trace.level=full",
        "trace.steps=0",
        f'trace.patterns=["{WEIGHT}"]',
        "trace.kinds=[gradient]",
    )


def test_a_full_trace_is_compared_with_sketches(tmp_path: Path) -> None:
    run = make_run()
    found = compare(run.write(tmp_path / "a"), run.write(tmp_path / "b", is_sketch=True))
    assert found.level == "sketch"
    assert judge(found).kind is VerdictKind.IDENTICAL


def test_a_sketch_on_both_sides_of_its_bound_is_suspect(tmp_path: Path) -> None:
    run = make_run()
    gradient = run.tensors["gradient", WEIGHT]
    other = run.with_tensor("gradient", WEIGHT, gradient * (1 + 1e-4))
    first, second = run.write(tmp_path / "a", is_sketch=True), other.write(tmp_path / "b", is_sketch=True)
    alignment = judge(compare(first, second))
    assert alignment.kind is VerdictKind.SUSPECT
    assert alignment.kind.exit_code == ExitCode.SUSPECT
    assert "on which side of its bound it is" in describe_reason(alignment)


def test_micro_batches_of_tokens_are_put_together_before_they_are_compared(tmp_path: Path) -> None:
    tokens = noise("layer", 12, 4)
    for folder, parts in (("a", [range(12)]), ("b", [range(3, 12), range(3)])):
        sink = FullSink(tmp_path / folder, step=0, place=RankPlace(global_rank=0, coordinates={"tp": 0}), world_size=1)
        for part in parts:
            split = Split(dim=0, blocks=blocks_of_indices(list(part)))
            spec = ShardSpec(name=LAYER, global_shape=(12, 4), local_shape=(len(part), 4), splits=(split,))
            entry = TraceEntry(
                update=0, kind="activation", spec=spec, tensor=tokens[list(part)], dims=("token", "channel")
            )
            sink.add(entry)
        sink.close(StepFooter(rows=ROWS, update_rows=((0, 1, 2),), ranks=(0,)))
    found = compare(tmp_path / "a", tmp_path / "b")
    assert [(item.key.name, item.bit_equal) for item in found.differences] == [(LAYER, True)]
