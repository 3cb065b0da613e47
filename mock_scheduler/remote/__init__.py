"""Reaches a training service behind HTTP: its protocol, its file, and its client."""

from mock_scheduler.remote.client import TrainingClient
from mock_scheduler.remote.protocol import (
    DatumValues,
    ServiceInfo,
    contract_problems,
    decode_datums,
    decode_scores,
    encode_datums,
    encode_scores,
    metrics_as_json,
    parse_metrics,
    take_values,
    with_values,
)

__all__ = [
    "DatumValues",
    "ServiceInfo",
    "TrainingClient",
    "contract_problems",
    "decode_datums",
    "decode_scores",
    "encode_datums",
    "encode_scores",
    "metrics_as_json",
    "parse_metrics",
    "take_values",
    "with_values",
]
