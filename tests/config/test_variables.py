"""``system_envs`` set what libraries read, and never what code runs."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from mock_scheduler import cli
from mock_scheduler.config.variables import find_variable_problems
from mock_scheduler.determinism.settings import environment_settings, required_lines
from mock_scheduler.errors import ConfigError
from pipelines.config.loading import load_config

NAMES_CODE = "decides what code a process runs, so no configuration sets it; set {name} in your shell instead"


def find(name: str, value: str = "x") -> str | None:
    found = dict(find_variable_problems({name: value}))
    return found.get(f"system_envs.{name}")


@pytest.mark.parametrize(
    "name",
    [
        *("LD_PRELOAD", "LD_LIBRARY_PATH", "LD_AUDIT", "LD_DEBUG_OUTPUT", "DYLD_INSERT_LIBRARIES", "GLIBC_TUNABLES"),
        *("GCONV_PATH", "GETCONF_DIR", "LOCPATH", "NLSPATH", "MALLOC_TRACE", "HOSTALIASES", "RES_OPTIONS", "TMPDIR"),
        *("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "PYTHONINSPECT", "PYTHONBREAKPOINT", "PYTHONUSERBASE"),
        *("PYTHONPLATLIBDIR", "PYTHONPYCACHEPREFIX", "PYTHONWARNINGS", "PYTHONEXECUTABLE", "PYTHON_OF_THE_FUTURE"),
        *("PATH", "HOME", "ENV", "BASH_ENV", "SHELLOPTS", "PS4", "IFS", "SHELL", "EDITOR", "GIT_SSH_COMMAND"),
        *("GIT_CONFIG_GLOBAL", "COVERAGE_PROCESS_START", "PERL5OPT", "NODE_OPTIONS", "JAVA_TOOL_OPTIONS"),
        *("CUDA_INJECTION64_PATH", "CUDA_HOME", "OMP_TOOL_LIBRARIES", "NCCL_NET_PLUGIN", "NCCL_TUNER_PLUGIN"),
        *("NCCL_CONF_FILE", "TRITON_PTXAS_PATH", "OPENSSL_CONF", "CC", "CXX", "XDG_CONFIG_HOME", "ld_preload"),
        *("TORCH_EXTENSIONS_DIR", "TORCHINDUCTOR_CUTLASS_DIR", "MPLBACKEND", "LDFLAGS", "NVCC_APPEND_FLAGS"),
        *("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE", "FSSPEC_CONFIG_DIR"),
        *("INTEL_LIBITTNOTIFY64", "INTEL_LIBITTNOTIFY32", "INTEL_JIT_PROFILER64"),
        "GOOGLE_EXTERNAL_ACCOUNT_ALLOW_EXECUTABLES",
        # Each was found to import a module, or to compile with what it says.
        *("TORCH_PYTHON_NATIVE_USER_GRAPH_ORDER_FN", "TORCH_LOGS", "_PYTHON_SYSCONFIGDATA_NAME", "PYTORCH_NVCC"),
        *("TRITON_CACHE_MANAGER", "TRITON_REMOTE_CACHE_BACKEND", "HALIDE_INCLUDE", "TORCHINDUCTOR_CPP_MARCH"),
        *("TORCHINDUCTOR_REDIS_URL", "OMPI_MCA_plm_rsh_agent", "UCX_MODULE_DIR", "CUDACXX", "TRITON_PLUGIN_PATHS"),
        *("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "HYDRA_INSTANTIATE_ALLOWLIST_OVERRIDE", "SSLKEYLOGFILE"),
    ],
)
def test_a_variable_that_names_code_is_refused(name: str) -> None:
    assert find(name) == NAMES_CODE.format(name=name)


@pytest.mark.parametrize(
    "name", ["A; touch x; B", "A B", "$(id)", "1A", "", "A-B", "A=B", "A\nB", "BASH_FUNC_x%%", "é"]
)
def test_a_name_that_is_no_identifier_is_refused(name: str) -> None:
    assert find(name) == "is no name of a variable: it has letters, digits and _ alone, and begins with no digit"


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MOCK_SCHEDULER_STORE", "TORCHELASTIC_RUN_ID"])
def test_what_the_launcher_tells_its_ranks_is_refused(name: str) -> None:
    assert find(name) == "is told to each process by the launcher; take it out"


def test_a_value_that_no_variable_can_hold_is_refused() -> None:
    assert find("A", "x\0LD_PRELOAD=y") == "has a NUL character, which no variable can hold"


def test_every_setting_of_the_table_may_be_set_but_plugins_that_are_not_off() -> None:
    settings = {setting.name: "1" for setting in environment_settings()}
    plugins = {"NCCL_TUNER_PLUGIN", "NCCL_NET_PLUGIN", "NCCL_ENV_PLUGIN", "NVTE_PLUGIN", "NCCL_CONF_FILE"}
    assert plugins <= settings.keys()
    assert {key.removeprefix("system_envs.") for key, _ in find_variable_problems(settings)} == plugins
    assert (find("NCCL_TUNER_PLUGIN", ""), find("NCCL_NET_PLUGIN", "none")) == (None, None)
    assert "PYTHONHASHSEED" in settings
    assert required_lines()


@pytest.mark.parametrize("name", ["A", "MY_KERNEL", "PYTORCH_CUDA_ALLOC_CONF", "WANDB_MODE", "HF_HUB_OFFLINE"])
def test_any_other_name_may_be_set(name: str) -> None:
    assert find(name) is None


def write(folder: Path, envs: str) -> Path:
    (folder / "run.yaml").write_text(f"exp_name: x\nsystem_envs: {{{envs}}}\n", encoding="utf-8")
    return folder


def test_all_are_named_by_key_when_the_configuration_is_loaded(tmp_path: Path) -> None:
    write(tmp_path, "LD_PRELOAD: ./x.so, A: 1, 'B; touch x': 2")
    with pytest.raises(ConfigError) as caught:
        load_config("run", config_path=tmp_path, overrides=["+system_envs.PATH=/tmp"])
    assert str(caught.value) == (
        f"configuration 'run' ({tmp_path}/run.yaml) has 3 problems:\n"
        f"  - system_envs.LD_PRELOAD: {NAMES_CODE.format(name='LD_PRELOAD')}\n"
        "  - system_envs.B; touch x: is no name of a variable: it has letters, digits and _ alone, and begins with no "
        "digit\n"
        f"  - system_envs.PATH: {NAMES_CODE.format(name='PATH')} (given as '+system_envs.PATH=/tmp')"
    )


@pytest.mark.parametrize("command", ["config", "launch", "env", "doctor", "align"])
def test_every_command_refuses_them(tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str) -> None:
    write(tmp_path, "LD_PRELOAD: ./x.so")
    assert cli.main([command, "run", "--config-path", str(tmp_path)]) == 5
    assert NAMES_CODE.format(name="LD_PRELOAD") in capsys.readouterr().err


@pytest.mark.parametrize(
    "value", ["a b", "$(touch ran)", "'; touch ran; '", "`touch ran`", "a\ntouch ran", '"; touch ran #']
)
def test_a_shell_reads_the_printed_environment_as_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], value: str
) -> None:
    write(tmp_path, f"A: {json.dumps(value)}")
    assert cli.main(["env", "run", "--config-path", str(tmp_path)]) == 0
    script = 'eval "$(cat)"; printf %s "$A"'
    done = subprocess.run(
        ["bash", "-c", script], input=capsys.readouterr().out, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout == value
    assert not (tmp_path / "ran").exists()
