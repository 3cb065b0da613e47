"""Hugging Face checkpoints: their configuration, names of tensors and files (``docs/huggingface.md``)."""
