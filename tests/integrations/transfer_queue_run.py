"""Rows through the real TransferQueue, and verl's own samplers over it; writes what came of it as JSON.

``python -W ignore tests/integrations/transfer_queue_run.py FOLDER MODEL`` runs in ``.venv-verl``, in one process with
Ray beside it. Rows are put as verl 0.9.1's agent loops put them, in the order in which rollouts happen to end.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
import torch
import transfer_queue as tq
from omegaconf import OmegaConf
from verl.trainer.ppo.padding_utils import upsample_batch_to_divisible_size
from verl.trainer.ppo.v1 import get_trainer_cls
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
from verl.utils.skip import SkipManager
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from mock_scheduler.adapters.imports.steps import ImportOptions
from mock_scheduler.adapters.imports.verl_v1 import VERL_NAMES
from mock_scheduler.adapters.plain_values import pack
from mock_scheduler.adapters.transfer_queue import queue
from mock_scheduler.adapters.transfer_queue.codec import QueueCodec, QueueRows
from mock_scheduler.batch import SamplingParams
from mock_scheduler.commands.foreign import ImportCommand, run_import
from mock_scheduler.errors import MockSchedulerError
from mock_scheduler.recording.step.step_file import decode_step, encode_step
from mock_scheduler.recording.step.step_info import StepInfo
from mock_scheduler.scheduler import RolloutRequest

SAMPLING = SamplingParams(temperature=1.0, top_p=1.0, top_k=0, logprobs_mode="processed")


def digest(rows: QueueRows) -> str:
    """Of keys, tags and every field, with types and bits."""
    tree = [list(rows.keys), [dict(tag) for tag in rows.tags]]
    tree += [[name, column.kind, list(column.rows)] for name, column in sorted(rows.columns.items())]
    packed, content = pack(tree, "rows")
    return hashlib.sha256(json.dumps(packed).encode() + content).hexdigest()


def agent_row(uid: str, session: int, index: int, draw: random.Random, *, steps: int, moe: bool) -> dict[str, Any]:
    """A row as ``AgentLoopWorkerTQ`` makes it: some responses are empty, some end by a tool's tokens."""
    prompt = torch.tensor([draw.randrange(3, 250) for _ in range(3)])
    response = torch.tensor([draw.randrange(3, 250) for _ in range(draw.randrange(0, 6))], dtype=torch.int64)
    ids = torch.cat([prompt, response])
    mask = torch.tensor([draw.randrange(2) for _ in response], dtype=torch.int64)
    scores = torch.zeros(len(response))
    if len(response):
        scores[-1] = draw.random()
    logprobs = -torch.tensor([draw.random() for _ in response], dtype=torch.float32)
    if len(response) > 3:
        logprobs[3] = float("nan") if not mask[3] else -0.0
    experts = {"routed_experts": torch.randint(0, 8, (len(ids), 2, 2), dtype=torch.int16)} if moe else {}
    return {
        "prompts": prompt,
        "responses": response,
        "input_ids": ids,
        "position_ids": torch.arange(len(ids)),
        "response_mask": mask,
        "loss_mask": mask.clone(),
        "rollout_log_probs": logprobs,
        "rm_scores": scores,
        **experts,
        "multi_modal_inputs": {"pixel_values": torch.rand(2, 2).bfloat16()} if session else {},
        "num_turns": 2,
        "uid": uid,
        "session_id": session,
        "raw_prompt": [{"role": "user", "content": uid[:1]}],
        "data_source": "toy",
        "reward_model": {"ground_truth": "1", "style": "rule"},
        "extra_fields": {"min_global_steps": steps - 1, "max_global_steps": steps - 1, "note": [None, 0.5]},
        "global_steps": steps,
    }


def put_agent_rows(uids: list[str], steps: int, partition: str, *, num_sessions: int, moe: bool = False) -> None:
    """Put the rows of prompts, as agent loops of several processes would: in no order that two runs share."""
    draw = random.Random(f"{steps}{partition}")
    jobs = []
    for place, uid in enumerate(uids):
        for session in range(num_sessions):
            size = 2 if (place, session) == (0, 1) else 1  # a session that became two rows
            row = [agent_row(uid, session, index, draw, steps=steps, moe=moe) for index in range(size)]
            jobs.append((uid, session, row))
    random.SystemRandom().shuffle(jobs)
    for uid, session, rows in jobs:
        tags = [
            {
                "status": "success",
                "prompt_len": 3,
                "response_len": len(row["responses"]),
                "seq_len": len(row["input_ids"]),
                "global_steps": steps,
                "min_global_steps": steps - 1,
                "max_global_steps": steps - 1,
            }
            for row in rows
        ]
        keys = [f"{uid}_{session}_{index}" for index in range(len(rows))]
        tq.kv_batch_put(keys=keys, partition_id=partition, fields=list_of_dict_to_tensordict(rows), tags=tags)
    done = [{"is_prompt": True, "status": "finished", "global_steps": steps} for _ in uids]
    tq.kv_batch_put(keys=uids, partition_id=partition, tags=done)


class Trainer:
    """The part of a trainer that a sampler has: its configuration, and the method that draws more prompts."""

    val_dataloader = ("one batch",)

    def __init__(self, skip: dict[str, Any] | None = None) -> None:
        plain = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "do_sample": True, "n": 2}
        rollout = {**plain, "val_kwargs": {**plain, "n": 1}, "agent": {}, "calculate_log_probs": True}
        self.config = OmegaConf.create(
            {
                "data": {"train_batch_size": 2, "max_prompt_length": 4, "max_response_length": 6},
                "actor_rollout_ref": {"model": {"path": sys.argv[2]}, "rollout": rollout},
                "algorithm": {"adv_estimator": "grpo", "filter_groups": {"enable": False}},
                "trainer": {
                    "experiment_name": "e",
                    "project_name": "p",
                    "v1": {"trainer_mode": "sync", "sync": {"parameter_sync_step": 1}, "sampler": {}},
                },
                "skip": {"rollout_tq": skip or {"enable": False}},
            }
        )

    def _add_prompts_to_generate(self, num_prompts: int) -> int:
        return num_prompts

    def sampler(self, kind: type[Any], mode: str = "sync") -> Any:
        """Make a sampler as ``PPOTrainer`` makes a custom one."""
        return kind(
            trainer_mode=mode,
            trainer_config={},
            max_off_policy_threshold=8,
            max_off_policy_strategy="drop",
            sampler_kwargs=OmegaConf.create({}),
            refill_fn=self._add_prompts_to_generate,
            poll_interval=0.1,
        )


def set_settings(folder: Path, mode: str, dumps: str, *, on_mismatch: str = "error", **more: Any) -> None:
    path = folder / f"{mode}.yaml"
    section = {"enable": True, "mode": mode, "dump_dir": str(folder / dumps)}
    if on_mismatch != "error":
        section["on_mismatch"] = on_mismatch
    path.write_text(json.dumps({"rollout_mock": section, **more}), encoding="utf-8")
    os.environ["MOCK_SCHEDULER_VERL"] = str(path)


def clear(batch: Any) -> None:
    tq.kv_clear(keys=batch.keys, partition_id=batch.partition_id)


def round_trip() -> dict[str, Any]:
    """Rows that went through the queue, a recording, and the queue again, with rows that fill the batch up."""
    put_agent_rows(["aa", "bb"], 1, "train", num_sessions=2, moe=True)
    listed = tq.kv_list("train")["train"]
    keys = [key for key, tag in listed.items() if not tag.get("is_prompt")]
    meta = tq.KVBatchMeta(keys=keys, tags=[listed[key] for key in keys], partition_id="train")
    meta = upsample_batch_to_divisible_size(meta, 4, eos_token_id=2)
    rows = queue.fetch(meta, {"x": 1.5})
    codec = QueueCodec(VERL_NAMES, sampling=SAMPLING)
    batch = codec.encode(rows, RolloutRequest(global_step=1, batch_size=8))
    info = StepInfo(step=1, mode="train", scheduler_id="default", run_id="r", policy_version=0)
    stored, _ = decode_step(encode_step(batch, info).to_bytes())
    again = codec.decode(stored)
    queue.clear_partition("train")
    back = queue.fetch(queue.put(again), {"x": 1.5})
    queue.clear_partition("train")
    kinds = {name: column.kind for name, column in rows.columns.items()}
    return {
        "rows": len(keys),
        "padded": len(meta.keys),
        "kinds": sorted(set(kinds.values())),
        "digests": [digest(rows), digest(again), digest(back)],
        "left": tq.kv_list("train"),
    }


def sample_steps(trainer: Trainer, kind: type[Any], *, live: bool, mode: str = "sync") -> list[Any]:
    """Sample three steps; gives the digests of the rows in the queue, and what the sampler gave."""
    sampler = trainer.sampler(kind, mode)
    found = []
    for step in (1, 2, 3):
        putter = None
        if live:
            uids = [f"{letter}{random.SystemRandom().randrange(10**9)}" for letter in "ab"]
            tags = [{"is_prompt": True, "status": "pending", "global_steps": step} for _ in uids]
            tq.kv_batch_put(keys=uids, partition_id="train", tags=tags)
            putter = threading.Thread(
                target=put_agent_rows, args=(uids, step, "train"), kwargs={"num_sessions": 2, "moe": True}
            )
            putter.start()
        batch, metrics = sampler.sample(global_steps=step, partition_id="train", batch_size=2)
        if putter is not None:
            putter.join()
        found.append({"keys": batch.keys, "metrics": metrics, "digest": digest(queue.fetch(batch, {}))})
        clear(batch)
    return found


@contextmanager
def refusal(found: dict[str, str], name: str) -> Iterator[None]:
    try:
        yield
    except (MockSchedulerError, ValueError) as error:
        found[name] = f"{type(error).__name__}: {error}"


def skip_files(folder: Path) -> dict[str, Any]:
    """Files that verl's own skip code writes become a recording, and are replayed."""
    options = {"enable": True, "dump_dir": str(folder / "skipped"), "steps": [1, 2, 3], "action": "cache"}
    trainer = Trainer(options)
    SkipManager.init(trainer.config)
    found = []
    sampler = trainer.sampler(ReplayBuffer)
    for step in (1, 2, 3):
        SkipManager.set_step(step)
        put_agent_rows([f"a{step}", f"b{step}"], step, "train", num_sessions=2)
        batch, _ = sampler.sample(global_steps=step, partition_id="train", batch_size=2)
        found.append({"keys": batch.keys, "digest": digest(queue.fetch(batch, {}))})
        clear(batch)
    SkipManager.init(Trainer().config)
    (source,) = (folder / "skipped").rglob("GBS*")
    assert run_import("verl-v1", source, folder / "imported", ImportCommand(rollouts=ImportOptions())) == 0
    return {"files": sorted(str(path.relative_to(source)) for path in source.rglob("*.pt")), "steps": found}


def main() -> None:
    folder = Path(sys.argv[1])
    result: dict[str, Any] = {"refused": {}}
    with refusal(result["refused"], "no plugin"):
        get_trainer_cls("mock_sync")
    from mock_scheduler.adapters.verl import v1
    from mock_scheduler.adapters.verl.v1_sampler import RecordedReplayBuffer, RecordedReplayBufferAsync

    result["trainers"] = [
        get_trainer_cls(f"mock_{name}").__mro__[2].__name__ for name in ("sync", "colocate_async", "separate_async")
    ]
    assert v1.RecordedSync is get_trainer_cls("mock_sync")
    ray.init(
        num_cpus=8,
        include_dashboard=False,
        log_to_driver=False,
        _node_ip_address="127.0.0.1",
        _temp_dir=os.environ["RAY_FOLDER"],
        object_store_memory=200_000_000,
    )
    tq.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}))
    result["round_trip"] = round_trip()
    for name, kind, mode in (
        ("sync", RecordedReplayBuffer, "sync"),
        ("async", RecordedReplayBufferAsync, "colocate_async"),
    ):
        set_settings(folder, "dump", name)
        result[name] = [sample_steps(Trainer(), kind, live=True, mode=mode)]
        set_settings(folder, "mock", name)
        with refusal(result["refused"], name):
            Trainer().sampler(kind, mode)
        set_settings(folder, "mock", name, with_engines=True)
        result[name] += [sample_steps(Trainer(), kind, live=False, mode=mode) for _ in range(2)]
    result["skip"] = skip_files(folder)
    # verl's files state no contract.
    set_settings(folder, "mock", "imported", on_mismatch="warn", with_engines=True)
    result["imported"] = sample_steps(Trainer(), RecordedReplayBuffer, live=False)
    (folder / "result.json").write_text(json.dumps(result, indent=1), encoding="utf-8")
    tq.close()
    ray.shutdown()


if __name__ == "__main__":
    main()
