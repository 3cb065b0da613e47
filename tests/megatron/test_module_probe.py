"""The probe of modules: against plain forward passes, against itself, and its errors."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.identity_op import IdentityOp
from safetensors.torch import load_file

from benchmarks.layouts.cases import LONGEST_ROW, SEED
from benchmarks.layouts.training import random_batch
from mock_scheduler.config.instruments import TraceConfig
from mock_scheduler.errors import TraceError
from mock_scheduler.megatron.probe.module_probe import ModuleProbe
from mock_scheduler.megatron.probe.shares import TokenIndex
from mock_scheduler.megatron.probe.watches import (
    chosen_experts,
    watch_choice,
    watch_expert_outputs,
    watch_output,
    watch_probabilities,
    watch_scores,
)
from mock_scheduler.trace.entries import TraceEntry, Unobserved
from mock_scheduler.trace.full.reader import open_trace
from mock_scheduler.trace.selection import TraceSelection
from mock_scheduler.trace.shards import Block, Split, place_shard
from pipelines.megatron.places import ModelInputs, OwnBatch
from tests.dist.traced_steps import DENSE, EXPERTS, traced_steps
from tests.megatron.tiny_model import HIDDEN, VOCAB, Scale, micro_batch, one_rank, tiny_model
from tests.merged_traces import Merged, different_bits, distances, merge_step, tensor_of

pytestmark = pytest.mark.timeout(600)  # the first test pays for the launch

BOUND = 1e-12


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Traces of one process."""
    return traced_steps(tmp_path_factory, "modules")


@functools.cache
def merge_once(folder: Path) -> Merged:
    """As ``merge_step``, for all tests of this module."""
    return merge_step(folder)


def merge_plain(runs: Path, case: str) -> Merged:
    """What modules compute in a case without options."""
    if case == DENSE:
        return merge_once(runs / f"{case}plain")
    merged = merge_once(runs / f"full/{case}plain")
    return {key: item for key, item in merged.items() if key.kind not in ("gradient", "parameter")}


def by_both_updates(merged: Merged, kind: str, name: str) -> torch.Tensor:
    """Of each token what the update that trains on it computes; token tensors are 0 elsewhere."""
    return tensor_of(merged, kind, name) + tensor_of(merged, kind, name, update=1)


def own(index: int, rows: list[list[int]]) -> OwnBatch:
    batch = micro_batch(index, rows)
    return OwnBatch(
        batch=batch, inputs=ModelInputs(tokens=batch.tokens, positions=batch.positions, row_ids=batch.row_ids)
    )


class Collected:
    """What a probe handed on, as whole tensors of two rows of four tokens."""

    def __init__(self) -> None:
        self.entries: list[TraceEntry] = []

    def __call__(self, entry: TraceEntry) -> None:
        self.entries.append(entry)

    def whole(self, kind: str, name: str) -> torch.Tensor:
        pieces = [entry for entry in self.entries if (entry.kind, entry.spec.name) == (kind, name)]
        result = torch.full(pieces[0].spec.global_shape, torch.nan, dtype=pieces[0].tensor.dtype)
        for piece in pieces:
            place_shard(result, piece.tensor, piece.spec)
        return result

    @property
    def names(self) -> set[tuple[str, str]]:
        return {(entry.kind, entry.spec.name) for entry in self.entries}


def build_probe(collected: Collected, **config: Any) -> ModuleProbe:
    kinds = {"kinds": ["activation", "router", "logits", "activation_gradient"], **config}
    probe = ModuleProbe(one_rank(), TraceSelection(TraceConfig(level="full", **kinds)), collected)
    probe.start_step(TokenIndex([4, 4]))
    return probe


PADDED = [own(0, [[0, 1, 2, 3, -1]]), own(1, [[4, 5, 6, 7, -1]])]
TOGETHER = [own(0, [[4, 5, 6, 7, -1, -1], [0, 1, 2, 3, -1, -1]])]


def train(probe: ModuleProbe, model: Any, batches: list[OwnBatch]) -> None:
    """All forward passes, then all backward passes in the same order; the loss is a sum over real tokens."""
    losses = []
    with probe.watching(model, 0):
        for share in batches:
            with probe.computing(share):
                logits = model.chunks[0](share.inputs.tokens)
            weights = torch.arange(1.0, VOCAB + 1.0, dtype=torch.float64)
            losses.append((logits.square() @ weights)[share.batch.row_ids >= 0].sum())
        for loss in losses:
            loss.backward()


@pytest.mark.parametrize("case", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_activations_are_those_of_each_row_on_its_own(runs: Path, case: str) -> None:
    merged, plain = merge_plain(runs, case), load_file(runs / "rows" / f"{case}plain.safetensors")
    num_compared = 0
    for key, item in merged.items():
        if key.update == 0 and key.kind in ("activation", "logits") and not key.name.endswith(".experts"):
            expected = plain[key.name][:, : item.tensor[0].numel()]  # without vocabulary padding
            assert item.present is not None
            rows = item.present.flatten()
            found = item.tensor[rows].flatten(1)
            assert float((found - expected[rows]).norm() / expected[rows].norm()) < BOUND, key.name
            num_compared += 1
    assert num_compared == (3 + 4 * 12 if case == DENSE else 3 + 12 + 3 * 11)


def test_a_routers_choice_and_weights_are_those_of_each_row_on_its_own(runs: Path) -> None:
    merged, plain = merge_plain(runs, EXPERTS), load_file(runs / "rows" / f"{EXPERTS}plain.safetensors")
    name = "decoder.layers.1.mlp.router"
    present = next(item.present for key, item in merged.items() if key.name == f"{name}.probs" and key.update == 0)
    assert present is not None
    rows = present.flatten()
    chosen, probs = tensor_of(merged, "router", f"{name}.chosen_experts"), tensor_of(merged, "router", f"{name}.probs")
    assert torch.equal(chosen[rows], plain[f"{name}.map"][rows].nonzero()[:, 1].view(-1, 2))
    assert float((probs[rows] - plain[name][rows].gather(1, chosen[rows])).abs().max()) < BOUND
    logits = tensor_of(merged, "router", f"{name}.logits")[rows]
    scores = logits.sigmoid().gather(1, chosen[rows])
    assert float((probs[rows] - scores / scores.sum(dim=1, keepdim=True)).abs().max()) < BOUND


def test_outputs_of_experts_and_shared_experts_add_up_to_the_mlp(runs: Path) -> None:
    merged = merge_once(runs / f"full/{EXPERTS}plain")
    for layer in (1, 2, 3):
        mlp = f"decoder.layers.{layer}.mlp"
        experts = by_both_updates(merged, "activation", f"{mlp}.experts")
        shared = by_both_updates(merged, "activation", f"{mlp}.shared_experts")
        expected = by_both_updates(merged, "activation", mlp)
        assert float((experts.sum(dim=1) + shared - expected).norm() / expected.norm()) < BOUND


def test_an_experts_output_is_that_of_its_weights_times_its_probability(runs: Path) -> None:
    """The second update, by the parameters after the first."""
    merged = merge_once(runs / f"full/{EXPERTS}plain")
    mlp = "decoder.layers.2.mlp"
    hidden = tensor_of(merged, "activation", "decoder.layers.2.pre_mlp_layernorm", update=1)
    chosen = tensor_of(merged, "router", f"{mlp}.router.chosen_experts", update=1)
    probs = tensor_of(merged, "router", f"{mlp}.router.probs", update=1)
    found = tensor_of(merged, "activation", f"{mlp}.experts", update=1)
    expected = torch.zeros_like(found)
    for expert in range(4):
        prefix = f"{mlp}.experts.local_experts.{expert}"
        first, second = (tensor_of(merged, "parameter", f"{prefix}.linear_fc{n}.weight") for n in (1, 2))
        gate, up = (hidden @ first.T).chunk(2, dim=1)
        output = (torch.nn.functional.silu(gate) * up) @ second.T
        expected += torch.where((chosen == expert).unsqueeze(2), probs.unsqueeze(2) * output.unsqueeze(1), 0.0)
    assert float((found - expected).norm() / expected.norm()) < BOUND


@pytest.mark.parametrize(
    ("weight", "inputs", "output"),
    [
        ("output_layer", "decoder.final_layernorm", "output_layer"),
        ("decoder.layers.0.mlp.linear_fc1", "decoder.layers.0.pre_mlp_layernorm", "decoder.layers.0.mlp.linear_fc1"),
        ("decoder.layers.3.mlp.router", "decoder.layers.3.pre_mlp_layernorm", "decoder.layers.3.mlp.router.logits"),
        (
            "decoder.layers.2.self_attention.linear_proj",
            "decoder.layers.2.self_attention.core_attention",
            "decoder.layers.2.self_attention.linear_proj",
        ),
    ],
)
def test_activations_and_their_gradients_make_the_gradients_of_weights(
    runs: Path, weight: str, inputs: str, output: str
) -> None:
    """Of a linear layer: the sum over tokens of its output's gradient times its input, by the response tokens."""
    merged = merge_once(runs / f"full/{EXPERTS}plain")
    batch = random_batch(SEED, longest=LONGEST_ROW)
    for update in (0, 1):
        num_tokens = float(batch.response_lengths[update * 8 : update * 8 + 8].sum())
        gradient = tensor_of(merged, "activation_gradient", output, update=update).flatten(1)
        activation = tensor_of(merged, "activation", inputs, update=update).flatten(1)
        expected = tensor_of(merged, "gradient", f"{weight}.weight", update=update)
        assert float((gradient.T @ activation / num_tokens - expected).norm() / expected.norm()) < BOUND


def test_recomputation_changes_no_bit_and_no_name(runs: Path) -> None:
    assert different_bits(merge_once(runs / f"{EXPERTS}recompute-full"), merge_plain(runs, EXPERTS)) == []


def test_packing_and_recomputation_show_in_no_tensor(runs: Path) -> None:
    worst = distances(merge_once(runs / f"{EXPERTS}packing+recompute-uniform-2"), merge_plain(runs, EXPERTS))
    assert {key.describe(): error for key, error in worst.items() if not error < BOUND} == {}


def test_tracing_changes_no_bit_of_gradients_and_parameters(runs: Path) -> None:
    state = merge_once(runs / f"state/{EXPERTS}plain")
    traced = merge_once(runs / f"full/{EXPERTS}plain")
    assert different_bits({key: item for key, item in traced.items() if key in state}, state) == []


def test_a_critic_has_names_of_its_own_and_a_value_for_each_token(runs: Path) -> None:
    num_tokens = int(random_batch(SEED, longest=LONGEST_ROW).lengths.sum())
    with open_trace(runs / f"{DENSE}critic+micro-batch-4") as trace:
        names = {key.name for key in trace.keys(0) if key.kind == "activation"}
        shapes = {key.name: trace.dtype_and_shape(key)[1] for key in trace.keys(0) if key.kind == "logits"}
    policy = {name for name in names if not name.startswith("critic.")}
    assert names - policy == {f"critic.{name}" for name in policy}
    assert shapes == {"output_layer": (num_tokens, 62), "critic.output_layer": (num_tokens, 1)}


def test_padding_and_batching_of_a_plain_model_show_nowhere() -> None:
    one, other = Collected(), Collected()
    train(build_probe(one), tiny_model(), PADDED)
    train(build_probe(other), tiny_model(), TOGETHER)
    assert one.names == other.names
    assert len(one.names) == 2 * (3 + 2 * 10)
    for kind, name in one.names:
        torch.testing.assert_close(one.whole(kind, name), other.whole(kind, name), rtol=BOUND, atol=BOUND)


def test_a_gradient_is_that_of_the_loss_with_respect_to_the_output() -> None:
    """By hand: the loss is the sum of v² · (v + 1) over logits of index v, and the last layer is linear."""
    collected, model = Collected(), tiny_model()
    train(build_probe(collected), model, PADDED)
    logits = collected.whole("logits", "output_layer")
    expected = 2.0 * logits * torch.arange(1.0, VOCAB + 1.0)
    torch.testing.assert_close(collected.whole("activation_gradient", "output_layer"), expected)
    before = expected @ model.chunks[0].output_layer.weight.detach()
    torch.testing.assert_close(collected.whole("activation_gradient", "decoder.final_layernorm"), before)
    assert not collected.whole("activation_gradient", "embedding").isnan().any()


def test_passes_that_run_again_are_told_apart_by_their_order() -> None:
    plain, recomputed = Collected(), Collected()
    train(build_probe(plain), tiny_model(), PADDED)
    train(build_probe(recomputed), tiny_model(recomputes=True), PADDED)
    assert plain.names == recomputed.names
    assert len(plain.entries) == len(recomputed.entries)
    for kind, name in plain.names:
        assert torch.equal(plain.whole(kind, name), recomputed.whole(kind, name)), name


class ForgetfulScale(Scale):
    """Another factor in channel 3, and for the second of two micro-batches alone, where a backward pass runs it."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.num_recomputed = 0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled():
            return super().forward(hidden)
        self.num_recomputed += 1
        return super().forward(hidden) * (1.0 + torch.eye(HIDDEN, dtype=torch.float64)[3] * (self.num_recomputed - 1))


def test_a_recomputation_with_other_values_is_traced_beside_its_first_pass() -> None:
    collected, model = Collected(), tiny_model(recomputes=True)
    model.chunks[0].decoder.layers[1].pre_mlp_layernorm = ForgetfulScale(HIDDEN)
    train(build_probe(collected, kinds=["activation", "recomputed"]), model, PADDED)
    again = {entry.spec.name: entry for entry in collected.entries if entry.kind == "recomputed"}
    # What comes before it in the layer is equal, and so is the first micro-batch.
    parts = ("pre_mlp_layernorm", "mlp.linear_fc1", "mlp.linear_fc2", "mlp")
    assert set(again) == {f"decoder.layers.1.{part}" for part in parts} | {"decoder.layers.1"}
    name = "decoder.layers.1.pre_mlp_layernorm"
    before = [entry.tensor for entry in collected.entries if (entry.kind, entry.spec.name) == ("activation", name)]
    assert again[name].spec.splits == (Split(dim=0, blocks=(Block(local_start=0, global_start=4, length=4),)),)
    expected = before[1].clone()
    expected[:, 3] *= 2.0
    assert torch.equal(again[name].tensor, expected)


def test_a_recomputation_is_compared_where_nothing_else_is_traced() -> None:
    collected, model = Collected(), tiny_model(recomputes=True)
    model.chunks[0].decoder.layers[1].pre_mlp_layernorm = ForgetfulScale(HIDDEN)
    train(build_probe(collected, kinds=["recomputed"]), model, PADDED)
    assert len(collected.entries) == 5
    right = Collected()
    train(build_probe(right, kinds=["recomputed"]), tiny_model(recomputes=True), PADDED)
    assert right.entries == []


def test_only_what_is_selected_is_watched() -> None:
    collected, model = Collected(), tiny_model()
    probe = build_probe(collected, kinds=["activation_gradient"], patterns=["decoder.layers.1.mlp*"])
    with probe.watching(model, 0):
        assert num_hooks(model.chunks[0]) == 3
    train(probe, model, PADDED)
    parts = ("", ".linear_fc1", ".linear_fc2")
    assert collected.names == {("activation_gradient", f"decoder.layers.1.mlp{part}") for part in parts}


def test_without_per_token_loss_gradients_are_parts_of_one_sum_over_ranks() -> None:
    whole, part = Collected(), Collected()
    train(build_probe(whole), tiny_model(), PADDED)
    train(build_probe(part), tiny_model(calculate_per_token_loss=False, runtime=one_rank(dp_size=2, cp_size=2)), PADDED)
    for name in ("output_layer", "embedding"):
        expected = whole.whole("activation_gradient", name) / 4
        assert torch.equal(part.whole("activation_gradient", name), expected)
    assert torch.equal(part.whole("logits", "output_layer"), whole.whole("logits", "output_layer"))


def num_hooks(module: torch.nn.Module) -> int:
    return sum(len(part._forward_hooks) for part in module.modules())


def test_nothing_of_the_watching_is_left_behind_even_after_an_error() -> None:
    model = tiny_model()
    probe = build_probe(Collected())
    with probe.watching(model, 0):
        assert num_hooks(model.chunks[0]) == 3 + 2 * 10
    assert num_hooks(model.chunks[0]) == 0
    with pytest.raises(RuntimeError, match="out of memory"), probe.watching(model, 0):
        raise RuntimeError("out of memory")
    assert num_hooks(model.chunks[0]) == 0
    with pytest.raises(RuntimeError, match="no kernel"), probe.computing(PADDED[0]):
        raise RuntimeError("no kernel")
    assert probe._current is None


def test_norms_that_are_fused_are_said_to_be_unobserved() -> None:
    model, collected = tiny_model(implementation="transformer_engine"), Collected()
    for layer in model.chunks[0].decoder.layers:
        layer.input_layernorm = layer.pre_mlp_layernorm = IdentityOp()
        for linear in (layer.self_attention.linear_qkv, layer.mlp.linear_fc1):
            linear.register_parameter("layer_norm_weight", torch.nn.Parameter(torch.ones(HIDDEN)))
    probe = build_probe(collected, kinds=["activation"], exclude=["*.1.input_layernorm"])
    train(probe, model, PADDED)
    qkv, fc1 = "self_attention.linear_qkv", "mlp.linear_fc1"
    assert probe.unobserved == tuple(
        Unobserved(
            kind="activation", name=f"decoder.layers.{name}", reason=f"TransformerEngine computes it within {at}"
        )
        for name, at in (("0.input_layernorm", qkv), ("0.pre_mlp_layernorm", fc1), ("1.pre_mlp_layernorm", fc1))
    )
    assert not {name for _, name in collected.names if name.endswith("layernorm")} - {"decoder.final_layernorm"}


def test_a_place_without_a_module_is_no_part_of_the_model() -> None:
    """A layer of another kind has other places; a norm that computes nothing, and is fused nowhere, is none."""
    model, collected = tiny_model(), Collected()
    layers = model.chunks[0].decoder.layers
    layers[0].input_layernorm = layers[1].pre_mlp_layernorm = IdentityOp()
    probe = build_probe(collected, kinds=["activation"])
    train(probe, model, PADDED)
    seen = {name for _, name in collected.names}
    assert "decoder.layers.1.input_layernorm" in seen
    assert not seen & {"decoder.layers.0.input_layernorm", "decoder.layers.1.pre_mlp_layernorm"}
    assert probe.unobserved == ()


def test_a_module_with_parameters_at_no_known_place_is_listed() -> None:
    model = tiny_model()
    model.chunks[0].decoder.layers[1].self_attention.gate = Scale(HIDDEN)
    probe = build_probe(Collected(), kinds=["activation"])
    train(probe, model, PADDED)
    assert probe.unobserved == (
        Unobserved(
            kind="activation",
            name="decoder.layers.1.self_attention.gate",
            reason="a Scale stands at no place whose output is known",
        ),
    )


def test_an_output_of_another_size_is_refused() -> None:
    model = tiny_model(hidden_size=HIDDEN + 1)
    with pytest.raises(TraceError) as raised:
        train(build_probe(Collected(), patterns=["embedding"]), model, PADDED)
    assert str(raised.value) == ("embedding: the module computed [5, 1, 8]; expected 9 numbers for each of 5 places")


def test_a_forward_pass_without_a_backward_pass_is_an_error() -> None:
    model, probe = tiny_model(), build_probe(Collected(), patterns=["decoder.layers.*"], kinds=["activation_gradient"])
    hidden = torch.ones(5, 1, HIDDEN, dtype=torch.float64, requires_grad=True)
    with pytest.raises(TraceError) as raised, probe.watching(model, 3), probe.computing(PADDED[0]):
        model.chunks[0].decoder.layers[1](hidden)
    message = str(raised.value)
    assert message.startswith("update 3 ended without the backward pass of a forward pass through these modules:\n")
    assert "\n  - decoder.layers.1\n" in message
    assert "decoder.layers.0" not in message


def test_what_the_backward_pass_does_not_reach_has_a_gradient_of_0() -> None:
    """The first layer's output is detached: the embedding and the layer itself change nothing."""
    collected, names = Collected(), ["decoder.layers.0", "decoder.layers.1"]
    model, probe = tiny_model(), build_probe(collected, patterns=names, kinds=["activation_gradient"])
    layers = model.chunks[0].decoder.layers
    hidden = torch.ones(5, 1, HIDDEN, dtype=torch.float64, requires_grad=True)
    with probe.watching(model, 0), probe.computing(PADDED[0]):
        lost, _ = layers[0](hidden)
        layers[1](lost.detach())[0].sum().backward()
    found = {entry.spec.name: entry.tensor for entry in collected.entries}
    assert sorted(found) == names
    assert found["decoder.layers.0"].abs().max() == 0.0
    assert found["decoder.layers.1"].abs().min() > 0.0
    assert found["decoder.layers.0"].shape == found["decoder.layers.1"].shape


def test_where_no_gradient_is_asked_for_there_is_none() -> None:
    """Frozen parameters before the first trainable one."""
    collected, names = Collected(), ["decoder.layers.0", "decoder.layers.1"]
    model, probe = tiny_model(), build_probe(collected, patterns=names, kinds=["activation", "activation_gradient"])
    layers = model.chunks[0].decoder.layers
    layers[0].requires_grad_(False)
    hidden = torch.ones(5, 1, HIDDEN, dtype=torch.float64)
    with probe.watching(model, 0), probe.computing(PADDED[0]):
        layers[1](layers[0](hidden)[0])[0].sum().backward()
    found = sorted((entry.kind, entry.spec.name) for entry in collected.entries)
    assert found == [("activation", names[0]), ("activation", names[1]), ("activation_gradient", names[1])]


def test_a_pass_that_nobody_announced_is_an_error() -> None:
    model, probe = tiny_model(), build_probe(Collected(), patterns=["embedding"])
    with (
        pytest.raises(TraceError, match=r"^embedding: a pass that no forward pass was announced for$"),
        probe.watching(model, 0),
    ):
        model.chunks[0].embedding(PADDED[0].inputs.tokens)


def test_a_pass_before_any_step_is_an_error() -> None:
    probe = ModuleProbe(one_rank(), TraceSelection(TraceConfig(level="full", kinds=["logits"])), Collected())
    with (
        pytest.raises(TraceError, match=r"^a forward pass was announced before the step: call start_step first$"),
        probe.computing(PADDED[0]),
    ):
        pass


class Router(torch.nn.Module):
    """Scores of four experts for three tokens, of whom each gets two experts."""

    topk = 2

    def gating(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * 10.0

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.routing(self.gating(hidden))

    def routing(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        routing_map = torch.zeros_like(logits, dtype=torch.bool).scatter(1, logits.topk(2, dim=1).indices, True)
        return logits * routing_map, routing_map


class AdaptedRouter(torch.nn.Module):
    """As Megatron-Bridge's: what its adapter adds to the scores is in no call of the router itself."""

    def __init__(self) -> None:
        super().__init__()
        self.to_wrap = Router()

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.to_wrap.routing(self.to_wrap.gating(hidden) + 1.0)


SCORES = torch.tensor([[1.0, 4.0, 3.0, 2.0], [8.0, 5.0, 6.0, 7.0], [9.0, 9.5, 1.0, 0.0]])
CHOSEN = [[1, 2], [0, 3], [0, 1]]


def seen_by(watch: Any, watched: Any, compute: Any) -> Iterator[torch.Tensor]:
    """What a watch shows of the second and the first token, in this order."""
    shown: list[torch.Tensor] = []
    places = torch.tensor([1, 0])

    def see(tensor: torch.Tensor, gather: Any) -> None:
        shown.append(tensor[places] if gather is None else gather(tensor, places))

    with watch(watched, see):
        compute()
    compute()
    yield from shown


def test_routers_and_outputs_are_seen_within_the_block_alone() -> None:
    router = Router()

    def compute() -> None:
        router(SCORES)

    assert [item.tolist() for item in seen_by(watch_scores, router, compute)] == [(SCORES[[1, 0]] * 10.0).tolist()]
    assert [item.tolist() for item in seen_by(watch_choice, router, compute)] == [[[0, 3], [1, 2]]]
    assert [item.tolist() for item in seen_by(watch_probabilities, router, compute)] == [[[80.0, 70.0], [40.0, 30.0]]]
    assert vars(router).get("gating") is None
    scale = Scale(4)
    assert len(list(seen_by(watch_output, scale, lambda: scale(SCORES)))) == 1


def test_a_routers_scores_are_seen_with_its_adapters_part() -> None:
    router = AdaptedRouter()

    def compute() -> None:
        router(SCORES)

    expected = (SCORES[[1, 0]] * 10.0 + 1.0).tolist()
    assert [item.tolist() for item in seen_by(watch_scores, router, compute)] == [expected]
    assert [item.tolist() for item in seen_by(watch_choice, router, compute)] == [[[0, 3], [1, 2]]]
    assert [item.tolist() for item in seen_by(watch_probabilities, router, compute)] == [[[81.0, 71.0], [41.0, 31.0]]]
    assert vars(router.to_wrap).get("routing") is None


def test_a_hook_that_is_called_without_an_output_shows_nothing() -> None:
    scale = Scale(4)

    def compute() -> None:
        for hook in scale._forward_hooks.values():
            hook(scale, (), None)

    assert list(seen_by(watch_output, scale, compute)) == []


def test_outputs_of_experts_are_put_back_in_the_order_of_tokens() -> None:
    """Rows come sorted by expert, then token; here each says 10 · token + expert."""
    routing_map = torch.zeros(3, 4, dtype=torch.bool).scatter(1, torch.tensor(CHOSEN), True)
    by_expert = [10 * token + expert for expert in range(4) for token in range(3) if expert in CHOSEN[token]]
    permuted = torch.tensor(by_expert, dtype=torch.float64).unsqueeze(1)
    dispatcher = SimpleNamespace(routing_map=routing_map, combine_postprocess=lambda rows: rows)
    layer = SimpleNamespace(token_dispatcher=dispatcher, config=SimpleNamespace(moe_router_topk=2))
    before = dispatcher.combine_postprocess
    shown = list(seen_by(watch_expert_outputs, layer, lambda: dispatcher.combine_postprocess(permuted)))
    assert [item.squeeze(2).tolist() for item in shown] == [[[10.0, 13.0], [1.0, 2.0]]]
    assert dispatcher.combine_postprocess is before


def test_outputs_of_dropped_experts_are_empty_slots() -> None:
    """Token 0 keeps expert 2, token 1 lost both: rows are those that are left, sorted by expert and then token."""
    routing_map = torch.tensor([[False, False, True], [False, False, False], [True, True, False]])
    permuted = torch.tensor([[20.0], [21.0], [2.0]])
    dispatcher = SimpleNamespace(routing_map=routing_map, combine_postprocess=lambda rows: rows)
    layer = SimpleNamespace(token_dispatcher=dispatcher, config=SimpleNamespace(moe_router_topk=2))
    shown = list(seen_by(watch_expert_outputs, layer, lambda: dispatcher.combine_postprocess(permuted)))
    assert [item.squeeze(2).tolist() for item in shown] == [[[0.0, 0.0], [2.0, 0.0]]]


def test_a_token_with_fewer_experts_has_empty_slots_and_one_with_more_is_refused() -> None:
    routing_map = torch.tensor([[True, False, True], [False, True, False], [False, False, False]])
    assert chosen_experts(routing_map, 2).tolist() == [[0, 2], [1, -1], [-1, -1]]
    with pytest.raises(TraceError) as raised:
        chosen_experts(routing_map, 1)
    assert str(raised.value) == "a router chose 2 experts for a token; expected moe_router_topk, 1, at most"
