"""Turns messages into tokens and sampled tokens into text, by a checkpoint's own tokenizer and chat template.

What the policy sampled is what it is trained on: it is decoded for the environment and never encoded again. Over
several turns the template's next prompt must begin with every token so far; where it does not, the first token that
differs is named, or the episode ends there (``text.on_template_break``).

Contract: importing this module, and a digest, import no tokenizer; a replay of recorded rollouts needs none.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal, Protocol

from mock_scheduler.errors import ConfigError
from mock_scheduler.support.digests import compute_json_digest
from mock_scheduler.support.foreign_files import load_json, read_bytes
from pipelines.environments.base import UNKNOWN_LENGTH, ResetResult, StepResult, compute_layout_digest

Message = Mapping[str, str]
"""``role`` and ``content``, as chat templates read them."""

OnBreak = Literal["error", "end"]

#: The files of a folder that decide which ids a text has.
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "merges.txt"),
    *("special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "chat_template.json"),
)
GENERATION_FILE = "generation_config.json"


class ChatTokenizer(Protocol):
    """The part of transformers' tokenizers that is used here."""

    eos_token_id: int | None
    chat_template: object

    def __len__(self) -> int:
        """Number of tokens."""
        ...

    def apply_chat_template(
        self, conversation: Sequence[Message], *, add_generation_prompt: bool, tokenize: bool, return_dict: bool
    ) -> list[int]:
        """Encodes messages."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        """Decodes tokens."""
        ...

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str]:
        """Names tokens as the tokenizer's file does."""
        ...


class TemplateBreak(Exception):
    """The next prompt does not begin with the tokens so far."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedTokenizer:
    """Holds a tokenizer in this process. ``end_ids``: the tokens that end a turn."""

    tokenizer: ChatTokenizer
    end_ids: frozenset[int]

    def encode_prompt(self, messages: Sequence[Message]) -> list[int]:
        """Encodes messages and the beginning of the policy's answer."""
        return self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=False
        )

    def decode(self, tokens: Sequence[int]) -> str:
        """Decodes tokens as they are, special ones too."""
        return self.tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def encode_next(self, messages: Sequence[Message], history: Sequence[int]) -> list[int]:
        """Encodes the part of a conversation after ``history``, which is never encoded again.

        Raises:
            TemplateBreak: the template's tokens of the conversation do not begin with ``history``.
        """
        prompt = self.encode_prompt(messages)
        if len(prompt) > len(history) and prompt[: len(history)] == list(history):
            return prompt[len(history) :]
        shared = next((i for i, (a, b) in enumerate(zip(history, prompt, strict=False)) if a != b), None)
        position = min(len(history), len(prompt)) if shared is None else shared
        raise TemplateBreak(
            f"the chat template's next prompt does not begin with the {len(history)} tokens so far: at token "
            f"{position} the history has {self._name(history, position)}, the prompt {self._name(prompt, position)}"
        )

    def encode_answer(self, messages: Sequence[Message], answer: str) -> list[int]:
        """Encodes an answer to messages as the template writes it, up to the token that ends it.

        Raises:
            TemplateBreak: the template changes the prompt, or ends the answer with no token that ends a turn.
        """
        prompt = self.encode_prompt(messages)
        spoken = [*messages, {"role": "assistant", "content": answer}]
        tokens = self.tokenizer.apply_chat_template(
            spoken, add_generation_prompt=False, tokenize=True, return_dict=False
        )
        if tokens[: len(prompt)] != prompt:
            raise TemplateBreak("the chat template's tokens of an answer do not begin with those of its prompt")
        end = next((i for i, token in enumerate(tokens[len(prompt) :]) if token in self.end_ids), None)
        if end is None:
            raise TemplateBreak("the chat template ends an answer with no token that ends a turn")
        return tokens[len(prompt) : len(prompt) + end + 1]

    def _name(self, tokens: Sequence[int], position: int) -> str:
        if position >= len(tokens):
            return "nothing"
        return f"{self.decode(tokens[position : position + 1])!r} ({tokens[position]})"


@dataclass(frozen=True, kw_only=True, slots=True)
class TextTokenizer:
    """The tokenizer of a folder, which is loaded where text is played. ``files_digest``: of its files.

    ``vocab_size``: the model's, which may be larger than the tokenizer's.
    """

    folder: str
    files_digest: str
    vocab_size: int
    on_break: OnBreak

    @property
    def source(self) -> str:
        """Returns the ids follow from the tokenizer's files."""
        return "tokenizer"

    @property
    def vocabulary(self) -> list[str]:
        """Returns every token as the tokenizer's file names it, by id."""
        tokenizer = self.load().tokenizer
        return [text or "" for text in tokenizer.convert_ids_to_tokens(range(len(tokenizer)))]

    @property
    def display_texts(self) -> list[str]:
        """The vocabulary; who shows it decodes its bytes."""
        return self.vocabulary

    @property
    def action_ids(self) -> list[int]:
        """No token is an action of its own; the configuration refuses ``only_action_tokens``."""
        return []

    def ends_turn(self, token: int) -> bool:
        """Says whether the token is one that ends a turn."""
        return token in self.load().end_ids

    def digest(self) -> str:
        """Digests the tokenizer's files."""
        return self.files_digest

    def load(self) -> LoadedTokenizer:
        """Loads the tokenizer, once in a process.

        Raises:
            ConfigError: transformers is not installed, or the files are no tokenizer with a chat template, or one with
                more tokens than the model.
        """
        return _load(self.folder, self.vocab_size)


def find_tokenizer(folder: str, *, vocab_size: int, on_break: OnBreak) -> TextTokenizer:
    """Finds and digests the tokenizer's files; loads nothing.

    Raises:
        ConfigError: the folder has none.
    """
    place = Path(folder).expanduser()
    try:
        files = {name: read_bytes(place / name) for name in TOKENIZER_FILES if (place / name).is_file()}
    except OSError as error:
        raise ConfigError(f"the tokenizer in {place} cannot be read: {error}") from error
    if not files:
        raise ConfigError(
            f"{place} has no tokenizer: none of {', '.join(TOKENIZER_FILES)} is there; set text.tokenizer to the "
            "folder of one"
        )
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    digest = compute_json_digest({"files": digests, "end_ids": _read_end_ids(place)})
    return TextTokenizer(folder=str(place), files_digest=digest, vocab_size=vocab_size, on_break=on_break)


def _read_end_ids(folder: Path) -> list[int]:
    """Reads the tokens by which the checkpoint ends a text; none where it does not say."""
    path = folder / GENERATION_FILE
    if not path.is_file():
        return []
    try:
        content = load_json(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} {error}") from error
    named = content.get("eos_token_id") if isinstance(content, Mapping) else None
    ids = named if isinstance(named, list) else [named]
    return sorted(token for token in ids if type(token) is int)


@cache
def _load(folder: str, vocab_size: int) -> LoadedTokenizer:
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ConfigError(
            f"rollouts of text need the package transformers for the tokenizer in {folder}, and it cannot be "
            f"imported ({error}): pip install 'mock-scheduler[text]'"
        ) from error
    try:
        tokenizer: ChatTokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # tokenizers raises bare exceptions for files that it cannot read
        raise ConfigError(f"transformers cannot read the tokenizer in {folder}: {error}") from error
    own = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    end_ids = frozenset([*own, *_read_end_ids(Path(folder))])
    if not tokenizer.chat_template:
        raise ConfigError(f"the tokenizer in {folder} has no chat template: add chat_template.jinja")
    if not end_ids:
        raise ConfigError(f"the tokenizer in {folder} names no token that ends a turn: set eos_token in its files")
    if len(tokenizer) > vocab_size:
        raise ConfigError(
            f"the tokenizer in {folder} has {len(tokenizer)} tokens, and the model {vocab_size} (model.vocab_size): "
            "give the tokenizer of the model"
        )
    return LoadedTokenizer(tokenizer=tokenizer, end_ids=end_ids)


@dataclass(frozen=True, kw_only=True, slots=True)
class TextAnswer:
    """The answer to one text. ``reply``: the next message to the policy; none where the episode is over.

    ``is_cut``: it is over by a limit, and not by its rules.
    """

    reward: float
    is_success: bool
    reply: str | None
    is_cut: bool = False


class TextEnvironment(Protocol):
    """Reads and writes text, an episode at a time."""

    def reset(self, seed: int) -> list[Message]:
        """Starts an episode; the same seed gives the same first messages."""
        ...

    def answer(self, text: str) -> TextAnswer:
        """Takes the policy's text of one turn."""
        ...

    def own_answer(self) -> str | None:
        """The text of a first turn with the right answer; ``None`` where it knows none."""
        ...


class TextTokenEnvironment:
    """Makes a text environment a token environment.

    A turn without an end token was cut, by ``max_new_tokens`` or the sequence's end: it is judged as it stands, counts
    as invalid, and an episode that it ends is truncated.
    """

    def __init__(self, environment: TextEnvironment, tokenizer: TextTokenizer) -> None:
        self._environment = environment
        self._tokenizer = tokenizer.load()
        self._on_break = tokenizer.on_break
        self._messages: list[Message] = []
        self._history: list[int] = []

    def reset(self, seed: int) -> ResetResult:
        """Starts the episode of ``seed``; its digest is of the first messages."""
        self._messages = list(self._environment.reset(seed))
        self._history = self._tokenizer.encode_prompt(self._messages)
        return ResetResult(
            observation=list(self._history),
            optimal_length=UNKNOWN_LENGTH,
            layout_digest=compute_layout_digest("\n".join(message["content"] for message in self._messages)),
        )

    def own_answer(self) -> list[int]:
        """Returns the tokens of the environment's own answer to the first messages, as the template writes them."""
        answer = self._environment.own_answer()
        if answer is None:
            raise ConfigError("the environment knows no answer of its own, which sft would train on")
        try:
            return self._tokenizer.encode_answer(self._messages, answer)
        except TemplateBreak as problem:
            raise ConfigError(f"{problem}, so sft has no tokens to train on; use another template") from problem

    def step(self, tokens: Sequence[int]) -> StepResult:
        """Gives the environment the text of a turn, and the policy the tokens of the reply."""
        has_ended = tokens[-1] in self._tokenizer.end_ids
        text = self._tokenizer.decode(tokens[:-1] if has_ended else tokens)
        answer = self._environment.answer(text)
        self._history += tokens
        observation: list[int] = []
        is_over = answer.reply is None
        is_cut = is_over and (answer.is_cut or not has_ended)
        if answer.reply is not None:
            spoken: Message = {"role": "assistant", "content": text}
            self._messages += [spoken, {"role": "user", "content": answer.reply}]
            try:
                observation = self._tokenizer.encode_next(self._messages, self._history)
            except TemplateBreak as problem:
                if self._on_break == "error":
                    raise ConfigError(
                        f"{problem}; use a template that leaves earlier turns as they are, or set "
                        "text.on_template_break=end to end such episodes there"
                    ) from problem
                is_cut = True
            self._history += observation
        return StepResult(
            observation=observation,
            reward=answer.reward,
            terminated=is_over and not is_cut,
            truncated=is_cut,
            is_valid=has_ended,
            is_success=answer.is_success,
        )

    def close(self) -> None:
        """Holds nothing open."""
