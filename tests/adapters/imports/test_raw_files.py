"""Files of prime-rl, megatron/rl, NexRL and miles' dashboard become recordings that say what these do not hold."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mock_scheduler.adapters.imports.msgpack import MessagePackError, read_msgpack
from mock_scheduler.adapters.nexrl.records import trajectory_content
from mock_scheduler.errors import BatchError, ConfigError, ForeignFileError
from tests.adapters.imports.forging import (
    torch_bytes,
)
from tests.adapters.imports.importing import imported, lacks, write
from tests.batches import make_batch


def msgpack(value: Any) -> bytes:
    """Writes the forms that msgspec writes."""
    if value is None or isinstance(value, bool):
        return {None: b"\xc0", False: b"\xc2", True: b"\xc3"}[value]
    if isinstance(value, int):
        return bytes([value]) if 0 <= value < 128 else b"\xd3" + struct.pack(">q", value)
    if isinstance(value, float):
        return b"\xcb" + struct.pack(">d", value)
    if isinstance(value, str):
        return bytes([0xA0 | len(value)]) + value.encode()
    if isinstance(value, bytes):
        return b"\xc5" + struct.pack(">H", len(value)) + value
    return b"\xdc" + struct.pack(">H", len(value)) + b"".join(map(msgpack, value))


def micro_batch(**changes: Any) -> list[Any]:
    experts = np.stack([np.array([[0, 1], [2, 3]])] * 7).astype(np.uint8)
    fields: dict[str, Any] = {
        "input_ids": [1, 2, 3, 4, 5, 6, 0],
        "loss_mask": [False, True, True, False, False, True, False],
        "advantages": [0.5] * 7,
        "inference_logprobs": [0.0, -0.5, -0.25, 0.0, 0.0, -3.5, 0.0],
        "position_ids": [0, 1, 2, 0, 1, 2, 3],
        "sequence_lengths": [3, 4],
        "temperatures": [0.7] * 7,
        "env_names": ["a", "b"],
        "seq_lens": [3, 4],
        "ref_logprobs": None,
        "routed_experts": [experts.tobytes(), [7, 2, 2], "uint8"],
        **changes,
    }
    return list(fields.values())


def test_prime_rls_micro_batches_are_taken_apart(tmp_path: Path) -> None:
    for rank in range(2):
        write(tmp_path / f"rollouts/step_4/rank_{rank}.bin", msgpack([micro_batch()]))
    found = imported("prime-rl", tmp_path / "rollouts")[4]
    assert found.lengths.tolist() == [3, 4] * 2
    assert found.rollout_logprobs.tolist() == [-0.5, -0.25, -3.5] * 2
    assert (found.tags, found.sampling.temperature) == (("a", "b") * 2, 0.7)
    assert found.extras["routed_experts"].row(1).values.tolist() == [[[0, 1], [2, 3]]] * 4
    assert found.extras["native/advantages"].row(0) == [0.5] * 3
    assert lacks(found) == ["rewards", "groups", "policy_versions", "terminations"]
    assert "sampling.temperature" not in found.meta["not_in_source"]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"seq_lens": [3, 9]}, r"seq_lens is \[3, 9\], of 7 tokens"),
        ({"loss_mask": [True]}, "loss_mask has other than 7 entries"),
        ({"routed_experts": [b"ab", [2**40, 2, 2], "uint8"]}, r"routed_experts is uint8 .* of 2 bytes"),
        ({"routed_experts": [b"ab", [1, 1, 2], "object"]}, "expected bytes, a shape and a dtype"),
    ],
)
def test_a_micro_batch_that_contradicts_itself_is_refused(tmp_path: Path, changes: Any, problem: str) -> None:
    write(tmp_path / "rollouts/step_4/rank_0.bin", msgpack([micro_batch(**changes)]))
    with pytest.raises(BatchError, match=problem):
        imported("prime-rl", tmp_path / "rollouts")


def test_message_pack_is_read_as_it_is_specified() -> None:
    value = [None, True, 1, 127, -1, -32, 300, -(2**40), 0.1, "é", b"\x00", {"a": [1], 2: "b"}]
    data = b"\x9c\xc0\xc3\x01\x7f\xff\xe0\xcd\x01\x2c\xd3\xff\xff\xff\x00\x00\x00\x00\x00\xcb" + struct.pack(">d", 0.1)
    assert read_msgpack(data + b"\xa2\xc3\xa9\xc4\x01\x00\x82\xa1a\x91\x01\x02\xa1b") == value
    for hostile in (
        b"\xdd\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xffx",
        b"\x91" * 100,
        b"\xc7\x01\x01x",
        b"\x01\x02",
        b"",
    ):
        with pytest.raises(MessagePackError):
            read_msgpack(hostile)


def bank(folder: Path, change: Callable[[dict[str, Any]], None] = lambda record: None, **manifest: Any) -> Path:
    """A bank with one segment of two equal groups, as megatron/rl's RolloutBank writes it."""
    segment = folder / "generations/generation-ab/gen-000002"
    segment.mkdir(parents=True)
    tokens, logprobs, masks = b"", b"", b""
    lines = []
    for group in range(2):
        own = [
            np.array([1, 2, 3, 1, 2, 3, 4, 5], dtype="<i4").tobytes(),
            np.array([-0.5, -0.25, -1.0], dtype="<f2").tobytes(),
            np.array([0, 1, 1, 0, 0, 0, 1, 1], dtype="u1").tobytes(),
        ]
        record = {
            "format_version": 2,
            "uid": f"gen-000002/{group}",
            "collection_iter": 2,
            "member_type": "TokenRollout",
            "kind": "token",
            "group": {"rollouts": [{"reward": [0.5, 1.0], "env_id": "e", "rollout_status": "ok"}], "batch_id": group},
            "tok": {"offset": len(tokens), "bytes": len(own[0]), "lengths": [[3, 5]]},
            "lp": {"offset": len(logprobs), "bytes": len(own[1]), "lengths": [[2, 1]]},
            "mask": {"offset": len(masks), "bytes": len(own[2]), "lengths": [[3, 5]]},
        }
        change(record)
        digest = hashlib.blake2b(json.dumps(record, sort_keys=True, separators=(",", ":")).encode(), digest_size=16)
        for data in own:
            digest.update(data)
        lines.append(json.dumps({**record, "checksum": digest.hexdigest()}))
        tokens, logprobs, masks = tokens + own[0], logprobs + own[1], masks + own[2]
    (segment / "tokens.bin").write_bytes(tokens)
    (segment / "logprobs.bin").write_bytes(logprobs)
    (segment / "masks.bin").write_bytes(masks)
    (segment / "ledger.log").write_text("\n".join(lines) + "\n", encoding="utf-8")
    about = {"format_version": 2, "active_generation": "generation-ab", "segments": ["gen-000002"], **manifest}
    (folder / "MANIFEST.json").write_text(json.dumps(about), encoding="utf-8")
    return folder


def test_megatrons_bank_is_read_a_row_for_each_turn(tmp_path: Path) -> None:
    found = imported("rollout-bank", bank(tmp_path / "bank"))[2]
    assert [identity.numbers for identity in found.identities] == [
        (0, 0, 0, 0),
        (0, 0, 0, 1),
        (1, 0, 0, 0),
        (1, 0, 0, 1),
    ]
    assert found.rows()[1].tokens.tolist() == [1, 2, 3, 4, 5]
    assert found.rollout_logprobs.tolist() == [-0.5, -0.25, -1.0, 0.0] * 2  # an end token has none
    assert found.rewards.tolist() == [0.5, 1.0] * 2
    assert lacks(found) == ["policy_versions", "bits of rollout_logprobs (float16)"]


def test_a_record_that_a_kill_cut_is_left_out_and_said(tmp_path: Path) -> None:
    folder = bank(tmp_path / "bank")
    path = folder / "generations/generation-ab/gen-000002/tokens.bin"
    path.write_bytes(path.read_bytes()[:-4])
    found = imported("rollout-bank", folder)[2]
    assert len(found) == 2
    assert "the last group, which a kill has cut" in lacks(found)


def test_a_changed_record_is_refused(tmp_path: Path) -> None:
    folder = bank(tmp_path / "bank")
    path = folder / "generations/generation-ab/gen-000002/tokens.bin"
    path.write_bytes(b"\x09" + path.read_bytes()[1:])
    with pytest.raises(ForeignFileError, match=r"ledger\.log, line 1 cannot be read: .*checksum does not hold"):
        imported("rollout-bank", folder)


@pytest.mark.parametrize(
    ("manifest", "problem"),
    [
        ({"active_generation": "../../etc"}, "active_generation is '../../etc'"),
        ({"segments": ["../gen-000002"]}, "expected names such as gen-000012"),
        ({"format_version": 3}, "is of format 3; expected 2"),
    ],
)
def test_a_manifest_that_leads_elsewhere_is_refused(tmp_path: Path, manifest: dict[str, Any], problem: str) -> None:
    with pytest.raises(ForeignFileError, match=problem):
        imported("rollout-bank", bank(tmp_path / "bank", **manifest))


def test_a_bank_of_text_is_refused(tmp_path: Path) -> None:
    def as_text(record: dict[str, Any]) -> None:
        record["kind"] = "inline"

    with pytest.raises(BatchError, match="without tokens; they cannot be replayed"):
        imported("rollout-bank", bank(tmp_path / "bank", as_text))


def test_nexrls_dumps_are_read(tmp_path: Path) -> None:
    batch = make_batch()
    write(tmp_path / "trajectory/step_000002.pt", torch_bytes(trajectory_content(batch, step=2)))
    (found,) = imported("nexrl", tmp_path / "trajectory").values()
    assert sorted(found.rewards.tolist()) == sorted(batch.rewards.tolist())
    assert len(found.rollout_logprobs) == len(batch.rollout_logprobs)
    assert found.sampling == batch.sampling


def test_columns_without_pyarrow_say_the_extra(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet") if _has_pyarrow() else None
    path = write(tmp_path / "c/rollout_6.parquet", b"PAR1")
    if parquet is None:
        with pytest.raises(ConfigError, match=r"not installed: pip install 'mock-scheduler\[parquet\]'"):
            imported("miles-columns", path)
    else:
        with pytest.raises(ForeignFileError, match="cannot be read as parquet of miles' columns"):
            imported("miles-columns", path)


def _has_pyarrow() -> bool:
    import importlib.util

    return importlib.util.find_spec("pyarrow") is not None
