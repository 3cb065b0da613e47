"""Training internals: how a rank's piece lies in the whole tensor, and the files holding the pieces."""
