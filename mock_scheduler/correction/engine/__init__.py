"""Computes rollout correction: log-probabilities and rules in, weights, a mask and metrics out.

The way of one batch, file by file:

1. ``inputs``: the caller's tensors, padded or packed, are checked.
2. ``blocks``: the batch is cut into blocks of whole sequences that fit a processor's cache; for each block it puts 3 to
   5 together, and gives the block's weights and mask.
3. ``tokens``: a block's response tokens become one list, and tokens without a known ratio are set apart.
4. ``units``: the tokens of each turn and each sequence are found; sums, maxima and minima run over them.
5. ``measures``: rules find the units outside their bounds; log ratios become importance weights, bounded by the rules.
6. ``sequence_sums`` and ``buckets``: everything measured becomes ``states``, one row of sums per sequence.
7. ``compute``: does this for all blocks, and for verl's releases; ``compute_correction`` is its one function.
8. ``states``: rows of all micro-batches and ranks are laid side by side.
9. ``metrics`` and ``rejection_metrics``: merged states become the numbers that a run logs.
"""
