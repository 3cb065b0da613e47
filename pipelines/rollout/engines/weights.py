"""Writes the policy's weights for an engine, as a Hugging Face checkpoint for each policy version.

Contract: ``{output_dir}/engine/version_000003`` holds ``config.json``, the tokenizer's files where the run has them,
and all weights in one file of the engine's dtype. The last two versions are kept: the newest, and the one that an
engine which does not take it still computes with. The ranks write their parts side by side, so the folder must be one
that all of them, and the engine, see.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from mock_scheduler.adapters.huggingface.config import read_model
from mock_scheduler.adapters.huggingface.files import INDEX_FILE, SINGLE_FILE, WeightFiles
from mock_scheduler.determinism.agreement import RankGroup
from mock_scheduler.errors import EngineError
from mock_scheduler.trace.names import OUTPUT_LAYER, WORD_EMBEDDINGS
from pipelines.megatron.hf_export import describe_own, single_header, write_stored
from pipelines.megatron.hf_source import HuggingFaceSource
from pipelines.megatron.parameter_shapes import parameter_shapes
from pipelines.megatron.stored_boxes import PARAMETER_KEY, LocalTensor, StoredTensors, write_tensors
from pipelines.megatron.trainer import PolicyTrainer
from pipelines.megatron.transformer_config import DTYPES
from pipelines.rollout.engines.first_rank import on_first_rank

ENGINE_FOLDER = "engine"
_PARTS = ".parts"


class EngineWeights:
    """The weights of one policy, version by version. Every rank holds one, and calls it alike."""

    def __init__(
        self, trainer: PolicyTrainer, ranks: RankGroup, *, source: HuggingFaceSource | None, dtype: torch.dtype
    ) -> None:
        """``source``: the checkpoint that the run began with. ``dtype``: of the engine's weights.

        Raises:
            ConfigError: the model is of no kind of Hugging Face's.
        """
        config = trainer.config
        self._trainer = trainer
        self._ranks = ranks
        self._dtype = dtype
        self._stored_dtype = DTYPES[config.precision]
        self._model = config.model.model_copy(update={"vocab_size": len(trainer.allowed)})
        self._companions = (
            source or describe_own(self._model, dtype=dtype, positions=config.sequence_length)
        ).companions
        self._root = Path(config.output_dir).resolve() / ENGINE_FOLDER
        self._versions: list[int] = []

    @property
    def root(self) -> Path:
        """Returns the folder of all versions."""
        return self._root

    @property
    def earlier(self) -> list[int]:
        """The versions before the newest that are still there."""
        return self._versions[:-1]

    @property
    def newest(self) -> int:
        """Returns the version written last."""
        return self._versions[-1]

    @property
    def has_tied_head(self) -> bool:
        """Whether the output head is the embedding."""
        return not self._model.untie_embeddings_and_output_weights

    def folder(self, version: int) -> Path:
        """Names the folder of a version."""
        return self._root / f"version_{version:06d}"

    def write(self, version: int) -> Path:
        """Writes the present weights, as they are on the ranks, and removes what is no longer needed. Collective."""
        policy = self._trainer.policy
        policy.gather_parameters()
        tensors = [
            LocalTensor(key=f"{PARAMETER_KEY}/{local.spec.name}", spec=local.spec, tensor=local.parameter)
            for local in policy.parameters()
        ]
        parts = self._root / _PARTS
        # Left by a run that ended while it wrote, and of other ranks.
        on_first_rank(self._ranks, lambda: shutil.rmtree(parts, ignore_errors=True))
        write_tensors(parts, tensors, self._ranks)
        self._ranks.gather(b"")  # every rank's file is on the disk
        on_first_rank(self._ranks, lambda: self._assemble(parts, version))
        self._versions = [*self._versions[-1:], version]
        return self.folder(version)

    def _assemble(self, parts: Path, version: int) -> None:
        folder = self.folder(version)
        try:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            for name, content in self._companions.items():
                if name != INDEX_FILE:  # of other files than the one below
                    (folder / name).write_bytes(content)
            header = single_header(read_model(folder), self._dtype)
            with StoredTensors(sorted(parts.glob("*.safetensors"))) as stored:
                write_stored(folder, {SINGLE_FILE: header}, stored, self._stored_dtype)
            shutil.rmtree(parts)
            kept = {folder, *(self.folder(earlier) for earlier in self._versions[-1:])}
            for other in self._root.glob("version_*"):
                if other not in kept:
                    shutil.rmtree(other)
        except OSError as error:
            raise EngineError(f"the engine's weights cannot be written to {folder}: {error}") from error

    def read_head(self, version: int) -> torch.Tensor | None:
        """Reads this rank's part of the output head of a version; ``None`` off the last stage."""
        if not self._trainer.runtime.is_last_stage:
            return None
        name = WORD_EMBEDDINGS if self.has_tied_head else OUTPUT_LAYER
        spec = next(local.spec for local in self._trainer.policy.parameters() if local.spec.name == name)
        folder = self.folder(version)
        shapes = parameter_shapes(self._model, vocab_size=int(self._model.vocab_size or 0), sequence_length=0)
        with WeightFiles.find(folder, read_model(folder), lambda: shapes) as files:
            return files.read(spec, name)
