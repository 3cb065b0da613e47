"""What a candidate changes: which keys, and whether any of them may move a bit beyond the order of sums.

Contract: of two checked configurations; nothing is run. A key that is not known to keep all bits is taken to change
what is computed, so that no exactness is ever expected of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from mock_scheduler.program import RunConfig
from mock_scheduler.support.digests import iterate_leaves

ChangeKind = Literal["nothing", "layout", "other"]
"""``nothing``: no bit may move. ``layout``: only the order of sums may. ``other``: anything may round."""

#: Sections and keys by which the order of sums follows from the layout alone.
_LAYOUT = ("parallel.", "training.use_distributed_optimizer", "order.ordered_reductions")
#: What changes no bit of what is computed: where files go, what is written, what is computed twice or elsewhere.
_NEUTRAL = (
    *("exp_name", "output_dir", "track_with", "save_steps", "eval_steps", "val_batch_size", "checkpoint_config."),
    *("rollout_mock.", "trace.", "debug.", "align.", "order.emulate", "rollout_worker.", "val_env_manager."),
    *("training.recompute_granularity", "training.recompute_method", "training.recompute_num_layers"),
    *("training.overlap_grad_reduce", "training.overlap_param_gather", "parallel.overlap_p2p_comm"),
    *("parallel.allow_known_wrong", "train_env_manager.num_env_workers", "actor_infer.use_kv_cache"),
    *("actor_infer.rows_per_forward",),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Changes:
    """The keys that differ, by their dotted names, each in one of three classes."""

    neutral: tuple[str, ...]
    layout: tuple[str, ...]
    other: tuple[str, ...]

    @property
    def kind(self) -> ChangeKind:
        """The gravest class that has any key."""
        if self.other:
            return "other"
        return "layout" if self.layout else "nothing"


def find_changes(baseline: RunConfig, candidate: RunConfig) -> Changes:
    """The keys in which two configurations differ."""
    sides = [dict(iterate_leaves(config.model_dump(mode="json"))) for config in (baseline, candidate)]
    differing = [key for key in dict.fromkeys([*sides[0], *sides[1]]) if sides[0].get(key) != sides[1].get(key)]
    neutral = [key for key in differing if _is_of(key, _NEUTRAL)]
    layout = [key for key in differing if key not in neutral and _is_of(key, _LAYOUT)]
    other = [key for key in differing if key not in neutral and key not in layout]
    return Changes(neutral=tuple(neutral), layout=tuple(layout), other=tuple(other))


def _is_of(key: str, names: Iterable[str]) -> bool:
    return any(key.startswith(name) if name.endswith(".") else key == name for name in names)
