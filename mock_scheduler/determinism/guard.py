"""Deterministic mode in torch: switch it on, read back what took effect, refuse what did not.

Order: ``apply_deterministic_mode`` before any model is built (TransformerEngine and Megatron read the switch in their
constructors), then ``read_back`` and ``check_took_effect`` on every rank, and once more after training, since
libraries may change flags behind our back. None of them communicates.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

import torch

from mock_scheduler.determinism.settings import SETTINGS, find_setting, is_deterministic_mode, recorded_names
from mock_scheduler.errors import DeterminismError

UNSET = "unset"
_PACKAGES = ("megatron-core", "transformer-engine")
_PER_NODE_OR_LOGGING = frozenset(
    {"NCCL_HOSTID", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS"}
    | {"NVTE_DEBUG", "NVTE_DEBUG_LEVEL"}
)
_TOOK_EFFECT = {
    "torch.deterministic_algorithms": "True",
    "torch.deterministic_warn_only": "False",
    "torch.cudnn.deterministic": "True",
    "torch.cudnn.benchmark": "False",
}
_REPEATABILITY_FLAGS = frozenset({*_TOOK_EFFECT, "torch.num_threads", "python.hash_randomization"})


def apply_deterministic_mode(environ: Mapping[str, str]) -> None:
    """Fix torch's number of threads to ``OMP_NUM_THREADS`` and, where ``DETERMINISTIC_MODE`` is ``1``, make cuDNN
    deterministic, stop its auto-tuning and make torch refuse operations without a deterministic implementation.

    Must run before a model is built. Raises DeterminismError where ``OMP_NUM_THREADS`` is no positive number.
    Source: ROLL, rollout dump mock guide, "DETERMINISTIC_MODE Effects".
    """
    threads = environ.get("OMP_NUM_THREADS")
    if threads is not None:
        if not threads.isdecimal() or int(threads) == 0:
            raise DeterminismError(f"OMP_NUM_THREADS is {threads!r}; it must be a positive number of threads")
        torch.set_num_threads(int(threads))
    if is_deterministic_mode(environ):
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.benchmark = False
        torch.use_deterministic_algorithms(True)


def read_back(environ: Mapping[str, str]) -> dict[str, str]:
    """The values in effect in this process, all as text, sorted by key.

    Environment settings under their own name (``unset`` where absent; those that only name a node's devices or steer
    logging are left out), ``torch.*`` and ``python.*`` flags, and ``version.*``.
    """
    names = (name for name in recorded_names(environ) if name not in _PER_NODE_OR_LOGGING)
    values = {name: environ.get(name, UNSET) for name in names}
    return dict(sorted({**values, **_flags(), **_versions()}.items()))


def _flags() -> dict[str, str]:
    flags: dict[str, object] = {
        "python.hash_randomization": bool(sys.flags.hash_randomization),
        "torch.deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "torch.deterministic_warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "torch.cudnn.deterministic": torch.backends.cudnn.deterministic,
        "torch.cudnn.benchmark": torch.backends.cudnn.benchmark,
        "torch.cudnn.allow_tf32": torch.backends.cudnn.allow_tf32,
        "torch.cuda.matmul.allow_tf32": torch.backends.cuda.matmul.allow_tf32,
        "torch.float32_matmul_precision": torch.get_float32_matmul_precision(),
        "torch.default_dtype": torch.get_default_dtype(),
        "torch.num_threads": torch.get_num_threads(),
    }
    return {name: str(value) for name, value in flags.items()}


def _versions() -> dict[str, str]:
    has_nccl = torch.cuda.is_available() and torch.distributed.is_nccl_available()
    versions: dict[str, object] = {f"version.{package}": _package_version(package) for package in _PACKAGES}
    versions["version.torch"] = torch.__version__  # with its build, such as +cpu
    versions["version.cuda"] = torch.version.cuda
    versions["version.cudnn"] = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    nccl = torch.cuda.nccl.version() if has_nccl else None  # type: ignore[no-untyped-call]
    versions["version.nccl"] = nccl and ".".join(str(part) for part in nccl)
    versions["version.cpu_capability"] = torch.backends.cpu.get_cpu_capability()
    return {name: "absent" if value is None else str(value) for name, value in versions.items()}


def _package_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def check_took_effect(values: Mapping[str, str], *, deterministic: bool) -> None:
    """Raise DeterminismError that lists each setting of ``read_back`` which is not in effect.

    Threads are checked always; the switches and the table's allowed values only where ``deterministic``.
    """
    expected = dict(_TOOK_EFFECT) if deterministic else {}
    if values["OMP_NUM_THREADS"] != UNSET:
        expected["torch.num_threads"] = values["OMP_NUM_THREADS"]
    if deterministic and values["PYTHONHASHSEED"] == "0":
        expected["python.hash_randomization"] = "False"
    problems = [
        f"{name} is {values[name]}, must be {value}" for name, value in expected.items() if values[name] != value
    ]
    if deterministic:
        read = {setting: None if values[setting.name] == UNSET else values[setting.name] for setting in SETTINGS}
        problems += [problem for setting, value in read.items() if (problem := setting.problem(value)) is not None]
    if problems:
        listed = "".join(f"\n  - {problem}" for problem in problems)
        raise DeterminismError(
            f"settings that did not take effect:{listed}\n"
            "Start the run through launch/train.sh, and let nothing change these after the start."
        )


def is_repeatability_setting(name: str) -> bool:
    """Whether a name of ``read_back`` must be the same where a run is recorded and where it is replayed.

    Only what makes runs repeatable: the settings for which the table allows certain values, number of threads and hash
    seed among them, and the flags of torch and Python that follow from them. All else selects kernels, algorithms or
    versions, which may be what is being compared.
    """
    setting = find_setting(name)
    return name in _REPEATABILITY_FLAGS or (setting is not None and setting.pattern is not None)
