"""Drives ms-swift's own ``MegatronGRPOTrainer`` on the CPU: ``python -m tests.integrations.ms_swift_run MODE FOLDER``.

Its constructor, callbacks, rollout engine, samples, outputs and rewards are ms-swift's. Of this file are the model, a
small GPT of Megatron-core, and what stands for vLLM: an engine that answers with ms-swift's own ``RolloutOutput``, and
a place for the weights. ``FOLDER/MODE.pt`` gets what the trainer would train on, and ``FOLDER/MODE.json`` the calls.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.integrations.host_kernels import import_without_kernels

# Before all else, since mcore-bridge imports TransformerEngine's layers; its kernels of the optimizer stay unseen.
import_without_kernels()
_OPTIMIZERS = "transformer_engine.pytorch.optimizers"
_found = sys.modules.pop(_OPTIMIZERS)
sys.modules[_OPTIMIZERS] = None  # type: ignore[assignment]
import megatron.core.optimizer  # noqa: E402

sys.modules[_OPTIMIZERS] = _found

import torch  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402
from swift.infer_engine.protocol import (  # noqa: E402
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    ChatMessage,
    RolloutOutput,
    UsageInfo,
)
from swift.megatron.callbacks import megatron_callbacks_map  # noqa: E402
from swift.megatron.trainers import base, grpo_trainer, rollout_mixin  # noqa: E402
from swift.utils import import_external_file  # noqa: E402

from mock_scheduler.launch.process_group import join_process_group  # noqa: E402
from mock_scheduler.megatron.host_device import use_host_device  # noqa: E402
from tests.megatron.attach.own_training import VOCAB, Case, build_chunks, micro_batches, run_passes  # noqa: E402

NUM_ITERATIONS = 2
PLUGIN = "from mock_scheduler.adapters import ms_swift\n\nms_swift.register()\n"
calls: list[str] = []


class Engine:
    """Stands for vLLM in the process: answers by the request's own content, and moves the random generator."""

    def __init__(self) -> None:
        self.engine = SimpleNamespace(reset_mm_cache=lambda: None, reset_prefix_cache=lambda: None)

    def infer(self, infer_requests: list[Any], request_config: Any, use_tqdm: bool) -> list[RolloutOutput]:
        calls.append("infer")
        outputs = []
        for number, request in enumerate(infer_requests):
            length = 2 + int(torch.randint(0, 3, ()))
            tokens = [10 * number + place for place in range(length)]
            logprobs: dict[str, list[dict[str, Any]]] = {
                "content": [{"logprob": -float(value)} for value in torch.rand(length)]
            }
            choice = ChatCompletionResponseChoice(
                index=0,
                message=ChatMessage(role="assistant", content=f"{request.messages[-1]['content']}: {number}"),
                finish_reason="length" if number % 2 else "stop",
                logprobs=logprobs,
                token_ids=tokens,
                routed_experts=torch.arange(8, dtype=torch.uint8).view(2, 2, 2).numpy() if number == 0 else None,
            )
            usage = UsageInfo(prompt_tokens=1, completion_tokens=length, total_tokens=length + 1)
            response = ChatCompletionResponse(model="tiny", choices=[choice], usage=usage)
            turns = {"response_token_ids": [tokens, [1]], "response_loss_mask": [[1] * length, [0]]}
            is_multi_turn = number == 1
            messages = [*request.messages, {"role": "assistant", "content": "two turns"}] if is_multi_turn else None
            outputs.append(RolloutOutput(response=response, messages=messages, **(turns if is_multi_turn else {})))
        return outputs


def score_by_length(completions: list[str], **columns: Any) -> list[float | None]:
    calls.append("score")
    return [None if len(text) % 5 == 0 else float(len(text)) for text in completions]


class HostTrainer(grpo_trainer.MegatronGRPOTrainer):
    """Its model is a small one, and nothing of it needs a GPU."""

    def prepare_model(self) -> None:
        self.config, self.wrapped_models = build_chunks(Case())
        self.unwrapped_models = [chunk.module for chunk in self.wrapped_models]
        self.bridge = None

    def get_optimizer_and_scheduler(self) -> tuple[Any, None]:
        building = megatron.core.optimizer
        config = building.OptimizerConfig(optimizer="adam", lr=1e-2, params_dtype=torch.float32)
        optimizer = building.get_megatron_optimizer(config, self.wrapped_models)
        self.config.grad_scale_func = optimizer.scale_loss
        return optimizer, None

    def _get_data_collator(self) -> None:
        return None

    def _load_checkpoint(self) -> None:
        return None

    def _prepare_vllm_engine(self) -> Engine:
        calls.append("engine")
        return Engine()

    def _move_model_to_vllm(self) -> None:
        calls.append("weights")


def arguments(folder: Path) -> SimpleNamespace:
    """Those that the trainer's constructor reads, with ms-swift's defaults."""
    return SimpleNamespace(
        callbacks=["mock_scheduler"],
        output_dir=str(folder / "swift"),
        report_to=[],
        model="tiny",
        model_info=SimpleNamespace(model_dir="tiny"),
        train_iters=NUM_ITERATIONS,
        router_replay_mode="disabled",
        padding_free=False,
        new_special_tokens=[],
        task_type="causal_lm",
        tp_comm_overlap=False,
        check_model=False,
        async_save=False,
        teacher_model=None,
        offload_teacher_model=False,
        rlhf_type="grpo",
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=0.9,
        vllm_tensor_parallel_size=1,
        sleep_level=0,
        offload_model=False,
        offload_optimizer=False,
        async_generate=False,
        use_gym_env=None,
        multi_turn_scheduler=None,
        vllm_server_pass_dataset=False,
        temperature=1.0,
        top_p=0.9,
        top_k=50,
        repetition_penalty=1.0,
        max_completion_length=8,
        num_generations=2,
        num_generations_eval=None,
        generation_batch_size=4,
        steps_per_generation=1,
        global_batch_size=4,
        micro_batch_size=2,
        per_device_generation_batch_size=4,
        beta=0.0,
        loss_type="grpo",
        epsilon=0.2,
        epsilon_high=None,
        top_entropy_quantile=1.0,
        importance_sampling_level="token",
        tau_pos=1.0,
        tau_neg=1.05,
        real_tau=0.5,
        fipo_decay_rate=32.0,
        fipo_clip_range=0.2,
        fipo_clip_high_only=False,
        fipo_safety_threshold=None,
        dynamic_sample=False,
        max_resample_times=3,
        overlong_filter=False,
        scale_rewards="group",
        advantage_estimator="grpo",
        kl_in_reward=False,
        log_entropy=False,
        rollout_importance_sampling_mode=None,
        rollout_importance_sampling_threshold=2.0,
        log_rollout_offpolicy_metrics=False,
        off_policy_sequence_mask_delta=None,
        truncation_strategy="left",
        teacher_kl_coef=1.0,
        reward_funcs=[score_by_length],
        reward_weights=None,
    )


def train(trainer: Any) -> list[Any]:
    """Each iteration as ms-swift's ``run_train_step`` orders it: the rollout, its rewards, passes, the update."""
    found = []
    trainer.call_event("on_train_begin")
    for step in range(NUM_ITERATIONS):
        trainer.call_event("on_step_begin")
        asked = [[{"role": "user", "content": f"question {step} {row}"}] for row in range(2)]
        rows = [{"messages": messages, "solution": row} for row, messages in enumerate(asked)]
        samples = trainer.get_local_rollout_batch(trainer.to_samples(rows))
        samples = trainer._generate_completions(samples)
        rewards = trainer._score_completions(samples)
        found.append(([{**vars(sample), "class": type(sample).__name__} for sample in samples], rewards, torch.rand(1)))
        for chunk in trainer.wrapped_models:
            chunk.zero_grad_buffer()
        trainer.optimizer.zero_grad()
        run_passes(Case(), trainer.wrapped_models, micro_batches(Case(), step))
        trainer.optimizer.step()
        trainer._step += 1  # as ms-swift's iterator over the rollout's micro-batches does
        trainer.state.iteration += 1
        trainer.call_event("on_step_end")
    trainer.call_event("on_train_end")
    return found


def main(mode: str, folder: Path) -> None:
    use_host_device()
    join_process_group("gloo", timeout=timedelta(minutes=2))
    parallel_state.initialize_model_parallel()
    torch.manual_seed(1)
    model_parallel_cuda_manual_seed(1)
    base.warmup_jit_function = lambda config, args: None  # runs kernels of the GPU
    rollout_mixin.is_vllm_available = lambda: True  # the engine is another one
    rollout_mixin.set_expandable_segments = lambda enable: None  # of CUDA's allocator
    rollout_mixin.get_current_device = lambda: torch.device("cpu")
    plugin = folder / "mock_plugin.py"
    plugin.write_text(PLUGIN, encoding="utf-8")
    import_external_file(str(plugin))
    assert "mock_scheduler" in megatron_callbacks_map
    template = SimpleNamespace(
        padding_free=False, processor=None, template_meta=SimpleNamespace(default_system="be good"), max_length=None
    )
    trainer = HostTrainer(arguments(folder), template, vllm_client=None)
    code: object = "none"
    found: list[Any] = []
    try:
        found = train(trainer)
    except SystemExit as end:  # behind the last step that the run file asks for
        code = end.code
    torch.save(found, folder / f"{mode}.pt")
    said = {"calls": calls, "code": str(code), "vocab": VOCAB}
    if os.environ.get("MOCK_SCHEDULER_MS_SWIFT"):
        from mock_scheduler.adapters.ms_swift import plugin as ours

        said["ledger"] = ours.ledger.as_dict()
    (folder / f"{mode}.json").write_text(json.dumps(said), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
