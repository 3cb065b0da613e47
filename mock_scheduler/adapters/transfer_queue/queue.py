"""Rows out of the TransferQueue of this process, and back into it.

Contract: ``fetch`` reads every field of the keys of a batch, in their order; ``put`` writes rows under their own keys
and tags, and gives the batch that stands for them. The package transfer_queue is imported when either is called.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mock_scheduler.adapters.transfer_queue.codec import QueueRows
from mock_scheduler.adapters.transfer_queue.columns import build_tensordict, read_tensordict


def fetch(batch: Any, notes: Mapping[str, object]) -> QueueRows:  # noqa: ANN401 - a KVBatchMeta
    """Reads the rows of a ``KVBatchMeta``."""
    import transfer_queue

    fields = transfer_queue.kv_batch_get(keys=list(batch.keys), partition_id=batch.partition_id)
    return QueueRows(
        partition=batch.partition_id,
        keys=list(batch.keys),
        tags=[dict(tag) for tag in batch.tags],
        columns=read_tensordict(fields),
        notes=notes,
    )


def put(rows: QueueRows) -> Any:  # noqa: ANN401 - a KVBatchMeta
    """Writes rows and gives their ``KVBatchMeta``, in their order."""
    import transfer_queue

    keys, tags = list(rows.keys), [dict(tag) for tag in rows.tags]
    transfer_queue.kv_batch_put(
        keys=keys, partition_id=rows.partition, fields=build_tensordict(rows.columns), tags=tags
    )
    return transfer_queue.KVBatchMeta(partition_id=rows.partition, keys=keys, tags=tags)


def clear(keys: Sequence[str], partition: str) -> None:
    """Removes keys, with what lies under them."""
    import transfer_queue

    transfer_queue.kv_clear(keys=list(keys), partition_id=partition)


def clear_partition(partition: str) -> None:
    """Removes all keys of a partition."""
    import transfer_queue

    keys = list((transfer_queue.kv_list(partition) or {}).get(partition, {}))
    if keys:
        transfer_queue.kv_clear(keys=keys, partition_id=partition)
