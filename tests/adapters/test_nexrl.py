"""NexRL's dump files, and rollouts out of them."""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mock_scheduler.adapters.nexrl.config import DebugConfig, DumpFormat, RolloutWorkerConfig
from mock_scheduler.adapters.nexrl.files import load_content, save_content
from mock_scheduler.adapters.nexrl.matching import PlannedTrajectory
from mock_scheduler.adapters.nexrl.names import FileKey, find_files, find_steps, parse_key, remove_steps_from
from mock_scheduler.adapters.nexrl.records import trajectory_content
from mock_scheduler.adapters.nexrl.remote import RemoteDump, build_datums
from mock_scheduler.adapters.nexrl.rollouts import DumpedRollouts, RolloutLimits
from mock_scheduler.batch import RolloutBatch, SampleIdentity
from mock_scheduler.batch.columns import Ragged
from mock_scheduler.errors import (
    BatchError,
    MockSchedulerError,
    RecordingError,
    StepExistsError,
    StepNotFoundError,
    TraceError,
)
from mock_scheduler.scheduler import RolloutRequest
from tests.batches import SAMPLING, make_batch, make_row, make_rows

FORMATS: tuple[DumpFormat, ...] = ("pt", "jsonl")


@pytest.mark.parametrize(
    ("key", "stem", "place"),
    [
        (FileKey(step=0), "step_000000", "batch"),
        (FileKey(step=12, global_rank=3), "step_000012_rank3", "rank3"),
        (FileKey(step=0, global_rank=0, micro=1), "step_000000_rank0_micro1", "rank0_micro1"),
        (FileKey(step=1, global_rank=0, micro=1, update=2), "step_000001_rank0_micro1_update2", "rank0_micro1_update2"),
        (FileKey(step=1234567), "step_1234567", "batch"),
    ],
)
def test_names_are_the_documented_ones_and_read_back(key: FileKey, stem: str, place: str) -> None:
    assert (key.stem, key.place) == (stem, place)
    assert parse_key(Path(f"{stem}.pt")) == key == parse_key(Path(f"{stem}.jsonl"))


@pytest.mark.parametrize("name", ["step_1.pt", "step_000000.npz", ".step_000000.pt.1.ab.tmp", "step_000000_rank.pt"])
def test_other_names_are_no_dumps(name: str) -> None:
    assert parse_key(Path(name)) is None


CONTENT = {
    "none": None,
    "flags": [True, False],
    "text": "NaN is a text",
    "number": 0.1 + 0.2,
    "nested": {"list": [1, [2.5, "x"]]},
    "bfloat16": torch.tensor([1.0, -0.0, math.inf], dtype=torch.bfloat16),
    "float64": torch.tensor([[math.pi, math.nan]], dtype=torch.float64),
    "int64": torch.tensor([2**62 + 1, -5]),
    "bool": torch.tensor([[True], [False]]),
    "empty": torch.zeros(0, 3),
    "scalar": torch.tensor(7, dtype=torch.int32),
}


def same(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor):
        assert isinstance(other, torch.Tensor)
        is_alike = (one.dtype, one.shape) == (other.dtype, other.shape)
        return is_alike and torch.equal(one.contiguous().view(-1).view(torch.uint8), other.view(-1).view(torch.uint8))
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    return type(one) is type(other) and one == other


@pytest.mark.parametrize("dump_format", FORMATS)
def test_contents_come_back_bit_for_bit(tmp_path: Path, dump_format: DumpFormat) -> None:
    content = {name: value for name, value in CONTENT.items() if name not in ("empty", "scalar")}
    path = save_content(tmp_path, "loss", FileKey(step=0), content, dump_format=dump_format)
    assert path == tmp_path / "loss" / f"step_000000.{dump_format}"
    read = load_content(path)
    assert all(same(value, read[name]) for name, value in content.items())
    assert list(tmp_path.iterdir()) == [tmp_path / "loss"]  # no folder that is not used


@pytest.mark.parametrize("dump_format", FORMATS)
def test_empty_and_scalar_tensors_keep_shape_and_dtype(tmp_path: Path, dump_format: DumpFormat) -> None:
    content = {name: CONTENT[name] for name in ("empty", "scalar")}
    read = load_content(save_content(tmp_path, "loss", FileKey(step=0), content, dump_format=dump_format))
    assert (read["empty"].shape, read["empty"].dtype) == ((0, 3), torch.float32)
    assert (read["scalar"].shape, read["scalar"].dtype, int(read["scalar"])) == ((), torch.int32, 7)


@given(values=st.lists(st.floats(width=32, allow_nan=False), max_size=5))
def test_jsonl_keeps_every_float_exactly(values: list[float], tmp_path_factory: pytest.TempPathFactory) -> None:
    tensor = torch.tensor(values, dtype=torch.float32)
    folder = tmp_path_factory.mktemp("exact")
    path = save_content(folder, "loss", FileKey(step=0), {"x": tensor, "y": values}, dump_format="jsonl")
    read = load_content(path)["x"]
    assert torch.equal(read.view(torch.int32), tensor.view(torch.int32))


def test_jsonl_is_valid_json_with_nan_and_infinities_as_texts(tmp_path: Path) -> None:
    content = {"a": torch.tensor([math.nan, -math.inf, 1.5]), "b": math.inf}
    path = save_content(tmp_path, "loss", FileKey(step=0), content, dump_format="jsonl")

    def refuse(text: str) -> None:
        raise AssertionError(text)

    assert json.loads(path.read_text(), parse_constant=refuse) == {
        "a": {"dtype": "float32", "shape": [3], "values": ["NaN", "-Infinity", 1.5]},
        "b": "Infinity",
    }


def test_a_view_is_written_without_the_memory_that_it_is_of(tmp_path: Path) -> None:
    whole = torch.zeros(1 << 18)
    path = save_content(tmp_path, "loss", FileKey(step=0), {"x": whole[:4]}, dump_format="pt")
    assert path.stat().st_size < 4096


def test_an_existing_file_is_refused_unless_asked_for(tmp_path: Path) -> None:
    key = FileKey(step=3)
    path = save_content(tmp_path, "loss", key, {"x": 1}, dump_format="pt")
    with pytest.raises(StepExistsError) as caught:
        save_content(tmp_path, "loss", key, {"x": 2}, dump_format="pt")
    assert str(caught.value) == (
        f"{path} is there already, from another run: give debug.dump_dir (or WEAVER_DEBUG_DUMP_DIR) a folder of its "
        "own, or remove the old dump"
    )
    assert load_content(path) == {"x": 1}
    save_content(tmp_path, "loss", key, {"x": 2}, dump_format="pt", replace=True)
    assert load_content(path) == {"x": 2}


def test_what_no_file_can_hold_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"a: set cannot be written; expected tensors and plain values"):
        save_content(tmp_path, "loss", FileKey(step=0), {"a": {1, 2}}, dump_format="pt")


class Planted:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return exec, ("raise SystemExit('code was run')",)


def test_a_file_that_would_run_code_is_refused_with_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "step_000000.pt"
    torch.save({"trajectories": Planted()}, path)
    with pytest.raises(TraceError) as caught:
        load_content(path)
    assert str(caught.value) == (
        f"{path}: step_000000/data.pkl names '__builtin__.exec', which is not on the closed list; nothing of it is run "
        "(byte 24). Only tensors, arrays and plain Python values can be read safely: save it anew with these only"
    )
    path.write_bytes(pickle.dumps({"a": Planted()}))
    with pytest.raises(TraceError):
        load_content(path)


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("step_000000.pt", b"PK\x03\x04 cut", "is no whole file of torch.save: "),
        ("step_000000.pt", b"", "is no whole file of torch.save: "),
        ("step_000000.jsonl", b"{'a'", "line 1: is not JSON: "),
        ("step_000000.jsonl", b"", "is empty"),
        ("step_000000.jsonl", b"[1]\n", "holds a list; expected a dict, as a debug dump's files do"),
        ("step_000000.npz", b"x", "is neither .pt nor .jsonl; set rollout_worker.trajectory_format to what it is"),
        ("step_000000.jsonl", b'{"tokens": [1]}\n\n{"tokens": [1', "line 3: is not JSON: "),
        ("step_000000.jsonl", b"\xff", "is not JSON: 'utf-8' codec"),
        (
            "step_000000.jsonl",
            b'{"x": {"dtype": "float3", "shape": [], "values": []}}',
            "line 1: is not JSON: a tensor is of dtype 'float3'",
        ),
        (
            "step_000000.jsonl",
            b'{"x": {"dtype": "int8", "shape": [2], "values": [1]}}',
            "line 1: is not JSON: a tensor of int8",
        ),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(TraceError) as caught:
        load_content(path)
    is_line = message.startswith("line")
    assert str(caught.value).startswith(f"{path}{', ' if is_line else ' '}{message}")


def test_a_changed_bit_in_a_tensor_is_refused(tmp_path: Path) -> None:
    """torch.load does not look at the checksums of its own files, and gave other numbers without a word."""
    values = torch.full((64,), 3.0)
    path = save_content(tmp_path, "loss", FileKey(step=0), {"x": values}, dump_format="pt")
    data = bytearray(path.read_bytes())
    data[data.index(values.numpy().tobytes()) + 40] ^= 1
    path.write_bytes(data)
    with pytest.raises(TraceError, match=r"has changed since it was written: .*data/0 in it does not fit its checksum"):
        load_content(path)


def test_a_cut_file_of_an_old_torch_is_refused(tmp_path: Path) -> None:
    """Some ended in struct.error or AssertionError, with a traceback."""
    path = tmp_path / "step_000000.pt"
    torch.save({"x": torch.arange(3.0)}, path, _use_new_zipfile_serialization=False)
    data = path.read_bytes()
    for size in range(0, len(data), 5):
        path.write_bytes(data[:size])
        with pytest.raises(TraceError):
            load_content(path)


def test_a_tensor_of_a_gpu_is_read_on_a_machine_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
    torch.save({"x": torch.arange(3.0)}, tmp_path / "step_000000.pt")
    assert load_content(tmp_path / "step_000000.pt")["x"].tolist() == [0.0, 1.0, 2.0]


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError) as caught:
        load_content(tmp_path / "a.pt")
    assert str(caught.value) == f"{tmp_path / 'a.pt'} cannot be read: No such file or directory"


def test_steps_are_found_and_removed(tmp_path: Path) -> None:
    for step in (0, 2, 5):
        save_content(tmp_path, "loss", FileKey(step=step, global_rank=0, micro=0), {}, dump_format="pt")
    save_content(tmp_path, "trajectory", FileKey(step=5), {}, dump_format="jsonl")
    assert find_steps(tmp_path) == [0, 2, 5]
    remove_steps_from(tmp_path, 2, {"loss"})
    assert [key.step for key in find_files(tmp_path, "loss")] == [0]
    assert find_steps(tmp_path) == [0, 5]


def test_a_step_in_both_formats_is_refused(tmp_path: Path) -> None:
    for dump_format in FORMATS:
        save_content(tmp_path, "loss", FileKey(step=0), {}, dump_format=dump_format)
    with pytest.raises(TraceError, match=r"are both of loss step_000000; remove one of them"):
        find_files(tmp_path, "loss")


# Rollouts


def rich_batch() -> RolloutBatch:
    rows = []
    for index, row in enumerate(make_rows(2, 2)):
        extras = {
            "dense": torch.tensor([math.nan, float(index)], dtype=torch.float64),
            "ragged": Ragged(torch.arange(index, dtype=torch.int16)),
            "json": {"board": "SFFG", "n": index},
            "flag": torch.tensor(index % 2 == 0),
        }
        rows.append(replace(row, extras=extras, policy_versions=row.policy_versions + 3))
    return RolloutBatch.from_trajectories(rows, sampling=SAMPLING, group_size=2, meta={"source": ["x", 1]})


def planned(batch: RolloutBatch) -> list[PlannedTrajectory]:
    keys = dict.fromkeys(replace(identity, turn=0) for identity in batch.identities)
    return [PlannedTrajectory(identity=identity, tag="FrozenLake") for identity in keys]


def scheduler(path: Path, batch: RolloutBatch, **values: object) -> DumpedRollouts:
    config = RolloutWorkerConfig.model_validate({"type": "mock", "trajectory_load_path": str(path), **values})
    limits = RolloutLimits(sampling={"train": SAMPLING, "val": SAMPLING}, vocab_size=1000, max_row_tokens=16)
    return DumpedRollouts(config, lambda request: planned(batch), limits)


def request(step: int = 0, **values: object) -> RolloutRequest:
    return RolloutRequest(**{"global_step": step, "batch_size": 4, "group_size": 2, **values})  # type: ignore[arg-type]


def dump(folder: Path, batch: RolloutBatch, *, step: int = 0, dump_format: DumpFormat = "pt") -> Path:
    content = trajectory_content(batch, step=step)
    return save_content(folder, "trajectory", FileKey(step=step), content, dump_format=dump_format)


@pytest.mark.parametrize("dump_format", FORMATS)
@pytest.mark.parametrize("what", ["file", "folder", "dump"])
def test_a_dumped_batch_comes_back_bit_for_bit(tmp_path: Path, dump_format: DumpFormat, what: str) -> None:
    batch = rich_batch()
    path = dump(tmp_path, batch, dump_format=dump_format)
    given_path = {"file": path, "folder": path.parent, "dump": tmp_path}[what]
    loaded = scheduler(given_path, batch).get_batch(request())
    assert loaded.digest() == batch.digest()


def test_the_file_has_nexrls_layout(tmp_path: Path) -> None:
    batch = make_batch(1, 2)
    tokens = batch.tokens[: batch.row_offsets[1]].tolist()
    values = torch.arange(len(batch.rollout_logprobs), dtype=torch.float64) + 0.5
    content = trajectory_content(batch, step=7, token_values={"advantages": values})
    assert (content["step"], content["num_trajectories"]) == (7, 2)
    first = content["trajectories"][0]
    assert list(first) == ["tokens", "loss_mask", "reward", "is_val", "extra_fields"]
    assert (first["tokens"], first["loss_mask"], first["is_val"]) == (tokens, [0, 0, 1], False)
    extra = first["extra_fields"]
    assert {name: extra[name] for name in ("group_id", "uid", "run_id", "task_id", "score", "temperature")} == {
        "group_id": "default/0/0",
        "uid": "default/0/0",
        "run_id": 0,
        "task_id": 0,
        "score": float(batch.rewards[0]),
        "temperature": 1.0,
    }
    assert extra["advantages"] == [0.0, 0.0, 0.5]
    assert extra["logprobs"] == [0.0, 0.0, float(batch.rollout_logprobs[0])]
    assert content["trajectories"][1]["extra_fields"]["advantages"] == [0.0, 0.0, 1.5, 2.5]


def test_rows_of_turns_share_their_ids(tmp_path: Path) -> None:
    rows = [make_row(0, env, turn=turn) for env in range(2) for turn in range(2)]
    batch = RolloutBatch.from_trajectories(rows, sampling=SAMPLING, group_size=2)
    assert scheduler(dump(tmp_path, batch), batch).get_batch(request()).digest() == batch.digest()


def foreign(
    *, groups: Sequence[object] = (0, 1), runs: int = 2, reverse: bool = False, **changes: object
) -> dict[str, object]:
    """A file as NexRL writes it."""
    listed = [
        {
            "tokens": [1, 2, 3, 4 + run],
            "loss_mask": [0, 1, 0, 1],
            "reward": float(run),
            "is_val": False,
            "extra_fields": {"group_id": group, "run_id": run, "uid": str(group), "temperature": 1.0},
        }
        for group in groups
        for run in range(runs)
    ]
    listed[0] |= changes
    return {"step": 0, "num_trajectories": len(listed), "trajectories": listed[::-1] if reverse else listed}


def write(folder: Path, content: dict[str, object], step: int = 0) -> Path:
    return save_content(folder, "trajectory", FileKey(step=step), content, dump_format="pt")


@pytest.mark.parametrize("reverse", [False, True])
def test_a_file_of_nexrls_own_is_matched_by_ids_whatever_its_order(tmp_path: Path, reverse: bool) -> None:
    batch = make_batch(2, 2)
    loaded = scheduler(write(tmp_path, foreign(reverse=reverse)), batch, missing_logprobs="zero").get_batch(request())
    assert [identity.numbers for identity in loaded.identities] == [i.numbers for i in batch.identities]
    assert loaded.rewards.tolist() == [0.0, 1.0, 0.0, 1.0]
    assert loaded.tokens.tolist() == [1, 2, 3, 4, 1, 2, 3, 5] * 2
    assert loaded.turn_rewards.tolist() == [0.0, 0.0, 0.0, 1.0] * 2  # two turns, the reward at the last
    assert loaded.prompt_lengths.tolist() == [1, 1, 1, 1]
    assert loaded.rollout_logprobs.tolist() == [0.0] * 8


def test_logprobs_that_nexrl_leaves_out_are_never_made_up(tmp_path: Path) -> None:
    path = write(tmp_path, foreign())
    with pytest.raises(BatchError) as caught:
        scheduler(path, make_batch(2, 2)).get_batch(request())
    assert str(caught.value) == (
        f"{path}: 4 of 4 trajectories have no extra_fields.logprobs, which NexRL leaves out; they are the rollout's "
        "log-probabilities, and rollout_logprob_diff_mean and _max and rollout correction are made of them, while the "
        "loss is not: it takes the trainer's own. Set rollout_worker.missing_logprobs=zero to go on with 0 in their "
        "place"
    )


def test_ids_of_another_system_are_refused_or_taken_in_order(tmp_path: Path) -> None:
    batch = make_batch(2, 2)
    path = write(tmp_path, foreign(groups=("b-uuid", "a-uuid")))
    with pytest.raises(BatchError) as caught:
        scheduler(path, batch, missing_logprobs="zero").get_batch(request())
    assert str(caught.value) == (
        f"{path} does not hold the 4 trajectories, by (group_id, run_id), that the step asks for:\n"
        "  - 4 that the step does not ask for: (a-uuid, 0); (a-uuid, 1); (b-uuid, 0); (b-uuid, 1)\n"
        "  - 4 that it asks for are not there: (default/0/0, 0); (default/0/0, 1); (default/1/0, 0); (default/1/0, 1)\n"
        "Load the dump of this step, of a run with the same train_env_manager and rollout_batch_size; for ids of "
        "another system set rollout_worker.match=order."
    )
    loaded = scheduler(path, batch, missing_logprobs="zero", match="order").get_batch(request())
    assert loaded.rewards.tolist() == [0.0, 1.0, 0.0, 1.0]


def test_numbers_are_ordered_as_numbers(tmp_path: Path) -> None:
    content = foreign(groups=(10, 9))
    content["trajectories"][0]["reward"] = 8.0  # type: ignore[index]
    path = write(tmp_path, content)
    loaded = scheduler(path, make_batch(2, 2), missing_logprobs="zero", match="order").get_batch(request())
    assert loaded.rewards.tolist() == [0.0, 1.0, 8.0, 1.0]


def test_other_group_sizes_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path, foreign(runs=3))
    with pytest.raises(BatchError) as caught:
        scheduler(path, make_batch(2, 2), missing_logprobs="zero", match="order").get_batch(request())
    assert str(caught.value) == (
        f"{path} holds 2 groups of 3 trajectories, and the step asks for 2 groups of 2: set "
        "train_env_manager.num_env_groups, group_size and rollout_batch_size to what the file holds"
    )


def test_doubled_ids_are_refused(tmp_path: Path) -> None:
    content = foreign()
    content["trajectories"].append(content["trajectories"][1])  # type: ignore[attr-defined,index]
    path = write(tmp_path, {**content, "num_trajectories": 5})
    with pytest.raises(BatchError) as caught:
        scheduler(path, make_batch(2, 2), missing_logprobs="zero").get_batch(request())
    assert str(caught.value) == (
        f"{path} holds trajectories of the same (group_id, run_id) more than once:\n  - (0, 1) 2 times\n"
        "Which of them is meant cannot be known: remove the others from the file."
    )


def test_every_missing_field_is_listed(tmp_path: Path) -> None:
    content = foreign(loss_mask=[0, 2, 0, 1])
    del content["trajectories"][1]["tokens"], content["trajectories"][1]["extra_fields"]["run_id"]  # type: ignore[index]
    content["trajectories"][2]["tokens"] = [1, -2]  # type: ignore[index]
    path = write(tmp_path, content)
    with pytest.raises(BatchError) as caught:
        scheduler(path, make_batch(2, 2)).get_batch(request())
    assert str(caught.value) == (
        f"{path} holds trajectories that cannot be used:\n"
        "  - trajectory 0: loss_mask is no list of 0 and 1\n"
        "  - trajectory 1: has no tokens, extra_fields.run_id\n"
        "  - trajectory 2: tokens is no list of whole numbers of 0 to 2**31 - 1"
    )


def test_a_mask_of_another_length_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, foreign(loss_mask=[0, 1]))
    with pytest.raises(BatchError, match=r"trajectory 0 \(0, 0\): loss_mask has 2 entries for 4 tokens"):
        scheduler(path, make_batch(2, 2), missing_logprobs="zero").get_batch(request())


def test_a_wrong_path_is_an_error_and_never_synthetic_data(tmp_path: Path) -> None:
    """NexRL logs it and trains on made-up trajectories."""
    with pytest.raises(RecordingError) as caught:
        scheduler(tmp_path / "nowhere.pt", make_batch())
    assert str(caught.value) == (
        f"rollout_worker.trajectory_load_path {tmp_path / 'nowhere.pt'} is not there: give a file such as "
        "debug_dump/trajectory/step_000000.pt, or its folder"
    )
    with pytest.raises(RecordingError, match=r"holds no file such as trajectory/step_000000.pt"):
        scheduler(tmp_path, make_batch())


def test_a_missing_step_lists_those_that_are_there(tmp_path: Path) -> None:
    batch = make_batch()
    path = dump(tmp_path, batch)
    dump(tmp_path, batch, step=4)
    with pytest.raises(StepNotFoundError) as caught:
        scheduler(path.parent, batch).check([request(0), request(1)])
    assert str(caught.value) == (f"rollout_worker.trajectory_load_path {path.parent} has no step 1; steps there: 0, 4")
    with pytest.raises(StepNotFoundError) as caught:
        scheduler(path, batch).get_batch(request(1))
    assert str(caught.value) == (
        f"rollout_worker.trajectory_load_path {path} holds step 0, and the run asks for step 1: give the folder of all "
        "steps, or set max_steps so that the run ends with this step"
    )


def test_validation_that_was_not_dumped_is_refused(tmp_path: Path) -> None:
    batch = make_batch()
    path = dump(tmp_path, batch)
    with pytest.raises(BatchError) as caught:
        scheduler(path, batch).get_batch(request(mode="val"))
    assert str(caught.value) == (
        f"{path} holds no trajectories of validation (is_val), and the run asks for them at step 0: set eval_steps=0"
    )


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("vocab_size", 3, "token id 997 is none of this run's vocabulary of 3"),
        ("max_row_tokens", 5, "a row has 6 tokens; sequence_length is 5"),
        (
            "sampling",
            {"train": replace(SAMPLING, temperature=0.5)},
            "they were sampled with SamplingParams(temperature=1.0, top_p=1.0, top_k=0, logprobs_mode='processed'), "
            "and this run has SamplingParams(temperature=0.5, top_p=1.0, top_k=0, logprobs_mode='processed')",
        ),
    ],
)
def test_trajectories_of_another_run_are_refused(tmp_path: Path, name: str, value: object, problem: str) -> None:
    batch = make_batch()
    limits = {"sampling": {"train": SAMPLING}, "vocab_size": 1000, "max_row_tokens": 16, name: value}
    path = dump(tmp_path, batch)
    config = RolloutWorkerConfig(type="mock", trajectory_load_path=str(path))
    loading = DumpedRollouts(config, lambda _: planned(batch), RolloutLimits(**limits))  # type: ignore[arg-type]
    with pytest.raises(BatchError) as caught:
        loading.get_batch(request())
    found = str(caught.value).replace(str(int(batch.tokens.max())), "997")
    assert found == f"the trajectories of {path} are not this run's:\n  - {problem}"


def test_a_file_of_another_step_under_a_name_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, foreign(), step=2)
    with pytest.raises(RecordingError, match="says that it is of step 0; its name says 2"):
        scheduler(path, make_batch(2, 2)).get_batch(request(2))


def test_a_format_that_the_file_does_not_have_is_an_error(tmp_path: Path) -> None:
    path = dump(tmp_path, make_batch())
    with pytest.raises(MockSchedulerError, match="is not JSON"):
        scheduler(path, make_batch(), trajectory_format="jsonl").get_batch(request())


def test_jsonl_of_several_lines_is_one_step(tmp_path: Path) -> None:
    lines = [{"trajectories": [record]} for record in foreign()["trajectories"]]  # type: ignore[attr-defined]
    path = tmp_path / "step_000000.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    loaded = scheduler(path, make_batch(2, 2), missing_logprobs="zero").get_batch(request())
    assert loaded.rewards.tolist() == [0.0, 1.0, 0.0, 1.0]


def test_a_folder_of_another_name_is_read_itself_and_no_neighbour_of_it(tmp_path: Path) -> None:
    """The folder ``trajectory`` beside the given one was read in its place, whatever was asked for."""
    dump(tmp_path, make_batch(2, 2))
    other = save_content(tmp_path, "datums", FileKey(step=0), {"datums": []}, dump_format="pt")
    with pytest.raises(BatchError, match=r"datums/step_000000.pt has no list of trajectories \(keys: datums\)"):
        scheduler(other.parent, make_batch(2, 2)).get_batch(request())
    (tmp_path / "mine").mkdir()
    with pytest.raises(RecordingError, match=r"mine holds no file such as trajectory/step_0"):
        scheduler(tmp_path / "mine", make_batch(2, 2))
    of_ranks = save_content(tmp_path, "loss", FileKey(step=0, global_rank=0, micro=1), {}, dump_format="pt")
    with pytest.raises(RecordingError, match=r"holds step_000000_rank0_micro1.pt, of a micro-batch; give a dump's"):
        scheduler(of_ranks.parent, make_batch(2, 2))


def test_fewer_trajectories_than_the_file_says_are_refused(tmp_path: Path) -> None:
    content = foreign()
    del content["trajectories"][3]  # type: ignore[attr-defined]
    path = write(tmp_path, content)
    with pytest.raises(BatchError) as caught:
        scheduler(path, make_batch(2, 2), missing_logprobs="zero").get_batch(request())
    assert str(caught.value) == f"{path} says that it holds 4 trajectories, and holds 3: it is not whole"


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"extra_fields": [1]}, "trajectory 0: extra_fields is of type list; expected a dict"),
        ({"extras": [1]}, "trajectory 0 (0, 0): 'list' object has no attribute 'items'"),
        ({"prompt_length": "x"}, "trajectory 0 (0, 0): invalid literal for int() with base 10: 'x'"),
        ({"termination": [1]}, "trajectory 0 (0, 0): unhashable type: 'list'"),
        ({"policy_versions": [2**40]}, "trajectory 0 (0, 0): value cannot be converted to type int32"),
        (
            {"loss_mask": [1, 1, 0, 1]},
            "trajectory 0 (0, 0): loss_mask begins with 1, and no token predicts the first one; give the row a prompt",
        ),
    ],
)
def test_fields_of_another_kind_are_refused_with_their_trajectory(
    tmp_path: Path, fields: dict[str, object], problem: str
) -> None:
    """They ended in a traceback, or, a row without prompt, only in the middle of the first step."""
    path = write(tmp_path, foreign(**fields))
    with pytest.raises(BatchError) as caught:
        scheduler(path, make_batch(2, 2), missing_logprobs="zero").get_batch(request())
    assert str(caught.value).startswith(f"{path} holds trajectories that cannot be used:\n  - {problem}")


@pytest.mark.parametrize(
    ("head", "problem"),
    [
        ({"meta": 5}, ": meta is of type int; expected a dict"),
        ({"step": torch.tensor([0, 1])}, " says that it is of step tensor([0, 1]); its name says 0"),
    ],
)
def test_a_head_of_another_kind_is_refused(tmp_path: Path, head: dict[str, object], problem: str) -> None:
    path = write(tmp_path, {**foreign(), **head})
    with pytest.raises(MockSchedulerError) as caught:
        scheduler(path, make_batch(2, 2), missing_logprobs="zero").get_batch(request())
    assert str(caught.value) == f"{path}{problem}"


@pytest.mark.parametrize(("temperature", "is_used"), [(torch.tensor(1.0), True), ([1.0], False), (math.nan, False)])
def test_a_temperature_is_a_number_in_whatever_form(tmp_path: Path, temperature: object, is_used: bool) -> None:
    """Tensors counted as so many temperatures as there are trajectories, and lists ended in a traceback."""
    content = foreign()
    for record in content["trajectories"]:  # type: ignore[attr-defined]
        record["extra_fields"]["temperature"] = temperature
    rollouts = scheduler(write(tmp_path, content), make_batch(2, 2), missing_logprobs="zero")
    if is_used:
        assert rollouts.get_batch(request()).sampling == SAMPLING
        return
    with pytest.raises(BatchError, match=r"temperature is '.*'; expected a finite number"):
        rollouts.get_batch(request())


def test_lines_of_several_steps_are_no_step(tmp_path: Path) -> None:
    """They were joined to one, and what they say of step and sampling was dropped."""
    lines = [{"step": step, "trajectories": [record]} for step, record in enumerate(foreign()["trajectories"])]  # type: ignore[arg-type,var-annotated]
    path = tmp_path / "step_000000.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    with pytest.raises(TraceError) as caught:
        load_content(path)
    assert str(caught.value) == f"{path}, line 2: is of another step or run than the lines before it"
    path.write_text(json.dumps({**lines[0], "num_trajectories": 2}) + "\n" + json.dumps(lines[0]))
    with pytest.raises(TraceError, match="line 1: says that it holds 2 trajectories, and holds 1"):
        load_content(path)


def test_a_line_may_hold_what_other_texts_end_lines_with(tmp_path: Path) -> None:
    """A line separator of Unicode (U+2028) within a text cut the line there."""
    path = tmp_path / "step_000000.jsonl"
    path.write_text(json.dumps({"note": "a\u2028b"}, ensure_ascii=False), encoding="utf-8")
    assert load_content(path) == {"note": "a\u2028b"}


# Remote


def test_a_remote_run_writes_what_is_asked_for(tmp_path: Path) -> None:
    batch = make_batch(1, 2)
    options = {"prepared_trajectories": True, "datums": True, "training_metrics": True}
    config = DebugConfig.model_validate(
        {"enable_data_dump": True, "dump_dir": str(tmp_path), "remote_api_dump_options": options}
    )
    advantages = torch.arange(len(batch.rollout_logprobs)) + 1.0
    remote = RemoteDump(config=config, step=2)
    remote.save_prepared_trajectories(batch, advantages)
    remote.save_datums(build_datums(batch, advantages))
    remote.save_training_metrics({"loss": 0.25})
    assert sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.pt")) == [
        "datums/step_000002.pt",
        "prepared_trajectories/step_000002.pt",
        "training_metrics/step_000002.pt",
    ]
    (first, second) = load_content(tmp_path / "datums/step_000002.pt")["datums"]
    tokens = batch.tokens.tolist()
    assert first["model_input"] == {"tokens": tokens[:2]}
    assert first["loss_fn_inputs"]["target_tokens"] == tokens[1:3]
    assert first["loss_fn_inputs"]["advantages"] == [0.0, 1.0]
    assert first["loss_fn_inputs"]["mask"] == [0, 1]
    assert second["loss_fn_inputs"]["logprobs"] == [0.0, *batch.rollout_logprobs[1:3].tolist()]
    assert second["sample_id"] == str(
        SampleIdentity(scheduler_id="default", group_id=0, episode_id=0, env_id=1, turn=0)
    )
    assert load_content(tmp_path / "training_metrics/step_000002.pt") == {"step": 2, "metrics": {"loss": 0.25}}


def test_a_remote_run_writes_nothing_else(tmp_path: Path) -> None:
    config = DebugConfig.model_validate(
        {
            "enable_data_dump": True,
            "dump_dir": str(tmp_path),
            "dump_every_n_steps": 2,
            "remote_api_dump_options": {"training_metrics": True},
        }
    )
    batch = make_batch(1, 2)
    RemoteDump(config=config, step=1).save_training_metrics({"loss": 1.0})
    RemoteDump(config=config, step=2).save_prepared_trajectories(batch, batch.rollout_logprobs)
    RemoteDump(config=config, step=2).save_datums([])
    assert list(tmp_path.iterdir()) == []
