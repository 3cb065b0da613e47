"""The pool of environments: the same answers with any number of processes, errors name the episode, no leftovers."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch  # noqa: F401 - a worker must not load what its parent has

from mock_scheduler.errors import ConfigError, MockSchedulerError, SchedulerError
from pipelines.config.environments import CustomEnvConfig, FrozenLakeEnvConfig, SokobanEnvConfig
from pipelines.config.schema import PipelineConfig
from pipelines.environments.base import ResetResult, StepResult
from pipelines.environments.grid_tokens import GridTokenizer
from pipelines.environments.registry import build_environment, build_tokenizer
from pipelines.environments.workers import EnvironmentPool, ResetRequest

ROOT = Path(__file__).parents[3]

CUSTOM_ENVS = {
    "Easy": CustomEnvConfig(
        env_type="sokoban", max_steps=6, env_config=SokobanEnvConfig(size=5, max_solution=3, held_out_fraction=0.2)
    ),
    "Hard": CustomEnvConfig(env_type="sokoban", max_steps=4, env_config=SokobanEnvConfig(size=5)),
    # Every cell within the outer wall is a corner: no puzzle can be made.
    "Impossible": CustomEnvConfig(
        env_type="sokoban", env_config=SokobanEnvConfig(size=5, min_solution=90, max_solution=99)
    ),
}


def tokenizer_of(tag: str, custom_envs: dict[str, CustomEnvConfig]) -> GridTokenizer:
    manager = {"tags": [tag]}
    config = PipelineConfig(exp_name="x", custom_envs=custom_envs, train_env_manager=manager, val_env_manager=manager)
    return build_tokenizer(config)


@contextmanager
def open_pool(
    num_workers: int, *, tag: str = "Hard", custom_envs: dict[str, CustomEnvConfig] = CUSTOM_ENVS
) -> Iterator[EnvironmentPool]:
    pool = EnvironmentPool(custom_envs, tokenizer_of(tag, custom_envs), num_workers=num_workers)
    try:
        yield pool
    finally:
        pool.close()


def request(slot: int, seed: int, **changes: object) -> ResetRequest:
    values = {"slot": slot, "tag": "Hard", "seed": seed, "split": "all", **changes}
    return ResetRequest(**values)


REQUESTS = [
    request(4, 11),
    request(0, 12, tag="Easy", split="train"),
    request(7, 13, tag="Easy", split="held_out"),
    request(2, 11),
    request(5, 14),
]


def play(pool: EnvironmentPool) -> list[list[ResetResult] | list[StepResult]]:
    """Two rounds of episodes in slots out of order, each stepped until it ends, and then only some."""
    answers: list[list[ResetResult] | list[StepResult]] = []
    for round_number in range(2):
        answers.append(pool.reset_many([replace(asked, seed=asked.seed + round_number) for asked in REQUESTS]))
        running = [asked.slot for asked in REQUESTS]
        turn = 0
        while running:
            results = pool.step_many([(slot, [2 + (slot + 3 * turn) % 5]) for slot in running])
            answers.append(results)
            running = [
                slot
                for slot, result in zip(running, results, strict=True)
                if not (result.terminated or result.truncated)
            ]
            turn += 1
    return answers


def test_answers_are_those_of_the_environments_themselves() -> None:
    tokenizer = tokenizer_of("Hard", CUSTOM_ENVS)
    with open_pool(0) as pool:
        starts = pool.reset_many(REQUESTS)
        results = pool.step_many([(7, [2]), (0, [0]), (4, [5])])
        assert pool.num_built == 5
    for asked, start in zip(REQUESTS, starts, strict=True):
        environment = build_environment(CUSTOM_ENVS[asked.tag], tokenizer, split=asked.split)
        assert environment.reset(asked.seed) == start
        for slot, token, result in ((7, 2, results[0]), (0, 0, results[1]), (4, 5, results[2])):
            if slot == asked.slot:
                assert environment.step([token]) == result


@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_answers_do_not_depend_on_the_number_of_workers(num_workers: int) -> None:
    with open_pool(0) as pool:
        expected = play(pool)
    with open_pool(num_workers) as pool:
        assert play(pool) == expected
        assert pool.num_built == 5  # one for each slot, tag and split, kept over both rounds
        assert len(set(pool.process_ids)) == num_workers
    assert any(result.terminated for results in expected[1:] for result in results if isinstance(result, StepResult))


def test_a_slot_may_change_its_tag_and_nothing_asked_for_is_nothing_answered() -> None:
    with open_pool(1) as pool:
        assert pool.reset_many([]) == []
        (easy,) = pool.reset_many([request(0, 0, tag="Easy")])
        (hard,) = pool.reset_many([request(0, 0)])
        (again,) = pool.reset_many([request(0, 0, tag="Easy")])
        assert easy == again != hard
        assert pool.num_built == 2
        assert pool.step_many([]) == []


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_environments_error_names_its_episode_and_closes_the_pool(num_workers: int) -> None:
    """Of two failing episodes the first asked for is named, in whichever process it is."""
    custom_envs = {"Hard": CUSTOM_ENVS["Hard"]}
    with open_pool(num_workers, custom_envs=custom_envs) as pool:
        pool.reset_many([request(0, 20), request(1, 21), request(3, 22)])
        for _ in range(4):
            pool.step_many([(0, [0]), (1, [0]), (3, [0])])
        with pytest.raises(SchedulerError) as caught:
            pool.step_many([(3, [0]), (0, [0]), (1, [0])])
        assert str(caught.value) == (
            "environment of slot 3 (tag Hard, seed 22, split all): RuntimeError: step was called without an episode: "
            "reset the environment first"
        )
        assert "grid_env.py" in caught.value.__notes__[0]  # where in the worker it happened
        with pytest.raises(SchedulerError, match=r"^the environments are closed, by their owner or after an error$"):
            pool.reset_many([request(0, 1)])


@pytest.mark.parametrize("num_workers", [0, 1])
def test_settings_that_allow_no_episode_are_a_configuration_error(num_workers: int) -> None:
    custom_envs = {"Impossible": CUSTOM_ENVS["Impossible"]}
    with open_pool(num_workers, tag="Impossible", custom_envs=custom_envs) as pool:
        with pytest.raises(ConfigError) as caught:
            pool.reset_many([request(0, 5, tag="Impossible")])
        assert str(caught.value).startswith(
            "environment of slot 0 (tag Impossible, seed 5, split all): sokoban: 1000 random layouts gave no puzzle "
            "for size 5, num_boxes 1,"
        )


def test_a_worker_that_dies_is_named_with_its_episodes() -> None:
    with open_pool(2) as pool:
        pool.reset_many([request(slot, 30 + slot) for slot in range(3)])
        victim = pool.process_ids[1]
        os.kill(victim, signal.SIGKILL)
        with pytest.raises(SchedulerError) as caught:
            pool.step_many([(0, [2]), (1, [2]), (2, [2])])
        assert str(caught.value) == (
            f"environment worker 1: process {victim} was ended by SIGKILL (signal 9), which the kernel sends where "
            "memory runs out while it played slot 1 (tag Hard, seed 31, split all); what it wrote to stderr says why"
        )
        for process_id in pool.process_ids:
            assert not is_alive(process_id)


def test_a_worker_that_cannot_start_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with open_pool(1) as pool:
        with pytest.raises(SchedulerError) as caught:
            pool.reset_many([request(slot, slot) for slot in range(6)])
        assert str(caught.value) == (
            f"environment worker 0: process {pool.process_ids[0]} ended with exit code 1 while it played slot 0 (tag "
            "Hard, seed 0, split all); slot 1 (tag Hard, seed 1, split all); slot 2 (tag Hard, seed 2, split all); "
            "slot 3 (tag Hard, seed 3, split all); and 2 more; what it wrote to stderr says why"
        )


def is_alive(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    return True


def test_close_ends_all_workers_and_may_be_called_twice() -> None:
    with open_pool(2) as pool:
        pool.reset_many([request(0, 1), request(1, 2)])
        process_ids = pool.process_ids
        pool.close()
        assert [is_alive(process_id) for process_id in process_ids] == [False, False]


POOL_PROGRAM = """\
import os, signal, sys, threading
from pipelines.config.environments import CustomEnvConfig, FrozenLakeEnvConfig
from pipelines.config.schema import PipelineConfig
from pipelines.environments.registry import build_tokenizer
from pipelines.environments.workers import EnvironmentPool, ResetRequest

def start():
    config = PipelineConfig(exp_name="x")
    pools.append(EnvironmentPool(config.custom_envs, build_tokenizer(config), num_workers=2))

if __name__ == "__main__":
    pools = []
    if sys.argv[1] == "main":
        start()
    else:
        thread = threading.Thread(target=start)
        thread.start()
        thread.join()
    requests = [ResetRequest(slot=slot, tag="FrozenLake", seed=1, split="all") for slot in range(2)]
    pools[0].reset_many(requests)
    loaded = [name for name in ("torch", "megatron") if name in sys.modules]
    print(*pools[0].process_ids, *loaded, flush=True)
    sys.stdin.readline()
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("thread", ["main", "other"])
def test_workers_end_with_a_parent_that_was_killed(tmp_path: Path, thread: str) -> None:
    """Those started by another thread outlive that thread, and end with the process all the same."""
    program = tmp_path / "program.py"
    program.write_text(POOL_PROGRAM, encoding="utf-8")
    with subprocess.Popen(
        [sys.executable, str(program), thread],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        process_ids = [int(text) for text in parent.stdout.readline().split()]
        handles = [os.pidfd_open(process_id) for process_id in process_ids]
        parent.stdin.write("\n")
        parent.stdin.close()
        parent.wait(timeout=60)
    assert len(handles) == 2
    for handle in handles:
        ended, _, _ = select.select([handle], [], [], 60)  # readable once the process has ended
        os.close(handle)
        assert ended


def test_a_worker_needs_neither_torch_nor_megatron() -> None:
    code = (
        "import sys; import pipelines.environments.worker_process\n"
        "from pipelines.environments import frozen_lake, sokoban\n"
        "print(sorted({name.split('.')[0] for name in sys.modules} & {'torch', 'megatron', 'hydra', 'gymnasium'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "['gymnasium']\n"


def test_a_worker_loads_nothing_of_its_parents_main_module() -> None:
    """This process has torch; what a worker has mapped into its memory says whether that has it too."""
    with open_pool(1) as pool:
        pool.reset_many([request(0, 1)])
        mapped = Path(f"/proc/{pool.process_ids[0]}/maps").read_text(encoding="utf-8")
    assert "libtorch" in Path("/proc/self/maps").read_text(encoding="utf-8")
    assert "numpy" in mapped
    assert "libtorch" not in mapped


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda pool: pool.reset_many([request(0, 1, tag="Lake")]), "tags ['Lake'] are not in custom_envs ['Hard']"),
        (
            lambda pool: pool.reset_many([request(0, 1), request(0, 2)]),
            "slots [0] are named twice in one call: a slot plays one episode at a time",
        ),
        (lambda pool: pool.step_many([(3, [2])]), "slots [3] have no episode: reset them before they are stepped"),
    ],
)
def test_calls_out_of_order_are_refused(call: object, message: str) -> None:
    with open_pool(0, custom_envs={"Hard": CUSTOM_ENVS["Hard"]}) as pool:
        with pytest.raises(MockSchedulerError) as caught:
            call(pool)
        assert str(caught.value) == message


def test_a_negative_number_of_workers_is_refused() -> None:
    custom_envs = {"Lake": CustomEnvConfig(env_config=FrozenLakeEnvConfig())}
    with pytest.raises(ValueError, match=r"^num_workers is -1; expected 0 or more$"):
        EnvironmentPool(custom_envs, tokenizer_of("Lake", custom_envs), num_workers=-1)


def test_a_worker_imports_nothing_of_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("json.py", "gymnasium.py", "typing_extensions.py", "pipelines.py", "sitecustomize.py"):
        (tmp_path / name).write_text("import pathlib; pathlib.Path(__file__ + '.ran').touch()", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    with open_pool(1) as pool:
        pool.reset_many([request(0, 11)])
    assert list(tmp_path.glob("*.ran")) == []
