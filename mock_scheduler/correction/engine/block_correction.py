"""The correction of one block of whole sequences: measures of rules, the tokens they keep, and weights.

Contract: no result depends on the other sequences of the block. The only communication is over the given group.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch
import torch.distributed as dist

from mock_scheduler.correction.config.rules import CorrectionSpec, Level
from mock_scheduler.correction.engine.inputs import CorrectionInputs, CorrectionResult
from mock_scheduler.correction.engine.rule_measures import MeasuredRule, measure_rule
from mock_scheduler.correction.engine.sequence_sums import collect_states
from mock_scheduler.correction.engine.tokens import read_tokens
from mock_scheduler.correction.engine.units import Leveled, Units, any_of, check_turns, sequence_units, turn_units
from mock_scheduler.correction.engine.weights import MeasuredWeights, normalise, weigh


class BlockCorrection:
    """The correction of one block; each part is computed once, when it is first asked for.

    Ranks with shared sequences must ask for the same parts in the same order.
    """

    def __init__(
        self,
        inputs: CorrectionInputs,
        *,
        spec: CorrectionSpec,
        group: dist.ProcessGroup | None,
        batch: CorrectionInputs,
    ) -> None:
        """Reads the tokens; communicates nothing.

        Args:
            inputs: The block, a part of ``batch``.
            spec: The rules.
            group: Ranks with other tokens of the same sequences.
            batch: The whole batch, for messages.

        Raises:
            CorrectionError: Values without a correction, as ``read_tokens`` and ``check_turns`` refuse them.
        """
        self._inputs = inputs
        self._spec = spec
        self._group = group
        self.tokens = read_tokens(inputs, spec.nan_policy, needs_turns=spec.needs_turns, batch=batch)
        if spec.needs_turns:
            check_turns(self.tokens, group)

    @cached_property
    def sequences(self) -> Units:
        """The units of all levels but token and segment."""
        return sequence_units(self.tokens, self._group)

    @cached_property
    def _turns(self) -> Units:
        return turn_units(self.tokens, self._group)

    @cached_property
    def _measured(self) -> dict[int, MeasuredRule]:
        """Measures by the rule's place; ``truncate`` and ``clip`` need none."""
        rules = enumerate(self._spec.rules)
        return {
            place: measure_rule(rule, self.tokens, self._units(rule.level), sequences=self.sequences)
            for place, rule in rules
            if rule.action not in ("truncate", "clip")
        }

    def _units(self, level: Level) -> Units | None:
        """The units of a level; ``None``: every token is one."""
        if level == "token":
            return None
        return self._turns if level == "segment" else self.sequences

    @cached_property
    def kept(self) -> Leveled:
        """Bool, True unless a rule rejects; one value per sequence where that says everything."""
        rejections = [item.rejected for item in self._measured.values() if item.rejected is not None]
        # Rules judge the raw log ratios, so no rule sees the work of another, and their order does not matter.
        rejected = any_of(rejections) if rejections else None
        if rejected is None or not bool(rejected.values.any()):
            return Leveled(values=torch.ones_like(self.sequences.sequence, dtype=torch.bool), units=self.sequences)
        return Leveled(values=~rejected.values, units=rejected.units)

    # Log-probabilities far apart give infinities, and no warning.
    @np.errstate(all="ignore")
    def result(self, factor: float | None) -> CorrectionResult:
        """Makes the block's weights, mask and states; ``factor``: the divisor of weights, ``None`` for none."""
        tokens, kept = self.tokens, self.kept.by_token()
        weights = None if self.weights is None else normalise(self.weights, factor)
        applied = None
        if weights is not None:
            # Rejected tokens keep their weights; the loss leaves them out by the mask.
            applied = Leveled(values=weights.applied.to(tokens.dtype), units=weights.units).by_token()
        mask = self._inputs.response_mask.detach()
        if tokens.is_known is not None or not bool(self.kept.values.all()):
            mask = torch.where(tokens.spread(kept), mask, torch.zeros_like(mask))
        return CorrectionResult(
            weights=None if applied is None else tokens.spread(applied),
            mask=mask,
            kept=tokens.with_unknown(kept),
            weights_by_token=None if applied is None else tokens.with_unknown(applied),
            states=collect_states(tokens, self._spec, self._measured, weights, self.kept, sequences=self.sequences),
        )

    @cached_property
    def weights(self) -> MeasuredWeights | None:
        """Importance weights as the rules leave them, not yet divided by their mean."""
        if self._spec.weight is None:
            return None
        return weigh(self.tokens, self._units(self._spec.weight), self._spec, self._measured)

    @np.errstate(all="ignore")
    def weight_sums(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Addends of numerator and denominator of the mean weight, float64 ``[S]`` each.

        Collective where a group was given.
        """
        assert self.weights is not None
        bounded = Leveled(values=self.weights.bounded, units=self.weights.units).by_token()
        units = self._units(self._spec.weight) if self._spec.weight is not None else None
        # A unit with an unknown ratio has the weight 0 for want of a better, and is in no mean.
        known = torch.ones_like(bounded)
        if units is not None and units.has_unknown is not None:
            known = (~units.spread(units.has_unknown)).double()
        counts, sums = self.sequences.reduce(known), self.sequences.reduce(bounded * known)
        if self._spec.weight == "token":
            return sums, counts
        return sums / counts.clamp(min=1.0), (counts > 0).double()
