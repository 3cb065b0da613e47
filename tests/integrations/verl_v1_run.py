"""Runs verl's own command with its trainer V1 several times, and writes what came of it, as ``verl_run`` does of V0.

``python tests/integrations/verl_v1_run.py FOLDER NAME:MODE[:KEY=VALUE]…`` runs in ``.venv-verl``. ``MODE`` is that of
the settings, or ``real``: without any of ours. Keys: ``trainer`` (mode of the trainer, by default mock_sync),
``sampler`` (our class for custom_sampler), ``n``, ``data``, ``steps``, ``keys`` (further ones of verl), ``dumps`` (the
folder), ``trace`` (engines are traced), ``plain`` (our module is not loaded).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from verl_run import PROMPTS, digest_weights, list_keys, write_data  # beside it

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
CPU, OURS = "verl_v1_cpu", "mock_scheduler.adapters.verl.v1"


def keys_of(folder: Path, name: str, mode: str, given: dict[str, str]) -> list[str]:
    """The keys of the command."""
    trainer = given.get("trainer", "sync" if mode == "real" else "mock_sync")
    changed = {
        "trainer.use_v1": "True",
        "trainer.total_training_steps": given.get("steps", "3"),
        "trainer.val_before_train": "False",
        "trainer.v1.trainer_mode": trainer,
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": "1",
        "ray_kwargs.ray_init.num_cpus": "16",
        "actor_rollout_ref.rollout.agent.num_workers": "1",
    }
    if "sampler" in given:
        changed["trainer.v1.sampler.custom_sampler.path"] = "pkg://mock_scheduler.adapters.verl.v1_sampler"
        changed["trainer.v1.sampler.custom_sampler.name"] = given["sampler"]
    kept = [key for key in list_keys(folder, name, given) if key.partition("=")[0] not in changed]
    return [*kept, *(f"{key}={value}" for key, value in changed.items()), *given.get("keys", "").split()]


def run(folder: Path, name: str, mode: str, given: dict[str, str]) -> dict[str, Any]:
    """Run the command once."""
    place = folder / name
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    counts = place / "counts"
    counts.touch()
    modules = CPU if "plain" in given or mode == "real" else f"{CPU},{OURS}"
    environ = {
        **{key: value for key, value in os.environ.items() if key != "CUDA_VISIBLE_DEVICES"},
        "PYTHONPATH": f"{HERE}:{ROOT}",
        "VERL_USE_EXTERNAL_MODULES": modules,
        "VERL_PLATFORM": "cpu",
        "VERL_ENGINE_DEVICE": "cuda",
        "VERL_COUNTS": str(counts),
        "VERL_FILE_LOGGER_PATH": str(place / "metrics.jsonl"),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEDUP_LOGS": "0",
    }
    if mode != "real":
        dumps = str(folder / given.get("dumps", "dumps"))
        path = place / "mock.yaml"
        settings: dict[str, Any] = {"rollout_mock": {"enable": True, "mode": mode, "dump_dir": dumps}}
        if "trace" in given:
            settings["trace_dir"] = str(place / "traces")
        path.write_text(json.dumps(settings), encoding="utf-8")
        environ["MOCK_SCHEDULER_VERL"] = str(path)
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as ray:
        keys = [*keys_of(folder, name, mode, given), f"+ray_kwargs.ray_init._temp_dir={ray}"]
        command = [sys.executable, "-m", "verl.trainer.main_ppo", *keys]
        done = subprocess.run(
            command, cwd=place, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
    (place / "output").write_text(done.stdout, encoding="utf-8")
    metrics = place / "metrics.jsonl"
    lines = metrics.read_text(encoding="utf-8").splitlines() if metrics.exists() else []
    return {
        "code": done.returncode,
        "output": done.stdout,
        "metrics": [json.loads(line) for line in lines],
        "weights": digest_weights(place / "checkpoints"),
        "counts": Counter(counts.read_text(encoding="utf-8").split()),
    }


if __name__ == "__main__":
    root = Path(sys.argv[1])
    write_data(root / "train.parquet", PROMPTS)
    write_data(root / "other.parquet", ["Right now", *PROMPTS[1:]])
    write_data(root / "val.parquet", ["one", "two", "three"])
    for word in sys.argv[2:]:
        name, mode, *pairs = word.split(":")
        result = run(root, name, mode, dict(pair.split("=", 1) for pair in pairs))
        (root / f"{name}.json").write_text(json.dumps(result, indent=1), encoding="utf-8")
