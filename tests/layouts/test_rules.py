"""Each rule about Megatron's configuration finds its planted conflict, names it, and leaves the clean case alone."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from mock_scheduler.errors import ConfigError, DeterminismError
from mock_scheduler.layouts.rules import RULES, check_conflicts, find_conflicts
from mock_scheduler.layouts.rules.facts import FACT_RULES
from mock_scheduler.layouts.rules.rule import Conflict, Effect, MegatronRule, Setup, parse_version

# What the pipeline builds: no rule but facts applies to it.
CLEAN: dict[str, object] = {
    "deterministic_mode": True,
    "torch.deterministic_algorithms": True,
    "cross_entropy_loss_fusion": False,
    "tp_comm_overlap": False,
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "context_parallel_size": 1,
    "virtual_pipeline_model_parallel_size": None,
    "overlap_p2p_comm": False,
    "batch_p2p_comm": True,
    "sequence_parallel": False,
    "moe_router_fusion": False,
    "moe_token_dispatcher_type": "alltoall",
    "transformer_impl": "transformer_engine",
    "params_dtype": "bfloat16",
    "attention_backend": "flash",
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "kv_channels": 128,
}
ENVIRON = {
    "DETERMINISTIC_MODE": "1",
    "NCCL_ALGO": "Ring",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}
HOPPER, BLACKWELL, WORKSTATION = (9, 0), (10, 0), (12, 0)
NEW, OLD = "0.19.2", "0.16.1"


@dataclass(frozen=True, kw_only=True)
class Case:
    """``planted`` must be found by the rule ``name``; with ``cured`` over it, it must not."""

    name: str
    planted: dict[str, object] = field(default_factory=dict)
    cured: dict[str, object] = field(default_factory=dict)
    environ: dict[str, str] = field(default_factory=dict)
    cured_environ: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    cured_versions: dict[str, str] = field(default_factory=dict)
    device: tuple[int, int] | None = HOPPER
    cured_device: tuple[int, int] | None = HOPPER
    core: str = NEW

    def setup(self, *, is_cured: bool) -> Setup:
        cured = (self.cured, self.cured_environ, self.cured_versions) if is_cured else ({}, {}, {})
        return Setup(
            values={**CLEAN, **self.planted, **cured[0]},
            environ={**ENVIRON, **self.environ, **cured[1]},
            versions={"megatron-core": self.core, **self.versions, **cured[2]},
            device=self.cured_device if is_cured else self.device,
        )


BATCH_INVARIANT = {"batch_invariant_mode": True, "flash_attention_version": 3}
HYBRID_CP = {"hybrid_context_parallel": True, "calculate_per_token_loss": True}
LATENT: dict[str, object] = {"multi_latent_attention": True, "qk_layernorm": True, "transformer_impl": "local"}
SP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
AUX_LOSS: dict[str, object] = {
    **SP2,
    "num_moe_experts": 4,
    "expert_model_parallel_size": 2,
    "expert_tensor_parallel_size": 1,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.1,
    "calculate_per_token_loss": True,
}
CASES = [
    Case(
        name="cross-entropy-fusion",
        planted={"cross_entropy_loss_fusion": True},
        cured={"cross_entropy_loss_fusion": False},
    ),
    Case(
        name="cross-entropy-of-te",
        planted={"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "te"},
        cured={"cross_entropy_fusion_impl": "native"},
    ),
    Case(
        name="tp-comm-overlap",
        planted={"tp_comm_overlap": True, "sequence_parallel": True, "tensor_model_parallel_size": 2},
        cured={"tp_comm_overlap": False},
    ),
    Case(
        name="overlap-without-sequence-parallel",
        planted={"tp_comm_overlap": True, "tensor_model_parallel_size": 2},
        cured={"sequence_parallel": True},
    ),
    Case(name="atomic-overlap", planted={"tp_comm_atomic_rs": True}, cured={"tp_comm_atomic_rs": False}),
    Case(
        name="atomic-overlap",
        environ={"NVTE_RS_STRIDED_ATOMIC": "1"},
        cured_environ={"NVTE_RS_STRIDED_ATOMIC": "0"},
    ),
    Case(
        name="router-aux-loss-fusion", planted={"moe_router_fusion": True}, cured={"moe_router_fusion": False}, core=OLD
    ),
    Case(
        name="router-aux-loss-fusion",
        planted={"moe_router_fusion": True, "moe_router_aux_loss_fusion": None},
        cured={"moe_router_aux_loss_fusion": False},
    ),
    Case(
        name="router-aux-loss-fusion",
        planted={"moe_router_aux_loss_fusion": True},
        cured={"moe_router_aux_loss_fusion": None},
    ),
    Case(
        name="single-grouped-weight",
        planted={"moe_single_grouped_weight": True},
        cured={"moe_single_grouped_weight": False},
    ),
    Case(
        name="single-grouped-weight",
        planted={"moe_grouped_gemm": True},
        environ={"NVTE_GROUPED_LINEAR_SINGLE_PARAM": "1"},
        cured_environ={"NVTE_GROUPED_LINEAR_SINGLE_PARAM": "0"},
    ),
    Case(
        name="fused-grouped-mlp",
        environ={"NVTE_CUTEDSL_FUSED_GROUPED_MLP": "1"},
        versions={"cudnn-frontend": "1.27.0"},
        cured_versions={"cudnn-frontend": "1.28.0"},
    ),
    Case(
        name="token-dispatcher",
        planted={"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "hybridep"},
        cured={"moe_token_dispatcher_type": "alltoall"},
    ),
    Case(name="token-dispatcher", planted={"moe_enable_deepep": True}, cured={"moe_enable_deepep": False}),
    Case(
        name="stochastic-rounding",
        planted={"fp4": "e2m1"},
        cured_environ={"NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING": "1"},
    ),
    Case(
        name="flash-attn-version",
        versions={"flash-attn": "2.3.6"},
        cured_versions={"flash-attn": "2.4.1"},
    ),
    Case(
        name="flash-attn-3-head-size",
        planted={"flash_attention_version": 3, "kv_channels": 256},
        cured={"kv_channels": 192},
    ),
    Case(name="legacy-flash-attn", planted={"use_flash_attn": True}, cured={"use_flash_attn": False}, core="0.18.2"),
    Case(
        name="fused-attention-on-blackwell",
        planted={"attention_backend": "fused"},
        versions={"cudnn": "9.18.0"},
        cured_versions={"cudnn": "9.18.1"},
        device=BLACKWELL,
        cured_device=BLACKWELL,
    ),
    Case(
        name="fused-attention-on-sm120",
        planted={"attention_backend": "fused"},
        cured={"attention_backend": "unfused"},
        device=WORKSTATION,
        cured_device=WORKSTATION,
    ),
    Case(
        name="causal-conv1d-version",
        planted={"is_hybrid_model": True},
        versions={"causal-conv1d": "1.5.3"},
        cured_versions={"causal-conv1d": "1.6.0"},
    ),
    Case(
        name="causal-conv1d-version",
        planted={"experimental_attention_variant": "gated_delta_net"},
        versions={"causal-conv1d": "1.5.3"},
        cured={"experimental_attention_variant": "dsa"},
    ),
    Case(name="half-deterministic", planted={"deterministic_mode": False}, cured={"deterministic_mode": True}),
    Case(
        name="half-deterministic",
        planted={"torch.deterministic_algorithms": False},
        cured={"torch.deterministic_algorithms": True},
    ),
    Case(
        name="nccl-algo-of-one-token",
        environ={"NCCL_ALGO": "Ring,^NVLS"},
        cured_environ={"NCCL_ALGO": "^NVLS"},
        core=OLD,
    ),
    Case(
        name="device-max-connections",
        planted={"tensor_model_parallel_size": 2},
        cured_environ={"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
    ),
    Case(
        name="device-max-connections",
        planted={"context_parallel_size": 2},
        environ={"CUDA_DEVICE_MAX_CONNECTIONS": "8"},
        cured_device=BLACKWELL,
    ),
    Case(name="device-max-connections", planted={"tensor_model_parallel_size": 2}, cured_device=None),
    Case(
        name="fsdp-connections",
        planted={"use_megatron_fsdp": True},
        environ={"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
        cured_environ={"CUDA_DEVICE_MAX_CONNECTIONS": "8"},
    ),
    Case(
        name="ucc-connections",
        planted={"pipeline_model_parallel_comm_backend": "ucc"},
        environ={"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
        cured={"pipeline_model_parallel_comm_backend": "nccl"},
    ),
    Case(
        name="attention-determinism",
        environ={"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "1"},
        cured_environ={"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"},
    ),
    Case(
        name="pipeline-crossing",
        planted={"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
        cured={"overlap_p2p_comm": True, "batch_p2p_comm": False},
    ),
    *(
        Case(
            name="experts-under-tp",
            planted={"num_moe_experts": 4, "expert_tensor_parallel_size": 1, **SP2, **planted},
            cured=cured,
            core=OLD,
        )
        for planted, cured in (
            ({}, {"expert_model_parallel_size": 2}),
            ({}, {"expert_tensor_parallel_size": 2}),
            ({"expert_tensor_parallel_size": 4}, {"num_moe_experts": None}),
        )
    ),
    *(
        Case(
            name="aux-loss-per-token",
            planted={**AUX_LOSS, **planted},
            cured=cured,
            core=OLD,
        )
        for planted, cured in (
            ({}, {"moe_router_impl": "layout_invariant"}),
            ({}, {"calculate_per_token_loss": False}),
            ({"moe_router_impl": "megatron"}, {"moe_aux_loss_coeff": 0.0}),
            ({"moe_aux_loss_coeff": 0.0, "moe_z_loss_coeff": 0.001}, {"moe_z_loss_coeff": None}),
            (
                {"moe_router_load_balancing_type": ["none", "seq_aux_loss"], "moe_aux_loss_coeff": [0.0, 0.1]},
                {"moe_router_load_balancing_type": ["seq_aux_loss", "none"]},
            ),
            ({"tensor_model_parallel_size": 1, "context_parallel_size": 2}, {"context_parallel_size": 1}),
        )
    ),
    *(
        Case(
            name="loss-tuple-under-cp",
            planted={"context_parallel_size": 2, "calculate_per_token_loss": False, "loss_values": 3},
            cured=cured,
        )
        for cured in (
            {"context_parallel_size": 1},
            {"calculate_per_token_loss": True},
            {"loss_values": 2},
            # Another program's loss function is not known.
            {"loss_values": None},
        )
    ),
    *(
        Case(
            name="expert-bias-under-tp",
            planted={**SP2, "num_moe_experts": 4, "add_bias_linear": True, "transformer_impl": "local"},
            cured=cured,
        )
        for cured in (
            {"num_moe_experts": None},
            {"add_bias_linear": False},
            {"tensor_model_parallel_size": 1, "sequence_parallel": False},
            {"transformer_impl": "transformer_engine"},
        )
    ),
    *(
        Case(name=name, planted={"tensor_model_parallel_size": 2, **LATENT, **planted}, cured=cured)
        for name, planted, cured in (
            ("latent-keys-under-tp", {"qk_layernorm": False}, {"multi_latent_attention": False}),
            ("latent-keys-under-tp", {"sequence_parallel": True}, {"tensor_model_parallel_size": 1}),
            ("latent-keys-under-tp", {}, {"transformer_impl": "transformer_engine"}),
            ("latent-norm-under-tp", {}, {"sequence_parallel": True}),
            ("latent-norm-under-tp", {}, {"qk_layernorm": False}),
        )
    ),
    Case(
        name="sequence-parallel-without-tp",
        planted={"sequence_parallel": True},
        cured={"tensor_model_parallel_size": 2},
    ),
    Case(
        name="hybrid-cp-pipeline",
        planted={**HYBRID_CP, "pipeline_model_parallel_size": 2},
        cured={"pipeline_model_parallel_size": 1},
    ),
    Case(
        name="hybrid-cp-cuda-graph",
        planted={**HYBRID_CP, "cuda_graph_impl": "local"},
        cured={"cuda_graph_impl": "none"},
    ),
    Case(
        name="hybrid-cp-fsdp",
        planted={**HYBRID_CP, "use_megatron_fsdp": True},
        cured={"use_megatron_fsdp": False},
    ),
    Case(
        name="hybrid-cp-loss",
        planted={**HYBRID_CP, "calculate_per_token_loss": False},
        cured={"calculate_per_token_loss": True},
    ),
    Case(
        name="batch-invariant-attention-backend",
        planted={**BATCH_INVARIANT, "attention_backend": "auto"},
        cured={"attention_backend": "flash"},
        core=OLD,
    ),
    Case(
        name="batch-invariant-moe-token-dispatcher-type",
        planted={**BATCH_INVARIANT, "num_moe_experts": 8, "moe_token_dispatcher_type": "allgather"},
        cured={"num_moe_experts": None},
    ),
    *(
        Case(
            name=f"batch-invariant-{name.replace('_', '-')}", planted={**BATCH_INVARIANT, name: bad}, cured={name: good}
        )
        for name, bad, good in (
            ("params_dtype", "float32", "bfloat16"),
            ("flash_attention_version", 2, 4),
            ("context_parallel_size", 2, 1),
            ("attention_dropout", 0.1, 0.0),
            ("fp8", "e4m3", None),
            ("fp4", "e2m1", None),
            ("moe_permute_fusion", True, False),
            ("moe_permute_fusion_into_hybridep", True, False),
            ("moe_expert_capacity_factor", 0.0, None),
            ("moe_pad_expert_input_to_capacity", True, False),
        )
    ),
]


def names_of(setup: Setup) -> list[str]:
    return [conflict.rule.name for conflict in find_conflicts(setup)]


@pytest.mark.parametrize("case", CASES, ids=[f"{number}-{case.name}" for number, case in enumerate(CASES)])
def test_a_planted_conflict_is_found_by_name_and_its_cure_is_accepted(case: Case) -> None:
    assert case.name in names_of(case.setup(is_cured=False))
    assert case.name not in names_of(case.setup(is_cured=True))


def test_every_conflict_rule_has_a_planted_case() -> None:
    """A rule added without a test of its own fails here."""
    facts = {rule.name for rule in FACT_RULES}
    assert {rule.name for rule in RULES} - facts == {case.name for case in CASES}
    assert len({rule.name for rule in RULES}) == len(RULES)


def test_a_clean_configuration_has_facts_alone() -> None:
    for core in (OLD, NEW):
        clean = Case(name="", core=core).setup(is_cured=False)
        assert {conflict.rule.effect for conflict in find_conflicts(clean)} == {Effect.CHANGES_BITS}


ON = {"hidden_dropout": 0.1, "attention_dropout": 0.1, "moe_input_jitter_eps": 0.01, "moe_expert_capacity_factor": 1.25}
SIZES = {"num_distributed_optimizer_instances": 2, "cuda_graph_impl": "local", "bucket_size": 40_000_000, "fp8": "e4m3"}


@pytest.mark.parametrize("rule", FACT_RULES, ids=lambda rule: rule.name)
def test_each_fact_is_reported_where_its_field_is_on_and_only_there(rule: MegatronRule) -> None:
    name = rule.shows[0]
    on = {
        **ON,
        **SIZES,
        "attention_backend": "auto",
        "moe_token_dispatcher_type": "allgather",
        "moe_router_dtype": "fp32",
    }
    values: dict[str, object] = {"num_moe_experts": 8, name: on.get(name, True)}

    def facts(values: dict[str, object]) -> list[Conflict]:
        setup = Setup(values=values, environ={}, versions={"megatron-core": NEW}, device=None)
        return [conflict for conflict in find_conflicts(setup) if conflict.rule is rule]

    assert [conflict.found for conflict in facts(values)] == [f"{name} is {values[name]!r}"]
    off = {"attention_backend": None, "moe_token_dispatcher_type": None, "cuda_graph_impl": "none"}
    assert facts({**values, name: off.get(name)}) == []


def test_all_conflicts_are_listed_with_what_to_change() -> None:
    values = {**CLEAN, "cross_entropy_loss_fusion": True, "tensor_model_parallel_size": 2}
    setup = Setup(
        values=values,
        environ={**ENVIRON, "NCCL_ALGO": "Ring,^NVLS"},
        versions={"megatron-core": OLD},
        device=HOPPER,
    )
    with pytest.raises(DeterminismError) as caught:
        check_conflicts(find_conflicts(setup), setup)
    assert str(caught.value) == (
        "the model's configuration cannot be trained (megatron-core 0.16.1, DETERMINISTIC_MODE=1):\n"
        "  - cross_entropy_loss_fusion is True: the fused cross-entropy is not repeatable. Set "
        "cross_entropy_loss_fusion=False. [cross-entropy-fusion; megatron/training/determinism.py]\n"
        "  - NCCL_ALGO is 'Ring,^NVLS', megatron-core is 0.16.1: Megatron before 0.19 refuses lists: it wants one of "
        "Ring, CollnetDirect, CollnetChain, ^NVLS. Set NCCL_ALGO='Ring'. [nccl-algo-of-one-token; "
        "megatron/training/arguments.py, Megatron-core 0.15 to 0.18]\n"
        "  - tensor_model_parallel_size is 2, context_parallel_size is 1, CUDA_DEVICE_MAX_CONNECTIONS is not set: with "
        "tp > 1 or cp > 1 before Blackwell, only one queue keeps communication and products in order. Set "
        "CUDA_DEVICE_MAX_CONNECTIONS='1' in system_envs. [device-max-connections; megatron/training/arguments.py]"
    )


def test_what_is_not_repeatable_is_a_fact_outside_deterministic_mode() -> None:
    values = {**CLEAN, "cross_entropy_loss_fusion": True, "deterministic_mode": False, "hidden_dropout": 0.1}
    values["torch.deterministic_algorithms"] = False
    setup = Setup(values=values, environ={}, versions={"megatron-core": NEW}, device=None)
    facts = find_conflicts(setup)
    check_conflicts(facts, setup)
    assert [(fact.rule.name, fact.rule.effect) for fact in facts if fact.rule.effect is not Effect.CHANGES_BITS] == [
        ("cross-entropy-fusion", Effect.NOT_REPEATABLE),
        ("hidden-dropout", Effect.DEPENDS_ON_LAYOUT),
    ]


def test_wrong_values_are_refused_in_every_mode() -> None:
    values = {**CLEAN, "pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
    setup = Setup(values=values, environ={}, versions={}, device=None)
    with pytest.raises(
        DeterminismError, match=r"megatron-core unknown, no DETERMINISTIC_MODE.*\n.*activations of the two"
    ):
        check_conflicts(find_conflicts(setup), setup)


CROSSING: dict[str, object] = {
    **CLEAN,
    "pipeline_model_parallel_size": 2,
    "virtual_pipeline_model_parallel_size": 2,
    "deterministic_mode": False,
    "torch.deterministic_algorithms": False,
}


def test_an_allowed_wrong_layout_is_warned_of_and_not_refused(caplog: pytest.LogCaptureFixture) -> None:
    setup = Setup(values=CROSSING, environ={}, versions={"megatron-core": OLD}, device=None)
    check_conflicts(find_conflicts(setup), setup, allowed=["pipeline-crossing", "experts-under-tp"])
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        (
            "WARNING",
            "parallel.allow_known_wrong (megatron-core 0.16.1):\n"
            "  - this run computes wrong values, as is allowed: pipeline_model_parallel_size is 2, "
            "virtual_pipeline_model_parallel_size is 2, overlap_p2p_comm is False, batch_p2p_comm is True: activations "
            "of the two stages cross, without an error: loss 4.2348 in place of 4.1858 was measured. Set "
            "overlap_p2p_comm=True and batch_p2p_comm=False (parallel.overlap_p2p_comm=true is both). "
            "[pipeline-crossing; issue 1450, PRs 5271 and 7177; measured with 0.16.1 and 0.19.2]\n"
            "  - experts-under-tp is allowed but does not apply",
        )
    ]


def test_what_is_allowed_hides_no_other_conflict(caplog: pytest.LogCaptureFixture) -> None:
    values = {**CROSSING, "sequence_parallel": True}
    setup = Setup(values=values, environ={}, versions={"megatron-core": OLD}, device=None)
    with pytest.raises(DeterminismError) as caught:
        check_conflicts(find_conflicts(setup), setup, allowed=["pipeline-crossing"])
    assert [line.rpartition("[")[2].partition(";")[0] for line in str(caught.value).splitlines()[1:]] == [
        "sequence-parallel-without-tp"
    ]
    assert caplog.records == []


def test_only_rules_about_wrong_values_can_be_allowed() -> None:
    setup = Setup(values=CLEAN, environ={}, versions={"megatron-core": OLD}, device=None)
    with pytest.raises(ConfigError) as caught:
        check_conflicts([], setup, allowed=["sequence-parallel-without-tp"])
    assert str(caught.value) == (
        "parallel.allow_known_wrong has names that are no rule about known wrong layouts (known: pipeline-crossing, "
        "experts-under-tp, aux-loss-per-token, loss-tuple-under-cp, expert-bias-under-tp, latent-keys-under-tp, "
        "latent-norm-under-tp):\n"
        "  - 'sequence-parallel-without-tp'"
    )


def test_nothing_is_warned_of_where_nothing_is_allowed(caplog: pytest.LogCaptureFixture) -> None:
    setup = Setup(values={**CLEAN, "hidden_dropout": 0.1}, environ=ENVIRON, versions={}, device=None)
    check_conflicts(find_conflicts(setup), setup)
    assert caplog.records == []


@pytest.mark.parametrize(
    ("core", "is_refused"),
    [("0.14.9", False), ("0.15.0", True), ("0.18.2", True), ("0.19.0rc0", False), ("0.19", False)],
)
def test_a_rule_holds_for_its_versions_only(core: str, is_refused: bool) -> None:
    case = Case(name="nccl-algo-of-one-token", environ={"NCCL_ALGO": "Ring,^NVLS"}, core=core)
    assert (case.name in names_of(case.setup(is_cured=False))) is is_refused


@pytest.mark.parametrize(
    ("text", "version"), [("0.16.1", (0, 16, 1)), ("2.13.0+cpu", (2, 13)), ("0.19.0rc0", (0, 19)), ("9", (9,))]
)
def test_versions_compare_by_their_numbers(text: str, version: tuple[int, ...]) -> None:
    assert parse_version(text) == version


def test_a_text_without_a_number_is_no_version() -> None:
    with pytest.raises(ValueError, match=r"^'unknown' is no version$"):
        parse_version("unknown")
