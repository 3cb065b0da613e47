"""Megatron-LM and Megatron-Bridge: what plays no rollouts, and is traced. ``docs/frameworks/megatron.md`` has the line
to add; its object is ``mock_scheduler.megatron.AttachCallback``."""
