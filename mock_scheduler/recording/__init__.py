"""Recordings of rollouts: the step file, the manifest with its contract, writing and reading."""

from mock_scheduler.recording.contract import Contract, ContractField, Difference, Rule, check_contract
from mock_scheduler.recording.manifest import Manifest, collect_provenance, load_manifest, save_manifest
from mock_scheduler.recording.reading.open_step import OpenStep
from mock_scheduler.recording.reading.reader import RecordedStep, RecordingReader
from mock_scheduler.recording.step.container import EncodedStep, decode_step, encode_step
from mock_scheduler.recording.step.step_file import StepFile
from mock_scheduler.recording.step.step_info import StepInfo
from mock_scheduler.recording.storage import ByteSource, Storage, open_storage
from mock_scheduler.recording.writing.opening import RecordingWriter, WriterOptions, WrittenStep, open_recording

__all__ = [
    "ByteSource",
    "Contract",
    "ContractField",
    "Difference",
    "EncodedStep",
    "Manifest",
    "OpenStep",
    "RecordedStep",
    "RecordingReader",
    "RecordingWriter",
    "Rule",
    "StepFile",
    "StepInfo",
    "Storage",
    "WriterOptions",
    "WrittenStep",
    "check_contract",
    "collect_provenance",
    "decode_step",
    "encode_step",
    "load_manifest",
    "open_recording",
    "open_storage",
    "save_manifest",
]
