"""Samples in a server: one that this run starts (vLLM), or a running one with the OpenAI API.

The leader of each replica asks for its own episodes' turns; the first rank brings weights to the server, and all ranks
together verify by its answers that it took them. Each turn has a seed from its episode's identity and its number, so
neither the layout, nor the order of requests, nor a repeated one changes what is sampled.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Literal

from mock_scheduler.determinism.agreement import RankGroup
from mock_scheduler.errors import SchedulerError
from mock_scheduler.ledger import Ledger
from mock_scheduler.scheduler import Mode
from pipelines.config.engine import GeneratingArgs
from pipelines.environments.base import Tokenizer
from pipelines.environments.seeds import derive_seed
from pipelines.megatron.hf_source import HuggingFaceSource
from pipelines.megatron.trainer import PolicyTrainer
from pipelines.megatron.transformer_config import DTYPES
from pipelines.rollout.cached_policy import ForwardPass, ReplicaChannel
from pipelines.rollout.changed_weights import other_head
from pipelines.rollout.engine import PolicyEngine, TokenScores
from pipelines.rollout.engines.access import read_key
from pipelines.rollout.engines.client import EngineAddress, EngineClient, TurnAnswer, TurnOrder
from pipelines.rollout.engines.first_rank import on_first_rank
from pipelines.rollout.engines.server import MODEL, VllmServer
from pipelines.rollout.engines.verification import (
    PROBE_TEMPERATURE,
    PROBE_TOKENS,
    Agreement,
    EngineVerifier,
    ProbeAnswers,
    make_probes,
)
from pipelines.rollout.engines.weights import EngineWeights
from pipelines.rollout.turns import OpenTurn, SampledTurn, TurnRules, TurnSampler

_OF_OTHERS = (
    "; look whether it runs and what its log says, and whether actor_infer.server.base_url is its address from here"
)
_ALIVE = ForwardPass(kept=None, starts=[0], tokens=[[0]], uniforms=[0.0])


class ServedEngine:
    """Samples in a server. Every rank holds one, and calls it alike but for the methods of leaders."""

    def __init__(
        self,
        trainer: PolicyTrainer,
        tokenizer: Tokenizer,
        ledger: Ledger,
        *,
        ranks: RankGroup,
        source: HuggingFaceSource | None,
    ) -> None:
        config = trainer.config
        self._config = config
        self._engine = config.actor_infer
        self._ranks = ranks
        self._is_leader = trainer.runtime.is_leader
        self._channel = ReplicaChannel(trainer.runtime)
        self._own = PolicyEngine(trainer, Ledger())  # scores what the server says of its probes
        self._trainer = trainer
        self._vocab_size = len(trainer.allowed)
        self._stop_ids = [token for token in range(tokenizer.vocab_size) if tokenizer.ends_turn(token)]
        self._weights = EngineWeights(trainer, ranks, source=source, dtype=DTYPES[config.engine_dtype])
        self._probes = make_probes(
            seed=config.seed, vocab_size=self._vocab_size, sequence_length=config.sequence_length
        )
        self._server = self._make_server() if ranks.global_rank == 0 else None
        self._verifier: EngineVerifier | None = None
        self._client: EngineClient | None = None
        self._threads = ThreadPoolExecutor(self._engine.rows_per_forward, thread_name_prefix="engine")
        self._args = self._engine.generating_args
        self._version: int | None = None
        self._agreement: Agreement | None = None
        self._closed_counts = {"rollout/requests": 0, "rollout/retries": 0}
        if ranks.global_rank == 0:
            ledger.count("built", "engine")

    def _make_server(self) -> VllmServer | None:
        if self._engine.engine == "openai":
            return None
        return VllmServer(
            self._engine,
            folder=self._weights.root,
            dtype=self._config.engine_dtype,
            max_length=self._config.sequence_length,
            seed=self._config.seed,
        )

    @property
    def logprobs_mode(self) -> Literal["processed", "raw"]:
        """Returns the configured mode; every update verifies it."""
        return self._engine.logprobs_mode

    @property
    def counts(self) -> Mapping[str, int]:
        """Turns that this rank asked for, and requests that it had to repeat."""
        client = self._client
        own = {} if client is None else {"rollout/requests": client.num_requests, "rollout/retries": client.num_retries}
        return {name: count + own.get(name, 0) for name, count in self._closed_counts.items()}

    @property
    def measured(self) -> Mapping[str, float]:
        """Returns the distance of the probed tokens' log-probabilities from training's at the last update."""
        found = self._agreement
        return {} if found is None else {"mismatch/probe_mean": found.mean, "mismatch/probe_max": found.largest}

    # --- Weights ------------------------------------------------------------------------------------------------------

    def update_weights(self, policy_version: int) -> None:
        """Gives the server the trainer's present weights, and verifies that it samples by them. Collective."""
        if policy_version == self._version:
            return
        with self._own.evaluating():
            folder = str(self._weights.write(policy_version))
            self._connect(on_first_rank(self._ranks, lambda: self._bring(folder)))
            self._agreement = self._get_verifier().verify(policy_version, heads=self._weights.earlier)
        self._version = policy_version

    def check_version(self, policy_version: int) -> None:
        """Raises ``SchedulerError`` where the server has the weights of another version."""
        if policy_version != self._version:
            raise SchedulerError(
                f"rollouts of policy version {policy_version} are asked for, and the engine has version "
                f"{'none' if self._version is None else self._version}: call update_weights first"
            )

    def _bring(self, folder: str) -> dict[str, str | None] | None:
        """Brings the weights to the server, on the first rank; returns the way to it where it is a new one."""
        server = self._server
        if self._client is not None and not (server is not None and self._engine.weights_sync == "restart"):
            self._client.reload_weights(folder)
            return None
        if server is not None:
            address = server.start(Path(folder))
            return {"url": address.url, "socket": address.socket, "api_key": address.api_key}
        return {"url": str(self._engine.server.base_url), "socket": None, "api_key": None}

    def _connect(self, found: dict[str, str | None] | None) -> None:
        """Makes this rank's client of a new server; a running one is given the weights once it is known."""
        if found is None:
            return
        if self._client is not None:
            self._closed_counts = dict(self.counts)
            self._client.close()
        key = found["api_key"] or read_key(self._engine.server.api_key_variable, os.environ)
        address = EngineAddress(url=str(found["url"]), socket=found["socket"], api_key=key)
        self._client = client = EngineClient(
            address,
            timeout_s=self._engine.server.timeout_s,
            retries=self._engine.server.retries,
            connections=self._engine.rows_per_forward,
            explain=(lambda: _OF_OTHERS) if self._server is None else self._server.explain,
        )
        is_own = self._engine.engine == "vllm"
        folder = str(self._weights.folder(self._weights.newest))

        def greet() -> str:
            client.choose_model(MODEL if is_own else self._engine.server.model)
            if not is_own:
                client.reload_weights(folder)
            return client.model

        client.model = on_first_rank(self._ranks, greet)

    # --- Verification -------------------------------------------------------------------------------------------------

    def _get_verifier(self) -> EngineVerifier:
        if self._verifier is None:
            self._verifier = EngineVerifier(
                self._ask_probes,
                self._score,
                self._ranks,
                where=str(self._engine.server.base_url or "this run's vLLM"),
                is_wide=self._config.engine_dtype == "float32",
                logprobs_mode=self._engine.logprobs_mode,
                can_restart=self._engine.engine == "vllm",
                has_tied_head=self._weights.has_tied_head,
            )
        return self._verifier

    def _ask_probes(self) -> ProbeAnswers:
        """One after another: an engine of bfloat16 gives the same bits to the same request only where it is alone."""
        args = GeneratingArgs(temperature=PROBE_TEMPERATURE)
        answers = [
            self._sample(
                TurnOrder(prompt=probe.prompt, seed=probe.seed, max_tokens=PROBE_TOKENS, stop_ids=(), args=args)
            )
            for probe in self._probes
        ]
        return ProbeAnswers(
            tokens=[answer.tokens for answer in answers], logprobs=[answer.logprobs for answer in answers]
        )

    def _score(self, answers: ProbeAnswers, *, temperature: float, head_of: int | None = None) -> TokenScores:
        prompts = [probe.prompt for probe in self._probes]
        with ExitStack() as changed:
            if head_of is not None:
                changed.enter_context(other_head(self._trainer.policy.chunks, self._weights.read_head(head_of)))
            return self._own.score(prompts, answers.tokens, temperature=temperature)

    # --- Sampling -----------------------------------------------------------------------------------------------------

    @contextmanager
    def generating(self, args: GeneratingArgs) -> Iterator[None]:
        """Samples by ``args`` in the block."""
        self._args = args
        yield

    def open_block(self, mode: Mode, rules: TurnRules) -> TurnSampler:
        """Begins another block of episodes. Leader only; it does not communicate with other replicas."""
        running: dict[int, Future[TurnAnswer]] = {}

        def sample(turns: Sequence[OpenTurn]) -> list[SampledTurn]:
            self._channel.send(_ALIVE)  # followers wait no longer for a word than a collective may take
            for turn in turns:
                if turn.row not in running:
                    running[turn.row] = self._threads.submit(self._sample, self._order(turn, mode))
            wait(running.values(), return_when=FIRST_COMPLETED)
            done = [turn for turn in turns if running[turn.row].done()]
            try:
                answers = [running.pop(turn.row).result() for turn in done]
            except BaseException:
                for future in running.values():
                    future.cancel()
                raise
            return [
                SampledTurn(row=turn.row, tokens=answer.tokens, logprobs=answer.logprobs, finish=_finish(answer, rules))
                for turn, answer in zip(done, answers, strict=True)
            ]

        return sample

    def _order(self, turn: OpenTurn, mode: Mode) -> TurnOrder:
        identity = turn.identity
        seed = derive_seed(
            self._config.seed, "turn", mode, identity.scheduler_id, identity.group_id, identity.episode_id,
            identity.env_id, turn.number,
        )  # fmt: skip
        return TurnOrder(
            prompt=list(turn.history), seed=seed, max_tokens=turn.room, stop_ids=self._stop_ids, args=self._args
        )

    def _sample(self, order: TurnOrder) -> TurnAnswer:
        if self._client is None:
            raise SchedulerError("the engine is asked before it has weights: call update_weights first")
        return self._client.sample(order)

    def follow(self) -> None:
        """Waits for the leader's last word. Every other rank of the replica."""
        while self._channel.receive() is not None:
            pass

    def finish(self) -> None:
        """Releases the followers. Leader only."""
        self._channel.send(None)

    def close(self) -> None:
        """Ends the server that this run has started."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._client is not None:
            self._client.close()
        if self._server is not None:
            self._server.stop()


def _finish(answer: TurnAnswer, rules: TurnRules) -> Literal["stop", "length", "abort"]:
    """A last token that ends a turn has ended it, whatever else there was no room for."""
    is_end = bool(answer.tokens) and rules.ends_turn(answer.tokens[-1])
    return "stop" if is_end and answer.finish == "length" else answer.finish
