"""A data source and two real rollout functions, in the forms of slime and of miles."""

from __future__ import annotations

import copy
import random
from typing import Any

from tests.adapters.slime.family.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
from tests.adapters.slime.samples import Sample

#: Rollouts played, evaluations played, functions made.
calls: list[str] = []


class DataSource:
    """Prompts in epochs, with the attributes of ``RolloutDataSource``."""

    def __init__(self, size: int = 5, group: int = 2) -> None:
        self.epoch_id = self.sample_offset = self.sample_group_index = self.sample_index = 0
        self._prompts = [Sample(prompt=f"p{number}", tokens=[number, number + 1]) for number in range(size)]
        self._group = group

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        groups = []
        for _ in range(num_samples):
            if self.sample_offset == len(self._prompts):
                self.epoch_id, self.sample_offset = self.epoch_id + 1, 0
            group = [copy.deepcopy(self._prompts[self.sample_offset]) for _ in range(self._group)]
            self.sample_offset += 1
            for sample in group:
                sample.group_index, sample.index = self.sample_group_index, self.sample_index
                self.sample_index += 1
            self.sample_group_index += 1
            groups.append(group)
        return groups


def play(args: Any, rollout_id: int, data_source: DataSource, evaluation: bool = False, version: str = "1") -> Any:
    """Draws twice as many groups as it gives, as over-sampling does."""
    calls.append(f"{'eval' if evaluation else 'train'} {rollout_id}")
    if evaluation:
        return RolloutFnEvalOutput(data=evaluate(args, rollout_id), metrics={"eval/seconds": 0.5})
    draw = random.Random(rollout_id)
    groups = data_source.get_samples(2 * args.rollout_batch_size)[: args.rollout_batch_size]
    for sample in (sample for group in groups for sample in group):
        sample.response_length = draw.randint(0, 4)
        sample.tokens += [draw.randrange(100) for _ in range(sample.response_length)]
        sample.rollout_log_probs = [-draw.random() for _ in range(sample.response_length)]
        sample.reward, sample.status = draw.random(), Sample.Status.COMPLETED
        sample.weight_versions = [version]
    return RolloutFnTrainOutput(samples=groups, metrics={"rollout/seconds": 1.5, "rollout/name": "x"})


def evaluate(args: Any, rollout_id: int) -> dict[str, Any]:
    """Two datasets whose samples have the same numbers, and one of none, as slime's own evaluation gives them."""
    found = {}
    for name, num_samples in getattr(args, "eval_datasets", {"gsm": 3, "none": 0, "math": 2}).items():
        draw = random.Random(f"{name} {rollout_id}")
        samples = [
            Sample(
                index=number,
                tokens=[1, 2, draw.randrange(100)],
                response_length=1,
                rollout_log_probs=[-draw.random()],
                reward={"acc": draw.random()},
                status=draw.choice([Sample.Status.COMPLETED, Sample.Status.TRUNCATED]),
            )
            for number in range(num_samples)
        ]
        found[name] = {
            "rewards": [sample.reward["acc"] for sample in samples],
            "truncated": [sample.status == Sample.Status.TRUNCATED for sample in samples],
            "samples": samples,
        }
    return found


class Playing:
    """The class form."""

    def __init__(self, input: Any) -> None:
        calls.append("made")
        self._args, self._data_source = input.args, input.data_source

    def __call__(self, input: Any) -> Any:
        return play(self._args, input.rollout_id, self._data_source, input.evaluation, str(input.weight_version))
