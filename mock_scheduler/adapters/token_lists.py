"""The core fields of one row whose framework says a value for each token of its response.

Contract: a value that the row states and no core field can hold exactly is told apart, so that the row's own is kept
beside it.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch

from mock_scheduler.batch import RolloutBatch
from mock_scheduler.errors import BatchError

INT32_MAX = 2**31 - 1
LARGEST_FLOAT32 = float(np.finfo(np.float32).max)

_KINDS = (list, torch.Tensor, np.ndarray)
_Mask = npt.NDArray[np.bool_]


def check_tokens(tokens: object, name: str) -> list[int]:
    """Returns the ids of a row's tokens; raises ``BatchError`` where they are none."""
    if not isinstance(tokens, list) or not set(map(type, tokens)) <= {int}:
        kinds = sorted({type(token).__name__ for token in tokens}) if isinstance(tokens, list) else []
        found = f"has values of {', '.join(kinds)}" if kinds else f"is a {type(tokens).__name__}"
        raise BatchError(f"{name} {found}; expected a list of ints")
    if tokens and not 0 <= min(tokens) <= max(tokens) <= INT32_MAX:
        raise BatchError(f"token ids lie from {min(tokens)} to {max(tokens)}; expected 0 to {INT32_MAX}")
    return tokens


def read_mask(stated: object, length: int, name: str = "loss_mask") -> tuple[_Mask, bool]:
    """Reads the mask of the response, and whether the core fields say the row's own exactly."""
    if stated is None:
        return np.ones(length, dtype=np.bool_), False
    if not isinstance(stated, _KINDS) or len(stated) != length:
        found = len(stated) if isinstance(stated, _KINDS) else stated
        raise BatchError(f"{name} has {found} entries, and the response has {length} tokens")
    is_exact = isinstance(stated, list) and set(map(type, stated)) <= {int} and set(stated) <= {0, 1}
    return np.array([bool(item) for item in stated], dtype=np.bool_), is_exact


def read_logprobs(stated: object, mask: _Mask, name: str) -> tuple[npt.NDArray[np.float32], bool]:
    """Reads the log-probabilities of sampled tokens, 0 where none are stated, and whether they are all there is.

    An engine answers in decimal digits, so most are no float32; the row's own are kept beside them then.
    """
    if stated is None:
        return np.zeros(int(mask.sum()), dtype=np.float32), False
    if not isinstance(stated, _KINDS) or len(stated) != len(mask):
        found = len(stated) if isinstance(stated, _KINDS) else stated
        raise BatchError(f"{name} has {found} entries, and the response has {len(mask)} tokens")
    numbers = (
        stated.detach().double().cpu().numpy()
        if isinstance(stated, torch.Tensor)
        else np.array(stated, dtype=np.float64)
    )
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = numbers.astype(np.float32)
    if not np.isfinite(rounded[mask]).all():
        raise BatchError(f"{name} is not finite: {rounded[mask][~np.isfinite(rounded[mask])][:3].tolist()}")
    others = numbers[~mask]
    is_exact = (
        isinstance(stated, list)
        and set(map(type, stated)) <= {float}
        and numbers.tobytes() == rounded.astype(np.float64).tobytes()
        and others.tobytes() == bytes(others.nbytes)
    )
    return rounded[mask], is_exact


def read_reward(stated: object) -> float:
    """Reads a reward, or the sum of those of tokens, where a batch may hold it; else 0: the row's own is kept beside
    it."""
    try:
        value = math.fsum(map(float, stated)) if isinstance(stated, list) else stated
    except (ValueError, OverflowError):  # both infinities, or a sum beyond a float
        return 0.0
    number = float(value) if isinstance(value, int | float | np.number) else math.nan
    return number if abs(number) <= LARGEST_FLOAT32 else 0.0


def select_support(
    ids: npt.NDArray[np.int64], starts: npt.NDArray[np.int64], tokens: npt.NDArray[np.int64], mask: _Mask
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]] | None:
    """Reads ids and offsets for sampled tokens alone: those of the others are cut out.

    ``ids``, ``starts``: of each token of the response, whose ids are ``tokens``. None where a sampled token is none of
    its own support, or an id cannot be kept.
    """
    sizes = np.diff(starts)
    of_token = np.repeat(np.arange(len(mask)), sizes)
    hits = np.bincount(of_token[ids == tokens[of_token]], minlength=len(mask))
    is_inside = ids.min(initial=0) >= 0 and ids.max(initial=0) <= INT32_MAX
    if ((sizes > 0) & (hits == 0) & mask).any() or not is_inside:
        return None
    return ids[mask[of_token]], np.concatenate([[0], sizes[mask].cumsum()])


def spread_logprobs(batch: RolloutBatch, place: int, mask: torch.Tensor) -> list[float]:
    """Returns the log-probabilities of a row's response, 0 where its token was not sampled."""
    bounds = batch.response_offsets
    spread = torch.zeros(len(mask), dtype=torch.float64)
    spread[mask] = batch.rollout_logprobs[bounds[place] : bounds[place + 1]].double()
    return spread.tolist()
