"""Training behind HTTP: the protocol of a training service, and its client."""
