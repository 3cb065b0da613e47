"""Starts vLLM's server for a run, and ends it with the run.

Contract: no shell. The server listens on a socket in a folder that only this user can enter, so it takes no port, and
nobody else reaches the calls that change its weights. ``keeper`` ends it with all its processes, however the run ends.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from mock_scheduler.errors import EngineError
from mock_scheduler.support.processes import describe_signal
from pipelines.config.engine import ActorInferConfig
from pipelines.rollout.engines import keeper
from pipelines.rollout.engines.client import EngineAddress, EngineClient
from pipelines.rollout.engines.installed import engine_environ, find_vllm

logger = logging.getLogger(__name__)

MODEL = "policy"
LOG_FILE = "server.log"
_MODULE = "vllm.entrypoints.openai.api_server"
_POLL_S, _TOLD_S = 0.25, 15.0
_END_S = 20.0
_ENDING_S = 3.0
_TAIL_LINES, _MOST_ERRORS, _LOG_BYTES = 15, 6, 2**20
_ERROR = re.compile(r"\b\w*(?:Error|Exception): .{1,300}")
_WARNING = re.compile(r"\b(?:INFO|WARNING)\b")  # vLLM's levels, before the message
_SEARCHED_BYTES = 2**26

# vLLM 0.32.0 on CPU dies of "CPU Generator does not use offset" where it reads a part of a prompt that has a seed.
_ON_CPU = ("--no-enable-chunked-prefill",)
_OWN = {
    "VLLM_SERVER_DEV_MODE": "1",  # the calls that update weights
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}


class VllmServer:
    """Runs one server at a time. ``log_file``: of all of them, one after another."""

    def __init__(self, engine: ActorInferConfig, *, folder: Path, dtype: str, max_length: int, seed: int) -> None:
        """``folder``: for its log. ``max_length``: tokens of the longest sequence."""
        self._engine = engine
        self._dtype = dtype
        self._max_length = max_length
        self._seed = seed
        self._keeper: subprocess.Popen[bytes] | None = None
        self.log_file = folder / LOG_FILE
        self._log_start = 0

    def start(self, weights: Path) -> EngineAddress:
        """Starts a server with the weights of a folder, and waits until it answers.

        Raises:
            EngineError: it ended, or did not answer within ``startup_timeout_s``, with the end of its log.
        """
        self.stop()
        folder = tempfile.mkdtemp(prefix="engine-")  # only this user can enter it
        address = EngineAddress(url="http://engine", socket=f"{folder}/server", api_key=secrets.token_urlsafe(32))
        python = self._engine.engine_python or sys.executable
        command = [
            *(python, "-m", _MODULE, "--model", str(weights), "--served-model-name", MODEL),
            *("--uds", str(address.socket), "--dtype", self._dtype, "--seed", str(self._seed)),
            *("--max-model-len", str(self._max_length), "--generation-config", "vllm"),
            *("--logprobs-mode", f"{self._engine.logprobs_mode}_logprobs"),
            *(() if _has_tokenizer(weights) else ("--skip-tokenizer-init",)),
            *(_ON_CPU if find_vllm(self._engine.engine_python).is_for_cpu else ()),
            *self._engine.server.arguments,
        ]
        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        with self.log_file.open("ab") as log:
            self._log_start = log.tell()
            self._keeper = subprocess.Popen(
                [sys.executable, "-I", str(keeper.__file__), str(os.getpid()), folder, *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environ(os.environ, api_key=str(address.api_key)),
                start_new_session=True,  # a signal to the run's group leaves it to the run to end it
            )
        self._wait(address, folder)
        return address

    def _environ(self, environ: Mapping[str, str], *, api_key: str) -> dict[str, str]:
        return {**engine_environ(environ), **_OWN, **self._engine.server.envs, "VLLM_API_KEY": api_key}

    def _wait(self, address: EngineAddress, folder: str) -> None:
        limit_s = self._engine.server.startup_timeout_s
        began_s = told_s = time.monotonic()
        client = EngineClient(address, timeout_s=5.0, retries=0, connections=1)
        try:
            while not client.is_ready():
                now_s = time.monotonic()
                if self._keeper is None or self._keeper.poll() is not None or now_s - began_s > limit_s:
                    why = "ended" if now_s - began_s <= limit_s else f"did not answer within {limit_s:g} s"
                    problem = f"vLLM {why} while it started{self.explain()}"
                    self.stop()
                    shutil.rmtree(folder, ignore_errors=True)
                    raise EngineError(problem)
                if now_s - told_s >= _TOLD_S:
                    told_s = now_s
                    last = "".join(self._log_lines()[-1:]).strip() or "its log is empty"
                    logger.info("[engine] vLLM is starting, %.0f s so far: %s", now_s - began_s, last)
                time.sleep(_POLL_S)
        finally:
            client.close()
        logger.info("[engine] vLLM answers after %.0f s; its log is %s", time.monotonic() - began_s, self.log_file)

    def explain(self) -> str:
        """Says whether the server runs, and gives the errors in its log and the log's end."""
        code = None
        if self._keeper is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self._keeper.wait(_ENDING_S)  # one that just broke off may still be ending
        if code is None:
            state = "its process runs"
        elif code > 128:
            state = f"its process was ended by {describe_signal(128 - code)}"
        else:
            state = f"its process has ended with code {code}"
        lines = self._log_lines()
        named = "".join(f"\n  {error}" for error in self._first_errors())
        tail = "".join(f"\n  {line}" for line in lines[-_TAIL_LINES:])
        told = f" The errors in {self.log_file}:{named}\nIts end:" if named else f" The end of {self.log_file}:"
        return f"; {state}.{told}{tail or ' empty'}"

    def _first_errors(self) -> list[str]:
        """Finds the first errors that the present server told, each once.

        vLLM's own messages about its end lie behind what ended it, and with many requests there are megabytes of them.
        """
        errors = dict[str, None]()
        with contextlib.suppress(OSError), self.log_file.open("rb") as log:
            log.seek(self._log_start)
            while len(errors) < _MOST_ERRORS and log.tell() - self._log_start < _SEARCHED_BYTES:
                raw = log.readline(_LOG_BYTES)
                if not raw:
                    break
                line = raw.decode("utf-8", errors="replace")
                found = _ERROR.search(line)
                if found and not _WARNING.search(line):
                    errors[found[0].rstrip()] = None
        return list(errors)

    def _log_lines(self) -> list[str]:
        """Reads the lines of the present server, the last of them where they are many."""
        try:
            with self.log_file.open("rb") as log:
                log.seek(max(self._log_start, self.log_file.stat().st_size - _LOG_BYTES))
                text = log.read().decode("utf-8", errors="replace")
        except OSError:
            return []
        return [line for line in text.splitlines() if line.strip()]

    def stop(self) -> None:
        """Ends the server and all its processes, where there is one."""
        found, self._keeper = self._keeper, None
        if found is None:
            return
        found.send_signal(signal.SIGTERM)
        try:
            found.wait(_END_S)
        except subprocess.TimeoutExpired:
            found.kill()
            found.wait()


def _has_tokenizer(weights: Path) -> bool:
    return any((weights / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json"))
