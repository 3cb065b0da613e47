"""The ``actor_infer`` section: the engine that samples, how it samples, and the server that it may be; no torch."""

from __future__ import annotations

import re
from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator

from mock_scheduler.config.base import ConfigSection, Decides, NonNegativeInt, PositiveInt
from pipelines.config.model import ModelConfig


class GeneratingArgs(ConfigSection):
    """How actions are sampled: softmax(logits / temperature), then top-k, then top-p; 0 and 1.0 switch them off."""

    decides: ClassVar = Decides.ROLLOUTS

    # The trainer computes its log-probabilities at this temperature.
    temperature: Annotated[float, Decides.ROLLOUTS | Decides.TRAINING] = Field(default=1.0, gt=0.0)
    """Logits are divided by it."""
    top_k: NonNegativeInt = 0
    """Only so many most likely tokens; 0: all."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Only the most likely tokens of this probability together."""


class EngineServerConfig(ConfigSection):
    """Holds the server of ``actor_infer.engine`` vllm or openai.

    ``timeout_s``: seconds that a leader waits for one answer. ``retries``: how often it repeats a request whose
    connection fails, or that is answered with a status of 500 or above.
    ``base_url``: of openai, as ``http://127.0.0.1:8000/v1``. ``model``: of openai, its name there; ``null``: the only
    one. ``api_key_variable``: of openai, the name of the environment variable with the key; ``null``: none.
    ``arguments``: of vllm, further ones of its server. ``envs``: of vllm, variables of its process, as
    ``CUDA_VISIBLE_DEVICES``. ``startup_timeout_s``: of vllm, seconds to start in, fewer than other ranks wait.
    """

    decides: ClassVar = Decides.NOTHING

    timeout_s: float = Field(default=300.0, gt=0.0)
    retries: NonNegativeInt = 2
    base_url: str | None = None
    model: str | None = None
    api_key_variable: str | None = None
    arguments: list[str] = Field(default=[])
    envs: dict[str, str] = Field(default={})
    startup_timeout_s: float = Field(default=540.0, gt=0.0, le=590.0)

    @field_validator("base_url")
    @classmethod
    def _check_url(cls, url: str | None) -> str | None:
        if url is None:
            return None
        if "@" in url:
            raise ValueError("has a user or a password in it; give http://HOST:PORT/v1, and a key by api_key_variable")
        if not re.fullmatch(r"https?://[!-.0-~]+(/[!-~]*)?", url):
            raise ValueError(f"is {url!r}, expected http://HOST:PORT/v1")
        return url.rstrip("/").removesuffix("/v1")

    @field_validator("api_key_variable")
    @classmethod
    def _check_variable(cls, name: str | None) -> str | None:
        if name is not None and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ValueError("is no name of a variable; it takes the name, and the variable has the key")
        return name


class ActorInferConfig(ConfigSection):
    """The rollout engine; validation without ``generating_args`` of its own samples by the ones here, as training does.

    ``only_action_tokens``: the policy chooses among the environment's action tokens alone, and its log-probabilities,
    in sampling and in training, are of the softmax over them. ``max_new_tokens``: the most tokens sampled in one turn;
    a turn ends with the first action token, and one of text with the first token by which the tokenizer ends a text.
    ``use_kv_cache``: keep keys and values of read tokens; false computes the whole history anew for every token.
    ``rows_per_forward``: episodes of one forward pass, or requests to a server at a time; they are chosen before the
    layout is known. ``weights_precision``: round the weights to it while episodes are played, in training and in
    validation, as an inference engine of this precision has them; ``None`` plays with the trainer's own.
    ``record_routed_experts``: keep the experts of every token that the engine reads in the batch, for routing replay.
    ``engine``: ``megatron`` samples with the trainer's own model, ``vllm`` in a server that the run starts and ends,
    ``openai`` in a running one with the OpenAI API that returns token ids. ``engine_python``: the Python that vLLM is
    installed in; ``null``: the run's own. ``weights_sync``: bring weights to vLLM by ``reload``, its own update, or by
    ``restart``. ``logprobs_mode``: the server's log-probabilities are of the sampled distribution, or ``raw``, of the
    logits; verified at every update.
    """

    decides: ClassVar = Decides.ROLLOUTS

    only_action_tokens: Annotated[bool, Decides.ROLLOUTS | Decides.TRAINING] = False
    max_new_tokens: PositiveInt = 1
    # These two change no token, and of log-probabilities the last bits at most.
    use_kv_cache: Annotated[bool, Decides.EXECUTION] = True
    rows_per_forward: Annotated[PositiveInt, Decides.EXECUTION] = 64
    weights_precision: Literal["bfloat16"] | None = None
    # A further column of the recorded rows; no token, and no step of training, follows from the key.
    record_routed_experts: Annotated[bool, Decides.NOTHING] = False
    # Recorded rows mean the same whoever sampled them, so a replay may name another engine, or none.
    engine: Annotated[Literal["megatron", "vllm", "openai"], Decides.EXECUTION] = "megatron"
    engine_python: Annotated[str | None, Decides.NOTHING] = None
    weights_sync: Annotated[Literal["reload", "restart"], Decides.NOTHING] = "reload"
    logprobs_mode: Literal["processed", "raw"] = "processed"
    server: EngineServerConfig = EngineServerConfig()
    generating_args: GeneratingArgs = GeneratingArgs()


def weights_precision_problem(
    engine: ActorInferConfig, *, precision: str, worker_type: str, modes_in_use: frozenset[str]
) -> str:
    """Says why ``weights_precision`` would have no effect; empty where it has one, and where everything is replayed.

    A replay needs the key as in its recording, whatever precision it trains in.
    """
    if engine.weights_precision is None or modes_in_use == {"mock"}:
        return ""
    key = f"actor_infer.weights_precision {engine.weights_precision}"
    if worker_type == "mock":
        return (
            f"{key} would have no effect: with rollout_worker.type mock rollouts are read, and no weights are sampled "
            "from; leave it out"
        )
    if precision == engine.weights_precision:
        return (
            f"{key} would have no effect: with precision {precision} the weights have no other values; set precision "
            "to float32 or float64, or leave it out"
        )
    return ""


# Keys that one engine alone reads.
_OF_VLLM = ("engine_python", "weights_sync", "server.arguments", "server.envs", "server.startup_timeout_s")
_OF_OPENAI = ("server.base_url", "server.model", "server.api_key_variable")
_OF_SERVERS = ("logprobs_mode", "server.timeout_s", "server.retries")


def engine_problems(engine: ActorInferConfig) -> list[str]:
    """Lists what an engine lacks, and keys of another one; for a run that samples."""
    kind = engine.engine
    foreign = {
        "megatron": (*_OF_SERVERS, *_OF_VLLM, *_OF_OPENAI),
        "vllm": _OF_OPENAI,
        "openai": _OF_VLLM,
    }[kind]
    problems = [
        f"actor_infer.{key} has no effect with actor_infer.engine {kind}; leave it out"
        for key in foreign
        if _is_changed(engine, key)
    ]
    if kind == "megatron":
        return problems
    if engine.record_routed_experts:
        problems.append(f"actor_infer.record_routed_experts: engine {kind} tells none; set it to false")
    if kind == "openai" and engine.server.base_url is None:
        problems.append("actor_infer.server.base_url: engine openai needs the address of the server")
    if engine.only_action_tokens:
        problems.append(
            f"actor_infer.only_action_tokens: engine {kind} samples from the whole vocabulary; set it to false"
        )
    temperature = engine.generating_args.temperature
    if engine.logprobs_mode == "raw" and temperature != 1:
        problems.append(
            f"actor_infer.logprobs_mode raw at temperature {temperature:g}: raw log-probabilities are of the logits "
            "themselves, and training's are of logits / temperature; set it to processed, or the temperature to 1"
        )
    return problems


def routing_problems(engine: ActorInferConfig, model: ModelConfig) -> list[str]:
    """Lists why routed experts cannot be recorded or replayed so; for a run that samples."""
    if engine.record_routed_experts and model.num_moe_experts is None:
        return ["actor_infer.record_routed_experts has no effect: the model has no experts; leave it out"]
    if engine.record_routed_experts and model.moe_router_impl == "megatron":
        return [
            "actor_infer.record_routed_experts needs model.moe_router_impl layout_invariant: Megatron's own router is "
            "not told which token it routes"
        ]
    if model.moe_router_replay == "replay" and not engine.record_routed_experts:
        return [
            "model.moe_router_replay replay: the rollouts that this run plays would have no experts to replay; set "
            "actor_infer.record_routed_experts=true, or model.moe_router_replay=record"
        ]
    return []


def _is_changed(engine: ActorInferConfig, key: str) -> bool:
    section: ConfigSection = engine.server if key.startswith("server.") else engine
    name = key.removeprefix("server.")
    return bool(getattr(section, name) != type(section).model_fields[name].default)
