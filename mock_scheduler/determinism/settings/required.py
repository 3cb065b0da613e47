"""The four settings every deterministic run writes in its configuration.

Source: ROLL, rollout dump mock guide, "Determinism Settings".
"""

from __future__ import annotations

from mock_scheduler.determinism.settings.setting import Between, ReadAt, Setting

DETERMINISTIC_MODE = "DETERMINISTIC_MODE"
_NCCL_ALGO = r"(Ring|CollnetDirect|CollnetChain|\^NVLS)"

REQUIRED_SETTINGS: tuple[Setting, ...] = (
    Setting(
        name="NCCL_ALGO",
        pattern=rf"{_NCCL_ALGO}(\s*,\s*{_NCCL_ALGO})*",
        recommended="Ring",
        required=True,
        between_runs=Between.MUST_MATCH,
        read_at=ReadAt.PROCESS_GROUP,
        reader="NCCL",
        source="megatron/training/determinism.py, Megatron-core 0.19; NVIDIA/nccl issue 1055",
        remedy="only Ring, CollnetDirect, CollnetChain and ^NVLS are repeatable; Tree sums in an order of the topology",
    ),
    Setting(
        name="NVTE_ALLOW_NONDETERMINISTIC_ALGO",
        pattern="0",
        recommended="0",
        required=True,
        between_runs=Between.MUST_MATCH,
        read_at=ReadAt.TE_IMPORT,
        reader="TransformerEngine",
        source="TransformerEngine 2.x, DotProductAttention and pytorch/triton/mhc.py",
        remedy="any other value lets attention choose kernels that add in no fixed order",
    ),
    Setting(
        name="CUBLAS_WORKSPACE_CONFIG",
        pattern=r":4096:8|:16:8",
        recommended=":4096:8",
        required=True,
        between_runs=Between.MUST_MATCH,
        read_at=ReadAt.CUDA_CONTEXT,
        reader="cuBLAS",
        source="cuBLAS documentation, Results reproducibility; torch.use_deterministic_algorithms",
        remedy="only :4096:8 and :16:8 fix the workspace, without which cuBLAS picks one per stream",
    ),
    Setting(
        name=DETERMINISTIC_MODE,
        pattern="1",
        recommended="1",
        required=True,
        between_runs=Between.MUST_MATCH,
        read_at=ReadAt.MODEL_BUILD,
        reader="this project",
        source="ROLL, rollout dump mock guide",
        remedy="1 switches deterministic mode on and 0 off; nothing else is understood",
    ),
)
