"""Other frameworks' batches, recordings and configurations, converted to ours and back."""
