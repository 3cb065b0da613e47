"""One batch in one file: what is written comes back bit for bit, and what is not a step is refused."""

import dataclasses
import hashlib
import re
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load, load_file

from mock_scheduler.batch import RolloutBatch, SampleIdentity, SamplingParams, Termination, Trajectory
from mock_scheduler.batch.columns import Ragged, RowValue
from mock_scheduler.errors import CorruptRecordingError, RecordingError
from mock_scheduler.recording.step.step_file import decode_step, encode_step
from mock_scheduler.support.tensor_bytes import DTYPES
from tests.recording.builders import SAMPLING, make_batch, make_info, make_row, make_rows
from tests.recording.step_bytes import fixed_step, join_text, make_rich_batch, open_bytes, rewrite, tiny_step

GOLDEN = "d5695f228e0b1b292b0718607ff32ccc2781c25dea8eaba048c8243e7489095f"

#: Every dtype that a file may hold.
PLAIN_DTYPES = sorted(DTYPES.values(), key=str)


# torch warns once per process that complex32 is experimental, at its first empty tensor, wherever that is.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch.empty(0, dtype=torch.complex32)


def test_a_step_comes_back_bit_for_bit() -> None:
    batch = make_rich_batch()
    info = make_info(
        7,
        metrics={"a": 0.1, "b": -0.0},
        scheduler_state={"cursor": [1, None]},
        data_cursor={"epoch": 1, "index": 128},
        shard=(1, 4),
        group_size=8,
    )
    loaded, loaded_info = decode_step(encode_step(batch, info).to_bytes())
    assert loaded.is_identical(batch)
    assert loaded_info == info
    assert str(loaded_info.metrics["b"]) == "-0.0"
    assert loaded.extras["messages"].row(1) == [{"role": "user", "content": "row 1 é"}, None, -0.0]


def test_arrival_order_does_not_change_a_byte() -> None:
    rows = make_rows(2, 3)
    batches = [RolloutBatch.from_trajectories(order, sampling=SAMPLING, group_size=3) for order in (rows, rows[::-1])]
    assert encode_step(batches[0], make_info()).to_bytes() == encode_step(batches[1], make_info()).to_bytes()


def test_the_format_is_the_one_that_was_released() -> None:
    """Golden digest of format version 2; if it must change, so must ``STEP_VERSION``. To print it::

    python -c "from tests.recording.step_bytes import *; print(hashlib.sha256(fixed_step()).hexdigest())"
    """
    assert hashlib.sha256(fixed_step()).hexdigest() == GOLDEN


def test_the_pieces_are_views_of_the_tensors() -> None:
    batch = make_batch()
    encoded = encode_step(batch, make_info())
    assert sum(len(piece) for piece in encoded.pieces) == encoded.size_bytes == len(encoded.to_bytes())
    assert batch.tokens.numpy().tobytes() in encoded.to_bytes()
    batch.tokens.zero_()
    assert bytes(4 * len(batch.tokens)) in [bytes(piece) for piece in encoded.pieces]


def test_any_safetensors_reader_can_open_a_step(tmp_path: Path) -> None:
    batch = make_rich_batch(1, 2)
    data = encode_step(batch, make_info()).to_bytes()
    (tmp_path / "step").write_bytes(data)
    tensors = load_file(tmp_path / "step")
    assert torch.equal(tensors["tokens"], batch.tokens)
    assert tensors["identities"].tolist() == [[0, 0, 0, 0], [0, 0, 1, 0]]
    assert tensors["extras/score"].tolist() == [0.5, 1.5]
    assert tensors["extras/experts#offsets"].tolist() == [0, 0, 1]
    assert tensors["extras/flags#bits"].tolist() == [0b010111]  # rows True True True, False True False
    text = '[{"content":"row 0 \\u00e9","role":"user"},null,-0.0]'
    assert bytes(tensors["extras/messages"][: len(text)].tolist()).decode() == text
    assert set(load(data)) == set(tensors)


@pytest.mark.parametrize("dtype", PLAIN_DTYPES, ids=str)
def test_every_plain_dtype_can_be_opened_and_read_back(dtype: torch.dtype) -> None:
    highest, generator = (2 if dtype is torch.bool else 256), torch.Generator().manual_seed(0)
    bits = torch.randint(0, highest, (6 * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    values = bits.view(dtype).reshape(3, 2)
    rows = [
        Trajectory(**fields | {"extras": {"x": values[i], "scalar": values[i, 0], "r": Ragged(values[:i])}})
        for i, fields in enumerate(
            {name: getattr(row, name) for name in row.__dataclass_fields__} for row in make_rows(3, 1)
        )
    ]
    batch = RolloutBatch.from_trajectories(rows, sampling=SAMPLING, group_size=1)
    data = encode_step(batch, make_info()).to_bytes()
    loaded, _ = decode_step(data)
    assert loaded.is_identical(batch)
    assert loaded.extras["x"].row(0).dtype == dtype
    assert as_bits(loaded.extras["x"].values) == bits.tolist()
    assert as_bits(open_bytes(data).load(range(1, 3)).extras["x"].values) == bits[2 * dtype.itemsize :].tolist()
    assert len(load(data)) == 19  # what safetensors lacks is stored as bytes, so that any release of it can open it


def as_bits(values: torch.Tensor) -> list[int]:
    bits: list[int] = values.contiguous().reshape(-1).view(torch.uint8).tolist()
    return bits


def test_nan_payloads_and_negative_zero_keep_their_bits() -> None:
    patterns = [0x7FC00001, -0x3FFFFF, 0x7F800001, -(2**31), 0x7F800000]  # NaNs, -0.0, infinity
    values = torch.tensor(patterns, dtype=torch.int32).view(torch.float32)
    row = dataclasses.replace(make_row(), extras={"x": values})
    batch = RolloutBatch.from_trajectories([row], sampling=SAMPLING, group_size=1)
    loaded, _ = decode_step(encode_step(batch, make_info()).to_bytes())
    assert loaded.extras["x"].values.view(torch.int32).tolist() == [patterns]


def test_a_batch_without_rows_survives() -> None:
    batch = RolloutBatch.from_trajectories([], sampling=SAMPLING, group_size=4, meta={"a": 1})
    loaded, _ = decode_step(encode_step(batch, make_info()).to_bytes())
    assert loaded.is_identical(batch)
    assert (len(loaded), loaded.meta) == (0, {"a": 1})


def test_a_changed_tensor_is_named() -> None:
    data = encode_step(make_batch(), make_info()).to_bytes()
    changed = bytearray(data)
    for name in ("rollout_logprobs", "turn_rewards"):
        changed[data.index(getattr(make_batch(), name).numpy().tobytes())] ^= 1
    with pytest.raises(CorruptRecordingError) as caught:
        decode_step(changed, source="x/train/step_000000.safetensors")
    assert str(caught.value) == (
        "x/train/step_000000.safetensors: tensor 'rollout_logprobs', 'turn_rewards' does not match its digest: the "
        "file was changed after it was written. Restore it from a copy or record the step again."
    )
    decode_step(changed, verify=False)


def test_another_version_is_refused() -> None:
    for version, problem in (
        (1, "is older than 2, the only one this release reads: record again"),
        (
            3,
            "is newer than 2, the newest that this release reads. Update mock-scheduler, or record again with this "
            "release.",
        ),
    ):
        data = rewrite(tiny_step(), lambda document, version=version: document.update(version=version, other=1))
        with pytest.raises(RecordingError) as caught:
            decode_step(data, source="f")
        assert type(caught.value) is RecordingError
        assert str(caught.value) == f"f: step format version {version} {problem}"


REFUSED_DTYPES = ["quint8", "qint8", "qint32", "quint4x2", "quint2x4", "bits8", "bits1x8", "int4", "uint1", "int2048"]


@pytest.mark.parametrize("name", REFUSED_DTYPES)
def test_a_dtype_that_no_file_may_hold_is_refused_by_name(name: str) -> None:
    """The bytes of a quantised tensor were read as values, which ended the process."""
    data = rewrite(tiny_step(), lambda document: document["tensors"]["tokens"].update(dtype=name))
    with pytest.raises(RecordingError) as caught:
        decode_step(data, source="f")
    assert str(caught.value) == (
        f"f: tensor 'tokens' is of dtype {name!r}, which torch {torch.__version__} does not have, or no file may hold"
    )


def test_the_closed_list_holds_every_dtype_of_torch_but_the_refused_kinds() -> None:
    """A new release of torch must not add one unseen."""
    refused = re.compile(r"q|bits|u?int[1-7]$")
    named = {str(value).removeprefix("torch.") for value in vars(torch).values() if isinstance(value, torch.dtype)}
    assert {name for name in named if not refused.match(name)} == set(DTYPES)
    assert {name for name in REFUSED_DTYPES if name != "int2048"} <= {name for name in named if refused.match(name)}


FORGED_SAMPLING = {"temperature": "hot", "top_p": 1.0, "top_k": None, "logprobs_mode": "raw"}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"group_size": 2}, "default/group 0/episode 0: 1 of 2 trajectories"),
        ({"group_size": True}, "group_size True"),
        ({"tags": []}, "content is no rollout batch: IndexError"),
        ({"tags": [1]}, "tags is \\[1\\]; expected a list of texts"),
        ({"scheduler_ids": "default"}, "scheduler_ids is 'default'; expected a list of texts"),
        (
            {"sampling": FORGED_SAMPLING},
            "temperature is 'hot'; expected a finite float or int of 0 or more; top_k is None",
        ),
        ({"meta": 1}, "meta is of type int"),
        ({"num_trajectories": 0}, "1 trajectories; its header says 0"),
        ({"num_rows": 2}, "tensor 'rewards' is float32 \\[1\\], which does not fit 2 rows"),
        ({"num_rows": "1"}, "'1' rows of 1 trajectories"),
        ({"extras": {"x": "json"}}, "tensor 'extras/x' is missing; tensor 'extras/x#offsets' is missing"),
        ({"extras": {"x": "pickle"}}, "extra 'x' is of kind 'pickle'"),
        ({"sampling": {}}, "content is no rollout batch: TypeError"),
        ({"info": {}}, "content is no rollout batch: KeyError"),
    ],
)
def test_content_that_is_no_batch_is_refused_though_its_digests_are_right(
    change: dict[str, object], problem: str
) -> None:
    data = rewrite(tiny_step(), lambda document: document["content"].update(change))
    with pytest.raises(CorruptRecordingError, match=problem):
        decode_step(data)


def test_info_of_wrong_types_is_refused() -> None:
    data = rewrite(tiny_step(), lambda document: document["content"]["info"].update(step="0", shard=[0.5, 1]))
    with pytest.raises(CorruptRecordingError, match=r"step is '0'; expected int; shard is \(0.5, 1\); expected"):
        decode_step(data)


def test_offsets_that_are_not_those_of_the_mask_are_refused() -> None:
    """A load of some rows relies on them, so a whole load checks them."""
    batch = make_batch(1, 2)
    data = bytearray(encode_step(batch, make_info()).to_bytes())
    offsets = batch.response_offsets.numpy().tobytes()
    assert offsets != batch.row_offsets.numpy().tobytes()
    position = bytes(data).index(offsets) + 8
    data[position] += 1
    with pytest.raises(CorruptRecordingError, match="response_offsets are not those of response_mask"):
        decode_step(bytes(data), verify=False)
    data[position] += 100
    with pytest.raises(CorruptRecordingError, match="response_offsets do not rise"):
        decode_step(bytes(data), verify=False)


@pytest.mark.parametrize(
    ("header", "problem"),
    [
        (b"[" * 100_000, "header is no JSON"),
        (b"[]", "header has no metadata 'rollout': not a recorded step"),
        (b"{}", "header has no metadata 'rollout': not a recorded step"),
        (b'{"__metadata__":{"rollout":1}}', "header has no metadata 'rollout'"),
        (b'{"__metadata__":{"rollout":"1"}}', "header metadata is of type int, expected an object"),
        (b'{"__metadata__":{"rollout":"{}"}}', "header metadata does not match its digest"),
        (b'{"a":NaN}', "header has no metadata"),
        (b'{"a":"\xff"}', "header is no JSON: 'ascii' codec can't decode byte 0xff"),
        (b'{"a":' + b"9" * 5000 + b"}", "header is no JSON: Exceeds the limit"),
    ],
)
def test_hostile_headers_are_refused(header: bytes, problem: str) -> None:
    with pytest.raises(CorruptRecordingError, match=problem):
        decode_step(join_text(header))


@pytest.mark.parametrize(
    ("item", "problem"),
    [
        ({"shape": [2**62, 4]}, "is over 281474976710656 bytes"),
        ({"shape": [2**40, 2**40]}, "is over 281474976710656 bytes"),
        ({"shape": [0, 2**40, 2**40]}, "is over 281474976710656 bytes"),
        ({"shape": [-2]}, "shape is no list of up to 64 sizes"),
        ({"shape": [2.0]}, "shape is no list of up to 64 sizes"),
        ({"shape": [1] * 65}, "shape is no list of up to 64 sizes"),
        ({"shape": 2}, "header entry cannot be read"),
        ({"more": 2}, "header entry cannot be read"),
        ({"shape": [2**20]}, "digests are not those of 4194304 bytes"),
        ({"blocks": 1}, "digests are not those of 8 bytes"),
        ({"shape": [4]}, "header is not in canonical form"),
        ({"dtype": "float32"}, "header is not in canonical form"),
    ],
)
def test_a_tensor_table_that_cannot_be_is_refused(item: dict[str, object], problem: str) -> None:
    data = rewrite(tiny_step(), lambda document: document["tensors"]["tokens"].update(item))
    with pytest.raises(CorruptRecordingError, match=problem):
        decode_step(data)


def test_a_huge_header_size_is_refused_before_anything_is_allocated() -> None:
    with pytest.raises(CorruptRecordingError, match="header size 9223372036854775807 is over the limit"):
        decode_step((2**63 - 1).to_bytes(8, "little") + b"{}")


def test_what_is_no_json_is_named() -> None:
    for changes, label in (
        (
            {"metrics": {"time/rollout_s": float("nan")}},
            "metrics.time/rollout_s is nan; expected a finite float or int",
        ),
        ({"scheduler_state": {"a": 1, "b": float("inf")}}, "scheduler_state.b is inf; JSON has no NaN and no infinity"),
        ({"data_cursor": float("nan")}, "data_cursor is nan; JSON has no NaN and no infinity"),
    ):
        with pytest.raises(RecordingError) as caught:
            make_info(3, **changes)
        assert str(caught.value) == f"info of step 3 has what a file cannot keep: {label}"


def test_a_header_over_the_limit_is_refused_when_written() -> None:
    with pytest.raises(RecordingError, match="over the limit of 8388608"):
        encode_step(make_batch(), make_info(scheduler_state={"cache": "x" * 2**23}))


def test_writing_into_a_decoded_tensor_leaves_the_bytes_alone() -> None:
    data = encode_step(make_batch(), make_info()).to_bytes()
    batch, _ = decode_step(data)
    batch.tokens.zero_()
    assert decode_step(data)[0].is_identical(make_batch())


finite = st.floats(allow_nan=False, allow_infinity=False, width=32)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


def tensor_of(draw: st.DrawFn, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Any bits at all, NaN payloads included."""
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    byte = st.integers(0, 1 if dtype is torch.bool else 255)
    data = draw(st.lists(byte, min_size=num_bytes, max_size=num_bytes))
    return torch.tensor(data, dtype=torch.uint8).view(dtype).reshape(shape)


@st.composite
def extras(draw: st.DrawFn, num_rows: int) -> list[dict[str, RowValue]]:
    """Columns of every kind and dtype: per row, the same names and kinds."""
    rows: list[dict[str, RowValue]] = [{} for _ in range(num_rows)]
    for name in draw(st.sets(st.sampled_from(["a", "B/c", "d.e-f", "g:1"]), max_size=3)):
        kind, dtype = draw(st.sampled_from(["dense", "ragged", "json"])), draw(st.sampled_from(PLAIN_DTYPES))
        shape = tuple(draw(st.lists(st.integers(0, 2), max_size=2)))
        for row in rows:
            if kind == "json":
                row[name] = draw(json_values)
            elif kind == "ragged":
                row[name] = Ragged(tensor_of(draw, dtype, (draw(st.integers(0, 3)), *shape)))
            else:
                row[name] = tensor_of(draw, dtype, shape)
    return rows


@st.composite
def trajectories(draw: st.DrawFn, env_id: int, row_extras: dict[str, RowValue]) -> Trajectory:
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
        extras=row_extras,
    )


@st.composite
def batches(draw: st.DrawFn) -> RolloutBatch:
    all_extras = draw(st.integers(0, 5).flatmap(extras))
    rows = [draw(trajectories(env_id=i, row_extras=row_extras)) for i, row_extras in enumerate(all_extras)]
    sampling = SamplingParams(temperature=0.7, top_p=0.9, top_k=5, logprobs_mode="raw")
    meta = draw(st.dictionaries(st.text(max_size=3), json_values, max_size=2))
    return RolloutBatch.from_trajectories(rows, sampling=sampling, group_size=None, meta=meta)


@given(batches(), finite, json_values)
def test_any_batch_survives_the_file(batch: RolloutBatch, metric: float, data_cursor: object) -> None:
    info = make_info(metrics={"m": metric}, data_cursor=data_cursor)
    loaded, loaded_info = decode_step(encode_step(batch, info).to_bytes())
    assert loaded.is_identical(batch)
    assert loaded_info == info
    assert loaded.sampling == batch.sampling


@given(batches(), st.data())
def test_any_rows_of_any_batch_are_those_that_were_written(batch: RolloutBatch, data: st.DataObject) -> None:
    step = open_bytes(encode_step(batch, make_info()).to_bytes())
    start = data.draw(st.integers(0, len(batch)))
    stop = data.draw(st.integers(start, len(batch)))
    part = step.load(range(start, stop))
    assert part.digest() == batch.select(list(range(start, stop))).digest() or not len(part)
    assert part.identities == batch.identities[start:stop]


def test_an_info_that_would_come_back_otherwise_is_refused_when_it_is_made() -> None:
    """Keys that are numbers came back as texts and tuples as lists; NumPy's numbers ended the writer's thread."""
    with pytest.raises(RecordingError) as caught:
        make_info(
            np.int64(3),
            policy_version=True,
            mode="test",
            metrics={1: 2.0, "a": np.float32(1)},
            scheduler_state={"cursors": {0: 1}, "rng": (3, (1, 2), None)},
            data_cursor={"at": (1,)},
            shard=[0, 1],
        )
    assert str(caught.value) == (
        "info of step 3 has what a file cannot keep: step is np.int64(3); expected int; policy_version is True; "
        "expected int; mode is 'test'; expected 'train' or 'val'; shard is [0, 1]; expected (index, count); "
        "metrics: key 1 is int; JSON has text keys only; metrics.a is np.float32(1.0); expected a finite float or int; "
        "scheduler_state.cursors: key 0 is int; JSON has text keys only; scheduler_state.rng is a tuple, which would "
        "come back as a list; make it one; data_cursor.at is a tuple, which would come back as a list; make it one"
    )


def test_a_forged_prompt_digest_is_found_by_verification() -> None:
    """A load believes what the digests of the file cover; the whole check computes it anew."""
    batch = make_batch(1, 1)
    object.__setattr__(batch, "prompt_digests", ("0" * 64,))
    step = open_bytes(encode_step(batch, make_info()).to_bytes())
    assert step.load().prompt_digests == ("0" * 64,)
    with pytest.raises(CorruptRecordingError, match=r"prompt_digest is '0{64}'; that of its prompt is"):
        step.verify()


def test_a_header_of_more_lists_than_a_recording_may_hold_is_refused_both_ways() -> None:
    """8 MB of empty lists took 250 MB. Brackets inside of texts are none."""
    many = [[] for _ in range(2**18 + 1)]
    data = rewrite(tiny_step(), lambda document: document["content"]["meta"].update(x=many))
    with pytest.raises(CorruptRecordingError, match="holds more than 262144 lists and objects"):
        decode_step(data, source="f")
    batch = make_batch()
    with pytest.raises(RecordingError, match="holds more than 262144 lists and objects"):
        encode_step(dataclasses.replace(batch, meta={"x": many}), make_info())
    texts = dataclasses.replace(batch, meta={"x": "[{" * 2**18})
    assert decode_step(encode_step(texts, make_info()).to_bytes())[0].is_identical(texts)
