"""What a proxy is built from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from mock_scheduler.config.rollout_mock import RolloutMockConfig
from mock_scheduler.ledger import Ledger
from mock_scheduler.recording import Contract
from mock_scheduler.recording.writing.sharded import Patience
from mock_scheduler.scheduler import BatchCodec, RolloutRequest, RowShard
from mock_scheduler.support.digests import JSON


@dataclass(frozen=True, kw_only=True, slots=True)
class ProxySettings:
    """The arguments of ``build_scheduler``, checked; ``BuildOptions`` describes those that have a default here."""

    config: RolloutMockConfig
    make_real: Callable[[], object]
    contract: Contract
    ledger: Ledger
    plan: Sequence[RolloutRequest] = ()
    is_writer: bool = True
    provenance: Mapping[str, JSON] | None = None
    resume: bool = False
    run_id: str | None = None
    shard: RowShard | None = None
    codec: BatchCodec | None = None
    max_row_tokens: int | None = None
    patience: Patience = field(default_factory=Patience)

    @property
    def is_logging(self) -> bool:
        """Whether this process writes the log lines of the run."""
        return self.config.enable and self.is_writer and (self.shard is None or self.shard.index == 0)
