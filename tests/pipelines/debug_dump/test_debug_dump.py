"""NexRL's debug dump of real runs: written, read back as rollouts, and compared."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from mock_scheduler.adapters.nexrl.comparison.report import compare_dumps
from mock_scheduler.adapters.nexrl.comparison.values import Tolerance
from mock_scheduler.adapters.nexrl.files import load_content, save_content
from mock_scheduler.adapters.nexrl.names import FileKey, find_files
from mock_scheduler.compare_debug_dumps import main as compare
from mock_scheduler.errors import ConfigError, StepExistsError
from mock_scheduler.megatron.probe.interface import NO_PROBE, CompositeProbe, TrainingProbe, combine
from pipelines.config.schema import PipelineConfig
from pipelines.debug_dump.build import build_debug_dump
from tests.pipelines.tiny_runs import read_json, run_cli, write_tiny_config
from tests.programs import run_program

pytestmark = pytest.mark.timeout(600)  # the first test pays for all runs

ON = (
    "debug.enable_data_dump=true",
    "debug.dump_options={trajectory: true, old_log_probs: true, forward_data: true, loss: true, param: true, "
    "gradient: true}",
    r"debug.target_param_pattern='self_attn\.q_proj|final_layernorm|linear_fc2'",
)
TRAINER_OPTIONS = ("forward_data", "loss", "is_loss_debug", "batch_inputs", "param", "gradient")
FILES_OF_A_STEP = {"trajectory": 1, "old_log_probs": 1, "forward_data": 8, "loss": 8, "param": 4, "gradient": 4}


def mock(path: Path) -> str:
    return f"rollout_worker={{type: mock, need_llm_inference: false, trajectory_load_path: {path}}}"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs ``first``, which plays, ``again``, ``faster`` and ``wide`` on its rollouts, and four that are refused."""
    root = tmp_path_factory.mktemp("dumps")
    configs = write_tiny_config(root)
    trainer = {
        "WEAVER_DEBUG_DUMP_ENABLED": "1",
        "WEAVER_DEBUG_DUMP_DIR": str(root / "weaver"),
        "WEAVER_DEBUG_DUMP_EVERY_N": "2",
        "WEAVER_DEBUG_DUMP_OPTIONS": ",".join(TRAINER_OPTIONS),
    }
    dumped = root / "first" / "dump" / "trajectory"
    cases: list[tuple[str, list[str], dict[str, str]]] = [
        ("first", [f"debug.dump_dir={root / 'first' / 'dump'}"], trainer),
        ("again", [f"debug.dump_dir={root / 'again' / 'dump'}", "debug.dump_format=jsonl", mock(dumped)], {}),
        (
            "faster",
            [f"debug.dump_dir={root / 'faster' / 'dump'}", mock(root / "again" / "dump"), "training.lr=4e-3"],
            {},
        ),
        ("wide", [f"debug.dump_dir={root / 'wide' / 'dump'}", mock(dumped), "max_steps=1", "precision=float64"], {}),
        ("same-folder", [f"debug.dump_dir={root / 'first' / 'dump'}", mock(dumped)], {}),
        ("one-step", [f"debug.dump_dir={root / 'x'}", mock(dumped / "step_000000.pt")], {}),
        ("no-file", [f"debug.dump_dir={root / 'x'}", mock(root / "nowhere")], {}),
        ("no-match", [f"debug.dump_dir={root / 'x'}", "debug.target_param_pattern='layers\\.7'"], {}),
    ]
    common = ["--config-path", str(configs), "--config-name", "tiny", *ON]
    listed = [
        {"arguments": [*common, f"output_dir={root / name}", *overrides], "environ": environ}
        for name, overrides, environ in cases
    ]
    path = root / "cases.json"
    path.write_text(json.dumps(listed), encoding="utf-8")
    finished = run_program("tests.pipelines.several_runs", [str(path)])
    assert finished.returncode == 0, finished.stderr
    assert json.loads(finished.stdout.splitlines()[-1]) == [0, 0, 0, 0, 5, 5, 5, 5], finished.stderr
    return root


def load(root: Path, run: str, name: str) -> dict[str, Any]:
    return load_content(root / run / "dump" / name)


def metrics(folder: Path) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [
        {name: value for name, value in row["metrics"].items() if not name.startswith(("time/", "rollout/"))}
        for row in rows
    ]


def error(root: Path, run: str) -> str:
    return str(read_json(root / run / "error.json")["message"])


@pytest.mark.parametrize(("run", "suffix"), [("first", "pt"), ("again", "jsonl")])
def test_folders_and_files_are_the_documented_ones(root: Path, run: str, suffix: str) -> None:
    dump = root / run / "dump"
    assert sorted(path.name for path in dump.iterdir()) == sorted(FILES_OF_A_STEP)
    for kind, count in FILES_OF_A_STEP.items():
        assert len(list((dump / kind).iterdir())) == 2 * count
    for name in (
        "trajectory/step_000000",
        "old_log_probs/step_000001",
        "forward_data/step_000000_rank0_micro1",
        "loss/step_000001_rank0_micro0_update3",
        "param/step_000000_rank0",
        "gradient/step_000000_rank0_update1",
    ):
        assert (dump / f"{name}.{suffix}").is_file()


def test_the_trainers_folder_is_written_beside_at_its_own_steps(root: Path) -> None:
    weaver = root / "weaver"
    assert sorted(path.name for path in weaver.iterdir()) == sorted(TRAINER_OPTIONS)
    assert {key.step for kind in TRAINER_OPTIONS for key in find_files(weaver, kind)} == {0}
    assert (weaver / "is_loss_debug" / "step_000000_rank0_micro0.pt").is_file()
    inputs = load_content(weaver / "batch_inputs" / "step_000000_rank0_micro0.pt")
    assert inputs["attention_mask"] is None  # rows that are padded on the right alone
    mask = inputs["response_mask"]
    assert torch.equal(inputs["input_ids"][:, 1:][mask[:, :-1]], inputs["targets"][:, :-1][mask[:, :-1]])


def test_losses_are_the_means_of_what_is_dumped_by_token(root: Path) -> None:
    loss = load(root, "first", "loss/step_000000_rank0_micro0_update2.pt")
    forward = load(root, "first", "forward_data/step_000000_rank0_micro0_update2.pt")
    mask = loss["effective_valid"]
    assert loss["num_tokens"] == int(mask.sum()) == int(forward["response_mask"].sum()) > 0
    assert (loss["epoch"], loss["update"], loss["micro_idx"], loss["rank"]) == (1, 2, 0, 0)
    assert torch.equal(loss["log_probs"], forward["log_probs"])
    assert loss["entropy_loss"] == math.fsum(forward["entropy"][mask].double().tolist()) / loss["num_tokens"]
    ratio = (loss["log_probs"] - loss["old_log_probs"]).exp()
    assert torch.equal(loss["prob_ratio"][mask], ratio[mask])
    clipped = torch.maximum(-ratio * loss["advantages"], -ratio.clamp(0.8, 1.2) * loss["advantages"])
    assert loss["pg_loss"] == pytest.approx(float(clipped[mask].double().mean()), abs=1e-9)


def test_the_updates_loss_is_that_of_the_metrics(root: Path) -> None:
    """Weighted by their tokens, the micro-batches' losses are the update's."""
    by_update: dict[int, float] = {}
    for key, path in find_files(root / "first" / "dump", "loss").items():
        content = load_content(path)
        if key.step == 0:
            share = content["pg_loss"] * content["num_tokens"] / content["num_update_tokens"]
            by_update[key.update] = by_update.get(key.update, 0.0) + share
    assert sum(by_update.values()) / 4 == pytest.approx(metrics(root / "first")[0]["pg_loss"], abs=1e-9)


def test_files_say_whose_tokens_they_hold(root: Path) -> None:
    forward = load(root, "first", "forward_data/step_000000_rank0_micro0.pt")
    rows = {
        record["extra_fields"]["sample_id"]: record
        for record in load(root, "first", "trajectory/step_000000.pt")["trajectories"]
    }
    assert len(forward["sample_ids"]) == 4
    checked = 0
    for cell in forward["response_mask"].nonzero().tolist():
        line, column = cell
        record = rows[forward["sample_ids"][forward["sample_index"][line, column]]]
        position = int(forward["positions"][line, column])
        assert record["tokens"][position] == int(forward["targets"][line, column])
        assert record["loss_mask"][position] == 1
        checked += 1
    assert checked == int(forward["response_mask"].sum()) > 0


def test_scores_of_the_whole_batch_are_those_of_its_micro_batches(root: Path) -> None:
    whole = load(root, "first", "old_log_probs/step_000000.pt")
    trajectories = load(root, "first", "trajectory/step_000000.pt")["trajectories"]
    number = {sample: row for row, sample in enumerate(whole["sample_ids"])}
    for key, path in find_files(root / "first" / "dump", "loss").items():
        if key.step or key.update > 1:
            continue
        part = load_content(path)
        for line, column in part["effective_valid"].nonzero().tolist():
            row = number[part["sample_ids"][part["sample_index"][line, column]]]
            position = int(part["positions"][line, column])
            assert whole["old_log_probs"][row, position] == part["old_log_probs"][line, column]
            advantage = trajectories[row]["extra_fields"]["advantages"][position]
            assert advantage == float(part["advantages"][line, column])
    assert not whole["old_log_probs"][~whole["response_mask"]].any()


def test_parameters_are_dumped_by_all_names_that_match(root: Path) -> None:
    content = load(root, "first", "param/step_000000_rank0.pt")
    names = [piece["name"] for piece in content["parameters"]]
    assert sorted(names) == sorted(
        [
            *(f"model.layers.{layer}.self_attn.q_proj.weight" for layer in (0, 1)),
            *(f"decoder.layers.{layer}.mlp.linear_fc2.weight" for layer in (0, 1)),
            "decoder.final_layernorm.weight",
        ]
    )
    assert content["param_name"] == names[0]
    assert torch.equal(content["param"], content["parameters"][0]["tensor"])
    assert content["norm"] == pytest.approx(float(content["param"].double().norm()))
    q = content["parameters"][names.index("model.layers.0.self_attn.q_proj.weight")]
    assert (q["global_shape"], list(q["tensor"].shape), q["indices"]) == ([64, 64], [64, 64], [None, None])


def test_rollouts_from_a_dump_train_to_the_same_bits_without_engine_or_environment(root: Path) -> None:
    assert metrics(root / "again") == metrics(root / "first")
    digests = [read_json(root / run / "run.json")["batches"] for run in ("first", "again", "faster")]
    assert digests[0] == digests[1] == digests[2]
    ledger = read_json(root / "again" / "ledger.json")
    assert ledger["built"] == {"engine": 0, "environment": 0, "scheduler": 1}
    assert read_json(root / "first" / "ledger.json")["built"]["environment"] == 16


def test_both_formats_hold_the_same_bits(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = ["--self_hosted_dir", str(root / "first" / "dump"), "--weaver_dir", str(root / "again" / "dump")]
    assert compare([*folders, "--steps", "0-1"]) == 0
    verdicts = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Verdict")]
    assert len(verdicts) == 2
    assert all("are identical to the bit" in verdict for verdict in verdicts)


def test_the_trainers_dump_equals_the_self_hosted_one(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = ["--self_hosted_dir", str(root / "first" / "dump"), "--weaver_dir", str(root / "weaver")]
    assert compare([*folders, "--step", "0"]) == 0
    out = capsys.readouterr().out
    assert "--- IS_LOSS_DEBUG_ALL ---\nTotal comparisons: 8\nValues: 56 identical\n" in out


def test_another_learning_rate_is_found_in_the_first_updates_parameters(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = ["--self_hosted_dir", str(root / "first" / "dump"), "--weaver_dir", str(root / "faster" / "dump")]
    assert compare([*folders, "--step", "0"]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("First: PARAM_ALL, update0 ")
    report = compare_dumps(root / "first" / "dump", None, root / "faster" / "dump", 0)
    wrong = {(section.name, item.update) for section, item in report.items() if not item.difference.is_ok}
    assert min(update for _, update in wrong) == 0
    assert [name for name, update in wrong if update == 0] == ["PARAM_ALL"]


def test_one_planted_element_is_found_and_placed(root: Path, tmp_path: Path) -> None:
    first = root / "first" / "dump"
    for key, path in find_files(first, "forward_data").items():
        content = load_content(path)
        if (key.step, key.micro, key.update) == (0, 1, 2):
            line, column = content["response_mask"].nonzero()[-1].tolist()
            sample = content["sample_ids"][content["sample_index"][line, column]]
            place = f"{sample}, token {int(content['positions'][line, column])}"
            content["log_probs"][line, column] += 1e-4
        save_content(tmp_path, "forward_data", key, content, dump_format="pt")
    report = compare_dumps(first, None, tmp_path, 0)
    (found,) = [item for _, item in report.items() if item.difference.status == "different"]
    assert (found.place, found.name, found.where, found.update) == ("rank0_micro1_update2", "log_probs", place, 2)
    assert found.difference.max_abs == pytest.approx(1e-4, rel=1e-2)


def test_a_folder_of_another_run_is_refused_before_anything_is_played(root: Path) -> None:
    path = root / "first" / "dump" / "trajectory" / "step_000000.pt"
    assert error(root, "same-folder") == (
        f"{path} is there already, from another run: give debug.dump_dir (or WEAVER_DEBUG_DUMP_DIR) a folder of its "
        "own, or remove the old dump"
    )


def test_rollouts_that_are_not_there_are_refused_before_anything_is_trained(root: Path) -> None:
    path = root / "first" / "dump" / "trajectory" / "step_000000.pt"
    assert error(root, "one-step") == (
        f"rollout_worker.trajectory_load_path {path} holds step 0, and the run asks for step 1: give the folder of all "
        "steps, or set max_steps so that the run ends with this step"
    )
    assert error(root, "no-file").startswith(f"rollout_worker.trajectory_load_path {root / 'nowhere'} is not there: ")
    assert not (root / "x").exists()


def test_a_pattern_that_matches_nothing_is_refused(root: Path) -> None:
    assert error(root, "no-match").startswith(
        "debug.target_param_pattern 'layers\\\\.7' matches no parameter of this model. Megatron's names: "
        "embedding.word_embeddings.weight, "
    )


@pytest.mark.all
def test_ranks_of_another_layout_dump_the_same_step(root: Path) -> None:
    """tp2 × dp2 with the distributed optimizer: heads in shards, gradients in flat ranges, two replicas' micro-batches.

    In float64, so that what is left is no more than the order of sums.
    """
    folder = root / "tp2-dp2"
    overrides = [
        *ON,
        f"output_dir={folder}",
        f"debug.dump_dir={folder / 'dump'}",
        mock(root / "first" / "dump"),
        "max_steps=1",
        "precision=float64",
        "parallel.tensor_model_parallel_size=2",
        "parallel.data_parallel_size=2",
        "training.use_distributed_optimizer=true",
    ]
    finished = run_cli("launch", root / "configs", overrides)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    ranks = {key.global_rank for key in find_files(folder / "dump", "loss")}
    assert ranks == {0, 2}  # tensor-parallel rank 0 of both replicas
    report = compare_dumps(root / "wide" / "dump", None, folder / "dump", 0, tolerance=Tolerance(atol=1e-11))
    assert [f"{section.name} {item}" for section, item in report.items() if not item.difference.is_ok] == []
    # A comparison of a dump with itself would be identical throughout: tp reorders sums.
    assert max(item.difference.max_abs or 0.0 for _, item in report.items()) > 0.0
    names = {item.name for section, item in report.items() if section.name == "GRADIENT_ALL"}
    assert "model.layers.0.self_attn.q_proj.weight" in names


def config_of(**debug: object) -> PipelineConfig:
    section = {"enable_data_dump": True, "dump_dir": "/nowhere/dump", **debug}
    return PipelineConfig.model_validate({"exp_name": "x", "debug": section})


def test_options_of_another_mode_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        build_debug_dump(config_of(remote_api_dump_options={"datums": True}), {}, vocab_size=8)
    assert str(caught.value) == (
        "debug.remote_api_dump_options.datums has no effect: this run trains by itself and sends nothing to a service; "
        "use debug.dump_options"
    )
    with pytest.raises(ConfigError) as caught:
        build_debug_dump(config_of(dump_options={"loss": True}), {}, vocab_size=8, trains_remotely=True)
    assert str(caught.value) == (
        "debug.dump_options.loss has no effect: this run trains on a service, which computes that; set it there, or "
        "use debug.remote_api_dump_options"
    )
    environ = {"WEAVER_DEBUG_DUMP_ENABLED": "1", "WEAVER_DEBUG_DUMP_OPTIONS": "loss"}
    remote = config_of(remote_api_dump_options={"datums": True})
    with pytest.raises(ConfigError, match="WEAVER_DEBUG_DUMP_ENABLED has no effect: this run trains on a service"):
        build_debug_dump(remote, environ, vocab_size=8, trains_remotely=True)


def test_a_remote_runs_folder_of_another_run_is_refused_before_it_starts(tmp_path: Path) -> None:
    """Only the folders of ``dump_options`` were looked at: it ended in the middle of its first step."""
    path = save_content(tmp_path, "datums", FileKey(step=0), {}, dump_format="pt")
    options = {"dump_dir": str(tmp_path), "remote_api_dump_options": {"datums": True}}
    with pytest.raises(StepExistsError, match=f"{path} is there already, from another run"):
        build_debug_dump(config_of(**options), {}, vocab_size=8, trains_remotely=True)
    path.rename(path.with_name("step_000003.pt"))
    build_debug_dump(config_of(dump_every_n_steps=2, **options), {}, vocab_size=8, trains_remotely=True)


def test_a_resumed_run_makes_way_for_the_steps_that_it_does_anew(tmp_path: Path) -> None:
    for step in range(3):
        save_content(tmp_path, "loss", FileKey(step=step, global_rank=0, micro=0), {}, dump_format="pt")
    config = config_of(dump_dir=str(tmp_path), dump_options={"loss": True})
    with pytest.raises(StepExistsError, match=r"step_000000_rank0_micro0\.pt is there already, from another run"):
        build_debug_dump(config, {}, vocab_size=8)
    build_debug_dump(config, {}, vocab_size=8, is_resumed=True).remove_steps_from(1)
    assert [key.step for key in find_files(tmp_path, "loss")] == [0]


def test_one_folder_for_both_dumps_is_refused() -> None:
    environ = {
        "WEAVER_DEBUG_DUMP_ENABLED": "1",
        "WEAVER_DEBUG_DUMP_DIR": "/nowhere/dump",
        "WEAVER_DEBUG_DUMP_OPTIONS": "loss",
    }
    with pytest.raises(ConfigError, match=r"debug\.dump_dir and WEAVER_DEBUG_DUMP_DIR are both /nowhere/dump: their"):
        build_debug_dump(config_of(dump_options={"loss": True}), environ, vocab_size=8)


def test_probes_are_combined_only_where_there_are_several() -> None:
    one, other = TrainingProbe(), TrainingProbe()
    assert combine(None) is NO_PROBE
    assert combine(None, one) is one
    assert isinstance(combine(one, other), CompositeProbe)


class Told(TrainingProbe):
    """Notes what it is told."""

    def __init__(self, name: str, told: list[str]) -> None:
        self.name, self.told = name, told

    def scalars(self, kind: str, values: object, *, update: int, prefix: str = "") -> None:
        self.told.append(f"{self.name} {kind} {values} {update} {prefix}")


def test_a_combined_probe_tells_all_in_order() -> None:
    told: list[str] = []
    combine(Told("a", told), Told("b", told)).scalars("loss", {"x": 1.0}, update=2, prefix="p.")
    assert told == ["a loss {'x': 1.0} 2 p.", "b loss {'x': 1.0} 2 p."]
