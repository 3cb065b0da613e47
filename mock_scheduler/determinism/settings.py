"""The table of environment settings that decide whether a run is repeatable.

Contract: imports no torch. The environment that launchers export, the check at the start and the read-back all come
from this one table.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum


class ReadAt(StrEnum):
    """When a library reads a setting; what is set later has no effect."""

    INTERPRETER = "when the Python interpreter starts"
    TORCH_IMPORT = "when torch is imported"
    TE_IMPORT = "when transformer_engine is imported"
    CUDA_CONTEXT = "when the first CUDA context is made"
    PROCESS_GROUP = "when a process group is made"
    MODEL_BUILD = "when the model is built"


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One environment variable.

    ``pattern``: regular expression that the whole value must match in a deterministic run; ``None`` where the value is
    only recorded. ``recommended``: the value to write, ``""`` where none is recommended.
    ``required``: a deterministic run must have it in ``system_envs``.
    ``remedy``: why other values are refused or matter, and what to do.
    """

    name: str
    pattern: str | None
    recommended: str
    required: bool
    read_at: ReadAt
    reader: str
    source: str
    remedy: str

    def allows(self, value: str) -> bool:
        """Whether a deterministic run may have this value."""
        return self.pattern is None or re.fullmatch(self.pattern, value) is not None

    def problem(self, value: str | None) -> str | None:
        """What is wrong with a value in a deterministic run, or ``None``; ``value``: ``None`` where it is not set."""
        if value is None:
            return f"{self.name} is not set; set it to {self.recommended!r}" if self.required else None
        return None if self.allows(value) else f"{self.name} is {value!r}: {self.remedy}"

    @property
    def yaml_line(self) -> str:
        """The line to write under ``system_envs``."""
        return f"{self.name}: '{self.recommended}'"


def _recorded(name: str, read_at: ReadAt, *, reader: str, source: str, remedy: str) -> Setting:
    return Setting(
        name=name,
        pattern=None,
        recommended="",
        required=False,
        read_at=read_at,
        reader=reader,
        source=source,
        remedy=remedy,
    )


DETERMINISTIC_MODE = "DETERMINISTIC_MODE"
_NCCL_ALGO = r"(Ring|CollnetDirect|CollnetChain|\^NVLS)"

SETTINGS: tuple[Setting, ...] = (
    Setting(
        name="NCCL_ALGO",
        pattern=rf"{_NCCL_ALGO}(\s*,\s*{_NCCL_ALGO})*",
        recommended="Ring",
        required=True,
        read_at=ReadAt.PROCESS_GROUP,
        reader="NCCL",
        source="megatron/training/determinism.py, Megatron-core 0.19",
        remedy="only Ring, CollnetDirect, CollnetChain and ^NVLS are repeatable; Tree sums in an order of the topology",
    ),
    Setting(
        name="NVTE_ALLOW_NONDETERMINISTIC_ALGO",
        pattern="0",
        recommended="0",
        required=True,
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
        read_at=ReadAt.MODEL_BUILD,
        reader="this project",
        source="ROLL, rollout dump mock guide",
        remedy="1 switches deterministic mode on and 0 off; nothing else is understood",
    ),
    Setting(
        name="PYTHONHASHSEED",
        pattern=r"\d+",
        recommended="0",
        required=False,
        read_at=ReadAt.INTERPRETER,
        reader="Python",
        source="Python documentation, PYTHONHASHSEED",
        remedy="without a fixed number the order of sets of strings differs between processes",
    ),
    Setting(
        name="OMP_NUM_THREADS",
        pattern=r"[1-9]\d*",
        recommended="1",
        required=False,
        read_at=ReadAt.TORCH_IMPORT,
        reader="OpenMP",
        source="measured: LayerNorm gradients on CPU change with the number of threads",
        remedy="a sum is split over the threads, so their number must be fixed",
    ),
    Setting(
        name="MKL_NUM_THREADS",
        pattern=r"[1-9]\d*",
        recommended="1",
        required=False,
        read_at=ReadAt.TORCH_IMPORT,
        reader="MKL",
        source="oneMKL developer guide, MKL_NUM_THREADS",
        remedy="a sum is split over the threads, so their number must be fixed",
    ),
    Setting(
        name="NCCL_NVLS_ENABLE",
        pattern="0",
        recommended="0",
        required=False,
        read_at=ReadAt.PROCESS_GROUP,
        reader="NCCL",
        source="NVIDIA/nccl issues 1497 and 2360",
        remedy="sums inside the switch differ between calls",
    ),
    Setting(
        name="MAMBA_DETERMINISTIC",
        pattern=r"(1.*)?",
        recommended="1",
        required=False,
        read_at=ReadAt.TORCH_IMPORT,
        reader="mamba-ssm",
        source="megatron/training/determinism.py, Megatron-core 0.19",
        remedy="otherwise gradients are summed by atomics",
    ),
    Setting(
        name="CAUSAL_CONV1D_DETERMINISTIC",
        pattern=r"(1.*)?",
        recommended="1",
        required=False,
        read_at=ReadAt.TORCH_IMPORT,
        reader="causal-conv1d",
        source="megatron/training/determinism.py, Megatron-core 0.19",
        remedy="otherwise gradients are summed by atomics",
    ),
    _recorded(
        "NCCL_PROTO",
        ReadAt.PROCESS_GROUP,
        reader="NCCL",
        source="Megatron-LM functional tests pin Simple",
        remedy="the protocol sets the chunks of a sum; keep it equal, for example Simple",
    ),
    _recorded(
        "CUDA_DEVICE_MAX_CONNECTIONS",
        ReadAt.CUDA_CONTEXT,
        reader="CUDA",
        source="megatron/training/arguments.py: 1 with tp > 1 before Blackwell",
        remedy="it sets the order of overlapped communication and kernels; keep it equal",
    ),
    _recorded(
        "NVIDIA_TF32_OVERRIDE",
        ReadAt.CUDA_CONTEXT,
        reader="cuBLAS and cuDNN",
        source="NVIDIA driver documentation",
        remedy="it changes the precision of float32 products; keep it equal",
    ),
    _recorded(
        "ATEN_CPU_CAPABILITY",
        ReadAt.TORCH_IMPORT,
        reader="torch",
        source="measured: changes torch.randn and softmax on CPU",
        remedy="it selects the vector kernels; keep it equal",
    ),
    _recorded(
        "MKL_CBWR",
        ReadAt.TORCH_IMPORT,
        reader="MKL",
        source="oneMKL developer guide, conditional numerical reproducibility",
        remedy="it selects the code path of products; keep it equal",
    ),
    _recorded(
        "ONEDNN_MAX_CPU_ISA",
        ReadAt.TORCH_IMPORT,
        reader="oneDNN",
        source="measured: changes bfloat16 products on CPU",
        remedy="it selects the code path of products; keep it equal",
    ),
)

_PREFIX_READERS: tuple[tuple[str, ReadAt, str], ...] = (
    ("NVTE_", ReadAt.TE_IMPORT, "TransformerEngine"),
    ("NCCL_", ReadAt.PROCESS_GROUP, "NCCL"),
)

_BY_NAME: dict[str, Setting] = {setting.name: setting for setting in SETTINGS}


def required_lines() -> list[str]:
    """The lines of ``system_envs`` that every deterministic run has."""
    return [setting.yaml_line for setting in SETTINGS if setting.required]


def find_setting(name: str) -> Setting | None:
    """The table's row for a variable; ``NVTE_*`` and ``NCCL_*`` have one even unlisted; ``None`` for any other."""
    if name in _BY_NAME:
        return _BY_NAME[name]
    for prefix, read_at, reader in _PREFIX_READERS:
        if name.startswith(prefix):
            return _recorded(
                name, read_at, reader=reader, source=f"all {prefix}* are recorded", remedy="keep it equal between runs"
            )
    return None


def recorded_names(environ: Iterable[str]) -> list[str]:
    """Every listed setting, and every ``NVTE_*`` and ``NCCL_*`` variable that is present, sorted."""
    prefixes = tuple(prefix for prefix, _, _ in _PREFIX_READERS)
    return sorted({*_BY_NAME, *(name for name in environ if name.startswith(prefixes))})


def is_deterministic_mode(environ: Mapping[str, str]) -> bool:
    """Whether ``DETERMINISTIC_MODE`` is ``1`` in this environment or ``system_envs``."""
    return environ.get(DETERMINISTIC_MODE) == "1"
