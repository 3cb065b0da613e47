"""Grafts: what follows the module equals the reference bit for bit, in both passes; and whatever cannot be put in."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mock_scheduler.config.instruments import GraftConfig, TraceConfig
from mock_scheduler.errors import ConfigError, TraceError
from mock_scheduler.megatron.probe.graft import GraftProbe, put_elements
from mock_scheduler.megatron.probe.graft_source import GraftSource
from mock_scheduler.megatron.probe.interface import TrainingProbe
from mock_scheduler.megatron.probe.module_probe import ModuleProbe
from mock_scheduler.megatron.probe.shares import TokenIndex, element_places
from mock_scheduler.megatron.probe.watches import watch_expert_outputs, watch_probabilities
from mock_scheduler.support.run_output import Clock
from mock_scheduler.trace.entries import RankPlace, RowTable, StepFooter, TraceEntry
from mock_scheduler.trace.full.writing import FullSink
from mock_scheduler.trace.selection import TraceSelection
from mock_scheduler.trace.shards import whole
from pipelines.config.schema import PipelineConfig
from pipelines.megatron.places import ModelInputs, OwnBatch
from pipelines.observation import StepObservation
from tests.batches import make_batch
from tests.dist.conftest import launch
from tests.dist.traced_steps import SHORT
from tests.megatron.tiny_model import VOCAB, micro_batch, one_rank, tiny_model
from tests.merged_traces import Merged, different_bits, distances, merge_step, tensor_of
from tests.pipelines.workers.graft_worker import AFTER, grafted_names

# Two rows of four tokens, in two ways of batching; padding is -1.
IDENTITIES = ("train/0/a", "train/0/b")
QKV = "decoder.layers.1.self_attention.linear_qkv"
MLP = "decoder.layers.1.mlp"


def own(index: int, rows: list[list[int]]) -> OwnBatch:
    batch = micro_batch(index, rows)
    inputs = ModelInputs(tokens=batch.tokens, positions=batch.positions, row_ids=batch.row_ids)
    return OwnBatch(batch=batch, inputs=inputs)


PADDED = [own(0, [[0, 1, 2, 3, -1]]), own(1, [[4, 5, 6, 7, -1]])]
TOGETHER = [own(0, [[4, 5, 6, 7, -1, -1], [0, 1, 2, 3, -1, -1]])]


class OneRank:
    """All ranks are this one."""

    def gather(self, payload: bytes) -> Sequence[bytes]:
        return [payload]


def batch_of(identities: Sequence[str] = IDENTITIES, lengths: Sequence[int] = (4, 4)) -> RowTable:
    return RowTable(identities=tuple(identities), lengths=tuple(lengths))


def train(
    folder: Path,
    model: Any,
    batches: Sequence[OwnBatch] = PADDED,
    *,
    graft: TrainingProbe | None = None,
    batch: RowTable | None = None,
) -> Merged:
    """One update, traced as the pipeline does it, with ``graft`` before the trace; the whole trace."""
    batch, graft = batch or batch_of(), graft or TrainingProbe()
    sink = FullSink(folder, step=0, place=RankPlace(global_rank=0, coordinates={"tp": 0}), world_size=1)
    kinds: Any = ["activation", "router", "logits", "activation_gradient"]
    probe = ModuleProbe(one_rank(), TraceSelection(TraceConfig(level="full", kinds=kinds)), sink.add)
    graft.start_step(batch, batches, [])
    probe.start_step(TokenIndex(batch.lengths))
    losses = []
    weights = torch.arange(1.0, VOCAB + 1.0, dtype=torch.float64)
    with graft.watching(model, 0), probe.watching(model, 0):
        for share in batches:
            with graft.computing(share), probe.computing(share):
                logits = model.chunks[0](share.inputs.tokens)
            losses.append((logits.square() @ weights)[share.batch.row_ids >= 0].sum())
        for loss in losses:
            loss.backward()
    for name, parameter in model.chunks[0].named_parameters():
        spec = whole(name, tuple(parameter.shape))
        sink.add(TraceEntry(update=0, kind="gradient", spec=spec, tensor=parameter.grad))
    sink.close(StepFooter(rows=batch, update_rows=((0, 1),), ranks=(0,)))
    return merge_step(folder)


def graft_of(trace_dir: Path, *names: str, **values: Any) -> GraftProbe:
    config = GraftConfig(trace_dir=str(trace_dir), names=list(names), **values)
    return GraftProbe(one_rank(), GraftSource(config))


def with_other_weight(**options: Any) -> Any:
    """Layer 1's queries, keys and values are computed by weights 3 % larger."""
    model = tiny_model(**options)
    with torch.no_grad():
        model.chunks[0].decoder.layers[1].self_attention.linear_qkv.weight.mul_(1.03)
    return model


def with_other_backward(norm_name: str = "decoder.final_layernorm") -> Any:
    """The same forward pass; the gradient that a norm hands back is 1.5 times as large."""
    model = tiny_model()
    norm = model.chunks[0].get_submodule(norm_name)
    norm.register_full_backward_hook(lambda module, grads, outputs: (grads[0] * 1.5,))
    return model


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Merged]:
    folder = tmp_path_factory.mktemp("graft") / "reference"
    return folder, train(folder, tiny_model())


def names_of(different: Sequence[str], kind: str) -> set[str]:
    """The names of one kind out of descriptions of keys."""
    words = f"{kind} of "
    return {text.removeprefix(words).partition(" at step")[0] for text in different if text.startswith(words)}


def test_all_that_follows_a_grafted_module_is_the_references(reference: tuple[Path, Merged], tmp_path: Path) -> None:
    folder, expected = reference
    plain = train(tmp_path / "plain", with_other_weight())
    assert QKV in names_of(different_bits(plain, expected), "activation")
    graft = graft_of(folder, QKV)
    found = train(tmp_path / "grafted", with_other_weight(), graft=graft)
    different = different_bits(found, expected)
    assert names_of(different, "activation") == names_of(different, "logits") == set()
    # Downstream all is equal; the module's own backward pass still has its weight.
    assert "decoder.layers.0" in names_of(different, "activation gradient")
    assert {name for name in names_of(different, "activation gradient") if ".1." in name} == {
        "decoder.layers.1.input_layernorm"
    }
    assert (
        names_of(different, "gradient") & {"output_layer.weight", f"{MLP}.linear_fc1.weight", f"{QKV}.weight"} == set()
    )
    assert graft.fired == {QKV: 2}
    graft.check_fired(OneRank())


def test_all_that_follows_a_grafted_gradient_is_the_references(reference: tuple[Path, Merged], tmp_path: Path) -> None:
    folder, expected = reference
    plain = names_of(different_bits(train(tmp_path / "plain", with_other_backward()), expected), "activation gradient")
    assert "decoder.layers.1" in plain
    assert "decoder.final_layernorm" not in plain
    graft = graft_of(folder, "decoder.layers.1", kind="activation_gradient")
    found = train(tmp_path / "grafted", with_other_backward(), graft=graft)
    assert different_bits(found, expected) == []
    assert graft.fired == {"decoder.layers.1": 2}


def test_a_grafted_gradient_is_that_of_a_module_within_which_shows_the_same_tensor(
    reference: tuple[Path, Merged], tmp_path: Path
) -> None:
    """The attention's output is that of its last linear layer, which was told as a second cause."""
    folder, expected = reference
    attention, changed = "decoder.layers.1.self_attention", "decoder.layers.1.pre_mlp_layernorm"
    within = {attention, f"{attention}.linear_proj", f"{attention}.core_attention", QKV}
    plain = train(tmp_path / "plain", with_other_backward(changed))
    assert within <= names_of(different_bits(plain, expected), "activation gradient")
    graft = graft_of(folder, attention, kind="activation_gradient")
    found = train(tmp_path / "grafted", with_other_backward(changed), graft=graft)
    assert within & names_of(different_bits(found, expected), "activation gradient") == set()


@pytest.mark.parametrize("kind", ["activation", "activation_gradient"])
def test_recomputation_gets_the_same_in_both_runs_of_a_module(
    reference: tuple[Path, Merged], tmp_path: Path, kind: str
) -> None:
    folder, _ = reference
    grafts = [graft_of(folder, QKV, kind=kind) for _ in range(2)]
    plain = train(tmp_path / "plain", with_other_weight(), graft=grafts[0])
    again = train(tmp_path / "again", with_other_weight(recomputes=True), graft=grafts[1])
    assert different_bits(again, plain) == []
    assert (grafts[0].fired[QKV], grafts[1].fired[QKV]) == (2, 4 if kind == "activation" else 2)


def test_tokens_are_found_by_identity_and_padding_keeps_its_own_values(
    reference: tuple[Path, Merged], tmp_path: Path
) -> None:
    """The batch has the rows the other way round, in one micro-batch with more padding."""
    folder, expected = reference
    model, seen = with_other_weight(), []
    core = model.chunks[0].decoder.layers[1].self_attention.core_attention
    handle = core.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].detach().clone()))
    batch = batch_of(IDENTITIES[::-1])
    train(tmp_path / "plain", model, TOGETHER, batch=batch)
    found = train(tmp_path / "grafted", model, TOGETHER, graft=graft_of(folder, QKV), batch=batch)
    handle.remove()
    value, other = (tensor_of(merged, "activation", QKV) for merged in (found, expected))
    assert torch.equal(value, other[[4, 5, 6, 7, 0, 1, 2, 3]])
    plain, grafted = seen
    assert torch.equal(grafted[4:], plain[4:])  # [s, b, 3h]: two places of padding in both lines
    assert not torch.equal(grafted[:4], plain[:4])


def test_several_modules_are_grafted_at_once(reference: tuple[Path, Merged], tmp_path: Path) -> None:
    folder, expected = reference
    model = with_other_weight()
    with torch.no_grad():
        model.chunks[0].decoder.layers[0].mlp.linear_fc2.weight.mul_(0.5)
    names = ("decoder.layers.0.mlp.linear_fc2", QKV)
    found = train(tmp_path / "both", model, graft=graft_of(folder, *names))
    assert names_of(different_bits(found, expected), "activation") == set()
    assert names_of(different_bits(found, expected), "logits") == set()


def test_a_mean_over_ranks_is_taken_back_out_of_a_traced_gradient(
    reference: tuple[Path, Merged], tmp_path: Path
) -> None:
    """Where each rank's loss is a mean, traced gradients are parts of one sum over dp · cp ranks: here 4."""
    folder, _ = reference
    rank = one_rank(dp_size=2, cp_size=2)
    graft = graft_of(folder, "output_layer", kind="activation_gradient")
    model = tiny_model(calculate_per_token_loss=False, runtime=rank)
    found = train(tmp_path / "part", model, graft=graft)
    expected = train(tmp_path / "whole", tiny_model())
    name = "output_layer"
    assert torch.equal(tensor_of(found, "activation_gradient", name), tensor_of(expected, "activation_gradient", name))
    weight = "decoder.layers.1.mlp.linear_fc2.weight"
    assert torch.equal(tensor_of(found, "gradient", weight), 4.0 * tensor_of(expected, "gradient", weight))


def test_a_graft_that_never_fired_is_an_error(reference: tuple[Path, Merged]) -> None:
    graft = graft_of(reference[0], QKV, MLP)
    graft.start_step(batch_of(), PADDED, [])
    with graft.watching(tiny_model(), 1), graft.computing(PADDED[0]):
        pass
    with pytest.raises(TraceError) as raised:
        graft.check_fired(OneRank())
    assert str(raised.value) == (
        "graft: nothing was put in at step 0, update 0, for these names, since no module that ran there shows them:"
        f"\n  - {QKV}\n  - {MLP}"
    )


def test_a_name_step_or_update_that_the_trace_lacks_is_named_with_the_nearest(reference: tuple[Path, Merged]) -> None:
    folder = reference[0]
    with pytest.raises(TraceError) as raised:
        graft_of(folder, f"{MLP}.linear_fc3", QKV)
    assert str(raised.value).startswith(
        f"graft.names: {folder} has no activation at step 0, update 0, of:\n  - {MLP}.linear_fc3 (nearest: "
    )
    assert "decoder.layers.1.mlp.linear_fc1" in str(raised.value)
    assert QKV not in str(raised.value)
    with pytest.raises(TraceError, match=r"^graft\.step 3 is not in .*, which has steps 0$"):
        graft_of(folder, QKV, step=3)
    with pytest.raises(TraceError, match="has no activation at step 0, update 2, of:"):
        graft_of(folder, QKV, update=2)


def test_another_batch_is_refused(reference: tuple[Path, Merged]) -> None:
    graft = graft_of(reference[0], QKV)
    with pytest.raises(TraceError) as raised:
        graft.start_step(batch_of(("train/0/a", "train/0/c"), (5, 4)), PADDED, [])
    assert str(raised.value) == (
        f"graft: the batch is not that of step 0 of {reference[0]}: 2 of 2 rows are others: train/0/a has 5 tokens "
        "here, 4 there; train/0/c is not there"
    )


def test_another_shape_and_another_precision_are_refused(reference: tuple[Path, Merged], tmp_path: Path) -> None:
    folder = reference[0]
    with pytest.raises(TraceError) as raised:
        train(tmp_path / "shape", tiny_model(num_query_groups=1), graft=graft_of(folder, QKV))
    assert str(raised.value) == (
        f"graft: the activation of {QKV} at step 0, update 0 is [6, 4] for each token in {folder}, and [4, 4] in this "
        "model"
    )
    model = tiny_model()
    model.chunks[0].float()
    graft = graft_of(folder, QKV)
    graft.start_step(batch_of(), PADDED, [])
    with graft.watching(model, 0), graft.computing(PADDED[0]), pytest.raises(TraceError) as raised:
        model.chunks[0](PADDED[0].inputs.tokens)
    assert str(raised.value) == (
        f"graft: the activation of {QKV} at step 0, update 0 is float64 in {folder}, and float32 in this run: a graft "
        "must have its bits"
    )


class NoDump:
    """A debug dump of nothing."""

    def probe(self, *arguments: object, **named: object) -> None:
        """No probe."""


def observation_of(folder: Path, trace_dir: Path, **graft: Any) -> StepObservation:
    values = {
        "exp_name": "grafted",
        "output_dir": str(folder),
        "max_steps": 2,
        "trace": {"level": "full"},
        "graft": {"trace_dir": str(trace_dir), "names": [QKV], **graft},
    }
    config = PipelineConfig.model_validate(values)
    dump: Any = NoDump()
    return StepObservation(config, one_rank(), OneRank(), dump=dump, clock=Clock())


def test_a_step_whose_graft_never_fired_fails_and_leaves_no_trace(
    reference: tuple[Path, Merged], tmp_path: Path
) -> None:
    observation = observation_of(tmp_path, reference[0])
    with (
        pytest.raises(TraceError, match=r"^graft: nothing was put in at step 0, update 0"),
        observation.step(0, make_batch(1, 2)),
    ):
        pass
    assert not list(tmp_path.rglob("*.safetensors"))


def test_a_graft_at_a_step_or_update_that_the_run_does_not_have_is_refused(
    reference: tuple[Path, Merged], tmp_path: Path
) -> None:
    updates = PipelineConfig(exp_name="x").updates_per_step
    for graft in ({"step": 2}, {"update": updates}):
        with pytest.raises(ConfigError) as raised:
            observation_of(tmp_path, reference[0], **graft)
        step, update = graft.get("step", 0), graft.get("update", 0)
        assert str(raised.value) == (
            f"graft.step {step}, graft.update {update}: the run has steps 0 to 1, of {updates} updates each, so "
            "nothing would be put in"
        )


def test_elements_are_put_at_their_places_without_moving_the_others() -> None:
    tensor = torch.arange(12.0).view(3, 4).T
    places = (torch.tensor([[0, 3]]), torch.tensor([[2, 1]]))
    found = put_elements(tensor, places, torch.tensor([[-1.0, -0.0]]))
    assert found.tolist() == [[0.0, 4.0, -1.0], [1.0, 5.0, 9.0], [2.0, 6.0, 10.0], [3.0, 0.0, 11.0]]
    assert bool(found[3, 1].signbit())
    assert found.stride() == tensor.stride()


def test_a_slot_without_an_expert_is_no_element() -> None:
    """Else the reference's 0 of an empty slot would be put at the first element."""
    found: list[torch.Tensor | None] = []
    output: Any = SimpleNamespace(name="router", form=SimpleNamespace(local_shape=(2,)))
    tokens: Any = SimpleNamespace(places=torch.tensor([1, 0]))
    router: Any = torch.nn.Module()
    router.topk = 2
    router.forward = lambda: (torch.ones(2, 3), torch.tensor([[True, False, True], [False, True, False]]))
    with watch_probabilities(router, lambda probs, gather: found.append(element_places(output, probs, gather, tokens))):
        router()
    assert [None if item is None else item.tolist() for item in found] == [[[4, -1], [0, 2]]]


def test_a_later_watch_of_experts_sees_what_an_earlier_one_put_there() -> None:
    """As of hooks: a graft is entered first, and the trace behind it shows it."""
    seen: list[torch.Tensor] = []
    dispatcher = SimpleNamespace(routing_map=torch.ones(2, 1, dtype=torch.bool), combine_postprocess=lambda rows: rows)
    layer: Any = SimpleNamespace(token_dispatcher=dispatcher, config=SimpleNamespace(moe_router_topk=1))
    before = dispatcher.combine_postprocess
    with watch_expert_outputs(layer, lambda rows, gather: rows + 1.0):
        with watch_expert_outputs(layer, lambda rows, gather: seen.append(rows)):
            result = dispatcher.combine_postprocess(torch.zeros(2, 3))
        dispatcher.combine_postprocess(torch.zeros(2, 3))
    assert dispatcher.combine_postprocess is before
    assert [rows.tolist() for rows in seen] == [[[1.0] * 3] * 2]
    assert result.tolist() == [[1.0] * 3] * 2


#: Of two ranks each: every way in which an output is split, and its one process, which takes row by row.
CASES = SHORT


@pytest.mark.all
@pytest.mark.timeout(900)
def test_in_every_layout_each_rank_puts_its_own_part_in(tmp_path: Path) -> None:
    """Outputs of every form, where weights of layers 0 to 2 are others than the reference's; and their gradients."""
    references = tuple(dict.fromkeys(case.reference.name for case in CASES))
    launch(1, tmp_path, references, module="tests.pipelines.workers.graft_worker")
    launch(2, tmp_path, tuple(case.name for case in CASES), module="tests.pipelines.workers.graft_worker")
    for case in CASES:
        expected = merge_step(tmp_path / "reference" / case.reference.name)
        names = grafted_names(case)
        for kind in ("activation", "activation_gradient"):
            found = merge_step(tmp_path / kind / case.name)
            kinds = ("activation", "router", "logits") if kind == "activation" else (kind,)
            mine = {key for key in found if key.name in names and key.kind in kinds and key.update == 0}
            assert len(mine) == len(names), case.name
            only = [{key: merged[key] for key in mine} for merged in (found, expected)]
            assert different_bits(only[0], only[1]) == [], case.name
            if kind == "activation":
                after = {key for key in found if key.name in AFTER and key.kind in kinds and key.update == 0}
                assert len(after) == 1
                for key in after:
                    assert distances({key: found[key]}, {key: expected[key]})[key] < 1e-12, case.name
