"""The datasets by name, with the interface of the package."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any


@dataclass(kw_only=True)
class ChainSumConfig:
    """Sums of ``min_terms`` to ``max_terms`` numbers."""

    min_terms: int = 2
    max_terms: int = 6
    min_digits: int = 1
    max_digits: int = 4
    seed: int | None = None
    size: int = 500

    def validate(self) -> None:
        """As the package does."""
        assert self.min_terms > 0, "min_terms must be positive"
        assert self.max_terms >= self.min_terms, "max_terms must be >= min_terms"


class ChainSumDataset:
    """Items that follow from seed and index."""

    def __init__(self, config: ChainSumConfig) -> None:
        self._config = config

    def __getitem__(self, index: int) -> dict[str, Any]:
        config = self._config
        rng = Random((config.seed or 0) + index)
        num_terms = rng.randint(config.min_terms, config.max_terms)
        terms = [rng.randint(1, 10 ** rng.randint(config.min_digits, config.max_digits) - 1) for _ in range(num_terms)]
        return {"question": f"{' + '.join(map(str, terms))} =", "answer": str(sum(terms)), "metadata": {}}

    def score_answer(self, answer: str | None, entry: dict[str, Any]) -> float:
        """As the package's base class does: a longer text with the answer in it gets a part."""
        oracle = entry["answer"]
        if not answer:
            return 0.0
        if answer == oracle:
            return 1.0
        return len(oracle) / len(answer) if oracle in answer else 0.0


@dataclass(kw_only=True)
class SpellBackwardConfig:
    """Words of ``min_word_len`` to ``max_word_len`` letters."""

    min_word_len: int = 3
    max_word_len: int = 10
    seed: int | None = None
    size: int = 500

    def validate(self) -> None:
        """As the package does."""
        assert self.min_word_len >= 1, "min_word_len must be at least 1"


class SpellBackwardDataset:
    """Words to be spelt backward; as most of the package's, it takes its ``seed`` anew for each item."""

    def __init__(self, config: SpellBackwardConfig) -> None:
        self._config = config
        self.seed = config.seed or 0

    def __getitem__(self, index: int) -> dict[str, Any]:
        rng = Random(self.seed + index)
        length = rng.randint(self._config.min_word_len, self._config.max_word_len)
        word = "".join(rng.choice("abc") for _ in range(length))
        return {"question": f"Spell backward: {word}", "answer": word[::-1], "metadata": {}}

    def score_answer(self, answer: str | None, entry: dict[str, Any]) -> float:
        """The part of the letters that is right."""
        right = entry["answer"]
        if answer == right:
            return 1.0
        return 0.8 * sum(a == b for a, b in zip(answer or "", right, strict=False)) / len(right)


DATASETS: dict[str, Any] = {
    "chain_sum": (ChainSumDataset, ChainSumConfig),
    "spell_backward": (SpellBackwardDataset, SpellBackwardConfig),
}


def create_dataset(name: str, **settings: Any) -> Any:
    """Makes a dataset of checked settings."""
    dataset, config_class = DATASETS[name]
    config = config_class(**settings)
    config.validate()
    return dataset(config)
