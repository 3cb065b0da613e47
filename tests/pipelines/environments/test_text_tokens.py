"""Text becomes tokens once and never again: prompts, ends of turns, replies, and templates that change the past."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from launch import make_tiny_qwen3
from mock_scheduler.errors import ConfigError
from pipelines.environments import text_tokens
from pipelines.environments.base import StepResult
from pipelines.environments.text_tokens import (
    GENERATION_FILE,
    LoadedTokenizer,
    Message,
    OnBreak,
    TemplateBreak,
    TextAnswer,
    TextTokenEnvironment,
    TextTokenizer,
    find_tokenizer,
)

PACKAGES = Path(__file__).parents[2] / "text_packages"
SPECIAL = {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2}
END = 2


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files of the tiny checkpoint's tokenizer, with the stand-in for transformers on the path."""
    place = tmp_path / "tiny"
    place.mkdir()
    config = make_tiny_qwen3.make_config(num_layers=1, hidden=64, is_tied=False)
    settings = {"eos_token": "<|im_end|>", "chat_template": make_tiny_qwen3._TEMPLATE}
    for name, content in (
        ("tokenizer.json", make_tiny_qwen3.make_tokenizer()),
        ("tokenizer_config.json", settings),
        ("config.json", config),
    ):
        (place / name).write_text(json.dumps(content), encoding="utf-8")
    monkeypatch.syspath_prepend(str(PACKAGES))
    monkeypatch.delitem(sys.modules, "transformers", raising=False)
    text_tokens._load.cache_clear()
    return place


def find(folder: Path, on_break: OnBreak = "error", vocab_size: int = 259) -> TextTokenizer:
    return find_tokenizer(str(folder), vocab_size=vocab_size, on_break=on_break)


def encode(folder: Path, text: str) -> list[int]:
    return find(folder).load().tokenizer.encode(text)  # type: ignore[attr-defined]


class Echo:
    """Asks for a word, and answers what it heard; over after ``num_turns``."""

    def __init__(self, num_turns: int) -> None:
        self.num_turns = num_turns
        self.heard: list[str] = []

    def reset(self, seed: int) -> list[Message]:
        return [{"role": "user", "content": f"word {seed}?"}]

    def answer(self, text: str) -> TextAnswer:
        self.heard.append(text)
        is_over = len(self.heard) >= self.num_turns
        return TextAnswer(reward=float(len(text)), is_success=text == "yes", reply=None if is_over else f"not {text}")


PROMPT = "<|im_start|>user\nword 7?<|im_end|>\n<|im_start|>assistant\n"


def test_a_prompt_is_the_chat_template_of_the_checkpoint(folder: Path) -> None:
    start = TextTokenEnvironment(Echo(1), find(folder)).reset(7)
    assert start.observation == encode(folder, PROMPT)
    assert start.observation[:2] == [1, encode(folder, "u")[0]]
    assert len(start.layout_digest) == 16
    assert start.optimal_length == -1


def test_the_text_of_a_turn_is_what_was_sampled_without_its_end(folder: Path) -> None:
    echo = Echo(1)
    environment = TextTokenEnvironment(echo, find(folder))
    environment.reset(7)
    result = environment.step([*encode(folder, "yes"), END])
    assert echo.heard == ["yes"]
    assert result == StepResult(
        observation=[], reward=3.0, terminated=True, truncated=False, is_valid=True, is_success=True
    )


def test_a_turn_without_an_end_is_judged_and_truncated(folder: Path) -> None:
    environment = TextTokenEnvironment(Echo(1), find(folder))
    environment.reset(7)
    result = environment.step(encode(folder, "ye"))
    assert (result.reward, result.terminated, result.truncated, result.is_valid) == (2.0, False, True, False)


@pytest.mark.parametrize(("is_ended", "between"), [(True, "\n"), (False, "<|im_end|>\n")])
def test_a_reply_follows_the_sampled_tokens(folder: Path, is_ended: bool, between: str) -> None:
    """Also behind a cut turn, to which the template adds the end that was not sampled."""
    environment = TextTokenEnvironment(Echo(2), find(folder))
    environment.reset(7)
    result = environment.step([*encode(folder, "no"), *[END] * is_ended])
    reply = f"{between}<|im_start|>user\nnot no<|im_end|>\n<|im_start|>assistant\n"
    assert result.observation == encode(folder, reply)
    assert (result.terminated, result.truncated) == (False, False)


def test_a_turn_that_its_text_does_not_give_back_is_named_with_both_tokens(folder: Path) -> None:
    """Half of a letter is U+FFFD as text, which is three other bytes: encoded again, it would be other tokens."""
    environment = TextTokenEnvironment(Echo(2), find(folder))
    environment.reset(7)
    half = encode(folder, "ä")[:1]
    position = len(encode(folder, PROMPT)) + 1
    there = encode(folder, "\N{REPLACEMENT CHARACTER}")[0]
    size = position + 2
    message = (
        rf"does not begin with the {size} tokens so far: at token {position} the history has '\ufffd' \({half[0]}\), "
        rf"the prompt '\ufffd' \({there}\); use a template that leaves earlier turns"
    )
    with pytest.raises(ConfigError, match=message):
        environment.step([*encode(folder, "a"), *half, END])


def test_a_template_that_changes_the_past_may_end_the_episode(folder: Path) -> None:
    environment = TextTokenEnvironment(Echo(2), find(folder, "end"))
    environment.reset(7)
    result = environment.step([*encode(folder, "ä")[:1], END])
    assert (result.observation, result.reward) == ([], 1.0)
    assert (result.terminated, result.truncated, result.is_valid) == (False, True, True)


class Forgetful:
    """A tokenizer with a template that leaves thoughts of earlier turns out, as Qwen3's does."""

    eos_token_id, chat_template = 0, "own"

    def __len__(self) -> int:
        return 1000

    def apply_chat_template(
        self, conversation: Sequence[Message], *, add_generation_prompt: bool, tokenize: bool, return_dict: bool
    ) -> list[int]:
        text = "|".join(message["content"].rpartition("/")[2] for message in conversation)
        return [ord(letter) for letter in f"{text}>"]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        return "".join(map(chr, token_ids))

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str]:
        return [chr(number) for number in ids]


def test_the_first_token_that_a_template_changes_is_named() -> None:
    loaded = LoadedTokenizer(tokenizer=Forgetful(), end_ids=frozenset({0}))
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "t/a"}]
    with pytest.raises(TemplateBreak, match=r"at token 1 the history has '>' \(62\), the prompt '\|' \(124\)"):
        loaded.encode_next(messages, [ord(letter) for letter in "q>t/a"])
    with pytest.raises(TemplateBreak, match=r"at token 2 the history has '!' \(33\), the prompt nothing"):
        loaded.encode_next(messages[:1], [ord(letter) for letter in "q>!"])
    assert loaded.encode_next(messages, [ord("q")]) == [ord(letter) for letter in "|a>"]


def test_the_digest_is_of_the_files_and_of_the_ends(folder: Path) -> None:
    before = find(folder).digest()
    assert find(folder).digest() == before
    moved = folder.rename(folder.parent / "moved")
    assert find(moved).digest() == before
    (moved / "config.json").write_text("{}", encoding="utf-8")
    assert find(moved).digest() == before
    (moved / GENERATION_FILE).write_text('{"eos_token_id": [0, 2], "temperature": 1}', encoding="utf-8")
    with_ends = find(moved).digest()
    assert with_ends != before
    settings = moved / "tokenizer_config.json"
    settings.write_text(settings.read_text(encoding="utf-8").replace("assistant", "helper"), encoding="utf-8")
    assert find(moved).digest() not in (before, with_ends)


def test_a_checkpoint_may_end_texts_by_several_tokens(folder: Path) -> None:
    assert [token for token in range(259) if find(folder).ends_turn(token)] == [2]
    (folder / GENERATION_FILE).write_text('{"eos_token_id": [0, 2]}', encoding="utf-8")
    text_tokens._load.cache_clear()
    assert [token for token in range(259) if find(folder).ends_turn(token)] == [0, 2]


def test_the_vocabulary_is_the_files(folder: Path) -> None:
    vocabulary = find(folder).vocabulary
    assert (len(vocabulary), vocabulary[:3], vocabulary[encode(folder, " ")[0]]) == (259, list(SPECIAL), "Ġ")


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no tokenizer: none of tokenizer.json, .* is there; set text.tokenizer"):
        find(tmp_path)


def test_without_transformers_the_extra_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    tokenizer = find(folder)
    assert len(tokenizer.digest()) == 64  # needs no package
    with pytest.raises(ConfigError, match=r"need the package transformers .*: pip install 'mock-scheduler\[text\]'"):
        tokenizer.load()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"eos_token": "<|im_end|>"}, "has no chat template"),
        ({"chat_template": "x"}, "names no token that ends a turn"),
        ("not JSON", "transformers cannot read the tokenizer in"),
    ],
)
def test_an_unfit_tokenizer_is_refused(folder: Path, settings: dict[str, str] | str, message: str) -> None:
    text = settings if isinstance(settings, str) else json.dumps(settings)
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        find(folder).load()


def test_a_tokenizer_that_is_larger_than_the_model_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"has 259 tokens, and the model 258 \(model.vocab_size\)"):
        find(folder, vocab_size=258).load()
    assert dataclasses.replace(find(folder), vocab_size=300).load().end_ids == {END}
