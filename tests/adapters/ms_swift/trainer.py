"""Stand-ins for ms-swift 4.6.0 after its sources: the samples of ``swift/rl_core/data.py`` with all their fields, and
a trainer with the methods of ``swift/megatron/trainers`` that the adapter meets, in their order.

``tests/integrations/test_ms_swift.py`` has the real ones.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import torch


@dataclass
class OnPolicySample:
    messages: list[dict[str, Any]]
    images: list[Any] = field(default_factory=list)
    videos: list[Any] = field(default_factory=list)
    audios: list[Any] = field(default_factory=list)
    tools: list[Any] | None = None
    objects: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    prompt_id: str = ""
    request_id: str = ""
    response_token_ids: list[Any] = field(default_factory=list)
    response_loss_mask: list[Any] = field(default_factory=list)
    rollout_logprobs: list[Any] = field(default_factory=list)
    finish_reason: str | None = None
    add_eos: bool | None = False
    rollout_infos: dict[str, Any] = field(default_factory=dict)
    routed_experts: Any = None
    encoded: dict[str, Any] | None = None
    teacher_prompt: Any = None
    teacher_images: list[Any] | None = None
    teacher_messages: Any = None


@dataclass
class GRPOSample(OnPolicySample):
    rewards: list[float | None] | None = None
    advantages: torch.Tensor | None = None


@dataclass
class GKDSample(OnPolicySample):
    add_eos: bool | None = None


class MegatronCallback:
    def __init__(self, trainer: Any) -> None:
        self.trainer, self.args, self.state = trainer, trainer.args, trainer.state

    def on_train_begin(self) -> None: ...
    def on_train_end(self) -> None: ...
    def on_step_begin(self) -> None: ...
    def on_step_end(self) -> None: ...
    def on_log(self, logs: Any) -> None: ...
    def on_save(self, output_dir: str) -> None: ...


def modules() -> dict[str, ModuleType]:
    """The modules of ms-swift that the adapter imports, by name."""
    table: dict[str, Any] = {}

    class MegatronRLHF:
        def _prepare_vllm_client(self) -> str:
            return "a connection"

    content: dict[str, dict[str, Any]] = {
        "swift.rl_core.data": {kind.__name__: kind for kind in (OnPolicySample, GRPOSample, GKDSample)},
        "swift.megatron.callbacks": {"megatron_callbacks_map": table, "MegatronCallback": MegatronCallback},
        "swift.megatron.pipelines.train.rlhf": {"MegatronRLHF": MegatronRLHF},
    }
    found = {}
    for name, names in content.items():
        found[name] = ModuleType(name)
        vars(found[name]).update(names)
    return found


class Trainer:
    """``MegatronGRPOTrainer`` in one process; counts its calls."""

    def __init__(self, callbacks: list[Any], **arguments: Any) -> None:
        given = {"temperature": 1.0, "top_p": 0.9, "top_k": 50, "num_generations": 2, "use_vllm": True, **arguments}
        self.args = SimpleNamespace(model="tiny", multi_turn_scheduler=object(), **given)
        self.calls: list[str] = []
        self.wrapped_models, self.optimizer = [torch.nn.Linear(1, 1)], object()
        self.unwrapped_models = self.wrapped_models
        self.state = SimpleNamespace(iteration=0)
        self.callbacks = [kind(self) for kind in callbacks]
        self.reward_func_names = ["accuracy", "length"]
        self.num_generations = self.num_generations_eval = 2
        self.dynamic_sample, self.max_resample_times = self.args.__dict__.get("dynamic_sample", False), 3
        self.device = torch.device("cpu")
        self._init_rollout_engine()

    def call_event(self, event: str) -> None:
        for callback in self.callbacks:
            getattr(callback, event)()

    def _init_rollout_engine(self) -> None:
        self.use_vllm = self.args.use_vllm
        self.use_gym_env = False
        self.disable_rollout_importance_sampling = False
        if self.args.use_vllm:
            self.calls.append("engine")

    def _generate_completions(self, samples: list[Any]) -> list[Any]:
        self.calls.append(f"generate {self.state.iteration}")
        found = []
        for number, sample in enumerate(samples):
            sample.messages.insert(0, {"role": "system", "content": "be good"})  # as _set_inputs_system does
            made = copy.deepcopy(sample)
            made.request_id = f"chatcmpl-{self.state.iteration}-{number}"
            made.messages.append({"role": "assistant", "content": f"answer {number}"})
            made.response_token_ids = [[10 + number, 11], [12]]
            made.response_loss_mask = [[1, 0], [1]]
            made.rollout_logprobs = [[-0.5], [-0.25 * (number + 1)]]
            made.finish_reason = "length" if number else "stop"
            found.append(made)
        torch.rand(1)  # an engine in the process moves the generators
        return found

    def _score_completions(self, samples: list[Any]) -> torch.Tensor:
        self.calls.append(f"score {self.state.iteration}")
        return torch.tensor([[float(number), float("nan")] for number, _ in enumerate(samples)])

    def train(self, num_iterations: int, *, rounds: int = 1, evaluates: bool = False) -> list[Any]:
        """Gives what each rollout was trained on, and a number drawn behind it."""
        found = []
        self.call_event("on_train_begin")
        for self.state.iteration in range(num_iterations):
            self.call_event("on_step_begin")
            for place in range(rounds):
                content = f"question {self.state.iteration} {place}"
                samples = [GRPOSample(messages=[{"role": "user", "content": content}]) for _ in range(2)]
                found.append(self.play(samples))
            self.call_event("on_step_end")
        if evaluates:
            self.unwrapped_models[0].eval()
            found.append(self.play([GRPOSample(messages=[{"role": "user", "content": "2 + 2"}]) for _ in range(2)]))
        self.call_event("on_train_end")
        return found

    def play(self, samples: list[Any]) -> Any:
        samples = self._generate_completions(samples)
        return [vars(sample) for sample in samples], self._score_completions(samples), float(torch.rand(1))
