"""Traced steps of real models: what the learner computed is in them, in every layout, and tracing changes nothing."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.layouts.cases import LONGEST_ROW, SEED
from benchmarks.layouts.training import random_batch
from mock_scheduler.trace.entries import LedgerCall, TraceKey
from mock_scheduler.trace.full.reader import TraceReader, open_trace
from tests.dist.traced_steps import LAYOUTS, WAYS, traced_steps

pytestmark = [pytest.mark.all, pytest.mark.timeout(600)]  # the first test pays for the launches

# Two layers, hidden size 64, 16 rows one by one; see probe_tasks.
NUM_LAYERS, HIDDEN, NUM_ROWS = 2, 64, 16

Tensors = dict[tuple[int, str, str], torch.Tensor]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return traced_steps(tmp_path_factory, "one rank", "two ranks") / "probe"


@cache
def merged_of(folder: Path) -> Tensors:
    """All tensors of a step, NaN where a token is masked out; no replica may disagree."""
    tensors: Tensors = {}
    with open_trace(folder) as reader:
        for key in reader.keys(0):
            merged = reader.merge(key)
            assert merged.conflicts == (), key
            values = merged.tensor.clone()
            if merged.present is not None:
                values.masked_fill_(~merged.present, torch.nan)
            tensors[key.update, key.kind, key.name] = values
    return tensors


def ledger_of(folder: Path, global_rank: int) -> tuple[LedgerCall, ...]:
    """The collectives of one rank."""
    with open_trace(folder) as reader:
        by_rank = {place.global_rank: footer for place, footer in reader.footers(0)}
        return tuple(by_rank[global_rank].ledgers["collective"])


def read_json(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def by_place(reader: TraceReader, key: TraceKey) -> dict[str, float]:
    """Values by ``row,position``."""
    rows, merged = reader.footer(key.step).rows, reader.merge(key)
    assert merged.present is not None
    places = {token: rows.find(token) for token in merged.present.nonzero().flatten().tolist()}
    return {f"{row},{position}": float(merged.tensor[token]) for token, (row, position) in places.items()}


@pytest.mark.parametrize("way", WAYS)
def test_the_trace_has_what_the_learner_computed_by_row_and_position(root: Path, way: str) -> None:
    folder = root / "values" / way
    facts = read_json(folder / "facts.json")
    scores = {f"score/{name}/0" for name in ("old_logprobs", "ref_logprobs", "values")}
    terms = {f"loss/{name}/{update}" for name in ("ratio", "pg_loss", "kl_loss", "total_loss") for update in range(4)}
    logprobs = {f"output/logprobs/{update}" for update in range(4)}
    assert set(facts) == {*scores, *terms, *logprobs, "advantage/advantages/0"}
    with open_trace(folder) as reader:
        for fact, expected in facts.items():
            kind, name, update = fact.split("/")
            key = TraceKey(step=0, update=int(update), kind=kind, name=name)  # type: ignore[arg-type]
            assert by_place(reader, key) == expected, fact


def test_every_epoch_trains_on_the_same_rows_again(root: Path) -> None:
    with open_trace(root / "values" / "packing") as reader:
        footer = reader.footer(0)
    batch = random_batch(SEED, longest=LONGEST_ROW)
    assert footer.rows.identities == tuple(str(identity) for identity in batch.identities)
    assert footer.rows.lengths == tuple(batch.lengths.tolist())
    first, second = tuple(range(8)), tuple(range(8, 16))
    assert footer.update_rows == (first, second, first, second)


def test_packing_gives_the_same_tensors_as_padding(root: Path) -> None:
    assert_same(merged_of(root / "values" / "micro-batch-2"), merged_of(root / "values" / "packing"))


def assert_same(expected: Mapping[tuple[int, str, str], torch.Tensor], found: Tensors) -> None:
    """The same keys, shapes, dtypes and masks, and values to 1e-12, relative to the largest of the tensor."""
    assert set(found) == set(expected)
    for key, values in expected.items():
        assert found[key].dtype is values.dtype, key
        assert torch.equal(found[key].isnan(), values.isnan()), key
        scale = float(values.double().abs().nan_to_num().max()) if values.numel() else 0.0
        difference = (found[key].double() - values.double()).abs().nan_to_num().max()
        assert float(difference) <= 1e-12 * max(scale, 1e-3), (key, float(difference), scale)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_tensors_of_one_process(root: Path, layout: str) -> None:
    """Of the distributed optimizer each rank holds a range, and its moments are put together from these."""
    assert_same(merged_of(root / "layout" / "tp1"), merged_of(root / "layout" / layout))


def test_moments_are_those_of_adam(root: Path) -> None:
    """After one update: 0.1 · g and 0.05 · g², with the gradient as it was clipped."""
    tensors = merged_of(root / "layout" / "tp1")
    names = [name for _, kind, name in tensors if kind == "gradient"]
    norm = float(tensors[0, "gradient_norm", "grad_norm"])
    total = sum(float(tensors[0, "gradient", name].square().sum()) for name in names)
    assert norm == pytest.approx(total**0.5, rel=1e-12)
    clip = min(1.0, 0.3 / (norm + 1e-6))
    for name in names:
        gradient = tensors[0, "gradient", name] * clip
        torch.testing.assert_close(tensors[0, "optimizer", f"{name}.exp_avg"], 0.1 * gradient, rtol=1e-6, atol=1e-15)
        torch.testing.assert_close(
            tensors[0, "optimizer", f"{name}.exp_avg_sq"], 0.05 * gradient.square(), rtol=1e-6, atol=1e-15
        )
    assert float(tensors[0, "optimizer", "num_updates"]) == 1
    assert len([name for _, kind, name in tensors if kind == "optimizer"]) == 2 * len(names) + 1


def test_a_ledger_has_the_all_reduces_of_tensor_parallelism_that_can_be_counted(root: Path) -> None:
    """Of whole activations, per micro-batch and pass: the embedding's, and two of each layer, forward.

    Backward two of each layer, and one of the output layer. Old and reference log-probabilities are a forward pass
    each, and the update one forward and one backward.
    """
    forward, backward = 1 + 2 * NUM_LAYERS, 2 * NUM_LAYERS + 1
    columns = -(-max(random_batch(SEED, longest=LONGEST_ROW).lengths.tolist()) // 8) * 8
    for global_rank in range(2):
        calls = ledger_of(root / "layout" / "tp2", global_rank)
        counts = Counter(call.operation for call in calls if call.num_elements == columns * HIDDEN)
        assert counts == {"all_reduce": NUM_ROWS * (3 * forward + backward)}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_members_of_a_group_issue_the_same_collectives_in_the_same_order(root: Path, layout: str) -> None:
    one, other = (
        [call for call in ledger_of(root / "layout" / layout, global_rank) if call.group == (0, 1)]
        for global_rank in range(2)
    )
    point_to_point = {"send": "recv", "recv": "send"}
    collective = [[call for call in calls if call.operation not in point_to_point] for calls in (one, other)]
    assert collective[0] == collective[1]
    assert collective[0]
    assert {call.dtype for call in collective[0]} <= {"float64", "int64", "int32", "float32", "uint8", "bool"}


def test_what_one_stage_sends_the_next_one_receives(root: Path) -> None:
    calls = [ledger_of(root / "layout" / "pp2", global_rank) for global_rank in range(2)]
    for sender, receiver in ((0, 1), (1, 0)):
        sent, received = (
            [(call.dtype, call.num_elements) for call in calls[rank] if (call.operation, call.group) == wanted]
            for rank, wanted in ((sender, ("send", (sender, receiver))), (receiver, ("recv", (sender, receiver))))
        )
        assert sent == received
        assert len(sent) == NUM_ROWS * (3 if sender == 0 else 1)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("way", ["full", "sketch"])
def test_tracing_changes_no_bit_of_the_training(root: Path, precision: str, way: str) -> None:
    digests = read_json(root / "unchanged" / precision / "digests.json")
    assert digests[way] == digests["no probe"]
    assert len(digests["no probe"]) > 30


@pytest.mark.parametrize(("precision", "has_weights"), [("float32", False), ("bfloat16", True)])
def test_a_model_in_less_than_float32_has_weights_beside_its_parameters(
    root: Path, precision: str, has_weights: bool
) -> None:
    tensors = merged_of(root / "unchanged" / precision / "full")
    dtypes = {kind: tensors[key].dtype for key in tensors for kind in (key[1],)}
    assert dtypes["parameter"] is dtypes["optimizer"] is dtypes["initial"] is torch.float32
    assert ("weight" in dtypes) == has_weights
    if has_weights:
        assert dtypes["weight"] is torch.bfloat16


def test_a_log_of_operations_has_nothing_of_what_a_trace_computes(root: Path) -> None:
    """Not a run that traces nothing, nor one that traces everything, whose copies are taken outside of any mode."""
    found = read_json(root / "operations" / "operations.json")
    assert found["calls"] > 20
    assert found["operations of calls"] == 0
    assert found["counted"] == found["no probe"]
    assert found["another rank"] == found["no probe"]
    assert found["full"] == found["no probe"]
