"""Follows a layout's order of products, sums and accumulators in one process, without any of its communication."""
