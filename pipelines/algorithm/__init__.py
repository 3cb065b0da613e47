"""Computes rewards, advantages and losses in pure functions: dataclasses in and out, no layout and no communication.

``docs/algorithms.md`` has every formula with its key and its source. A pipeline calls ``prepare.prepare_advantages``
for a batch, and ``losses.compute_policy_loss`` and ``value_loss.compute_value_loss`` for a micro-batch.
"""
