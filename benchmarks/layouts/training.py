"""Makes a rollout batch of random rows, to compare layouts without playing an episode."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console

from benchmarks.layouts.cases import GROUP_SIZE, LONGEST_ROW, NUM_GROUPS, SEED, Case, build_config
from mock_scheduler.batch import RolloutBatch, SampleIdentity, SamplingParams, Termination, Trajectory
from mock_scheduler.batch.columns import Ragged
from mock_scheduler.batch.engine_columns import ROUTED_EXPERTS_COLUMN
from mock_scheduler.config.instruments import TraceConfig
from mock_scheduler.launch.ranks import Place, ranks_command
from mock_scheduler.megatron.probe.step_probe import StepProbe
from mock_scheduler.support.text import count_of
from pipelines.config.model import ModelConfig
from pipelines.config.schema import PipelineConfig
from pipelines.environments.seeds import derive_seed
from pipelines.megatron.learner import Learner
from pipelines.megatron.process_of_rank import build_layout, leave_layout, start_runtime, stop_runtime

NUM_ACTIONS, VOCAB_SIZE = 4, 62
_UNIFORM_LOGPROB = -float(np.log(NUM_ACTIONS))


def random_batch(
    seed: int,
    *,
    longest: int,
    form: Literal["trajectory", "step"] = "trajectory",
    num_actions: int = NUM_ACTIONS,
) -> RolloutBatch:
    """Make 16 trajectories in 4 groups, of 1 to 4 turns and very different lengths, up to ``longest`` tokens.

    Every turn is an observation of random tokens and one action, with the logprob of a uniform policy. ``form``: one
    row per trajectory, or one per turn with everything before it as its prompt. ``num_actions``: actions are the tokens
    from 2 on.
    """
    generator = np.random.Generator(np.random.Philox(key=derive_seed(seed, "layout-rows")))
    rows: list[Trajectory] = []
    for group in range(NUM_GROUPS):
        for member in range(GROUP_SIZE):
            rows += _random_rows(generator, group, member, longest=longest, form=form, num_actions=num_actions)
    sampling = SamplingParams(temperature=1.0, top_p=1.0, top_k=0, logprobs_mode="processed")
    return RolloutBatch.from_trajectories(rows, sampling=sampling, group_size=GROUP_SIZE)


def with_random_experts(batch: RolloutBatch, model: ModelConfig, *, seed: int) -> RolloutBatch:
    """Gives every token experts that no router would choose, in every layer that has some; every third row has none."""
    generator = np.random.Generator(np.random.Philox(key=derive_seed(seed, "layout-experts")))
    rows = []
    for number, row in enumerate(batch.rows()):
        num_tokens = 0 if number % 3 == 2 else len(row.tokens) - number % 2
        shape = (num_tokens, sum(model.moe_layers), model.num_moe_experts or 1)
        experts = generator.random(shape).argsort(axis=2)[..., : model.moe_router_topk].astype(np.uint8)
        rows.append(replace(row, extras={**row.extras, ROUTED_EXPERTS_COLUMN: Ragged(torch.from_numpy(experts))}))
    return RolloutBatch.from_trajectories(rows, sampling=batch.sampling, group_size=batch.group_size)


def _random_rows(
    generator: np.random.Generator,
    group: int,
    member: int,
    *,
    longest: int,
    form: Literal["trajectory", "step"],
    num_actions: int,
) -> list[Trajectory]:
    num_turns = int(generator.integers(1, 5))
    per_turn = int(generator.integers(3, longest // num_turns))
    tokens: list[int] = []
    for _ in range(num_turns):
        tokens += generator.integers(2 + NUM_ACTIONS, VOCAB_SIZE, per_turn - 1).tolist()
        tokens.append(int(generator.integers(2, 2 + num_actions)))
    reward = float(generator.integers(0, 2))
    turns_of_rows = [range(num_turns)] if form == "trajectory" else [range(turn, turn + 1) for turn in range(num_turns)]
    return [
        _row(
            tokens[: turns[-1] * per_turn + per_turn],
            [(turn + 1) * per_turn - 1 for turn in turns],
            identity=SampleIdentity(
                scheduler_id="default", group_id=group, episode_id=0, env_id=group * GROUP_SIZE + member, turn=turns[0]
            ),
            reward=reward if turns[-1] == num_turns - 1 else 0.0,
        )
        for turns in turns_of_rows
    ]


def _row(tokens: list[int], actions: list[int], *, identity: SampleIdentity, reward: float) -> Trajectory:
    """Make a row with actions at these positions; its last turn gets the reward."""
    mask = torch.zeros(len(tokens), dtype=torch.bool)
    mask[actions] = True
    return Trajectory(
        identity=identity,
        tokens=torch.tensor(tokens, dtype=torch.int32),
        response_mask=mask,
        rollout_logprobs=torch.full((len(actions),), _UNIFORM_LOGPROB, dtype=torch.float32),
        turn_rewards=torch.tensor([0.0] * (len(actions) - 1) + [reward], dtype=torch.float32),
        policy_versions=torch.zeros(len(actions), dtype=torch.int32),
        termination=Termination.TERMINATED,
        prompt_length=actions[0],
        tag="random",
    )


METRICS_FILE = "metrics.json"
_QUIET = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "TORCH_CPP_LOG_LEVEL": "ERROR"}


class LayoutRunError(RuntimeError):
    """The processes of one world size failed; the message has the end of their output."""


def run_cases(root: Path, cases: Iterable[Case], console: Console) -> None:
    """Train every case and its reference, each once, into ``root/{case}``.

    Raises:
        LayoutRunError: a process failed.
    """
    by_size: dict[int, dict[str, None]] = {}
    for case in cases:
        for needed in (case.reference, case):
            by_size.setdefault(needed.world_size, {})[needed.name] = None
    for world_size, names in sorted(by_size.items()):
        processes, runs = count_of(world_size, "process", "processes"), count_of(len(names), "run", "runs")
        console.print(f"{processes}: {runs}")
        _run(root, world_size, list(names))


def _run(root: Path, world_size: int, names: Sequence[str]) -> None:
    program = ["-m", "benchmarks.layouts.training", str(root), *names]
    command = ranks_command(sys.executable, program, told_to=root, place=Place(num_local=world_size))
    result = subprocess.run(command, env={**os.environ, **_QUIET}, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise LayoutRunError(f"{world_size} processes ended with {result.returncode}:\n{result.stderr[-3000:]}")


def train_case(folder: Path, config: PipelineConfig) -> None:
    """Train the steps of one case, from the canonical initial weights. Every rank must call it."""
    runtime = build_layout(config.parallel, seed=SEED)
    learner = Learner(config, runtime, vocab_size=VOCAB_SIZE, allowed_tokens=list(range(2, 2 + NUM_ACTIONS)))
    steps: list[dict[str, float]] = []
    for step in range(config.max_steps):
        batch = random_batch(SEED + step, longest=LONGEST_ROW, form=config.rollout_form)
        if config.model.moe_router_replay == "replay":
            batch = with_random_experts(batch, config.model, seed=SEED + step)
        with StepProbe(runtime, folder, step=step, config=TraceConfig(level="full")) as probe:
            steps.append(learner.train_step(batch, step=step, probe=probe))
    if runtime.is_writer:
        (folder / METRICS_FILE).write_text(json.dumps(steps), encoding="utf-8")
    dist.barrier()


def main() -> None:
    """Train all cases of the command line, in order."""
    root = Path(sys.argv[1])
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    configs = {name: build_config(Case.parse(name)) for name in sys.argv[2:]}
    start_runtime(next(iter(configs.values())).parallel, seed=SEED)
    leave_layout()
    for name, config in configs.items():
        folder = root / name
        folder.mkdir(parents=True, exist_ok=True)
        train_case(folder, config)
        leave_layout()
    stop_runtime()


if __name__ == "__main__":
    main()
