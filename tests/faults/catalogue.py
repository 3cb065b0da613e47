"""All faults, as data. Numbers are those of the list in the reference on precision; ``R1`` to ``R5`` are real bugs.

R5 is one that was found here: with it the catalogue has all that ``KNOWN_WRONG_CASES`` of the layouts has.
"""

from __future__ import annotations

from dataclasses import replace

from tests.faults import packing, planted
from tests.faults.fault import Expected, Fault, Run, in_backward, in_data, in_forward, in_update
from tests.faults.injectors import gradients, loading, modules, updating

_DP2 = Run(layout="dp2")
_TP2 = Run(layout="tp2")
_TP2_SP = Run(layout="tp2-sp")
_PP2 = Run(layout="pp2")
_CP2 = Run(layout="cp2")
_MOE_DP2 = Run(model="moe", layout="dp2")
_MOE_EP = Run(model="moe", layout="dp2-ep2")
_MOE_TP_EP = Run(model="moe", layout="tp2-sp-ep2")
_ONE_MICRO_BATCH = Run(option="one-micro-batch")

_ANY = ("*",)
_FIRST_BACKWARD = ("output_layer", "output_layer.*")
_NORMS = ("*layernorm.weight", "*layernorm.bias")


_LOADING = (
    Fault(
        id="wrong-shard",
        number="14",
        description="each tp rank loads the next rank's part of linear_proj",
        inject=loading.wrong_shard,
        shows=_TP2,
        silent=_DP2,
        expected=in_data("*.linear_proj.weight", kind="the shards of tp0 and tp1 are swapped"),
    ),
    Fault(
        id="gated-in-one-piece",
        number="27",
        description="gate and up of linear_fc1 are cut for tp as if they were one matrix",
        inject=loading.gated_in_one_piece,
        shows=_TP2,
        silent=_DP2,
        expected=in_data("*.linear_fc1.weight", kind="cut over tp in one piece, where gate and up are each cut"),
    ),
    Fault(
        id="stage-off-by-one",
        number="21",
        description="the second stage loads each layer's weights from the layer before, so that one is there twice",
        inject=loading.stage_off_by_one,
        shows=Run(model="deep", layout="pp2"),
        silent=_TP2,
        expected=in_data("decoder.layers.2.*", kind="is the baseline's decoder.layers.1."),
    ),
    Fault(
        id="experts-without-offset",
        number="29",
        description="experts are loaded by their number on the rank, without the offset of ep",
        inject=loading.experts_without_offset,
        shows=_MOE_EP,
        silent=_MOE_DP2,
        expected=in_data(
            "*.experts.local_experts.2.*", kind="is the baseline's decoder.layers.1.mlp.experts.local_experts.0."
        ),
    ),
    Fault(
        id="norm-of-one-rank",
        description="the first norm's weight is 1 % larger on the second tp rank",
        inject=loading.norm_of_one_rank,
        shows=_TP2,
        silent=_DP2,
        expected=in_data("decoder.layers.0.input_layernorm.weight", kind="copies"),
        is_idle_where_silent=True,
    ),
    Fault(
        id="tied-copy-of-its-own",
        description="the last stage's copy of the tied embedding is 1 % larger",
        inject=loading.tied_copy_of_its_own,
        shows=Run(model="tied", layout="pp2"),
        silent=Run(model="tied", layout="tp2"),
        expected=in_data("embedding.word_embeddings.weight", kind="copies"),
        is_idle_where_silent=True,
    ),
    Fault(
        id="mask-shifted",
        number="16",
        description="the response mask is shifted by the number of the dp rank",
        inject=loading.mask_shifted,
        shows=_DP2,
        silent=_TP2,
        expected=in_data("response_mask"),
    ),
    Fault(
        id="same-rows",
        number="19",
        description="every dp rank reads the first one's rows",
        inject=loading.same_rows_everywhere,
        shows=_DP2,
        silent=_TP2,
        expected=in_data("tokens", "response_mask", "rollout_logprobs", kind="tokens are held by no rank"),
    ),
    Fault(
        id="advantages-by-rank",
        description="advantages are centred over the rows of a dp rank",
        inject=loading.advantages_centred_by_rank,
        shows=_DP2,
        silent=_TP2,
        expected=in_forward("advantages", "returns"),
    ),
)

_FORWARD = (
    Fault(
        id="virtual-stage-order",
        number="20",
        description="each stage's virtual chunks are taken for neighbours, so that two layers change places",
        inject=loading.virtual_stages_in_blocks,
        shows=Run(model="deep", layout="pp2-vpp2"),
        silent=Run(model="deep", layout="pp2"),
        expected=in_forward("decoder.layers.1.*"),
    ),
    Fault(
        id="vocabulary-not-masked",
        number="6",
        description="rows of tokens that another tp rank holds are not zeroed in the embedding",
        inject=modules.vocabulary_not_masked,
        shows=_TP2,
        silent=_DP2,
        expected=in_forward("embedding"),
    ),
    Fault(
        id="positions-in-one-piece",
        number="9",
        description="rotary positions of a cp rank run on, where its tokens are two pieces",
        inject=loading.positions_in_one_piece,
        shows=_CP2,
        silent=_TP2,
        expected=in_forward("decoder.layers.0.self_attention.core_attention"),
    ),
    Fault(
        id="key-groups-flipped",
        number="28",
        description="keys and values of a tp rank's query groups are in the reverse order",
        inject=modules.key_groups_flipped,
        shows=_TP2,
        silent=_DP2,
        expected=in_forward("decoder.layers.0.self_attention.core_attention"),
    ),
    Fault(
        id="queries-scaled",
        description="under tp the softmax of attention has a scale that is 2 % larger",
        inject=modules.queries_scaled,
        shows=_TP2,
        silent=_DP2,
        expected=in_forward("decoder.layers.0.self_attention.core_attention"),
    ),
    Fault(
        id="head-dropped",
        description="the last head of the second tp rank gives nothing",
        inject=modules.head_dropped,
        shows=_TP2,
        silent=_DP2,
        expected=in_forward("decoder.layers.0.self_attention.core_attention", kind="zero"),
    ),
    Fault(
        id="keys-gathered-from-last",
        description="keys and values are gathered from the last cp rank to the first",
        inject=modules.keys_gathered_from_last,
        shows=_CP2,
        silent=_TP2,
        expected=in_forward("decoder.layers.0.self_attention.core_attention"),
        is_idle_where_silent=True,
    ),
    Fault(
        id="packing-mask-dropped",
        number="39",
        description="packed rows attend to the rows before them in their line",
        inject=packing.mask_dropped,
        shows=Run(option="packing"),
        silent=Run(),
        expected=in_forward("decoder.layers.0.self_attention.core_attention"),
        is_idle_where_silent=True,
    ),
    Fault(
        id="packing-positions-continued",
        description="learned positions run on through a packed line",
        inject=packing.positions_continued,
        shows=Run(model="learned", option="packing"),
        silent=Run(model="learned"),
        expected=in_forward("embedding"),
    ),
    Fault(
        id="rotary-of-second-stage",
        description="the second stage's rotary embedding turns by 5 % more",
        inject=modules.rotary_of_second_stage,
        shows=_PP2,
        silent=_TP2,
        expected=in_forward("decoder.layers.1.self_attention.core_attention"),
    ),
    Fault(
        id="stage-input-stale",
        description="the second stage goes on with the first micro-batch's hidden states",
        inject=modules.stage_input_stale,
        shows=_PP2,
        silent=_TP2,
        expected=in_forward("decoder.layers.0", kind="ranks pp0 and pp1 hold different activations"),
        is_idle_where_silent=True,
    ),
    Fault(
        id="stage-input-rounded",
        description="the second stage's hidden states arrive with fewer bits of mantissa than were sent",
        inject=modules.stage_input_rounded,
        shows=_PP2,
        silent=_TP2,
        expected=in_forward("decoder.layers.0", kind="ranks pp0 and pp1 hold different activations"),
        is_idle_where_silent=True,
    ),
    Fault(
        id="stage-gradient-rounded",
        description="the gradient sent back to the first stage arrives with fewer bits of mantissa",
        inject=modules.stage_gradient_rounded,
        shows=_PP2,
        silent=_TP2,
        expected=in_backward("decoder.layers.0", kind="ranks pp0 and pp1 hold different activation gradients"),
        is_idle_where_silent=True,
    ),
    Fault(
        id="norm-epsilon",
        description="under tp norms are built with an epsilon of 0.01",
        inject=modules.norm_epsilon,
        shows=_TP2,
        silent=_DP2,
        expected=in_forward("decoder.layers.0.input_layernorm"),
    ),
    Fault(
        id="expert-silenced",
        description="the first expert of the second ep rank gives nothing",
        inject=modules.expert_silenced,
        shows=_MOE_EP,
        silent=_MOE_DP2,
        expected=in_forward("decoder.layers.1.mlp.experts", kind="zero"),
    ),
    Fault(
        id="shared-experts-on-each-rank",
        description="the shared experts' output counts once for each ep rank",
        inject=modules.shared_experts_on_each_rank,
        shows=_MOE_EP,
        silent=_MOE_DP2,
        expected=in_forward("decoder.layers.1.mlp.shared_experts", kind="2.000 times"),
    ),
    Fault(
        id="softmax-sum-of-one-rank",
        description="the first tp rank's sum of exponentials is 0.1 % larger",
        inject=modules.softmax_sum_of_one_rank,
        shows=_TP2,
        silent=_DP2,
        expected=in_forward("logprobs"),
    ),
    Fault(
        id="expert-counts-not-summed",
        number="30",
        description="each rank moves the expert bias by its own tokens",
        inject=gradients.expert_counts_not_summed,
        shows=_MOE_TP_EP,  # under dp2 each rank's own counts have the signs of all counts in bfloat16
        silent=Run(model="moe", layout="pp2"),
        expected=in_update("decoder.layers.1.mlp.router.expert_bias", kind="copies"),
    ),
    Fault(
        id="expert-bias-reversed",
        description="under dp the expert bias moves the wrong way",
        inject=gradients.expert_bias_reversed,
        shows=_MOE_DP2,
        silent=Run(model="moe", layout="pp2"),
        expected=in_update("decoder.layers.1.mlp.router.expert_bias"),
    ),
    Fault(
        id="entropy-coefficient",
        description="under dp the entropy counts one and a half times",
        inject=gradients.entropy_coefficient,
        shows=_DP2,
        silent=_TP2,
        expected=Expected(phase="forward", names=("total_loss",)),
    ),
    Fault(
        id="clip-range",
        description="under dp the ratio is clipped at 0.0001",
        inject=gradients.clip_range,
        shows=_DP2,
        silent=_TP2,
        expected=in_forward("pg_loss", "total_loss", update=1),
    ),
    Fault(
        id="old-logprobs-renewed",
        number="44",
        description="the second update's old log-probabilities are those of the weights after the first",
        inject=gradients.old_logprobs_renewed,
        shows=_DP2,
        silent=Run(layout="dp2", option="one-update"),
        expected=in_forward("ratio", update=1),
    ),
    Fault(
        id="reference-renewed",
        description="the reference of the KL term follows the policy",
        inject=gradients.reference_renewed,
        shows=_DP2,
        silent=Run(layout="dp2", option="one-update"),
        expected=in_forward("kl_loss", kind="zero|update before", update=1),
    ),
)

_BACKWARD = (
    Fault(
        id="labels-of-own-pieces",
        number="33",
        description="labels are rolled within a cp rank's tokens, so that those at the ends of pieces are wrong",
        inject=loading.labels_of_own_pieces,
        shows=_CP2,
        silent=_TP2,
        # Scores and losses read the same wrong labels, so that every ratio is 1 and the loss is that of a clean run.
        expected=replace(in_forward("logprobs", "old_logprobs", kind="token"), is_loss_equal=True),
    ),
    Fault(
        id="norms-not-summed",
        number="1",
        description="under sequence parallelism norm gradients are not summed over tp",
        inject=gradients.norms_not_summed,
        shows=_TP2_SP,
        silent=_DP2,
        expected=in_backward(*_NORMS, kind="copies"),
    ),
    Fault(
        id="qk-norms-not-summed",
        number="32",
        description="gradients of query and key norms are not summed over tp",
        inject=gradients.norms_not_summed,
        shows=_TP2,
        silent=_DP2,
        expected=in_backward("*.q_layernorm.*", "*.k_layernorm.*", kind="copies"),
    ),
    Fault(
        id="norms-averaged",
        description="norm gradients are averaged over tp where they must be summed",
        inject=gradients.norms_averaged,
        shows=_TP2_SP,
        silent=_DP2,
        expected=in_backward(*_NORMS, kind="0.500 times"),
    ),
    Fault(
        id="norms-summed-over-dp",
        number="35",
        description="the norm gradients' sum is given the dp group in the place of tp's",
        inject=gradients.norms_summed_over_dp,
        shows=Run(layout="tp2-sp-dp2"),
        silent=_PP2,
        expected=in_backward(*_NORMS),
    ),
    Fault(
        id="tied-not-summed",
        number="2",
        description="gradients of the tied embedding are not summed over the first and the last stage",
        inject=gradients.tied_not_summed,
        shows=Run(model="tied", layout="pp2"),
        silent=Run(model="tied", layout="tp2"),
        expected=in_backward("embedding.word_embeddings.weight", kind="copies"),
    ),
    Fault(
        id="tokens-not-summed",
        number="3",
        description="gradients are divided by a dp rank's own number of tokens",
        inject=gradients.tokens_not_summed,
        shows=Run(layout="dp2-plain"),
        silent=_TP2,
        expected=in_backward("embedding.word_embeddings.weight", kind="times"),
    ),
    Fault(
        id="dp-not-divided",
        number="4",
        description="gradients are summed over dp where they must be averaged",
        inject=gradients.dp_not_divided,
        shows=Run(layout="dp2", option="micro-batch-means"),
        silent=Run(layout="tp2", option="micro-batch-means"),
        expected=in_backward("embedding.word_embeddings.weight", kind="2.000 times"),
    ),
    Fault(
        id="qkv-input-gradient-partial",
        number="5",
        description="the gradient of what linear_qkv reads is not summed over tp",
        inject=modules.qkv_input_gradient_partial,
        shows=_TP2,
        silent=_DP2,
        expected=in_backward("decoder.layers.1.input_layernorm", kind="copies"),
    ),
    Fault(
        id="row-bias-on-each-rank",
        number="7",
        description="each tp rank adds the bias of a row-parallel layer",
        inject=modules.row_bias_on_each_rank,
        shows=Run(model="biases", layout="tp2"),
        silent=Run(model="biases", layout="dp2"),
        expected=in_backward("decoder.layers.0.self_attention.linear_proj.bias", kind="2.000 times"),
    ),
    Fault(
        id="divided-by-cp",
        number="10",
        description="the loss is divided by cp once too often",
        inject=gradients.divided_by_cp,
        shows=_CP2,
        silent=_TP2,
        expected=in_backward(*_FIRST_BACKWARD, kind="0.500 times"),
    ),
    Fault(
        id="router-not-tagged",
        number="11",
        description="the router is not among the parameters whose gradients sequence parallelism sums",
        inject=modules.router_not_tagged,
        shows=_MOE_TP_EP,
        silent=_MOE_EP,
        expected=in_backward("decoder.layers.1.mlp.router.weight", kind="copies"),
    ),
    Fault(
        id="experts-scaled",
        number="12",
        description="expert gradients are scaled by ep",
        inject=gradients.experts_scaled,
        shows=_MOE_EP,
        silent=_MOE_DP2,
        expected=in_backward("decoder.layers.1.mlp.experts.*", kind="2.000 times"),
        is_idle_where_silent=True,
    ),
    Fault(
        id="divided-by-micro-batches",
        number="15",
        description="the loss is divided by the number of micro-batches a second time",
        inject=gradients.divided_by_micro_batches,
        shows=Run(),
        silent=_ONE_MICRO_BATCH,
        expected=in_backward(*_FIRST_BACKWARD, kind="0.500 times"),
    ),
    *(
        Fault(
            id=f"scale-{name}",
            number="17",
            description=f"under tp the loss is {name.replace('-', '.')} % larger",
            inject=gradients.scaled_by(error),
            shows=_TP2,
            silent=_DP2,
            expected=in_backward(*_FIRST_BACKWARD, kind=f"{1 + error:.3f}|{1 + error:g} times"),
        )
        for name, error in (("3", 0.03), ("1", 0.01), ("0-3", 0.003), ("0-05", 0.0005))
    ),
    Fault(
        id="recomputed-otherwise",
        number="22",
        description="an MLP gives 1 % more where it is computed anew in the backward pass",
        inject=modules.recomputed_otherwise,
        shows=Run(option="recompute-full"),
        silent=Run(),
        expected=in_backward("decoder.layers.0.mlp", kind="the backward pass computed it again and got other values"),
        is_idle_where_silent=True,
    ),
    Fault(
        id="gradient-overwritten",
        number="25",
        description="each micro-batch overwrites what the ones before it gave to the main gradients",
        inject=gradients.gradient_overwritten,
        shows=Run(),
        silent=_ONE_MICRO_BATCH,
        expected=in_backward("embedding.word_embeddings.weight"),
    ),
    Fault(
        id="balancing-on-each-rank",
        number="31",
        description="the load-balancing loss counts once for each tp rank",
        inject=modules.balancing_on_each_rank,
        shows=_MOE_TP_EP,
        silent=_MOE_EP,
        expected=in_backward("decoder.layers.1.mlp.router*"),
    ),
    Fault(
        id="cp-not-reduced",
        number="35",
        description="gradients are reduced over dp, where the group is dp and cp",
        inject=gradients.cp_not_reduced,
        shows=Run(layout="cp2-plain"),
        silent=Run(layout="dp2-plain"),
        expected=in_backward("embedding.word_embeddings.weight", kind="copies"),
    ),
    Fault(
        id="dp-reduced-in-pairs",
        number="35",
        description="gradients are reduced over pairs of ranks, where the group is all of dp",
        inject=gradients.dp_reduced_in_pairs,
        shows=Run(layout="dp4-plain", option="micro-batch-2"),
        silent=Run(layout="dp2-plain"),
        expected=in_backward("embedding.word_embeddings.weight", kind="copies"),
    ),
    Fault(
        id="replica-lost",
        description="the second dp rank's gradients are lost before the reduction",
        inject=gradients.replica_lost,
        shows=_DP2,
        silent=_TP2,
        expected=in_backward("embedding.word_embeddings.weight"),
    ),
    Fault(
        id="weight-gradient-twice",
        description="under tp the weight gradient of linear_fc2 is added twice",
        inject=gradients.weight_gradient_twice,
        shows=_TP2,
        silent=_DP2,
        expected=in_backward("decoder.layers.0.mlp.linear_fc2.weight", kind="2.000 times"),
    ),
    Fault(
        id="accumulated-in-bfloat16",
        description="from the second micro-batch on, gradients are added in bfloat16",
        inject=gradients.accumulated_in_bfloat16,
        shows=Run(),
        silent=_ONE_MICRO_BATCH,
        expected=in_backward("embedding.word_embeddings.weight"),
    ),
    Fault(
        id="padding-counted",
        description="under dp the loss is divided by all tokens, padding too",
        inject=gradients.padding_counted,
        shows=_DP2,
        silent=_TP2,
        expected=in_backward("embedding.word_embeddings.weight", kind="times"),
    ),
    Fault(
        id="last-micro-batch-dropped",
        description="under tp the last micro-batch of an update has no gradient",
        inject=gradients.last_micro_batch_dropped,
        shows=_TP2,
        silent=_DP2,
        expected=in_backward(*_FIRST_BACKWARD, kind="zero"),
    ),
    Fault(
        id="token-forgotten",
        description="under tp one token of the update has no gradient",
        inject=gradients.token_forgotten,
        shows=_TP2,
        silent=_DP2,
        expected=in_backward(*_FIRST_BACKWARD, kind="zero|token"),
    ),
    Fault(
        id="norm-of-own-shard",
        description="each tp rank clips by the gradient norm of its own shard",
        inject=updating.norm_of_own_shard,
        shows=_TP2,
        silent=Run(),
        expected=in_backward("grad_norm", kind="copies"),
    ),
)

_UPDATE = (
    Fault(
        id="parameters-not-gathered",
        number="24",
        description="parameters that another dp rank updated are not gathered, so that the next forward pass is stale",
        inject=updating.parameters_not_gathered,
        shows=_DP2,
        silent=_TP2,
        expected=in_update("embedding.word_embeddings.weight", kind="copies"),
    ),
    Fault(
        id="norms-decayed",
        number="41",
        description="under tp weight decay is applied to norms too",
        inject=updating.norms_decayed,
        shows=_TP2,
        silent=_DP2,
        expected=in_update(*_NORMS),
    ),
    Fault(
        id="step-count-lost",
        number="42",
        description="under tp Adam counts every update as its first",
        inject=updating.step_count_lost,
        shows=_TP2,
        silent=_DP2,
        expected=in_update("num_updates"),
    ),
    Fault(
        id="frozen-on-one-rank",
        description="the second tp rank's update is lost",
        inject=updating.frozen_on_one_rank,
        shows=_TP2,
        silent=_DP2,
        expected=in_update("embedding.word_embeddings.weight", kind="zero"),
        is_idle_where_silent=True,
    ),
    Fault(
        id="moment-lost",
        description="under tp the first moment of one parameter is lost after each update",
        inject=updating.moment_lost,
        shows=_TP2,
        silent=_DP2,
        expected=in_update("*.exp_avg", kind="zero"),
    ),
    Fault(
        id="epsilon-under-root",
        description="under tp Adam's epsilon is added under the root",
        inject=updating.epsilon_under_root,
        shows=_TP2,
        silent=_DP2,
        expected=in_update(*_ANY),
    ),
    Fault(
        id="not-clipped",
        description="under tp gradients are not clipped",
        inject=updating.not_clipped,
        shows=_TP2,
        silent=_DP2,
        expected=in_update("clip", kind="coefficient"),
    ),
    Fault(
        id="rate-of-its-own",
        description="under tp the learning rate is 10 % larger",
        inject=updating.rate_of_its_own,
        shows=_TP2,
        silent=_DP2,
        expected=in_update("embedding.word_embeddings.weight", kind="1.100 times"),
    ),
    Fault(
        id="second-beta",
        description="under tp Adam's second beta is 0.01 smaller",
        inject=updating.second_beta,
        shows=_TP2,
        silent=_DP2,
        expected=in_update("embedding.word_embeddings.weight.exp_avg_sq", kind="times"),
    ),
)

_REAL = (
    Fault(
        id="pipeline-crossing",
        number="R1",
        description="megatron-core: activations of two interleaved stages cross",
        inject=None,
        shows=Run(model="deep", layout="pp2-vpp2", option="batched-p2p+micro-batch-2+allow-pipeline-crossing"),
        silent=Run(model="deep", layout="pp2", option="batched-p2p+micro-batch-2+allow-pipeline-crossing"),
        expected=in_forward("decoder.layers.*"),
    ),
    Fault(
        id="experts-under-tp",
        number="R2",
        description="megatron-core 0.16.1: expert gradients are reduced as those of dense weights",
        inject=None,
        shows=Run(model="moe", layout="tp2-sp", option="allow-experts-under-tp"),
        silent=Run(model="moe", layout="dp2-ep2", option="allow-experts-under-tp"),
        expected=in_backward("decoder.layers.1.mlp.experts.*", kind="copies"),
    ),
    Fault(
        id="loss-tuple-under-cp",
        number="R3",
        description="megatron-core: a loss with its own number of tokens is divided by each cp rank's own",
        inject=None,
        shows=Run(layout="cp2", option="micro-batch-means+allow-loss-tuple-under-cp"),
        silent=Run(layout="tp2", option="micro-batch-means+allow-loss-tuple-under-cp"),
        expected=in_backward(*_FIRST_BACKWARD),
    ),
    Fault(
        id="aux-loss-per-token",
        number="R4",
        description="megatron-core 0.16.1: losses of its routers are scaled by the layout",
        inject=None,
        shows=Run(model="moe", layout="tp2-sp-ep2", option="megatron-router+allow-aux-loss-per-token"),
        silent=Run(model="moe", layout="dp2-ep2", option="megatron-router+allow-aux-loss-per-token"),
        expected=in_backward("decoder.layers.1.mlp.router*"),
    ),
    Fault(
        id="expert-bias-under-tp",
        number="R5",
        description="megatron-core: biases of different experts are summed over tp",
        inject=None,
        shows=Run(model="moe", layout="tp2-sp-ep2", option="expert-biases+allow-expert-bias-under-tp"),
        silent=Run(model="moe", layout="dp2-ep2", option="expert-biases+allow-expert-bias-under-tp"),
        expected=in_backward("decoder.layers.1.mlp.experts.*.bias"),
    ),
)

#: Numbers of those that the reference has measured: each must be found, at its place, in every precision.
MEASURED = ("1", "2", "3", "4", "5", "6", "7", "9", "10", "11", "12", "14", "15", "16", "17", "19")

FAULTS: tuple[Fault, ...] = (
    *(*_LOADING, *_FORWARD, *planted.FORWARD),
    *(*_BACKWARD, *planted.BACKWARD),
    *(*_UPDATE, *planted.UPDATE),
    *_REAL,
)
"""In the order of the phases that they show in."""


ONE_GRADIENT = Fault(
    id="one-gradient-enlarged",
    description="under tp the gradient of one weight is 1 % larger",
    inject=gradients.one_gradient_enlarged,
    shows=_TP2,
    silent=_DP2,
    expected=in_backward("decoder.layers.1.mlp.linear_fc2.weight", kind="1.010 times"),
)
"""Not in the catalogue, which has its like: the smallest thing that a test of measured noise can plant."""


def find_fault(name: str) -> Fault:
    """The fault of an id. Raises ``ValueError``: none has it; lists the known ones."""
    for fault in (*FAULTS, ONE_GRADIENT):
        if fault.id == name:
            return fault
    raise ValueError(f"no fault is named {name!r}; known: {', '.join(fault.id for fault in FAULTS)}")
