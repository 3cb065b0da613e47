"""Attaches the instruments to a training on Megatron-core: ``from mock_scheduler import megatron``.

Importing this imports neither torch nor Megatron; ``megatron.attach`` does, when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mock_scheduler.megatron.attached.attach import attach
    from mock_scheduler.megatron.attached.handle import TrainingHandle

__all__ = ["TrainingHandle", "attach"]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - whatever the name stands for
    # Imported here, since torch and Megatron read the environment when they are imported.
    if name == "attach":
        from mock_scheduler.megatron.attached.attach import attach

        return attach
    if name == "TrainingHandle":
        from mock_scheduler.megatron.attached.handle import TrainingHandle

        return TrainingHandle
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
