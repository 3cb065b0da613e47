"""The message log of one row, in which each message has its own tokens, as the row's core fields and back.

Contract: what the core fields say exactly is not kept beside them. Sampled tokens are those of the messages that
NeMo-RL trains on: of the assistant, with ``generation_logprobs``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mock_scheduler.adapters.nemo_rl.values import MARK, from_plain, to_plain
from mock_scheduler.adapters.token_lists import INT32_MAX
from mock_scheduler.errors import BatchError

_TOKENS, _LOGPROBS, _EXPERTS = "token_ids", "generation_logprobs", "routed_experts"
_CORE = "core"

#: A message: role, content, and tensors of its tokens.
Message = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MessageLog:
    """What a row's messages say. ``tokens`` int64 ``[T]``, ``mask`` bool ``[T]``, ``logprobs`` float32 ``[R]``;
    ``prompt_length``: tokens before the first sampled message; ``messages``: with marks for what is in these fields.

    ``experts``: integers ``[T, layers, topk]`` where every message has them in one form, else None.
    """

    tokens: npt.NDArray[np.int64]
    mask: npt.NDArray[np.bool_]
    logprobs: npt.NDArray[np.float32]
    prompt_length: int
    messages: list[dict[str, Any]]
    experts: torch.Tensor | None


def take_apart(log: Sequence[Message]) -> MessageLog:
    """Read the messages of a row; they stay as they were.

    Raises:
        BatchError: a message has tokens or log-probabilities that cannot be kept.
    """
    if not isinstance(log, list) or not all(isinstance(message, dict) for message in log):
        raise BatchError(f"message_log is a {type(log).__name__}; expected a list of messages")
    experts = _join_experts(log)
    tokens, mask, logprobs, messages = [], [], [], []
    for place, message in enumerate(log):
        where = f"message {place}"
        ids, is_exact = _read_tokens(message.get(_TOKENS), where)
        own = {
            name: (MARK, _CORE, len(ids)) if _is_core(name, is_exact, experts) else to_plain(value)
            for name, value in message.items()
        }
        is_sampled = message.get("role") == "assistant" and _LOGPROBS in message
        if is_sampled:
            values, is_exact = _read_logprobs(message[_LOGPROBS], len(ids), where)
            logprobs.append(values)
            if is_exact:
                own[_LOGPROBS] = (MARK, _CORE, len(ids))
        tokens.append(ids)
        mask.append(np.full(len(ids), is_sampled))
        messages.append(own)
    joined = np.concatenate([*mask, np.empty(0, dtype=np.bool_)])
    return MessageLog(
        tokens=np.concatenate([*tokens, np.empty(0, dtype=np.int64)]),
        mask=joined,
        logprobs=np.concatenate([*logprobs, np.empty(0, dtype=np.float32)]),
        prompt_length=int(joined.argmax()) if joined.any() else len(joined),
        messages=messages,
        experts=experts,
    )


def put_together(
    messages: Sequence[Message], tokens: torch.Tensor, logprobs: torch.Tensor, experts: torch.Tensor | None
) -> list[dict[str, Any]]:
    """Return the messages of a row.

    Args:
        messages: of ``take_apart``.
        tokens: int32 ``[T]``; logprobs: float32 ``[R]``; experts: as ``MessageLog`` has them.
    """
    log, start, sampled = [], 0, 0
    for message in messages:
        stop = start + _count_tokens(message)
        own = {}
        for name, value in message.items():
            if type(value) is not tuple or value[:2] != (MARK, _CORE):
                own[name] = from_plain(value)
            elif name == _TOKENS:
                own[name] = tokens[start:stop].long()
            elif name == _LOGPROBS:
                own[name] = logprobs[sampled : sampled + stop - start].clone()
            else:
                assert experts is not None  # a mark of experts is made where there are some
                own[name] = experts[start:stop].clone()
        if message.get("role") == "assistant" and _LOGPROBS in message:
            sampled += stop - start
        start = stop
        log.append(own)
    return log


def _is_core(name: str, is_exact: bool, experts: torch.Tensor | None) -> bool:
    return (name == _TOKENS and is_exact) or (name == _EXPERTS and experts is not None)


def _count_tokens(message: Message) -> int:
    stated = message.get(_TOKENS)
    return int(stated[2]) if isinstance(stated, tuple) else 0 if stated is None else len(stated)


def _read_tokens(stated: object, where: str) -> tuple[npt.NDArray[np.int64], bool]:
    """The tokens of a message, and whether they are all that its tensor says."""
    if stated is None:
        return np.empty(0, dtype=np.int64), False
    if not isinstance(stated, torch.Tensor) or stated.dim() != 1:
        found = list(stated.shape) if isinstance(stated, torch.Tensor) else type(stated).__name__
        raise BatchError(f"{where}: {_TOKENS} is {found}; expected a tensor [T]")
    # The tensor of an empty list is of floats.
    if len(stated) and (stated.is_floating_point() or stated.is_complex() or stated.dtype == torch.bool):
        raise BatchError(f"{where}: {_TOKENS} is of {stated.dtype}; expected whole numbers")
    ids = stated.detach().cpu().to(torch.int64).numpy()
    if len(ids) and not 0 <= ids.min() <= ids.max() <= INT32_MAX:
        raise BatchError(f"{where}: token ids lie from {ids.min()} to {ids.max()}; expected 0 to {INT32_MAX}")
    return ids, stated.dtype == torch.int64


def _read_logprobs(stated: object, length: int, where: str) -> tuple[npt.NDArray[np.float32], bool]:
    if not isinstance(stated, torch.Tensor) or stated.shape != (length,):
        found = list(stated.shape) if isinstance(stated, torch.Tensor) else type(stated).__name__
        raise BatchError(f"{where}: {_LOGPROBS} is {found}; expected a tensor [{length}], as its tokens")
    rounded = stated.detach().cpu().to(torch.float32).numpy()
    if not np.isfinite(rounded).all():
        raise BatchError(f"{where}: {_LOGPROBS} is not finite: {rounded[~np.isfinite(rounded)][:3].tolist()}")
    return rounded, stated.dtype == torch.float32


def _join_experts(log: Sequence[Message]) -> torch.Tensor | None:
    """The experts of all tokens, where every message has those of its own tokens in one form."""
    found = [message.get(_EXPERTS) for message in log]
    tensors = [item for item in found if isinstance(item, torch.Tensor) and item.dim() == 3]
    if not tensors or len(tensors) < len(log) or len({(item.dtype, item.shape[1:]) for item in tensors}) > 1:
        return None
    lengths = [len(message[_TOKENS]) if isinstance(message.get(_TOKENS), torch.Tensor) else 0 for message in log]
    return torch.cat(tensors) if [len(item) for item in tensors] == lengths else None
