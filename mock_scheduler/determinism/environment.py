"""The environment of a run: launchers export it, and it must be complete and come in time.

Contract: imports no torch. ``apply_system_envs`` must be called by an entry module before it imports torch,
transformer_engine or megatron, and changes nothing where it raises.

A program may set a variable in its own process after the library has read it: the variable then looks right and has no
effect. The environment at the start of the process tells the two apart (``read_launched_with``).
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from pathlib import Path
from types import ModuleType

from mock_scheduler.determinism.settings import (
    DETERMINISTIC_MODE,
    ReadAt,
    Setting,
    environment_settings,
    find_setting,
    is_deterministic_mode,
)
from mock_scheduler.errors import DeterminismError
from mock_scheduler.support.text import bullet_list

_LAUNCHED_WITH = Path("/proc/self/environ")


def launch_environment(system_envs: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that a launcher exports to every process.

    Besides ``system_envs`` they are, under ``DETERMINISTIC_MODE=1``, the table's exported settings:
    ``PYTHONHASHSEED=0``, ``OMP_NUM_THREADS=1``, ``MKL_NUM_THREADS=1`` and ``NCCL_NVLS_ENABLE=0``; ``system_envs`` win.
    """
    exported = {
        setting.name: setting.recommended
        for setting in environment_settings()
        if setting.exported and setting.recommended is not None
    }
    return {**(exported if is_deterministic_mode(system_envs) else {}), **system_envs}


def check_settings(system_envs: Mapping[str, str]) -> None:
    """Refuses ``system_envs`` that do not make a deterministic run.

    Raises:
        DeterminismError: ``DETERMINISTIC_MODE`` is neither 0 nor 1; or it is 1 and a required setting is missing, a
            setting has a value that is not repeatable, or two contradict each other. Lists all, with the YAML lines to
            write.
    """
    if system_envs.get(DETERMINISTIC_MODE, "0") == "0":
        return
    problems, lines = [], []
    for setting in environment_settings():
        problem = setting.problem(system_envs.get(setting.name))
        if problem is not None:
            problems.append(problem)
            if setting.recommended is not None:
                lines.append(setting.yaml_line)
    contradictions = find_contradictions(system_envs)
    if problems or contradictions:
        raise DeterminismError(_settings_message([*problems, *contradictions], lines))


def _settings_message(problems: list[str], lines: list[str]) -> str:
    yaml_lines = "".join(f"\n  {line}" for line in lines)
    advice = f"\nWrite in the configuration:\nsystem_envs:{yaml_lines}" if lines else ""
    return f"system_envs do not make a deterministic run:{bullet_list(problems, limit=None)}{advice}"


def find_contradictions(system_envs: Mapping[str, str]) -> list[str]:
    """Finds settings that keep each other from taking effect, each with its remedy."""
    problems = []
    has_collnet = "Collnet" in system_envs.get("NCCL_ALGO", "")
    collnet = system_envs.get("NCCL_COLLNET_ENABLE")
    if has_collnet and collnet == "0":
        problems.append(
            f"NCCL_ALGO is {system_envs['NCCL_ALGO']!r}, which NCCL_COLLNET_ENABLE='0' switches off: set it to '1'"
        )
    if not has_collnet and collnet == "1":
        problems.append(
            "NCCL_COLLNET_ENABLE is '1', which lets the network sum in its own order, and NCCL_ALGO is "
            f"{system_envs.get('NCCL_ALGO', '')!r}: set NCCL_COLLNET_ENABLE to '0', or choose Collnet in NCCL_ALGO"
        )
    if system_envs.get("TRITON_CACHE_AUTOTUNING") == "1" and not system_envs.get("TRITON_CACHE_DIR"):
        problems.append(
            "TRITON_CACHE_AUTOTUNING is '1' and TRITON_CACHE_DIR is not set: every node would tune its own kernels; "
            "set TRITON_CACHE_DIR to a folder that all nodes share, or take TRITON_CACHE_AUTOTUNING away"
        )
    backends = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")
    if all(system_envs.get(name) == "0" for name in backends):
        problems.append(f"{', '.join(backends)} are all '0': no backend of attention is left; set one of them to '1'")
    return problems


def read_launched_with(path: Path = _LAUNCHED_WITH) -> dict[str, str] | None:
    """Reads the environment at this process's start, or ``None`` where the system does not keep it.

    ``None`` too where the program overwrote it, as programs do to change their title in the list of processes.
    Source: proc(5), /proc/pid/environ.
    """
    try:
        content = path.read_bytes()
    except OSError:
        return None
    entries = [entry.decode(errors="surrogateescape") for entry in content.split(b"\0") if entry]
    if not entries or any("=" not in entry for entry in entries):
        return None
    return dict(entry.split("=", 1) for entry in entries)


def apply_system_envs(
    system_envs: Mapping[str, str],
    *,
    environ: MutableMapping[str, str],
    modules: Mapping[str, ModuleType],
    launched_with: Mapping[str, str] | None = None,
) -> None:
    """Exports ``launch_environment(system_envs)`` into this process.

    Args:
        system_envs: The configuration's.
        environ: ``os.environ``.
        modules: ``sys.modules``, which tells the imported libraries.
        launched_with: ``read_launched_with()``; ``None`` where not known: ``environ`` is then taken to be unchanged.

    Raises:
        DeterminismError: A value would change after its reader has read it, or was changed in this process and may
            have been read before. Lists all.
    """
    wanted = launch_environment(system_envs)
    changes = {name: value for name, value in wanted.items() if environ.get(name) != value}
    late = [
        f"{name} is {_found(environ, name)}, must be {value!r}, and is read by {setting.reader} {setting.read_at}"
        for name, value in changes.items()
        if (setting := find_setting(name)) is not None and _has_been_read(setting, modules)
    ]
    if launched_with is not None:
        read = [
            setting
            for setting in environment_settings()
            if setting.name not in changes and _is_read_once(setting) and _has_been_read(setting, modules)
        ]
        late += find_late_changes(read, environ=environ, launched_with=launched_with)
    if late:
        raise DeterminismError(
            f"too late to set in this process:{bullet_list(late, limit=None)}\n"
            "Start the run through launch/train.sh (or export it before python)."
        )
    environ.update(changes)


def find_late_changes(
    settings: list[Setting], *, environ: Mapping[str, str], launched_with: Mapping[str, str]
) -> list[str]:
    """Writes one line for each of ``settings`` whose value has changed since the process started."""
    return [
        f"{setting.name} was {_found(launched_with, setting.name)} when the process started and is "
        f"{_found(environ, setting.name)} now, and is read by {setting.reader} {setting.read_at}"
        for setting in settings
        if environ.get(setting.name) != launched_with.get(setting.name)
    ]


def check_unchanged(at_start: Mapping[str, str], at_end: Mapping[str, str]) -> None:
    """Raises ``DeterminismError`` with every value of ``read_back`` that changed during a run.

    A library imported meanwhile may appear in place of ``not imported``.
    """
    changed = [
        f"{name} was {at_start.get(name, 'absent')} at the start and is {at_end.get(name, 'absent')} at the end"
        for name in sorted({*at_start, *at_end})
        if at_start.get(name) != at_end.get(name) and at_start.get(name) != "not imported"
    ]
    if changed:
        raise DeterminismError(
            f"settings changed during the run, so its steps are not comparable:{bullet_list(changed, limit=None)}\n"
            "Find what changes them, a library or a callback, and set them before the start."
        )


def _found(environ: Mapping[str, str], name: str) -> str:
    return repr(environ[name]) if name in environ else "not set"


def _is_read_once(setting: Setting) -> bool:
    return setting.read_at in {ReadAt.INTERPRETER, ReadAt.TORCH_IMPORT} and not setting.per_node


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
        case ReadAt.MODEL_BUILD | ReadAt.EVERY_CALL | ReadAt.INSTALLED:
            return False
