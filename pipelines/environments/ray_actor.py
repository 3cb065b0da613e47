"""The actor of a Ray cluster that has the environments of some slots.

Contract: imports neither ray nor torch; whatever crosses to an actor is defined here, in ``base`` or in ``slots``.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mock_scheduler.support.versions import read_package_version
from pipelines.config.environments import CustomEnvConfig
from pipelines.environments.base import Tokenizer
from pipelines.environments.slots import Answer, Call, EnvironmentSlots

# What an environment's answers follow from, beside its settings and seed.
_PACKAGES = ("gymnasium", "numpy", "reasoning-gym", "tokenizers", "transformers")


@dataclass(frozen=True, kw_only=True, slots=True)
class ActorIdentity:
    """Where an actor is, and its ``versions``, which a run's own must equal."""

    host: str
    process_id: int
    versions: Mapping[str, str]

    def describe(self) -> str:
        """Says ``process 4711 of host node-3``."""
        return f"process {self.process_id} of host {self.host}"


def read_identity() -> ActorIdentity:
    """Reads this process's; the versions of Python, of packages, and of the code of environments."""
    packages = {name: read_package_version(name) or "not installed" for name in _PACKAGES}
    code = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py"))))
    versions = {"python": platform.python_version(), **packages, "pipelines/environments": code.hexdigest()[:16]}
    return ActorIdentity(host=socket.gethostname(), process_id=os.getpid(), versions=versions)


class EnvironmentActor:
    """Environments by slot; Ray makes an actor of it."""

    def __init__(self, custom_envs: Mapping[str, CustomEnvConfig], tokenizer: Tokenizer, *, working_dir: str) -> None:
        """``working_dir``: the run's, to which a tokenizer's path may be relative."""
        # Ray brings lines of an actor to the terminal of the run; without a handler there are none.
        logging.basicConfig(format="%(message)s", level=logging.WARNING)
        for name in ("mock_scheduler", "pipelines"):
            logging.getLogger(name).setLevel(logging.INFO)
        with suppress(OSError):  # on a machine without that folder its paths must be absolute
            os.chdir(working_dir)
        self._slots = EnvironmentSlots(custom_envs, tokenizer)

    def identify(self) -> ActorIdentity:
        """Says where it runs, and by which versions."""
        return read_identity()

    def answer(self, call: Call) -> Answer:
        """Answers a call; failures are data."""
        return self._slots.answer(call)
