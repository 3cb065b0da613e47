"""Switches torch's deterministic mode on, reads the values in effect back, and refuses settings without effect.

Order: ``apply_deterministic_mode`` before any model is built (TransformerEngine and Megatron read the switch in their
constructors), then ``read_back`` and ``check_took_effect`` on every rank, and once more after training, since
libraries may change flags meanwhile. None of them communicates.
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
    is_per_node,
    kept_value,
    recorded_names,
)
from mock_scheduler.errors import DeterminismError
from mock_scheduler.support.text import bullet_list

UNSET = "unset"


@dataclass(frozen=True, kw_only=True, slots=True)
class Proof:
    """Holds a flag that shows whether an environment variable took effect.

    ``expected``: from the variable's value to the flag's, or ``None`` where nothing follows. ``always``: also outside
    deterministic mode.
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
    """Fixes torch's number of threads to ``OMP_NUM_THREADS``; under ``DETERMINISTIC_MODE=1`` makes torch repeatable.

    cuDNN becomes deterministic and tunes nothing, and torch refuses operations without a deterministic implementation.
    Precision stays as it is: TF32 and reduced-precision sums are repeatable, and are read back. Must run before a model
    is built. Raises ``DeterminismError`` where ``OMP_NUM_THREADS`` is no positive number.
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
        torch.use_deterministic_algorithms(True, warn_only=False)


def read_back(environ: Mapping[str, str]) -> dict[str, str]:
    """Reads the values in effect in this process, all as text, sorted by key; all ranks must share them.

    Environment settings are under their own name (``unset`` where absent), flags under ``torch.*``, ``python.*`` and so
    on, versions under ``version.*``. Of a variable outside the table only its presence is told (``kept_value``).
    ``read_node_values`` has the settings of one node.
    """
    names = [name for name in recorded_names(environ) if not is_per_node(name)]
    values = {name: kept_value(name, environ[name]) if name in environ else UNSET for name in names}
    return dict(sorted({**values, **read_flags(environ)}.items()))


def read_node_values(environ: Mapping[str, str]) -> dict[str, str]:
    """Reads the values that may differ between nodes: devices, caches, logs; only the ones that are set. Sorted."""
    names = [name for name in recorded_names(environ) if is_per_node(name) and name in environ]
    values = {name: kept_value(name, environ[name]) for name in names}
    return dict(sorted({**values, **read_node_flags(environ)}.items()))


def check_took_effect(values: Mapping[str, str], *, deterministic: bool) -> None:
    """Raises ``DeterminismError`` with each setting of ``read_back`` that has no effect.

    Threads and CPU kernels are checked always; the table's allowed values only where ``deterministic``.
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
    """Says whether a name of ``read_back`` must have one value in a recording run and in its replays.

    True only of the settings that make runs repeatable: the ones with certain allowed values, number of threads and
    hash seed among them, and flags of torch and Python that follow from them. All others select kernels, algorithms or
    versions, and may be the very subject of a comparison.
    """
    setting = find_setting(name)
    return setting is not None and setting.between_runs is Between.MUST_MATCH
