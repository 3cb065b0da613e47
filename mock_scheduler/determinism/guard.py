"""Deterministic mode in torch: switches it on, reads back its effect, refuses settings without effect.

Order: ``apply_deterministic_mode`` before any model is built (TransformerEngine and Megatron read the switch in their
constructors), then ``read_back`` and ``check_took_effect`` on every rank, and once more after training, since libraries
may change flags behind our back. None of them communicates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from mock_scheduler.determinism.probes import read_flags, read_node_flags
from mock_scheduler.determinism.settings import (
    SETTINGS,
    Between,
    Kind,
    environment_settings,
    find_setting,
    is_deterministic_mode,
    recorded_names,
)
from mock_scheduler.errors import DeterminismError
from mock_scheduler.support.text import bullet_list

UNSET = "unset"


@dataclass(frozen=True, kw_only=True, slots=True)
class Proof:
    """A flag showing whether an environment variable took effect.

    Args:
        expected: The flag's value for the variable's, or ``None`` where nothing follows.
        always: Also outside deterministic mode.
    """

    variable: str
    flag: str
    expected: Callable[[str], str | None]
    always: bool


# torch names the instruction sets in capitals, and reads ATEN_CPU_CAPABILITY at its first operation and never again.
_CPU_CAPABILITIES = {"default": "DEFAULT", "avx2": "AVX2", "avx512": "AVX512"}

PROOFS: tuple[Proof, ...] = (
    Proof(variable="OMP_NUM_THREADS", flag="torch.num_threads", expected=lambda value: value, always=True),
    Proof(
        variable="ATEN_CPU_CAPABILITY",
        flag="version.cpu_capability",
        expected=lambda value: _CPU_CAPABILITIES.get(value),
        always=True,
    ),
    Proof(
        variable="PYTHONHASHSEED",
        flag="python.hash_randomization",
        expected=lambda value: "False" if value == "0" else None,
        always=False,
    ),
)


def apply_deterministic_mode(environ: Mapping[str, str]) -> None:
    """Makes torch deterministic where ``DETERMINISTIC_MODE`` is ``1``, and fixes its threads to ``OMP_NUM_THREADS``.

    It makes cuDNN deterministic, stops its auto-tuning and lets torch refuse operations without a deterministic
    implementation. Precision stays as it is: TF32 and reduced-precision sums are repeatable, and are read back. Must
    run before a model is built. Source: ROLL, rollout dump mock guide, "DETERMINISTIC_MODE Effects".

    Raises:
        DeterminismError: ``OMP_NUM_THREADS`` is no positive number.
    """
    threads = environ.get("OMP_NUM_THREADS")
    if threads is not None:
        if not threads.isdecimal() or int(threads) == 0:
            raise DeterminismError(f"OMP_NUM_THREADS is {threads!r}; it must be a positive number of threads")
        torch.set_num_threads(int(threads))
    if is_deterministic_mode(environ):
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.benchmark = False
        torch.use_deterministic_algorithms(True, warn_only=False)


def read_back(environ: Mapping[str, str]) -> dict[str, str]:
    """Reads the values in effect in this process all ranks must share, all as text, sorted by key.

    Environment settings under their own name (``unset`` where absent), flags as ``torch.*``, ``python.*`` and so on,
    and ``version.*``. Settings of one node, and of its log, are in ``read_node_values``.
    """
    values = {name: environ.get(name, UNSET) for name in recorded_names(environ) if not _is_per_node(name)}
    return dict(sorted({**values, **read_flags(environ)}.items()))


def read_node_values(environ: Mapping[str, str]) -> dict[str, str]:
    """Reads the values in effect on this node alone: devices, caches, logs; only those set. Sorted."""
    values = {name: environ[name] for name in recorded_names(environ) if _is_per_node(name) and name in environ}
    return dict(sorted({**values, **read_node_flags(environ)}.items()))


def _is_per_node(name: str) -> bool:
    setting = find_setting(name)
    return setting is not None and setting.per_node


def check_took_effect(values: Mapping[str, str], *, deterministic: bool) -> None:
    """Checks that each setting of ``read_back`` is in effect.

    Threads and CPU kernels are checked always; the table's allowed values only where ``deterministic``.

    Raises:
        DeterminismError: Lists each setting without effect.
    """
    problems = _flag_problems(values) if deterministic else []
    problems += _proof_problems(values, deterministic=deterministic)
    problems += _environment_problems(values) if deterministic else []
    if problems:
        raise DeterminismError(
            f"settings that did not take effect:{bullet_list(problems, limit=None)}\n"
            "Start the run through launch/train.sh, and let nothing change these after the start."
        )


def _flag_problems(values: Mapping[str, str]) -> list[str]:
    flags = (setting for setting in SETTINGS if setting.kind is Kind.FLAG and not setting.per_node)
    return [problem for setting in flags if (problem := setting.problem(values[setting.name])) is not None]


def _proof_problems(values: Mapping[str, str], *, deterministic: bool) -> list[str]:
    problems = []
    for proof in PROOFS:
        expected = proof.expected(values[proof.variable]) if values[proof.variable] != UNSET else None
        if expected is not None and values[proof.flag] != expected and (proof.always or deterministic):
            problems.append(f"{proof.flag} is {values[proof.flag]}, must be {expected}")
    return problems


def _environment_problems(values: Mapping[str, str]) -> list[str]:
    settings = [setting for setting in environment_settings() if not setting.per_node]
    found = {setting: None if values[setting.name] == UNSET else values[setting.name] for setting in settings}
    return [problem for setting, value in found.items() if (problem := setting.problem(value)) is not None]


def is_repeatability_setting(name: str) -> bool:
    """Whether a name of ``read_back`` must be the same where a run is recorded and where it is replayed.

    Only repeatability counts: the settings with allowed values in the table, number of threads and hash seed among
    them, and the flags of torch and Python following from them. All else selects kernels, algorithms or versions, which
    may be under comparison.
    """
    setting = find_setting(name)
    return setting is not None and setting.between_runs is Between.MUST_MATCH
