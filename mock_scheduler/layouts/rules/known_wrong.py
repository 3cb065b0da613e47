"""Refuses, before a process starts, layouts that Megatron-core runs without an error and computes wrongly.

Contract: imports neither torch nor Megatron; the installed version is read from its metadata. The same rules are held
against Megatron's own objects at the start of a run (``mock_scheduler.layouts.rules``), with a warning of allowed
ones. ``docs/layouts.md`` explains them. PR and issue numbers are Megatron-LM's.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from difflib import get_close_matches

from mock_scheduler.config.layout import ParallelConfig
from mock_scheduler.errors import ConfigError
from mock_scheduler.layouts.described import DescribedModel, DescribedTraining
from mock_scheduler.layouts.rules.rule import Conflict, Effect, MegatronRule, Setup, apply_rules
from mock_scheduler.support.text import bullet_list
from mock_scheduler.support.versions import DISTRIBUTIONS, read_package_version

MEGATRON = "megatron-core"
_AUX_LOSSES = frozenset({"aux_loss", "seq_aux_loss", "global_aux_loss"})


def _crosses_pipeline(setup: Setup) -> bool:
    return (
        setup.size("pipeline_model_parallel_size") == 2
        and setup.size("virtual_pipeline_model_parallel_size") > 1
        and not setup.is_on("overlap_p2p_comm")
        and setup.is_on("batch_p2p_comm")
    )


def _reduces_experts_as_dense(setup: Setup) -> bool:
    # Megatron gives experts a reduction of their own by ep > 1 alone, but they need it where etp differs from tp.
    return (
        setup.is_on("num_moe_experts")
        and setup.size("expert_model_parallel_size") == 1
        and setup.size("expert_tensor_parallel_size") != setup.size("tensor_model_parallel_size")
    )


def _scales_router_losses_by_layout(setup: Setup) -> bool:
    # One rank has nothing to miscount, and the layout-invariant router counts by itself.
    is_split = setup.size("tensor_model_parallel_size") * setup.size("context_parallel_size") > 1
    return (
        setup.is_on("num_moe_experts")
        and is_split
        and setup.is_on("calculate_per_token_loss")
        and setup.values.get("moe_router_impl") != "layout_invariant"
        and (setup.is_on("moe_z_loss_coeff") or _has_aux_loss(setup))
    )


def _has_aux_loss(setup: Setup) -> bool:
    """Says whether a load-balancing loss has a coefficient."""
    # Megatron takes one of each or a list of each.
    kinds, coefficients = setup.values.get("moe_router_load_balancing_type"), setup.values.get("moe_aux_loss_coeff")
    pairs = zip(
        kinds if isinstance(kinds, list) else [kinds],
        coefficients if isinstance(coefficients, list) else [coefficients],
        strict=True,
    )
    return any(kind in _AUX_LOSSES and bool(coefficient) for kind, coefficient in pairs)


def _divides_by_own_tokens(setup: Setup) -> bool:
    # With calculate_per_token_loss the schedule leaves the sum alone, and the total of all ranks divides it.
    return (
        setup.size("context_parallel_size") > 1
        and setup.values.get("calculate_per_token_loss") is False
        and setup.values.get("loss_values") == 3
    )


def _sums_biases_of_other_experts(setup: Setup) -> bool:
    # RowParallelLinear marks its bias as shared by all tp ranks, also where it belongs to an expert.
    return (
        setup.is_on("num_moe_experts")
        and setup.is_on("add_bias_linear")
        and setup.is_on("sequence_parallel")
        and setup.size("tensor_model_parallel_size") > 1
        and setup.values.get("transformer_impl") == "local"
    )


def _is_latent_over_tp(setup: Setup) -> bool:
    # TransformerEngine's down projections are built otherwise, and were not measured.
    return (
        setup.is_on("multi_latent_attention")
        and setup.size("tensor_model_parallel_size") > 1
        and setup.values.get("transformer_impl") == "local"
    )


def _sums_whole_query_norms(setup: Setup) -> bool:
    # Under sequence parallelism each rank has the gradient of its own tokens, and the sum is right.
    return _is_latent_over_tp(setup) and setup.is_on("qk_layernorm") and not setup.is_on("sequence_parallel")


_LATENT = "multi_latent_attention", "tensor_model_parallel_size", "transformer_impl"

KNOWN_WRONG: tuple[MegatronRule, ...] = (
    MegatronRule(
        name="pipeline-crossing",
        effect=Effect.WRONG,
        shows=(
            "pipeline_model_parallel_size",
            "virtual_pipeline_model_parallel_size",
            "overlap_p2p_comm",
            "batch_p2p_comm",
        ),
        applies=_crosses_pipeline,
        breaks="activations of the two stages cross, without an error: loss 4.2348 in place of 4.1858 was measured",
        change="Set overlap_p2p_comm=True and batch_p2p_comm=False (parallel.overlap_p2p_comm=true is both).",
        source="issue 1450, PRs 5271 and 7177; measured with 0.16.1 and 0.19.2",
    ),
    MegatronRule(
        name="experts-under-tp",
        effect=Effect.WRONG,
        shows=(
            "tensor_model_parallel_size",
            "expert_tensor_parallel_size",
            "expert_model_parallel_size",
            "num_moe_experts",
        ),
        applies=_reduces_experts_as_dense,
        breaks=(
            "gradients of experts are summed over the ranks that hold the same dense weights, not over those that hold "
            "the same experts: with tp 2 their relative error was up to 0.62, and replicas of 16 expert tensors "
            "differed, while the loss was equal"
        ),
        change=(
            "Set expert_model_parallel_size above 1, or expert_tensor_parallel_size to tensor_model_parallel_size, or "
            "install megatron-core>=0.19."
        ),
        source="PR 5916; measured wrong with 0.16.1, right with 0.19.2",
        before="0.19",
    ),
    MegatronRule(
        name="aux-loss-per-token",
        effect=Effect.WRONG,
        shows=(
            "moe_router_load_balancing_type",
            "moe_aux_loss_coeff",
            "moe_z_loss_coeff",
            "calculate_per_token_loss",
            "tensor_model_parallel_size",
            "context_parallel_size",
        ),
        applies=_scales_router_losses_by_layout,
        breaks=(
            "the router's auxiliary losses count tp × cp times too little: with tp 2 and ep 2 the relative error of "
            "the router's gradient was 0.377, while the loss was equal"
        ),
        change=(
            "Set model.moe_router_impl=layout_invariant, or calculate_per_token_loss=False, or install "
            "megatron-core>=0.19."
        ),
        source="issue 1652, PR 5047; measured wrong with 0.16.1, right with 0.19.2",
        before="0.19",
    ),
    MegatronRule(
        name="loss-tuple-under-cp",
        effect=Effect.WRONG,
        shows=("context_parallel_size", "calculate_per_token_loss", "loss_values"),
        applies=_divides_by_own_tokens,
        breaks=(
            "each cp rank divides by the response tokens of its own part of the rows, of which there are unequally "
            "many: with cp 2 the relative error of gradients was 0.875, while the loss was equal"
        ),
        change="Set calculate_per_token_loss=True, or context_parallel_size=1.",
        source="issue 7452, PR 7513; measured with 0.16.1 and 0.19.2",
    ),
    MegatronRule(
        name="expert-bias-under-tp",
        effect=Effect.WRONG,
        shows=(
            "num_moe_experts",
            "add_bias_linear",
            "tensor_model_parallel_size",
            "sequence_parallel",
            "transformer_impl",
        ),
        applies=_sums_biases_of_other_experts,
        breaks=(
            "gradients of the experts' second biases are summed over tp, whose ranks hold different experts, or count "
            "twice: with tp 2 and ep 2, gradients of 1 and of 2 of two experts both became 3"
        ),
        change="Set add_bias_linear=False, or tensor_model_parallel_size=1.",
        source="megatron/core/tensor_parallel/layers.py, RowParallelLinear; measured with 0.16.1, found in 0.19.2",
    ),
    MegatronRule(
        name="latent-keys-under-tp",
        effect=Effect.WRONG,
        shows=_LATENT,
        applies=_is_latent_over_tp,
        breaks=(
            "with multi-latent attention each tp rank has the rotary keys' gradient of its own heads, and gathering "
            "their projection adds nothing up: with tp 2 the relative error of its weight's gradient was 0.332, while "
            "the loss was equal"
        ),
        change="Set tensor_model_parallel_size=1.",
        source="megatron/core/transformer/multi_latent_attention.py; measured with 0.16.1, the same code in 0.19.2",
    ),
    MegatronRule(
        name="latent-norm-under-tp",
        effect=Effect.WRONG,
        shows=(*_LATENT, "qk_layernorm", "sequence_parallel"),
        applies=_sums_whole_query_norms,
        breaks=(
            "with multi-latent attention every tp rank has the whole gradient of the norm of compressed queries, and "
            "they are summed as those of norms of heads are: with tp 2 it was twice as large, while the loss was equal"
        ),
        change="Set tensor_model_parallel_size=1.",
        source="megatron/core/distributed/finalize_model_grads.py; measured with 0.16.1, the same code in 0.19.2",
    ),
)


def check_allowed_names(allowed: Collection[str]) -> None:
    """Raises ``ConfigError`` with all names of ``parallel.allow_known_wrong`` that are no rule of ``KNOWN_WRONG``."""
    known = [rule.name for rule in KNOWN_WRONG]
    problems = []
    for name in allowed:
        if name not in known:
            nearest = get_close_matches(name, known, n=1)
            problems.append(repr(name) + (f"; nearest: {nearest[0]}" if nearest else ""))
    if problems:
        raise ConfigError(
            "parallel.allow_known_wrong has names that are no rule about known wrong layouts (known: "
            f"{', '.join(known)}):{bullet_list(problems, limit=None)}"
        )


def layout_values(
    parallel: ParallelConfig, model: DescribedModel, training: DescribedTraining, *, loss_values: int
) -> dict[str, object]:
    """Names the configuration by Megatron's fields, as far as the rules of ``KNOWN_WRONG`` look at it.

    ``loss_values``: how many values the program's loss function returns to Megatron's schedule, 2 or 3.
    """
    is_interleaved = parallel.num_chunks > 1
    return {
        "tensor_model_parallel_size": parallel.tensor_model_parallel_size,
        "pipeline_model_parallel_size": parallel.pipeline_model_parallel_size,
        "virtual_pipeline_model_parallel_size": parallel.num_chunks if is_interleaved else None,
        "context_parallel_size": parallel.context_parallel_size,
        "expert_model_parallel_size": parallel.expert_model_parallel_size,
        "expert_tensor_parallel_size": parallel.expert_tensor_parallel_size,
        "sequence_parallel": parallel.sequence_parallel,
        # The schedule without chunks refuses to overlap (pipeline_parallel/schedules.py).
        "overlap_p2p_comm": parallel.overlap_p2p_comm and is_interleaved,
        "batch_p2p_comm": not (parallel.overlap_p2p_comm and is_interleaved),
        "transformer_impl": model.transformer_impl,
        "add_bias_linear": model.add_bias_linear,
        "num_moe_experts": model.num_moe_experts,
        "moe_router_load_balancing_type": model.moe_router_load_balancing_type,
        "moe_aux_loss_coeff": model.moe_aux_loss_coeff,
        "moe_z_loss_coeff": model.moe_z_loss_coeff,
        "moe_router_impl": model.moe_router_impl,
        "calculate_per_token_loss": training.calculate_per_token_loss,
        "loss_values": loss_values,
    }


def installed_megatron() -> str | None:
    """Reads the installed version of megatron-core; ``None`` where it is not installed."""
    return read_package_version(*DISTRIBUTIONS[MEGATRON])


def find_known_wrong(values: Mapping[str, object], *, version: str | None) -> list[Conflict]:
    """Returns every rule of ``KNOWN_WRONG`` that applies to a configuration, by the names of Megatron's fields.

    ``version``: of megatron-core; with ``None`` rules for some versions only are left out.
    """
    rules = [rule for rule in KNOWN_WRONG if version is not None or rule.is_for_all_versions]
    versions = {} if version is None else {MEGATRON: version}
    return apply_rules(rules, Setup(values=values, environ={}, versions=versions, device=None))


def check_known_wrong(parallel: ParallelConfig, values: Mapping[str, object], *, version: str | None) -> None:
    """Refuses a layout that megatron-core computes wrongly, unless ``parallel.allow_known_wrong`` names the rule.

    ``values``: as ``layout_values`` gives them. ``version``: of megatron-core, as for ``find_known_wrong``.

    Raises:
        ConfigError: with every degree, the number of processes, all rules and remedies; or an allowed name is unknown.
    """
    check_allowed_names(parallel.allow_known_wrong)
    refused = [
        conflict
        for conflict in find_known_wrong(values, version=version)
        if conflict.rule.name not in parallel.allow_known_wrong
    ]
    if refused:
        names = ",".join([*parallel.allow_known_wrong, *(conflict.rule.name for conflict in refused)])
        raise ConfigError(
            f"layout {parallel.describe_in_full()} is known to compute wrong values with {MEGATRON} "
            f"{version or 'of any version'}:"
            f"{bullet_list([conflict.describe() for conflict in refused], limit=None)}\n"
            f"To run it all the same, with a warning: parallel.allow_known_wrong=[{names}]"
        )
