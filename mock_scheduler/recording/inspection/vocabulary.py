"""Gives the text of token ids: a vocabulary from a file or from a recording's manifest.

Contract: an id without a text reads as ``<17>``; a file that is no vocabulary is an error. Where the texts are those of
a byte-level BPE tokenizer (GPT-2, Qwen, Llama 3) or of SentencePiece, they are decoded as it does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mock_scheduler.errors import ConfigError
from mock_scheduler.support.digests import JSON
from mock_scheduler.support.foreign_files import describe_failure, load_json
from mock_scheduler.support.text import MAX_DIGITS

_EXPECTED = (
    'expected a JSON list of texts, an object {"id": "text"} or {"text": id}, or a tokenizer.json of Hugging Face'
)
_BYTE_LEVEL_SPACE, _SENTENCEPIECE_SPACE = "Ġ", "▁"


def _byte_of_char() -> dict[str, int]:
    """Returns the inverse of GPT-2's ``bytes_to_unicode`` (openai/gpt-2, src/encoder.py)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_of_char()


@dataclass(frozen=True, kw_only=True, slots=True)
class Vocabulary:
    """Texts by token id; ``special``: ids whose texts stand as they are, whatever the tokenizer's encoding."""

    texts: Mapping[int, str]
    special: frozenset[int] = frozenset()
    _space: str = field(init=False)

    def __post_init__(self) -> None:
        marks = [mark for mark in (_BYTE_LEVEL_SPACE, _SENTENCEPIECE_SPACE, " ") if self._has(mark)]
        object.__setattr__(self, "_space", marks[0] if marks else "")

    @classmethod
    def load(cls, path: Path) -> Vocabulary:
        """Read a JSON file; raises ``ConfigError`` where it is missing or no vocabulary."""
        try:
            value = load_json(path)
        except OSError as error:
            raise ConfigError(f"vocabulary {describe_failure(error, path)}") from error
        except ValueError as error:
            raise ConfigError(f"vocabulary {path} {error}; {_EXPECTED}") from error
        return cls.from_json(value, source=f"vocabulary {path}")

    @classmethod
    def from_json(cls, value: JSON, *, source: str) -> Vocabulary:
        """The vocabulary in any of the forms above; ``source`` names it in the ``ConfigError`` where it is none."""
        if isinstance(value, Mapping) and isinstance(value.get("model"), Mapping):
            return cls._from_tokenizer(value, source)
        if isinstance(value, Sequence) and not isinstance(value, str):
            return cls(texts=_checked(dict(enumerate(value)), source))
        if isinstance(value, Mapping) and value and all(type(item) is int for item in value.values()):
            return cls(texts=_inverted(value, source))
        if isinstance(value, Mapping) and all(map(_is_id, value)):
            return cls(texts=_checked({int(key): item for key, item in value.items()}, source))
        raise ConfigError(f"{source} is no vocabulary: {_EXPECTED}")

    @classmethod
    def _from_tokenizer(cls, value: Mapping[str, JSON], source: str) -> Vocabulary:
        model, added = value["model"], value.get("added_tokens", [])
        vocab = model.get("vocab") if isinstance(model, Mapping) else None
        if not isinstance(vocab, Mapping) or not isinstance(added, Sequence):
            raise ConfigError(f"{source} is a tokenizer without model.vocab: {_EXPECTED}")
        named = [item for item in added if isinstance(item, Mapping) and isinstance(item.get("content"), str)]
        special = {str(item["content"]): item.get("id") for item in named}
        texts = _inverted(vocab, source) | _inverted({str(text): id_ for text, id_ in special.items()}, source)
        return cls(texts=texts, special=frozenset(id_ for id_ in special.values() if isinstance(id_, int)))

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of the given tokens; a space parts words where the vocabulary has no spacing of its own."""
        if self._space == _BYTE_LEVEL_SPACE:
            return b"".join(self._bytes(token_id) for token_id in token_ids).decode(errors="replace")
        text = ("" if self._space else " ").join(self._text(token_id) for token_id in token_ids)
        return text.replace(_SENTENCEPIECE_SPACE, " ") if self._space == _SENTENCEPIECE_SPACE else text

    def _has(self, char: str) -> bool:
        return any(char in text for text in self.texts.values())

    def _text(self, token_id: int) -> str:
        return self.texts.get(token_id, f"<{token_id}>")

    def _bytes(self, token_id: int) -> bytes:
        text = self._text(token_id)
        if token_id in self.special or not all(char in _BYTE_OF_CHAR for char in text):
            return text.encode(errors="replace")  # a lone surrogate has no UTF-8
        return bytes(_BYTE_OF_CHAR[char] for char in text)


def _is_id(key: str) -> bool:
    return key.isascii() and key.isdigit() and len(key) <= MAX_DIGITS


def _checked(texts: Mapping[int, JSON], source: str) -> dict[int, str]:
    wrong = [f"{token_id} is {text!r}" for token_id, text in texts.items() if not isinstance(text, str)]
    if wrong:
        raise ConfigError(f"{source}: {len(wrong)} ids have no text, the first: {wrong[0]}; {_EXPECTED}")
    return {token_id: str(text) for token_id, text in texts.items()}


def _inverted(ids: Mapping[str, JSON], source: str) -> dict[int, str]:
    wrong = [f"{text!r} is {token_id!r}" for text, token_id in ids.items() if type(token_id) is not int]
    if wrong:
        raise ConfigError(f"{source}: {len(wrong)} texts have no id, the first: {wrong[0]}; {_EXPECTED}")
    return {token_id: text for text, token_id in ids.items() if isinstance(token_id, int)}
