"""Tells the Hugging Face weights that a run begins with, and keeps in its checkpoints what writing them back needs.

Contract: ``{checkpoint}/huggingface`` has the small files of the folder of ``model.hf_checkpoint`` as they are
(configuration, tokenizer, index) and ``source.json``: the digest of the weights and the header of each weight file.
The digest covers name, dtype, shape and every byte of every tensor, and not their distribution over files. The ranks of
a machine share the reading out, and all machines must find the same.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mock_scheduler.adapters.huggingface.config import CONFIG_FILE, read_model
from mock_scheduler.adapters.huggingface.files import INDEX_FILE, WeightFiles
from mock_scheduler.determinism.agreement import RankGroup
from mock_scheduler.errors import ConfigError
from mock_scheduler.support.digests import JSON, compute_json_digest
from mock_scheduler.support.files import encode_json, load_json_object
from mock_scheduler.support.foreign_files import read_bytes
from pipelines.config.model import ModelConfig
from pipelines.megatron.file_seals import FileSeal, write_sealed
from pipelines.megatron.parameter_shapes import parameter_shapes

SOURCE_FOLDER = "huggingface"
SOURCE_FILE = "source.json"

#: The small files of a folder that are kept: what transformers and engines read beside the weights.
COMPANIONS = (
    *(CONFIG_FILE, INDEX_FILE, "generation_config.json"),
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "merges.txt"),
    *("special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "chat_template.json"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class HuggingFaceSource:
    """The Hugging Face checkpoint that a run begins with.

    ``digest``: of its weights. ``headers``: the text of each weight file's header. ``companions``: its small files.
    """

    digest: str
    headers: Mapping[str, str]
    companions: Mapping[str, bytes]


def find_weight_files(model: ModelConfig) -> WeightFiles:
    """Finds the files of ``model.hf_checkpoint`` and checks the name and shape of every tensor; reads no value.

    Raises:
        ConfigError: with everything that is not as the model needs it.
    """
    folder = Path(str(model.hf_checkpoint)).expanduser()
    return WeightFiles.find(
        folder,
        read_model(folder),
        lambda: parameter_shapes(model, vocab_size=int(model.vocab_size or 0), sequence_length=0),
    )


def read_source(model: ModelConfig, ranks: RankGroup) -> HuggingFaceSource | None:
    """Reads every byte of the weights once on each machine; ``None`` without ``model.hf_checkpoint``. Collective.

    Raises:
        ConfigError: the files do not hold the model, or are others on another machine.
    """
    if model.hf_checkpoint is None:
        return None
    folder = Path(model.hf_checkpoint).expanduser()
    with find_weight_files(model) as files:
        names = sorted(files.places)
        local_rank, num_local = (int(os.environ.get(name, one)) for name, one in _LOCAL)
        own = {name: files.digest(name) for name in names[local_rank::num_local]}
        tensors: list[JSON] = [[name, *files.describe(name), digest] for name, digest in _merge(own, ranks).items()]
        headers = {name: header.text for name, header in files.headers.items()}
    try:
        companions = {name: read_bytes(folder / name) for name in COMPANIONS if (folder / name).is_file()}
    except OSError as error:
        raise ConfigError(f"model.hf_checkpoint: {folder} cannot be read: {error}") from error
    return HuggingFaceSource(digest=compute_json_digest(tensors), headers=headers, companions=companions)


_LOCAL = (("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "1"))


def _merge(own: Mapping[str, str], ranks: RankGroup) -> dict[str, str]:
    """Puts the digests of all ranks together, by the names of tensors."""
    merged: dict[str, str] = {}
    different = set()
    for part in ranks.gather(json.dumps(own).encode()):
        for name, digest in json.loads(part).items():
            if merged.setdefault(name, digest) != digest:
                different.add(name)
    if different:
        raise ConfigError(
            f"model.hf_checkpoint: the machines of this run have other values of {len(different)} tensors, the first "
            f"is {min(different)}; copy the same checkpoint to each of them"
        )
    return dict(sorted(merged.items()))


def write_source(folder: Path, source: HuggingFaceSource) -> dict[str, FileSeal]:
    """Writes the files into a checkpoint; returns their seals by their names in it. One rank calls it."""
    document = encode_json({"digest": source.digest, "headers": dict(source.headers)}, sort_keys=False)
    files = {**source.companions, SOURCE_FILE: document}
    return {
        f"{SOURCE_FOLDER}/{name}": write_sealed(folder / SOURCE_FOLDER / name, [content])
        for name, content in files.items()
    }


def check_source(folder: Path, files: Mapping[str, FileSeal], source: HuggingFaceSource | None) -> None:
    """Refuses to go on with other initial weights than the checkpoint's run had: its reference policy has them.

    Raises:
        ConfigError: with both.
    """
    stored = read_stored_source(folder, files)
    then, now = (None if one is None else one.digest for one in (stored, source))
    if then != now:
        raise ConfigError(
            f"resume_from_checkpoint: {folder} is of a run whose model.hf_checkpoint had weights of digest {then}; "
            f"this run's have {now}. The reference policy follows from them: give the same checkpoint"
        )


def read_stored_source(folder: Path, files: Mapping[str, FileSeal]) -> HuggingFaceSource | None:
    """Reads the files of ``write_source``; ``None`` where the run did not begin with a checkpoint of Hugging Face's.

    Raises:
        ConfigError: the file is not one of ``write_source``'s.
    """
    if f"{SOURCE_FOLDER}/{SOURCE_FILE}" not in files:
        return None
    path = folder / SOURCE_FOLDER / SOURCE_FILE
    try:
        content = load_json_object(path, inside=folder)
        if not isinstance(content.get("digest"), str) or not isinstance(content.get("headers"), dict):
            raise ValueError("has no digest and headers")
        # Sealed files alone: another one in the folder is not the checkpoint's.
        kept = [name for name in COMPANIONS if f"{SOURCE_FOLDER}/{name}" in files]
        companions = {name: read_bytes(path.parent / name, inside=folder) for name in kept}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} {error}") from error
    return HuggingFaceSource(digest=content["digest"], headers=content["headers"], companions=companions)
