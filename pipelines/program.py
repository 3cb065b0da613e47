"""Makes the pipeline a program that the instruments run, replay and compare; importing this imports no torch.

``mock_scheduler.program`` finds ``PROGRAM`` by its name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mock_scheduler.config.base import ConfigSection, KeyEffects, effects_of
from mock_scheduler.config.loading import ConfigSource
from mock_scheduler.layouts.layout import emulation_limits
from mock_scheduler.layouts.order_plan import OrderPlan, plan_order
from mock_scheduler.program import ClipRule, ConfigLoader, Plain, Program, Reductions, RunConfig
from pipelines.config.loading import build_loader, load_clip_rule
from pipelines.config.schema import PipelineConfig
from pipelines.reductions import PipelineReductions, own_config


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineProgram:
    """Is the pipeline's ``mock_scheduler.program.Program``."""

    schema: type[ConfigSection] = PipelineConfig
    entry: str = "pipelines.agentic"
    preload: tuple[str, ...] = (
        "httpx",
        "hydra",
        "megatron.core.distributed",
        "megatron.core.models.gpt.gpt_layer_specs",
        "megatron.core.optimizer",
        "megatron.core.pipeline_parallel",
        "pipelines.run",
        "rich.console",
        "safetensors",
        "torch.utils.tensorboard",
        "typer",
    )
    replay_entry: str | None = "pipelines.replay_actions"
    export_entry: str | None = "pipelines.export_hf"
    packages: tuple[str, ...] = ("pipelines",)
    initial_state_key: str | None = None
    quiet_keys: Mapping[str, Plain] = field(
        default_factory=lambda: {"eval_steps": 0, "save_steps": 0, "track_with": "none"}
    )
    folder_keys: Mapping[str, Plain] = field(default_factory=lambda: {"checkpoint_config.output_dir": None})
    reductions: Reductions | None = field(default_factory=PipelineReductions)

    def build_loader(self, config_name: str, config_path: str | Path) -> ConfigLoader:
        """Builds a loader, as ``pipelines.config.loading`` does."""
        return build_loader(config_name, config_path)

    def arguments(self, entry: str, source: ConfigSource) -> tuple[str, ...]:
        """Starts an entry module with the arguments of ROLL's."""
        return ("-m", entry, *source.arguments())

    def num_processes(self, config: RunConfig) -> int:
        """Returns one for each rank of the layout."""
        return config.parallel.world_size

    def effects(self, config: RunConfig) -> KeyEffects:
        """Reads the statements of the schema."""
        return effects_of(PipelineConfig)

    def list_sources(self, config: RunConfig) -> Sequence[Path]:
        """Lists the files of the Hugging Face checkpoint that a model begins with, and of the tokenizer.

        All code is in ``packages``.
        """
        own = own_config(config)
        folders = {folder for folder in (own.model.hf_checkpoint, own.text.tokenizer) if folder is not None}
        suffixes = (".safetensors", ".json", ".jinja", ".model", ".txt")
        return sorted(
            path for folder in folders for path in Path(folder).expanduser().iterdir() if path.suffix in suffixes
        )

    def first_step(self, config: RunConfig) -> int:
        """Reads the step at the end of the name of the checkpoint's folder."""
        number = Path(config.resume_from_checkpoint or "").name.rpartition("_")[2]
        return int(number) if number.isdecimal() else 0

    def end_after(self, config: RunConfig, last_step: int | None) -> list[str]:
        """Shortens the run where its rate has another end and it has no critic.

        A rate that decays over the whole run follows from its length, and a critic's warm-up must be shorter than it.
        """
        own = own_config(config)
        overrides = ["save_steps=0"] if own.save_steps else []
        is_rate_fixed = own.training.lr_decay_style == "constant" or own.training.lr_decay_iters is not None
        if last_step is None or not is_rate_fixed or own.adv_estimator == "gae" or last_step + 1 >= own.max_steps:
            return overrides
        return [*overrides, f"max_steps={last_step + 1}"]

    def count_elements(self, config: RunConfig, *, vocabulary: int) -> int:
        """Counts the outputs of a layer's parts, and logits, with their gradients.

        14 times the hidden size, once more for each chosen expert, and 4 times the MLP's are more than any model here
        has.
        """
        model = own_config(config).model
        widest = max(model.hidden_size, model.num_attention_heads * model.head_size)
        by_layer = (14 + model.moe_router_topk) * widest + 4 * model.ffn_size
        return 2 * (model.num_layers * by_layer + vocabulary)

    def order_limits(self, config: RunConfig) -> tuple[str, ...]:
        """Says the limits of the run's own layout, as ``mock_scheduler.layouts.layout`` does."""
        own = own_config(config)
        return emulation_limits(own.parallel, own.model, own.training)

    def plan_order(self, config: RunConfig) -> OrderPlan:
        """Plans the order, as ``mock_scheduler.layouts.order_plan`` does."""
        return plan_order(own_config(config))

    def load_clip_rule(self, config_path: Path) -> ClipRule:
        """Reads the keys of the policy loss, as ``pipelines.config.loading`` does."""
        return load_clip_rule(config_path)


PROGRAM: Program = PipelineProgram()
