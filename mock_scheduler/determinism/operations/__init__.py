"""Logs every operation dispatched by torch in a training step, with digests of its inputs and outputs.

Contract: imports no torch, for readers of a log. ``operations.recorder`` writes one and is imported by itself.
"""

from mock_scheduler.determinism.operations.log import (
    OperationLog,
    OperationLogHeader,
    OperationRecord,
    Phase,
    TensorRecord,
    find_operation_logs,
    operation_log_path,
)

__all__ = [
    "OperationLog",
    "OperationLogHeader",
    "OperationRecord",
    "Phase",
    "TensorRecord",
    "find_operation_logs",
    "operation_log_path",
]
