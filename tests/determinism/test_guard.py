"""Deterministic mode takes effect, is read back, and is refused where it does not hold."""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from mock_scheduler.determinism.guard import (
    apply_deterministic_mode,
    check_took_effect,
    is_repeatability_setting,
    read_back,
    read_node_values,
)
from mock_scheduler.determinism.probes import NODE_PROBES, PROBES
from mock_scheduler.determinism.settings import SETTINGS, Kind
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

on_x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="names of instruction sets are those of x86")


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
    assert read_node_values(ENVIRON) == {
        "NCCL_SOCKET_IFNAME": "eth0",
        "torch.num_interop_threads": str(torch.get_num_interop_threads()),
    }
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
        "ATB_MATMUL_SHUFFLE_K_ENABLE",
        "CAUSAL_CONV1D_DETERMINISTIC",
        "CLOSE_MATMUL_K_SHIFT",
        "CUBLAS_WORKSPACE_CONFIG",
        "DETERMINISTIC_MODE",
        "HCCL_DETERMINISTIC",
        "LCCL_DETERMINISTIC",
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


def test_every_flag_and_version_of_the_table_has_one_probe() -> None:
    listed = {setting.name: setting.per_node for setting in SETTINGS if setting.kind is not Kind.ENVIRONMENT}
    assert {name for name, per_node in listed.items() if not per_node} == PROBES.keys()
    assert {name for name, per_node in listed.items() if per_node} == NODE_PROBES.keys()


def test_reading_back_changes_nothing_and_draws_no_random_number() -> None:
    before = torch.get_rng_state()
    assert read_back(ENVIRON) == read_back(ENVIRON)
    assert torch.equal(torch.get_rng_state(), before)


@on_x86
def test_cpu_kernels_that_are_not_those_asked_for_are_refused() -> None:
    """torch reads ATEN_CPU_CAPABILITY at its first operation: a variable that was set later had no effect."""
    current = torch.backends.cpu.get_cpu_capability()
    asked, name = ("default", "DEFAULT") if current != "DEFAULT" else ("avx2", "AVX2")
    with pytest.raises(DeterminismError) as caught:
        check_took_effect(read_back({"ATEN_CPU_CAPABILITY": asked}), deterministic=False)
    assert str(caught.value).splitlines()[1:-1] == [f"  - version.cpu_capability is {current}, must be {name}"]


def test_a_transformer_engine_imported_too_early_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its module constant was read when the variable was not set; nothing in the environment shows it."""
    apply_deterministic_mode(ENVIRON)
    module = ModuleType("mhc")
    module.ENFORCE_DETERMINISTIC = False  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch.triton.mhc", module)
    with pytest.raises(DeterminismError) as caught:
        check_took_effect(read_back(ENVIRON), deterministic=True)
    assert str(caught.value).splitlines()[1:-1] == [
        "  - transformer_engine.enforce_deterministic is False, must be True"
    ]
    module.ENFORCE_DETERMINISTIC = True  # type: ignore[attr-defined]
    check_took_effect(read_back(ENVIRON), deterministic=True)


def test_tf32_stays_as_it_was_set_and_is_read_back() -> None:
    before = (torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32)
    apply_deterministic_mode(ENVIRON)
    assert (torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32) == before
    values = read_back(ENVIRON)
    assert (values["torch.cudnn.allow_tf32"], values["torch.cuda.matmul.allow_tf32"]) == (
        str(before[0]),
        str(before[1]),
    )


def test_the_new_way_to_set_precision_is_read_back_too() -> None:
    """The old flag raises once the new one was used, and the read-back with it."""
    code = (
        "import torch; torch.backends.cuda.matmul.fp32_precision = 'tf32'\n"
        "from mock_scheduler.determinism.guard import read_back\n"
        "values = read_back({})\n"
        "print([values[f'torch.cuda.matmul.{name}'] for name in ('fp32_precision', 'allow_tf32')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['tf32', 'see fp32_precision']"


def test_a_topology_file_is_recorded_by_its_content(tmp_path: Path) -> None:
    path = tmp_path / "topology.xml"
    path.write_text("<system/>")
    values = read_back({"NCCL_TOPO_FILE": str(path), "NCCL_GRAPH_FILE": str(tmp_path / "none")})
    assert values["nccl.topo_file_sha256"] == hashlib.sha256(b"<system/>").hexdigest()
    assert values["nccl.graph_file_sha256"] == "cannot be read: No such file or directory"
    assert read_back({})["nccl.topo_file_sha256"] == "absent"


def read_in_new_process(**environ: str) -> dict[str, str]:
    """``read_back`` of a fresh interpreter with exactly this environment."""
    code = (
        "import json, os\n"
        "from mock_scheduler.determinism.guard import read_back\n"
        "print(json.dumps(read_back(os.environ)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environ)
    values: dict[str, str] = json.loads(done.stdout)
    return values


@on_x86
def test_what_a_process_started_with_shows_in_what_it_reads_back() -> None:
    """The hash of a string and the bits of a few CPU operations are evidence; the variables alone are not."""
    first, again, other = (
        read_in_new_process(PYTHONHASHSEED="3", ATEN_CPU_CAPABILITY="default"),
        read_in_new_process(PYTHONHASHSEED="3", ATEN_CPU_CAPABILITY="default"),
        read_in_new_process(ATEN_CPU_CAPABILITY="avx2"),
    )
    assert first == again
    assert first["python.string_hash"] != "random"
    assert other["python.string_hash"] == "random"
    assert first["torch.cpu_probe"] != other["torch.cpu_probe"]
    assert (first["version.cpu_capability"], other["version.cpu_capability"]) == ("DEFAULT", "AVX2")


@pytest.mark.parametrize(
    "name", ["NCCL_API_TOKEN", "NVTE_SECRET", "TORCH_NCCL_MINE", "TORCHINDUCTOR_REMOTE", "TRITON_X"]
)
def test_of_a_variable_outside_the_table_only_its_presence_is_told(name: str) -> None:
    """Every ``NCCL_*`` and ``NVTE_*`` was stored with its value, in ``recording.json`` and ``run.json``."""
    environ = {**ENVIRON, name: "hunter2"}
    told = {**read_back(environ), **read_node_values(environ)}
    assert told[name] == "set, value not kept"
    assert "hunter2" not in json.dumps(told)
    assert name not in {**read_back(ENVIRON), **read_node_values(ENVIRON)}


@pytest.mark.parametrize(
    "name",
    ["NCCL_P2P_LEVEL", "NCCL_IB_TC", "NVTE_FUSED_ATTN_BACKEND", "TORCH_NCCL_BLOCKING_WAIT", "TRITON_F32_DEFAULT"],
)
def test_a_documented_member_of_a_family_keeps_its_value(name: str) -> None:
    environ = {**ENVIRON, name: "7"}
    assert {**read_back(environ), **read_node_values(environ)}[name] == "7"
