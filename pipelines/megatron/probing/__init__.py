"""What a training step shows of itself: the interface that it calls, and the probe that writes a trace."""
