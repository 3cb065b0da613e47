"""The weights of a Trainer of transformers, traced through its own callbacks, by the model's own names.

It serves every trainer of TRL: each is a ``Trainer`` of transformers, which is imported when a callback is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mock_scheduler.adapters.trl.description import TrlObject
from mock_scheduler.config.instruments import TraceConfig
from mock_scheduler.plain_torch.tracing import TorchTracing, trace_training


def trace_callback(trace_dir: str | Path, trace: TraceConfig | Mapping[str, Any] | None = None) -> TrlObject:
    """Make a ``TrainerCallback`` that traces each update to ``trace_dir``.

    Step numbers are the trainer's: the update that leads from global step 3 to 4 is step 3. ``trace``: as
    ``trace_training`` has it.
    """
    from transformers import TrainerCallback

    class TraceCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not there where types are checked
        """Begins with the training, and ends with it."""

        def __init__(self) -> None:
            self._tracing: TorchTracing | None = None

        def on_train_begin(self, args: TrlObject, state: TrlObject, control: TrlObject, **given: TrlObject) -> None:
            self._tracing = trace_training(
                given["model"], given["optimizer"], trace_dir=trace_dir, trace=trace, first_step=state.global_step
            )

        def on_train_end(self, args: TrlObject, state: TrlObject, control: TrlObject, **given: TrlObject) -> None:
            if self._tracing is not None:
                self._tracing.close()

    return TraceCallback()
