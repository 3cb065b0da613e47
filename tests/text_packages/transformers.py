"""A small stand-in for transformers: byte tokenizers like that of ``launch/make_tiny_qwen3.py``, read from their files.

A folder of tests puts it on ``PYTHONPATH``. ``tests/integrations/test_text.py`` holds it to the real package.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2.sandbox import ImmutableSandboxedEnvironment

from mock_scheduler.recording.inspection.vocabulary import Vocabulary


class ByteTokenizer:
    """A token for every byte, and special ones whose texts are one token."""

    def __init__(self, folder: Path) -> None:
        content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        self._names: dict[str, int] = content["model"]["vocab"]
        self._special = {token["content"]: token["id"] for token in content["added_tokens"]}
        self._texts = Vocabulary.from_json(content, source=str(folder))
        parts = "|".join(re.escape(text) for text in self._special)
        self._split = re.compile(f"({parts})")
        self._bytes = {self._texts._bytes(number): number for number in self._names.values()}
        self.chat_template = settings.get("chat_template")
        self.eos_token_id: int | None = self._special.get(settings.get("eos_token"))

    def __len__(self) -> int:
        return len(self._names)

    def encode(self, text: str) -> list[int]:
        """The tokens of a text."""
        parts = [part for part in self._split.split(text) if part]
        return [
            token
            for part in parts
            for token in (
                [self._special[part]]
                if part in self._special
                else [self._bytes[bytes([byte])] for byte in part.encode()]
            )
        ]

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, str]],
        *,
        add_generation_prompt: bool,
        tokenize: bool,
        return_dict: bool,
    ) -> list[int]:
        """The tokens of messages."""
        assert tokenize
        assert not return_dict
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        template = environment.from_string(self.chat_template)
        return self.encode(template.render(messages=conversation, add_generation_prompt=add_generation_prompt))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        """The text of tokens."""
        assert not skip_special_tokens
        assert not clean_up_tokenization_spaces
        return self._texts.decode(token_ids)

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str]:
        """The names of tokens."""
        names = {number: name for name, number in self._names.items()}
        return [names[number] for number in ids]


class AutoTokenizer:
    """The door of the package."""

    @staticmethod
    def from_pretrained(folder: str, **options: Any) -> ByteTokenizer:
        """The tokenizer of a folder."""
        assert options == {"local_files_only": True, "trust_remote_code": False}
        return ByteTokenizer(Path(folder))
