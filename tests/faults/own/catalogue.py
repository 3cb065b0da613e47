"""The faults that are planted in the example of ``docs/attach.md``, as data: kinds of the catalogue of the pipeline.

Left out are faults of what the pipeline does by itself (advantages, ratios, its router), and those of loading weights:
an alignment gives every candidate the baseline's, whatever it has loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tests.faults.fault import Expected, Injector, Phase
from tests.faults.injectors import gradients, modules, updating
from tests.faults.injectors.patching import tp_size
from tests.faults.own import injectors

Model = Literal["dense", "tied", "experts", "balanced"]

#: Options of ``train.py`` that all runs of a model have.
MODELS: dict[Model, dict[str, object]] = {
    "dense": {},
    "tied": {"tied": True},
    # Without a loss of routers, which Megatron-core 0.16.1 computes wrongly under tp: that is a fault of ``balanced``.
    "experts": {"experts": 4, "aux_loss_coeff": 0.0},
    "balanced": {"experts": 4, "aux_loss_coeff": 0.01},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnFault:
    """One fault. layout: as ``tp2-sp``. options: of the candidate, over those of its model. expected: as in a fault."""

    id: str
    description: str
    inject: Injector
    expected: Expected
    model: Model = "dense"
    layout: str = "tp1"
    options: tuple[str, ...] = ()


def _expect(phase: Phase, *names: str) -> Expected:
    return Expected(phase=phase, names=names)


def _other_data(text: str) -> Expected:
    """Runs on other data are incomparable; the reason must have one of these texts, with ``|`` between them."""
    return Expected(phase="data", names=(), kind=text)


_FIRST_BACKWARD = ("output_layer", "output_layer.*", "decoder.final_layernorm")
_NORMS = ("*layernorm.weight",)
_EMBEDDING = "embedding.word_embeddings.weight"

_FORWARD = (
    OwnFault(
        id="mask-shifted",
        description="the loss mask is shifted by the number of the dp rank",
        inject=injectors.mask_shifted,
        layout="dp2",
        expected=_other_data("input of loss_mask"),
    ),
    OwnFault(
        id="same-rows",
        description="every dp rank reads the first one's rows",
        inject=injectors.same_rows_everywhere,
        layout="dp2",
        expected=_other_data("are in the baseline only"),
    ),
    OwnFault(
        id="labels-of-own-pieces",
        description="labels are rolled within a cp rank's tokens, so that those at the ends of pieces are wrong",
        inject=injectors.labels_of_own_pieces,
        layout="cp2",
        expected=_other_data("input of labels|are in the baseline only"),
    ),
    OwnFault(
        id="vocabulary-not-masked",
        description="rows of tokens that another tp rank holds are not zeroed in the embedding",
        inject=modules.vocabulary_not_masked,
        layout="tp2",
        expected=_expect("forward", "embedding", "embedding.word_embeddings"),
    ),
    OwnFault(
        id="key-groups-flipped",
        description="keys and values of a tp rank's query groups are in the reverse order",
        inject=modules.key_groups_flipped,
        layout="tp2",
        expected=_expect("forward", "decoder.layers.0.self_attention.core_attention"),
    ),
    OwnFault(
        id="queries-scaled",
        description="under tp the softmax of attention has a scale that is 2 % larger",
        inject=modules.queries_scaled,
        layout="tp2",
        expected=_expect("forward", "decoder.layers.0.self_attention.core_attention"),
    ),
    OwnFault(
        id="head-dropped",
        description="the last head of the second tp rank gives nothing",
        inject=modules.head_dropped,
        layout="tp2",
        expected=_expect("forward", "decoder.layers.0.self_attention.core_attention"),
    ),
    OwnFault(
        id="keys-gathered-from-last",
        description="keys and values are gathered from the last cp rank to the first",
        inject=injectors.keys_gathered_from_last,
        layout="cp2",
        expected=_expect("forward", "decoder.layers.0.self_attention.core_attention"),
    ),
    OwnFault(
        id="positions-in-one-piece",
        description="rotary positions of a cp rank run on, where its tokens are two pieces",
        inject=injectors.positions_in_one_piece,
        layout="cp2",
        expected=_expect("forward", "decoder.layers.0.self_attention.core_attention"),
    ),
    OwnFault(
        id="packing-mask-dropped",
        description="packed rows attend to the rows before them in their line",
        inject=injectors.packing_mask_dropped,
        options=("options.packed=true",),
        expected=_expect("forward", "decoder.layers.0.self_attention.core_attention"),
    ),
    OwnFault(
        id="rotary-of-second-stage",
        description="the second stage's rotary embedding turns by 5 % more",
        inject=injectors.rotary_of_second_stage,
        layout="pp2",
        expected=_expect("forward", "decoder.layers.2.self_attention.core_attention"),
    ),
    OwnFault(
        id="stage-input-stale",
        description="the second stage goes on with the first micro-batch's hidden states",
        inject=modules.stage_input_stale,
        layout="pp2",
        expected=_expect("forward", "decoder.layers.1"),
    ),
    OwnFault(
        id="norm-epsilon",
        description="under tp norms are built with an epsilon of 0.01",
        inject=modules.norm_epsilon,
        layout="tp2",
        expected=_expect("forward", "decoder.layers.0.input_layernorm"),
    ),
    OwnFault(
        id="expert-silenced",
        description="the first expert of the second ep rank gives nothing",
        inject=modules.expert_silenced,
        model="experts",
        layout="dp2-ep2",
        expected=_expect("forward", "decoder.layers.0.mlp.experts", "decoder.layers.0.mlp.experts.*"),
    ),
    OwnFault(
        id="shared-experts-on-each-rank",
        description="the shared experts' output counts once for each ep rank",
        inject=modules.shared_experts_on_each_rank,
        model="experts",
        layout="dp2-ep2",
        expected=_expect("forward", "decoder.layers.0.mlp.shared_experts"),
    ),
    OwnFault(
        id="softmax-sum-of-one-rank",
        description="the first tp rank's sum of exponentials is 0.1 % larger",
        inject=injectors.softmax_sum_of_one_rank,
        layout="tp2",
        expected=_expect("forward", "lm_loss"),
    ),
)

_BACKWARD = (
    OwnFault(
        id="norms-not-summed",
        description="under sequence parallelism norm gradients are not summed over tp",
        inject=gradients.norms_not_summed,
        layout="tp2-sp",
        expected=_expect("backward", *_NORMS),
    ),
    OwnFault(
        id="qk-norms-not-summed",
        description="gradients of query and key norms are not summed over tp",
        inject=gradients.norms_not_summed,
        layout="tp2",
        expected=_expect("backward", "*.q_layernorm.*", "*.k_layernorm.*"),
    ),
    OwnFault(
        id="norms-averaged",
        description="norm gradients are averaged over tp where they must be summed",
        inject=gradients.norms_averaged,
        layout="tp2-sp",
        expected=_expect("backward", *_NORMS),
    ),
    OwnFault(
        id="tied-not-summed",
        description="gradients of the tied embedding are not summed over the first and the last stage",
        inject=gradients.tied_not_summed,
        model="tied",
        layout="pp2",
        expected=_expect("backward", _EMBEDDING),
    ),
    OwnFault(
        id="tokens-not-summed",
        description="gradients are divided by a dp rank's own number of tokens",
        inject=gradients.tokens_not_summed,
        layout="dp2",
        expected=_expect("backward", _EMBEDDING),
    ),
    OwnFault(
        id="qkv-input-gradient-partial",
        description="the gradient of what linear_qkv reads is not summed over tp",
        inject=modules.qkv_input_gradient_partial,
        layout="tp2",
        expected=_expect("backward", "decoder.layers.3.input_layernorm"),
    ),
    OwnFault(
        id="divided-by-cp",
        description="the loss is divided by cp once too often",
        inject=injectors.divided_by_cp,
        layout="cp2",
        expected=_expect("backward", *_FIRST_BACKWARD),
    ),
    OwnFault(
        id="router-not-tagged",
        description="the router is not among the parameters whose gradients sequence parallelism sums",
        inject=modules.router_not_tagged,
        model="experts",
        layout="tp2-sp-ep2",
        expected=_expect("backward", "decoder.layers.*.mlp.router.weight"),
    ),
    OwnFault(
        id="experts-scaled",
        description="expert gradients are scaled by ep",
        inject=gradients.experts_scaled,
        model="experts",
        layout="dp2-ep2",
        expected=_expect("backward", "decoder.layers.0.mlp.experts.*"),
    ),
    OwnFault(
        id="divided-by-micro-batches",
        description="the loss is divided by the number of micro-batches a second time",
        inject=injectors.divided_by_micro_batches,
        expected=_expect("backward", *_FIRST_BACKWARD),
    ),
    *(
        OwnFault(
            id=f"scale-{name}",
            description=f"under tp the loss is {name.replace('-', '.')} % larger",
            inject=injectors.scaled_by(lambda error=error: 1.0 + error * (tp_size() - 1)),  # type: ignore[misc]
            layout="tp2",
            expected=_expect("backward", *_FIRST_BACKWARD),
        )
        for name, error in (("3", 0.03), ("1", 0.01), ("0-3", 0.003))
    ),
    OwnFault(
        id="recomputed-otherwise",
        description="an MLP gives 1 % more where it is computed anew in the backward pass",
        inject=modules.recomputed_otherwise,
        options=("options.recompute=full",),
        expected=_expect("backward", "decoder.layers.3.mlp", "decoder.layers.3.mlp.linear_fc2"),
    ),
    OwnFault(
        id="aux-loss-per-token",
        description="nothing is planted: under tp megatron-core 0.16.1 scales losses of routers by the layout",
        inject=injectors.of_megatron_itself,
        model="balanced",
        layout="tp2-sp-ep2",
        expected=_expect("backward", "decoder.layers.3.mlp.router*"),
    ),
    OwnFault(
        id="gradient-overwritten",
        description="each micro-batch overwrites what the ones before it gave to the main gradients",
        inject=gradients.gradient_overwritten,
        expected=_expect("backward", _EMBEDDING),
    ),
    OwnFault(
        id="accumulated-in-bfloat16",
        description="from the second micro-batch on, gradients are added in bfloat16",
        inject=gradients.accumulated_in_bfloat16,
        expected=_expect("backward", _EMBEDDING),
    ),
    OwnFault(
        id="cp-not-reduced",
        description="gradients are reduced over dp, where the group is dp and cp",
        inject=gradients.cp_not_reduced,
        layout="cp2",
        expected=_expect("backward", _EMBEDDING),
    ),
    OwnFault(
        id="replica-lost",
        description="the second dp rank's gradients are lost before the reduction",
        inject=gradients.replica_lost,
        layout="dp2",
        expected=_expect("backward", _EMBEDDING),
    ),
    OwnFault(
        id="weight-gradient-twice",
        description="under tp the weight gradient of linear_fc2 is added twice",
        inject=gradients.weight_gradient_twice,
        layout="tp2",
        expected=_expect("backward", "decoder.layers.0.mlp.linear_fc2.weight"),
    ),
    OwnFault(
        id="padding-counted",
        description="under dp the loss is divided by all tokens, padding too",
        inject=injectors.padding_counted,
        layout="dp2",
        expected=_expect("backward", _EMBEDDING),
    ),
    OwnFault(
        id="last-micro-batch-dropped",
        description="under tp the last micro-batch of an update has no gradient",
        inject=injectors.last_micro_batch_dropped,
        layout="tp2",
        expected=_expect("backward", *_FIRST_BACKWARD),
    ),
    OwnFault(
        id="token-forgotten",
        description="under tp one token of each update has no gradient",
        inject=injectors.token_forgotten,
        layout="tp2",
        expected=_expect("backward", *_FIRST_BACKWARD),
    ),
    OwnFault(
        id="norm-of-own-shard",
        description="each tp rank clips by the gradient norm of its own shard",
        inject=updating.norm_of_own_shard,
        layout="tp2",
        expected=_expect("backward", "grad_norm"),
    ),
)

_UPDATE = (
    OwnFault(
        id="parameters-not-gathered",
        description="parameters that another dp rank updated are not gathered, so that the next forward pass is stale",
        inject=updating.parameters_not_gathered,
        layout="dp2",
        options=("options.distributed_optimizer=true",),
        expected=_expect("update", _EMBEDDING),
    ),
    OwnFault(
        id="norms-not-decayed",
        description="under tp weight decay is not applied to norms",
        inject=injectors.norms_not_decayed,
        layout="tp2",
        expected=_expect("update", *_NORMS),
    ),
    OwnFault(
        id="step-count-lost",
        description="under tp Adam counts every update as its first",
        inject=updating.step_count_lost,
        layout="tp2",
        expected=_expect("update", _EMBEDDING, "num_updates"),
    ),
    OwnFault(
        id="frozen-on-one-rank",
        description="the second tp rank's update is lost",
        inject=updating.frozen_on_one_rank,
        layout="tp2",
        expected=_expect("update", _EMBEDDING),
    ),
    OwnFault(
        id="moment-lost",
        description="under tp the first moment of one parameter is lost after each update",
        inject=updating.moment_lost,
        layout="tp2",
        expected=_expect("update", "*.exp_avg"),
    ),
    OwnFault(
        id="epsilon-under-root",
        description="under tp Adam's epsilon is added under the root",
        inject=updating.epsilon_under_root,
        layout="tp2",
        expected=_expect("update", "*"),
    ),
    OwnFault(
        id="not-clipped",
        description="under tp gradients are not clipped",
        inject=updating.not_clipped,
        layout="tp2",
        expected=_expect("update", f"{_EMBEDDING}.exp_avg"),
    ),
    OwnFault(
        id="rate-of-its-own",
        description="under tp the learning rate is 10 % larger",
        inject=updating.rate_of_its_own,
        layout="tp2",
        expected=_expect("update", _EMBEDDING),
    ),
    OwnFault(
        id="second-beta",
        description="under tp Adam's second beta is 0.01 smaller",
        inject=updating.second_beta,
        layout="tp2",
        expected=_expect("update", f"{_EMBEDDING}.exp_avg_sq"),
    ),
)

OWN_FAULTS: tuple[OwnFault, ...] = (*_FORWARD, *_BACKWARD, *_UPDATE)


def find_own_fault(name: str) -> OwnFault:
    """Returns the fault of this id; raises ``ValueError`` with all ids where there is none."""
    found = next((fault for fault in OWN_FAULTS if fault.id == name), None)
    if found is None:
        raise ValueError(f"no fault is named {name!r}; known: {', '.join(fault.id for fault in OWN_FAULTS)}")
    return found
