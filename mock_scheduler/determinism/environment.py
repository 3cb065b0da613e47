"""The environment of a run: what launchers export, whether it is complete, and whether it comes in time.

Contract: imports no torch. ``apply_system_envs`` must be called by an entry module before it imports torch,
transformer_engine or megatron, and changes nothing where it raises.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from types import ModuleType

from mock_scheduler.determinism.settings import (
    DETERMINISTIC_MODE,
    SETTINGS,
    ReadAt,
    Setting,
    find_setting,
    is_deterministic_mode,
)
from mock_scheduler.errors import DeterminismError

_FIXED_IN_DETERMINISTIC_MODE = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def launch_environment(system_envs: Mapping[str, str]) -> dict[str, str]:
    """What a launcher exports to every process: ``system_envs`` and, under ``DETERMINISTIC_MODE=1``, what they leave
    open of ``PYTHONHASHSEED=0``, ``OMP_NUM_THREADS=1`` and ``MKL_NUM_THREADS=1``.
    """
    fixed = _FIXED_IN_DETERMINISTIC_MODE if is_deterministic_mode(system_envs) else {}
    return {**fixed, **system_envs}


def check_settings(system_envs: Mapping[str, str]) -> None:
    """Raise DeterminismError where ``DETERMINISTIC_MODE`` is neither 0 nor 1, or where it is 1 and a required setting
    is missing or a setting of the table has a value that is not repeatable. Lists all, with the YAML lines to write.
    """
    if system_envs.get(DETERMINISTIC_MODE, "0") == "0":
        return
    problems, lines = [], []
    for setting in SETTINGS:
        problem = setting.problem(system_envs.get(setting.name))
        if problem is not None:
            problems.append(problem)
            lines.append(setting.yaml_line)
    if problems:
        raise DeterminismError(_settings_message(problems, lines))


def _settings_message(problems: list[str], lines: list[str]) -> str:
    listed = "".join(f"\n  - {problem}" for problem in problems)
    yaml_lines = "".join(f"\n  {line}" for line in lines)
    return (
        f"system_envs do not make a deterministic run:{listed}\nWrite in the configuration:\nsystem_envs:{yaml_lines}"
    )


def apply_system_envs(
    system_envs: Mapping[str, str], *, environ: MutableMapping[str, str], modules: Mapping[str, ModuleType]
) -> None:
    """Export ``launch_environment(system_envs)`` into this process.

    ``environ``: ``os.environ``. ``modules``: ``sys.modules``, which tells what has been imported already.
    Raises DeterminismError, listing all, where a value would change after its reader has read it.
    """
    changes = {name: value for name, value in launch_environment(system_envs).items() if environ.get(name) != value}
    late = [
        f"{name} is {_found(environ, name)}, must be {value!r}, and is read by {setting.reader} {setting.read_at}"
        for name, value in changes.items()
        if (setting := find_setting(name)) is not None and _has_been_read(setting, modules)
    ]
    if late:
        listed = "".join(f"\n  - {problem}" for problem in late)
        raise DeterminismError(
            f"too late to set in this process:{listed}\n"
            "Start the run through launch/train.sh (or export it before python)."
        )
    environ.update(changes)


def _found(environ: Mapping[str, str], name: str) -> str:
    return repr(environ[name]) if name in environ else "not set"


def _has_been_read(setting: Setting, modules: Mapping[str, ModuleType]) -> bool:
    torch = modules.get("torch")
    match setting.read_at:
        case ReadAt.INTERPRETER:
            return True
        case ReadAt.TORCH_IMPORT:
            return torch is not None
        case ReadAt.TE_IMPORT:
            return "transformer_engine" in modules
        case ReadAt.CUDA_CONTEXT:
            return torch is not None and bool(torch.cuda.is_initialized())
        case ReadAt.PROCESS_GROUP:
            return torch is not None and bool(torch.distributed.is_available() and torch.distributed.is_initialized())
        case ReadAt.MODEL_BUILD:
            return False
