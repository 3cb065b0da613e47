"""Faults that strangers planted, as data: of one rank, head, token or column alone, and of float32 in a loss.

None of them has a number: they came from people who had not read the detectors.
"""

from __future__ import annotations

from tests.faults.fault import Expected, Fault, Injector, Run, in_backward, in_forward, in_update
from tests.faults.injectors import backward, experts, one_rank, softmax, updating

_DP2 = Run(layout="dp2")
_TP2 = Run(layout="tp2")
_PP2 = Run(layout="pp2")
_EP2 = Run(model="moe", layout="dp2-ep2")
_MOE_DP2 = Run(model="moe", layout="dp2")

_CORE_0 = "decoder.layers.0.self_attention.core_attention"
#: Where rounding hides what is concentrated in a rank's piece, the sentence still names the rank.
_TP1 = "global rank 1 (dp0 pp0 tp1) in the candidate"
_DP1 = "global rank 1 (dp1 pp0 tp0) in the candidate"
_EMBEDDING = "embedding.word_embeddings.weight"


def _under(
    shows: Run, silent: Run, id: str, inject: Injector, expected: Expected, description: str, *, is_idle: bool = False
) -> Fault:
    return Fault(
        id=id,
        description=description,
        inject=inject,
        shows=shows,
        silent=silent,
        expected=expected,
        is_idle_where_silent=is_idle,
    )


def _under_tp(id: str, inject: Injector, expected: Expected, description: str) -> Fault:
    return _under(_TP2, _DP2, id, inject, expected, description)


def _on_tp1(id: str, inject: Injector, expected: Expected, description: str) -> Fault:
    """The second tp rank alone has it; where there is none, it has nothing to do."""
    return _under(_TP2, _DP2, id, inject, expected, description, is_idle=True)


def _under_dp(id: str, inject: Injector, expected: Expected, description: str) -> Fault:
    return _under(_DP2, _TP2, id, inject, expected, description)


def _on_dp1(id: str, inject: Injector, expected: Expected, description: str) -> Fault:
    return _under(_DP2, _TP2, id, inject, expected, description, is_idle=True)


def _on_ep1(id: str, inject: Injector, expected: Expected, description: str) -> Fault:
    return _under(_EP2, _MOE_DP2, id, inject, expected, description, is_idle=True)


FORWARD = (
    _on_tp1(
        "epsilon-of-one-rank",
        one_rank.epsilon_of_one_rank,
        in_forward("decoder.layers.0.self_attention.q_layernorm", kind=f"just the piece of one rank|{_TP1}"),
        "the second tp rank's first query norm has an epsilon of 0.001",
    ),
    _on_tp1(
        "key-value-exchanged",
        one_rank.key_value_exchanged,
        in_forward(_CORE_0, kind="heads 6 to 7"),
        "the second tp rank's second query group reads keys as values and values as keys",
    ),
    _on_tp1(
        "rotary-half-reversed",
        one_rank.rotary_half_reversed,
        in_forward(_CORE_0, kind="just the piece of one rank"),
        "the second tp rank turns the first half of each head the other way",
    ),
    _on_tp1(
        "head-stretched",
        one_rank.head_stretched,
        in_forward("decoder.layers.1.self_attention.core_attention", kind=f"head 7|{_TP1}"),
        "queries of the second tp rank's last head are 5 % larger in one layer",
    ),
    _on_tp1(
        "first-token-masked",
        one_rank.first_token_masked,
        in_forward("embedding", kind="zero"),
        "the second tp rank's part of the vocabulary begins one token late in the embedding",
    ),
    _under_tp(
        "embedding-stretched",
        one_rank.embedding_stretched,
        in_forward("embedding", kind="1.002|times the baseline but for rounding"),
        "under tp embeddings are 0.2 % larger",
    ),
    _on_dp1(
        "token-stretched",
        one_rank.token_stretched,
        in_forward("decoder.layers.0.mlp", kind="token"),
        "one token of each line of the second dp rank has an MLP's output that is 1 % larger",
    ),
    _on_dp1(
        "silu-steeper",
        one_rank.silu_steeper,
        in_forward("decoder.layers.1.mlp.linear_fc2", kind=f"just the piece of one rank|{_DP1}"),
        "the second dp rank computes silu as x sigmoid(1.01 x) in one layer",
    ),
    _under(
        _PP2,
        _TP2,
        "micro-batches-exchanged",
        one_rank.micro_batches_exchanged,
        in_forward("decoder.layers.0", kind="ranks pp0 and pp1 hold different activations"),
        "the last stage takes the first micro-batch for the second, and the second for the first",
        is_idle=True,
    ),
    _on_tp1(
        "maximum-of-own-rank",
        softmax.maximum_of_own_rank,
        in_forward("logprobs"),
        "the second tp rank's exponentials are below its own maximum, not the group's",
    ),
    _on_tp1(
        "column-left-out",
        softmax.column_left_out,
        in_forward("logprobs"),
        "the second tp rank leaves its first token out of the sum of exponentials",
    ),
    _on_tp1(
        "target-lost",
        softmax.target_lost,
        in_forward("logprobs"),
        "logits of targets that the second tp rank holds are lost",
    ),
    _on_tp1(
        "entropy-of-first-rank",
        softmax.entropy_of_first_rank,
        in_forward("entropy"),
        "the second tp rank's part of the entropy is not added",
    ),
    _under_tp(
        "sums-rounded",
        softmax.sums_rounded,
        in_forward("logprobs"),
        "under tp the softmax's sums are rounded to bfloat16 before they are added",
    ),
    _under_tp(
        "temperature-in-training",
        softmax.temperature_in_training,
        in_forward("logprobs"),
        "under tp the temperature of training is 2 % higher than that of scoring",
    ),
    _under_dp(
        "ratio-rounded",
        softmax.ratio_rounded,
        in_forward("ratio", update=1),
        "under dp the log ratio is rounded to bfloat16",
    ),
    _on_dp1(
        "old-logprobs-shifted",
        softmax.old_logprobs_shifted,
        in_forward("ratio"),
        "the second dp rank's old log-probabilities are those of the token before",
    ),
    _on_ep1(
        "one-choice-less",
        experts.one_choice_less,
        in_forward("decoder.layers.1.mlp.router*"),
        "the second ep rank's tokens have one expert fewer",
    ),
    _on_ep1(
        "scored-by-softmax",
        experts.scored_by_softmax,
        in_forward("decoder.layers.1.mlp.router*"),
        "the second ep rank's experts are scored by a softmax, not by sigmoids",
    ),
    _on_ep1(
        "weights-not-normalised",
        experts.weights_not_normalised,
        in_forward("decoder.layers.1.mlp.router*"),
        "the second ep rank does not divide the weights of a token's experts by their sum",
    ),
    _on_ep1(
        "tokens-dropped",
        experts.tokens_dropped,
        in_forward("decoder.layers.1.mlp.router*"),
        "the second ep rank drops three tokens of the first expert",
    ),
    _on_ep1(
        "router-rounded",
        experts.router_rounded,
        in_forward("decoder.layers.1.mlp.router*"),
        "the second ep rank rounds the router's logits to bfloat16",
    ),
    _on_ep1(
        "experts-exchanged",
        experts.experts_exchanged,
        in_forward("decoder.layers.1.mlp.experts*"),
        "the second ep rank computes with its two experts in the wrong order",
    ),
    _on_ep1(
        "probability-one",
        experts.probability_one,
        in_forward("decoder.layers.1.mlp.experts*"),
        "the second ep rank's experts do not multiply by the token's weight",
    ),
)

BACKWARD = (
    _under_tp(
        "entropy-gradient-lost",
        softmax.entropy_gradient_lost,
        in_backward("output_layer", "output_layer.*"),
        "under tp the gradient of the entropy is without the entropy itself",
    ),
    _on_tp1(
        "keys-forgotten",
        backward.keys_forgotten,
        in_backward("decoder.layers.0.self_attention.*", kind="zero"),
        "the second tp rank's keys have no gradient in the first half of each line",
    ),
    _under_tp(
        "silu-gradient-halved",
        backward.silu_gradient_halved,
        in_backward("decoder.layers.1.mlp.linear_fc1"),
        "under tp the derivative of silu lacks its second term in one layer",
    ),
    _under(
        _PP2,
        _TP2,
        "input-of-batch-before",
        backward.input_of_batch_before,
        in_backward("decoder.layers.1.self_attention.linear_proj.weight"),
        "under pp a weight's gradient is of the input of the micro-batch before",
        is_idle=True,
    ),
    _under(
        Run(layout="cp2"),
        _TP2,
        "queries-forgotten",
        backward.queries_forgotten,
        in_backward("decoder.layers.1.self_attention.*"),
        "the second cp rank's queries give no gradient to the first one's keys and values",
        is_idle=True,
    ),
    _under(
        Run(layout="tp2-sp"),
        _DP2,
        "final-norm-summed-twice",
        backward.final_norm_summed_twice,
        in_backward("decoder.final_layernorm.weight", kind="2.000 times"),
        "under sequence parallelism the last norm's gradient is summed over tp twice",
    ),
    _under(
        Run(model="tied", layout="pp2"),
        Run(model="tied", layout="tp2"),
        "tied-summed-twice",
        backward.tied_summed_twice,
        in_backward(_EMBEDDING, kind="2.000 times"),
        "gradients of the tied embedding are summed over the first and the last stage twice",
    ),
)

UPDATE = (
    _under_tp(
        "clipped-later",
        updating.clipped_later,
        in_update("clip", kind="1.03333 times"),
        "under tp gradients are clipped at a norm of 0.31, not 0.3",
    ),
    _under_tp(
        "clipped-by-rank",
        updating.clipped_by_rank,
        in_update("clip", kind="ranks at tp1"),
        "the second tp rank clips its gradients at nine tenths of the norm",
    ),
    _under_tp(
        "parameter-skipped",
        updating.parameter_skipped,
        in_update("*.weight", kind="zero"),
        "the second tp rank's update leaves one parameter as it is",
    ),
    _on_dp1(
        "embedding-stale",
        updating.embedding_stale,
        in_update(_EMBEDDING, kind="copies"),
        "the second dp rank keeps the embedding of the update before",
    ),
    _under_tp(
        "moments-rounded",
        updating.moments_rounded,
        in_update("*.exp_avg", kind="7 bits of mantissa"),
        "under tp the first moments are kept in bfloat16",
    ),
    _under_tp(
        "parameters-rounded",
        updating.parameters_rounded,
        in_update("*.weight", kind="7 bits of mantissa"),
        "under tp the parameters that the optimizer holds are rounded to bfloat16",
    ),
    _under_tp(
        "decay-coupled",
        updating.decay_coupled,
        in_update("*.exp_avg"),
        "under tp weight decay is added to the gradient",
    ),
    _under_tp(
        "beta-later",
        updating.beta_later,
        in_update("*.exp_avg", update=1),
        "under tp Adam's first beta is 0.8 from the second update on",
    ),
)
