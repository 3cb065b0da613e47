"""Drives megatron/rl's own functions on the CPU: ``python -m tests.integrations.megatron_rl_run MODE FOLDER``, with
Megatron-LM's sources before the installed Megatron-core on the path.

``get_grpo_data_iterator``'s call, ``get_environment_rollouts``, the classes, group statistics and training rows are
Megatron-LM's. Of this file are the inference mode and the generator, which need a GPU; and four packages of servers and
trackers that ``rl_utils`` imports and this never uses are empty. ``FOLDER/MODE.json`` gets what was trained on.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

UNUSED = ("openai", "fastapi", "wandb", "zmq")


class _Unused(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Gives empty packages, whose every name is a class."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        is_unused = name.partition(".")[0] in UNUSED
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_unused else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name)
        vars(module).update(__path__=[], __getattr__=_make_class)
        return module

    def exec_module(self, module: ModuleType) -> None:
        return None


class _Any(type):
    def __getattr__(cls, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls


def _make_class(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Any(name, (), {"__init__": lambda self, *args, **options: None})


sys.meta_path.append(_Unused())
sys.modules["transformer_engine"] = None  # type: ignore[assignment]  # its Python may be there, without its kernels

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.rl import rl_utils  # noqa: E402

from mock_scheduler.adapters import megatron_rl  # noqa: E402
from mock_scheduler.launch.process_group import join_process_group  # noqa: E402

NUM_PROMPTS, GROUP_SIZE, LENGTH, EOD = 2, 2, 12, 62
calls: list[str] = []


class Tokenizer:
    """A tokenizer without words."""

    library, pad, eod, bos, vocab_size = "null", 63, EOD, None, 64

    def detokenize(self, tokens: Sequence[int]) -> str:
        return " ".join(map(str, tokens))


class Interface:
    """What the inference server says of its requests."""

    def __init__(self) -> None:
        self.ledger: dict[str, Any] = {}

    def merge_global_request_ledgers(self) -> dict[str, Any]:
        found, self.ledger = self.ledger, {}
        return found


interface = Interface()


@contextmanager
def inference_mode(*arguments: Any, **options: Any) -> Iterator[Interface]:
    calls.append("inference mode")
    yield interface


async def generate(iteration: int) -> AsyncIterator[Any]:
    """Groups of Megatron-LM's own classes, with an episode that failed; the rewards are drawn."""
    for prompt in range(NUM_PROMPTS):
        rollouts = []
        for sample in range(GROUP_SIZE):
            ids = [f"chatcmpl-{iteration}-{prompt}-{sample}-{turn}" for turn in range(1 + sample)]
            first = [1, 2, 10 + sample, EOD]
            turns = [first, [*first, 3, 20 + iteration, EOD]][: 1 + sample]
            masks = [[False, False, True, True], [False] * 5 + [True, True]][: 1 + sample]
            rollouts.append(
                rl_utils.TokenRollout(
                    trajectory=turns,
                    reward=float(torch.rand(())),
                    generation_mask=masks,
                    logprobs=[[-float(value) for value in torch.rand(2)] for _ in turns],
                    env_id="math",
                    problem_id=f"problem-{prompt}",
                    completion_ids=ids,
                    note="beyond its own fields",
                )
            )
            for name in ids:
                epochs = [(0, max(iteration - 1, 0)), (3, iteration)]
                interface.ledger[name] = rl_utils.FinishedRequestRecord(epochs, [(0, iteration)], sample)
        if prompt == 1:
            rollouts[0] = rl_utils.TokenRollout(trajectory=[], reward=0.0, env_id="math", failure_reason="timeout")
        yield rl_utils.RolloutGroup(rollouts=rollouts, batch_id=iteration, index_in_batch=prompt, uid=f"u{prompt}")


def prepare(folder: Path) -> SimpleNamespace:
    """Sets what the functions ask of the run."""
    environments = folder / "environments.yaml"
    environments.write_text("- agent: math\n", encoding="utf-8")
    args = SimpleNamespace(
        curr_iteration=0,
        iteration=0,
        langrl_env_config=str(environments),
        rl_offload_optimizer_during_inference=False,
        rl_durable_rollout_bank=False,
        rl_partial_rollouts=True,
        rl_default_temperature=1.0,
        rl_default_top_p=0.0,
        rl_default_top_k=-1,
        rl_submission_granularity="B",
        rl_consumption_granularity="B",
        rl_generation_lag=0,
        inference_max_seq_length=LENGTH,
        seq_length=LENGTH,
        grpo_filter_groups_with_same_reward=False,
        grpo_prompts_per_step=NUM_PROMPTS,
        grpo_group_size=GROUP_SIZE,
        cuda_graph_impl="none",
    )
    rl_utils.get_args = lambda: args
    rl_utils.get_nvtx_range = lambda: _no_range
    rl_utils.get_tokenizer = Tokenizer
    rl_utils.megatron_rl_inference_mode = inference_mode

    def generator(*arguments: Any, **options: Any) -> AsyncIterator[Any]:
        calls.append("generator")
        return generate(args.curr_iteration)

    rl_utils.get_rollout_generator = generator
    rl_utils.evaluate_and_print_results_rl = lambda *arguments: calls.append("evaluation")
    rl_utils.rl_inference_interface_shutdown = lambda: calls.append("shutdown")  # leaves by os._exit
    # Behind the call of the rollouts: rows are moved to a GPU, and log-probabilities computed there.
    rl_utils.prepare_data_for_update = lambda **given: (given, None, None)
    rl_utils.maybe_log_training_metrics = lambda **given: None
    return args


@contextmanager
def _no_range(*arguments: Any, **options: Any) -> Iterator[None]:
    yield


def main(mode: str, folder: Path) -> None:
    join_process_group("gloo", timeout=timedelta(minutes=2))
    torch.manual_seed(5)
    args = prepare(folder)
    group = SimpleNamespace(ep=dist.group.WORLD, tp=dist.group.WORLD)
    model = [torch.nn.Linear(1, 1)]
    model[0].pg_collection = group  # type: ignore[assignment]
    attached = megatron_rl.attach_rollouts({"enable": True, "mode": mode, "dump_dir": str(folder / "recording")})
    said: dict[str, Any] = {"rollouts": [], "stats": [], "trajectories": [], "records": []}
    kinds: set[str] = set()
    for args.curr_iteration in range(2):
        given = rl_utils.get_grpo_data_iterator(
            model,
            None,
            None,
            args.curr_iteration,
            {},
            grpo_iterations=1,
            grpo_prompts_per_step=NUM_PROMPTS,
            grpo_group_size=GROUP_SIZE,
            global_batch_size=NUM_PROMPTS * GROUP_SIZE,
            sequence_packing=False,
            is_correction=False,
        )
        rollouts, ledger = given["rollouts"], dict(given["request_ledger"])
        kinds |= {type(item).__name__ for item in (*rollouts, *(one for group in rollouts for one in group))}
        kinds |= {type(record).__name__ for record in ledger.values()}
        said["rollouts"].append([group.model_dump() for group in rollouts])
        said["records"].append({name: vars(record) for name, record in sorted(ledger.items())})
        stats = rl_utils.compute_group_stats(rollouts, Tokenizer(), LENGTH, given["request_ledger"])
        said["stats"].append({name: getattr(stats, name) for name in stats.__slots__})
        rows = [rollout for group in rollouts for rollout in group if rollout.trajectory]
        trajectories, masks, logprobs = rl_utils.prepare_trajectories(rows, Tokenizer(), LENGTH, True)
        said["trajectories"].append([trajectories.tolist(), masks.tolist(), [item.tolist() for item in logprobs]])
    rl_utils.evaluate_and_print_results_rl(None, model, None, 1)
    rl_utils.rl_inference_interface_shutdown()
    said |= {"calls": calls, "ledger": attached.ledger.as_dict(), "classes": sorted(kinds)}
    (folder / f"{mode}.json").write_text(json.dumps(said), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
