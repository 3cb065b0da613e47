import dataclasses
import hashlib
import json
import struct
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load

from mock_scheduler.batch import RolloutBatch, SampleIdentity, SamplingParams, Termination, Trajectory
from mock_scheduler.errors import CorruptRecordingError, RecordingError
from mock_scheduler.recording.container import decode_step, encode_step
from tests.recording.builders import SAMPLING, make_batch, make_info, make_row, make_rows

GOLDEN = "c62ed2af0b7bfe2c622b56c2c58132b210640f99102991baf2feb3d5578091a6"


def tiny_step() -> bytes:
    rows = [
        make_row(tokens=(1, 2), response=(False, True), rollout_logprobs=(-0.5,), turn_rewards=(1.0,), prompt_length=1)
    ]
    return encode_step(RolloutBatch.from_trajectories(rows, sampling=SAMPLING, group_size=1), make_info())


def rewrite(data: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    """The step file with its metadata document changed and all digests made right again."""
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    document = json.loads(header["__metadata__"]["rollout"])
    del document["digest"]
    change(document)
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    document["digest"] = hashlib.sha256(text.encode()).hexdigest()
    header["__metadata__"]["rollout"] = json.dumps(document, sort_keys=True, separators=(",", ":"))
    written = json.dumps(header, separators=(",", ":")).encode()
    written = written.ljust(-(-len(written) // 8) * 8)
    return struct.pack("<Q", len(written)) + written + data[8 + size :]


def test_a_step_comes_back_bit_for_bit() -> None:
    batch, info = make_batch(3, 4), make_info(7, metrics={"a": 0.1, "b": -0.0}, scheduler_state={"cursor": [1, None]})
    loaded, loaded_info = decode_step(encode_step(batch, info))
    assert loaded.is_identical(batch)
    assert loaded_info == info
    assert str(loaded_info.metrics["b"]) == "-0.0"


def test_arrival_order_does_not_change_a_byte() -> None:
    rows = make_rows(2, 3)
    batches = [RolloutBatch.from_trajectories(order, sampling=SAMPLING, group_size=3) for order in (rows, rows[::-1])]
    assert encode_step(batches[0], make_info()) == encode_step(batches[1], make_info())


def test_the_format_is_the_one_that_was_released() -> None:
    """Golden digest of format version 1; if it must change, so must ``STEP_VERSION``."""
    assert hashlib.sha256(tiny_step()).hexdigest() == GOLDEN


def test_any_safetensors_reader_can_open_a_step() -> None:
    tensors = load(encode_step(make_batch(1, 2), make_info()))
    assert torch.equal(tensors["tokens"], make_batch(1, 2).tokens)
    assert tensors["identities"].tolist() == [[0, 0, 0, 0], [0, 0, 1, 0]]


def test_every_flipped_bit_is_detected() -> None:
    data = tiny_step()
    for position in range(len(data)):
        for bit in range(8):
            changed = bytearray(data)
            changed[position] ^= 1 << bit
            with pytest.raises(CorruptRecordingError, match=r"^here: "):
                decode_step(changed, source="here")


def test_every_truncation_is_detected() -> None:
    data = tiny_step()
    for length in range(len(data)):
        with pytest.raises(CorruptRecordingError, match=r"^here: "):
            decode_step(data[:length], source="here")
    with pytest.raises(CorruptRecordingError, match="its header describes"):
        decode_step(data + b"\0")


def test_a_changed_tensor_is_named() -> None:
    data = encode_step(make_batch(), make_info())
    logprobs = make_batch().rollout_logprobs.numpy().tobytes()
    changed = bytearray(data)
    changed[data.index(logprobs)] ^= 1
    with pytest.raises(CorruptRecordingError) as caught:
        decode_step(changed, source="x/train/step_000000.safetensors")
    assert str(caught.value) == (
        "x/train/step_000000.safetensors: tensor 'rollout_logprobs' does not match its digest: the file was changed "
        "after it was written. Restore it from a copy or record the step again."
    )
    decode_step(changed, verify=False)


def test_a_newer_version_is_refused() -> None:
    data = rewrite(tiny_step(), lambda document: document.update(version=2))
    with pytest.raises(RecordingError) as caught:
        decode_step(data, source="f")
    assert type(caught.value) is RecordingError
    assert str(caught.value) == (
        "f: step format version 2 is newer than 1, the newest that this release reads. Update mock-scheduler, or "
        "record again with this release."
    )


def test_content_that_is_no_batch_is_refused_though_its_digests_are_right() -> None:
    data = rewrite(tiny_step(), lambda document: document["content"].update(group_size=2))
    with pytest.raises(CorruptRecordingError, match="expected group_size 2"):
        decode_step(data)
    data = rewrite(tiny_step(), lambda document: document["content"].update(tags=[]))
    with pytest.raises(CorruptRecordingError, match="content is no rollout batch: IndexError"):
        decode_step(data)


@pytest.mark.parametrize(
    ("header", "problem"),
    [
        (b"[" * 100_000, "header is no JSON"),
        (b"[]", "header is not in canonical form"),
        (b"{}", "header has no metadata 'rollout'"),
        (b'{"__metadata__":{"rollout":"1"}}', "header metadata is of type int, expected an object"),
        (b'{"__metadata__":{"rollout":1}}', "header metadata is of type int, expected text"),
        (b'{"a":1e999}', "header is not in canonical form"),
    ],
)
def test_hostile_headers_are_refused(header: bytes, problem: str) -> None:
    padded = header.ljust(-(-len(header) // 8) * 8)
    with pytest.raises(CorruptRecordingError, match=problem):
        decode_step(struct.pack("<Q", len(padded)) + padded)


def test_a_huge_header_size_is_refused_before_anything_is_allocated() -> None:
    with pytest.raises(CorruptRecordingError, match="header size 9223372036854775807 is over the limit"):
        decode_step(struct.pack("<Q", 2**63 - 1) + b"{}")


def test_a_metric_that_is_no_number_is_named() -> None:
    with pytest.raises(RecordingError) as caught:
        encode_step(make_batch(), make_info(3, metrics={"time/rollout_s": float("nan")}))
    # What json says after this differs between Python versions.
    assert str(caught.value).startswith(
        "step 3: metrics 'time/rollout_s' is nan, which cannot be recorded: "
        "Out of range float values are not JSON compliant"
    )


def test_a_header_over_the_limit_is_refused_when_written() -> None:
    with pytest.raises(RecordingError, match="over the limit of 8388608"):
        encode_step(make_batch(), make_info(scheduler_state={"cache": "x" * 2**23}))


def test_writing_into_a_decoded_tensor_leaves_the_bytes_alone() -> None:
    data = encode_step(make_batch(), make_info())
    batch, _ = decode_step(data)
    batch.tokens.zero_()
    assert decode_step(data)[0].is_identical(make_batch())


finite = st.floats(allow_nan=False, allow_infinity=False, width=32)


@st.composite
def trajectories(draw: st.DrawFn, env_id: int) -> Trajectory:
    mask = draw(st.lists(st.booleans(), max_size=12))
    prompt_length = draw(st.integers(0 if mask else 1, 4))
    rewards = draw(st.lists(finite, max_size=3))
    length, num_response = prompt_length + len(mask), sum(mask)
    int32 = st.integers(0, 2**31 - 1)
    return Trajectory(
        identity=SampleIdentity(
            scheduler_id=draw(st.sampled_from(["default", "math é", 'quote " \\'])),
            group_id=draw(st.integers(0, 2**63 - 1)),
            episode_id=0,
            env_id=env_id,
            turn=0,
        ),
        tokens=torch.tensor(draw(st.lists(int32, min_size=length, max_size=length)), dtype=torch.int32),
        response_mask=torch.tensor([False] * prompt_length + mask, dtype=torch.bool),
        rollout_logprobs=torch.tensor(draw(st.lists(finite, min_size=num_response, max_size=num_response))),
        turn_rewards=torch.tensor(rewards, dtype=torch.float32),
        policy_versions=torch.tensor([draw(int32) for _ in rewards], dtype=torch.int32),
        termination=draw(st.sampled_from(Termination)),
        prompt_length=prompt_length,
        tag=draw(st.text(max_size=5)),
        reward=draw(finite),
    )


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 5).flatmap(lambda n: st.tuples(*[trajectories(env_id=i) for i in range(n)])), finite)
def test_any_batch_survives_the_file(rows: tuple[Trajectory, ...], metric: float) -> None:
    sampling = SamplingParams(temperature=0.7, top_p=0.9, top_k=5, logprobs_mode="raw")
    batch = RolloutBatch.from_trajectories(rows, sampling=sampling, group_size=None)
    info = make_info(metrics={"m": metric})
    loaded, loaded_info = decode_step(encode_step(batch, info))
    assert loaded.is_identical(batch)
    assert loaded_info == info
    assert dataclasses.asdict(loaded.sampling) == dataclasses.asdict(sampling)
