"""A configuration that is kept is, under any overrides, the one that Hydra composes anew for each."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from io import StringIO
from pathlib import Path

import pytest
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import DictConfig, ListConfig, Node, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from mock_scheduler.config import composing
from mock_scheduler.errors import ConfigError
from pipelines.config.loading import FORM, build_loader, load_config

PROJECT = Path(__file__).parents[2]
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
    return write_files(tmp_path_factory.mktemp("configs"))


def write_files(folder: Path) -> Path:
    """Writes the files into a folder, and returns it."""
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder


def outcome(folder: Path, overrides: list[str], *, anew: bool = False) -> object:
    """The configuration's values, or the message of its error; ``anew``: with all overrides by Hydra."""
    with pytest.MonkeyPatch.context() as patch:
        if anew:
            patch.setattr(composing.Composer, "_bare", lambda self: None)
        try:
            config = load_config("run", config_path=folder, overrides=overrides)
        except ConfigError as error:
            return str(error)
    return config.model_dump()


@settings(max_examples=15)
@given(overrides=st.lists(st.sampled_from(OVERRIDES), max_size=4))
def test_any_overrides_give_the_same_configuration_or_error(folder: Path, overrides: list[str]) -> None:
    first, again = outcome(folder, overrides), outcome(folder, overrides)
    assert first == again == outcome(folder, overrides, anew=True)


def test_each_override_alone_gives_the_same(folder: Path) -> None:
    ours = {text: outcome(folder, [text]) for text in OVERRIDES}
    assert ours == {text: outcome(folder, [text], anew=True) for text in OVERRIDES}
    kinds = {text: isinstance(found, dict) for text, found in ours.items()}
    assert kinds["seed=1"]
    assert not kinds["model.unknown=1"]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The overrides of each configuration that Hydra composes; nothing is kept before."""
    calls: list[list[str]] = []
    ask_hydra = composing.Composer._ask_hydra

    def counted(self: composing.Composer, overrides: list[str]) -> object:
        calls.append(overrides)
        return ask_hydra(self, overrides)

    monkeypatch.setattr(composing, "_KEPT", {})
    monkeypatch.setattr(composing.Composer, "_ask_hydra", counted)
    return calls


def test_values_alone_are_set_without_composing_again(folder: Path, asked: list[list[str]]) -> None:
    load = build_loader("run", folder)
    assert [load([f"seed={seed}", "training.lr=0.1"]).seed for seed in (1, 2, 3)] == [1, 2, 3]
    assert load_config("run", config_path=folder).seed == 7
    assert asked == [[]]
    assert load(["size=large"]).training.lr == 0.25
    assert asked == [[], ["size=large"]]


def test_a_number_that_is_no_pair_is_refused_in_what_is_kept(folder: Path, asked: list[list[str]]) -> None:
    for text in ("1_5", "1_6"):
        with pytest.raises(ConfigError, match=f"is {text} without quotes"):
            load_config(
                "run", config_path=folder, overrides=[f"algorithm.rollout_correction.rollout_is_threshold={text}"]
            )
    assert asked == [[]]


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: (folder / "base.yaml").write_text("exp_name: base\nseed: 8\n"),
        lambda folder: (folder / "size" / "small.yaml").write_text("# @package _global_\nseed: 8\n"),
        lambda folder: (folder / "size" / "small.yaml").rename(folder / "size" / "other.yaml"),
        lambda folder: (folder / "size").rename(folder / "sizes"),
    ],
    ids=["changed", "changed-in-a-group", "gone", "group-gone"],
)
def test_what_is_kept_is_composed_again_where_the_disk_says_something_else(
    tmp_path: Path, change: Callable[[Path], object]
) -> None:
    write_files(tmp_path)
    before = outcome(tmp_path, [])
    change(tmp_path)
    after = outcome(tmp_path, [])
    assert after == outcome(tmp_path, [], anew=True) != before


def test_an_own_file_that_comes_to_stand_before_a_shipped_one_is_seen(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("defaults: [quickstart, _self_]\nexp_name: x\n", encoding="utf-8")
    shipped = load_config("run", config_path=tmp_path)
    (tmp_path / "quickstart.yaml").write_text("defaults: [base, _self_]\nseed: 4321\n", encoding="utf-8")
    own = load_config("run", config_path=tmp_path)
    assert (shipped.seed, own.seed) == (load_config("quickstart", config_path=PROJECT / "configs").seed, 4321)


def test_a_variable_in_a_list_of_defaults_is_looked_at_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "size").mkdir()
    for seed, name in enumerate(("small", "large")):
        (tmp_path / "size" / f"{name}.yaml").write_text(f"# @package _global_\nseed: {seed}\n", encoding="utf-8")
    text = "defaults: [{size: '${oc.env:SIZE_OF_TEST}'}, _self_]\nexp_name: x\n"
    (tmp_path / "run.yaml").write_text(text, encoding="utf-8")
    for seed, name in enumerate(("small", "large")):
        monkeypatch.setenv("SIZE_OF_TEST", name)
        assert load_config("run", config_path=tmp_path).seed == seed


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


FLAT = (
    "a: 1\nb: {c: 2.5, d: [1, {e: x}, [], [null]], f: {}}\n",
    "1: x\ntrue: y\n1.5: z\n",
    "a: 1e3\nb: 2020-01-01\nc: 0x10\nd: 1_000\ne: '???'\nf: .nan\ng: 1:30\nh: off\n",
    "a: {defaults: [x, y], hydra: {searchpath: 1}}\n",
    "a: &x {b: 1}\nc: *x\nd: {<<: *x, e: 3}\n",
    "a: ${oc.env:HOME}/${oc.env:NOT_THERE,here}\n",
    "'a.b': 1\n'': 2\nkeys: 3\n_metadata: 4\n",
    "text\n",
)
#: Of these Hydra makes more than OmegaConf does, or says why not.
NOT_FLAT = (
    "defaults: [_self_]\na: 1\n",
    "a: 1\ndefaults: null\n",
    "hydra: {run: {dir: x}}\na: 1\n",
    "# @package foo\na: 1\n",
    "a: 1\nb: ${a}\n",
    "a: ${now:%Y}\n",
    "a: ${oc.env:X,${now:%Y}}\n",
    "a: ${oc.env:\n",
    "",
    "[]\n",
    "- a\n",
    "a: [1, 2\n",
    "a: 1\na: 2\n",
    "null: 3\n",
    "a: {null: 3}\n",
    "5\n",
    "1e3\n",
    "a: !!int x\n",
)


def describe(node: Node) -> tuple[object, ...]:
    """Everything that a configuration is: types, flags and values of all nodes, in order."""
    about = node._metadata
    types = (type(node), about.ref_type, about.object_type, about.optional, about.flags or {}, about.key)
    parts: list[object] = [repr(node._value())]
    if isinstance(node, DictConfig) and isinstance(node._content, dict):
        parts = [(repr(key), describe(item)) for key, item in node._content.items()]
    if isinstance(node, ListConfig) and isinstance(node._content, list):
        parts = [describe(item) for item in node._content]
    return (*types, *parts)


@pytest.mark.parametrize("text", FLAT)
def test_a_file_that_names_no_other_is_loaded_as_hydra_composes_it(
    text: str, tmp_path: Path, asked: list[list[str]]
) -> None:
    (tmp_path / "run.yaml").write_text(text, encoding="utf-8")
    composer = composing.Composer(tmp_path, "run", traps=FORM.traps)
    composed, _ = composer.compose([])
    assert asked == []
    assert describe(composed) == describe(composer._ask_hydra([])[0])


@pytest.mark.parametrize("text", NOT_FLAT)
def test_any_other_file_is_composed_by_hydra(text: str, tmp_path: Path, asked: list[list[str]]) -> None:
    (tmp_path / "run.yaml").write_text(text, encoding="utf-8")
    with suppress(ConfigError):
        composing.Composer(tmp_path, "run", traps=FORM.traps).compose([])
    assert asked[0] == []


def test_a_group_of_hydras_or_a_schema_of_that_name_is_hydras_to_find(tmp_path: Path, asked: list[list[str]]) -> None:
    for name in ("run", "of_a_schema"):
        (tmp_path / f"{name}.yaml").write_text("a: 1\n", encoding="utf-8")
    composing.Composer(tmp_path, "run", traps=FORM.traps).compose([])
    assert asked == []
    (tmp_path / "hydra").mkdir()
    composing.Composer(tmp_path, "run", traps=FORM.traps).compose([])
    (tmp_path / "hydra").rmdir()
    ConfigStore.instance().store("of_a_schema", {"a": 2})
    try:
        with suppress(ConfigError):  # Hydra merges the two no longer
            composing.Composer(tmp_path, "of_a_schema", traps=FORM.traps).compose([])
    finally:
        del ConfigStore.instance().repo["of_a_schema.yaml"]
    assert asked[:2] == [[], []]


def test_a_plugin_of_hydras_may_find_more(
    tmp_path: Path, asked: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "plugin").mkdir()
    for folder, text in ((tmp_path, "a: 1\n"), (tmp_path / "plugin", "a: 2\n")):
        (folder / "run.yaml").write_text(text, encoding="utf-8")

    class Plugin(SearchPathPlugin):
        def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
            search_path.prepend("plugin", f"file://{tmp_path / 'plugin'}")

    monkeypatch.setattr(Plugins, "discover", lambda *_: [Plugin])
    composed, _ = composing.Composer(tmp_path, "run", traps=FORM.traps).compose([])
    assert (composed, asked[:1]) == ({"a": 2}, [[]])


@pytest.mark.parametrize("text", [*FLAT, *NOT_FLAT])
def test_a_text_is_read_as_omegaconf_reads_it(text: str) -> None:
    try:
        expected: object = describe(OmegaConf.load(StringIO(text)))
    except (OSError, ValueError, YAMLError, OmegaConfBaseException):
        with pytest.raises((ValueError, OmegaConfBaseException)):
            composing._load_text(text)
        return
    assert describe(composing._load_text(text)) == expected


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
