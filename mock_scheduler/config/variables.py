"""``system_envs`` set values that libraries read; they never decide what code a process runs.

A configuration may come with a folder that somebody sent. So names are refused by what they do: they tell the loader,
the interpreter, a shell or a library where code comes from, or they are the launcher's own. Any other name may be set.

Contract: imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from mock_scheduler.config.problems import Problem

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)

# Python reads about forty variables, and each release adds some; only these neither name code nor run any.
# PYTHONWARNINGS is not among them: Python imports the module of a warning's category.
_HARMLESS_OF_PYTHON = frozenset(
    {"PYTHONHASHSEED", "PYTHONUNBUFFERED", "PYTHONFAULTHANDLER", "PYTHONDONTWRITEBYTECODE", "PYTHONNOUSERSITE"}
    | {"PYTHONUTF8", "PYTHONIOENCODING", "PYTHONMALLOC", "PYTHONSAFEPATH"}
)
# Whole families: dynamic loaders, interpreters and their tools, shells, and git, which the provenance asks.
_FAMILIES = (
    *(
        "LD_",
        "DYLD_",
        "GCONV_",
        "GLIBC_",
        "PYTHON",
        "_PYTHON",
        "PYDEVD",
        "COVERAGE_",
        "BASH",
        "ZDOTDIR",
        "GIT_",
        "SSH_",
    ),
    *("PERL5", "RUBY", "NODE_", "JAVA_", "_JAVA_", "JDK_", "LUA_", "OPENSSL_"),
    # MPI and UCX, which some builds of torch and NCCL use, load components from folders and start agents.
    *("OMPI_MCA_", "PMIX_MCA_", "PRTE_MCA_", "UCX_MODULE", "UCC_COMPONENT"),
    # oneDNN, which torch is built with, loads the libraries that these name at its first product of matrices.
    *("INTEL_LIBITTNOTIFY", "INTEL_JIT_PROFILER", "VS_PROFILER"),
)
# A word of a name, between underscores, that says that its value names code.
_WORDS = frozenset(
    {"PATH", "HOME", "PRELOAD", "PLUGIN", "PLUGINS", "INJECTION", "INJECTION32", "INJECTION64", "LIB", "LIBS"}
    | {"LIBRARY", "LIBRARIES", "STARTUP", "PTXAS", "LINKER", "PATHS", "FN", "NVCC", "INCLUDE", "REDIS"}
)
# Of the others: what glibc drops for programs with more rights than their user (ld.so(8), secure-execution mode), what
# shells and compilers run, where temporary files and NCCL's further settings are, and files and folders from which
# torch loads modules and clients of object stores take a program that tells credentials.
_NAMES = frozenset(
    {"ENV", "IFS", "PS4", "SHELL", "SHELLOPTS", "PROMPT_COMMAND", "EDITOR", "VISUAL", "PAGER", "BROWSER", "LESSOPEN"}
    | {"LESSCLOSE", "GETCONF_DIR", "HOSTALIASES", "LOCALDOMAIN", "MALLOC_TRACE", "RESOLV_HOST_CONF", "RES_OPTIONS"}
    | {"TZDIR", "TMPDIR", "TMP", "TEMP", "CC", "CXX", "CUDAHOSTCXX", "VIRTUAL_ENV", "CONDA_PREFIX", "NCCL_CONF_FILE"}
    | {"TRITON_OVERRIDE_DIR", "TORCH_EXTENSIONS_DIR", "TORCHINDUCTOR_CUTLASS_DIR", "MPLBACKEND", "MPLCONFIGDIR"}
    | {"CFLAGS", "CXXFLAGS", "LDFLAGS", "NVCC_APPEND_FLAGS", "NVCC_PREPEND_FLAGS", "FSSPEC_CONFIG_DIR"}
    | {"AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE", "BOTO_CONFIG", "GOOGLE_EXTERNAL_ACCOUNT_ALLOW_EXECUTABLES"}
    | {"MAKEFLAGS", "TRITON_HIP_CLANG", "CPPFLAGS", "CUDACXX", "CONDA_EXE", "TENSORBOARD_BINARY"}
    # Modules and classes that torch, triton and Hydra import by these names (torch imports the packages around a module
    # of TORCH_LOGS), flags of a compiler, folders of compiled kernels, and what takes a guard away.
    | {"TORCH_LOGS", "TRITON_CACHE_MANAGER", "TRITON_REMOTE_CACHE_BACKEND", "TORCHINDUCTOR_CPP_MARCH"}
    | {"TORCHINDUCTOR_CK_DIR", "QUACK_CACHE_DIR", "HYDRA_INSTANTIATE_ALLOWLIST_OVERRIDE"}
    | {"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "SSLKEYLOGFILE"}
)
# A path of several words without underscores, as in PYTHONPATH and NLSPATH.
_PATH_SUFFIX = "PATH"
_OFF = frozenset({"", "none"})

#: What the launcher tells each rank.
RANK_VARIABLES = frozenset(
    {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR"}
    | {"MASTER_PORT", "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE"}
)
_LAUNCHERS = ("MOCK_SCHEDULER_", "TORCHELASTIC_")


def find_variable_problems(system_envs: Mapping[str, object]) -> Iterator[Problem]:
    """Yields each variable that a configuration must not set, by its dotted key, with the remedy."""
    for name, value in system_envs.items():
        text = _describe_problem(str(name), value)
        if text is not None:
            yield f"system_envs.{name}", text


def _describe_problem(name: str, value: object) -> str | None:
    if not _IDENTIFIER.fullmatch(name):
        return "is no name of a variable: it has letters, digits and _ alone, and begins with no digit"
    if name in RANK_VARIABLES or name.startswith(_LAUNCHERS):
        return "is told to each process by the launcher; take it out"
    if _names_code(name) and not (_is_plugin(name) and value in _OFF):
        return f"decides what code a process runs, so no configuration sets it; set {name} in your shell instead"
    if isinstance(value, str) and "\0" in value:
        return "has a NUL character, which no variable can hold"
    return None


def _names_code(name: str) -> bool:
    upper = name.upper()
    if upper in _HARMLESS_OF_PYTHON:
        return False
    return (
        upper in _NAMES
        or upper.startswith(_FAMILIES)
        or upper.endswith(_PATH_SUFFIX)
        or not _WORDS.isdisjoint(upper.split("_"))
    )


def _is_plugin(name: str) -> bool:
    """Says whether an empty value, or ``none``, only switches it off: NCCL's tuner and network."""
    return "PLUGIN" in name.split("_")
