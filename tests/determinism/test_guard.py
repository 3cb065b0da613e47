"""Deterministic mode takes effect, is read back, and is refused where it does not hold."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from mock_scheduler.determinism.guard import (
    apply_deterministic_mode,
    check_took_effect,
    is_repeatability_setting,
    read_back,
)
from mock_scheduler.errors import DeterminismError

ENVIRON = {
    "NCCL_ALGO": "Ring",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "DETERMINISTIC_MODE": "1",
    "OMP_NUM_THREADS": "1",
    "NCCL_SOCKET_IFNAME": "eth0",
    "NVTE_FUSED_ATTN": "0",
}


@pytest.fixture(autouse=True)
def _flags_restored() -> Iterator[None]:
    cudnn = (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark)
    threads, enabled = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    yield
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = cudnn
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(enabled)


def test_deterministic_mode_has_the_guides_three_effects() -> None:
    torch.backends.cudnn.benchmark = True
    apply_deterministic_mode(ENVIRON)
    assert torch.backends.cudnn.deterministic is True
    assert torch.backends.cudnn.benchmark is False
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.get_num_threads() == 1
    check_took_effect(read_back(ENVIRON), deterministic=True)


def test_without_the_mode_only_threads_are_fixed() -> None:
    apply_deterministic_mode({"OMP_NUM_THREADS": "2"})
    assert torch.get_num_threads() == 2
    assert not torch.are_deterministic_algorithms_enabled()
    check_took_effect(read_back({"OMP_NUM_THREADS": "2"}), deterministic=False)


def test_threads_that_are_no_number_are_refused() -> None:
    with pytest.raises(DeterminismError, match=r"^OMP_NUM_THREADS is '0'; it must be a positive number of threads$"):
        apply_deterministic_mode({"OMP_NUM_THREADS": "0"})


def test_read_back_holds_settings_flags_and_versions() -> None:
    values = read_back(ENVIRON)
    assert (values["NCCL_ALGO"], values["NVTE_FUSED_ATTN"], values["NCCL_PROTO"]) == ("Ring", "0", "unset")
    assert values["torch.num_threads"] == str(torch.get_num_threads())
    assert values["version.torch"] == torch.__version__
    assert "NCCL_SOCKET_IFNAME" not in values
    assert list(values) == sorted(values)


def test_every_setting_that_did_not_take_effect_is_named() -> None:
    apply_deterministic_mode(ENVIRON)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = True
    torch.set_num_threads(2)
    environ = {name: value for name, value in ENVIRON.items() if name != "CUBLAS_WORKSPACE_CONFIG"}
    values = read_back({**environ, "NCCL_ALGO": "Tree"})
    with pytest.raises(DeterminismError) as caught:
        check_took_effect(values, deterministic=True)
    assert str(caught.value) == (
        "settings that did not take effect:\n"
        "  - torch.deterministic_warn_only is True, must be False\n"
        "  - torch.cudnn.benchmark is True, must be False\n"
        "  - torch.num_threads is 2, must be 1\n"
        "  - NCCL_ALGO is 'Tree': only Ring, CollnetDirect, CollnetChain and ^NVLS are repeatable; "
        "Tree sums in an order of the topology\n"
        "  - CUBLAS_WORKSPACE_CONFIG is not set; set it to ':4096:8'\n"
        "Start the run through launch/train.sh, and let nothing change these after the start."
    )


def test_only_what_makes_runs_repeatable_must_match() -> None:
    """Every setting that was read back had to match, so a replay with another kernel was refused: the most common
    change to check.
    """
    values = read_back({**ENVIRON, "NVTE_FLASH_ATTN": "1", "NCCL_NTHREADS": "64"})
    assert [name for name in values if is_repeatability_setting(name)] == [
        "CAUSAL_CONV1D_DETERMINISTIC",
        "CUBLAS_WORKSPACE_CONFIG",
        "DETERMINISTIC_MODE",
        "MAMBA_DETERMINISTIC",
        "MKL_NUM_THREADS",
        "NCCL_ALGO",
        "NCCL_NVLS_ENABLE",
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO",
        "OMP_NUM_THREADS",
        "PYTHONHASHSEED",
        "python.hash_randomization",
        "torch.cudnn.benchmark",
        "torch.cudnn.deterministic",
        "torch.deterministic_algorithms",
        "torch.deterministic_warn_only",
        "torch.num_threads",
    ]
    assert {"NVTE_FUSED_ATTN", "NVTE_FLASH_ATTN", "NCCL_PROTO", "NCCL_NTHREADS", "NVIDIA_TF32_OVERRIDE"} < set(values)
