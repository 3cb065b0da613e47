"""What micro-batches are, where a step's rows go in them, and the check that they hold the batch and nothing else."""
