"""Token ids read as texts, in every form in which a vocabulary comes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mock_scheduler.errors import ConfigError
from mock_scheduler.recording.inspection.vocabulary import Vocabulary

EXPECTED = (
    'expected a JSON list of texts, an object {"id": "text"} or {"text": id}, or a tokenizer.json of Hugging Face'
)


@pytest.mark.parametrize(
    "value", [["<pad>", "go", "Left"], {"0": "<pad>", "1": "go", "2": "Left"}, {"<pad>": 0, "go": 1, "Left": 2}]
)
def test_lists_and_mappings_both_ways_are_read(value: object, tmp_path: Path) -> None:
    path = tmp_path / "vocabulary.json"
    path.write_text(json.dumps(value), encoding="utf-8")
    assert Vocabulary.load(path).decode([1, 2, 17, 1]) == "go Left <17> go"


def test_texts_with_spaces_of_their_own_are_joined_as_they_are() -> None:
    assert Vocabulary(texts={0: "The", 1: " cat", 2: "\n"}).decode([0, 1, 2, 1]) == "The cat\n cat"


def test_byte_level_texts_are_decoded_across_tokens() -> None:
    """UTF-8 of ``é`` is C3 A9, which GPT-2 writes ``Ã`` and ``©``; special tokens stand as they are."""
    tokenizer = {
        "model": {"type": "BPE", "vocab": {"caf": 0, "Ã": 1, "©": 2, "Ġau": 3, "Ċ": 4}},
        "added_tokens": [{"id": 5, "content": "<|im_end|>é"}],
    }
    vocabulary = Vocabulary.from_json(tokenizer, source="tokenizer.json")
    assert vocabulary.decode([0, 1, 2, 3, 4, 5]) == "café au\n<|im_end|>é"
    assert vocabulary.decode([1]) == "\N{REPLACEMENT CHARACTER}"


def test_sentencepiece_texts_are_decoded() -> None:
    assert Vocabulary(texts={0: "▁The", 1: "▁c", 2: "at"}).decode([0, 1, 2]) == " The cat"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1); " + EXPECTED),
        ("7", "is no vocabulary: " + EXPECTED),
        ('{"' + "9" * 5000 + '": "a"}', "is no vocabulary: " + EXPECTED),
        (
            '{"model": {"vocab": {}}, "added_tokens": [{"id": 1}, {"content": "a"}]}',
            ": 1 texts have no id, the first: 'a' is None; " + EXPECTED,
        ),
        ('{"a": "b"}', "is no vocabulary: " + EXPECTED),
        ('["a", 7, null]', ": 2 ids have no text, the first: 1 is 7; " + EXPECTED),
        ('{"model": {"type": "x"}}', "is a tokenizer without model.vocab: " + EXPECTED),
        ('{"model": {"vocab": {"a": "b"}}}', ": 1 texts have no id, the first: 'a' is 'b'; " + EXPECTED),
    ],
)
def test_what_is_no_vocabulary_is_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "v.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        Vocabulary.load(path)
    assert str(caught.value) == f"vocabulary {path}{'' if message.startswith(':') else ' '}{message}"


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^vocabulary .*/gone.json cannot be read: No such file or directory$"):
        Vocabulary.load(tmp_path / "gone.json")
