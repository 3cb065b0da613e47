"""Training behind HTTP: what a client sends to a training service, and what it gets back."""
