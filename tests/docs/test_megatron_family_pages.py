"""The lines on the pages of megatron/rl and ms-swift do what they say, on stand-ins of these frameworks."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml

from mock_scheduler import read_recording
from mock_scheduler.adapters.ms_swift import plugin
from mock_scheduler.adapters.ms_swift.settings import MsSwiftSettings
from mock_scheduler.ledger import Ledger
from tests.adapters.megatron_rl import rl_utils
from tests.adapters.ms_swift.trainer import Trainer, modules

DOCS = Path(__file__).parents[2] / "docs/frameworks"


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), flags=re.DOTALL)


def test_the_lines_for_train_rl_record_and_replay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "megatron.rl", ModuleType("megatron.rl"))
    monkeypatch.setitem(sys.modules, "megatron.rl.rl_utils", rl_utils)  # type: ignore[arg-type]  # it is a module
    for name in ("get_environment_rollouts", "evaluate_and_print_results_rl", "rl_inference_interface_shutdown"):
        monkeypatch.setattr(rl_utils, name, getattr(rl_utils, name))  # put back behind the test
    vars(rl_utils.args).update(
        curr_iteration=0,
        grpo_prompts_per_step=2,
        grpo_group_size=2,
        rl_default_temperature=1.0,
        rl_default_top_p=0,
        rl_default_top_k=-1,
        langrl_env_config=None,
    )
    rl_utils.calls.clear()

    def pretrain(*arguments: Any) -> None:
        rl_utils.get_grpo_data_iterator("model", None, "optimizer")
        rl_utils.rl_inference_interface_shutdown()

    names = ("full_config", "forward_step", "provide_model")
    given = {"pretrain": pretrain, "ModelType": SimpleNamespace(encoder_or_decoder=1), **dict.fromkeys(names)}
    (block,) = blocks("megatron_rl.md", "python")
    exec(block, dict(given))
    assert rl_utils.calls == ["collect 0", "shutdown"]
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert read_recording("dumps/v1").steps == {"train": [0]}


def test_the_plugin_and_the_settings_of_ms_swift_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    swift = modules()
    for name, module in swift.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(plugin, "ledger", Ledger())
    (text,) = blocks("ms_swift.md", "yaml")
    settings = yaml.safe_load(text)
    assert MsSwiftSettings.model_validate(settings).run_id == "grpo-7"
    settings["rollout_mock"]["dump_dir"] = str(tmp_path / "dump")
    path = tmp_path / "mock.yaml"
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    monkeypatch.setenv("MOCK_SCHEDULER_MS_SWIFT", str(path))
    (block,) = blocks("ms_swift.md", "python")
    exec(block, {})
    trainer = Trainer([swift["swift.megatron.callbacks"].megatron_callbacks_map["mock_scheduler"]])
    trainer.train(1)
    assert read_recording(tmp_path / "dump").steps == {"train": [0]}
