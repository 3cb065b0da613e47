"""Attaches the instruments to a training on Megatron-core: ``from mock_scheduler import megatron``.

Importing this imports neither torch nor Megatron; ``megatron.attach`` does, when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mock_scheduler.megatron.attached import TrainingHandle
    from mock_scheduler.megatron.attached.attach import attach
    from mock_scheduler.megatron.training_loops import AttachCallback, attach_to_pretrain

__all__ = ["AttachCallback", "TrainingHandle", "attach", "attach_to_pretrain"]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - whatever the name stands for
    # Imported here, since torch and Megatron read the environment when they are imported.
    if name == "attach":
        from mock_scheduler.megatron.attached.attach import attach

        return attach
    if name == "attach_to_pretrain":
        from mock_scheduler.megatron.training_loops import attach_to_pretrain

        return attach_to_pretrain
    if name == "AttachCallback":
        from mock_scheduler.megatron.training_loops import AttachCallback

        return AttachCallback
    if name == "TrainingHandle":
        from mock_scheduler.megatron.attached import TrainingHandle

        return TrainingHandle
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
