"""NeMo-RL's own values, and those of images and tables, as plain values and back (``plain_values``).

Contract: each is a tuple that begins with ``MARK`` and its kind. A packed tensor comes back with every attribute, an
image with its mode and its pixels, a table with its columns and rows.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from mock_scheduler.errors import BatchError

MARK = "$nemo_rl"
#: Modes of images whose pixels say all.
_MODES = ("1", "L", "LA", "RGB", "RGBA", "CMYK", "I", "F")


def to_plain(value: Any) -> Any:  # noqa: ANN401 - any value of a rollout
    """Return the value with plain ones in the place of those that are not; what it does not know stays as it is.

    Raises:
        BatchError: a tuple begins as those of this module do.
    """
    kind = type(value)
    if kind is dict:
        return {name: to_plain(item) for name, item in value.items()}
    if kind is list:
        return [to_plain(item) for item in value]
    if kind is tuple:
        if value[:1] == (MARK,):
            raise BatchError(f"a tuple begins with {MARK!r}, by which the recording knows values of NeMo-RL")
        return tuple(to_plain(item) for item in value)
    if kind.__name__ == "PackedTensor":
        return (MARK, "packed", dict(vars(value)))
    if kind.__module__.startswith("PIL.") and getattr(value, "mode", None) in _MODES:
        return (MARK, "image", value.mode, tuple(value.size), value.tobytes())
    if kind.__module__.startswith("wandb.") and kind.__name__ == "Table":
        return (MARK, "table", list(value.columns), [list(row) for row in value.data])
    return value


def from_plain(value: Any) -> Any:  # noqa: ANN401 - of to_plain
    """Return the value that was given to ``to_plain``."""
    kind = type(value)
    if kind is dict:
        return {name: from_plain(item) for name, item in value.items()}
    if kind is list:
        return [from_plain(item) for item in value]
    if kind is not tuple:
        return value
    match value:
        case (mark, "packed", dict() as state) if mark == MARK:
            return make_packed_tensor(state)
        case (mark, "image", mode, size, pixels) if mark == MARK:
            return import_module("PIL.Image").frombytes(mode, size, pixels)
        case (mark, "table", columns, rows) if mark == MARK:
            return import_module("wandb").Table(columns=columns, data=rows)
    return tuple(from_plain(item) for item in value)


def make_packed_tensor(state: dict[str, Any]) -> Any:  # noqa: ANN401 - of a class of NeMo-RL
    """Make a packed tensor of the installed NeMo-RL's class with these attributes."""
    kind: Any = import_module("nemo_rl.data.multimodal_utils").PackedTensor
    packed = kind.__new__(kind)
    packed.__dict__.update(state)
    return packed


def make_batch(fields: dict[str, Any]) -> Any:  # noqa: ANN401 - of a class of NeMo-RL
    """Make a batch of the installed NeMo-RL's class."""
    return import_module("nemo_rl.distributed.batched_data_dict").BatchedDataDict(fields)


def make_gym_result(**fields: Any) -> Any:  # noqa: ANN401 - of a class of NeMo-RL
    """Make what NeMo-RL's function for NeMo Gym returns."""
    return import_module("nemo_rl.experience.rollouts").NemoGymRolloutResult(**fields)
