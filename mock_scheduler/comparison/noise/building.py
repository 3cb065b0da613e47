"""Measures the noise of a baseline: it is compared with each of its perturbed runs as a candidate would be.

Contract: reads finished runs, or their traces alone; starts nothing. Memory is that of one comparison.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from mock_scheduler.comparison.bounds.bounds import UNBOUNDED
from mock_scheduler.comparison.bounds.measured import NoiseBounds
from mock_scheduler.comparison.bounds.tensor_noise import TensorNoise
from mock_scheduler.comparison.findings import OtherInput
from mock_scheduler.comparison.tensors import SLOPE_KINDS, TensorComparison, TensorDifference
from mock_scheduler.comparison.walk.metrics import MetricLog, is_comparable, load_run_metrics
from mock_scheduler.comparison.walk.traces import compare_trace_folders, find_dtypes, find_epsilon
from mock_scheduler.config.instruments import UNIT_ROUNDOFFS
from mock_scheduler.errors import AlignmentError, ForeignFileError, TraceError
from mock_scheduler.support.foreign_files import check_inside, open_foreign, read_pieces
from mock_scheduler.support.run_files import METRICS_FILE, TRACE_FOLDER
from mock_scheduler.trace.entries import TraceKey
from mock_scheduler.trace.full.files import find_steps


def measure_noise(
    baseline_dir: Path,
    perturbed_dirs: Sequence[Path],
    *,
    seeds: Sequence[int],
    unit_roundoffs: float = 1.0,
) -> NoiseBounds:
    """Measures the noise of a baseline from its perturbed runs, trained on the same rollouts.

    Args:
        baseline_dir: ``output_dir`` of the run, or a trace alone.
        perturbed_dirs: As ``baseline_dir``, of each perturbed run.
        seeds: Of the perturbations, for the record.
        unit_roundoffs: Size of the perturbations, for the record.

    Raises:
        AlignmentError: There is no perturbed run, or one shares no tensor with the baseline.
        TraceError: A file cannot be read.
    """
    if not perturbed_dirs:
        raise AlignmentError("noise is measured from perturbed runs, and none is given")
    trace_dirs = tuple(map(trace_of, perturbed_dirs))
    found: dict[TraceKey, list[TensorDifference]] = {}
    for trace_dir in trace_dirs:
        # Unbounded, since nothing is judged: the differences themselves are the noise.
        compared = compare_trace_folders(trace_of(baseline_dir), trace_dir, bounds=UNBOUNDED)
        # Other data moves everything by far more than rounding, and bounds made of it would let any fault pass.
        _check_data(compared, trace_dir, baseline_dir)
        if not compared.differences:
            raise AlignmentError(f"{trace_dir} has no tensor in common with {baseline_dir}: no noise can be measured")
        for difference in compared.differences:
            found.setdefault(difference.key, []).append(difference)
    metrics, values = _measure_metrics(baseline_dir, perturbed_dirs)
    return NoiseBounds(
        baseline=digest_of(baseline_dir),
        seeds=tuple(seeds),
        unit_roundoffs=unit_roundoffs,
        unit=_find_unit(trace_of(baseline_dir)),
        epsilon=find_epsilon(trace_of(baseline_dir)),
        tensors={key: _tensor_noise(items) for key, items in found.items()},
        metrics=metrics,
        metric_values=values,
        trace_dirs=tuple(path.resolve() for path in trace_dirs),
    )


def trace_of(run_dir: Path) -> Path:
    """Returns the trace of a run; the folder itself where it is one.

    Raises ``TraceError`` where it is a link that leads out of the run's folder.
    """
    path = run_dir / TRACE_FOLDER
    if not path.is_dir():
        return run_dir
    try:
        check_inside(path, run_dir)
    except ForeignFileError as error:
        raise TraceError(str(error)) from error
    return path


def digest_of(run_dir: Path) -> str:
    """Returns SHA-256 (hex) of the headers of all files of a trace, which hold the digests of all tensors."""
    # Headers alone: they seal the tensors, which would take as long to read as to compare.
    digest = hashlib.sha256()
    for _, folder in sorted(find_steps(trace_of(run_dir))):
        for path in sorted(item for item in folder.iterdir() if item.is_file()):
            digest.update(f"{folder.name}/{path.name}\n".encode(errors="surrogateescape"))
            for part in _header(path, folder):
                digest.update(part)
    return digest.hexdigest()


def _check_data(compared: TensorComparison, trace_dir: Path, baseline_dir: Path) -> None:
    """Raises ``AlignmentError`` for a run on other rows, whose differences would pass for noise."""
    found = next((item for item in compared.findings if compared.is_by_content and item.is_other_data), None)
    if found is not None:
        what = found.name
        if isinstance(found.fact, OtherInput):
            what = f"{found.name} of row {found.fact.row or '(unknown)'} at step {found.step}"
        raise AlignmentError(
            f"{trace_dir} trained on other data than {baseline_dir}, so no noise can be measured: other {what}; give "
            "it the same rows"
        )


def _find_unit(trace_dir: Path) -> float:
    """Returns the unit roundoff of accumulation: of float64 where parameters or gradients are, else of float32."""
    is_wide = torch.float64 in find_dtypes(trace_dir, ("initial", "parameter", "gradient"))
    return UNIT_ROUNDOFFS["float64" if is_wide else "float32"]


def _header(path: Path, folder: Path) -> Iterator[bytes]:
    """Yields the header of a safetensors file, with its length; all of any other."""
    with open_foreign(path, inside=folder) as file:
        length = file.read(8)
        yield length
        size = int.from_bytes(length, "little")
        # In pieces: what is no safetensors file may have any size.
        yield from read_pieces(file, size if size <= os.fstat(file.fileno()).st_size - len(length) else None)


def _tensor_noise(differences: Sequence[TensorDifference]) -> TensorNoise:
    # A sketch has no slope, and a median over some runs only would be of another kind.
    has_slope = all(item.slope is not None for item in differences) and differences[0].key.kind in SLOPE_KINDS
    return TensorNoise(
        relative=tuple(_relative(item) for item in differences),
        absolute=0.0 if differences[0].size else max(item.distance for item in differences),
        slopes=tuple(item.slope for item in differences if item.slope is not None) if has_slope else (),
        size=differences[0].size,
    )


def _relative(difference: TensorDifference) -> float:
    # A tensor of the baseline is 0 and the run's is not: no size to be relative to.
    if difference.size or not difference.distance or difference.num_decisions:
        return difference.relative
    # As ``NoiseBounds.tensor`` reads it: the absolute difference bounds it then.
    return math.inf


def _measure_metrics(
    baseline_dir: Path, perturbed_dirs: Sequence[Path]
) -> tuple[dict[tuple[int, str], tuple[float, ...]], dict[tuple[int, str], float]]:
    """Returns, by step and name, each run's value minus the baseline's, and the baseline's; none from traces alone."""
    if not all((folder / METRICS_FILE).is_file() for folder in (baseline_dir, *perturbed_dirs)):
        return {}, {}
    ours = load_run_metrics(baseline_dir)
    theirs: list[MetricLog] = [load_run_metrics(folder) for folder in perturbed_dirs]
    noise, values = {}, {}
    for step, metrics in ours.items():
        for name, value in metrics.items():
            others = [log[step][name] for log in theirs if name in log.get(step, {})]
            if is_comparable(name) and others and math.isfinite(value) and all(map(math.isfinite, others)):
                # Signed: a drift needs the direction.
                noise[step, name] = tuple(other - value for other in others)
                values[step, name] = value
    return noise, values
