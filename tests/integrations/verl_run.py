"""Runs verl's own command several times, and writes what came of it.

``python tests/integrations/verl_run.py FOLDER NAME:MODE[:KEY=VALUE]…`` runs in ``.venv-verl``, where ``tests`` is a
package of verl's wheel. Each run is the command of ``docs/frameworks/verl.md`` with the same keys; ``MODE`` is that of
the settings, or ``real``: without any of ours.
For each it writes ``FOLDER/NAME.json``: exit code, output, metrics, digests of the weights after the last step, and how
often engines were made, asked and given weights.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pandas as pd
import torch

HERE = Path(__file__).parent
MANAGER = "mock_scheduler.adapters.verl.AgentLoopManager"
PROMPTS = [f"{word} {number}" for number in (1, 2) for word in ("Left", "what is", "the quick", "Up", "Down", "12 +")]


def write_data(path: Path, prompts: list[str]) -> None:
    """Write a data file of verl's kind."""
    rows = [
        {
            "data_source": "toy",
            "prompt": [{"role": "user", "content": prompt}],
            "ability": "x",
            "reward_model": {"style": "rule", "ground_truth": "1"},
            "extra_info": {"index": index},
        }
        for index, prompt in enumerate(prompts)
    ]
    pd.DataFrame(rows).to_parquet(path)


def list_keys(folder: Path, name: str, given: dict[str, str]) -> list[str]:
    """The keys of the command."""
    actor, rollout, model = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "model"))
    return [
        *("trainer.use_v1=False", "trainer.device=cpu", "trainer.n_gpus_per_node=1", "trainer.nnodes=1"),
        *("trainer.total_epochs=1", "trainer.total_training_steps=3", "trainer.save_freq=3", "trainer.test_freq=2"),
        *("trainer.resume_mode=disable", "trainer.logger=[file]", "trainer.val_before_train=True"),
        f"trainer.default_local_dir={folder / name / 'checkpoints'}",
        *(
            f"data.train_files={folder / given.get('data', 'train.parquet')}",
            f"data.val_files={folder / 'val.parquet'}",
        ),
        *("data.train_batch_size=4", "data.max_prompt_length=64", "data.max_response_length=12", "data.shuffle=True"),
        *("data.dataloader_num_workers=0", "data.filter_overlong_prompts=False", "data.seed=3"),
        *("algorithm.adv_estimator=grpo", "algorithm.use_kl_in_reward=False"),
        *(f"reward.custom_reward_function.path={HERE / 'verl_reward.py'}", "reward.num_workers=1"),
        *(f"{model}.path={folder / given.get('model', 'model')}", f"{model}.use_remove_padding=False"),
        f"+{model}.override_config.attn_implementation=eager",
        *(f"{model}.enable_gradient_checkpointing=False", f"{actor}.strategy=fsdp2", f"{actor}.use_kl_loss=False"),
        *("actor_rollout_ref.ref.strategy=fsdp2", "critic.strategy=fsdp2"),
        *(f"{actor}.ppo_mini_batch_size=2", f"{actor}.ppo_micro_batch_size_per_gpu=2", f"{actor}.optim.lr=1e-3"),
        *(f"{actor}.fsdp_config.{key}" for key in ("model_dtype=fp32", "dtype=float32", "use_torch_compile=False")),
        f"{actor}.use_torch_compile=False",
        *(f"{rollout}.name=toy", f"{rollout}.n={given.get('n', '2')}", f"{rollout}.tensor_model_parallel_size=1"),
        *(f"{rollout}.calculate_log_probs=True", f"{rollout}.log_prob_micro_batch_size_per_gpu=4"),
        *(f"{rollout}.agent.num_workers=2", "ray_kwargs.ray_init.num_cpus=8"),
        *("+ray_kwargs.ray_init.num_gpus=1", "+ray_kwargs.ray_init.include_dashboard=False"),
        *("+ray_kwargs.ray_init._node_ip_address=127.0.0.1", "+ray_kwargs.ray_init.object_store_memory=200000000"),
        f"hydra.run.dir={folder / name / 'hydra'}",
    ]


def run(folder: Path, name: str, mode: str, given: dict[str, str]) -> dict[str, Any]:
    """Run the command once."""
    place = folder / name
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    counts = place / "counts"
    counts.touch()
    (place / "token").write_text(secrets.token_hex(32), encoding="utf-8")
    environ = {
        **{key: value for key, value in os.environ.items() if key != "CUDA_VISIBLE_DEVICES"},
        "VERL_USE_EXTERNAL_MODULES": "verl_cpu",
        "PYTHONPATH": str(HERE),
        "VERL_PLATFORM": "cpu",
        "VERL_ENGINE_DEVICE": "cuda",
        "VERL_COUNTS": str(counts),
        "VERL_FILE_LOGGER_PATH": str(place / "metrics.jsonl"),
        "VERL_USE_EXTERNAL_PLUGINS": given.get("plugins", "auto"),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(place / "token"),
        "RAY_DEDUP_LOGS": "0",
    }
    keys = list_keys(folder, name, given)
    if mode != "real":
        settings = {"rollout_mock": {"enable": True, "mode": mode, "dump_dir": str(folder / "dumps")}}
        path = place / "mock.yaml"
        path.write_text(json.dumps({**settings, "trace_dir": str(place / "traces")}), encoding="utf-8")
        environ["MOCK_SCHEDULER_VERL"] = str(path)
        if "bare" not in given:
            keys.append(f"+actor_rollout_ref.rollout.agent.agent_loop_manager_class={MANAGER}")
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as ray:
        command = [sys.executable, "-m", "verl.trainer.main_ppo", *keys, f"+ray_kwargs.ray_init._temp_dir={ray}"]
        done = subprocess.run(
            command, cwd=place, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
    (place / "output").write_text(done.stdout, encoding="utf-8")
    metrics = place / "metrics.jsonl"
    return {
        "code": done.returncode,
        "seconds": round(time.monotonic() - started_s),
        "output": done.stdout,
        "metrics": [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
        if metrics.exists()
        else [],
        "weights": digest_weights(place / "checkpoints"),
        "counts": Counter(counts.read_text(encoding="utf-8").split()),
    }


def digest_weights(checkpoints: Path) -> dict[str, str]:
    """The digest of every parameter of the last checkpoint."""
    found = {}
    for path in sorted(checkpoints.rglob("model_world_size_*.pt")):
        for key, value in torch.load(path, weights_only=False).items():
            local = value.to_local() if hasattr(value, "to_local") else value
            found[key] = hashlib.sha256(local.contiguous().numpy().tobytes()).hexdigest()
    return found


if __name__ == "__main__":
    root = Path(sys.argv[1])
    write_data(root / "train.parquet", PROMPTS)
    write_data(root / "other.parquet", ["Right now", *PROMPTS[1:]])
    write_data(root / "val.parquet", ["one", "two", "three"])
    for word in sys.argv[2:]:
        name, mode, *pairs = word.split(":")
        result = run(root, name, mode, dict(pair.split("=", 1) for pair in pairs))
        (root / f"{name}.json").write_text(json.dumps(result, indent=1), encoding="utf-8")
