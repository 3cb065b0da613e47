"""What an attached run says about itself beside its trace: what draws, what nothing shows, what cannot be followed.

Contract: collective; every rank must call at the same place, and all get the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from mock_scheduler.config.instruments import TraceConfig
from mock_scheduler.determinism.agreement import RankGroup, share
from mock_scheduler.megatron.emulation.follow import find_order_limits
from mock_scheduler.megatron.followable import find_draws
from mock_scheduler.megatron.observed_model import ObservedModel, layout_of
from mock_scheduler.megatron.parameters import iterate_parameters
from mock_scheduler.megatron.probe.observed import unobserved_outputs
from mock_scheduler.support.digests import JSON
from mock_scheduler.trace.selection import EVERYTHING, TraceSelection


@dataclass(frozen=True, kw_only=True, slots=True)
class Statements:
    """Holds facts for ``run.json``.

    draws: what draws random numbers in the model. unobserved_modules: modules whose output nothing can show, each with
    the reason. untraced_parameters: parameters that no rank traces, with their numbers of elements. order_limits: what
    keeps one process from adding in this training's order; of a run in one process, from following any layout in it.
    """

    draws: Sequence[str]
    unobserved_modules: Mapping[str, str]
    untraced_parameters: Mapping[str, int]
    order_limits: Sequence[str]

    def as_json(self) -> dict[str, JSON]:
        """Returns the keys of ``run.json``."""
        return {
            "draws": list(self.draws),
            "unobserved_modules": dict(self.unobserved_modules),
            "untraced_parameters": dict(self.untraced_parameters),
            "order_limits": list(self.order_limits),
        }


def gather_statements(model: ObservedModel, trace: TraceConfig, ranks: RankGroup) -> Statements:
    """Gathers what all ranks know of their parts of a built model."""
    own = {
        "draws": find_draws(model),
        "unobserved": {item.name: item.reason for item in unobserved_outputs(model)},
        "limits": find_order_limits(model, layout_of(model)),
    }
    gathered = share(ranks, own)
    return Statements(
        draws=sorted({name for item in gathered for name in item["draws"]}),
        unobserved_modules={name: text for item in gathered for name, text in item["unobserved"].items()},
        untraced_parameters=_gather_untraced(model, trace, ranks),
        order_limits=list(dict.fromkeys(text for item in gathered for text in item["limits"])),
    )


def _gather_untraced(model: ObservedModel, trace: TraceConfig, ranks: RankGroup) -> dict[str, int]:
    """The parameters of which no rank traces any element; a trace at level ``off`` has nothing to leave out."""
    # Names of all ranks are many, so they are sent only where a selection can leave any out.
    is_whole = trace.ranks is None and trace.patterns == [EVERYTHING] and not trace.exclude
    if trace.level == "off" or is_whole:
        return {}
    selection = TraceSelection(trace.model_copy(update={"kinds": ["gradient"]}))
    writes = trace.ranks is None or ranks.global_rank in trace.ranks
    specs = [local.spec for local in iterate_parameters(model)]
    traced = [spec.name for spec in specs if writes and selection.wants("gradient", spec.name)]
    sizes = {spec.name: prod(spec.global_shape) for spec in specs}
    gathered = share(ranks, {"sizes": sizes, "traced": traced})
    seen = {name for item in gathered for name in item["traced"]}
    return {name: size for item in gathered for name, size in item["sizes"].items() if name not in seen}
