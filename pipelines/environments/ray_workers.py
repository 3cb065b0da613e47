"""A worker of a pool as an actor of a Ray cluster; one that dies is started again, with its episodes where they were.

Contract: an episode follows from its seed and its tokens alone, so a new actor plays what the dead one had answered,
and each answer must be the same. Ray restarts nothing itself: an actor that came back without its episodes would
answer for others.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from mock_scheduler.errors import ConfigError, SchedulerError
from mock_scheduler.support.text import on_one_line
from pipelines.config.environments import CustomEnvConfig, EnvWorkersConfig
from pipelines.environments.base import ResetRequest, ResetResult, StepResult, Tokenizer
from pipelines.environments.ray_actor import EnvironmentActor, read_identity
from pipelines.environments.ray_cluster import check_goes_on, has_ended
from pipelines.environments.slots import Answer, Call, CallFailure, ResetCall, StepCall

logger = logging.getLogger(__name__)

# A call that ends its actor each time would never be answered; other deaths strike a call at random. One that strikes a
# new actor before it is given the call says nothing of the call.
_MAX_DEATHS = 3
_MAX_FAILED_STARTS = 20
_CHECK_EVERY_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Played:
    """An episode that goes on, as it was answered so far."""

    request: ResetRequest
    start: ResetResult
    turns: list[tuple[Sequence[int], StepResult]] = field(default_factory=list)

    def describe(self) -> str:
        return f"slot {self.request.slot} (tag {self.request.tag}, seed {self.request.seed})"


class RayWorker:
    """Plays environments in an actor, and the episodes that go on in it."""

    def __init__(
        self, custom_envs: Mapping[str, CustomEnvConfig], tokenizer: Tokenizer, *, settings: EnvWorkersConfig
    ) -> None:
        """Asks for the actor; returns while it still starts. This process is connected to the cluster."""
        self._make = (dict(custom_envs), tokenizer)
        self._settings = settings
        self._played: dict[int, _Played] = {}
        self._call: Call = StepCall(turns=[])
        self._answer: Any = None
        self._end = ""
        self._has_started = False
        self._where = "a process that had not started"
        self._actor = self._ask_for_actor()

    def send(self, call: Call) -> None:
        """Asks; returns at once."""
        self._call = call
        self._answer = self._actor.answer.remote(call)

    def receive(self) -> Answer:
        """Waits for the answer to the last call; where the actor dies, a new one plays its episodes and answers.

        Raises:
            EOFError: every actor that was given the call has died, or none can be started.
            ConfigError: a new actor finds no room, or has other versions than this run.
            SchedulerError: an episode went otherwise when it was played again.
        """
        deaths = failed_starts = 0
        while True:
            is_given = False
            try:
                if deaths + failed_starts:
                    self._begin_again()
                elif not self._has_started:
                    self._await_start()
                is_given = True
                self._await(self._answer)
                answer: Answer = ray.get(self._answer)
                break
            except RayActorError as error:
                check_goes_on()
                deaths += is_given
                failed_starts += not is_given
                self._end = f"{self._where} died: {on_one_line(error)}"
                if error.actor_init_failed or deaths == _MAX_DEATHS or failed_starts == _MAX_FAILED_STARTS:
                    raise EOFError from error
                reason = str(error).partition("\n")[0].rstrip(".")
                logger.warning("[env workers] %s died: %s; it is replaced", self._where, reason)
            except RayError as error:
                raise SchedulerError(f"environment worker in {self._where}: {error}") from error
        if not isinstance(answer, CallFailure):
            self._keep(answer)
        return answer

    def hang_up(self) -> None:
        """Ends the actor, whatever it does."""
        with suppress(RayError, RuntimeError):  # it has died, or the cluster is gone
            if not has_ended():
                ray.kill(self._actor, no_restart=True)

    def wait(self) -> None:
        """Nothing to wait for: an actor ends with the run's connection at the latest."""

    def describe_end(self) -> str:
        """Says how the last of its actors died."""
        return f"one actor after the other, the last in {self._end},"

    def _ask_for_actor(self) -> Any:  # noqa: ANN401 - of a class that Ray makes
        actor = ray.remote(EnvironmentActor).options(num_cpus=self._settings.num_cpus, max_restarts=0)
        return actor.remote(*self._make, working_dir=os.getcwd())

    def _await(self, answer: Any, *, timeout_s: float = math.inf) -> bool:  # noqa: ANN401 - a reference of Ray's
        """Waits for an answer as long as the cluster goes on; False where none came in time."""
        left_s = timeout_s
        while left_s > 0:
            ready, _ = ray.wait([answer], timeout=min(left_s, _CHECK_EVERY_S))
            if ready:
                return True
            check_goes_on()
            left_s -= _CHECK_EVERY_S
        return False

    def _await_start(self) -> None:
        identity = self._actor.identify.remote()
        if not self._await(identity, timeout_s=self._settings.startup_timeout_s):
            free = ray.available_resources().get("CPU", 0.0)
            raise ConfigError(
                f"env_workers: an actor has not started within env_workers.startup_timeout_s "
                f"{self._settings.startup_timeout_s}: it needs {self._settings.num_cpus:g} CPUs, and the Ray cluster "
                f"has {free:g} free; end what holds the others, or set fewer num_env_workers or a smaller "
                "env_workers.num_cpus"
            )
        found, ours = ray.get(identity), read_identity()
        self._has_started, self._where = True, found.describe()
        other = [
            f"{name} {found.versions.get(name)} instead of {version}"
            for name, version in ours.versions.items()
            if found.versions.get(name) != version
        ]
        if other:
            raise ConfigError(
                f"env_workers: the actor in {self._where} has other versions than this run ({', '.join(other)}), so "
                "that rows would depend on where they are played; install the same on every node of the cluster"
            )

    def _begin_again(self) -> None:
        """Replaces the actor; plays again what is acknowledged, then asks the last call."""
        self.hang_up()
        self._where = "a process that had not started"
        self._actor = self._ask_for_actor()
        self._await_start()
        rounds = list(self._rounds())
        # An actor answers in the order asked, so nothing waits for a round before the next is sent.
        asked = [self._actor.answer.remote(call) for call, _, _ in rounds]
        self._await(asked[-1])
        answers = ray.get(asked)
        for (_, expected, played), answer in zip(rounds, answers, strict=True):
            self._check_same(expected, answer, played)
        if self._played:
            logger.warning("[env workers] %s has played %d episodes again", self._where, len(self._played))
        self._answer = self._actor.answer.remote(self._call)

    def _rounds(self) -> list[tuple[Call, Sequence[Any], list[_Played]]]:
        """Lists the calls that lead every episode to where it was, with the answers there were."""
        everybody = list(self._played.values())
        starts = ResetCall(requests=[one.request for one in everybody])
        rounds: list[tuple[Call, Sequence[Any], list[_Played]]] = [
            (starts, [one.start for one in everybody], everybody)
        ]
        for number in range(max((len(one.turns) for one in everybody), default=0)):
            some = [one for one in everybody if len(one.turns) > number]
            steps = StepCall(turns=[(one.request.slot, one.turns[number][0]) for one in some])
            rounds.append((steps, [one.turns[number][1] for one in some], some))
        return rounds

    def _check_same(self, expected: Sequence[Any], answer: Answer, played: Sequence[_Played]) -> None:
        if isinstance(answer, CallFailure):
            other = f"slot {answer.slot}: {answer.message}"
        else:
            pairs = zip(played, expected, answer, strict=True)
            other = next((f"{one.describe()}: {new}, and {old} before" for one, old, new in pairs if old != new), "")
        if other:
            raise SchedulerError(
                f"an episode went otherwise when {self._where} played it again after its actor died, so that its rows "
                f"cannot be trusted: {other}. An environment's answers must follow from its seed and actions alone; "
                "mock-scheduler replay-actions finds the one that does not"
            )

    def _keep(self, answer: Sequence[Any]) -> None:
        if isinstance(self._call, ResetCall):
            for request, start in zip(self._call.requests, answer, strict=True):
                self._played[request.slot] = _Played(request=request, start=start)
            return
        for (slot, tokens), result in zip(self._call.turns, answer, strict=True):
            if result.terminated or result.truncated:
                self._played.pop(slot, None)
            else:
                self._played[slot].turns.append((list(tokens), result))
