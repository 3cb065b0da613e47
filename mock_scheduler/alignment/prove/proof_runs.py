"""Makes the further runs for proofs, derived from the planned runs of an alignment.

Contract: every run is a planned run with a few overrides behind its own, in a folder of its own under ``proofs``, in
mock on the same recording where there is one, and from the same initial state. Nothing is started here: ``alignment``
makes them, and ``verdict.ladder`` judges them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from mock_scheduler.alignment.localise.runs import trace_overrides
from mock_scheduler.alignment.plan.overrides import quote_override
from mock_scheduler.alignment.plan.planned_run import PRECISION_KEY, AlignPlan, PlannedRun, initial_state_overrides
from mock_scheduler.config.layout import ParallelConfig
from mock_scheduler.program import ConfigLoader
from mock_scheduler.support.run_files import BASELINE_NAME, TRACE_FOLDER

#: Addition is commutative: two terms have one sum in any order, and only from three on the order moves bits.
_NUM_ORDERLESS = 2
_MOCK = ("rollout_mock.mode=mock",)


def derive_run(run: PlannedRun, name: str, overrides: Sequence[str], *, load: ConfigLoader, root: Path) -> PlannedRun:
    """Plans the run again with further overrides, named ``name``, in ``{root}/{name}``.

    Raises ``ConfigError`` where the overrides do not fit.
    """
    run_dir = root / name
    begins_from = run.begins_from
    if begins_from is None and run.program.initial_state_key is not None:
        begins_from = run.output_dir / TRACE_FOLDER
    complete = (
        *run.overrides,
        *(_MOCK if run.config.rollout_mock is not None else ()),
        *initial_state_overrides(run.program, begins_from),
        *overrides,
        quote_override("output_dir", str(run_dir)),
        quote_override("exp_name", f"{run.config.exp_name}-{name}"),
    )
    return replace(
        run,
        name=name,
        overrides=complete,
        config=load(complete),
        output_dir=run_dir,
        begins_from=begins_from,
    )


def plan_emulated(candidate: PlannedRun, baseline: PlannedRun, *, load: ConfigLoader, root: Path) -> PlannedRun:
    """Plans the reference of a candidate: one process with its layout's order of sums and the baseline's code.

    Raises ``ConfigError`` where the order cannot be followed.
    """
    layout = candidate.config.parallel
    emulated = layout.model_dump(mode="json", exclude_defaults=True, exclude={"allow_known_wrong"})
    # One process, whatever axes the candidate has: the reference's only parallelism is the order it follows.
    plain = {f"parallel.{key}": value for key, value in ParallelConfig().model_dump(mode="json").items()}
    overrides = [
        *(f"{key}={json.dumps(value)}" for key, value in plain.items()),
        f"order.emulate={_to_hydra(emulated)}",
        "order.ordered_reductions=false",  # it concerns ranks, and the reference has one
    ]
    run = derive_run(candidate, f"emulated-{candidate.name}", overrides, load=load, root=root)
    # The baseline's code: a candidate's own module or packages must not vouch for themselves.
    return replace(
        run,
        entry=baseline.entry,
        python=baseline.python,
        env=baseline.env,
        versions=baseline.versions,
        packages=baseline.packages,
        sources=baseline.sources,
    )


def order_reductions(plan: AlignPlan, *, load: ConfigLoader) -> AlignPlan:
    """Puts reductions in rank order where an emulated candidate reduces over more than two ranks.

    A library's own order over more than two ranks is nobody's to follow.
    """
    if not plan.baseline.config.align.proofs.emulate:
        return plan
    return replace(plan, candidates=tuple(_order_reductions(run, load=load) for run in plan.candidates))


def describe_order_limits(run: PlannedRun) -> str:
    """Says why the order of sums of a run cannot be followed; empty where it can."""
    return "; ".join(run.program.order_limits(run.config))


def is_same_order(baseline: PlannedRun, candidate: PlannedRun) -> bool:
    """Says whether a candidate adds in the baseline's order, and in its precision."""
    if has_other_precision(baseline, candidate):
        return False
    if candidate.changes.kind == "nothing":
        return True
    if any(describe_order_limits(run) for run in (baseline, candidate)):
        return False
    ours, theirs = (run.program.plan_order(run.config) for run in (baseline, candidate))
    # Two orders that nobody knows are not known to be one.
    return ours is not None and ours == theirs


def has_other_precision(baseline: PlannedRun, candidate: PlannedRun) -> bool:
    """Says whether the two compute in different precisions, so that equal sums have other bits."""
    return baseline.config.precision != candidate.config.precision


def plan_in_precision(baseline: PlannedRun, precision: str, *, load: ConfigLoader, root: Path) -> PlannedRun:
    """Plans the baseline in a precision; itself where that is its own."""
    if baseline.config.precision == precision:
        return baseline
    return derive_run(baseline, f"in-{precision}", [f"{PRECISION_KEY}={precision}"], load=load, root=root)


def plan_perturbed(baseline: PlannedRun, seed: int, *, load: ConfigLoader, root: Path) -> PlannedRun:
    """Plans a run with weights perturbed by one unit roundoff of its precision; ``baseline``: in any precision."""
    name = f"noise-{seed}" if baseline.name == BASELINE_NAME else f"{baseline.name}-noise-{seed}"
    return derive_run(baseline, name, [f"perturbation.seed={seed}"], load=load, root=root)


def plan_wide(run: PlannedRun, *, load: ConfigLoader, root: Path) -> PlannedRun:
    """Plans the run in float64."""
    return derive_run(run, f"float64-{run.name}", [f"{PRECISION_KEY}=float64"], load=load, root=root)


def plan_with_collectives(run: PlannedRun, *, load: ConfigLoader, root: Path) -> PlannedRun:
    """Plans the run with a ledger of the collectives that its ranks begin."""
    overrides = trace_overrides(run, "full", "null", ("*",), kinds=("collective",))
    return derive_run(run, f"collectives-{run.name}", overrides, load=load, root=root)


def is_one_run(one: PlannedRun, other: PlannedRun) -> bool:
    """Says whether two planned runs compute the same, whatever their names and folders are."""
    return all(
        getattr(one, name) == getattr(other, name) for name in ("entry", "python", "env", "versions", "packages")
    ) and _config_values(one) == _config_values(other)


def _config_values(run: PlannedRun) -> dict[str, object]:
    return run.config.model_dump(mode="json", exclude={"output_dir", "exp_name", "align"})


def _order_reductions(run: PlannedRun, *, load: ConfigLoader) -> PlannedRun:
    config = run.config
    if not run.must_equal_reference or config.order.ordered_reductions or describe_order_limits(run):
        return run
    plan = run.program.plan_order(config)
    # Where nobody knows the groups before the run, the largest one may have all processes.
    sizes = [config.parallel.world_size] if plan is None else [reduction.size for reduction in plan.reductions]
    if all(size <= _NUM_ORDERLESS for size in sizes):
        return run
    added = "order.ordered_reductions=true"
    overrides = (*run.overrides, added)
    return replace(run, own_overrides=(*run.own_overrides, added), overrides=overrides, config=load(overrides))


def _to_hydra(values: dict[str, object]) -> str:
    """Writes a mapping of plain values in Hydra's grammar; an empty one means one process."""
    return "{" + ",".join(f"{key}:{json.dumps(value)}" for key, value in values.items()) + "}"
