"""The micro-batches that prime-rl's filesystem transport leaves: ``rollouts/step_{N}/rank_{R}.bin``, MessagePack.

Contract: a file is a list of micro-batches, each a list of fields in a fixed order; a micro-batch packs samples one
after another, whose lengths it says. A sample becomes a row: tokens, mask, log-probabilities and every stream per token
as it is. What prime-rl leaves out of it (rewards, groups) is not made up: rewards are 0, and each row is a group.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mock_scheduler.adapters.imports.msgpack import MessagePackError, read_msgpack
from mock_scheduler.adapters.imports.steps import ForeignStep, ImportOptions, find_files
from mock_scheduler.adapters.rows import ForeignRow, build_batch, experts_are_usable
from mock_scheduler.batch import SamplingParams
from mock_scheduler.errors import BatchError, ForeignFileError
from mock_scheduler.scheduler import DEFAULT_SCHEDULER_ID
from mock_scheduler.support.foreign_files import read_bytes

_PATTERN = r"(?:[^/]*/)*step_(\d+)/rank_(\d+)\.bin"
_MAX_BYTES = 16 * 2**30
#: The fields of ``MicroBatch`` in their order (prime-rl 0.8.0); those behind ``seq_lens`` may be left out.
_FIELDS = (
    *("input_ids", "loss_mask", "advantages", "inference_logprobs", "position_ids", "sequence_lengths"),
    *("temperatures", "env_names", "seq_lens", "ref_logprobs", "routed_experts", "mm_kwargs", "mm_token_type_ids"),
    *("rl_weights", "ce_weights", "ref_kl_weights"),
)
_NUM_NEEDED = 9
_BY_TOKEN = frozenset(
    {
        *("input_ids", "loss_mask", "advantages", "inference_logprobs", "position_ids", "temperatures"),
        *("ref_logprobs", "mm_token_type_ids", "rl_weights", "ce_weights", "ref_kl_weights"),
    }
)


def read_rollouts(source: Path, options: ImportOptions) -> Iterator[ForeignStep]:
    """Reads the steps of files, the ranks of each joined in order; raises as the other readers."""
    inside = source if source.is_dir() else None
    found = find_files(source, _PATTERN, "rollouts/step_0/rank_0.bin")
    for name, files in groupby(found, key=lambda file: file.parts[0]):
        samples = [
            sample
            for file in files
            for number, batch in enumerate(_load(file.path, inside))
            for sample in _unpack(batch, f"{file.path}, micro-batch {number}", rank=int(file.parts[1]), number=number)
        ]
        yield _build_step(samples, int(name), options, f"{source}, step {name}")


def _load(path: Path, inside: Path | None) -> list[Any]:
    try:
        content = read_msgpack(read_bytes(path, max_bytes=_MAX_BYTES, inside=inside, what="a file of micro-batches"))
    except MessagePackError as error:
        raise ForeignFileError(f"{path} {error}") from error
    if not isinstance(content, list) or not all(isinstance(item, list) for item in content):
        raise ForeignFileError(f"{path} is no list of micro-batches")
    return content


def _unpack(batch: list[Any], where: str, *, rank: int, number: int) -> Iterator[dict[str, Any]]:
    """The samples that a micro-batch packs."""
    if not _NUM_NEEDED <= len(batch) <= len(_FIELDS):
        raise BatchError(f"{where} has {len(batch)} fields; prime-rl 0.8.0 writes {_NUM_NEEDED} to {len(_FIELDS)}")
    fields = {name: value for name, value in zip(_FIELDS, batch, strict=False) if value is not None}
    if fields.get("mm_kwargs"):
        raise BatchError(f"{where} has multimodal inputs of all its samples together, which are not taken apart")
    total, lengths = len(fields["input_ids"]), fields["seq_lens"]
    for name in _BY_TOKEN & fields.keys():
        if not isinstance(fields[name], list) or len(fields[name]) != total:
            raise BatchError(f"{where}: {name} has other than {total} entries, one for each token")
    if any(type(length) is not int or length < 0 for length in lengths) or sum(lengths) > total:
        raise BatchError(f"{where}: seq_lens is {lengths[:8]}, of {total} tokens")
    experts = _read_experts(fields.pop("routed_experts", None), where)
    names = fields["env_names"] if isinstance(fields["env_names"], list) else []
    start = 0
    for index, length in enumerate(lengths):
        place = slice(start, start + length)
        start += length
        if length == 0:
            continue
        own = {name: value[place] for name, value in fields.items() if name in _BY_TOKEN}
        # One name for each sample, or for each token, as releases have it.
        name = names[index] if len(names) == len(lengths) else names[place.start] if len(names) == total else ""
        yield {
            **own,
            "env_name": str(name),
            "rank": rank,
            "micro_batch": number,
            "index": index,
            **({} if experts is None or len(experts) < place.stop else {"experts": experts[place]}),
        }


def _read_experts(stated: Any, where: str) -> npt.NDArray[Any] | None:  # noqa: ANN401 - of a file
    if stated is None:
        return None
    data, shape, name = stated if isinstance(stated, list) and len(stated) == 3 else (None, None, None)
    if name not in ("uint8", "int16", "int32") or not isinstance(data, bytes) or not isinstance(shape, list):
        raise BatchError(f"{where}: routed_experts is {str(stated)[:60]}; expected bytes, a shape and a dtype")
    is_shape = all(type(size) is int and size >= 0 for size in shape)
    if not is_shape or math.prod(shape) * np.dtype(name).itemsize != len(data):
        raise BatchError(f"{where}: routed_experts is {name} {shape} of {len(data)} bytes")
    return np.frombuffer(data, dtype=name).reshape(shape)


def _build_step(samples: Sequence[Mapping[str, Any]], step: int, options: ImportOptions, where: str) -> ForeignStep:
    if not samples:
        raise BatchError(f"{where} holds no sample")
    sampled = {
        float(temperature)
        for sample in samples
        for temperature, flag in zip(sample["temperatures"], sample["loss_mask"], strict=True)
        if flag
    }
    sampling, assumed = options.sampling, options.assumed
    if len(sampled) == 1 and "temperature" not in options.stated:
        sampling = SamplingParams(
            temperature=sampled.pop(),
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            logprobs_mode=sampling.logprobs_mode,
        )
        assumed = tuple(name for name in assumed if name != "sampling.temperature")
    rows = [_read_row(sample, number) for number, sample in enumerate(samples)]
    batch = build_batch(
        rows,
        sampling=sampling,
        scheduler_id=DEFAULT_SCHEDULER_ID,
        meta={},
        identity_fields=("rank", "micro_batch", "index"),
    )
    lacks = (*assumed, "rewards", "groups", "policy_versions", "terminations")
    return ForeignStep(step=step, batch=batch, lacks=lacks).noted()


def _read_row(sample: Mapping[str, Any], number: int) -> ForeignRow:
    mask = np.array(sample["loss_mask"], dtype=np.bool_)
    first = int(mask.argmax()) if mask.any() else len(mask)
    experts = sample.get("experts")
    native = {name: value for name, value in sample.items() if name != "experts"}
    return ForeignRow(
        tokens=np.array(sample["input_ids"], dtype=np.int32),
        response_mask=mask,
        rollout_logprobs=np.array(sample["inference_logprobs"], dtype=np.float32)[mask],
        group=number,
        member=0,
        prompt_length=first,
        tag=sample["env_name"],
        native=native if experts is None else {**native, "routed_experts": experts},
        routed_experts=experts if experts_are_usable(experts, len(mask)) else None,
    )
