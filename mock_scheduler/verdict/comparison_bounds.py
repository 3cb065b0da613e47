"""Chooses the bounds of ``mock-scheduler compare``: stated, measured, or else derived from theory.

Contract: noise must belong to this very baseline, or it is an error; a file of it beside the baseline or
the candidate is taken by itself, and of another baseline it is passed over.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from mock_scheduler.comparison.bounds.bounds import UNBOUNDED, Bounds, StatedBounds
from mock_scheduler.comparison.bounds.measured import NoiseBounds
from mock_scheduler.comparison.noise.building import measure_noise
from mock_scheduler.comparison.noise.files import check_baseline, find_noise, load_noise
from mock_scheduler.comparison.noise.theory import TheoryBounds, build_theory_bounds
from mock_scheduler.config.align import ToleranceConfig
from mock_scheduler.config.instruments import PerturbationConfig
from mock_scheduler.errors import ConfigError
from mock_scheduler.run_folder.finished_run import load_batches, load_stored_config
from mock_scheduler.run_folder.inputs import OpenedInput, find_kind, find_trace, parse_tolerance
from mock_scheduler.support.run_files import CONFIG_FILE, TRACE_FOLDER
from mock_scheduler.support.text import bullet_list


def resolve_bounds(
    opened: tuple[OpenedInput, OpenedInput], stated: Sequence[str], noise: Sequence[Path] = ()
) -> Bounds:
    """Returns the bounds of a comparison.

    ``stated``: ``name=value`` over the candidate's own ``align.tolerance``. ``noise``: one file of measured noise, or
    perturbed runs or traces of the baseline, from which it is measured. Raises ``ConfigError`` for a bound that is none
    and for what is no perturbed run; ``AlignmentError`` for noise of another baseline, ``TraceError`` for traces.
    """
    baseline, candidate = opened
    own = ToleranceConfig() if candidate.stored is None else candidate.stored.tolerance
    tolerance = parse_tolerance(stated, own)
    if baseline.side.kind == "recording":
        if noise:
            raise ConfigError("noise: recordings are equal or not, and have no noise")
        return StatedBounds(tolerance=tolerance, otherwise=UNBOUNDED)
    measured = _find_measured(baseline, noise, near=_run_of(candidate))
    return StatedBounds(tolerance=tolerance, otherwise=measured or _theory(opened))


def _find_measured(baseline: OpenedInput, noise: Sequence[Path], *, near: Path | None) -> NoiseBounds | None:
    """The noise that was named, or lies beside the baseline or the candidate; ``None`` where there is neither."""
    run_dir = _run_of(baseline)
    if run_dir is None:
        if noise:
            raise ConfigError(
                f"noise: {baseline.side.path} has no trace beside it, by which noise would be known to be its own"
            )
        return None
    files = [path for path in noise if path.is_file()]
    if len(files) == 1 and len(noise) == 1:
        measured = load_noise(files[0])
        check_baseline(measured, run_dir, str(files[0]))
        return measured
    if files:
        raise ConfigError(f"noise: {files[0]} is a file; give one file alone, or perturbed runs")
    return _measure(baseline, run_dir, noise) if noise else find_noise(run_dir, near=near)


def _run_of(baseline: OpenedInput) -> Path | None:
    """The folder of the baseline with its trace; ``None`` where there are metrics alone."""
    path = baseline.side.path
    if baseline.side.kind != "metrics":
        return path
    return path.parent if (path.parent / TRACE_FOLDER).is_dir() else None


def _measure(baseline: OpenedInput, run_dir: Path, perturbed: Sequence[Path]) -> NoiseBounds:
    problems = []
    perturbations = []
    for path in perturbed:
        try:
            perturbations.append(_perturbation_of(path, baseline))
        except ConfigError as error:
            problems.append(str(error))
    if len({item.unit_roundoffs for item in perturbations}) > 1:
        problems.append("they have other perturbation.unit_roundoffs")
    seeds = [item.seed for item in perturbations if item.seed is not None]
    if len(set(seeds)) < len(seeds):
        problems.append(f"they have the seeds {', '.join(map(str, seeds))}; two of one seed are one run")
    if problems:
        raise ConfigError(f"noise: no noise can be measured from these:{bullet_list(problems)}")
    return measure_noise(
        run_dir, perturbed, seeds=seeds or range(len(perturbed)), unit_roundoffs=perturbations[0].unit_roundoffs
    )


def _perturbation_of(path: Path, baseline: OpenedInput) -> PerturbationConfig:
    """How a run was perturbed; raises ``ConfigError`` where it was not, or trained on other rollouts or rows."""
    find_trace(path)
    if find_kind(path) != "run":
        return PerturbationConfig()
    perturbation = load_stored_config(path / CONFIG_FILE).perturbation
    if perturbation.seed is None:
        raise ConfigError(f"{path} was not perturbed: run it with perturbation.seed=1, on the same recording or rows")
    if baseline.side.run is not None:
        ours = {int(step): digest for step, digest in baseline.side.run.batches.items()}
        theirs = load_batches(path)
        if any(theirs.get(step) != digest for step, digest in ours.items()):
            raise ConfigError(
                f"{path} did not train on the baseline's rollouts: replay its recording, or give it the same rows"
            )
    return perturbation


def _theory(opened: tuple[OpenedInput, OpenedInput]) -> Bounds:
    """Bounds of theory for the two traces; theory says nothing of metrics alone."""
    if opened[0].side.kind == "metrics":
        return TheoryBounds(num_layers=0, epsilon=torch.finfo(torch.float32).eps, distances={})
    baseline, candidate = (find_trace(item.side.path) for item in opened)
    return build_theory_bounds(baseline, candidate)
