"""Readers of the rollout files that other frameworks write, one module for each; ``adapters.formats`` lists them."""
