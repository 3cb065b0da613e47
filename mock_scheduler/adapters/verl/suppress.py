"""What else must not start where rollouts are replayed: engines, weights sent to them, reward workers, teachers.

verl makes all of it before it asks for a rollout, by classes that no key can change. So the plugin rebinds, in each
process of a run that only replays, the methods that start something. Contract: in any other run nothing starts or
ends otherwise. A replay whose process has no plugin is refused before engines start; a run whose rollouts verl would
play past the proxy, where it makes its agent loops or asks an engine. Both trainers use this.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from mock_scheduler.adapters.rebinding import standing_for
from mock_scheduler.adapters.verl.settings import VARIABLE, VerlSettings, find_settings, load_settings
from mock_scheduler.adapters.verl.trace import trace_engines
from mock_scheduler.config.instruments import RUN_FILE_VARIABLE
from mock_scheduler.errors import ConfigError, MockSchedulerError, SchedulerError
from mock_scheduler.ledger import Ledger

_KEY = "actor_rollout_ref.rollout.agent.agent_loop_manager_class"
_POLICY = "VERL_USE_EXTERNAL_PLUGINS"
_SERVERS = "verl.workers.rollout.llm_server"
_CHECKPOINTS = "verl.checkpoint_engine.base"
_ROLLOUTS = "verl.workers.rollout.base"
_REWARDS = "verl.experimental.reward_loop.reward_loop"
_TEACHERS = "verl.experimental.teacher_loop.teacher_model"
_AGENT_LOOPS = "verl.experimental.agent_loop.agent_loop"
_LIBRARY = "mock_scheduler"
_LOGGER = logging.getLogger(f"{_LIBRARY}.rollout_mock")
_KEYS = (
    f"Trainer V0: set {_KEY}=mock_scheduler.adapters.verl.AgentLoopManager as well. Trainer V1: set "
    "trainer.v1.trainer_mode=mock_sync (or mock_colocate_async, mock_separate_async), with "
    "VERL_USE_EXTERNAL_MODULES=mock_scheduler.adapters.verl.v1"
)
_REMEDY = f"the rollout was not taken from the recording. {VARIABLE} says mode: mock. {_KEYS}"


@dataclass
class ProcessState:
    """What the plugin did in this process.

    ``has_proxy``: rollouts pass one; ``error``: why the plugin was not loaded; ``restore``: put back what it rebound.
    """

    ledger: Ledger = field(default_factory=Ledger)
    is_loaded: bool = False
    has_proxy: bool = False
    error: str | None = None
    restore: list[Callable[[], None]] = field(default_factory=list)


@functools.cache
def this_process() -> ProcessState:
    """Return the state of this process: verl makes its objects by names, and passes nothing on."""
    return ProcessState()


def prepare_process() -> None:
    """Rebind what the settings ask for; raises, and keeps for ``check_process``, what went wrong."""
    state = this_process()
    if state.is_loaded:
        return
    try:
        settings = find_settings()
        if settings is not None and settings.is_replay and not settings.with_engines:
            state.restore.append(suppress_engines(state.ledger))
        elif settings is not None and settings.is_recorded:
            state.restore.append(watch_agent_loops(state))
        if (settings is not None and settings.trace_dir is not None) or os.environ.get(RUN_FILE_VARIABLE):
            state.restore.append(trace_engines(settings))
    except (MockSchedulerError, ImportError, AttributeError) as error:
        state.error = f"{type(error).__name__}: {error}"
        raise
    state.is_loaded = True


def check_process(settings: VerlSettings | None = None) -> None:
    """Raise ``ConfigError`` where this run needs the plugin, and it was not loaded."""
    settings = load_settings() if settings is None else settings
    state = this_process()
    if settings.is_replay and not settings.with_engines:
        needs, without = "rollout_mock.mode=mock", "verl starts engines and sends them weights"
    elif settings.trace_dir is not None:
        needs, without = "trace_dir", "nothing is traced"
    else:
        return
    if state.is_loaded:
        return
    policy = os.environ.get(_POLICY, "auto")
    reason = state.error or f"it was not asked for ({_POLICY}={policy})"
    raise ConfigError(
        f"{needs} needs the verl plugin of mock-scheduler, which was not loaded in this process: {reason}. Without it "
        f"{without}. Install mock-scheduler where each process of verl runs, and leave {_POLICY} unset; or set "
        "VERL_USE_EXTERNAL_MODULES=mock_scheduler.adapters.verl.plugin"
    )


def suppress_engines(ledger: Ledger, find: Callable[[str], Any] = import_module) -> Callable[[], None]:
    """Keep all of verl's engines from starting in this process; returns what puts everything back.

    ``find``: gives verl's modules by name. Raises ``ConfigError`` where this release of verl has other ones.
    """

    def servers(_owner: type[Any], /, *_arguments: object, **_options: object) -> SuppressedServers:
        ledger.count("suppressed", "engine")
        return SuppressedServers()

    def send_nothing(_self: object, *_arguments: object, **_options: object) -> dict[str, float]:
        ledger.count("suppressed", "sync_weights")
        return {}

    def no_rewards(self: Any, config: Any, *_arguments: object, **_options: object) -> None:  # noqa: ANN401 - verl's
        ledger.count("suppressed", "reward_workers")
        self.config, self.reward_loop_workers, self.reward_model_manager = config, [], None
        self.reward_router_address = None

    def no_teachers(self: Any, *_arguments: object, **_options: object) -> None:  # noqa: ANN401 - verl's
        ledger.count("suppressed", "teachers")
        self.teacher_model_managers = {}

    rebindings: list[tuple[str, str, str, object]] = [
        (_SERVERS, "LLMServerManager", "create", classmethod(servers)),
        (_SERVERS, "LLMServerManager", "create_empty", classmethod(servers)),
        (_CHECKPOINTS, "CheckpointEngineManager", "update_weights", send_nothing),
        (_REWARDS, "RewardLoopManager", "__init__", no_rewards),
        (_REWARDS, "RewardLoopManager", "compute_rm_score", _refuse_scores),
        (_TEACHERS, "MultiTeacherModelManager", "__init__", no_teachers),
        (_AGENT_LOOPS, "AgentLoopManager", "__init__", _refuse_agent_loops),
    ]
    registry = getattr(find(_ROLLOUTS), "_ROLLOUT_REGISTRY", None)
    owners = [getattr(find(module), owner, None) for module, owner, _, _ in rebindings]
    missing = [
        f"{module}.{owner}.{name}"
        for found, (module, owner, name, _) in zip(owners, rebindings, strict=True)
        if not hasattr(found, name)
    ]
    missing += [f"{_ROLLOUTS}._ROLLOUT_REGISTRY"] if registry is None else []
    if missing or registry is None:
        raise ConfigError(
            f"this release of verl has no {', '.join(missing)}: it starts its engines elsewhere, and a replay would "
            "start them too. The adapter was tried with the versions that mock-scheduler frameworks lists"
        )
    originals = [(found, name, vars(found)[name]) for found, (_, _, name, _) in zip(owners, rebindings, strict=True)]
    for found, (_, _, name, value) in zip(owners, rebindings, strict=True):
        setattr(found, name, value)
    rollouts = dict(registry)
    registry.update(dict.fromkeys(registry, f"{__name__}.SuppressedRollout"))

    def restore() -> None:
        registry.update(rollouts)
        for found, name, value in originals:
            setattr(found, name, value)

    return restore


def watch_agent_loops(state: ProcessState, find: Callable[[str], Any] = import_module) -> Callable[[], None]:
    """Refuse agent loops of verl's own where no proxy is before them; returns what puts everything back."""
    kind = getattr(find(_AGENT_LOOPS), "AgentLoopManager", None)
    if kind is None:  # another release: its rollouts may be played by another class
        return lambda: None
    original = kind.__init__

    @functools.wraps(original)
    def make(self: object, *arguments: object, **options: object) -> None:
        if not state.has_proxy:
            raise SchedulerError(f"verl makes its own agent loops, and no rollout would be recorded: {_KEYS}")
        original(self, *arguments, **options)

    standing = ExitStack()
    standing.enter_context(standing_for(kind, {"__init__": make}))
    return standing.close


class SuppressedServers:
    """Stands for ``LLMServerManager``: nothing is started, and there is nobody to ask."""

    def __init__(self) -> None:
        self.rollout_replicas: list[object] = []
        self.server_handles: list[object] = []
        self.server_addresses: list[str] = []

    def get_client(self, *_arguments: object, **_options: object) -> SuppressedClient:
        """Return a client that refuses."""
        return SuppressedClient()

    def get_replicas(self) -> list[object]:
        """Return the replicas: none."""
        return self.rollout_replicas

    def get_addresses(self) -> list[str]:
        """Return the servers' addresses: none."""
        return self.server_addresses

    def start_profile(self, **_options: object) -> None:
        """There is nothing to profile."""

    def stop_profile(self) -> None:
        """There is nothing to profile."""


class SuppressedClient:
    """Stands for ``LLMServerClient``, which verl sends to the processes of its agent loops."""

    async def generate(self, *_arguments: object, **_options: object) -> object:
        """Refuse: a replay that generates would run live without a word."""
        raise SchedulerError(f"verl asked its engine to generate in a run that only replays: {_REMEDY}")


class SuppressedRollout:
    """Stands in a training worker for its end of the engine, which imports the engine's package."""

    def __init__(self, *_arguments: object, **_options: object) -> None:
        """Start nothing."""

    async def resume(self, *_arguments: object, **_options: object) -> None:
        """There is no memory to take back."""

    async def release(self, *_arguments: object, **_options: object) -> None:
        """There is no memory to release."""

    async def update_weights(self, *_arguments: object, **_options: object) -> None:
        """Take no weights: the iterator is not begun, so nothing is gathered."""


def _refuse_scores(_self: object, *_arguments: object, **_options: object) -> object:
    raise SchedulerError(
        "verl asked a reward model for scores in a run that only replays: they are not in the recording. A reward "
        "model with a resource pool of its own (reward.reward_model.enable_resource_pool=True) scores before the seam"
    )


def _refuse_agent_loops(_self: object, *_arguments: object, **_options: object) -> None:
    # Where its workers asked an engine in vain, trainer V1 would take each prompt for a failed one, and draw another.
    raise SchedulerError(f"verl makes its own agent loops in a run that only replays: {_REMEDY}")


def show_lines() -> None:
    """Show this library's lines where nobody chose otherwise: verl sets up logging from its warnings on."""
    logger = logging.getLogger(_LIBRARY)
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)


def tell_suppressed() -> None:
    """Log what this process did not start: nobody asks for the ledger of a process of verl's."""
    suppressed = this_process().ledger.as_dict()["suppressed"]
    if suppressed:
        counts = ", ".join(f"{name} {count}" for name, count in sorted(suppressed.items()))
        _LOGGER.info("[Rollout Mock] Did not start or call: %s", counts)
