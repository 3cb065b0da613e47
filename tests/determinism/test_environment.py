"""What is exported, what is refused as incomplete, and what is refused as too late."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import cast

import pytest

from mock_scheduler.determinism.environment import (
    apply_system_envs,
    check_settings,
    check_unchanged,
    launch_environment,
    read_launched_with,
)
from mock_scheduler.determinism.settings import find_setting
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


def test_deterministic_mode_fixes_hash_seed_threads_and_sums_in_the_switch() -> None:
    assert launch_environment(GUIDE) == {
        **GUIDE,
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "NCCL_NVLS_ENABLE": "0",
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
    environ = {"PYTHONHASHSEED": "7", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "NCCL_NVLS_ENABLE": "0"}
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
    assert environ == {
        "PYTHONHASHSEED": "7",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "NCCL_NVLS_ENABLE": "0",
    }


CONTRADICTIONS = {
    "collnet chosen and off": (
        {"NCCL_ALGO": "CollnetDirect", "NCCL_COLLNET_ENABLE": "0"},
        "NCCL_ALGO is 'CollnetDirect', which NCCL_COLLNET_ENABLE='0' switches off: set it to '1'",
    ),
    "collnet on and not chosen": (
        {"NCCL_COLLNET_ENABLE": "1"},
        "NCCL_COLLNET_ENABLE is '1', which lets the network sum in its own order, and NCCL_ALGO is 'Ring': set "
        "NCCL_COLLNET_ENABLE to '0', or choose Collnet in NCCL_ALGO",
    ),
    "tuning without a shared cache": (
        {"TRITON_CACHE_AUTOTUNING": "1"},
        "TRITON_CACHE_AUTOTUNING is '1' and TRITON_CACHE_DIR is not set: every node would tune its own kernels; set "
        "TRITON_CACHE_DIR to a folder that all nodes share, or take TRITON_CACHE_AUTOTUNING away",
    ),
    "no attention": (
        {"NVTE_FLASH_ATTN": "0", "NVTE_FUSED_ATTN": "0", "NVTE_UNFUSED_ATTN": "0"},
        "NVTE_FLASH_ATTN, NVTE_FUSED_ATTN, NVTE_UNFUSED_ATTN are all '0': no backend of attention is left; set one of "
        "them to '1'",
    ),
}


@pytest.mark.parametrize(("envs", "line"), CONTRADICTIONS.values(), ids=CONTRADICTIONS.keys())
def test_settings_that_contradict_each_other_are_refused(envs: dict[str, str], line: str) -> None:
    assert error_of({**GUIDE, **envs}) == f"system_envs do not make a deterministic run:\n  - {line}"


@pytest.mark.parametrize(
    "envs",
    [
        {"NCCL_ALGO": "CollnetDirect", "NCCL_COLLNET_ENABLE": "1"},
        {"NCCL_COLLNET_ENABLE": "0"},
        {"TRITON_CACHE_AUTOTUNING": "1", "TRITON_CACHE_DIR": "/shared"},
        {"NVTE_FLASH_ATTN": "0", "NVTE_FUSED_ATTN": "0", "NVTE_UNFUSED_ATTN": "1"},
        {"NCCL_TUNER_PLUGIN": ""},
    ],
)
def test_settings_that_agree_are_accepted(envs: dict[str, str]) -> None:
    check_settings({**GUIDE, **envs})


def test_a_tuner_plugin_is_refused() -> None:
    assert error_of({**GUIDE, "NCCL_TUNER_PLUGIN": "libnccl-ofi-tuner.so"}) == (
        "system_envs do not make a deterministic run:\n"
        "  - NCCL_TUNER_PLUGIN is 'libnccl-ofi-tuner.so': a tuner plugin overrides NCCL_ALGO and NCCL_PROTO without a "
        "word; leave it empty\n"
        "Write in the configuration:\n"
        "system_envs:\n"
        "  NCCL_TUNER_PLUGIN: ''"
    )


def test_a_hash_seed_that_was_set_in_the_process_is_late_though_it_looks_right() -> None:
    """The value in ``os.environ`` was trusted, so a seed set by a program for itself passed."""
    environ = launch_environment(GUIDE)
    with pytest.raises(DeterminismError) as caught:
        apply_system_envs(GUIDE, environ=environ, modules={}, launched_with={"HOME": "/home"})
    assert str(caught.value) == (
        "too late to set in this process:\n"
        "  - PYTHONHASHSEED was not set when the process started and is '0' now, and is read by Python when the Python "
        "interpreter starts\n"
        "Start the run through launch/train.sh (or export it before python)."
    )


def test_what_torch_read_is_late_only_once_torch_is_imported() -> None:
    environ = launch_environment(GUIDE)
    launched_with = {**environ, "OMP_NUM_THREADS": "8", "ATEN_CPU_CAPABILITY": "avx2"}
    apply_system_envs(GUIDE, environ=environ, modules={}, launched_with=launched_with)
    with pytest.raises(DeterminismError) as caught:
        apply_system_envs(GUIDE, environ=environ, modules={"torch": torch_module()}, launched_with=launched_with)
    assert str(caught.value).splitlines()[1:-1] == [
        "  - OMP_NUM_THREADS was '8' when the process started and is '1' now, and is read by OpenMP when torch is "
        "imported",
        "  - ATEN_CPU_CAPABILITY was 'avx2' when the process started and is not set now, and is read by torch when "
        "torch is imported",
    ]


def test_the_launch_environment_of_a_real_process_shows_what_it_set_itself() -> None:
    code = (
        "import os; os.environ['PYTHONHASHSEED'] = '0'; os.environ['ADDED'] = '1'\n"
        "from mock_scheduler.determinism.environment import read_launched_with\n"
        "found = read_launched_with()\n"
        "print(found['PYTHONHASHSEED'], 'ADDED' in found)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": "7"}
    )
    assert done.stdout.split() == ["7", "False"]


@pytest.mark.parametrize("content", [b"", b"\0\0", b"ray::worker\0\0"])
def test_an_overwritten_launch_environment_is_not_known(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "environ"
    path.write_bytes(content)
    assert read_launched_with(path) is None
    assert read_launched_with(tmp_path / "missing") is None


def test_a_setting_that_changed_during_the_run_is_named() -> None:
    start = {"NCCL_ALGO": "Ring", "torch.inductor.max_autotune": "not imported", "same": "1"}
    end = {"NCCL_ALGO": "CollnetDirect", "torch.inductor.max_autotune": "False", "same": "1", "NVTE_NEW": "1"}
    check_unchanged(start, start)
    with pytest.raises(DeterminismError) as caught:
        check_unchanged(start, end)
    assert str(caught.value) == (
        "settings changed during the run, so its steps are not comparable:\n"
        "  - NCCL_ALGO was Ring at the start and is CollnetDirect at the end\n"
        "  - NVTE_NEW was absent at the start and is 1 at the end\n"
        "Find what changes them, a library or a callback, and set them before the start."
    )


def test_torch_alone_is_late_only_for_what_its_import_reads() -> None:
    environ = {"PYTHONHASHSEED": "0", "MKL_NUM_THREADS": "1"}
    with pytest.raises(DeterminismError) as caught:
        apply_system_envs(GUIDE, environ=environ, modules={"torch": torch_module()})
    assert str(caught.value).splitlines()[1:-1] == [
        "  - OMP_NUM_THREADS is not set, must be '1', and is read by OpenMP when torch is imported"
    ]


def test_environment_and_rules_import_no_torch() -> None:
    modules = (
        "mock_scheduler.determinism.environment, mock_scheduler.layouts.rules.table, mock_scheduler.launch.launcher"
    )
    code = f"import sys, {modules}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
