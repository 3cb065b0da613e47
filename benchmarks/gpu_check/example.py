"""Aligns the attached example, ``docs/examples/own_megatron``, on the device of the check."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import nullcontext
from functools import partial
from multiprocessing import get_context
from typing import Any

import yaml

from benchmarks.gpu_check.context import CheckContext
from benchmarks.gpu_check.processes import DETERMINISTIC, ROOT
from mock_scheduler import align
from mock_scheduler.config.instruments import TRACE_KINDS
from mock_scheduler.verdict.results import AlignmentResult, CandidateResult
from mock_scheduler.verdict.wording.verdicts import write_headline
from tests.faults.own.forking import COMMAND, serving

_EXAMPLE = ROOT / "docs" / "examples" / "own_megatron"
_SCRIPT = ROOT / "benchmarks" / "gpu_check" / "run_example.py"
PASSING = ("identical", "identical (emulated)", "rounding")


def candidate(name: str, layout: str = "tp1", **options: object) -> dict[str, Any]:
    """Makes a candidate of a layout such as ``tp2`` and options of the example."""
    axes = {"tp": "tensor", "pp": "pipeline"}
    axis, degree = layout[:2], layout[2:]
    overrides = [f"options.{key}={value}" for key, value in options.items()]
    if degree != "1":
        key = "data_parallel_size" if axis == "dp" else f"{axes[axis]}_model_parallel_size"
        overrides.append(f"parallel.{key}={degree}")
    return {"name": name, "overrides": overrides}


def align_example(
    context: CheckContext,
    name: str,
    candidates: Sequence[Mapping[str, Any]],
    *,
    precision: str = "float32",
    options: Mapping[str, object] | None = None,
    at_once: int | None = None,
    **proofs: object,
) -> AlignmentResult:
    """Aligns; ``options`` are the baseline's, ``proofs`` keys of ``align.proofs``; at_once: as many as may be."""
    config: dict[str, Any] = yaml.safe_load((_EXAMPLE / "align.yaml").read_text(encoding="utf-8"))
    config |= {"exp_name": name, "precision": precision, "sources": [str(_EXAMPLE)]}
    # A rehearsal forks its runs from one process, since two cores have no time for the imports of each.
    config["command"] = [*(("{ranks}",) if context.is_gpu else COMMAND), str(_SCRIPT)]
    config["options"] |= {"layers": "local", **(options or {})}
    config["system_envs"] = {**DETERMINISTIC, "OMP_NUM_THREADS": "1"}
    config["trace"] = {"level": "full", "kinds": list(TRACE_KINDS)}
    config["output_dir"] = str(context.folder / name / "runs")
    config["align"] = {
        "output_dir": str(context.folder / name / "alignment"),
        "candidates": list(candidates),
        "proofs": {"localise": False, "consequence": False, **proofs},
        "at_once": at_once or context.at_once,
    }
    path = context.folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    with nullcontext() if context.is_gpu else serving():
        return align(path.stem, config_path=path.parent).result


def align_all(
    context: CheckContext, requests: Mapping[str, Mapping[str, Any]]
) -> Iterator[tuple[str, AlignmentResult | str]]:
    """Aligns for each request (name, and arguments of ``align_example``), beside each other on a GPU.

    Yields each name with its result as soon as that is there; a text where an alignment failed. Processes are forked,
    so the caller must not have started CUDA.
    """
    num_workers = len(requests) if context.is_gpu else 1
    with ProcessPoolExecutor(num_workers, mp_context=get_context("fork")) as pool:
        align_one = partial(align_example, context, at_once=max(1, context.at_once // num_workers))
        names = {pool.submit(align_one, name, **request): name for name, request in requests.items()}
        for done in as_completed(names):
            error = done.exception()
            yield names[done], done.result() if error is None else f"{type(error).__name__}: {error}"[-1500:]


def describe(item: CandidateResult) -> str:
    """Says a candidate's verdict in a line; of a run that failed, the end of its output."""
    if item.run is None and item.log_path is not None:
        return f"the run failed: {item.log_path.read_text(encoding='utf-8', errors='replace')[-500:]}"
    return f"{item.verdict.kind.value}: {write_headline(item.verdict)}"


def hold_passing(context: CheckContext, question: str, item: CandidateResult) -> None:
    """Holds a candidate to a verdict that passes."""
    context.log.hold(
        f"{question}: {item.name}",
        is_held=item.verdict.kind.value in PASSING,
        found=describe(item),
        expected="identical, identical (emulated) or rounding",
    )
