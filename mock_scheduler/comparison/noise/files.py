"""Stores ``noise.json``: the measured noise of a baseline, in an alignment's folder or beside the baseline's run.

Contract: a sealed JSON object (``digests.seal``) of ``format_version``, ``baseline`` (digest of the baseline's trace),
``seeds``, ``unit_roundoffs``, ``unit`` (u of accumulation), ``epsilon``, ``trace_dirs`` (of the perturbed runs,
relative to the file's folder where they lie in it), ``tensors`` (a list of ``step``, ``update``, ``kind``, ``name``,
``relative``, ``usual`` p, ``largest`` P, ``absolute``, ``size`` of the baseline's, ``slopes`` and ``slope_spread``, the
standard deviation of the slopes about 1) and ``metrics`` (``step``, ``name``, ``value``, ``changes``). Infinite numbers
are the text ``inf``. Written whole or not at all. A file of another form or version raises ``AlignmentError``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from mock_scheduler.comparison.bounds.measured import NoiseBounds
from mock_scheduler.comparison.bounds.tensor_noise import TensorNoise
from mock_scheduler.comparison.noise.building import digest_of
from mock_scheduler.config.instruments import TraceKind
from mock_scheduler.errors import AlignmentError, UnwrittenError
from mock_scheduler.support.digests import JSON, open_sealed, seal
from mock_scheduler.support.documents import Document
from mock_scheduler.support.files import save_json
from mock_scheduler.support.foreign_files import describe_failure, is_inside, read_bytes
from mock_scheduler.support.run_files import NOISE_FILE
from mock_scheduler.support.text import shorten
from mock_scheduler.trace.entries import TraceKey

FORMAT_VERSION = 2


#: A number that may be infinite or NaN: a text then, since JSON has neither.
_Number: TypeAlias = float | Literal["nan", "inf", "-inf"]
_Finite = Annotated[float, Field(allow_inf_nan=False)]
_Norm = Annotated[float, Field(allow_inf_nan=False, ge=0)]


@dataclass(frozen=True, kw_only=True, slots=True)
class _StoredTensor:
    step: int
    update: int
    kind: TraceKind
    name: str
    relative: tuple[_Number, ...]
    absolute: _Norm
    size: _Norm
    slopes: tuple[_Number, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _StoredMetric:
    step: int
    name: str
    value: _Finite
    changes: tuple[_Finite, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _StoredNoise:
    baseline: str
    seeds: tuple[int, ...]
    unit_roundoffs: _Norm
    unit: _Norm
    epsilon: _Norm
    trace_dirs: tuple[str, ...]
    tensors: tuple[_StoredTensor, ...]
    metrics: tuple[_StoredMetric, ...]


_DOCUMENT = Document[_StoredNoise](_StoredNoise)


def save_noise(noise: NoiseBounds, path: Path) -> None:
    """Writes the file; makes folders.

    Raises:
        AlignmentError: It cannot be written.
    """
    content: dict[str, JSON] = {
        "format_version": FORMAT_VERSION,
        "baseline": noise.baseline,
        "seeds": list(noise.seeds),
        "unit_roundoffs": noise.unit_roundoffs,
        "unit": noise.unit,
        "epsilon": noise.epsilon,
        # Relative, so that an alignment's folder may be moved as a whole.
        "trace_dirs": [_relative_path(item, path.parent) for item in noise.trace_dirs],
        "tensors": [_tensor_to_json(key, item) for key, item in noise.tensors.items()],
        "metrics": [
            {"step": step, "name": name, "value": noise.metric_values[step, name], "changes": list(changes)}
            for (step, name), changes in noise.metrics.items()
        ],
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_json(path, seal(content), sort_keys=False)
    except OSError as error:
        raise UnwrittenError(f"{path} cannot be written: {error.strerror}") from error


def load_noise(path: Path, *, inside: Path | None = None) -> NoiseBounds:
    """Reads a file of ``save_noise``; ``inside``: no link leads out of this folder.

    Traces that it names outside its own folder are not read: whoever sent it may name any.

    Raises:
        AlignmentError: It is another file.
    """
    try:
        content = open_sealed(read_bytes(path, inside=inside, what="measured noise"))
        # Before anything else is read, as other versions have other fields.
        version = content.get("format_version")
        if version != FORMAT_VERSION:
            raise AlignmentError(
                f"{path} is noise of format {shorten(repr(version), 40)}; this release reads {FORMAT_VERSION}"
            )
        return _restore(_DOCUMENT.load(content), path.parent)
    except OSError as error:
        raise AlignmentError(describe_failure(error, path)) from error
    except ValueError as error:
        raise AlignmentError(f"{path} is no measured noise of a baseline: {error}") from error


def find_noise(baseline_dir: Path, *, near: Path | None = None) -> NoiseBounds | None:
    """Finds the noise of a baseline in its folder or in those around it; ``None`` where there is none of it.

    ``near``: a further folder, of a candidate whose alignment may have measured it.

    Noise of another baseline does not count: a run made anew has to be measured anew.
    """
    places = [place.resolve() for place in (baseline_dir, near) if place is not None]
    for folder in dict.fromkeys(folder for place in places for folder in (place, place.parent, place.parent.parent)):
        path = folder / NOISE_FILE
        if path.is_file():
            noise = load_noise(path, inside=folder)
            # Equal names are no proof: the digest says whose noise it is.
            if noise.baseline == digest_of(baseline_dir):
                return noise
    return None


def check_baseline(noise: NoiseBounds, baseline_dir: Path, source: str) -> None:
    """Checks whether noise was measured of this run; ``source``: its place, for messages.

    Raises:
        AlignmentError: It was measured of another run.
    """
    found = digest_of(baseline_dir)
    if noise.baseline != found:
        raise AlignmentError(
            f"{source} is the noise of another baseline: of the trace {noise.baseline[:12]}…, where {baseline_dir} has "
            f"{found[:12]}…; measure it again, with perturbed runs of this baseline"
        )


def _relative_path(path: Path, folder: Path) -> str:
    root = folder.resolve()
    return str(path.relative_to(root)) if path.is_relative_to(root) else str(path)


def _tensor_to_json(key: TraceKey, noise: TensorNoise) -> JSON:
    return {
        "step": key.step,
        "update": key.update,
        "kind": key.kind,
        "name": key.name,
        "relative": _numbers(noise.relative),
        "usual": _number(noise.usual),
        "largest": _number(noise.largest),
        "absolute": noise.absolute,
        "size": noise.size,
        "slopes": _numbers(noise.slopes),
        "slope_spread": _number(noise.slope_spread),
    }


def _restore(stored: _StoredNoise, folder: Path) -> NoiseBounds:
    """Makes the bounds of their stored form; raises ``ValueError`` where its lists do not fit its runs."""
    for where, values in [
        *((f"relative of {item.name}", item.relative) for item in stored.tensors),
        *((f"changes of {item.name}", item.changes) for item in stored.metrics),
    ]:
        # A run may lack what another one has, so lists may be shorter than the runs; an empty one has no largest noise.
        if not 0 < len(values) <= len(stored.seeds):
            raise ValueError(f"{where} has {len(values)} values, expected 1 to {len(stored.seeds)}, one for each run")
    for item in stored.tensors:
        # Slopes are of the same runs as the differences: one list says for both which run a place is.
        if len(item.slopes) not in (0, len(item.relative)):
            raise ValueError(f"slopes of {item.name} has {len(item.slopes)} values, expected {len(item.relative)}")
    metrics = {(item.step, item.name): item for item in stored.metrics}
    return NoiseBounds(
        baseline=stored.baseline,
        seeds=stored.seeds,
        unit_roundoffs=stored.unit_roundoffs,
        unit=stored.unit,
        epsilon=stored.epsilon,
        tensors=dict(map(_restore_tensor, stored.tensors)),
        metrics={place: item.changes for place, item in metrics.items()},
        metric_values={place: item.value for place, item in metrics.items()},
        trace_dirs=tuple((folder / item).resolve() for item in stored.trace_dirs if is_inside(folder / item, folder)),
    )


def _restore_tensor(stored: _StoredTensor) -> tuple[TraceKey, TensorNoise]:
    key = TraceKey(step=stored.step, update=stored.update, kind=stored.kind, name=stored.name)
    noise = TensorNoise(
        relative=tuple(map(float, stored.relative)),
        absolute=stored.absolute,
        size=stored.size,
        slopes=tuple(map(float, stored.slopes)),
    )
    return key, noise


def _numbers(values: Sequence[float]) -> list[JSON]:
    return [_number(value) for value in values]


def _number(value: float) -> JSON:
    return value if math.isfinite(value) else str(value)
