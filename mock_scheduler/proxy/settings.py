"""The arguments of the two builders, as the trainer gives them and as the proxy keeps them.

Contract: ``BuildOptions`` has exactly the fields of ``ProxySettings`` with a default (a test compares them).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypedDict

from mock_scheduler.config.rollout_mock import RolloutMockConfig
from mock_scheduler.ledger import Ledger
from mock_scheduler.recording.contract import Contract
from mock_scheduler.recording.writing.sharded import Patience
from mock_scheduler.scheduler import BatchCodec, RolloutRequest, RowShard
from mock_scheduler.support.digests import JSON


class BuildOptions(TypedDict, total=False):
    """The keyword arguments of ``build_scheduler`` and ``build_async_scheduler``; all may be left out.

    Attributes:
        plan: every request to come, in order. With it absent steps, present steps and a wrong contract are refused
            before any rollout, and calls need not be held where the next answer is known. Of more than 256 steps to
            replay, those between the first and the last 128 are looked for beside the run: an absent one is named by
            the next call. Without a plan every mode of the configuration is prepared for.
        is_writer: True on exactly one rank, or one rank of each row shard: it writes, and verifies every bit of the
            steps to replay. It logs, too; of several shards only shard 0.
        provenance: added to the recording's provenance, for example the determinism settings as read back.
        resume: continue a dump in the folder of its earlier part; planned steps already there must come out equal.
        run_id: 1 to 128 printable characters, the same for all schedulers and ranks of one run; by default a new one.
        shard: this process gets, and records, only its own rows of every batch; recording with it needs ``run_id``.
        codec: converts between the framework's batches, which the pipeline gets, and ``RolloutBatch``.
        max_row_tokens: the longest row possible; bounds the disk needed by a dump before its first step.
        late_values: names of the values that the trainer computes from a batch after it got it, as its rewards. They
            are recorded with the step and given back in its replay: ``late_values`` and ``add_late_values`` of the
            scheduler.
        patience: how long to wait for steps or shards written by other processes of the run; by default 10 minutes
            (``Patience(timeout_s=600)``). A wait of more than 5 s is logged with its reason, and again every 30 s.
    """

    plan: Sequence[RolloutRequest]
    is_writer: bool
    provenance: Mapping[str, JSON] | None
    resume: bool
    run_id: str | None
    shard: RowShard | None
    codec: BatchCodec | None
    max_row_tokens: int | None
    late_values: Sequence[str]
    patience: Patience


@dataclass(frozen=True, kw_only=True, slots=True)
class ProxySettings:
    """The arguments of ``build_scheduler``, checked; ``BuildOptions`` describes those that have a default here.

    ``is_restarted``: this process goes on for one that died (``in_actor``).
    """

    config: RolloutMockConfig
    make_real: Callable[[], object]
    contract: Contract
    ledger: Ledger
    is_restarted: bool
    plan: Sequence[RolloutRequest] = ()
    is_writer: bool = True
    provenance: Mapping[str, JSON] | None = None
    resume: bool = False
    run_id: str | None = None
    shard: RowShard | None = None
    codec: BatchCodec | None = None
    max_row_tokens: int | None = None
    late_values: Sequence[str] = ()
    patience: Patience = field(default_factory=Patience)

    @property
    def is_logging(self) -> bool:
        """Whether this process writes the log lines of the run."""
        return self.config.enable and self.is_writer and (self.shard is None or self.shard.index == 0)
