"""Evaluations of slime's family as a rollout batch and back: a group for each dataset, a trajectory for each sample.

An evaluation is a mapping of datasets' names to ``{"samples": [...], "rewards": [...], ...}``, as the family's
``RolloutFnEvalOutput.data`` holds it. Contract: ``decode(encode(data))`` is the same mapping, every value bit for bit,
in the same order; a sample's own group and index are kept, and say nothing about its row, since each dataset counts
its samples anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from mock_scheduler.adapters.plain_values import pack, unpack
from mock_scheduler.adapters.slime.codec import SlimeCodec
from mock_scheduler.batch import RolloutBatch
from mock_scheduler.errors import BatchError
from mock_scheduler.scheduler import RolloutRequest
from mock_scheduler.support.digests import JSON

_KEY = "slime_evaluation"
_SAMPLES = "samples"


class FamilyCodec:
    """A ``BatchCodec`` of rollouts (nested lists of samples) and of evaluations (mappings of datasets).

    Args:
        train: of rollouts.
        val: of the samples of an evaluation.
    """

    def __init__(self, train: SlimeCodec, val: SlimeCodec) -> None:
        self._train, self._val = train, val

    def encode(self, native: Any, request: RolloutRequest) -> RolloutBatch:  # noqa: ANN401 - by the request's mode
        """Give the batch.

        Raises:
            BatchError: a sample contradicts itself or cannot be kept; or an evaluation has no sample.
        """
        if request.mode == "train":
            return self._train.encode(native, request)
        if not has_samples(native):
            raise BatchError(
                "an evaluation without samples cannot be recorded; expected data of {dataset: {'samples': [...], ...}}."
                " Set record_evaluation: false where its function keeps no samples"
            )
        datasets: Mapping[str, Mapping[str, Any]] = native
        rest = {
            name: {key: value for key, value in about.items() if key != _SAMPLES} for name, about in datasets.items()
        }
        packed, data = pack(rest, "an evaluation")
        meta: dict[str, JSON] = {
            _KEY: {"rest": packed, "bytes": data.hex(), "orders": [list(about) for about in datasets.values()]}
        }
        samples = [about[_SAMPLES] for about in datasets.values()]
        return self._val.build(samples, version=request.policy_version, by_place=True, meta=meta)

    def decode(self, batch: RolloutBatch) -> Any:  # noqa: ANN401 - what the batch was made of
        """Give the samples' fields in their nesting, of an evaluation within their datasets."""
        about = batch.meta.get(_KEY)
        if about is None:
            return self._train.decode(batch)
        stored = cast("Mapping[str, Any]", about)
        rest = cast("Mapping[str, Mapping[str, Any]]", unpack(stored["rest"], bytes.fromhex(str(stored["bytes"]))))
        samples = self._val.decode(batch)
        return {
            name: {key: samples[place] if key == _SAMPLES else rest[name][key] for key in order}
            for place, (name, order) in enumerate(zip(rest, stored["orders"], strict=True))
        }

    def count_problems(self, batch: RolloutBatch, request: RolloutRequest) -> Sequence[str]:
        """List nothing: nobody but the evaluation's function knows how many samples it has."""
        return []


def has_samples(datasets: object) -> bool:
    """Whether these are mappings of samples by dataset, of which there is at least one."""
    if not isinstance(datasets, Mapping):
        return False
    return all(
        isinstance(name, str) and isinstance(about, Mapping) and isinstance(about.get(_SAMPLES), list)
        for name, about in datasets.items()
    ) and any(about[_SAMPLES] for about in datasets.values())
