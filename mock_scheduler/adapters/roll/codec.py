"""ROLL's ``DataProto`` as a rollout batch and back, bit for bit.

Contract: tensors, arrays and ``meta_info`` are kept by ``PaddedCodec``, in the layout of the agentic pipeline or, where
a batch has its fields, of RLVR. The ``DataProto`` is one whose data are in this process. Times are not kept, since
those of no two rollouts are equal: ``LEFT_AT`` of the meta, and its metrics ``time/…``.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, TypeAlias

import numpy as np
import torch

from mock_scheduler.adapters.padded import ROLL_AGENTIC, ROLL_RLVR, PaddedCodec
from mock_scheduler.batch import RolloutBatch, SamplingParams
from mock_scheduler.errors import BatchError
from mock_scheduler.scheduler import RolloutRequest

#: ROLL's own class, whose data are ``batch``, ``non_tensor_batch`` and ``meta_info``.
DataProto: TypeAlias = Any
_META = "meta_info"
#: When the batch left its scheduler, by which the pipeline measures the way.
LEFT_AT = "get_batch_return_start_time"


class RollCodec:
    """A ``BatchCodec`` of ``DataProto``; ``sampling``: how tokens are sampled."""

    def __init__(self, *, sampling: SamplingParams) -> None:
        self._sampling = sampling

    def encode(self, native: DataProto, request: RolloutRequest) -> RolloutBatch:
        """Return the batch; the ``DataProto`` stays as it was. Raises ``BatchError`` as ``PaddedCodec`` does."""
        fields = read_fields(native)
        layout = ROLL_RLVR if "prompts" in fields and "prompt_id" in fields else ROLL_AGENTIC
        codec = PaddedCodec(layout, sampling=self._sampling, scheduler_id=request.scheduler_id)
        return codec.encode(fields, request)

    def decode(self, batch: RolloutBatch) -> DataProto:
        """Return a ``DataProto`` of the installed ROLL's class; raises ``BatchError`` where another codec recorded."""
        fields = PaddedCodec(ROLL_AGENTIC, sampling=batch.sampling).decode(batch)
        meta = fields.pop(_META, {})
        tensors = {name: value for name, value in fields.items() if isinstance(value, torch.Tensor)}
        arrays = {name: value for name, value in fields.items() if name not in tensors}
        return make_data_proto(tensors, arrays, meta)


def read_fields(native: DataProto) -> dict[str, Any]:
    """Return all fields of a ``DataProto`` in one mapping; raises ``BatchError`` where its data are elsewhere."""
    if not all(hasattr(native, name) for name in ("batch", "non_tensor_batch", _META)):
        raise BatchError(f"the rollout is a {type(native).__name__}; expected ROLL's DataProto")
    own = vars(native)
    if own.get("_remote_batch") is not None:
        raise BatchError("the DataProto has data in ROLL's transfer backend; expected them in this process")
    # Releases before the transfer backend have the data themselves where later ones have views of them.
    tensors, arrays = own.get("_batch", own.get("batch")), own.get("_non_tensor_batch", own.get("non_tensor_batch"))
    return {
        **(dict(tensors.items()) if tensors is not None else {}),
        **(arrays or {}),
        _META: _without_times(native.meta_info),
    }


def _without_times(meta: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in meta.items() if name != LEFT_AT}
    metrics = kept.get("metrics")
    if isinstance(metrics, dict):
        kept["metrics"] = {name: value for name, value in metrics.items() if not str(name).startswith("time/")}
    return kept


def make_data_proto(
    tensors: Mapping[str, torch.Tensor], arrays: Mapping[str, np.ndarray[Any, Any]], meta: Mapping[str, Any]
) -> DataProto:
    """Make a ``DataProto`` of the installed ROLL's class."""
    protocol: Any = import_module("roll.distributed.scheduler.protocol")
    tensordict: Any = import_module("tensordict")
    count = len(next(iter(tensors.values())))
    return protocol.DataProto(
        batch=tensordict.TensorDict(dict(tensors), batch_size=[count]),
        non_tensor_batch=dict(arrays),
        meta_info=dict(meta),
    )
