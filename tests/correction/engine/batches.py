"""Random batches for correction: log-probabilities on a grid of 1/64, so that sums and shifts are exact in float64."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import torch

from mock_scheduler.correction import CorrectionInputs
from mock_scheduler.correction.config.rules import Aggregation, CorrectionSpec, Estimator, Level, Rule
from mock_scheduler.correction.config.section import RolloutCorrectionConfig
from tests.correction.engine.plain import PlainBatch

GRID = 64
NAN = float("nan")

#: Bounds that no value on the grid is at: (lower, upper), the lower ones for estimators that can be negative.
BOUNDS: dict[Estimator, tuple[float | None, float | None]] = {
    "ratio": (0.83, 1.19),
    "k1": (-0.187, 0.173),
    "k2": (None, 0.0217),
    "k3": (None, 0.0231),
    "prob_diff": (-0.0613, 0.0591),
}


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Rows ``[B, T]`` of float64, what of them is a response, and all that rules may ask for."""

    train: torch.Tensor
    rollout: torch.Tensor
    mask: torch.Tensor
    turns: torch.Tensor
    advantages: torch.Tensor
    versions: torch.Tensor
    valid: torch.Tensor | None = None

    def rows(self, indices: list[int]) -> Batch:
        named = {name: getattr(self, name) for name in ("train", "rollout", "mask", "turns", "advantages", "versions")}
        chosen = {name: tensor[indices] for name, tensor in named.items()}
        return replace(self, **chosen, valid=None if self.valid is None else self.valid[indices])

    def inputs(self, *, has_turns: bool = True) -> CorrectionInputs:
        return CorrectionInputs(
            train_logprobs=self.train,
            rollout_logprobs=self.rollout,
            response_mask=self.mask,
            logprob_valid=self.valid,
            turn_ids=self.turns if has_turns else None,
            versions_behind=self.versions,
            advantages=self.advantages,
        )

    def packed(self, *, has_turns: bool = True) -> CorrectionInputs:
        """The same sequences without what follows the last response token of each."""
        inside = self.mask.flip(1).cummax(1).values.flip(1)
        offsets = torch.cat((torch.zeros(1, dtype=torch.int64), inside.sum(1).cumsum(0)))
        padded = self.inputs(has_turns=has_turns)
        return CorrectionInputs(
            **{name: tensor[inside] for name, tensor in padded.tensors().items()},
            cu_seqlens=offsets.to(torch.int32),
        )

    def plain(self, *, has_turns: bool = True) -> PlainBatch:
        return PlainBatch(
            train=self.train.tolist(),
            rollout=self.rollout.tolist(),
            mask=self.mask.tolist(),
            valid=None if self.valid is None else self.valid.tolist(),
            turns=self.turns.tolist() if has_turns else None,
            advantages=self.advantages.tolist(),
        )


def random_batch(
    seed: int, *, num_rows: int = 4, width: int = 9, distance: int = 24, unknown_share: float = 0.0
) -> Batch:
    """``distance``: the largest log ratio, in 1/64. About one token in four is none, and one row in six is empty.

    Turns run on over tokens between them, so that they are not the unbroken runs of the mask.
    """
    draw = random.Random(seed)

    def rows(value: object) -> torch.Tensor:
        assert callable(value)
        return torch.tensor([[value() for _ in range(width)] for _ in range(num_rows)]).reshape(num_rows, width)

    rollout = rows(lambda: draw.randint(-4 * GRID, 0) / GRID).double()
    train = rollout + rows(lambda: draw.randint(-distance, distance) / GRID).double()
    mask = rows(lambda: draw.random() < 0.75).bool()
    for row in range(num_rows):
        if draw.random() < 1 / 6:
            mask[row] = False
    steps = rows(lambda: int(draw.random() < 0.3)).long()
    batch = Batch(
        train=train,
        rollout=rollout,
        mask=mask,
        turns=steps.cumsum(1),
        advantages=rows(lambda: draw.randint(-2, 2) / 2).double(),
        versions=rows(lambda: draw.randint(0, 12)).long(),
    )
    if not unknown_share:
        return batch
    wild = [NAN, float("inf"), -float("inf")]
    for tensor in (batch.train, batch.rollout):
        hit = rows(lambda: draw.random() < unknown_share).bool()
        tensor[hit] = torch.tensor([draw.choice(wild) for _ in range(int(hit.sum()))], dtype=torch.float64)
    return replace(batch, valid=rows(lambda: draw.random() >= unknown_share).bool())


def rule_fields(level: Level, estimator: Estimator, aggregation: Aggregation = "sum") -> dict[str, object]:
    """A rule's fields but its action, with the bounds of its estimator; tokens and geometric means have one only."""
    lower, upper = BOUNDS[estimator]
    fields: dict[str, object] = {"level": level, "estimator": estimator, "lower": lower, "upper": upper}
    return fields if level == "token" else {**fields, "aggregation": aggregation}


def random_spec(seed: int, *, batch_normalize: bool | None = None, levels: tuple[Level, ...] = ()) -> CorrectionSpec:
    """Weights of any level, up to three rules, and a veto now and then."""
    draw = random.Random(seed)
    choice: tuple[Level, ...] = levels or ("token", "segment", "sequence", "geometric")
    weight: Level | None = draw.choice([None, *choice])
    rules: list[Rule] = []
    for _ in range(draw.randint(0, 3)):
        action = draw.choice(["reject_token", "reject_sequence", *(["zero_weight", "clip"] if weight else [])])
        level = draw.choice(choice) if action != "clip" else weight
        assert level is not None
        estimator = draw.choice(list(BOUNDS)) if action != "clip" else "ratio"
        fields = rule_fields(
            level, estimator, draw.choice(["sum", "mean"] if level == "geometric" else ["sum", "mean", "max"])
        )
        if action == "clip":
            fields.pop("aggregation", None)
        else:
            fields["when"] = draw.choice(
                ["always", "positive_advantage", "negative_advantage", "not_positive_advantage"]
            )
            fields["reverse"] = draw.random() < 0.3
            fields["clamps_tokens"] = estimator != "prob_diff" and draw.random() < 0.3
        rules.append(Rule.model_validate({**fields, "action": action}))
    normalizes = draw.random() < 0.4 if batch_normalize is None else batch_normalize
    section = RolloutCorrectionConfig.model_validate(
        {
            "rollout_is": weight,
            **({"rollout_is_threshold": draw.choice(["inf", 1.17, "0.87_1.23"])} if weight else {}),
            **({"rollout_is_batch_normalize": normalizes} if weight else {}),
            **({"rollout_token_veto_threshold": 0.77} if draw.random() < 0.3 else {}),
            "rules": rules,
            "nan_policy": draw.choice(["reject", "ratio_one"]),
        }
    )
    return section.spec
