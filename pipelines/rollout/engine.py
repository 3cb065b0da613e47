"""The policy under training is the rollout engine, under any layout.

Within a replica of the model (tp × cp × pp) the leader plays episodes and calls :meth:`PolicyEngine.sample`; all other
ranks stand in :meth:`PolicyEngine.follow` until the leader calls :meth:`PolicyEngine.finish`. Each call is one forward
pass over the rows' unread tokens; the last stage samples and tells the leader.

With experts spread over replicas, tokens travel between replicas in every pass, so all ranks of the run make the same
number of passes: before each, one all-reduce says whether any replica still plays, and idle ones read a dummy row.

The engine's weights are the trainer's own, or rounded ones while it generates (``actor_infer.weights_precision``). Only
the values of parameters are rounded: they stay in their own type and storage, and the computation in its own precision.
Buffers are left alone, an expert bias among them, which engines hold in float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from mock_scheduler.batch import SampleIdentity
from mock_scheduler.ledger import Ledger
from mock_scheduler.scheduler import Mode
from pipelines.config.engine import GeneratingArgs
from pipelines.environments.grid_tokens import PAD_ID
from pipelines.environments.seeds import derive_uniform
from pipelines.megatron.logprobs import sample_tokens
from pipelines.megatron.trainer import PolicyTrainer
from pipelines.megatron.transformer_config import DTYPES
from pipelines.rollout.cached_policy import CachedPolicy, ForwardPass, ReplicaChannel
from pipelines.rollout.changed_weights import rounded_weights
from pipelines.rollout.recorded_routing import RoutingRecorder
from pipelines.rollout.turns import TokenwiseTurns, TurnRules, TurnSampler, UniformFunction

_DUMMY = ForwardPass(kept=None, starts=[0], tokens=[[PAD_ID]], uniforms=[0.0])


def sampling_uniform(seed: int, mode: Mode) -> UniformFunction:
    """Makes the numbers that decide tokens: by mode, episode and turn, and by the index of a turn's further tokens."""

    def uniform(identity: SampleIdentity, turn: int, token_index: int) -> float:
        further = (token_index,) if token_index > 0 else ()
        return derive_uniform(
            seed, "sampling", mode, identity.scheduler_id, identity.group_id, identity.episode_id, identity.env_id,
            turn, *further,
        )  # fmt: skip

    return uniform


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenScores:
    """Log-probabilities of the tokens of several rows: of each token itself, and of the likeliest one at its place."""

    chosen: list[list[float]]
    likeliest: list[list[float]]


def _by_row(by_place: Sequence[Sequence[float]]) -> list[list[float]]:
    return [list(values) for values in zip(*by_place, strict=True)]


class PolicyEngine:
    """Samples the next token of many rows at once with the trainer's own model.

    ``num_passes``: forward passes of this rank's replica so far, on dummy rows as well.
    """

    logprobs_mode: Literal["processed", "raw"] = "processed"

    def __init__(self, trainer: PolicyTrainer, ledger: Ledger) -> None:
        self._runtime = trainer.runtime
        self._seed = trainer.config.seed
        self._trained = trainer.policy
        self._chunks = list(trainer.policy.chunks)
        self._allowed = trainer.allowed
        self._uses_cache = trainer.config.actor_infer.use_kv_cache
        self._weights_precision = trainer.config.actor_infer.weights_precision
        self._policy = CachedPolicy(trainer.policy, trainer.config)
        self._channel = ReplicaChannel(trainer.runtime)
        self._routing = RoutingRecorder(trainer) if trainer.config.actor_infer.record_routed_experts else None
        self._args = trainer.config.actor_infer.generating_args
        self._num_read: dict[int, int] = {}
        self.num_passes = 0
        if self._runtime.is_leader:
            ledger.count("built", "engine")  # one engine is one replica of the model

    @property
    def counts(self) -> Mapping[str, int]:
        """Counts forward passes of this rank's replica."""
        return {"rollout/forward_passes": self.num_passes}

    @property
    def measured(self) -> Mapping[str, float]:
        """Nothing: no weights are brought anywhere."""
        return {}

    def update_weights(self, policy_version: int) -> None:
        """Loads nothing: the engine computes with the trainer's own weights."""

    def check_version(self, policy_version: int) -> None:
        """Accepts every version: the weights are the trainer's own."""

    def close(self) -> None:
        """Holds nothing open."""

    @contextmanager
    def generating(self, args: GeneratingArgs) -> Iterator[None]:
        """Samples by ``args`` in the block, with the model in evaluation mode and the engine's weights.

        Every rank enters it.
        """
        self._args = args
        with self.evaluating():
            yield

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Has the model in evaluation mode, and with the engine's weights, in the block. Every rank enters it."""
        for chunk in self._chunks:
            chunk.eval()
        try:
            with torch.no_grad(), self._sampled_weights():
                yield
        finally:
            self._policy.forget()
            for chunk in self._chunks:
                chunk.train()

    def _sampled_weights(self) -> AbstractContextManager[None]:
        if self._weights_precision is None:
            return nullcontext()
        # Gathered within the block, they would replace rounded values, and stale ones would be put back behind it.
        self._trained.gather_parameters()
        return rounded_weights(self._chunks, DTYPES[self._weights_precision])

    def open_block(self, mode: Mode, rules: TurnRules) -> TurnSampler:
        """Begins another block of episodes. Leader only; it does not communicate."""
        self.begin_block()
        routing = None if self._routing is None else self._routing.of_row
        return TokenwiseTurns(self.sample, sampling_uniform(self._seed, mode), rules, routing=routing)

    def begin_block(self) -> None:
        """Begins another block of rows. Leader only; it does not communicate."""
        self._num_read = {}
        if self._routing is not None:
            self._routing.begin_block()

    def sample(
        self, rows: Sequence[int], histories: Sequence[Sequence[int]], uniforms: Sequence[float]
    ) -> tuple[list[int], list[float]]:
        """Draws the next token of each row, with its log-probability. Leader only.

        rows: numbers within the block, increasing; a row once left out cannot come back before the next block.
        histories: all tokens of each row so far, not empty; they begin with the tokens of the call before.
        uniforms: one number in [0, 1) per row, which decides the token.
        """
        item = self._next_pass(rows, histories, uniforms)
        self._channel.send(item)
        self._is_anyone_playing(True)
        result = self._compute(item)
        assert result is not None  # this is the leader
        if self._routing is not None:
            self._routing.keep(rows, item)
        tokens, logprobs = result
        return [int(token) for token in tokens.tolist()], logprobs.tolist()

    def follow(self) -> None:
        """Takes part in the leader's passes until it finishes. Every other rank of the replica."""
        while True:
            item = self._channel.receive()
            if not self._is_anyone_playing(item is not None):
                return
            self._compute(item or _DUMMY)

    def finish(self) -> None:
        """Releases the followers, once no replica needs this one. Leader only."""
        while True:
            self._channel.send(None)
            if not self._is_anyone_playing(False):
                return
            self._compute(_DUMMY)

    def score(
        self, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], *, temperature: float
    ) -> TokenScores:
        """Computes the log-probability of each token of answers of one length, as it would be sampled.

        Every rank calls it with the same rows, within ``evaluating``. The leader gets them; the others get empty ones.
        """
        rows = [list(prompt) for prompt in prompts]
        chosen, likeliest = [list[list[float]]() for _ in range(2)]
        for tokens in zip(*answers, strict=True):
            is_first = not chosen or not self._uses_cache
            starts = [0 if is_first else len(row) - 1 for row in rows]
            item = ForwardPass(
                kept=None if is_first else list(range(len(rows))),
                starts=starts,
                tokens=[row[start:] for row, start in zip(rows, starts, strict=True)],
                uniforms=[0.0] * len(rows),
            )
            scored = self._score_next(item, tokens, temperature)
            for values, own in zip((chosen, likeliest), ([], []) if scored is None else scored.tolist(), strict=True):
                values.append(own)
            for row, token in zip(rows, tokens, strict=True):
                row.append(token)
        self._policy.forget()
        return TokenScores(chosen=_by_row(chosen), likeliest=_by_row(likeliest))

    def _score_next(self, item: ForwardPass, tokens: Sequence[int], temperature: float) -> torch.Tensor | None:
        logits, result = self._policy.read(item), None
        if logits is not None and self._runtime.cp_rank == 0:
            logits = self._whole_vocabulary(logits)
            if self._runtime.tp_rank == 0:
                every = torch.log_softmax(logits.cpu().double() / temperature, dim=-1)
                chosen = every.gather(1, torch.tensor(tokens).unsqueeze(1)).flatten()
                result = torch.stack((chosen, every.amax(dim=1)))
        return self._bring_to_leader(result, num_rows=len(tokens))

    def _next_pass(
        self, rows: Sequence[int], histories: Sequence[Sequence[int]], uniforms: Sequence[float]
    ) -> ForwardPass:
        """Makes a pass of the rows' unread tokens: all of them where nothing is kept."""
        before = {row: position for position, row in enumerate(self._num_read)} if self._uses_cache else {}
        kept = [before[row] for row in rows] if before else None
        starts = [self._num_read[row] if before else 0 for row in rows]
        tokens = [history[start:] for history, start in zip(histories, starts, strict=True)]
        self._num_read = {row: len(history) for row, history in zip(rows, histories, strict=True)}
        return ForwardPass(kept=kept, starts=starts, tokens=tokens, uniforms=uniforms)

    def _is_anyone_playing(self, plays: bool) -> bool:
        """Says whether this replica has a pass to make or, where passes span replicas, any has. Collective there."""
        if self._runtime.ep_size * self._runtime.etp_size == 1:
            return plays
        flag = torch.tensor([int(plays)], device=self._runtime.device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag.item())

    def _compute(self, item: ForwardPass) -> torch.Tensor | None:
        """Samples tokens and log-probabilities, float64 ``[2, n]`` on the host, for the leader; ``None`` elsewhere."""
        self.num_passes += 1
        with nullcontext() if self._routing is None else self._routing.reading(item):
            logits = self._policy.read(item)
        runtime, result = self._runtime, None
        if logits is not None and runtime.cp_rank == 0:
            logits = self._whole_vocabulary(logits)
            if runtime.tp_rank == 0:
                # On the host: a cumulative sum has no deterministic form on CUDA, and every device then draws alike.
                uniforms = torch.tensor(item.uniforms, dtype=torch.float64)
                result = torch.stack([value.double() for value in sample_tokens(logits.cpu(), uniforms, self._args)])
        return self._bring_to_leader(result, num_rows=len(item.tokens))

    def _whole_vocabulary(self, logits: torch.Tensor) -> torch.Tensor:
        """Gathers ``[n, V]`` from this rank's ``[n, V / tp]`` columns, -inf on forbidden tokens."""
        if self._runtime.tp_size > 1:
            parts = [torch.empty_like(logits) for _ in range(self._runtime.tp_size)]
            dist.all_gather(parts, logits.contiguous(), group=parallel_state.get_tensor_model_parallel_group())
            logits = torch.cat(parts, dim=-1)
        return logits[:, : len(self._allowed)].masked_fill(~self._allowed, -torch.inf)

    def _bring_to_leader(self, result: torch.Tensor | None, *, num_rows: int) -> torch.Tensor | None:
        """Sends the sampler's result along its pipeline to the first stage, where the leader is."""
        runtime = self._runtime
        if runtime.pp_size == 1:
            return result
        group = parallel_state.get_pipeline_model_parallel_group()
        if result is not None:
            dist.send(result.to(runtime.device), dst=dist.get_global_rank(group, 0), group=group)
            return None
        if not runtime.is_leader:
            return None
        received = torch.zeros(2, num_rows, dtype=torch.float64, device=runtime.device)
        dist.recv(received, src=dist.get_global_rank(group, runtime.pp_size - 1), group=group)
        return received.cpu()
