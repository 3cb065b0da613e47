"""Values inside of steps that other tools dumped become traces: in place, in order, and compared.

``written_by_others.tar.xz`` holds files that the tools' own writers made: SGLang's ``dumper.py`` 0.5.23 around two
layers of a toy, in one process and over tp 2 of megatron-core, and once with 0.25 added to one element; msprobe 26.2.0
around a LayerNorm, and with another epsilon; RL-Kernel's ``Capture`` (82fd0318) over tp 2 and cp 2; Relax's
``BundleWriter`` (7a346d39) of two ranks; miles' ``save_debug_rollout_data`` (31f1ca961).
"""

from __future__ import annotations

import json
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mock_scheduler import compare, open_trace
from mock_scheduler.adapters.formats import FORMATS
from mock_scheduler.adapters.imports.sglang_dims import AxisPlace, place_tensor
from mock_scheduler.commands.foreign import ImportCommand, run_import
from mock_scheduler.errors import ConfigError, ForeignFileError, MockSchedulerError, RecordingError
from mock_scheduler.support.pickles.torch_files import read_torch_file
from mock_scheduler.trace.full.reader import open_trace as open_whole
from mock_scheduler.trace.shards import cut_shard
from mock_scheduler.verdict.replicas import check_replicas_at
from mock_scheduler.verdict.verdict import VerdictKind
from tests.adapters.imports.forging import Described, Global, torch_bytes
from tests.adapters.imports.importing import write

ARCHIVE = Path(__file__).with_name("written_by_others.tar.xz")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("written")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.fixture(scope="module")
def traces(written: Path) -> Callable[[str, str], Path]:
    """Imports a folder of the archive once."""

    def imported(name: str, folder: str) -> Path:
        target = written / "traces" / name / folder
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            assert run_import(name, written / name / folder, target, ImportCommand()) == 0
        return target

    return imported


def tensors_of(trace: Path, step: int) -> dict[tuple[str, str], torch.Tensor]:
    """The whole tensors of a step by kind and name, in the order of computation."""
    with open_trace(trace) as opened:
        return {(key.kind, key.name): opened.tensor(key) for key in opened.keys(step)}


Traces = Callable[[str, str], Path]


def is_identical(first: Path, second: Path) -> bool:
    verdict = compare(first, second)
    return verdict.passes and verdict.kind is VerdictKind.IDENTICAL


@pytest.mark.parametrize(
    ("name", "sides", "kind", "tensor", "step"),
    [
        ("sglang-dumper", ("one", "bad"), "activation", "layers.1.inner", 1),
        ("msprobe", ("a", "b"), "activation", "Functional.layer_norm.0.forward.input.4", 0),
        ("rl-kernel", ("b/rollout", "b/training"), "activation", "layer0.mlp", 0),
        ("relax", ("a", "b"), "output", "logprobs", 3),
    ],
)
def test_a_planted_difference_is_found_and_named_first(
    traces: Traces, name: str, sides: tuple[str, str], kind: str, tensor: str, step: int
) -> None:
    folders = [traces(name, side.partition("/")[0]) / side.partition("/")[2] for side in sides]
    assert is_identical(folders[0], shutil.copytree(folders[0], folders[0].parent / f"copy of {folders[0].name}"))
    verdict = compare(*folders)
    assert not verdict.passes
    assert verdict.first is not None
    assert (verdict.first.kind, verdict.first.name, verdict.first.step) == (kind, tensor, step)


def test_dumps_of_two_layouts_are_compared_where_their_dims_are_known(written: Path, traces: Traces) -> None:
    one, two = traces("sglang-dumper", "one"), traces("sglang-dumper", "two")
    verdict = compare(one, two)
    assert verdict.kind is VerdictKind.IDENTICAL
    tensors = verdict.tensors
    assert tensors is not None
    lacking = {item.name: item.sides for item in tensors.not_compared if item.kind == "activation"}
    assert lacking["layers.0.plain"] == ("candidate",)
    assert lacking["@rank1of2.layers.0.plain"] == lacking["@tp0of2.layers.1.part"] == ("baseline",)
    assert {item.key.name for item in tensors.differences} >= {"layers.0.hidden", "layers.1.inner", "inner.call1"}
    first, second = tensors_of(one, 1), tensors_of(two, 1)
    file = written / "sglang-dumper/one/step=1___rank=0___dump_index=25___name=inner___recompute_status=disabled___"
    value = read_torch_file(Path(f"{file}layer_id=1.pt"))["value"]
    assert torch.equal(first["activation", "layers.1.inner"], value)
    assert torch.equal(second["activation", "layers.1.inner"], value)
    parts = [second["activation", f"@tp{rank}of2.layers.1.part"] for rank in range(2)]
    assert torch.equal(parts[0] + parts[1], first["activation", "layers.1.part"])
    assert list(first)[:4] == [
        ("input", "input_ids"),
        ("activation", "layers.0.hidden"),
        ("activation", "layers.0.inner"),
        ("activation", "layers.0.part"),
    ]
    # Gradients stand behind, in the order in which the backward pass met them; the last call is of the first layer.
    backward = [name for kind, name in first if kind == "activation_gradient"]
    assert backward == ["plain", "part", "inner", "plain.call1", "hidden", "part.call1", "inner.call1", "hidden.call1"]
    assert first["activation_gradient", "plain"].tolist() == torch.ones(4, 6).tolist()  # one number in the file
    weights = tensors_of(one, 2)
    assert list(weights)[:2] == [("initial", "up.0"), ("gradient", "up.0")]
    assert weights["initial", "up.0"].shape == (8, 6)


def test_calls_of_msprobe_keep_values_numbers_and_order(written: Path, traces: Traces) -> None:
    found = tensors_of(traces("msprobe", "a"), 1)
    folder = written / "msprobe/a/step1/proc7/dump_tensor_data"
    for key, file in {
        ("initial", "Module.3.Linear.weight"): "Module.3.Linear.forward.0.parameters.weight.pt",
        ("activation", "Module.1.LayerNorm.forward.0.output.0"): "Module.1.LayerNorm.forward.0.output.0.pt",
        ("activation_gradient", "Functional.linear.1.backward.output.2"): "Functional.linear.1.backward.output.2.pt",
        ("gradient", "Module.0.Linear.weight"): "Module.0.Linear.parameters_grad.0.weight.pt",
    }.items():
        assert torch.equal(found[key], read_torch_file(folder / file)), key
    assert found["activation", "Functional.layer_norm.0.forward.input.4"].item() == 1e-5
    assert found["activation", "Tensor.add_.0.forward.input.alpha"].item() == -0.1
    names = list(dict.fromkeys(name.partition(".forward")[0].partition(".backward")[0] for _, name in found))
    assert names[:3] == ["Functional.linear.0", "Module.0.Linear.weight", "Module.0.Linear.bias"]
    assert names[-1] == "Tensor.add_.5"  # the optimizer's, behind all gradients
    with pytest.raises(ForeignFileError, match="is of task 'statistics', which holds no tensors; expected 'tensor'"):
        traces("msprobe", "s")


def test_captures_of_two_layouts_are_one_sample(traces: Traces) -> None:
    training, rollout = (traces("rl-kernel", "a") / side for side in ("training", "rollout"))
    assert is_identical(rollout, training)
    with open_trace(training) as trace:
        assert [key.name for key in trace.keys(0)] == ["embed", "layer0.mlp", "logits"]
        tensor = trace.tensor(trace.key(0, "activation", "logits"))
    assert tensor.shape == (6, 8)  # positions 2 and 5 of a sample of 6 were captured
    values = read_torch_file(rollout.parents[3] / "rl-kernel/a/captures/rollout-rank0-call2.pt")["tensors"]["value"]
    assert torch.equal(tensor[[5, 2]], values)


def test_bundles_are_values_of_tokens_by_rollout_and_update(traces: Traces) -> None:
    with open_trace(traces("relax", "a")) as trace, open_whole(traces("relax", "a")) as reader:
        table = reader.footer(3).rows
        found = {(key.update, key.kind, key.name): trace.tensor(key) for key in trace.keys(3)}
    starts = dict(zip(table.identities, table.first_places, strict=True))
    assert sorted(starts) == sorted(
        f"{part}, rank {rank}, s-{number}"
        for part, numbers in (("rollout", 2), ("update 0", 1), ("update 1", 1))
        for rank in range(2)
        for number in range(numbers)
    )
    # Of 5 tokens the last 2 are the response: values stand at the tokens that predict them.
    place = starts["rollout, rank 1, s-0"]
    assert found[0, "score", "old_logprobs"][place + 2 : place + 4].tolist() == [-10 / 8, -11 / 8]
    place = starts["update 1, rank 0, s-0"]  # 3 of 3 tokens
    assert found[1, "output", "logprobs"][place : place + 3].tolist() == [-1 / 8 + 0.5, -2 / 8 + 0.5, -3 / 8 + 0.5]
    assert found[1, "loss", "@rank1of2.loss.policy.loss"].tolist() == [1.25]
    # One rank has no name for the place of another.
    assert ("loss", "loss.policy.loss") in tensors_of(traces("relax", "one"), 3)


# --- Files that were cut, changed or forged --------------------------------------------------------------------------

HOSTILE = torch_bytes({"value": Described(Global("os", "system"), "true"), "meta": {}})


@pytest.mark.parametrize(
    ("name", "folder", "file", "change", "problem"),
    [
        ("sglang-dumper", "one", "step=0___rank=0___dump_index=1___name=input_ids*", HOSTILE, r"names 'os\.system'"),
        ("sglang-dumper", "one", "step=0___rank=0___dump_index=2___*", None, "is no whole file of torch.save"),
        ("sglang-dumper", "one", "step=0___rank=0___dump_index=2___*", torch_bytes(5), "holds no value and meta"),
        ("msprobe", "a", "step0/proc7/dump_tensor_data/Functional.linear.0.*", HOSTILE, r"names 'os\.system'"),
        ("msprobe", "a", "step0/proc7/dump_tensor_data/Functional.linear.0.*", b"", "is no whole file of torch.save"),
        ("msprobe", "a", "step0/proc7/dump.json", None, "is not JSON"),
        ("rl-kernel", "a", "captures/training-rank0-call1.pt", HOSTILE, r"names 'os\.system'"),
        ("rl-kernel", "a", "captures/training-rank0-call1.pt", None, "is no whole file of torch.save"),
        ("rl-kernel", "a", "capture-manifest.json", None, "is not JSON"),
        ("relax", "a", "replay-3-1/rank-1/payloads/entropy.pt", HOSTILE, "has changed since it was written"),
        ("relax", "a", "replay-3-1/rank-1/index.json", None, "has changed since it was written"),
    ],
)
def test_a_changed_file_is_refused_by_name_and_nothing_is_left(
    written: Path, tmp_path: Path, name: str, folder: str, file: str, change: bytes | None, problem: str
) -> None:
    shutil.copytree(written / name / folder, tmp_path / "files")
    for path in sorted((tmp_path / "files").glob(file)):
        data = path.read_bytes()
        path.write_bytes(data[: len(data) // 2] if change is None else change)
    with pytest.raises(MockSchedulerError, match=problem) as caught:
        run_import(name, tmp_path / "files", tmp_path / "trace", ImportCommand())
    assert str(tmp_path / "files") in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["files"]


@pytest.mark.parametrize(
    ("name", "folder", "file", "problem"),
    [
        ("msprobe", "a", "step0/proc7/dump_tensor_data/Tensor.add_.1.*", "is not there, though dump.json names it"),
        ("rl-kernel", "a", "captures/training-rank3-call1.pt", "side training holds in part or not: layer0.mlp at pos"),
        ("rl-kernel", "a", "capture-manifest.json", "has no capture-manifest.json: give the folder of one capture"),
        ("relax", "a", "replay-3-1/rank-1/payloads/entropy.pt", "was not written to its end, or a file is lost"),
        ("relax", "a", "replay-3-1/COMPLETE", "was not written to its end, or a file is lost"),
    ],
)
def test_a_lost_file_is_said(written: Path, tmp_path: Path, name: str, folder: str, file: str, problem: str) -> None:
    shutil.copytree(written / name / folder, tmp_path / "files")
    for path in (tmp_path / "files").glob(file):
        path.unlink()
    with pytest.raises(MockSchedulerError, match=problem):
        run_import(name, tmp_path / "files", tmp_path / "trace", ImportCommand())


def dump(folder: Path, value: Any, *, rank: int = 0, world_size: int = 1, index: int = 1, **meta: Any) -> None:
    """A file as SGLang's dumper writes it."""
    about = {"step": 0, "rank": rank, "dump_index": index, "name": "x", "world_size": world_size, **meta}
    write(
        folder / f"step=0___rank={rank}___dump_index={index}___name=x.pt", torch_bytes({"value": value, "meta": about})
    )


def test_what_a_recomputation_repeats_is_no_tensor_of_its_own(tmp_path: Path) -> None:
    values = [torch.ones(2), torch.ones(2), torch.ones(2), torch.zeros(2)]
    for index, value in enumerate(values):
        status = ("original", "recompute")[index % 2]
        dump(tmp_path / "d", value, index=index, name=f"x{index // 2}", recompute_status=status, layer_id=index // 2)
    run_import("sglang-dumper", tmp_path / "d", tmp_path / "t", ImportCommand())
    assert list(tensors_of(tmp_path / "t", 0)) == [
        ("activation", "layers.0.x0"),
        ("activation", "layers.1.x1"),
        ("recomputed", "layers.1.x1"),
    ]


def test_later_stages_stand_behind_and_go_back_first(tmp_path: Path) -> None:
    for rank in range(2):
        info = {"pp_rank": rank, "pp_size": 2}
        for index, name in enumerate((f"layer{rank}", f"grad__layer{rank}")):
            dump(
                *(tmp_path / "d", torch.ones(2)),
                rank=rank,
                world_size=2,
                index=index + 1,
                name=name,
                dims="h",
                megatron_parallel_info=info,
            )
    run_import("sglang-dumper", tmp_path / "d", tmp_path / "t", ImportCommand())
    assert [name for _, name in tensors_of(tmp_path / "t", 0)] == ["layer0", "layer1", "layer1", "layer0"]


def test_weights_of_a_later_step_are_compared(tmp_path: Path) -> None:
    """A step begins with what the step before left, but a dump has no parameters after a step."""
    for run, value in (("a", 1.0), ("b", 1.5)):
        for step in range(2):
            about = {"rank": 0, "dump_index": 1, "name": "param__w", "world_size": 1, "step": step}
            weights = torch.full((3,), value if step else 1.0)
            file = f"{run}/step={step}___rank=0___dump_index=1___name=param__w.pt"
            write(tmp_path / file, torch_bytes({"value": torch.nn.Parameter(weights), "meta": about}))
        run_import("sglang-dumper", tmp_path / run, tmp_path / f"trace {run}", ImportCommand())
    verdict = compare(tmp_path / "trace a", tmp_path / "trace b")
    assert not verdict.passes
    assert verdict.first is not None
    assert (verdict.first.step, verdict.first.kind, verdict.first.name) == (1, "initial", "w")


@pytest.mark.parametrize(
    ("dims", "shape", "rank", "indices"),
    [
        ("s[cp:zigzag] h", (4, 3), 1, [2, 3, 4, 5]),
        ("s[cp:zigzag,sp] h", (2, 3), 1, [4, 5]),  # sp cuts what cp left: 2, 3, 4, 5
        ("s[sp,cp] h", (2, 3), 1, [6, 7]),
        ("s[ep] h", (8, 3), 1, list(range(8))),
    ],
)
def test_dims_place_a_ranks_part(dims: str, shape: tuple[int, int], rank: int, indices: list[int]) -> None:
    places = {"cp": AxisPlace(rank, 2), "sp": AxisPlace(rank, 2)}
    spec = place_tensor("x", shape, dims, places, "f")
    whole = torch.arange(24).reshape(8, 3)
    assert spec.global_shape == (8, 3)
    assert cut_shard(whole, spec).tolist() == whole[indices].tolist()


@pytest.mark.parametrize(
    ("dims", "problem"),
    [
        ("t", r"dims 't' name 1 dimensions of \[4, 3\]"),
        ("t h[xp]", r"'xp' is no axis; expected one of tp, cp"),
        ("t h[cp:zigzag]", r"'h\[cp:zigzag\]' is zigzag; expected that of dimension s alone"),
        ("s[cp:zigzag] 3", r"'3' names no dimension; expected for example h\[tp\]"),
    ],
)
def test_dims_that_cannot_be_are_refused(dims: str, problem: str) -> None:
    with pytest.raises(ForeignFileError, match=problem):
        place_tensor("x", (4, 3), dims, {"cp": AxisPlace(0, 2)}, "f")


def test_replicas_and_parts_of_a_sum_have_names_of_their_own(tmp_path: Path) -> None:
    for rank in range(2):
        info = {"tp_rank": rank, "tp_size": 2}
        dump(
            tmp_path / "d",
            torch.full((2, 2), float(rank)),
            rank=rank,
            world_size=2,
            dims="t h",
            sglang_parallel_info=info,
        )
    run_import("sglang-dumper", tmp_path / "d", tmp_path / "t", ImportCommand())
    # tp ranks that are not named hold copies, and these differ.
    (conflict,) = check_replicas_at(tmp_path / "t").conflicts
    assert (conflict.key.name, conflict.max_abs) == ("x", 1.0)
    assert place_tensor("x", (2,), "b # dp:=attn_dp", {"attn_dp": AxisPlace(1, 2)}, "f").name == "@dp1of2.x"
    assert place_tensor("x", (2,), "b[dp]", {"dp": AxisPlace(1, 2)}, "f").global_shape == (4,)
    assert place_tensor("x", (2,), "t[cp:zigzag]", {"cp": AxisPlace(1, 2)}, "f").name == "@cp1of2.x"


def test_an_expanded_tensor_is_read_up_to_a_size(tmp_path: Path) -> None:
    dump(tmp_path / "small", torch.ones(1).expand(1 << 20))
    run_import("sglang-dumper", tmp_path / "small", tmp_path / "t", ImportCommand())
    dump(tmp_path / "large", torch.ones(1).expand(1 << 30))
    with pytest.raises(
        ForeignFileError, match=r"holds torch.float32 \[1073741824\] on cpu, of which it stores 4 bytes"
    ):
        run_import("sglang-dumper", tmp_path / "large", tmp_path / "u", ImportCommand())
    with pytest.raises(ForeignFileError, match="the others are claimed"):
        read_torch_file(next((tmp_path / "small").iterdir()))  # nobody asked for such tensors


def test_ranks_that_contradict_their_files_are_refused(tmp_path: Path) -> None:
    dump(tmp_path / "d", torch.ones(2), rank=1, world_size=1)
    with pytest.raises(ForeignFileError, match="says that it is of rank 1 of 1"):
        run_import("sglang-dumper", tmp_path / "d", tmp_path / "t", ImportCommand())


def test_two_samples_in_one_capture_are_refused(written: Path, tmp_path: Path) -> None:
    shutil.copytree(written / "rl-kernel/a", tmp_path / "a")
    path = tmp_path / "a/captures/training-rank0-call0.pt"
    record = torch.load(path, weights_only=True)
    torch.save({**record, "identity": {**record["identity"], "tokens": "others"}}, path)
    with pytest.raises(ForeignFileError, match="are of two samples: capture one at a time"):
        run_import("rl-kernel", tmp_path / "a", tmp_path / "t", ImportCommand())
    (tmp_path / "a/captures/rollout-rank0-call9.lock").touch()
    with pytest.raises(ForeignFileError, match=r"rollout-rank0-call9\.pt was never written: capture again"):
        run_import("rl-kernel", tmp_path / "a", tmp_path / "t", ImportCommand())


def test_a_bundle_of_another_rank_or_format_is_refused(written: Path, tmp_path: Path) -> None:
    shutil.copytree(written / "relax/a", tmp_path / "a")
    shutil.rmtree(tmp_path / "a/replay-3-1/rank-1")
    shutil.rmtree(tmp_path / "a/replay-3-0/rank-1")
    shutil.rmtree(tmp_path / "a/replay-rollout-3/rank-1")
    with pytest.raises(ForeignFileError, match=r"rollout 3 has rank 0, and no bundle of rank \[1\]"):
        run_import("relax", tmp_path / "a", tmp_path / "t", ImportCommand())


def test_digests_without_values_are_refused_with_the_reason(tmp_path: Path) -> None:
    write(tmp_path / "rank_000000.jsonl", json.dumps({"event": "tensor"}).encode())
    with pytest.raises(ConfigError, match="it holds digests of tensors and no values"):
        run_import("megatron-determinism", tmp_path, tmp_path / "t", ImportCommand())
    with pytest.raises(RecordingError, match=r"holds no file such as step=0___rank=0.*; it holds rank_000000\.jsonl"):
        run_import("sglang-dumper", tmp_path, tmp_path / "t", ImportCommand())
    assert [one.name for one in FORMATS if one.tracer] == [
        *("vime-gradients", "megatron-saved", "sglang-dumper", "msprobe", "rl-kernel", "relax")
    ]
