"""The operation log: every operation that torch dispatches in a training step, with digests of what it read and wrote.

Contract: imports no torch, for those who read a log. ``operations.recorder`` writes one and is imported by itself.
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
