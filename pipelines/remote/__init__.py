"""Training in a service: the learner of its client, and the contract between the two."""
