"""Recordings of rollouts: the step file, the manifest with its contract, writing and reading."""

from mock_scheduler.recording.container import StepInfo, decode_step, encode_step
from mock_scheduler.recording.contract import Contract, ContractField, Difference, Rule, check_contract
from mock_scheduler.recording.manifest import Manifest, collect_provenance, load_manifest, save_manifest
from mock_scheduler.recording.reader import RecordedStep, RecordingReader, read_step_info
from mock_scheduler.recording.writer import RecordingWriter, WrittenStep, open_recording

__all__ = [
    "Contract",
    "ContractField",
    "Difference",
    "Manifest",
    "RecordedStep",
    "RecordingReader",
    "RecordingWriter",
    "Rule",
    "StepInfo",
    "WrittenStep",
    "check_contract",
    "collect_provenance",
    "decode_step",
    "encode_step",
    "load_manifest",
    "open_recording",
    "read_step_info",
    "save_manifest",
]
