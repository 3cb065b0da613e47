"""A configuration whose files are read once is, under any overrides, the one that is loaded anew for each."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mock_scheduler.config import composing
from mock_scheduler.errors import ConfigError
from mock_scheduler.program import ConfigLoader
from pipelines.config.loading import build_loader, load_config

FILES = {
    "base.yaml": "exp_name: base\nseed: 7\nmodel: {num_layers: 4, num_attention_heads: 4}\nmax_steps: 3\n",
    "run.yaml": (
        "defaults: [base, size: small, _self_]\noutput_dir: out/${exp_name}\nmodel: {hidden_size: 32}\n"
        "align: {candidates: [{name: one}]}\nalgorithm: {rollout_correction: {rollout_is: token}}\n"
    ),
    "size/small.yaml": "# @package _global_\ntraining: {lr: 0.5}\n",
    "size/large.yaml": "# @package _global_\ntraining: {lr: 0.25}\n",
}
#: Values, new keys, whole objects and lists, items of lists, interpolations, and every form that is not just a value.
OVERRIDES = (
    "seed=1",
    "seed=null",
    "exp_name='a b'",
    "exp_name=x,y",
    "output_dir=${exp_name}/${seed}",
    "output_dir=${nothing}",
    "parallel.tensor_model_parallel_size=2",
    "model={num_layers: 2}",
    "model.num_layers=two",
    "model.unknown=1",
    "custom_envs.Mine.env_config.size=3",
    "align.candidates=[{name: two, overrides: ['seed=2']}]",
    "align.candidates.0.name=three",
    "align.candidates.5.name=three",
    "align.candidates.first.name=three",
    "max_steps.deeper=1",
    "+max_steps=4",
    "+training.weight_decay=0.1",
    "++max_steps=5",
    "~seed",
    "size=large",
    "size@model=large",
    "hydra.run.dir=elsewhere",
    "hydra.job.name=x",
    "defaults=[]",
    "algorithm.rollout_correction.rollout_is_threshold=0.5_5",
    "algorithm.rollout_correction.rollout_is_threshold=2.0",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files."""
    root = tmp_path_factory.mktemp("configs")
    for name, text in FILES.items():
        path = root / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


def outcome(load: ConfigLoader | None, folder: Path, overrides: list[str]) -> object:
    """The configuration's values, or the message of its error."""
    try:
        config = load(overrides) if load else load_config("run", config_path=folder, overrides=overrides)
    except ConfigError as error:
        return str(error)
    return config.model_dump()


@settings(max_examples=15)
@given(overrides=st.lists(st.sampled_from(OVERRIDES), max_size=4))
def test_any_overrides_give_the_same_configuration_or_error(folder: Path, overrides: list[str]) -> None:
    load = build_loader("run", folder)
    first, again = outcome(load, folder, overrides), outcome(load, folder, overrides)
    assert first == again == outcome(None, folder, overrides)


def test_each_override_alone_gives_the_same(folder: Path) -> None:
    load = build_loader("run", folder)
    ours = {text: outcome(load, folder, [text]) for text in OVERRIDES}
    assert ours == {text: outcome(None, folder, [text]) for text in OVERRIDES}
    kinds = {text: isinstance(found, dict) for text, found in ours.items()}
    assert kinds["seed=1"]
    assert not kinds["model.unknown=1"]


def test_values_alone_are_set_without_reading_the_files_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[str]] = []
    ask_hydra = composing.Composer._ask_hydra

    def counted(self: composing.Composer, overrides: list[str]) -> object:
        calls.append(overrides)
        return ask_hydra(self, overrides)

    monkeypatch.setattr(composing.Composer, "_ask_hydra", counted)
    load = build_loader("run", folder)
    assert [load([f"seed={seed}", "training.lr=0.1"]).seed for seed in (1, 2, 3)] == [1, 2, 3]
    assert calls == [[]]
    assert load(["size=large"]).training.lr == 0.25
    assert calls == [[], ["size=large"]]


def test_what_one_configuration_sets_is_not_in_the_next(folder: Path) -> None:
    load = build_loader("run", folder)
    assert load(["align.candidates.0.name=other"]).align.candidates[0].name == "other"
    assert load([]).align.candidates[0].name == "one"


def test_files_that_need_an_override_are_composed_with_it(tmp_path: Path) -> None:
    """Without any override they cannot be, which is no error yet."""
    (tmp_path / "size").mkdir()
    (tmp_path / "size" / "small.yaml").write_text("# @package _global_\nseed: 3\n")
    (tmp_path / "run.yaml").write_text("defaults: [size: '???', _self_]\nexp_name: x\n")
    load = build_loader("run", tmp_path)
    assert load(["size=small"]).seed == 3
    with pytest.raises(ConfigError, match="size"):
        load(["seed=4"])


def test_a_file_of_one_number_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "five.yaml").write_text("5\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"five\.yaml holds one number; expected keys and their values"):
        load_config("five", config_path=tmp_path)


def test_a_file_that_has_changed_is_read_anew(tmp_path: Path) -> None:
    seeds = []
    for seed in (1, 2, 1):
        (tmp_path / "run.yaml").write_text(f"defaults: [_self_]\nexp_name: run\nseed: {seed}\n", encoding="utf-8")
        seeds.append(load_config("run", config_path=tmp_path).seed)
    assert seeds == [1, 2, 1]
