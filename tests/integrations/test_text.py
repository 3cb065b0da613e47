"""Text with the real packages: transformers 5.12.1, reasoning-gym 0.1.25, textarena 0.7.4, and a recorded run.

The stand-ins of ``tests/text_packages``, which the gate has, are held to transformers here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.integrations, pytest.mark.timeout(1800)]  # the first test of runs pays for all of them

ROOT = Path(__file__).parents[2]
PACKAGES = Path(sys.prefix) / "text"
LAYOUTS = {
    "same": (),
    "tp2": ("parallel.tensor_model_parallel_size=2",),
    "dp2": ("parallel.data_parallel_size=2", "training.micro_batch_size=8"),  # of an update's 16 rows
}


def run(
    arguments: list[str], *packages: Path, timeout_s: float = 900.0, hash_seed: str = "0"
) -> subprocess.CompletedProcess[str]:
    """``python ARGUMENTS`` with these folders of packages."""
    path = os.pathsep.join(map(str, [*packages, ROOT]))
    fixed = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONHASHSEED": hash_seed}
    environment = {**os.environ, "PYTHONPATH": path, **fixed}
    command = [sys.executable, "-W", "ignore", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout_s)


_ENCODE = """
import json, random, sys
from pipelines.environments.text_tokens import TextTokenizer
loaded = TextTokenizer(folder=sys.argv[1], files_digest="", vocab_size=259, on_break="error").load()
chat = [{"role": "system", "content": "Be \\u00e4."}, {"role": "user", "content": "1 +\\n <|im_end|> 2 ="}]
rng = random.Random(0)
texts = [loaded.decode([rng.randrange(259) for _ in range(40)]) for _ in range(50)]
names = loaded.tokenizer.convert_ids_to_tokens(range(len(loaded.tokenizer)))
prompt = loaded.encode_prompt(chat)
chat += [{"role": "assistant", "content": "3"}, {"role": "user", "content": "no"}]
print(json.dumps([prompt, loaded.encode_next(chat, [*prompt, *prompt[:1]][:len(prompt)]), texts, names,
                  sorted(loaded.end_ids)]))
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint."""
    assert PACKAGES.is_dir(), f"{PACKAGES} is not there; launch/test.sh --integrations installs it"
    place = tmp_path_factory.mktemp("text")
    assert run(["launch/make_tiny_qwen3.py", str(place / "tiny")]).returncode == 0
    return place


def test_the_stand_in_of_the_gate_encodes_and_decodes_as_transformers(root: Path) -> None:
    told = []
    for packages in (PACKAGES, ROOT / "tests" / "text_packages"):
        done = run(["-c", _ENCODE, str(root / "tiny")], packages)
        assert done.returncode == 0, done.stderr
        told.append(json.loads(done.stdout.splitlines()[-1]))
    for real, own in zip(*told, strict=True):
        assert own == real
    assert (len(told[0][3]), told[0][4]) == (259, [2])


_ASK = """
import json, random
import reasoning_gym
from reasoning_gym.factory import DATASETS
from pipelines.config.environments import CustomEnvConfig
from pipelines.environments.reasoning import ReasoningGymEnv, check_reasoning
found = {"other": [], "right": []}
names = sorted(set(DATASETS) - {"composite"})
for name in names:
    config = CustomEnvConfig(env_type="reasoning_gym", env_config={"dataset": name, "held_out_fraction": 0.0})
    asked = []
    for state in (1, 2):
        random.seed(state)
        env = ReasoningGymEnv(config.env_config, max_steps=1, split="train")
        env.reset(99)
        asked.append([env.reset(7), env.answer("1").reward])
    if asked[0] != asked[1]:
        found["other"].append(name)
    env.reset(7)
    answer = env._entry["answer"]
    if answer is not None and env.answer(str(answer)).is_success:
        found["right"].append(name)
messages = []
for values in ({"dataset": "chain_sums"}, {"dataset": "chain_sum", "dataset_config": {"min_term": 1}},
               {"dataset": "chain_sum", "dataset_config": {"min_terms": 0}}):
    config = CustomEnvConfig(env_type="reasoning_gym", env_config=values)
    try:
        check_reasoning({"A": config})
    except Exception as error:
        messages.append(str(error))
print()  # some verifiers write to the terminal
print(json.dumps([len(names), found, messages]))
"""


def test_every_task_asks_the_same_again_and_knows_its_own_answer(root: Path) -> None:
    done = run(["-c", _ASK], PACKAGES)
    assert done.returncode == 0, done.stderr
    num_names, found, messages = json.loads(done.stdout.splitlines()[-1])
    print(f"{num_names} tasks; asks another question: {found['other']}; right by its answer: {len(found['right'])}")
    assert (num_names, found["other"]) == (105, [])
    assert "dataset: 'chain_sums' is unknown; did you mean chain_sum" in messages[0]
    assert "min_term: chain_sum has allow_negation, max_digits, max_terms, min_digits, min_terms; did" in messages[1]
    assert messages[2].endswith("AssertionError: min_terms must be positive")


_PLAY = """
import json, random, signal
from textarena.envs.registration import ENV_REGISTRY
from mock_scheduler.errors import ConfigError
from pipelines.config.environments import TextArenaEnvConfig
from pipelines.environments.text_games import GameEnv

def too_long(*_):
    raise TimeoutError

def play(name, state):
    random.seed(state)
    game = GameEnv(TextArenaEnvConfig(game=name, held_out_fraction=0.0), max_steps=6, split="train")
    said = [game.reset(7)]
    while len(said) < 7 and (len(said) == 1 or said[-1][1] is not None):
        answer = game.answer("[1]")
        said.append([answer.reward, answer.reply, answer.is_success, answer.is_cut])
    return said

signal.signal(signal.SIGALRM, too_long)
played, other, refused = {}, [], {}
for name in sorted(name for name in ENV_REGISTRY if not name.endswith(("-raw", "-train"))):
    signal.alarm(30)
    try:
        played[name] = play(name, 1)
        if play(name, 2) != played[name]:
            other.append(name)
    except ConfigError as error:
        refused[name] = str(error)
    except TimeoutError:
        pass
    signal.alarm(0)
print()
print(json.dumps([played, other, refused]))
"""


def test_games_of_textarena_follow_from_their_seed_and_download_nothing(root: Path) -> None:
    told = []
    for hash_seed in ("1", "2"):
        done = run(["-c", _PLAY], PACKAGES, hash_seed=hash_seed)
        assert done.returncode == 0, done.stderr
        told.append(json.loads(done.stdout.splitlines()[-1]))
    (played, other, refused), again = told
    print(f"{len(played)} games can be played, {len(refused)} are refused")
    common = played.keys() & again[0].keys()  # a slow machine may cut a search that takes seconds
    assert {name for name in common if played[name] != again[0][name]} == set()
    assert (other, again[1]) == ([], [])
    assert {"GuessTheNumber-v0", "TowerOfHanoi-v0", "Sokoban-v0", "FrozenLake-v0", "2048-v0"} <= common
    assert len(common) >= 50
    assert "needs word lists of NLTK that are not here" in refused["Wordle-v0"]
    assert "cannot be played by one player" in refused["SecretMafia-v0"]


def launch(root: Path, name: str, *overrides: str, packages: tuple[Path, ...] = ()) -> None:
    """A traced run of the shipped configuration, as users start it."""
    given = [
        *("exp_name=" + name, f"output_dir={root / name}", f"model.hf_checkpoint={root}/tiny", "track_with=none"),
        *("rollout_mock.enable=true", f"rollout_mock.dump_dir={root}/recording", "trace.level=full", "save_steps=3"),
        *("max_steps=3", "sft.steps=1", "eval_steps=0"),
    ]
    done = run(["-m", "mock_scheduler.cli", "launch", "qwen3_tiny_reasoning", *given, *overrides], *packages)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.fixture(scope="module")
def runs(root: Path) -> Path:
    """A recorded run with both packages, and its replays without either."""
    launch(root, "dumped", "rollout_mock.mode=dump", packages=(PACKAGES,))
    for name, overrides in LAYOUTS.items():
        launch(root, name, "rollout_mock.mode=mock", *overrides)
    return root


@pytest.mark.parametrize("name", LAYOUTS)
def test_replays_without_the_packages_train_as_the_recorded_run(name: str, runs: Path) -> None:
    """Two runs have no measured noise: by bounds of theory another layout may be suspect, and is never diverged."""
    done = run(["-m", "mock_scheduler.cli", "compare", str(runs / "dumped"), str(runs / name)])
    print(done.stdout)
    assert done.returncode in ((0,) if name == "same" else (0, 2)), done.stdout
    assert done.stdout.startswith("identical:") == (name == "same")


def test_the_shipped_run_learns_words_that_it_was_never_asked(root: Path) -> None:
    """A validation of 128 held-out words before the run, after its supervised start, and after the rollouts."""
    made = run(["launch/make_tiny_qwen3.py", str(root / "three"), "--layers", "3"])
    assert made.returncode == 0, made.stderr
    given = [f"output_dir={root}/learned", f"model.hf_checkpoint={root}/three", "track_with=none"]
    done = run(["-m", "mock_scheduler.cli", "launch", "qwen3_tiny_reasoning", *given], PACKAGES, ROOT, timeout_s=1700.0)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    lines = (root / "learned" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    metrics = {json.loads(line)["step"]: json.loads(line)["metrics"] for line in lines}
    success = {step: found["val/success"] for step, found in metrics.items() if "val/success" in found}
    print(f"success on held-out words by step: {success}; started supervised until step 220")
    assert success[0] <= 0.02
    assert success[352] >= 0.8
