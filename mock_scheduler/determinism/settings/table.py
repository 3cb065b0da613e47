"""One table has all settings that decide whether a run is repeatable and which bits it computes.

Contract: imports no torch. The environment of launchers, the check at the start, the read-back and the documentation
all come from this table. Its rows are here (the four that every deterministic run writes in its configuration, as in
ROLL's rollout dump mock guide, "Determinism Settings") and, by area, in the modules beside this one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial

from mock_scheduler.determinism.settings.devices import DEVICE_SETTINGS, NCCL_FAMILIES, NCCL_SETTINGS
from mock_scheduler.determinism.settings.libraries import (
    TORCH_FAMILIES,
    TORCH_SETTINGS,
    TRANSFORMER_ENGINE_FAMILIES,
    TRANSFORMER_ENGINE_SETTINGS,
)
from mock_scheduler.determinism.settings.machine import PROCESS_SETTINGS, VERSION_SETTINGS
from mock_scheduler.determinism.settings.setting import Between, Family, Kind, ReadAt, Setting

DETERMINISTIC_MODE = "DETERMINISTIC_MODE"
#: Stands for the value of a variable of a family that the table does not know by name.
WITHHELD = "set, value not kept"
_NCCL_ALGO = r"(Ring|CollnetDirect|CollnetChain|\^NVLS)"

_required = partial(Setting, required=True, between_runs=Between.MUST_MATCH)

REQUIRED_SETTINGS: tuple[Setting, ...] = (
    _required(
        name="NCCL_ALGO",
        pattern=rf"{_NCCL_ALGO}(\s*,\s*{_NCCL_ALGO})*",
        recommended="Ring",
        read_at=ReadAt.PROCESS_GROUP,
        reader="NCCL",
        source="megatron/training/determinism.py, Megatron-core 0.19; NVIDIA/nccl issue 1055",
        remedy="only Ring, CollnetDirect, CollnetChain and ^NVLS are repeatable; Tree sums in an order of the topology",
    ),
    _required(
        name="NVTE_ALLOW_NONDETERMINISTIC_ALGO",
        pattern="0",
        recommended="0",
        read_at=ReadAt.TE_IMPORT,
        reader="TransformerEngine",
        source="TransformerEngine 2.x, DotProductAttention and pytorch/triton/mhc.py",
        remedy="any other value lets attention choose kernels that add in no fixed order",
    ),
    _required(
        name="CUBLAS_WORKSPACE_CONFIG",
        pattern=r":4096:8|:16:8",
        recommended=":4096:8",
        read_at=ReadAt.CUDA_CONTEXT,
        reader="cuBLAS",
        source="cuBLAS documentation, Results reproducibility; torch.use_deterministic_algorithms",
        remedy="only :4096:8 and :16:8 fix the workspace, without which cuBLAS picks one per stream",
    ),
    _required(
        name=DETERMINISTIC_MODE,
        pattern="1",
        recommended="1",
        read_at=ReadAt.MODEL_BUILD,
        reader="this project",
        source="ROLL, rollout dump mock guide",
        remedy="1 switches deterministic mode on and 0 off; nothing else is understood",
    ),
)

AREAS: dict[str, tuple[Setting, ...]] = {
    "Required in system_envs": REQUIRED_SETTINGS,
    "Process and CPU": PROCESS_SETTINGS,
    "torch and compilers": TORCH_SETTINGS,
    "Collectives": NCCL_SETTINGS,
    "GPU libraries": DEVICE_SETTINGS,
    "Attention and TransformerEngine": TRANSFORMER_ENGINE_SETTINGS,
    "Versions and hardware": VERSION_SETTINGS,
}

SETTINGS: tuple[Setting, ...] = tuple(setting for area in AREAS.values() for setting in area)

# The longest prefix decides.
FAMILIES: tuple[Family, ...] = tuple(
    sorted(
        (*NCCL_FAMILIES, *TORCH_FAMILIES, *TRANSFORMER_ENGINE_FAMILIES),
        key=lambda family: len(family.prefix),
        reverse=True,
    )
)

_BY_NAME: dict[str, Setting] = {setting.name: setting for setting in SETTINGS}


def environment_settings() -> list[Setting]:
    """Lists the rows of environment variables."""
    return [setting for setting in SETTINGS if setting.kind is Kind.ENVIRONMENT]


def required_lines() -> list[str]:
    """Writes the required lines of every deterministic run's ``system_envs``."""
    return [setting.yaml_line for setting in SETTINGS if setting.required]


def find_setting(name: str) -> Setting | None:
    """Finds the row of a name; a member of a family, as ``NVTE_*``, has one even unlisted; else ``None``."""
    if name in _BY_NAME:
        return _BY_NAME[name]
    for family in FAMILIES:
        if name.startswith(family.prefix):
            return family.setting(name)
    return None


def is_per_node(name: str) -> bool:
    """Whether the table lets the value of a name differ between nodes."""
    setting = find_setting(name)
    return setting is not None and setting.per_node


def recorded_names(environ: Iterable[str]) -> list[str]:
    """Names every listed environment variable, and every present member of a family, sorted."""
    prefixes = tuple(family.prefix for family in FAMILIES)
    listed = {setting.name for setting in environment_settings()}
    return sorted({*listed, *(name for name in environ if name.startswith(prefixes))})


def is_documented(name: str) -> bool:
    """Says whether the table knows a variable by its whole name, so that its value is a setting and no secret."""
    return name in _BY_NAME or any(name in family.documented for family in FAMILIES)


def kept_value(name: str, value: str) -> str:
    """Returns the form of a variable's value for files and reports: ``WITHHELD`` unless it ``is_documented``."""
    return value if is_documented(name) else WITHHELD


def is_deterministic_mode(environ: Mapping[str, str]) -> bool:
    """Says whether ``DETERMINISTIC_MODE`` is ``1`` in this environment or ``system_envs``."""
    return environ.get(DETERMINISTIC_MODE) == "1"
