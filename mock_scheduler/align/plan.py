"""Which runs an alignment makes, and with which overrides; everything is checked before the first one starts.

The baseline is the user's command line plus ``align.baseline``, in mode dump. Each candidate is the same plus its own
overrides, in mock on the baseline's recording. What an alignment must decide itself (mode, recording, trace, folders)
nobody else may set: an override that would have no effect is an error.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mock_scheduler.config.loading import ConfigSource
from mock_scheduler.config.schema import PipelineConfig, ToleranceConfig
from mock_scheduler.config.sections import FLOAT64_TOLERANCE
from mock_scheduler.determinism.environment import check_settings
from mock_scheduler.errors import ConfigError, DeterminismError
from mock_scheduler.launcher import DEFAULT_ENTRY
from mock_scheduler.run_files import ALIGN_FILE, LOG_FILE

BASELINE_NAME = "baseline"
RECORDING_NAME = "recording"

#: Makes a checked configuration out of overrides; raises ``ConfigError``.
ConfigLoader = Callable[[Sequence[str]], PipelineConfig]

# Every step of the baseline is recorded, and every step of a candidate is that of the recording.
_WHOLE_RECORDING = {
    "rollout_mock.enable": "true",
    "rollout_mock.on_mismatch": "error",
    "rollout_mock.schedule": "[]",
    "rollout_mock.steps": "null",
    "rollout_mock.every": "1",
    "rollout_mock.missing_step": "error",
    "rollout_mock.retention.keep_last": "null",
}
_SET_BY_ALIGN = (*_WHOLE_RECORDING, "rollout_mock.mode", "rollout_mock.dump_dir", "trace.level")
_SET_PER_RUN = ("output_dir", "exp_name", "checkpoint_config.output_dir")


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedRun:
    """One run. ``own_overrides``: what makes it differ from the baseline; ``overrides``: all it is started with.

    ``entry``: the Python module that its processes run.
    """

    name: str
    entry: str
    own_overrides: tuple[str, ...]
    overrides: tuple[str, ...]
    config: PipelineConfig
    output_dir: Path

    @property
    def layout(self) -> str:
        """Its layout in one phrase."""
        return self.config.parallel.describe()

    @property
    def log_path(self) -> Path:
        """Where its terminal output goes."""
        return self.output_dir / LOG_FILE


@dataclass(frozen=True, kw_only=True, slots=True)
class AlignPlan:
    """All runs of an alignment, in order, and where its results go."""

    output_dir: Path
    recording_dir: Path
    tolerance: ToleranceConfig
    baseline: PlannedRun
    candidates: tuple[PlannedRun, ...]


def plan_alignment(load: ConfigLoader, *, overrides: Sequence[str], output_dir: Path | None) -> AlignPlan:
    """Plan an alignment; nothing is started or written.

    ``load`` makes a checked configuration out of overrides. ``output_dir``: ``None`` means ``align.output_dir``, or
    ``{output_dir}/align``. Raises ``ConfigError`` for a missing, doubled or impossible candidate, naming it.
    """
    config = load(overrides)
    _check_candidates(config)
    _check_free("the command line", overrides, _SET_BY_ALIGN)
    _check_free("align.baseline", config.align.baseline, _SET_BY_ALIGN + _SET_PER_RUN)
    root = (output_dir or Path(config.align.output_dir or Path(config.output_dir) / "align")).resolve()
    shared = (*overrides, *config.align.baseline)
    baseline = _plan_run(
        load, BASELINE_NAME, shared, own=tuple(config.align.baseline), entry=DEFAULT_ENTRY, mode="dump", root=root
    )
    candidates, problems = [], []
    for candidate in config.align.candidates:
        own = tuple(candidate.overrides)
        try:
            _check_free("its overrides", own, _SET_BY_ALIGN + _SET_PER_RUN)
            planned = _plan_run(
                load, candidate.name, (*shared, *own), own=own, entry=candidate.entry, mode="mock", root=root
            )
            stated_tolerance(planned.config)
            candidates.append(planned)
        except (ConfigError, DeterminismError) as error:
            problems.append(f"candidate {candidate.name!r}: {error}")
    if problems:
        raise ConfigError("nothing was run:\n" + "\n".join(problems))
    return AlignPlan(
        output_dir=root,
        recording_dir=root / RECORDING_NAME,
        tolerance=stated_tolerance(baseline.config),
        baseline=baseline,
        candidates=tuple(candidates),
    )


def build_loader(config_name: str, config_path: Path) -> ConfigLoader:
    """What loads one configuration under any overrides."""

    def load(overrides: Sequence[str]) -> PipelineConfig:
        source = ConfigSource(config_name=config_name, config_path=str(config_path), overrides=tuple(overrides))
        return source.load()

    return load


def override_keys(overrides: Sequence[str]) -> list[str]:
    """The keys that overrides in Hydra's grammar set, add or delete: ``a.b`` of ``a.b=c``, ``+a.b=c`` and ``~a.b``."""
    return [override.partition("=")[0].lstrip("+~").strip() for override in overrides]


def has_module(module: str) -> bool:
    """Whether ``python -m module``, started in the working directory, would find a file to run; imports nothing."""
    relative = Path(*module.split("."))
    roots = (Path(root) for root in ("", *sys.path))
    return any(
        (root / relative).with_suffix(".py").is_file() or (root / relative / "__main__.py").is_file() for root in roots
    )


def stated_tolerance(config: PipelineConfig) -> ToleranceConfig:
    """The tolerance of ``align.tolerance``, or the default for float32 or float64.

    Raises ``ConfigError`` in bfloat16 without a stated one: its rounding grows to the size of the gradients within a
    few updates (measured: 1.5 % at the first, more than 100 % after ten), so no default would tell it from a fault.
    """
    if config.align.tolerance is not None:
        return config.align.tolerance
    if config.precision == "float64":
        return FLOAT64_TOLERANCE
    if config.precision != "float32":
        raise ConfigError(
            f"align.tolerance must be stated for precision {config.precision}: no default separates its rounding from "
            "a fault over several updates. Measure what an honest change of this model gives and state more than "
            "that, or align in float32, where the same change is judged far more sharply"
        )
    return ToleranceConfig()


def quote_override(key: str, value: str) -> str:
    """``key='value'`` in Hydra's grammar, for any text: quotes and interpolations in it stay text.

    In a quoted value (Hydra 1.3) a quote is escaped, and so are the backslashes just before one or at the end; a
    ``${`` is escaped for OmegaConf, which resolves the value afterwards.
    """
    quoted = ""
    num_backslashes = 0
    for character in value.replace("${", "\\${"):
        if character == "'":
            quoted += "\\" * num_backslashes + "\\"
        num_backslashes = num_backslashes + 1 if character == "\\" else 0
        quoted += character
    return f"{key}='{quoted}{chr(92) * num_backslashes}'"


def _plan_run(
    load: ConfigLoader,
    name: str,
    overrides: Sequence[str],
    *,
    own: tuple[str, ...],
    entry: str,
    mode: Literal["dump", "mock"],
    root: Path,
) -> PlannedRun:
    exp_name = load(overrides).exp_name
    run_dir = root / name
    complete = (
        *overrides,
        *(f"{key}={value}" for key, value in _WHOLE_RECORDING.items()),
        f"rollout_mock.mode={mode}",
        quote_override("rollout_mock.dump_dir", str(root / RECORDING_NAME)),
        "trace.level=full",
        quote_override("output_dir", str(run_dir)),
        quote_override("exp_name", f"{exp_name}-{name}"),
        "checkpoint_config.output_dir=null",
    )
    config = load(complete)
    check_settings(config.system_envs)
    if not has_module(entry):
        raise ConfigError(f"entry: there is no Python module {entry!r} in the working directory or on the Python path")
    return PlannedRun(name=name, entry=entry, own_overrides=own, overrides=complete, config=config, output_dir=run_dir)


def _check_candidates(config: PipelineConfig) -> None:
    names = [candidate.name for candidate in config.align.candidates]
    if not names:
        raise ConfigError("align.candidates is empty: name at least one, such as {name: tp2, overrides: [...]}")
    reserved = sorted({BASELINE_NAME, RECORDING_NAME, ALIGN_FILE} & set(names))
    if reserved:
        raise ConfigError(f"align.candidates: {', '.join(map(repr, reserved))} cannot be a candidate's name")
    doubled = sorted({name for name in names if names.count(name) > 1})
    if doubled:
        raise ConfigError(f"align.candidates: more than one is named {', '.join(map(repr, doubled))}")


def _check_free(where: str, overrides: Sequence[str], taken: tuple[str, ...]) -> None:
    keys = override_keys(overrides)
    clashes = [key for key in taken if key in keys]
    if clashes:
        raise ConfigError(f"an alignment run sets {', '.join(clashes)} itself; remove it from {where}")
