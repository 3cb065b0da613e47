"""A small inference server with the part of vLLM's API that rollouts use, which can be made faulty.

It computes Llama and Qwen3 by a forward pass of its own, in float32 on the host. Tests start it in a thread, on a
loopback port; as a program, ``engine_server.py -m MODULE --model FOLDER --uds SOCKET``, it stands in for vLLM's server.
Imports nothing of this project, as vLLM would not.
"""

from __future__ import annotations

import argparse
import json
import os
import socketserver
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

#: float32, but for the probabilities that are drawn from.
Array = NDArray[np.floating[Any]]

#: Faults by name. ``dead`` begins with the sixth turn; ``lost`` computes each turn and breaks off once instead of
#: answering.
FAULTS = (
    *("stale", "stale_head", "raw", "processed", "shift", "likeliest", "other_precision", "other_model"),
    *("short", "abort", "abort_at_once", "duplicate", "exchanged", "two_choices", "too_long", "own_stop", "nan"),
    *("dead", "flaky", "lost", "no_ids", "no_logprobs", "no_update", "text", "website"),
)


def _log_softmax(logits: Array) -> Array:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def _as_bfloat16(values: Array) -> Array:
    """Rounds float32 to the nearest bfloat16, ties to even."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).view(np.float32)


@dataclass
class Model:
    """The tensors of a folder by their names."""

    config: dict[str, Any]
    tensors: dict[str, Array]

    @classmethod
    def load(cls, folder: Path) -> Model:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return cls(
            config, {name: value.astype(np.float32) for name, value in load_file(folder / "model.safetensors").items()}
        )

    @property
    def head(self) -> Array:
        name = "model.embed_tokens.weight" if self.config["tie_word_embeddings"] else "lm_head.weight"
        return self.tensors[name]

    def logits(self, tokens: Sequence[int], head: Array) -> Array:
        """``[V]`` after the last token."""
        weights, config = self.tensors, self.config
        eps, num = config["rms_norm_eps"], config["num_attention_heads"]
        x = weights["model.embed_tokens.weight"][list(tokens)]

        def norm(values: Array, name: str) -> Array:
            return values / np.sqrt(np.mean(values**2, -1, keepdims=True) + eps) * weights[name]

        for layer in range(config["num_hidden_layers"]):
            own = f"model.layers.{layer}."
            inner = norm(x, f"{own}input_layernorm.weight")
            x = x + self._attention(inner, f"{own}self_attn.", num, norm)
            inner = norm(x, f"{own}post_attention_layernorm.weight")
            gate = inner @ weights[f"{own}mlp.gate_proj.weight"].T
            gate = gate / (1 + np.exp(-gate))
            x = x + (gate * (inner @ weights[f"{own}mlp.up_proj.weight"].T)) @ weights[f"{own}mlp.down_proj.weight"].T
        return norm(x[-1], "model.norm.weight") @ head.T

    def _attention(self, inner: Array, own: str, num: int, norm: Any) -> Array:
        weights, config, length = self.tensors, self.config, len(inner)
        size = config["head_dim"]

        def heads(name: str) -> Array:
            values = (inner @ weights[f"{own}{name}_proj.weight"].T).reshape(length, -1, size)
            if f"{own}{name}_norm.weight" in weights:
                values = norm(values, f"{own}{name}_norm.weight")
            return values if name == "v" else self._rotate(values)

        query, key, value = heads("q"), heads("k"), heads("v")
        key, value = (one.repeat(num // one.shape[1], axis=1) for one in (key, value))
        scores = np.einsum("qhd,khd->hqk", query, key) / size**0.5
        scores = np.where(np.triu(np.ones((length, length), bool), 1), -np.inf, scores)
        probabilities = np.exp(_log_softmax(scores))
        return np.einsum("hqk,khd->qhd", probabilities, value).reshape(length, -1) @ weights[f"{own}o_proj.weight"].T

    def _rotate(self, values: Array) -> Array:
        length, _, size = values.shape
        theta = self.config["rope_parameters"]["rope_theta"]
        steps = np.arange(0, size, 2, dtype=np.float32) / size
        angles = np.arange(length, dtype=np.float32)[:, None] / theta**steps
        angles = np.concatenate((angles, angles), axis=-1)[:, None]
        half = size // 2
        turned = np.concatenate((-values[..., half:], values[..., :half]), axis=-1)
        return values * np.cos(angles) + turned * np.sin(angles)


@dataclass
class Engine:
    """The state of a server. ``requests``: the bodies of all turns that were asked for, repeated ones too."""

    model: Model
    faults: frozenset[str] = frozenset()
    logprobs_mode: str = "processed"
    key: str | None = None
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    reloads: list[str] = field(default_factory=list)
    connections: set[Any] = field(default_factory=set)
    _head: Array | None = None
    _last: dict[str, Any] | None = None
    _failed: set[str] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def reload(self, folder: str) -> None:
        self.reloads.append(folder)
        if self._head is None:
            self._head = self.model.head
        # What a server was started with is not its first update.
        if "stale" not in self.faults or len(self.reloads) == 1:
            self.model = Model.load(Path(folder))
        if "stale_head" not in self.faults or len(self.reloads) == 1:
            self._head = self.model.head
        if "other_model" in self.faults:
            self.model.tensors = {name: 1.3 * tensor for name, tensor in self.model.tensors.items()}

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        with self.lock:
            self.requests.append(body)
            number = len(self.requests)
        history, tokens, logprobs = list(body["prompt"]), [], []
        generator = np.random.default_rng(body["seed"])
        finish = "length"
        for _ in range(body["max_tokens"]):
            token, logprob = self._next(history, body, generator)
            history.append(token)
            tokens.append(token)
            logprobs.append(logprob)
            if token in body["stop_token_ids"]:
                finish = "stop"
                break
        choice = self._spoil(
            {
                "index": 0,
                "text": "",
                "finish_reason": finish,
                "token_ids": tokens,
                "prompt_token_ids": list(body["prompt"]),
                "logprobs": {"token_logprobs": logprobs},
            },
            body,
        )
        answer = {"id": f"cmpl-{number}", "choices": [choice] * (2 if "two_choices" in self.faults else 1)}
        with self.lock:
            before, self._last = self._last, answer
        return before if "duplicate" in self.faults and before is not None else answer

    def _next(self, history: Sequence[int], body: dict[str, Any], generator: np.random.Generator) -> tuple[int, float]:
        head = self.model.head if self._head is None else self._head
        logits = self.model.logits(history, head)
        if "other_precision" in self.faults:
            logits = _as_bfloat16(logits)
        sampled = logits / body["temperature"]
        if body["top_k"] > 0:
            sampled = np.where(sampled < np.sort(sampled)[-body["top_k"]], -np.inf, sampled)
        cumulative = np.exp(_log_softmax(sampled.astype(np.float64))).cumsum(-1)
        token = min(int(np.searchsorted(cumulative, generator.random() * cumulative[-1])), len(cumulative) - 1)
        is_raw = ("raw" in self.faults or self.logprobs_mode == "raw") and "processed" not in self.faults
        every = _log_softmax(logits if is_raw else sampled)
        return token, float(every.max() if "likeliest" in self.faults else every[token])

    def _spoil(self, choice: dict[str, Any], body: dict[str, Any]) -> dict[str, Any]:
        faults, tokens, values = self.faults, choice["token_ids"], choice["logprobs"]["token_logprobs"]
        is_probe = not body["stop_token_ids"]
        if "shift" in faults:
            choice["logprobs"]["token_logprobs"] = [*values[1:], values[0]]
        if not is_probe and "short" in faults:
            choice |= {"token_ids": tokens[:1], "logprobs": {"token_logprobs": values[:1]}, "finish_reason": "length"}
        if not is_probe and faults & {"abort", "abort_at_once"}:
            kept = 0 if "abort_at_once" in faults else 1
            values = values[:kept]
            choice |= {"token_ids": tokens[:kept], "logprobs": {"token_logprobs": values}, "finish_reason": "abort"}
        if "exchanged" in faults:
            choice["prompt_token_ids"] = [*body["prompt"], 1]
        if "too_long" in faults:
            choice |= {"token_ids": [*tokens, 1], "logprobs": {"token_logprobs": [*values, -1.0]}}
        if "own_stop" in faults:
            choice["finish_reason"] = "stop"
        if "nan" in faults:
            choice["logprobs"]["token_logprobs"] = [float("nan"), *values[1:]]
        if "no_ids" in faults:
            del choice["token_ids"]
        if "no_logprobs" in faults:
            choice["logprobs"] = None
        return choice


class Handler(BaseHTTPRequestHandler):
    """One request after another of a connection."""

    protocol_version = "HTTP/1.1"
    engine: Engine

    def address_string(self) -> str:
        return "a socket"  # of a file, which has no address

    def log_message(self, format: str, *args: object) -> None:
        print(format % args, flush=True) if os.environ.get("VLLM_API_KEY") else None

    def do_GET(self) -> None:
        if self.path == "/health":
            self._answer(200, b"")
        elif self._may_pass():
            is_known = self.path == "/v1/models" and "website" not in self.engine.faults
            self._say(200 if is_known else 404, {"data": [{"id": "policy"}]} if is_known else {})

    def do_POST(self) -> None:
        text = self.rfile.read(int(self.headers["Content-Length"])).decode()
        body, engine = json.loads(text), self.engine
        engine.connections.add(self.client_address)
        if self.path in ("/collective_rpc", "/reset_prefix_cache"):
            if "no_update" in engine.faults:
                self._say(404, {"detail": "Not Found"})
                return
            if self.path == "/collective_rpc":
                assert body["method"] == "reload_weights", body
                engine.reload(body["kwargs"]["weights_path"])
                self._say(200, {"results": [None]})
            else:
                self._answer(200, b"")
            return
        if not self._may_pass():
            return
        engine.headers.append(dict(self.headers.items()))
        if "dead" in engine.faults and len(engine.requests) >= 6:
            self.close_connection = True
            if os.environ.get("VLLM_API_KEY"):  # a program of its own
                print("ERROR RuntimeError: no attention for heads of 16")
                print("shutting down\n" * 30, flush=True)
                os._exit(3)
            return
        if "flaky" in engine.faults and text not in engine._failed:
            engine._failed.add(text)
            self._say(503, {"error": "busy"})
            return
        if "lost" in engine.faults and text not in engine._failed:
            engine._failed.add(text)
            engine.complete(body)
            self.close_connection = True
            return
        if "text" in engine.faults:
            self._answer(200, b"<html>a proxy</html>")
            return
        self._say(200, engine.complete(body))

    def _may_pass(self) -> bool:
        key = self.engine.key
        if key is None or self.headers.get("Authorization") == f"Bearer {key}":
            return True
        self._say(401, {"error": "Unauthorized"})
        return False

    def _say(self, status: int, content: object) -> None:
        self._answer(status, json.dumps(content).encode())

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class _PortServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


class _SocketServer(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    request_queue_size = 128


@contextmanager
def serve(engine: Engine) -> Iterator[str]:
    """Serves in a thread in the block; yields the address."""
    handler = type("OwnHandler", (Handler,), {"engine": engine})
    server = _PortServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def main() -> None:
    """Stands in for vLLM's server; the variable ENGINE_FAULTS has its faults, with commas between them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("-m", dest="module")
    for name in ("model", "uds", "dtype", "logprobs-mode", "served-model-name", "max-model-len", "seed"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--generation-config")
    parser.add_argument("--skip-tokenizer-init", action="store_true")
    parser.add_argument("--no-enable-chunked-prefill", action="store_true")
    options = parser.parse_args()
    faults = frozenset(os.environ.get("ENGINE_FAULTS", "").split(",")) - {""}
    print(f"{options.module} loads {options.model}", flush=True)
    mode, named = os.stat(Path(options.uds).parent).st_mode & 0o777, os.environ
    print(
        f"socket mode {mode:o}, key {len(named.get('VLLM_API_KEY', '')) > 30}, dev mode "
        f"{named.get('VLLM_SERVER_DEV_MODE')}, ranks {'RANK' in named}, python path {'PYTHONPATH' in named}, "
        f"whole prompts {options.no_enable_chunked_prefill}",
        flush=True,
    )
    if "dead_at_start" in faults:
        sys.exit("no memory for the weights")
    if "slow" in faults:
        time.sleep(600)
    logprobs_mode = str(options.logprobs_mode).removesuffix("_logprobs")
    engine = Engine(
        Model.load(Path(options.model)), faults=faults, logprobs_mode=logprobs_mode, key=os.environ.get("VLLM_API_KEY")
    )
    engine._head, engine.reloads = engine.model.head, [options.model]
    with _SocketServer(options.uds, type("OwnHandler", (Handler,), {"engine": engine})) as server:
        server.serve_forever(poll_interval=0.02)


if __name__ == "__main__":
    main()
