"""Reads the core fields that one turn of a rollout of megatron/rl says: for the codec, and for readers of its files.

A turn holds the whole conversation before it, and is a row. Contract: what the core fields cannot hold exactly is told
apart (``Turn.is_core``), so that the turn's own is kept beside them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mock_scheduler.adapters.token_lists import INT32_MAX, LARGEST_FLOAT32
from mock_scheduler.batch import Termination
from mock_scheduler.errors import BatchError

_ENDED = ("ok", "graded")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Turn:
    """Holds one turn. ``tokens`` int32 and ``mask`` bool ``[T]``, at least one; ``logprobs`` float32 ``[R]``.

    ``is_core``: which of ``trajectory``, ``generation_mask`` and ``logprobs`` these say exactly.
    """

    tokens: npt.NDArray[np.int32]
    mask: npt.NDArray[np.bool_]
    logprobs: npt.NDArray[np.float32]
    is_core: Mapping[str, bool]

    @property
    def prompt_length(self) -> int:
        """Counts the tokens before the first that was sampled."""
        return int(self.mask.argmax()) if self.mask.any() else len(self.mask)


def read_turn(tokens: Any, mask: object, logprobs: object) -> Turn:  # noqa: ANN401 - lists, arrays or tensors
    """Reads one turn; lists, arrays and one-dimensional tensors are read alike.

    A turn without tokens, as that of an episode that failed, and one of text get one placeholder. Without a mask no
    token counts as sampled; without log-probabilities, or where one is no number, they are 0.

    Raises:
        BatchError: its parts contradict each other.
    """
    if tokens is None or isinstance(tokens, str) or not len(tokens):
        return _placeholder()
    ids = _as_array(tokens, "trajectory", kinds="iu").astype(np.int64)
    if ids.min() < 0 or ids.max() > INT32_MAX:
        raise BatchError(f"token ids lie from {ids.min()} to {ids.max()}; expected 0 to {INT32_MAX}")
    sampled = (
        np.zeros(len(ids), dtype=np.bool_) if mask is None else _as_array(mask, "generation_mask").astype(np.bool_)
    )
    if len(sampled) != len(ids):
        raise BatchError(f"generation_mask has {len(sampled)} entries, and the turn has {len(ids)} tokens")
    num_sampled = int(sampled.sum())
    stated = np.zeros(0) if logprobs is None else _as_array(logprobs, "logprobs").astype(np.float64)
    # The last token of a conversation may be masked without a log-probability: the engine had ended.
    if logprobs is not None and mask is not None and num_sampled - len(stated) not in (0, 1):
        raise BatchError(f"{num_sampled} tokens were sampled, and {len(stated)} have a log-probability")
    kept = np.zeros(num_sampled, dtype=np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = stated.astype(np.float32)[:num_sampled]
    kept[: len(rounded)] = np.where(np.isfinite(rounded), rounded, np.float32(0))
    return Turn(
        tokens=ids.astype(np.int32),
        mask=sampled,
        logprobs=kept,
        is_core={
            "trajectory": _is_list_of(tokens, int),
            "generation_mask": _is_list_of(mask, bool),
            "logprobs": _is_list_of(logprobs, float) and stated.tobytes() == kept.astype(np.float64).tobytes(),
        },
    )


def read_versions(turn: Turn, epochs: object, version: int) -> int | list[int]:
    """Reads the policy version of each sampled token: of the bounds ``(first token, epoch)``, as Megatron states them.

    ``version`` where it states none, or one that is newer than the trainer's.
    """
    bounds = [(int(start), int(epoch)) for start, epoch in epochs] if isinstance(epochs, Sequence) else []
    if not bounds or any(not 0 <= epoch <= version for _, epoch in bounds):
        return version
    starts = np.array([start for start, _ in bounds])
    places = np.searchsorted(starts, np.flatnonzero(turn.mask), side="right") - 1
    return [bounds[max(int(place), 0)][1] for place in places]


def read_reward(reward: object, turn: int, num_turns: int) -> float:
    """Reads the reward of a turn: its own of a list, else that of the rollout, which belongs to its last turn."""
    if isinstance(reward, Sequence) and not isinstance(reward, str):
        own = reward[turn] if turn < len(reward) else 0.0
    else:
        own = reward if turn + 1 == num_turns else 0.0
    number = float(own) if isinstance(own, int | float) else 0.0
    return number if abs(number) <= LARGEST_FLOAT32 else 0.0


def read_termination(status: object) -> Termination:
    """Reads how a rollout ended; earlier releases of Megatron-LM state nothing, and keep those alone that did end."""
    return Termination.TERMINATED if status is None or status in _ENDED else Termination.ABORTED


def _placeholder() -> Turn:
    return Turn(
        tokens=np.zeros(1, dtype=np.int32),
        mask=np.zeros(1, dtype=np.bool_),
        logprobs=np.zeros(0, dtype=np.float32),
        is_core=dict.fromkeys(("trajectory", "generation_mask", "logprobs"), False),
    )


def _as_array(values: Any, name: str, *, kinds: str = "biuf") -> npt.NDArray[Any]:  # noqa: ANN401 - of numbers
    plain = values.detach().cpu().tolist() if isinstance(values, torch.Tensor) else values
    try:
        array = np.asarray(plain)
    except ValueError as error:  # lists of other lengths within
        raise BatchError(f"{name} of a turn is no list of numbers: {error}") from error
    if array.ndim == 1 and not array.size:
        return np.zeros(0)
    if array.ndim != 1 or array.dtype.kind not in kinds:
        raise BatchError(f"{name} of a turn is of {array.dtype} {list(array.shape)}; expected a list of numbers")
    return array


def _is_list_of(values: object, kind: type) -> bool:
    return type(values) is list and set(map(type, values)) <= {kind}
