"""What is exported, what is refused as incomplete, and what is refused as too late."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType, SimpleNamespace
from typing import cast

import pytest

from mock_scheduler.determinism.environment import apply_system_envs, check_settings, launch_environment
from mock_scheduler.determinism.settings import SETTINGS, ReadAt, find_setting, recorded_names
from mock_scheduler.errors import DeterminismError

GUIDE = {
    "NCCL_ALGO": "Ring",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "DETERMINISTIC_MODE": "1",
}


def torch_module(*, cuda: bool = False, group: bool = False) -> ModuleType:
    """What ``sys.modules["torch"]`` tells of how far a process has come."""
    fake = SimpleNamespace(
        cuda=SimpleNamespace(is_initialized=lambda: cuda),
        distributed=SimpleNamespace(is_available=lambda: True, is_initialized=lambda: group),
    )
    return cast(ModuleType, fake)


def error_of(system_envs: dict[str, str]) -> str:
    with pytest.raises(DeterminismError) as caught:
        check_settings(system_envs)
    return str(caught.value)


def test_deterministic_mode_fixes_hash_seed_and_threads() -> None:
    assert launch_environment(GUIDE) == {
        **GUIDE,
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }


def test_configured_values_win_and_other_modes_add_nothing() -> None:
    assert launch_environment({**GUIDE, "OMP_NUM_THREADS": "4"})["OMP_NUM_THREADS"] == "4"
    assert launch_environment({"NCCL_ALGO": "Tree"}) == {"NCCL_ALGO": "Tree"}


def test_the_guides_settings_are_complete() -> None:
    check_settings(GUIDE)


@pytest.mark.parametrize("envs", [{}, {"NCCL_ALGO": "Tree"}, {"DETERMINISTIC_MODE": "0"}])
def test_nothing_is_required_without_deterministic_mode(envs: dict[str, str]) -> None:
    check_settings(envs)


def test_all_missing_and_refused_settings_come_with_the_lines_to_write() -> None:
    assert error_of({"DETERMINISTIC_MODE": "1", "NCCL_ALGO": "Tree", "NCCL_NVLS_ENABLE": "1"}) == (
        "system_envs do not make a deterministic run:\n"
        "  - NCCL_ALGO is 'Tree': only Ring, CollnetDirect, CollnetChain and ^NVLS are repeatable; "
        "Tree sums in an order of the topology\n"
        "  - NVTE_ALLOW_NONDETERMINISTIC_ALGO is not set; set it to '0'\n"
        "  - CUBLAS_WORKSPACE_CONFIG is not set; set it to ':4096:8'\n"
        "  - NCCL_NVLS_ENABLE is '1': sums inside the switch differ between calls\n"
        "Write in the configuration:\n"
        "system_envs:\n"
        "  NCCL_ALGO: 'Ring'\n"
        "  NVTE_ALLOW_NONDETERMINISTIC_ALGO: '0'\n"
        "  CUBLAS_WORKSPACE_CONFIG: ':4096:8'\n"
        "  NCCL_NVLS_ENABLE: '0'"
    )


def test_a_mode_that_is_neither_on_nor_off_is_refused() -> None:
    assert error_of({**GUIDE, "DETERMINISTIC_MODE": "true"}) == (
        "system_envs do not make a deterministic run:\n"
        "  - DETERMINISTIC_MODE is 'true': 1 switches deterministic mode on and 0 off; nothing else is understood\n"
        "Write in the configuration:\n"
        "system_envs:\n"
        "  DETERMINISTIC_MODE: '1'"
    )


@pytest.mark.parametrize(
    ("name", "allowed", "refused"),
    [
        (
            "NCCL_ALGO",
            ["Ring", "Ring,^NVLS", "CollnetDirect, CollnetChain"],
            ["ring", "Tree", "allreduce:ring", "Ring,"],
        ),
        ("CUBLAS_WORKSPACE_CONFIG", [":4096:8", ":16:8"], [":4096:2", ""]),
        ("PYTHONHASHSEED", ["0", "12"], ["random", ""]),
        ("OMP_NUM_THREADS", ["1", "16"], ["0", "all"]),
        ("MAMBA_DETERMINISTIC", ["", "1", "1x"], ["0"]),
        ("NCCL_PROTO", ["Simple", "anything"], []),
    ],
)
def test_allowed_values_are_those_of_the_libraries(name: str, allowed: list[str], refused: list[str]) -> None:
    setting = find_setting(name)
    assert setting is not None
    assert [value for value in [*allowed, *refused] if setting.allows(value)] == allowed


def test_every_recommended_value_is_allowed_and_names_are_unique() -> None:
    assert len({setting.name for setting in SETTINGS}) == len(SETTINGS)
    assert all(setting.allows(setting.recommended) for setting in SETTINGS)


def test_unlisted_variables_of_nccl_and_te_are_recorded() -> None:
    names = recorded_names(["NVTE_FUSED_ATTN", "NCCL_MIN_NCHANNELS", "PATH"])
    assert {"NVTE_FUSED_ATTN", "NCCL_MIN_NCHANNELS", "NCCL_ALGO"} <= set(names)
    assert "PATH" not in names
    fused = find_setting("NVTE_FUSED_ATTN")
    assert fused is not None
    assert fused.read_at is ReadAt.TE_IMPORT
    assert find_setting("PATH") is None


def test_settings_are_applied_in_time() -> None:
    environ = {"PYTHONHASHSEED": "0", "HOME": "/home"}
    apply_system_envs(GUIDE, environ=environ, modules={})
    assert environ == {"HOME": "/home", **launch_environment(GUIDE)}


def test_what_is_set_already_is_never_late() -> None:
    environ = launch_environment(GUIDE)
    apply_system_envs(
        GUIDE, environ=environ, modules={"torch": torch_module(cuda=True, group=True), "transformer_engine": sys}
    )
    assert environ == launch_environment(GUIDE)


def test_late_settings_are_all_named_and_nothing_is_changed() -> None:
    environ = {"PYTHONHASHSEED": "7", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    modules = {"torch": torch_module(cuda=True, group=True), "transformer_engine": sys}
    with pytest.raises(DeterminismError) as caught:
        apply_system_envs(GUIDE, environ=environ, modules=modules)
    assert str(caught.value) == (
        "too late to set in this process:\n"
        "  - PYTHONHASHSEED is '7', must be '0', and is read by Python when the Python interpreter starts\n"
        "  - NCCL_ALGO is not set, must be 'Ring', and is read by NCCL when a process group is made\n"
        "  - NVTE_ALLOW_NONDETERMINISTIC_ALGO is not set, must be '0', and is read by TransformerEngine when "
        "transformer_engine is imported\n"
        "  - CUBLAS_WORKSPACE_CONFIG is not set, must be ':4096:8', and is read by cuBLAS when the first CUDA context "
        "is made\n"
        "Start the run through launch/train.sh (or export it before python)."
    )
    assert environ == {"PYTHONHASHSEED": "7", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def test_torch_alone_is_late_only_for_what_its_import_reads() -> None:
    environ = {"PYTHONHASHSEED": "0", "MKL_NUM_THREADS": "1"}
    with pytest.raises(DeterminismError) as caught:
        apply_system_envs(GUIDE, environ=environ, modules={"torch": torch_module()})
    assert str(caught.value).splitlines()[1:-1] == [
        "  - OMP_NUM_THREADS is not set, must be '1', and is read by OpenMP when torch is imported"
    ]


def test_environment_imports_no_torch() -> None:
    code = "import sys, mock_scheduler.determinism.environment, mock_scheduler.launcher; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
